"""COCO metrics from matched boxes, with the rounding of pycocotools (Lin et al. 2014, its `accumulate`).

`pycocotools_numbers` computes the same metrics by pycocotools itself, for `eval.backend pycocotools`.
"""

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.base.imports import gc_disabled
from toolkit.evaluation.matches import AREA_RANGES, IOU_THRESHOLDS, Matches, any_class

RECALL_THRESHOLDS = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True)
class CocoNumbers:
    """The metrics of B data sets: of one data set (B = 1), or of B random draws from it; NaN without boxes to find.

    numbers: (B,) each, by name: AP, AP50 and the others of `toolkit.evaluation.shown_metrics.COCO_METRICS`.
    of_class, half_of_class, recall_of_class: (B, K) AP, AP50 and AR (with the most detections) of each of K classes.
    by_iou: (10, B) AP, averaged over classes, at each IoU threshold.
    """

    numbers: Mapping[str, np.ndarray]
    of_class: np.ndarray
    half_of_class: np.ndarray
    recall_of_class: np.ndarray
    by_iou: np.ndarray


def exact_numbers(matches: Matches) -> CocoNumbers:
    """Compute the metrics of one data set (B = 1); they equal those of pycocotools to 1e-12."""
    by_class = ByClass(matches)
    results = [_one_class(by_class, label) for label in range(matches.num_classes)]
    return summarise(results, 1, matches.max_detections)


def summarise(
    results: Iterable[tuple[np.ndarray, np.ndarray]], draws: int, max_detections: Sequence[int]
) -> CocoNumbers:
    """Compute the metrics from those of each class, as means over the values that are defined.

    results: for each class, AP (A, T, B) by area range and IoU threshold, and recall (S, T, B): first at each of
        `max_detections`, then for each area range except "all".
    draws: B. max_detections: as of `Matches`.
    """
    slots = [f"AR{most}" for most in max_detections]
    slots += [f"AR{name}" for name in AREA_RANGES if name != "all"]
    results = list(results)  # empty without classes; every number is then NaN
    ap = np.array([of_class[0] for of_class in results])
    ap = ap.reshape(-1, len(AREA_RANGES), len(IOU_THRESHOLDS), draws)
    recall = np.array([of_class[1] for of_class in results])
    recall = recall.reshape(-1, len(slots), len(IOU_THRESHOLDS), draws)
    whole = ap[:, 0]  # (K, T, B) of boxes of any area
    numbers = {
        "AP": _mean(whole, (0, 1)),
        "AP50": _mean(whole[:, 0], (0,)),
        "AP75": _mean(whole[:, 5], (0,)),
    }
    for a, area in enumerate(AREA_RANGES):
        if a:
            numbers[f"AP{area}"] = _mean(ap[:, a], (0, 1))
    for slot, name in enumerate(slots):
        numbers[name] = _mean(recall[:, slot], (0, 1))
    of_most = recall[:, len(max_detections) - 1]  # (K, T, B)
    return CocoNumbers(
        numbers,
        of_class=_mean(whole, (1,)).T,
        half_of_class=whole[:, 0].T,
        recall_of_class=_mean(of_most, (1,)).T,
        by_iou=_mean(whole, (0,)),
    )


class ByClass:
    """The data that the metrics of all classes are computed from, in lists by class.

    of_class: rows of `found` with the predictions of each class, best first.
    near: positions in `of_class` of the predictions with an IoU of at least 0.5 with a box of their class.
    candidate: index of the column that each prediction in `near` has in `matches.coco.gt`.
    required: (A, G) bool, whether a box must be found, by area range. totals: (A, K) their number by class.
    """

    def __init__(self, matches: Matches):
        self.matches = matches
        classes = matches.num_classes
        candidate = np.full(len(matches.found), -1, np.int64)  # column of `matches.coco.gt`; -1: none
        candidate[matches.coco.det] = np.arange(len(matches.coco.det))
        labels = matches.found.labels[matches.order]
        by_label = matches.order[np.argsort(labels, kind="stable")]
        ends = np.cumsum(np.bincount(labels, minlength=classes))
        self.of_class = np.split(by_label, ends[:-1])
        self.near = []
        self.candidate = []
        for rows in self.of_class:
            near = np.flatnonzero(candidate[rows] >= 0)
            self.near.append(near)
            self.candidate.append(candidate[rows[near]])
        self.required = np.stack([~matches.ignored(area) for area in AREA_RANGES])  # (A, G)
        totals = []
        for required in self.required:
            of_boxes = matches.truth.labels[required]
            totals.append(np.bincount(of_boxes, minlength=classes))
        self.totals = np.stack(totals)  # (A, K)

    def inside(self, label: int, area: str) -> np.ndarray:
        """Return, for each prediction in `of_class[label]`, whether its area is in the area range, as bool array."""
        low, high = AREA_RANGES[area]
        area_of = self.matches.found.area[self.of_class[label]]
        return (area_of >= low) & (area_of <= high)

    def tops(self, area: int) -> list[tuple[int, int]]:
        """Return (slot, most) of each recall that is computed for an area range.

        slot: index into the recalls of `summarise`. most: how many predictions of an image and class count.
        """
        most = self.matches.max_detections
        if area == 0:
            return list(enumerate(most))
        return [(len(most) - 1 + area, most[-1])]

    def undefined(self, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Return AP (areas, IoUs, B) and recall (as for `summarise`) of one class, filled with NaN."""
        slots = len(self.matches.max_detections) + len(AREA_RANGES) - 1
        ap = np.full((len(AREA_RANGES), len(IOU_THRESHOLDS), draws), np.nan)
        recall = np.full((slots, len(IOU_THRESHOLDS), draws), np.nan)
        return ap, recall


def _one_class(shared: ByClass, label: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute AP (A, T, 1) and recall (S, T, 1) of one class, as for `summarise`.

    Only the C predictions near a box can be right, and only at right ones does the precision rise. So the others are
    merely counted.
    """
    m = shared.matches
    ap, recall = shared.undefined(1)
    near = shared.near[label]
    candidate = shared.candidate[label]
    rank = m.rank[shared.of_class[label][near]]
    for a, area in enumerate(AREA_RANGES):
        total = shared.totals[a, label]
        if not total:
            continue
        inside = shared.inside(label, area)
        gt = m.coco.gt[a][:, candidate]  # (T, C)
        finds = gt >= 0
        right = finds & shared.required[a][gt]
        inside_so_far = np.cumsum(inside)[near]
        wrong_so_far = inside_so_far - np.cumsum(finds & inside[near], axis=1)
        ap[a, :, 0] = _average_precisions(right, wrong_so_far, total)
        for slot, top in shared.tops(a):
            recall[slot, :, 0] = right[:, rank < top].sum(axis=1) / total
    return ap, recall


def _average_precisions(right: np.ndarray, wrong_so_far: np.ndarray, total: int) -> np.ndarray:
    """Compute `exact_average_precision` at each of T IoU thresholds from the predictions near a box, best first.

    right: (T, C) bool, true positives. wrong_so_far: (T, C) the number of false positives up to each of the C
    predictions, those that are not near a box included. total: number of boxes to find.
    """
    right_so_far = np.cumsum(right, axis=1).astype(float)
    precision = right_so_far / np.maximum(right_so_far + wrong_so_far, 1)
    best_from_here = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    with_end = np.pad(best_from_here, [(0, 0), (0, 1)])  # a recall that is not reached has precision 0
    recall = right_so_far / total
    at_recall = [
        of_threshold[np.searchsorted(reached, RECALL_THRESHOLDS, side="left")]
        for of_threshold, reached in zip(with_end, recall, strict=True)
    ]
    return np.stack(at_recall).mean(axis=1)


def exact_average_precision(right: np.ndarray, wrong: np.ndarray, total: int) -> float:
    """Compute COCO's AP of predictions, best first, from bool masks of true and of false positives.

    Predictions in neither mask are ignored. total: number of boxes to find.
    """
    wrong_so_far = np.cumsum(wrong)
    return float(_average_precisions(right[None], wrong_so_far[None], total)[0])


def _mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Compute means over the finite values along `axes`; NaN where there are none."""
    defined = np.isfinite(values)
    count = defined.sum(axis=axes)
    total = np.where(defined, values, 0.0).sum(axis=axes)
    undefined = np.full(count.shape, np.nan)
    return np.divide(total, count, out=undefined, where=count > 0)


def any_class_ap(matches: Matches) -> float | None:
    """Compute the AP of detections whose class does not matter: pycocotools' AP with `useCats` 0; None without boxes to
    find. It is much above AP where objects are found but named wrongly."""
    value = exact_numbers(any_class(matches)).numbers["AP"][0]
    return None if np.isnan(value) else float(value)


def pycocotools_numbers(matches: Matches) -> dict[str, float | None]:
    """Compute the metrics of `toolkit.evaluation.coco.coco_row` by pycocotools, with 2 kB of memory per box.

    Of matches by mask, they are the metrics of masks under the same names.
    """
    from pycocotools.cocoeval import COCOeval

    m = matches
    with contextlib.redirect_stdout(io.StringIO()), gc_disabled():  # it prints its progress
        run = COCOeval(_loaded(m.truth, m), _loaded(m.found, m), iouType="segm" if m.by_mask else "bbox")
        run.params.maxDets = list(m.max_detections)
        run.params.catIds = list(range(m.num_classes))
        run.evaluate()
        run.accumulate()
    precision = np.array(run.eval["precision"])
    recall = np.asarray(run.eval["recall"])
    return _row(precision, recall, run.params, m)


def _loaded(boxes: Boxes, m: Matches):
    """Load boxes into a `COCO`.

    Image ids are positions in the table, so that strings are possible too. Annotation ids count from 1: the evaluation
    marks "not matched" with 0, so the box with id 0 would never be found.
    """
    from pycocotools.coco import COCO

    scores = np.ones(len(boxes)) if boxes.scores is None else boxes.scores
    columns = {
        "image_id": boxes.image_index.tolist(),
        "category_id": boxes.labels.tolist(),
        "bbox": boxes.xywh.tolist(),
        "area": boxes.area.tolist(),
        "iscrowd": boxes.iscrowd.astype(int).tolist(),
        "score": scores.tolist(),
    }
    if m.by_mask:
        columns["segmentation"] = [mask.as_coco() for mask in boxes.extra["masks"]]
    annotations = []
    for number, values in enumerate(zip(*columns.values(), strict=True), start=1):
        annotation = dict(zip(columns, values, strict=True))
        annotations.append({"id": number, **annotation})
    coco = COCO()
    coco.dataset = {
        "images": [{"id": i, "height": h, "width": w} for i, (h, w) in enumerate(m.sizes_hw.tolist())],
        "categories": [{"id": k} for k in range(m.num_classes)],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


def _row(precision: np.ndarray, recall: np.ndarray, params, m: Matches) -> dict[str, float | None]:
    """Compute the numbers of COCOeval.summarize(), and those of each class; changes `precision`.

    precision: (T, R, K, A, M) by IoU, recall, class, area and largest number of detections. recall: (T, K, A, M).
    """
    # It adds an epsilon to its denominators, so that one detection out of one is 1 - 2e-16, not 1.
    precision[precision > 1 - 1e-15] = 1
    half = int(np.argmin(abs(params.iouThrs - 0.5)))
    three_quarters = int(np.argmin(abs(params.iouThrs - 0.75)))
    areas = {"s": 1, "m": 2, "l": 3}  # small, medium, large; 0 is all
    # Of the most detections that count: (T, R, K, A) and (T, K, A); of boxes of any area: (T, R, K) and (T, K).
    precision_by_area = precision[..., -1]
    recall_by_area = recall[..., -1]
    precision_of_all = precision_by_area[..., 0]
    recall_of_all = recall_by_area[..., 0]
    row = {
        "bbox_AP": _mean_of_defined(precision_of_all),
        "bbox_AP50": _mean_of_defined(precision_of_all[half]),
        "bbox_AP75": _mean_of_defined(precision_of_all[three_quarters]),
    }
    for name, area in areas.items():
        row[f"bbox_AP{name}"] = _mean_of_defined(precision_by_area[..., area])
    for i, most in enumerate(m.max_detections):
        row[f"bbox_AR{most}"] = _mean_of_defined(recall[:, :, 0, i])
    for name, area in areas.items():
        row[f"bbox_AR{name}"] = _mean_of_defined(recall_by_area[..., area])
    most = m.max_detections[-1]
    for k, name in enumerate(m.class_names):
        row[f"AP/{name}"] = _mean_of_defined(precision_of_all[:, :, k])
        row[f"AP50/{name}"] = _mean_of_defined(precision_of_all[half, :, k])
        row[f"AR{most}/{name}"] = _mean_of_defined(recall_of_all[:, k])
    return row


def _mean_of_defined(values: np.ndarray) -> float | None:
    defined = values[values > -1]
    if not defined.size:
        return None
    return float(defined.mean())
