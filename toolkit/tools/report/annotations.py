"""Boxes that are probably annotated wrongly: where a usually correct detector disagrees with them.

Four kinds: a confident prediction where no box is ("no box"); one of another class on a box that no confident
prediction of its own class supports ("class"); one beside such a box ("place"); and a box that no prediction supports
at all ("nothing there"). A prediction is confident above its class's threshold of the best F1. The first three are what
Tkachenko et al. 2023 (ObjectLab) look for; a box of the fourth kind may as well be an object that the detector misses,
so these come last.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.base.boxes import common_and_union
from toolkit.evaluation.matches import BACKGROUND_IOU, Matches, paired
from toolkit.tools.report.thresholds import sweep

SUSPICIONS = {
    "no box": "a confident prediction where nothing is annotated",
    "class": "a confident prediction of another class on an annotated box",
    "place": "a confident prediction beside a box, which nothing else supports, or less than half on it",
    "nothing there": "an annotated box that no prediction supports",
}
MIN_FOUND_OBJECTS = 20  # found objects of a class from which it has its own threshold
MATCH_IOU = 0.5
BESIDE_IOU = BACKGROUND_IOU
MAX_MOVED_DISTANCE = 1.0  # of a moved box, in units of its side
MAX_SIZE_RATIO = 2.0  # of a moved box and the annotated one
MIN_SUPPORT_SHARE = 0.25  # share of the threshold above which a prediction of any class still supports a box


@dataclass(frozen=True)
class Suspect:
    """One box that may be annotated wrongly.

    strength: from 0 to 1, the score of the prediction, or how little supports the box. det, gt: rows of the
    predictions and boxes of `Matches`; -1: none.
    """

    kind: str
    image: int
    strength: float
    det: int
    gt: int


def suspects(matches: Matches) -> list[Suspect]:
    """Return all suspicious boxes, those with a prediction first, each group sorted by strength."""
    m = matches
    threshold = thresholds_of_classes(m)[m.found.labels]
    strong = m.found.scores > threshold
    on_box = ~m.crowd[m.gt] & (m.iou >= MATCH_IOU)
    supported = np.zeros(len(m.truth), bool)
    supported[m.gt[on_box & m.same_class & strong[m.det]]] = True
    busy = m.right.copy()  # predictions that are about a box of the annotation
    result = []
    explained = supported | m.crowd

    def pair(among: np.ndarray, kind: str) -> None:
        """Pair each box with the strongest of its predictions, and each prediction with one box."""
        rows = np.flatnonzero(among & strong[m.det] & ~explained[m.gt])
        for row in rows[np.lexsort((-m.iou[rows], -m.found.scores[m.det[rows]]))].tolist():
            det = int(m.det[row])
            gt = int(m.gt[row])
            if not explained[gt] and not busy[det]:
                explained[gt] = busy[det] = True
                result.append(Suspect(kind, int(m.found.image_index[det]), float(m.found.scores[det]), det, gt))

    pair(on_box & ~m.same_class, "class")
    pair(~m.crowd[m.gt] & (m.iou >= BESIDE_IOU) & (m.iou < MATCH_IOU), "place")
    covered = np.zeros(len(m.found), bool)  # on a box, or in a crowd
    covered[m.det[m.iou >= MATCH_IOU]] = True
    support = np.zeros(len(m.truth))
    relative = (m.found.scores / np.maximum(threshold, 1e-9))[m.det]
    np.maximum.at(support, m.gt[on_box], relative[on_box])
    lone = np.flatnonzero(strong & ~busy & ~covered & ~_beside_another(m, strong)).tolist()
    empty = np.flatnonzero(~explained & (support < MIN_SUPPORT_SHARE)).tolist()
    moved = _moved(m, lone, empty)
    for det in lone:
        gt = moved.get(det, -1)
        kind = "no box" if gt < 0 else "place"
        result.append(Suspect(kind, int(m.found.image_index[det]), float(m.found.scores[det]), det, gt))
    for gt in sorted(set(empty) - set(moved.values())):
        result.append(Suspect("nothing there", int(m.truth.image_index[gt]), float(1 - support[gt]), -1, gt))
    return sorted(result, key=lambda suspect: (suspect.det < 0, -suspect.strength))


def _moved(m: Matches, dets: list[int], gts: list[int]) -> dict[int, int]:
    """Pair predictions that are on no box with a box near them of their class and about their size that no
    prediction supports. The nearest pairs come first; each box and prediction is in one pair at most."""
    alike: dict[tuple, list[int]] = {}
    for gt in gts:
        alike.setdefault((m.truth.image_index[gt], m.truth.labels[gt]), []).append(gt)
    both = [(det, gt) for det in dets for gt in alike.get((m.found.image_index[det], m.found.labels[det]), ())]
    det, gt = np.array(both, int).reshape(-1, 2).T
    predicted = m.found.xyxy[det]
    annotated = m.truth.xyxy[gt]
    sides = predicted[:, 2:] - predicted[:, :2]
    true_sides = np.maximum(annotated[:, 2:] - annotated[:, :2], 1e-9)
    between_centres = np.abs(predicted[:, 2:] + predicted[:, :2] - annotated[:, 2:] - annotated[:, :2]) / 2
    distance = (between_centres / true_sides).max(axis=1)
    larger = np.maximum(sides / true_sides, true_sides / np.maximum(sides, 1e-9)).max(axis=1)
    near = (distance <= MAX_MOVED_DISTANCE) & (larger <= MAX_SIZE_RATIO)
    pairs: dict[int, int] = {}
    for i in np.flatnonzero(near)[np.argsort(distance[near], kind="stable")].tolist():
        if det[i] not in pairs and gt[i] not in pairs.values():
            pairs[int(det[i])] = int(gt[i])
    return pairs


def _beside_another(m: Matches, strong: np.ndarray) -> np.ndarray:
    """Return (D,) bool, true if a stronger prediction of the same image overlaps by half: a duplicate, not another
    object."""
    result = np.zeros(len(m.found), bool)
    rows = np.flatnonzero(strong)  # best first within an image
    for first, second in paired(m.found.image_index[rows], m.found.image_index[rows]):
        common, union = common_and_union(m.found.xyxy[rows[first]], m.found.xyxy[rows[second]])
        result[rows[second[(common > MATCH_IOU * union) & (first < second)]]] = True
    return result


def thresholds_of_classes(m: Matches) -> np.ndarray:
    """Return (K,), the threshold of the best F1 of each class; the overall one for a class with too few true
    positives."""
    overall = sweep(m).best
    result = np.full(m.num_classes, 1.0 if overall is None else overall.threshold)
    true_positives = np.bincount(m.found.labels[m.right], minlength=m.num_classes)
    for label in np.flatnonzero(true_positives >= MIN_FOUND_OBJECTS).tolist():
        result[label] = sweep(m, label).best.threshold
    return result
