"""All statistics of one set of predictions, computed once; pages, tables and JSON are made from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from toolkit.boxes import Boxes
from toolkit.evaluation.coco_numbers import CocoNumbers, exact_numbers
from toolkit.evaluation.matches import IOUS, Matches, match
from toolkit.evaluation.report import bootstrap
from toolkit.evaluation.report.annotations import Suspect, suspects
from toolkit.evaluation.report.errors import Errors, tide_errors
from toolkit.evaluation.report.strata import Stratum, strata
from toolkit.evaluation.report.thresholds import (
    WANTED_PRECISION,
    Calibration,
    Point,
    Sweep,
    calibration,
    confusion_matrix,
    sweep,
)
from toolkit.evaluation.voc import voc_metrics


@dataclass
class Judgement:
    """What one detector did on one data set.

    numbers: the twelve of COCO, exactly, None where undefined; intervals: their 95 % intervals; draws: the samples.
    class_ap, class_recall: (K,) AP and AR100, NaN where undefined. ap_by_iou: (10,) mean AP at IoU 0.5, ..., 0.95.
    sweeps: of each class. matrix, paired: see `confusion_matrix`, at the overall threshold.
    """

    name: str
    table: object
    predictions: Boxes | Mapping
    about: Mapping
    matches: Matches
    numbers: dict[str, float | None]
    intervals: dict[str, tuple[float, float] | None]
    class_ap: np.ndarray
    class_recall: np.ndarray
    ap_by_iou: np.ndarray
    draws: CocoNumbers
    overall: Sweep
    sweeps: list[Sweep]
    calibration: Calibration
    matrix: np.ndarray
    paired: np.ndarray
    errors: Errors
    strata: list[Stratum]
    suspects: list[Suspect]
    voc: dict[str, float | None]
    graphs: Any  # `toolkit.scene_graphs.report.GraphReport`; None: there are no relations to judge

    @property
    def threshold(self) -> float:
        """The one of the best F1 over all classes; 0.5 where nothing was found."""
        return 0.5 if self.overall.best is None else self.overall.best.threshold

    @cached_property
    def image_counts(self) -> np.ndarray:
        """(I, 3) right predictions, wrong ones and missed boxes of each image at the threshold."""
        m = self.matches
        kept = (m.found.scores > self.threshold) & m.counts
        right = np.bincount(m.found.image_index[kept & m.right], minlength=m.num_images)
        wrong = np.bincount(m.found.image_index[kept & ~m.right], minlength=m.num_images)
        boxes = np.bincount(m.truth.image_index[~m.crowd], minlength=m.num_images)
        return np.stack([right, wrong, boxes - right], axis=1)

    @cached_property
    def image_f1(self) -> np.ndarray:
        """(I,) 1 for an image without boxes in which nothing is found."""
        right, wrong, missed = self.image_counts.T
        return np.where(right + wrong + missed == 0, 1.0, 2 * right / np.maximum(2 * right + wrong + missed, 1))


def judge(
    name: str, predictions: Boxes | Mapping, table, about: Mapping | None = None, draws: int = bootstrap.DRAWS
) -> Judgement:
    """Counts everything; seconds for a thousand images, less than a minute for COCO's validation data.

    Args:
        name: of the detector, in words.
        predictions: as for `CocoEvaluator.evaluate`; of scene graphs as `read_predictions` gives them.
        about: what is known of them, as in a predictions file.
        draws: bootstrap samples.

    Raises:
        BadInput: image ids of predictions and table differ.
    """
    matches = match(predictions, table)
    exact = exact_numbers(matches)
    drawn = bootstrap.resample(matches, draws)
    numbers = {key: float(values[0]) if np.isfinite(values[0]) else None for key, values in exact.numbers.items()}
    intervals = {}
    for key, value in numbers.items():
        low_high = None if value is None else bootstrap.interval(drawn.numbers[key], value)
        intervals[key] = low_high and (max(low_high[0], 0.0), min(low_high[1], 1.0))
    overall = sweep(matches)
    threshold = 0.5 if overall.best is None else overall.best.threshold
    matrix, paired = confusion_matrix(matches, threshold)
    return Judgement(
        name=name, table=table, predictions=predictions, about=about or {}, matches=matches, numbers=numbers,
        intervals=intervals, class_ap=exact.of_class[0], class_recall=exact.recall_of_class[0],
        ap_by_iou=exact.by_iou[:, 0], draws=drawn, overall=overall,
        sweeps=[sweep(matches, label) for label in range(matches.num_classes)], calibration=calibration(matches),
        matrix=matrix, paired=paired, errors=tide_errors(matches), strata=strata(matches, threshold),
        suspects=suspects(matches), voc=voc_metrics(matches),
        graphs=_judge_graphs(predictions, table, about or {}),
    )  # fmt: skip


def _judge_graphs(predictions: Mapping, table, about: Mapping) -> Any:
    if not table.predicates:
        return None
    from toolkit.scene_graphs.report import judge_graphs

    return judge_graphs(predictions, table, about)


def as_json(judged: Judgement) -> dict:
    """The numbers for other programs: `report.json`; `threshold` and `thresholds` are what to deploy."""
    names = judged.matches.class_names
    best = [s.best for s in judged.sweeps]
    return {
        "name": judged.name,
        "images": judged.matches.num_images,
        "boxes": int(judged.matches.num_truth.sum()),
        "threshold": judged.threshold,
        "thresholds": {n: judged.threshold if p is None else p.threshold for n, p in zip(names, best, strict=True)},
        "best_f1": _point(judged.overall.best),
        "at_precision": {str(wanted): _point(judged.overall.at_precision(wanted)) for wanted in WANTED_PRECISION},
        "numbers": judged.numbers,
        "intervals_95": judged.intervals,
        "classes": {
            name: {"AP": None if np.isnan(ap) else float(ap), "boxes": int(boxes), "best_f1": _point(point)}
            for name, ap, boxes, point in zip(names, judged.class_ap, judged.matches.num_truth, best, strict=True)
        },
        "ap_by_iou": dict(zip((f"{iou:.2f}" for iou in IOUS), judged.ap_by_iou.tolist(), strict=True)),
        "calibration_error": judged.calibration.error,
        "confusion_matrix": judged.matrix.tolist(),
        "tide": {"ap50": judged.errors.ap50, "cost": judged.errors.cost},
        "strata": [asdict(each) for each in judged.strata],
        "annotation_mistakes": [_suspect(judged, each) for each in judged.suspects],
        "voc": judged.voc,
        "scene_graphs": None if judged.graphs is None else judged.graphs.as_json(judged.table.predicates),
    }


def _point(point: Point | None) -> dict | None:
    return None if point is None else asdict(point)


def _suspect(judged: Judgement, each: Suspect) -> dict:
    m = judged.matches
    row = {"kind": each.kind, "image_id": m.image_ids[each.image], "file_name": judged.table.file_name(each.image)}
    row["strength"] = round(each.strength, 4)
    for what, boxes, at in (("predicted", m.found, each.det), ("annotated", m.truth, each.gt)):
        if at >= 0:
            name = m.class_names[boxes.labels[at]]
            row[what] = {"class": name, "bbox": [round(v, 2) for v in boxes.xywh[at].tolist()]}
    return row
