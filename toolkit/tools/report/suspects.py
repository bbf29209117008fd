"""Finds boxes that are probably annotated wrongly, because a detector that is usually right disagrees with them.

There are four kinds. "no box": a confident prediction where no box is annotated. "class": a confident prediction of
another class on a box that no confident prediction of the box's own class supports. "place": a confident prediction
beside such a box. "nothing there": a box that no prediction supports at all. A prediction is confident if its score is
above the threshold of the best F1 of its class. The first three kinds are those of Tkachenko et al. 2023 (ObjectLab). A
box of the fourth kind may as well be an object that the detector misses, so this kind comes last.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.base.boxes import common_and_union
from toolkit.evaluation.matches import BACKGROUND_IOU, Matches, pairs_within_groups
from toolkit.tools.report.thresholds import sweep

SUSPICIONS = {
    "no box": "a confident prediction where nothing is annotated",
    "class": "a confident prediction of another class on an annotated box",
    "place": "a confident prediction beside a box, which nothing else supports, or less than half on it",
    "nothing there": "an annotated box that no prediction supports",
}
MIN_FOUND_OBJECTS = 20  # found objects of a class from which it has its own threshold
MATCH_IOU = 0.5  # IoU from which a prediction is on a box
BESIDE_IOU = BACKGROUND_IOU  # IoU from which it is beside one
MAX_MOVED_DISTANCE = 1.0  # largest distance of a moved box, in units of its side
MAX_SIZE_RATIO = 2.0  # largest ratio of the sizes of a moved box and of the one that is found
MIN_SUPPORT_SHARE = 0.25  # share of the threshold above which a prediction of any class still supports a box


@dataclass(frozen=True)
class Suspect:
    """A box that may be annotated wrongly.

    Attributes:
        kind: a key of `SUSPICIONS`.
        image: row of the image in the table.
        strength: from 0 to 1, larger for a stronger suspicion: the score of the prediction; for "nothing there", 1
            minus the best score on the box as a fraction of its threshold.
        det, gt: rows of the prediction and of the annotated box in `Matches`; -1: there is none.
    """

    kind: str
    image: int
    strength: float
    det: int
    gt: int


def suspects(matches: Matches) -> list[Suspect]:
    """Return all suspicious boxes, those with a prediction first, each group sorted by strength."""
    m = matches
    threshold = _thresholds_of_classes(m)[m.found.labels]  # (D,)
    strong = m.found.scores > threshold

    # Masks of the pairs (P,) of a prediction and a box that overlap.
    with_object = ~m.crowd[m.gt]
    on_box = with_object & (m.iou >= MATCH_IOU)
    beside_box = with_object & (m.iou >= BESIDE_IOU) & (m.iou < MATCH_IOU)
    right_class = on_box & m.same_class & strong[m.det]

    explained = m.crowd.copy()  # (G,) boxes that need no explanation
    explained[m.gt[right_class]] = True
    used = m.right.copy()  # (D,) predictions that are about a box of the annotation
    result = []
    for det, gt in _strongest_pairs(m, on_box & ~m.same_class, strong, explained, used):
        result.append(_predicted(m, "class", det, gt))
    for det, gt in _strongest_pairs(m, beside_box, strong, explained, used):
        result.append(_predicted(m, "place", det, gt))

    covered = np.zeros(len(m.found), bool)  # predictions on a box, or in a crowd
    covered[m.det[m.iou >= MATCH_IOU]] = True
    lone = np.flatnonzero(strong & ~used & ~covered & ~_beside_another(m, strong)).tolist()
    support = _support(m, on_box, threshold)
    empty = np.flatnonzero(~explained & (support < MIN_SUPPORT_SHARE)).tolist()
    moved = _moved(m, lone, empty)
    for det in lone:
        if det in moved:
            result.append(_predicted(m, "place", det, moved[det]))
        else:
            result.append(_predicted(m, "no box", det, -1))
    for gt in sorted(set(empty) - set(moved.values())):
        image = int(m.truth.image_index[gt])
        result.append(Suspect("nothing there", image, float(1 - support[gt]), det=-1, gt=gt))
    return sorted(result, key=lambda suspect: (suspect.det < 0, -suspect.strength))


def _predicted(m: Matches, kind: str, det: int, gt: int) -> Suspect:
    image = int(m.found.image_index[det])
    score = float(m.found.scores[det])
    return Suspect(kind, image, score, det, gt)


def _strongest_pairs(
    m: Matches,
    among: np.ndarray,
    strong: np.ndarray,
    explained: np.ndarray,
    used: np.ndarray,
) -> list[tuple[int, int]]:
    """Pair each of G boxes that is not explained yet with its strongest prediction; each of D predictions is in at most
    one pair.

    Args:
        among: bool over the overlapping pairs in `m`: the pairs to choose from.
        strong: (D,) bool: the predictions to choose from.
        explained, used: (G,) and (D,) bool: boxes and predictions that must not be paired; those of the result are
            marked in them, in place.

    Returns:
        pairs (row of the prediction, row of the box), sorted by falling score, and by falling IoU for equal scores.
    """
    rows = np.flatnonzero(among & strong[m.det] & ~explained[m.gt])
    scores = m.found.scores[m.det[rows]]
    best_first = rows[np.lexsort((-m.iou[rows], -scores))]
    result = []
    for row in best_first.tolist():
        det = int(m.det[row])
        gt = int(m.gt[row])
        if explained[gt] or used[det]:
            continue
        explained[gt] = True
        used[det] = True
        result.append((det, gt))
    return result


def _support(m: Matches, on_box: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Return (G,): the highest score of a prediction on each of G boxes, divided by the prediction's threshold; else 0.
    """
    support = np.zeros(len(m.truth))
    relative = (m.found.scores / np.maximum(threshold, 1e-9))[m.det]
    np.maximum.at(support, m.gt[on_box], relative[on_box])
    return support


def _moved(m: Matches, dets: list[int], gts: list[int]) -> dict[int, int]:
    """Pair predictions `dets` that are on no box with boxes `gts` that no prediction supports, if both are near each
    other, of one class, and of about the same size; return {row of the prediction: row of the box}.

    The nearest pairs are made first; each box and each prediction is in at most one pair.
    """
    boxes_of: dict[tuple, list[int]] = {}  # by image and class
    for gt in gts:
        key = (m.truth.image_index[gt], m.truth.labels[gt])
        boxes_of.setdefault(key, []).append(gt)
    candidates = []
    for det in dets:
        key = (m.found.image_index[det], m.found.labels[det])
        candidates += [(det, gt) for gt in boxes_of.get(key, ())]
    det, gt = np.array(candidates, int).reshape(-1, 2).T  # (candidates,) each

    predicted = m.found.xyxy[det]
    annotated = m.truth.xyxy[gt]
    sides = predicted[:, 2:] - predicted[:, :2]  # (candidates, 2)
    true_sides = np.maximum(annotated[:, 2:] - annotated[:, :2], 1e-9)
    between_centres = np.abs(predicted[:, 2:] + predicted[:, :2] - annotated[:, 2:] - annotated[:, :2]) / 2
    # A box of 40 x 20 and a prediction of 50 x 20, 10 px to the right of it: the distance is 10 / 40 = 0.25 of a side,
    # the ratio 50 / 40 = 1.25.
    distance = (between_centres / true_sides).max(axis=1)
    wider = sides / true_sides
    narrower = true_sides / np.maximum(sides, 1e-9)
    ratio = np.maximum(wider, narrower).max(axis=1)

    near = np.flatnonzero((distance <= MAX_MOVED_DISTANCE) & (ratio <= MAX_SIZE_RATIO))
    nearest_first = near[np.argsort(distance[near], kind="stable")]
    pairs: dict[int, int] = {}
    for i in nearest_first.tolist():
        if det[i] not in pairs and gt[i] not in pairs.values():
            pairs[int(det[i])] = int(gt[i])
    return pairs


def _beside_another(m: Matches, strong: np.ndarray) -> np.ndarray:
    """Return (D,) bool: True for a duplicate, a prediction that overlaps a stronger one of its image with an IoU above
    0.5."""
    result = np.zeros(len(m.found), bool)
    rows = np.flatnonzero(strong)  # best first within an image
    images = m.found.image_index[rows]
    for first, second in pairs_within_groups(images, images):
        common, union = common_and_union(m.found.xyxy[rows[first]], m.found.xyxy[rows[second]])
        is_duplicate = (common > MATCH_IOU * union) & (first < second)
        result[rows[second[is_duplicate]]] = True
    return result


def _thresholds_of_classes(m: Matches) -> np.ndarray:
    """Return (K,): the score threshold of the best F1 of each of K classes.

    A class with fewer true positives than `MIN_FOUND_OBJECTS` has the threshold over all classes.
    """
    overall = sweep(m).best
    result = np.full(m.num_classes, 1.0 if overall is None else overall.threshold)
    true_positives = np.bincount(m.found.labels[m.right], minlength=m.num_classes)
    for label in np.flatnonzero(true_positives >= MIN_FOUND_OBJECTS).tolist():
        result[label] = sweep(m, label).best.threshold
    return result
