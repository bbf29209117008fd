"""Precision, recall and F1 against the score threshold: which threshold to deploy, and what it costs."""

from dataclasses import dataclass

import numpy as np

from toolkit.evaluation.matches import Matches

WANTED_PRECISION = (0.5, 0.75, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class ThresholdSweep:
    """Numbers at IoU 0.5 when predictions with at least a score count; one row per distinct score, highest first.

    score, precision, recall, f1: (S,). total: boxes to find.
    """

    score: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    total: int

    @property
    def best(self) -> "Point | None":
        """Return the point of the highest F1; among several, the one with the highest score."""
        if not len(self.f1) or not self.f1.max() > 0:
            return None
        return self.point(int(np.argmax(self.f1)))

    def at_precision(self, wanted: float) -> "Point | None":
        """Return the point of the highest recall with at least this precision; None: no threshold reaches it."""
        rows = np.flatnonzero(self.precision >= wanted - 1e-12)
        if not len(rows):
            return None
        best = rows[np.argmax(self.recall[rows])]
        return self.point(int(best))

    def point(self, row: int) -> "Point":
        low = float(self.score[row + 1]) if row + 1 < len(self.score) else 0.0
        return Point(
            _between(low, float(self.score[row])),
            float(self.precision[row]),
            float(self.recall[row]),
            float(self.f1[row]),
        )


@dataclass(frozen=True)
class Point:
    """A threshold and its metrics. No score equals a threshold, so that it does not matter whether an equal one
    counts."""

    threshold: float
    precision: float
    recall: float
    f1: float


def sweep(matches: Matches, label: int | None = None) -> ThresholdSweep:
    """Compute precision, recall and F1 of one class, or of all boxes of all classes together (`label` None)."""
    rows = matches.order
    if label is not None:
        rows = rows[matches.found.labels[rows] == label]
    rows = rows[matches.counts[rows]]
    total = int(matches.num_truth.sum() if label is None else matches.num_truth[label])
    score = matches.found.scores[rows]
    right = np.cumsum(matches.right[rows])
    last = np.flatnonzero(np.diff(score, append=-np.inf))  # equal scores count together
    true_positives = right[last].astype(float)
    kept = last + 1.0
    recall = true_positives / total if total else np.full(len(last), np.nan)
    return ThresholdSweep(
        score[last],
        true_positives / kept,
        recall,
        2 * true_positives / (kept + total),
        total,
    )


def _between(low: float, high: float) -> float:
    """Return a short decimal fraction t with low < t < high."""
    for digits in range(2, 17):
        scale = 10.0**digits
        value = (np.ceil(high * scale) - 1) / scale
        if low < value < high:
            return float(value)
    return (low + high) / 2


@dataclass(frozen=True)
class Calibration:
    """Agreement between scores and how often predictions are right, in ten bins of equal width.

    score, precision: (10,) mean score, share that is right; NaN in an empty bin. error: mean distance of the two over
        all predictions (ECE, Naeini et al. 2015; for detections Küppers et al. 2020), None without predictions.
    """

    score: np.ndarray
    precision: np.ndarray
    error: float | None


def calibration(matches: Matches, bins: int = 10) -> Calibration:
    rows = np.flatnonzero(matches.counts)
    scores = matches.found.scores[rows]
    right = matches.right[rows]
    which = np.clip((scores * bins).astype(int), 0, bins - 1)
    count = np.bincount(which, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_score = np.bincount(which, scores, bins) / count
        precision = np.bincount(which, right, bins) / count
    error = float(np.nansum(abs(mean_score - precision) * count) / count.sum()) if count.sum() else None
    return Calibration(mean_score, precision, error)


def confusion_matrix(matches: Matches, threshold: float) -> np.ndarray:
    """Count annotated boxes by their class and the predicted one, at IoU 0.5, for predictions above `threshold`.

    A prediction first finds a box of its class, as in AP. What is left over is then paired across classes, largest IoU
    first. Crowds and what lies in them do not count.

    Returns:
        (K + 1, K + 1) int64, rows the annotated class, columns the predicted one; the last row is the background
        (predictions without a box), the last column "missed". A row sums to the boxes of its class.
    """
    m = matches
    k = matches.num_classes
    kept = (m.found.scores > threshold) & m.counts
    paired = np.where(kept & m.right, m.at_half, -1)
    matched = np.zeros(len(m.truth), bool)
    matched[paired[paired >= 0]] = True
    det_is_left = kept[m.det] & (paired[m.det] < 0)
    gt_is_left = ~matched[m.gt] & ~m.crowd[m.gt]
    left = det_is_left & gt_is_left & ~m.same_class & (m.iou >= 0.5)
    rows = np.flatnonzero(left)
    for row in rows[np.argsort(-m.iou[rows], kind="stable")].tolist():
        det = m.det[row]
        gt = m.gt[row]
        if paired[det] < 0 and not matched[gt]:
            paired[det] = gt
            matched[gt] = True
    matrix = np.zeros((k + 1, k + 1), np.int64)
    pairs = np.flatnonzero(paired >= 0)
    np.add.at(
        matrix,
        (m.truth.labels[paired[pairs]], m.found.labels[pairs]),
        1,
    )
    np.add.at(
        matrix,
        (k, m.found.labels[kept & (paired < 0)]),
        1,
    )
    np.add.at(
        matrix,
        (m.truth.labels[~matched & ~m.crowd], k),
        1,
    )
    return matrix
