"""COCO metrics from matched boxes, with the rounding of pycocotools (Lin et al. 2014, its `accumulate`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.evaluation.matches import AREAS, IOUS, Matches

TWELVE = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
RECALLS = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True)
class CocoNumbers:
    """The numbers of B data sets, of one (B = 1) or of draws from it; NaN where there was nothing to find.

    numbers: (B,) by name: AP, AP50, ... of_class, half_of_class, recall_of_class: (B, K) AP, AP50 and AR (of the most
    detections) of each class. by_iou: (10, B) mean AP at each IoU threshold.
    """

    numbers: Mapping[str, np.ndarray]
    of_class: np.ndarray
    half_of_class: np.ndarray
    recall_of_class: np.ndarray
    by_iou: np.ndarray


def exact_numbers(matches: Matches) -> CocoNumbers:
    """The numbers of the data as they are (B = 1), those of pycocotools to 1e-12."""
    by_class = ByClass(matches)
    return summary((_one_class(by_class, label) for label in range(matches.num_classes)), 1, matches.max_detections)


def summary(results: Iterable[tuple[np.ndarray, np.ndarray]], draws: int, max_detections: Sequence[int]) -> CocoNumbers:
    """Means over what is defined.

    results: of each class AP (A, T, B) by area and IoU, and recall (S, T, B) at each of `max_detections` and then for
        each smaller area.
    """
    results = list(results)
    areas = [name for name in AREAS if name != "all"]
    slots = [f"AR{most}" for most in max_detections] + [f"AR{name}" for name in areas]
    if not results:
        none = np.zeros((draws, 0))
        names = ["AP", "AP50", "AP75", *(f"AP{name}" for name in areas), *slots]
        numbers = dict.fromkeys(names, np.full(draws, np.nan))
        return CocoNumbers(numbers, none, none, none, np.full((len(IOUS), draws), np.nan))
    ap, recall = (np.stack(part) for part in zip(*results, strict=True))
    numbers = {"AP": _mean(ap[:, 0], (0, 1)), "AP50": _mean(ap[:, 0, 0], (0,)), "AP75": _mean(ap[:, 0, 5], (0,))}
    numbers |= {f"AP{name}": _mean(ap[:, a], (0, 1)) for a, name in enumerate(AREAS) if a}
    numbers |= {name: _mean(recall[:, slot], (0, 1)) for slot, name in enumerate(slots)}
    most = recall[:, len(max_detections) - 1]
    return CocoNumbers(numbers, _mean(ap[:, 0], (1,)).T, ap[:, 0, 0].T, _mean(most, (1,)).T, _mean(ap[:, 0], (0,)))


class ByClass:
    """What the numbers of all classes look up: rows by class, best first, and the boxes to find by area.

    of_class: rows of `found`. near: places in them of predictions that some box of the class overlaps by half.
    """

    def __init__(self, matches: Matches):
        self.matches = matches
        candidate = np.full(len(matches.found), -1, np.int64)
        candidate[matches.coco.det] = np.arange(len(matches.coco.det))
        labels = matches.found.labels[matches.order]
        by_label = matches.order[np.argsort(labels, kind="stable")]
        self.of_class = np.split(by_label, np.cumsum(np.bincount(labels, minlength=matches.num_classes))[:-1])
        self.near = [np.flatnonzero(candidate[rows] >= 0) for rows in self.of_class]
        self.candidate = [candidate[rows[near]] for rows, near in zip(self.of_class, self.near, strict=True)]
        self.required = np.stack([~matches.ignored(area) for area in AREAS])
        self.totals = np.stack([np.bincount(matches.truth.labels[required], minlength=matches.num_classes)
                                for required in self.required])  # fmt: skip

    def inside(self, label: int, area: str) -> np.ndarray:
        """(rows of the class,) bool: in the area range."""
        low, high = AREAS[area]
        area_of = self.matches.found.area[self.of_class[label]]
        return (area_of >= low) & (area_of <= high)

    def tops(self, area: int) -> list[tuple[int, int]]:
        """(row of the recalls, predictions of an image and class that count) of an area."""
        most = self.matches.max_detections
        return [(len(most) - 1 + area, most[-1])] if area else list(enumerate(most))

    def undefined(self, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """AP (areas, IoUs, B) and recall (as `summary` takes it) of one class, to be filled in."""
        slots = len(self.matches.max_detections) + len(AREAS) - 1
        return np.full((len(AREAS), len(IOUS), draws), np.nan), np.full((slots, len(IOUS), draws), np.nan)


def _one_class(shared: ByClass, label: int) -> tuple[np.ndarray, np.ndarray]:
    m = shared.matches
    ap, recall = shared.undefined(1)
    rows, near, candidate = shared.of_class[label], shared.near[label], shared.candidate[label]
    for a, area in enumerate(AREAS):
        total = shared.totals[a, label]
        if not total:
            continue
        inside = shared.inside(label, area)
        for t in range(len(IOUS)):
            gt = np.full(len(rows), -1, np.int64)
            gt[near] = m.coco.gt[a, t, candidate]
            right = (gt >= 0) & shared.required[a][gt]
            ap[a, t] = exact_average_precision(right, (gt < 0) & inside, total)
            for slot, top in shared.tops(a):
                recall[slot, t] = right[m.rank[rows] < top].sum() / total
    return ap, recall


def exact_average_precision(right: np.ndarray, wrong: np.ndarray, total: int) -> float:
    """COCO's AP of predictions, best first, of which some are right, some wrong and the others do not count."""
    found, missed = np.cumsum(right), np.cumsum(wrong)
    keep = right | wrong
    found, missed = found[keep].astype(float), missed[keep].astype(float)
    precision = found / np.maximum(found + missed, 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(found / total, RECALLS, side="left")
    return float(np.append(precision, 0.0)[np.minimum(at, len(precision))].mean())


def _mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    defined = np.isfinite(values)
    count = defined.sum(axis=axes)
    total = np.where(defined, values, 0.0).sum(axis=axes)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)
