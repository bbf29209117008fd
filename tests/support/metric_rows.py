"""Rows of metrics, writers of runs that are tracked, and what they should have left."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from toolkit.run.metrics_log import MetricsLog, read_metrics
from toolkit.run.writer import DataFacts, RunDescription, RunWriter


def train_row(step: int, **values) -> dict:
    return {
        "step": step,
        "epoch": 0,
        "time_s": float(step),
        "train/loss": 1 / step,
        "train/lr/main": 1e-4,
    } | values


def val_row(step: int) -> dict:
    return {
        "step": step,
        "epoch": 0,
        "time_s": float(step),
        "val/bbox_AP": step / 100,
        "val/AP/ring": None,
    }


def write_metrics(path: Path, *rows: dict, keep_rows: int = 0) -> MetricsLog:
    log = MetricsLog(path, keep_rows=keep_rows)
    for row in rows:
        log.write(row)
    log.close()
    return log


def open_writer(folder: Path, *trackers: str, **options) -> RunWriter:
    config = {"optim": {"lr": 1e-4, "name": None}, "data": {"sizes": [1, 2]}}
    data = {split: DataFacts(f"{split}0123456789abcdef", "images", 9, 20, 2) for split in ("train", "val")}
    about = RunDescription(
        config=config,
        name="named",
        group="ablation",
        tags=["small"],
        notes="why",
        job_type="train",
    )
    return RunWriter(folder, trackers=trackers, about=about, data=data, **options)


def log_rows(folder: Path, *steps: int, trackers: Sequence[str] = (), **options) -> RunWriter:
    writer = open_writer(folder, *trackers, **options)
    for step in steps:
        writer.log(train_row(step))
    writer.close()
    return writer


def evaluation():
    """One image with an annotated and two found boxes, of two classes."""
    from toolkit.tools.report.evaluation_display import EvaluationDisplay, ShownImage
    from toolkit.tools.report.thresholds import (
        ThresholdSweep,
    )  # here: what imports this file anew need not wait for it

    found = np.array([[1.0, 1, 5, 4], [0, 0, 2, 2]])
    image = ShownImage(
        7,
        Image.new("RGB", (8, 6), (255, 0, 0)),
        np.array([[1.0, 1, 5, 5]]),
        np.array([1]),
        found,
        np.array([1, 0]),
        np.array([0.75, 0.25]),
    )
    numbers = np.array([[0.75, 0.25], [1.0, 0.5], [1.0, 1.0], [1.0, 2 / 3]])
    sweep = ThresholdSweep(*numbers, total=1)
    curves = {"all classes": sweep, "star": sweep}
    matrix = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]])
    names = ["ring", "star"]
    return EvaluationDisplay(names, [image], image.picture, curves, {"star": 1.0}, matrix, names, 0.5)


def run_and_resume(folder: Path, tracker: str) -> None:
    """Write rows 1 to 7 with a checkpoint after 5; a second writer takes up that checkpoint and goes on to 9."""
    final = folder / "final"
    final.mkdir()
    (final / "README.md").write_text("the card")
    best = {"step": 9, "bbox_AP": 0.09}
    before = [*map(train_row, range(1, 6)), val_row(5)]
    writer = open_writer(folder, tracker)
    for row in before:
        writer.log(row)
    writer.show(evaluation(), step=5)
    rows_before = writer.state_dict()["rows"]
    run_id = json.loads((folder / "tracker.json").read_text())[tracker]["run_id"]
    for step in (6, 7):
        writer.log(train_row(step))
    writer.close("preempted")
    writer = open_writer(folder, tracker, rows_before=rows_before)
    writer.show(evaluation(), step=5)  # shown already
    after = [*map(train_row, range(6, 10)), val_row(9)]
    for row in after:
        writer.log(row)
    writer.keep_final(final, best)
    writer.close()
    writer = open_writer(folder, tracker, rows_before=writer.state_dict()["rows"])  # again after its end
    writer.keep_final(final, best)
    writer.close()
    assert writer.state_dict() == {"rows": 11}
    assert json.loads((folder / "tracker.json").read_text())[tracker]["run_id"] == run_id
    assert read_metrics(folder / "metrics.jsonl") == before + after


def events_of(folder: Path):
    """Read what TensorBoard's event files of a run hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False).Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = events_of(folder)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
