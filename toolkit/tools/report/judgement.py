"""Computes all statistics of a set of predictions, from which pages, tables and JSON are made."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np

from toolkit import index
from toolkit.base.boxes import Boxes
from toolkit.evaluation.coco_numbers import exact_numbers
from toolkit.evaluation.matches import IOU_THRESHOLDS, match_predictions
from toolkit.evaluation.voc import voc_metrics
from toolkit.tools.report import bootstrap
from toolkit.tools.report.detection_errors import strata, tide_errors
from toolkit.tools.report.suspects import Suspect, suspects
from toolkit.tools.report.thresholds import WANTED_PRECISION, Point, calibration, confusion_matrix, sweep


class Judgement:
    """All statistics of one detector on one data set.

    They are computed at construction, which takes seconds for a thousand images and less than a minute for COCO's
    validation data.

    Args:
        name: name of the detector, for people.
        predictions: see `CocoEvaluator.evaluate`; for scene graphs see `read_predictions`.
        table: the data table.
        about: metadata of the predictions, as in a predictions file.
        draws: number of bootstrap samples.

    Attributes:
        matches: the matches of predictions and annotated boxes.
        numbers: the twelve COCO metrics by name; None: undefined.
        intervals: their 95 % intervals by name; None: undefined.
        draws: the metrics in the bootstrap samples.
        class_ap, class_recall: (K,) AP and AR100 of each of K classes; NaN: undefined.
        ap_by_iou: (10,) AP at IoU 0.5, 0.55, ..., 0.95, the mean over classes.
        overall, sweeps: precision, recall and F1 against the score, over all classes and of each class.
        threshold: score threshold of the best F1 over all classes; 0.5 if no prediction is right.
        matrix: see `confusion_matrix`, at this threshold.
        graphs: a `GraphReport` of `toolkit.detectors.scene_graphs`; None: the data have no relations.

    Raises:
        BadInput: the image ids of predictions and table differ.
    """

    def __init__(
        self,
        name: str,
        predictions: Boxes | Mapping,
        table,
        about: Mapping | None = None,
        draws: int = bootstrap.NUM_DRAWS,
    ):
        self.name = name
        self.table = table
        self.predictions = predictions
        self.about = about or {}
        m = self.matches = match_predictions(predictions, table)
        exact = exact_numbers(m)
        self.draws = bootstrap.resample(m, draws)
        self.class_ap = exact.of_class[0]
        self.class_recall = exact.recall_of_class[0]
        self.ap_by_iou = exact.by_iou[:, 0]
        self.numbers = {}
        for key, values in exact.numbers.items():
            self.numbers[key] = float(values[0]) if np.isfinite(values[0]) else None
        self.intervals = {key: self._interval(key) for key in self.numbers}
        self.overall = sweep(m)
        self.sweeps = [sweep(m, label) for label in range(m.num_classes)]
        self.threshold = 0.5 if self.overall.best is None else self.overall.best.threshold
        self.matrix = confusion_matrix(m, self.threshold)
        self.calibration = calibration(m)
        self.errors = tide_errors(m)
        self.voc = voc_metrics(m)
        self.suspects = suspects(m)
        self.strata = strata(m, self.threshold)
        self.graphs = _judge_graphs(predictions, table, self.about)

    def _interval(self, key: str) -> tuple[float, float] | None:
        value = self.numbers[key]
        low_high = None if value is None else bootstrap.interval(self.draws.numbers[key], value)
        return low_high and (max(low_high[0], 0.0), min(low_high[1], 1.0))

    @cached_property
    def image_counts(self) -> np.ndarray:
        """(images, 3): numbers of right predictions, wrong predictions and missed boxes in each image, at `threshold`.
        """
        m = self.matches
        kept = (m.found.scores > self.threshold) & m.counts
        right = np.bincount(m.found.image_index[kept & m.right], minlength=m.num_images)
        wrong = np.bincount(m.found.image_index[kept & ~m.right], minlength=m.num_images)
        boxes = np.bincount(m.truth.image_index[~m.crowd], minlength=m.num_images)
        return np.stack([right, wrong, boxes - right], axis=1)

    @cached_property
    def image_f1(self) -> np.ndarray:
        """(images,): the F1 of each image at `threshold`; 1 for an image without boxes and without predictions."""
        right, wrong, missed = self.image_counts.T
        return np.where(
            right + wrong + missed == 0,
            1.0,
            2 * right / np.maximum(2 * right + wrong + missed, 1),
        )


judge = Judgement  # the verb, for calls


def _judge_graphs(predictions: Mapping, table, about: Mapping) -> Any:
    if not table.predicates:
        return None
    judge_graphs = index.load(index.REPORT_STATISTICS["relations"])
    return judge_graphs(predictions, table, about)


def as_json(judged: Judgement) -> dict:
    """Return the content of `report.json`, for other programs.

    Its entries `threshold` and `thresholds` are the recommended score thresholds, over all classes and by class.
    """
    names = judged.matches.class_names
    best = [s.best for s in judged.sweeps]
    return {
        "name": judged.name,
        "precision": judged.about.get("precision"),
        "images": judged.matches.num_images,
        "boxes": int(judged.matches.num_truth.sum()),
        "class_map": dict(judged.table.class_map),
        "threshold": judged.threshold,
        "thresholds": {n: judged.threshold if p is None else p.threshold for n, p in zip(names, best, strict=True)},
        "best_f1": _point_as_json(judged.overall.best),
        "at_precision": {
            str(precision): _point_as_json(judged.overall.at_precision(precision)) for precision in WANTED_PRECISION
        },
        "numbers": judged.numbers,
        "intervals_95": judged.intervals,
        "classes": {
            name: {
                "AP": None if np.isnan(ap) else float(ap),
                "boxes": int(boxes),
                "best_f1": _point_as_json(point),
            }
            for name, ap, boxes, point in zip(names, judged.class_ap, judged.matches.num_truth, best, strict=True)
        },
        "ap_by_iou": dict(zip((f"{iou:.2f}" for iou in IOU_THRESHOLDS), judged.ap_by_iou.tolist(), strict=True)),
        "calibration_error": judged.calibration.error,
        "confusion_matrix": judged.matrix.tolist(),
        "tide": {"ap50": judged.errors.ap50, "cost": judged.errors.cost},
        "strata": [asdict(stratum) for stratum in judged.strata],
        "annotation_mistakes": [_suspect(judged, suspect) for suspect in judged.suspects],
        "voc": judged.voc,
        "scene_graphs": None if judged.graphs is None else judged.graphs.as_json(judged.table.predicates),
    }


def _point_as_json(point: Point | None) -> dict | None:
    return None if point is None else asdict(point)


def _suspect(judged: Judgement, suspect: Suspect) -> dict:
    m = judged.matches
    row = {
        "kind": suspect.kind,
        "image_id": m.image_ids[suspect.image],
        "file_name": judged.table.file_name(suspect.image),
        "strength": round(suspect.strength, 4),
    }
    for what, boxes, at in (("predicted", m.found, suspect.det), ("annotated", m.truth, suspect.gt)):
        if at >= 0:
            name = m.class_names[boxes.labels[at]]
            row[what] = {
                "class": name,
                "bbox": [round(v, 2) for v in boxes.xywh[at].tolist()],
            }
    return row
