"""Resident memory of a small training, part by part: ours, ours with less to do, and a bare loop with the same model.

Each program is a process of its own, and loads its batches itself, so that all of its memory is counted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from toolkit.base.memory import peak_memory_mb

from .measuring import row

SCRIPTS = Path(__file__).resolve().parents[1]
CONFIG = SCRIPTS.parent / "configs" / "faster_rcnn" / "shapes.yaml"
FLAGS = "--data.workers 0 --run.precision no --run.eval_every 0 --run.save_every 0 --eval.pictures 0"
# neither averaged weights nor decoded pictures in memory
LESS = "--optim.ema_decay 0 --eval.metric_for_best bbox_AP --data.cache_images false"
PROGRAMS = ("ours", "ours, no averages, no cached pictures", "bare loop")


def bench_memory(steps: int = 20, images: int = 1000) -> Iterator[dict]:
    """Measure resident memory after each part of a training of Faster R-CNN on the bundled shapes, in MiB.

    The bare loop has the detector, the losses, the augmentation and the optimizer of ours, but no Accelerate, no table
    of settings, no guard and no log; it evaluates by our evaluator, and saves by torch.save.

    steps: steps of each training. images: training images.

    Rows of each program: resident memory after the imports, the data, the model, what else the training needs
    (optimizer, loaders, averages), the first step, all steps, an evaluation and a checkpoint; of ours also after the
    end of the run, which writes final/ and the report; and the peak.
    """
    for program in PROGRAMS:
        command = [sys.executable, "-m", "benches.memory", program, str(steps), str(images)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
        for part, mib in json.loads(ended.stdout.splitlines()[-1]).items():
            yield row(f"memory, {program}, {part}", mib, "MiB")


class Parts:
    """The resident memory after each part, in MiB, by name."""

    def __init__(self):
        self.mib = {}

    def ended(self, name: str) -> None:
        self.mib[f"after {name}"] = psutil.Process().memory_info().rss / 2**20

    def with_peak(self) -> dict[str, float]:
        return self.mib | {"peak": peak_memory_mb()}


def ours(flags: list[str], steps: int, parts: Parts) -> None:
    """Train with the script of Faster R-CNN, its session and its loop."""
    import train_faster_rcnn as script

    from toolkit import session
    from toolkit.evaluation.coco import CocoEvaluator
    from toolkit.models import detector_class
    from toolkit.run.command_line import parse_config
    from toolkit.run.saving import save
    from toolkit.run.validation import evaluate

    from .loop import script_loop

    detector_class("faster_rcnn")
    parts.ended("the imports")
    config = parse_config(script.Config, flags, CONFIG)
    with session(config) as s:
        table, val_table = s.open_data()
        parts.ended("the data")
        detector = s.make_detector(table)
        parts.ended("the model")
        t = s.training(detector, table, val_table, CocoEvaluator(val_table))
        parts.ended("the rest of the training")
        run = script_loop(script, t)
        measure_steps(run, steps, parts)
        evaluate(t)
        parts.ended("an evaluation")
        save(t)
        parts.ended("a checkpoint")
        s.end(t)
        parts.ended("the end")


def bare(flags: list[str], steps: int, parts: Parts) -> None:
    """Train with a dozen lines; detector, data and evaluation are ours."""
    import torch
    import train_faster_rcnn as script

    from toolkit.data import pipeline
    from toolkit.data.formats import open_dataset
    from toolkit.evaluation.coco import CocoEvaluator
    from toolkit.evaluation.predict_dataset import predict_dataset
    from toolkit.models import build_detector, detector_class
    from toolkit.run.command_line import parse_config

    detector_class("faster_rcnn")
    parts.ended("the imports")
    config = parse_config(script.Config, flags, CONFIG)
    data = config.data
    table = open_dataset("train", format="shapes").head(data.max_train_images)
    val_table = open_dataset("val", format="shapes")
    parts.ended("the data")
    detector = build_detector("faster_rcnn", class_names=table.class_names, **settings_of(config.model))
    parts.ended("the model")
    optimizer = torch.optim.AdamW(detector.parameters(), lr=config.optim.lr, fused=True)
    _, loader = pipeline.loader_of_settings(table, data, seed=0, stride=detector.stride)
    transform = pipeline.val_transform(data.image_size, data.scales, data.max_size)
    val_loader = pipeline.validation_loader(
        val_table, transform, batch_size=config.eval.batch_size_per_device, workers=0, stride=detector.stride, pin=False
    )
    parts.ended("the rest of the training")
    batches = iter(loader)

    def run(count: int) -> None:
        detector.train()
        for _ in range(count):
            batch = next(batches)
            counts = detector.denominators(batch.targets)
            outputs = detector(batch.images, batch.sizes, batch.targets)
            losses, _ = detector.criterion(outputs, batch.targets, counts)
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()

    measure_steps(run, steps, parts)
    predictions = predict_dataset(detector, val_loader, torch.device("cpu"), score_threshold=0.05, top_k=100)
    CocoEvaluator(val_table).evaluate(predictions.by_image)
    parts.ended("an evaluation")
    with TemporaryDirectory() as folder:
        torch.save({"model": detector.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "saved.pt")
    parts.ended("a checkpoint")


def settings_of(options: object) -> dict:
    """Return the given settings of a detector, without its name."""
    return {name: value for name, value in options.given.items() if name != "architecture"}


def measure_steps(run: Callable[[int], None], steps: int, parts: Parts) -> None:
    """Make `steps` steps by `run`, which is given their number."""
    run(1)
    parts.ended("the first step")
    run(steps - 1)
    parts.ended("all steps")


def main(program: str, steps: int, images: int) -> None:
    """Train with one of `PROGRAMS`, and print a line of JSON: its memory by part."""
    parts = Parts()
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        flags = [*FLAGS.split(), "--run.output_dir", folder, "--data.max_train_images", str(images)]
        if program == PROGRAMS[0]:
            ours(flags, steps, parts)
        elif program == PROGRAMS[1]:
            ours([*flags, *LESS.split()], steps, parts)
        else:
            bare([*flags, *LESS.split()], steps, parts)
    print(json.dumps(parts.with_peak()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
