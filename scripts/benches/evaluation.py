"""COCO evaluation: this toolkit against plain pycocotools, from predictions by image id to the numbers.

Both start from the same predictions and a ground truth that is loaded already, as in every evaluation but the first.
"""

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from toolkit.data.table import Category, DetectionTable
from toolkit.data.table_cache import write_rows
from toolkit.evaluation.coco import CocoEvaluator

NAMES = ("bbox_AP", "bbox_AP50", "bbox_AP75", "bbox_APs", "bbox_APm", "bbox_APl",
         "bbox_AR1", "bbox_AR10", "bbox_AR100", "bbox_ARs", "bbox_ARm", "bbox_ARl")  # fmt: skip


def bench_evaluation(
    num_images: int = 2000, num_detections: int = 100, num_classes: int = 80, repeats: int = 3, seed: int = 0
) -> list[dict]:
    """Seconds of one evaluation: medians over `repeats` interleaved rounds, after one that is not counted.

    Rows with `name`, `value` and `unit`: ours, pycocotools, their ratio (median of the rounds' ratios), ours against
    itself (the noise), and the largest difference of the twelve numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        table, predictions = random_detections(Path(folder), num_images, num_detections, num_classes, seed)
        evaluator, truth = CocoEvaluator(table), _coco_ground_truth(table)
        runs = (
            lambda: evaluator.evaluate(predictions),
            lambda: plain_pycocotools(truth, predictions),
            lambda: evaluator.evaluate(predictions),
        )
        evaluator.evaluate(predictions)
        rounds = [[_timed(run) for run in runs] for _ in range(repeats)]
    (ours, plain, _) = (result for _, result in rounds[0])
    times = [[seconds for seconds, _ in timed] for timed in rounds]
    return [
        {"name": "evaluation, ours", "value": statistics.median(t[0] for t in times), "unit": "s"},
        {"name": "evaluation, pycocotools", "value": statistics.median(t[1] for t in times), "unit": "s"},
        {"name": "evaluation, pycocotools / ours", "value": statistics.median(t[1] / t[0] for t in times), "unit": "x"},
        {"name": "evaluation, ours / ours", "value": statistics.median(t[2] / t[0] for t in times), "unit": "x"},
        {"name": "evaluation, largest difference", "value": max(abs(ours[n] - plain[n]) for n in NAMES), "unit": "AP"},
    ]


def random_detections(
    folder: Path, num_images: int, num_detections: int, num_classes: int, seed: int
) -> tuple[DetectionTable, dict]:
    """About seven objects an image, one in fifty a crowd; most are found, and the other detections are false."""
    rng = np.random.default_rng(seed)
    rows, predictions = [], {}
    for image_id in range(1, num_images + 1):
        count = min(int(rng.poisson(7)), num_detections)
        boxes, labels = _boxes(rng, count), rng.integers(0, num_classes, count)
        objects = {
            "id": list(range(count)),
            "bbox": boxes.tolist(),
            "category": labels.tolist(),
            "area": (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist(),
            "iscrowd": (rng.random(count) < 0.02).astype(int).tolist(),
        }
        rows.append({"image_id": image_id, "file_name": f"{image_id}.jpg", "width": 640, "height": 640,
                     "objects": objects, "relations": {"subject": [], "object": [], "predicate": []}})  # fmt: skip
        found, classes = _boxes(rng, num_detections), rng.integers(0, num_classes, num_detections)
        found[:count], classes[:count] = boxes + rng.normal(0, 4, boxes.shape), labels
        predictions[image_id] = {
            "boxes": torch.from_numpy(found),
            "scores": torch.from_numpy(rng.random(num_detections, dtype=np.float32)),
            "labels": torch.from_numpy(classes),
        }
    categories = [Category(k + 1, f"class{k}") for k in range(num_classes)]
    return write_rows(rows, cache_file=folder / "table.json", categories=categories), predictions


def plain_pycocotools(truth: COCO, predictions: Mapping[int, Mapping]) -> dict[str, float]:
    """The twelve numbers the usual way: a dict per detection, loadRes, COCOeval."""
    results = []
    for image_id, found in predictions.items():
        boxes = found["boxes"].double()
        boxes[:, 2:] -= boxes[:, :2]
        columns = (boxes.tolist(), found["scores"].tolist(), found["labels"].tolist())
        results += [
            {"image_id": image_id, "category_id": label, "bbox": box, "score": score}
            for box, score, label in zip(*columns, strict=True)
        ]
    with contextlib.redirect_stdout(io.StringIO()):
        run = COCOeval(truth, truth.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return dict(zip(NAMES, map(float, run.stats), strict=True))


def _coco_ground_truth(table: DetectionTable) -> COCO:
    annotations: list[dict] = []
    for i in range(len(table)):
        row = table.row(i)
        objects = row["objects"]
        boxes = objects["bbox"].astype(float)
        boxes[:, 2:] -= boxes[:, :2]
        columns = (boxes.tolist(), *(objects[key].tolist() for key in ("category", "area", "iscrowd")))
        for box, label, area, crowd in zip(*columns, strict=True):
            annotations.append({"id": len(annotations) + 1, "image_id": row["image_id"], "category_id": label,
                                "bbox": box, "area": area, "iscrowd": crowd})  # fmt: skip
    truth = COCO()
    truth.dataset = {
        "images": [{"id": i} for i in table.image_ids().tolist()],
        "annotations": annotations,
        "categories": [{"id": k} for k in range(len(table.categories))],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
    return truth


def _boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    corners = rng.uniform(0, 440, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(8, 200, (count, 2))], axis=1).astype(np.float32)


def _timed(run: Callable[[], dict]) -> tuple[float, dict]:
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def print_rows(rows: Sequence[Mapping]) -> None:
    for row in rows:
        print(f"{row['name']:<36} {row['value']:>12.4g} {row['unit']}")


if __name__ == "__main__":
    print_rows(bench_evaluation())
