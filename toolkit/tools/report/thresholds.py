"""Computes precision, recall and F1 against the score threshold, by which a threshold for deployment can be chosen."""

from dataclasses import dataclass

import numpy as np

from toolkit.evaluation.matches import Matches

WANTED_PRECISION = (0.5, 0.75, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class ThresholdSweep:
    """Precision, recall and F1 at IoU 0.5 for each of S score thresholds.

    Attributes:
        score: (S,) the distinct scores, highest first; predictions with at least this score count.
        precision, recall, f1: (S,) each.
        total: number of boxes to find.
    """

    score: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    total: int

    @property
    def best(self) -> "OperatingPoint | None":
        """The point with the highest F1, and of several such points the highest score; None if F1 is 0 everywhere."""
        if not len(self.f1) or not self.f1.max() > 0:
            return None
        return self.point(int(np.argmax(self.f1)))

    def at_precision(self, wanted: float) -> "OperatingPoint | None":
        """Return the point with the highest recall among those with at least the precision `wanted`, or None."""
        rows = np.flatnonzero(self.precision >= wanted - 1e-12)
        if not len(rows):
            return None
        best = rows[np.argmax(self.recall[rows])]
        return self.point(int(best))

    def point(self, row: int) -> "OperatingPoint":
        """Return the point in a row, whose threshold lies between this score and the next lower one."""
        low = float(self.score[row + 1]) if row + 1 < len(self.score) else 0.0
        return OperatingPoint(
            _between(low, float(self.score[row])),
            float(self.precision[row]),
            float(self.recall[row]),
            float(self.f1[row]),
        )


@dataclass(frozen=True)
class OperatingPoint:
    """A score threshold and its precision, recall and F1.

    No score is equal to the threshold, so it does not matter whether scores must be above it or at least equal.
    """

    threshold: float
    precision: float
    recall: float
    f1: float


def threshold_text(threshold: float) -> str:
    """Format a score threshold with three digits, or with more if it would become 0 or 1 by that."""
    text = f"{threshold:.3f}"
    return f"{threshold:g}" if text in ("0.000", "1.000") else text


def sweep(matches: Matches, label: int | None = None) -> ThresholdSweep:
    """Compute precision, recall and F1 against the score for the class `label`; None: for all classes together."""
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
    """The agreement between scores and the share of right predictions, in ten bins of equal width.

    Attributes:
        score, precision: (10,) mean score, and share of predictions that are right, in each bin; NaN in an empty bin.
        error: mean distance of the two over all predictions (expected calibration error, Naeini et al. 2015; for
            detections Küppers et al. 2020); None without predictions.
    """

    score: np.ndarray
    precision: np.ndarray
    error: float | None


def calibration(matches: Matches, bins: int = 10) -> Calibration:
    """Compute the calibration of the predictions that count as right or wrong at IoU 0.5. bins: number of bins of
    scores."""
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
    """Count annotated boxes by annotated and predicted class, at IoU 0.5, for predictions that score above `threshold`.

    Predictions are first matched to boxes of their own class, as in AP. The remaining predictions and boxes are then
    paired across classes, in the order of falling IoU. Crowd regions, and predictions in them, are not counted.

    Returns:
        (K + 1, K + 1) int64 for K classes: rows are annotated classes, columns predicted classes. The last row is the
        background (predictions without a box), the last column "missed" (boxes without a prediction). The sum of a
        row, except the last, is the number of boxes of the class.
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


def image_counts(matches: Matches, threshold: float) -> np.ndarray:
    """Return (I, 3) int64: the numbers of right predictions, wrong predictions and missed boxes in each of I images, at
    IoU 0.5, for predictions that score above `threshold`."""
    m = matches
    kept = (m.found.scores > threshold) & m.counts
    right = np.bincount(m.found.image_index[kept & m.right], minlength=m.num_images)
    wrong = np.bincount(m.found.image_index[kept & ~m.right], minlength=m.num_images)
    boxes = np.bincount(m.truth.image_index[~m.crowd], minlength=m.num_images)
    return np.stack([right, wrong, boxes - right], axis=1)


def f1_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return (I,): the F1 of `image_counts`; 1 for an image without boxes and without predictions."""
    right, wrong, missed = counts.T
    f1 = 2 * right / np.maximum(2 * right + wrong + missed, 1)
    return np.where(right + wrong + missed == 0, 1.0, f1)


def best_threshold(overall: ThresholdSweep) -> float:
    """Return the score threshold of the best F1; 0.5 if no prediction is right."""
    return 0.5 if overall.best is None else overall.best.threshold
