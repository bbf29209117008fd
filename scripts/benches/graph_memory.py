"""Scene graphs of a whole test split on one process: seconds and peak memory from predictions to all metrics.

PYTHONPATH=.:scripts python scripts/benches/graph_memory.py    # VG150's 26,446 test images, sgdet, minutes
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from benches.measuring import random_boxes, row, table_row

from toolkit.data.table import Category, DetectionTable
from toolkit.data.table_cache import write_rows
from toolkit.scene_graphs.evaluator import TOP, SceneGraphEvaluator
from toolkit.scene_graphs.matches import compact_graph
from toolkit.step.timer import peak_memory_mb

# Of VG150's test split, and of what a model with the published settings says of each image.
IMAGES, CLASSES, PREDICATES, OBJECTS, RELATIONS, DETECTIONS, PAIRS = 26_446, 150, 50, 12, 7, 80, 100


def bench_graph_memory(images: int = IMAGES, mode: str = "sgdet") -> list[dict]:
    """Rows: seconds, megabytes of the predictions and of the process at its peak.

    Predictions are random, made one by one as batches would give them, and kept as `predict_dataset` keeps them.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        table = _random_table(Path(folder), images, rng)
        evaluator, before = SceneGraphEvaluator(table, mode), peak_memory_mb()
        began = time.perf_counter()
        kept = {image_id: compact_graph(_random_prediction(rng), TOP[-1]) for image_id in evaluator.image_ids}
        made = time.perf_counter()
        scores = evaluator.evaluate(kept)
        done = time.perf_counter()
    held = sum(value.nbytes for found in kept.values() for value in found.values()) / 2**20
    measured = {
        "making and compacting predictions": (made - began, "s"),
        "evaluation": (done - made, "s"),
        "predictions": (held, "MB"),
        "process before": (before, "MB"),
        "process at its peak": (peak_memory_mb(), "MB"),
        "R@100": (scores["R@100"], "recall"),
    }
    return [row(f"scene graphs of {images} images, {mode}, {name}", *value) for name, value in measured.items()]


def _random_table(folder: Path, images: int, rng: np.random.Generator) -> DetectionTable:
    rows = []
    for image_id in range(1, images + 1):
        boxes, ends = _random_boxes(OBJECTS, rng), np.argsort(rng.random((RELATIONS, OBJECTS)), axis=1)[:, :2]
        labels, predicates = rng.integers(0, CLASSES, OBJECTS), rng.integers(0, PREDICATES, RELATIONS)
        rows.append(table_row(image_id, (1024, 768), boxes, labels, relations=np.column_stack([ends, predicates])))
    return write_rows(
        rows,
        cache_file=folder / "table.json",
        categories=[Category(i + 1, f"class {i}") for i in range(CLASSES)],
        predicates=[f"predicate {i}" for i in range(PREDICATES)],
        image_root=folder,
    )


def _random_prediction(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    pairs = np.stack(np.divmod(rng.choice(DETECTIONS**2, PAIRS, replace=False), DETECTIONS), 1)
    found = {
        "boxes": _random_boxes(DETECTIONS, rng),
        "scores": rng.random(DETECTIONS, np.float32),
        "labels": rng.integers(0, CLASSES, DETECTIONS),
        "pairs": pairs,
        "predicate_scores": rng.random((PAIRS, PREDICATES), np.float32),
        "triplet_scores": rng.random(PAIRS, np.float32),
    }
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _random_boxes(count: int, rng: np.random.Generator) -> np.ndarray:
    return random_boxes(rng, count, 500, 20, 240)


if __name__ == "__main__":
    for found in bench_graph_memory(*map(int, sys.argv[1:2]), *sys.argv[2:3]):
        print(f"{found['name']}: {found['value']:.4g} {found['unit']}")
