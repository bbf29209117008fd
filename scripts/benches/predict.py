"""Prediction on image files: `predict_files` against a plain loop over single images."""

import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from toolkit.models import build_detector
from toolkit.tools.predict.predict_each import predict_files
from toolkit.tools.predict.predictor import Predictor, own_predict

from .measuring import row, seconds


def bench_predict(images: int = 48, side: int = 640, size: int = 256, rounds: int = 5) -> list[dict]:
    """Measure images/s of an SSD on JPEG files of `side` pixels, resized to `size`, with both, their ratio, and the
    largest difference of a score."""
    torch.manual_seed(0)
    levels = {"strides": [16, 32, -1], "channels": [64] * 3, "aspect_ratios": [[2]] * 3}
    detector = build_detector("ssd", class_names=["a", "b"], backbone="lcnet_050", **levels).eval()
    predictor = Predictor("bench", [], own_predict(detector, {"height": size, "width": size}))
    with tempfile.TemporaryDirectory() as folder:
        paths = _write_images(Path(folder), images, side)

        def ours() -> dict:
            return {each.key: each.detections["scores"] for each in predict_files(predictor, paths)}

        def plain() -> dict:
            return _plain_loop(detector, paths, size)

        times = [(seconds(ours), seconds(plain)) for _ in range(rounds)]
        actual = ours()
        expected = plain()
    speed = [images / statistics.median(durations) for durations in zip(*times, strict=True)]
    ratio = statistics.median(b / a for a, b in times)
    return [
        row("prediction, ours", speed[0], "images/s"),
        row("prediction, plain loop", speed[1], "images/s"),
        row("prediction, ours / plain", ratio, "x"),
        row("prediction, largest difference of a score", max(_apart(actual[p], expected[p]) for p in paths), ""),
    ]


@torch.no_grad()
def _plain_loop(detector, paths: list[Path], size: int) -> dict:
    from torchvision.io import decode_jpeg, read_file
    from torchvision.transforms.v2.functional import resize

    scores = {}
    sizes = torch.tensor([[size, size]])
    for path in paths:
        image = decode_jpeg(read_file(str(path)))
        orig = torch.tensor([image.shape[-2:]])
        outputs = detector(resize(image, [size, size], antialias=True)[None], sizes)
        scores[path] = detector.postprocess(outputs, sizes, orig, 0.3, 300)[0]["scores"]
    return scores


def _apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    count = min(len(actual), len(expected))
    return float((actual[:count] - expected[:count]).abs().max()) if count else 0.0


def _write_images(folder: Path, count: int, side: int) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        paths.append(folder / f"{i:03d}.jpg")
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths
