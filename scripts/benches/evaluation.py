"""COCO evaluation: this toolkit against plain pycocotools, from predictions by image id to the metrics.

Both start from the same predictions and from a ground truth that is already loaded, as in every evaluation but the
first.
"""

import contextlib
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from toolkit.data.table import Category, DetectionTable
from toolkit.data.table_cache import write_rows
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.tools.writers import write_coco

from .measuring import against, in_turn, random_boxes, row, table_row

METRIC_NAMES = [f"bbox_{name}" for name in "AP AP50 AP75 APs APm APl AR1 AR10 AR100 ARs ARm ARl".split()]


def bench_evaluation(
    num_images: int = 2000, num_detections: int = 100, num_classes: int = 80, repeats: int = 3, seed: int = 0
) -> list[dict]:
    """Measure the seconds of one evaluation: medians over `repeats` interleaved rounds, after one that is not counted.

    Rows: ours, pycocotools, their ratio, ours against itself (the noise), and the largest difference of the twelve
    metrics.
    """
    with tempfile.TemporaryDirectory() as folder:
        table, predictions = random_detections(Path(folder), num_images, num_detections, num_classes, seed)
        evaluator = CocoEvaluator(table)
        truth = _coco_ground_truth(table, Path(folder) / "truth.json")
        ours = evaluator.evaluate(predictions)
        plain = plain_pycocotools(truth, predictions)
        rounds = in_turn(
            lambda: evaluator.evaluate(predictions), lambda: plain_pycocotools(truth, predictions), repeats
        )
    apart = max(abs(ours[name] - plain[name]) for name in METRIC_NAMES)
    return [*against("evaluation", "pycocotools", rounds), row("evaluation, largest difference", apart, "AP")]


def random_detections(
    folder: Path, num_images: int, num_detections: int, num_classes: int, seed: int
) -> tuple[DetectionTable, dict]:
    """Make a table with about seven objects per image, one in fifty a crowd region, and predictions by image id: one
    near each object, and false ones up to `num_detections` per image."""
    rng = np.random.default_rng(seed)
    rows = []
    predictions = {}
    for image_id in range(1, num_images + 1):
        count = min(int(rng.poisson(7)), num_detections)
        boxes = random_boxes(rng, count, 440, 8, 200)
        labels = rng.integers(0, num_classes, count)
        crowd = (rng.random(count) < 0.02).astype(int)
        rows.append(table_row(image_id, (640, 640), boxes, labels, crowd=crowd))
        detections = random_boxes(rng, num_detections, 440, 8, 200)
        classes = rng.integers(0, num_classes, num_detections)
        detections[:count] = boxes + rng.normal(0, 4, boxes.shape)
        classes[:count] = labels
        predictions[image_id] = {
            "boxes": torch.from_numpy(detections),
            "scores": torch.from_numpy(rng.random(num_detections, dtype=np.float32)),
            "labels": torch.from_numpy(classes),
        }
    categories = [Category(k + 1, f"class{k}") for k in range(num_classes)]
    return write_rows(rows, cache_file=folder / "table.json", categories=categories), predictions


def plain_pycocotools(truth: COCO, predictions: Mapping[int, Mapping]) -> dict[str, float]:
    """Compute the twelve COCO metrics in the usual way: a dict per detection, loadRes, COCOeval."""
    results = []
    for image_id, detections in predictions.items():
        boxes = detections["boxes"].double()
        boxes[:, 2:] -= boxes[:, :2]
        columns = (boxes.tolist(), detections["scores"].tolist(), (detections["labels"] + 1).tolist())
        results += [
            {"image_id": image_id, "category_id": label, "bbox": box, "score": score}
            for box, score, label in zip(*columns, strict=True)
        ]
    with contextlib.redirect_stdout(io.StringIO()):
        run = COCOeval(truth, truth.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return dict(zip(METRIC_NAMES, map(float, run.stats), strict=True))


def _coco_ground_truth(table: DetectionTable, file: Path) -> COCO:
    write_coco(table.labelled(), file)
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(file)
