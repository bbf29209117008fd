"""Sorts errors by type and computes the AP that each type costs, as in TIDE (Bolya et al., ECCV 2020), and computes
recall by properties of the objects.

Every wrong prediction has one type, which depends on the boxes that it overlaps (an IoU of 0.5 counts as found, one
below 0.1 as background). A box is missed if no prediction finds it, and none would find it with a corrected class or
location. The cost of a type is AP50 with all errors of the type corrected (class or location fixed, other predictions
removed) minus AP50. The costs do not add up to 1 - AP50.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.base.boxes import common_and_union
from toolkit.evaluation.coco_numbers import exact_average_precision
from toolkit.evaluation.matches import AREA_RANGES, BACKGROUND_IOU, Matches, best_pairs, pairs_within_groups

ERROR_KINDS = ("class", "localisation", "both", "duplicate", "background", "missed")
ERROR_MEANINGS = {
    "class": "the place is right, the class is another",
    "localisation": "the class is right, the prediction overlaps its object by less than half",
    "both": "the class is another and the prediction overlaps its object by less than half",
    "duplicate": "the object was already found by a better prediction",
    "background": "no annotated box is at this place",
    "missed": "no prediction is near the object",
}
CORRECT, IN_CROWD, NOT_COUNTED = 6, 7, 8  # predictions without a mistake, beside the rows of ERROR_KINDS
MAX_PER_IMAGE = 100  # predictions of an image that count, of all classes together
MATCH_IOU = 0.5
EDGE_PX = 1.0  # a box closer than this to the edge of the image, in pixels, is cut off by it
TOUCHING_IOU = 0.05  # IoU from which two annotated boxes count as neighbours
# Ranges of numbers, without their end.
SIZE_BINS = {
    "small (below 32²)": AREA_RANGES["s"],
    "medium (32² to 96²)": AREA_RANGES["m"],
    "large (above 96²)": AREA_RANGES["l"],
}
NEIGHBOUR_BINS = {"none": (0, 1), "1": (1, 2), "2 or 3": (2, 4), "4 or more": (4, np.inf)}
VERTICAL, HORIZONTAL = ("top", "middle", "bottom"), ("left", "centre", "right")
OBJECTS_PER_IMAGE_BINS = {"1": (1, 2), "2 to 5": (2, 6), "6 to 20": (6, 21), "more than 20": (21, np.inf)}


@dataclass(frozen=True)
class Errors:
    """The errors of a detector in D predictions on G annotated boxes.

    Attributes:
        kind: (D,) index in `ERROR_KINDS`, or `CORRECT`, `IN_CROWD`, or `NOT_COUNTED` for a prediction that is not among
            the 100 best of its image.
        gt: (D,) row of the annotated box that would be found if a prediction of kind "class" or "localisation" were
            corrected; -1: none.
        missed: (G,) bool: whether the box is missed.
        ap50: AP50 from 0 to 1.
        cost: AP50 that each kind costs, by its name, and by "false positives" (all wrong predictions) and "false
            negatives" (all boxes that are not found).
    """

    kind: np.ndarray
    gt: np.ndarray
    missed: np.ndarray
    ap50: float
    cost: dict[str, float]

    def of(self, kind: str) -> np.ndarray:
        """Return the rows of the predictions with this kind of error, a name in `ERROR_KINDS`."""
        return np.flatnonzero(self.kind == ERROR_KINDS.index(kind))


def tide_errors(matches: Matches) -> Errors:
    """Sort the wrong predictions and missed boxes into kinds, and compute the AP50 that each kind costs (TIDE, Bolya et
    al. 2020)."""
    m = matches
    first = np.searchsorted(m.found.image_index, m.found.image_index)
    counted = np.arange(len(m.found)) - first < MAX_PER_IMAGE
    used = np.zeros(len(m.truth), bool)
    right = m.right & counted
    used[m.at_half[right]] = True
    kind, gt = _error_kinds(m, counted, right, used)
    usable = np.zeros(len(m.truth), bool)
    usable[gt[gt >= 0]] = True
    missed = ~used & ~m.crowd & ~usable
    whole = _Whole(m, kind, gt, used, missed)
    ap50 = whole.ap50()
    cost = {name: whole.ap50(mended=name) - ap50 for name in (*ERROR_KINDS, "false positives", "false negatives")}
    return Errors(kind, gt, missed, ap50, cost)


def _error_kinds(m: Matches, counted: np.ndarray, right: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def best(among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        among = among & ~m.crowd[m.gt]
        return best_pairs(
            m.det[among],
            m.gt[among],
            m.iou[among],
            len(m.found),
        )

    same, same_gt = best(m.same_class)
    other, other_gt = best(~m.same_class)
    duplicate, _ = best(m.same_class & used[m.gt])
    kind = np.full(len(m.found), ERROR_KINDS.index("both"))
    gt = np.full(len(m.found), -1, np.int64)
    rules = (  # the last one that applies decides
        ("background", np.maximum(same, other) <= BACKGROUND_IOU, None),
        ("duplicate", duplicate >= MATCH_IOU, None),
        ("class", other >= MATCH_IOU, other_gt),
        ("localisation", (same >= BACKGROUND_IOU) & (same <= MATCH_IOU), same_gt),
    )
    for name, holds, boxes in rules:
        kind[holds] = ERROR_KINDS.index(name)
        gt[holds] = -1 if boxes is None else boxes[holds]
    for code, rows in ((IN_CROWD, ~m.counts), (CORRECT, right), (NOT_COUNTED, ~counted)):
        kind[rows] = code
        gt[rows] = -1
    gt[np.append(used, False)[gt]] = -1  # another prediction has found it: nothing to correct
    return kind, gt


class _Whole:
    """AP50 with and without some mistakes."""

    def __init__(self, m: Matches, kind: np.ndarray, gt: np.ndarray, used: np.ndarray, missed: np.ndarray):
        self.m = m
        self.kind = kind
        self.gt = gt
        self.lost = {"missed": missed, "false negatives": ~used & ~m.crowd}
        rows = np.flatnonzero(gt >= 0)
        rows = rows[np.lexsort((-rows, m.found.scores[rows]))]
        self.best = np.full(len(m.truth), -1, np.int64)
        self.best[gt[rows]] = rows  # of several that could have the box, the one with the highest score corrects it

    def ap50(self, mended: str | None = None) -> float:
        m = self.m
        labels = m.found.labels.copy()
        scores = m.found.scores
        right = self.kind == CORRECT
        shown = self.kind <= CORRECT
        total = m.num_truth
        if mended in self.lost:
            total = total - np.bincount(m.truth.labels[self.lost[mended]], minlength=m.num_classes)
        elif mended == "false positives":
            scores = right.astype(float)
        elif mended is not None:
            rows = np.flatnonzero(self.kind == ERROR_KINDS.index(mended))
            mendable = rows[self.gt[rows] >= 0]
            good = mendable[self.best[self.gt[mendable]] == mendable]
            shown[rows] = False
            shown[good] = True
            right[good] = True
            labels[good] = m.truth.labels[self.gt[good]]
        order = np.argsort(-scores, kind="stable")
        order = order[shown[order]]
        aps = []
        for label in np.flatnonzero(m.num_truth):
            rows = order[labels[order] == label]
            # without a box left AP is 0, as in tidecv
            aps.append(exact_average_precision(right[rows], ~right[rows], total[label]) if total[label] else 0.0)
        return float(np.mean(aps)) if aps else 0.0


@dataclass(frozen=True)
class Stratum:
    """A group of objects and the share of them that is found.

    Attributes:
        topic, name: the property and its value, such as "boxes in the image" and "2 to 5".
        boxes: number of objects.
        recall: share found at IoU 0.5 by predictions above the score threshold.
        recall_at_any_score: share found at IoU 0.5 by any prediction.
    """

    topic: str
    name: str
    boxes: int
    recall: float
    recall_at_any_score: float


def strata(matches: Matches, threshold: float) -> list[Stratum]:
    """Return the groups of objects, such as small ones, with their recall; crowds are left out, and so are empty
    groups.

    threshold: score above which predictions count in `Stratum.recall`.
    """
    m = matches
    rows = np.flatnonzero(~m.crowd)
    at_any = np.zeros(len(m.truth), bool)
    above = np.zeros(len(m.truth), bool)
    at_any[m.at_half[m.right]] = True
    above[m.at_half[m.right & (m.found.scores > threshold)]] = True
    result = []
    for topic, groups in _strata_rows(m, rows).items():
        for name, inside in groups.items():
            some = rows[inside]
            if len(some):
                result.append(
                    Stratum(
                        topic,
                        name,
                        len(some),
                        float(above[some].mean()),
                        float(at_any[some].mean()),
                    )
                )
    return result


def _strata_rows(m: Matches, rows: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Return, by topic and name, a bool for each of the boxes `rows` that says whether it belongs to the group."""
    boxes = m.truth.xyxy[rows]
    image = m.truth.image_index[rows]
    height, width = m.sizes_hw[image].T
    left, top, right, bottom = boxes.T
    cut = (left <= EDGE_PX) | (top <= EDGE_PX) | (right >= width - EDGE_PX) | (bottom >= height - EDGE_PX)
    x = (left + right) / 2 / width
    y = (top + bottom) / 2 / height
    column = np.clip((x * 3).astype(int), 0, 2)  # of three
    line = np.clip((y * 3).astype(int), 0, 2)
    topics = {
        "size in pixels": (m.truth.area[rows], SIZE_BINS),
        "boxes that overlap it": (neighbours(m)[rows], NEIGHBOUR_BINS),
        "boxes in the image": (np.bincount(image, minlength=m.num_images)[image], OBJECTS_PER_IMAGE_BINS),
    }
    groups = {}
    for topic, (values, ranges) in topics.items():
        groups[topic] = {}
        for name, (low, end) in ranges.items():
            groups[topic][name] = (values >= low) & (values < end)
    groups["edge of the image"] = {"cut off": cut, "not cut off": ~cut}
    places = {}
    for j, vertical in enumerate(VERTICAL):
        for i, horizontal in enumerate(HORIZONTAL):
            places[f"{vertical} {horizontal}"] = (line == j) & (column == i)
    groups["place in the image"] = places
    return groups


def neighbours(m: Matches) -> np.ndarray:
    """Return (G,): for each annotated box, the number of other boxes in its image with an IoU above `TOUCHING_IOU`."""
    counts = np.full(len(m.truth), -1)  # a box overlaps itself
    for first, second in pairs_within_groups(m.truth.image_index, m.truth.image_index):
        common, union = common_and_union(m.truth.xyxy[first], m.truth.xyxy[second])
        counts += np.bincount(first[common > TOUCHING_IOU * union], minlength=len(counts))
    return counts.clip(min=0)
