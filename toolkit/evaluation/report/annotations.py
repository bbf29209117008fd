"""Boxes that the annotation seems to have wrong: where a detector that is usually right disagrees with it.

Four kinds: a confident prediction where no box is ("no box"); one of another class on a box that no confident
prediction of its own class supports ("class"); one beside such a box ("place"); and a box that no prediction supports
at all ("nothing there"). A prediction is confident above its class's threshold of the best F1.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.evaluation.report.matches import BACKGROUND_IOU, Matches
from toolkit.evaluation.report.thresholds import sweep

KINDS = {
    "no box": "a confident prediction where nothing is annotated",
    "class": "a confident prediction of another class on an annotated box",
    "place": "a confident prediction that overlaps a box, which nothing else supports, by less than half",
    "nothing there": "an annotated box that no prediction supports",
}
ENOUGH = 20  # objects found of a class before it has a threshold of its own
ON_IT, BESIDE = 0.5, BACKGROUND_IOU
WEAK = 0.25  # share of the threshold above which a prediction of any class still supports a box


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
    """All of them, the strongest first."""
    m = matches
    strong = m.found.scores > _thresholds(m)[m.found.labels]
    on_box = ~m.crowd[m.gt] & (m.iou >= ON_IT)
    supported = np.zeros(len(m.truth), bool)
    supported[m.gt[on_box & m.same_class & strong[m.det]]] = True
    busy = m.right.copy()  # predictions that are about a box of the annotation
    found, taken = [], supported | m.crowd

    def pair(among: np.ndarray, kind: str) -> None:
        """Each box gets the strongest of its predictions, each prediction one box."""
        rows = np.flatnonzero(among & strong[m.det] & ~taken[m.gt])
        for row in rows[np.lexsort((-m.iou[rows], -m.found.scores[m.det[rows]]))].tolist():
            det, gt = int(m.det[row]), int(m.gt[row])
            if not taken[gt] and not busy[det]:
                taken[gt] = busy[det] = True
                found.append(Suspect(kind, int(m.found.image_index[det]), float(m.found.scores[det]), det, gt))

    pair(on_box & ~m.same_class, "class")
    pair(~m.crowd[m.gt] & (m.iou >= BESIDE) & (m.iou < ON_IT), "place")
    covered = np.zeros(len(m.found), bool)  # on a box, or in a crowd
    covered[m.det[m.iou >= ON_IT]] = True
    for det in np.flatnonzero(strong & ~busy & ~covered & ~_beside_another(m, strong)).tolist():
        found.append(Suspect("no box", int(m.found.image_index[det]), float(m.found.scores[det]), det, -1))
    support = np.zeros(len(m.truth))
    relative = (m.found.scores / np.maximum(_thresholds(m)[m.found.labels], 1e-9))[m.det]
    np.maximum.at(support, m.gt[on_box], relative[on_box])
    for gt in np.flatnonzero(~taken & (support < WEAK)).tolist():
        found.append(Suspect("nothing there", int(m.truth.image_index[gt]), float(1 - support[gt]), -1, gt))
    return sorted(found, key=lambda each: -each.strength)


def _beside_another(m: Matches, strong: np.ndarray) -> np.ndarray:
    """(D,) bool: a stronger prediction of the same image overlaps it by half: a duplicate, not another object."""
    result = np.zeros(len(m.found), bool)
    rows = np.flatnonzero(strong)
    images = m.found.image_index[rows]
    cuts = np.flatnonzero(np.diff(images, prepend=-1, append=-1))
    for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        some = rows[start:stop]  # best first
        b = m.found.boxes_xyxy[some]
        low, high = np.maximum(b[:, None, :2], b[None, :, :2]), np.minimum(b[:, None, 2:], b[None, :, 2:])
        common = (high - low).clip(min=0).prod(axis=2)
        area = (b[:, 2:] - b[:, :2]).prod(axis=1)
        over = common > ON_IT * (area[:, None] + area[None] - common)
        result[some] = np.triu(over, 1).any(axis=0)
    return result


def _thresholds(m: Matches) -> np.ndarray:
    """(K,) of the best F1; the one of all classes for a class of which too little was found."""
    overall = sweep(m).best
    result = np.full(m.num_classes, 1.0 if overall is None else overall.threshold)
    found = np.bincount(m.found.labels[m.right], minlength=m.num_classes)
    for label in np.flatnonzero(found >= ENOUGH).tolist():
        result[label] = sweep(m, label).best.threshold
    return result
