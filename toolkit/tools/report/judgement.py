"""Computes all statistics of a set of predictions, from which pages, tables and JSON are made."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np

from toolkit import index
from toolkit.base.boxes import Boxes
from toolkit.evaluation.coco_numbers import any_class_ap, exact_numbers
from toolkit.evaluation.mask_matches import matches_by_mask, named_by_mask
from toolkit.evaluation.matches import IOU_THRESHOLDS, match_predictions
from toolkit.evaluation.shown_metrics import METRICS
from toolkit.evaluation.voc import voc_metrics
from toolkit.tools.report import bootstrap
from toolkit.tools.report.detection_errors import strata, tide_errors
from toolkit.tools.report.suspects import Suspect, suspects
from toolkit.tools.report.thresholds import (
    WANTED_PRECISION,
    OperatingPoint,
    best_threshold,
    calibration,
    confusion_matrix,
    f1_of_counts,
    image_counts,
    sweep,
)


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
        matches: the matches of predictions and annotated objects: by mask if both have masks, else by box. Thresholds,
            errors, confusions and suspects are computed from them.
        numbers: the twelve COCO metrics by name, and with masks those of masks, "segm_AP" and so on; None: undefined.
        intervals: their 95 % intervals by name; None: undefined.
        draws: the metrics in the bootstrap samples.
        class_ap, class_recall: (K,) AP and AR100 of the boxes of each of K classes; NaN: undefined.
        class_mask_ap: (K,) AP of the masks of each class; None: there are no masks.
        ap_by_iou: AP at IoU 0.5, 0.55, ..., 0.95, the mean over classes, (10,) each: "AP", and "segm_AP" of masks.
        overall, sweeps: precision, recall and F1 against the score, over all classes and of each class.
        threshold: score threshold of the best F1 over all classes; 0.5 if no prediction is right.
        matrix: see `confusion_matrix`, at this threshold.
        any_class_ap: AP of boxes whose class does not matter; None: undefined.
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
        of_boxes = match_predictions(predictions, table)
        of_masks = matches_by_mask(of_boxes, table)
        self.draws = bootstrap.resample(of_boxes, draws)
        exact = exact_numbers(of_boxes)
        self.class_ap = exact.of_class[0]
        self.class_recall = exact.recall_of_class[0]
        self.class_mask_ap: np.ndarray | None = None
        self.ap_by_iou = {"AP": exact.by_iou[:, 0]}
        numbers = dict(exact.numbers)
        if of_masks is not None:
            exact = exact_numbers(of_masks)
            self.class_mask_ap = exact.of_class[0]
            self.ap_by_iou["segm_AP"] = exact.by_iou[:, 0]
            numbers |= named_by_mask(exact.numbers)
            drawn = bootstrap.resample(of_masks, draws)
            self.draws = replace(self.draws, numbers={**self.draws.numbers, **named_by_mask(drawn.numbers)})
        self.numbers = {}
        for key, values in numbers.items():
            self.numbers[key] = float(values[0]) if np.isfinite(values[0]) else None
        m = self.matches = of_boxes if of_masks is None else of_masks
        self.intervals = {key: self._interval(key) for key in self.numbers}
        self.overall = sweep(m)
        self.sweeps = [sweep(m, label) for label in range(m.num_classes)]
        self.threshold = best_threshold(self.overall)
        self.matrix = confusion_matrix(m, self.threshold)
        self.calibration = calibration(m)
        self.errors = tide_errors(m)
        self.voc = voc_metrics(of_boxes)
        self.any_class_ap = any_class_ap(of_boxes)
        self.suspects = suspects(m)
        self.strata = strata(m, self.threshold)
        self.graphs = _judge_graphs(predictions, table, self.about)

    def _interval(self, key: str) -> tuple[float, float] | None:
        value = self.numbers[key]
        low_high = None if value is None else bootstrap.interval(self.draws.numbers[key], value)
        return low_high and (max(low_high[0], 0.0), min(low_high[1], 1.0))

    @cached_property
    def row(self) -> dict[str, float | None]:
        """The metrics of the data set by the keys that evaluators use, so "bbox_AP" where `numbers` has "AP"."""
        row = {}
        for name, value in self.numbers.items():
            row[name if name.startswith("segm_") else f"bbox_{name}"] = value
        row |= self.voc
        if self.graphs is not None:
            for metric in METRICS["relations"]:
                row[metric.key] = self.graphs.row.get(metric.key)
        return row

    @property
    def boxes_given(self) -> bool:
        """Whether the detector was given the annotated boxes (predcls, sgcls), so that finding them proves nothing."""
        return self.graphs is not None and self.graphs.boxes_given

    @property
    def iou(self) -> str:
        """The words for what `matches` were matched by, such as "IoU of masks"."""
        return "IoU of masks" if self.matches.by_mask else "IoU"

    @cached_property
    def image_counts(self) -> np.ndarray:
        """(images, 3): numbers of right predictions, wrong predictions and missed boxes in each image, at `threshold`.
        """
        return image_counts(self.matches, self.threshold)

    @cached_property
    def hard_negatives(self) -> list[int]:
        """Rows of the images without any box that have predictions above `threshold`, those with the highest first."""
        m = self.matches
        is_empty = np.diff(m.truth.offsets) == 0
        confident = np.flatnonzero((m.found.scores > self.threshold) & is_empty[m.found.image_index])
        best_first = confident[np.argsort(-m.found.scores[confident], kind="stable")]
        return list(dict.fromkeys(m.found.image_index[best_first].tolist()))

    @cached_property
    def image_f1(self) -> np.ndarray:
        """(images,): the F1 of each image at `threshold`; 1 for an image without boxes and without predictions."""
        return f1_of_counts(self.image_counts)


judge = Judgement  # the verb, for calls


def _judge_graphs(predictions: Mapping, table, about: Mapping) -> Any:
    has_graphs = not isinstance(predictions, Boxes) and any("pairs" in each for each in predictions.values())
    if not table.predicates or not has_graphs:
        return None  # here, so that the report of boxes does not load what judges graphs
    judge_graphs = index.load(index.REPORT_STATISTICS["relations"])
    return judge_graphs(predictions, table, about)


def as_json(judged: Judgement) -> dict:
    """Return the content of `report.json`, for other programs.

    Its entries `threshold` and `thresholds` are the recommended score thresholds, over all classes and by class.
    """
    best = [s.best for s in judged.sweeps]
    thresholds = {}
    for name, point in zip(judged.matches.class_names, best, strict=True):
        thresholds[name] = judged.threshold if point is None else point.threshold
    content = {
        "name": judged.name,
        "precision": judged.about.get("precision"),
        "images": judged.matches.num_images,
        "boxes": int(judged.matches.num_truth.sum()),
        "class_map": dict(judged.table.class_map),
        "threshold": judged.threshold,
        "thresholds": thresholds,
        "best_f1": _point_as_json(judged.overall.best),
        "at_precision": {
            str(precision): _point_as_json(judged.overall.at_precision(precision)) for precision in WANTED_PRECISION
        },
        "numbers": judged.numbers,
        "intervals_95": judged.intervals,
        "classes": _classes_as_json(judged, best),
        "ap_any_class": judged.any_class_ap,
        "ap_by_iou": _by_iou(judged.ap_by_iou["AP"]),
        "calibration_error": judged.calibration.error,
        "confusion_matrix": judged.matrix.tolist(),
        "tide": {"ap50": judged.errors.ap50, "cost": judged.errors.cost},
        "strata": [asdict(stratum) for stratum in judged.strata],
        "hard_negatives": [_hard_negative(judged, image) for image in judged.hard_negatives],
        "annotation_mistakes": [_suspect(judged, suspect) for suspect in judged.suspects],
        "voc": judged.voc,
        "scene_graphs": None if judged.graphs is None else judged.graphs.as_json(judged.table.predicates),
    }
    if judged.matches.by_mask:
        content["matched_by"] = "masks"
        content["segm_ap_by_iou"] = _by_iou(judged.ap_by_iou["segm_AP"])
    return content


def _classes_as_json(judged: Judgement, best: Sequence[OperatingPoint | None]) -> dict[str, dict]:
    """Return the numbers of each class by its name. best: the point of the best F1 of each class."""
    classes = {}
    for k, name in enumerate(judged.matches.class_names):
        classes[name] = {
            "AP": _defined(judged.class_ap[k]),
            "boxes": int(judged.matches.num_truth[k]),
            "best_f1": _point_as_json(best[k]),
        }
        if judged.class_mask_ap is not None:
            classes[name]["segm_AP"] = _defined(judged.class_mask_ap[k])
    return classes


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _by_iou(values: np.ndarray) -> dict[str, float]:
    return dict(zip((f"{iou:.2f}" for iou in IOU_THRESHOLDS), values.tolist(), strict=True))


def _point_as_json(point: OperatingPoint | None) -> dict | None:
    return None if point is None else asdict(point)


def _hard_negative(judged: Judgement, image: int) -> dict:
    return {
        "image_id": judged.matches.image_ids[image],
        "file_name": judged.table.file_name(image),
        "predictions": int(judged.image_counts[image, 1]),
        "best_score": float(judged.matches.found.scores[judged.matches.found.of_image(image)].max()),
    }


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
