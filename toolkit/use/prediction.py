"""A detector from wherever it is kept, and what it finds in image files: for scripts/predict.py and notebooks."""

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit.data.batches import collate
from toolkit.data.decoding import IMAGE_SUFFIXES, ImageError, decode_image, probe_image
from toolkit.data.pipeline import processor_size
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import resize, shorter_side_size
from toolkit.errors import BadInput
from toolkit.evaluation.detections import best_first
from toolkit.models.final import load_detector_folder
from toolkit.offline import cached_when_offline
from toolkit.runs.open_run import chosen_weights, open_run
from toolkit.use.rebuild import load_detector

MAX_DETECTIONS = 300  # of one image; the number of queries of the DETR family
Found = dict[str, Tensor]


@dataclass
class Predictor:
    """A detector in evaluation mode with all that belongs to it.

    source: where it came from, in words.
    categories: classes in the order of the labels, with the ids that the training data gave them.
    predict: `(images uint8 (3, H, W) RGB of any sizes, score_threshold)` -> one dict per image, on the CPU: `boxes
        (K, 4)` float32 xyxy in pixels of that image, as the detector gives them (transformers clips nothing); `scores
        (K,)` above the threshold, best first; `labels (K,)` int64; of scene graphs also `pairs (P, 2)` of positions in
        `boxes`, `predicates (P,)` and `triplet_scores (P,)`, best first, and `attribute_scores (K, attributes)` if the
        model tells any. What is found in an image does not depend on
        the images beside it: batches are made of images of one size, so none is padded to the size of another.
    predicates, attributes: names, of scene graphs.
    """

    source: str
    categories: list[Category]
    predict: Callable[[Sequence[Tensor], float], list[Found]]
    predicates: Sequence[str] = ()
    attributes: Sequence[str] = ()

    @property
    def class_names(self) -> list[str]:
        return [category.name for category in self.categories]


def open_predictor(source: str | Path, weights: str | None = None, device: torch.device | str = "cpu") -> Predictor:
    """The detector of a run folder, a checkpoint, a `final/` folder, or any detection model of transformers.

    Args:
        source: run folder (its best checkpoint) or checkpoint; folder saved by `save_final`; folder or hub name of a
            transformers model.
        weights: "model" or "ema", of a run; None: those that the run's metric for best goes by, as in `final/`.

    Raises:
        BadInput: nothing of all this is there, or it cannot be loaded.
    """
    own = open_own_detector(source, weights)
    if own is None:
        return _open_transformers(source, device)
    names = (getattr(own.detector, kind, ()) for kind in ("predicates", "attributes"))
    return Predictor(own.source, own.categories, _own_predict(own.detector.to(device), own.size), *names)


class OwnDetector(NamedTuple):
    """detector: in evaluation mode, on the CPU; size: what images are resized to, as in `input_hw`."""

    source: str
    detector: nn.Module
    categories: list[Category]
    size: dict[str, int] | None


def open_own_detector(source: str | Path, weights: str | None = None) -> OwnDetector | None:
    """As `open_predictor`, for detectors built by this project; None: `source` is a model of transformers, if any."""
    path = Path(source).expanduser()
    config = _config_of(path)
    if config is None and path.exists():
        run = open_run(path)
        name, data = chosen_weights(run, weights), run.config["data"]
        size = processor_size(data["image_size"], data["scales"], data["max_size"])
        return OwnDetector(f"{run.checkpoint.path} ({name} weights)", load_detector(run, name), run.categories, size)
    if weights is not None:
        raise BadInput(f"--weights {weights}: only a run has several; {source} is no run folder or checkpoint")
    if config is not None and "model_type" not in config:
        return OwnDetector(str(path), *load_detector_folder(path))
    return None


def _config_of(path: Path) -> dict | None:
    """config.json of a folder with a whole model in it; None: there is none."""
    try:
        return json.loads((path / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path / 'config.json'}: cannot be read: {error}") from error


# ---- the two kinds of detectors --------------------------------------------------------------------------------------


def _own_predict(detector: nn.Module, size: Mapping[str, int] | None):
    @torch.no_grad()
    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Found]:
        device = next(detector.parameters()).device
        no_boxes = {"boxes": torch.zeros(0, 4), "area": torch.zeros(0)}
        resized = [resize(image, no_boxes, input_hw(_hw(image), size))[0] for image in images]
        found = [{}] * len(images)
        for group in _of_one_shape(resized):
            batch = collate([(resized[i], {}) for i in group], detector.stride).to(device)
            orig_sizes = torch.tensor([_hw(images[i]) for i in group], device=device)
            outputs = detector(batch.images, batch.sizes)
            of_group = detector.postprocess(outputs, batch.sizes, orig_sizes, score_threshold, MAX_DETECTIONS)
            for i, each in zip(group, of_group, strict=True):
                found[i] = best_first(each)
        return found

    return predict


def _open_transformers(source: str | Path, device: torch.device | str) -> Predictor:
    from transformers import AutoImageProcessor, AutoModelForObjectDetection
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # of reading the weights: a blink
    path = Path(source).expanduser()
    name = str(path) if path.exists() else str(source)
    try:
        with cached_when_offline():
            processor = AutoImageProcessor.from_pretrained(name)
            model = AutoModelForObjectDetection.from_pretrained(name).eval().to(device)
    except (OSError, ValueError) as error:  # not there, offline, or no detector
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(
            f"{source}: neither a run folder, a checkpoint, a final/ folder nor a detection model that transformers "
            f"loads ({reason}); give a folder that exists, or the hub name of a model and a connection to fetch it."
        ) from error
    names, ids = model.config.id2label, path / "categories.json"
    categories = [Category(label, names.get(label, f"label {label}")) for label in range(max(names) + 1)]
    if ids.is_file():  # a final/ folder of ours
        categories = [Category(entry["id"], entry["name"]) for entry in json.loads(ids.read_text())]

    @torch.no_grad()
    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Found]:
        inputs = [processor(images=[image], return_tensors="pt", input_data_format="channels_first").to(device)
                  for image in images]  # fmt: skip
        found = [{}] * len(images)
        for group in _of_one_shape([each["pixel_values"] for each in inputs]):
            joined = {key: torch.cat([inputs[i][key] for i in group]) for key in inputs[group[0]]}
            sizes = torch.tensor([_hw(images[i]) for i in group], device=device)
            of_group = processor.post_process_object_detection(model(**joined), score_threshold, target_sizes=sizes)
            for i, each in zip(group, of_group, strict=True):
                found[i] = best_first(each)
        return found

    return Predictor(str(source), categories, predict)


def input_hw(size_hw: tuple[int, int], size: Mapping[str, int] | None) -> tuple[int, int]:
    """The (h, w) that an image of `size_hw` is resized to; `size` as in `toolkit.data.pipeline.processor_size`."""
    if size is None:
        return size_hw
    if "shortest_edge" in size:
        return shorter_side_size(size_hw, size["shortest_edge"], size.get("longest_edge"))
    return size["height"], size["width"]


def _hw(image: Tensor) -> tuple[int, int]:
    return tuple(image.shape[-2:])


def _of_one_shape(tensors: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[torch.Size, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.shape, []).append(i)
    return list(groups.values())


# ---- files -----------------------------------------------------------------------------------------------------------


class FilePrediction(NamedTuple):
    """An image file: `image` uint8 (3, H, W) and what was `found` in it, or the `error` why it cannot be read."""

    path: Path
    image: Tensor | None
    found: Found | None
    error: str | None


def find_images(given: Sequence[str | Path], leave_out: Path | None = None) -> dict[Path, Path]:
    """The files that were meant, in order, each once, with its name below the folder that was given.

    Args:
        given: files (taken whatever their suffix), folders (searched for image suffixes, also below), and patterns
            such as "photos/**/*.jpg".
        leave_out: a folder whose files are not taken, such as that of the pictures made last time.

    Raises:
        BadInput: naming all that is not there or holds no image.
    """
    images, problems = {}, []
    for each in map(str, given):
        path = Path(each).expanduser()
        if path.is_dir():
            here = {file: file.relative_to(path) for file in sorted(path.rglob("*"))}
        elif path.exists():
            here = {path: Path(path.name)}
        else:
            here = {Path(match): Path(Path(match).name) for match in sorted(glob.glob(str(path), recursive=True))}
        if not path.is_file():
            here = {file: name for file, name in here.items() if _is_image_file(file, leave_out)}
        if not here:
            what = "holds no image files" if path.is_dir() else "no such file or folder, and no image file matches it"
            problems.append(f"{each}: {what} (looked for {' '.join(sorted(IMAGE_SUFFIXES))})")
        for file, name in here.items():
            images.setdefault(file, name)
    if problems:
        raise BadInput(problems)
    return images


def _is_image_file(path: Path, leave_out: Path | None) -> bool:
    if leave_out is not None and leave_out.resolve() in path.resolve().parents:
        return False
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()


def predict_files(
    predictor: Predictor, paths: Sequence[Path], *, batch_size: int = 8, score_threshold: float = 0.3
) -> Iterator[FilePrediction]:
    """Every file once, those of like size together, and so not in the order given. A file that cannot be read is
    yielded with its error, the others go on."""
    with ThreadPoolExecutor() as pool:
        sizes = pool.map(_size_or_nothing, paths)
        in_order = [path for _, path in sorted(zip(sizes, paths, strict=True))]
        for start in range(0, len(in_order), batch_size):
            some = in_order[start : start + batch_size]
            decoded = list(pool.map(_decode_or_error, some))
            whole = [image for image in decoded if isinstance(image, Tensor)]
            found = iter(predictor.predict(whole, score_threshold) if whole else [])
            for path, image in zip(some, decoded, strict=True):
                if isinstance(image, Tensor):
                    yield FilePrediction(path, image, next(found), None)
                else:
                    yield FilePrediction(path, None, None, image.reason)


def _size_or_nothing(path: Path) -> tuple[int, int]:
    try:
        return probe_image(path).size_hw
    except ImageError:
        return (0, 0)  # decoding says why


def _decode_or_error(path: Path) -> Tensor | ImageError:
    try:
        return decode_image(path)
    except ImageError as error:
        return error


