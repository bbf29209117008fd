"""Computes bootstrap intervals of the twelve COCO metrics and of the AP of each class.

Images are resampled with replacement (Efron 1979). An image that is drawn twice has each of its scores twice, which
raises every AP. Therefore the values of a metric in the samples are shifted so that their mean is the metric on the
data, and the interval shows their spread only. Two detectors are compared on the same samples (paired), so that the
effect of images that are hard for both cancels out.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from scipy.sparse import csr_array

from toolkit.base.files import usable_cores
from toolkit.evaluation.coco_numbers import ByClass, CocoNumbers, summarise
from toolkit.evaluation.matches import AREA_RANGES, IOU_THRESHOLDS, Matches

NUM_DRAWS = 1000
VALUES_PER_CHUNK = 1_000_000  # float32 values of one array, as many as fit in the cache of a core


def resample(matches: Matches, draws: int = NUM_DRAWS, seed: int = 0) -> CocoNumbers:
    """Draw `draws` bootstrap samples of the images, and return the metrics on each sample.

    With the same number of images and the same seed, the samples are the same for all detectors.
    """
    images = matches.num_images
    random = np.random.default_rng(seed)
    counts = np.zeros((draws, 0))
    if images:
        counts = random.multinomial(images, np.full(images, 1 / images), size=draws)
    return weighted_numbers(matches, counts.astype(np.float32).T)


def weighted_numbers(matches: Matches, weights: np.ndarray) -> CocoNumbers:
    """Return the metrics on each of B samples; weights (images, B) float32 says how often a sample has each image."""
    draws = weights.shape[1]
    classes = matches.num_classes
    shared = ByClass(matches)

    def one_class(label: int) -> tuple[np.ndarray, np.ndarray]:
        width = max(16, VALUES_PER_CHUNK // max(1, len(shared.near[label])))
        blocks = (np.ascontiguousarray(weights[:, b : b + width]) for b in range(0, draws, width))
        parts = [_one_class(shared, label, block) for block in blocks]
        return tuple(np.concatenate(columns, axis=-1) for columns in zip(*parts, strict=True))

    with ThreadPoolExecutor(usable_cores()) as pool:
        return summarise(pool.map(one_class, range(classes)), draws, matches.max_detections)


def interval(draws: np.ndarray, value: float, share: float = 0.95) -> tuple[float, float] | None:
    """Return the (low, high) ends of the interval that contains the middle `share` of the draws, after a shift of their
    mean to `value`. Return None if `value` is not finite, or none of the draws is.

    Args:
        draws: values of a metric in the bootstrap samples; those that are not finite are left out.
        value: the metric on the data.
    """
    draws = draws[np.isfinite(draws)]
    if not len(draws) or not np.isfinite(value):
        return None
    centred = draws - draws.mean() + value
    low, high = np.quantile(centred, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _one_class(shared: ByClass, label: int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return AP (areas, IoUs, B) and recall (6, IoUs, B) of one class in B samples; NaN if a sample has no boxes.

    The 6 recalls are AR1, AR10, AR100, and those of small, medium and large boxes.
    """
    m = shared.matches
    draws = weights.shape[1]
    ap, recall = shared.undefined(draws)
    rows = shared.of_class[label]
    near = shared.near[label]
    candidate = shared.candidate[label]
    some = weights[m.found.image_index[rows[near]]]
    for a, area in enumerate(AREA_RANGES):
        wanted = shared.required[a] & (m.truth.labels == label)
        if not wanted.any():
            continue
        of_images = np.bincount(m.truth.image_index[wanted], minlength=m.num_images)
        total = of_images.astype(np.float32) @ weights  # (B,)
        inside = shared.inside(label, area)
        so_far = _so_far(m.found.image_index[rows], inside, near, weights)
        for t in range(len(IOU_THRESHOLDS)):
            gt = m.coco.gt[a, t, candidate]
            at = np.flatnonzero(gt >= 0)  # predictions that find something, also a crowd
            right = shared.required[a][gt[at]]
            true = some[at[right]]
            places = m.rank[rows[near[at[right]]]]
            for slot, top in shared.tops(a):
                some_of = true if top == m.max_detections[-1] else true[places < top]
                recall[slot, t] = _share(some_of.sum(axis=0), total)
            true_positives = np.cumsum(true, axis=0, out=true)
            if right.all() and inside[near[at]].all():
                counted = true_positives
            else:
                counted = np.cumsum(some[at] * inside[near[at]][:, None].astype(np.float32), axis=0)[right]
            ap[a, t] = _average_precision(true_positives, so_far[at[right]] - counted, total)
    return ap, recall


def _so_far(images: np.ndarray, inside: np.ndarray, near: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return (N, B): the number of predictions `inside` up to each of the N places `near`, in each of B samples."""
    until = np.cumsum(inside)[near]
    chosen = images[inside][: until[-1] if len(until) else 0]
    between = (np.ones(len(chosen), np.float32), chosen, np.concatenate([[0], until]))
    sums = csr_array(between, shape=(len(near), len(weights))) @ weights
    return np.cumsum(sums, axis=0, out=sums)


def _average_precision(true_positives: np.ndarray, wrong: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return (B,): the mean precision at recall 0, 0.01, ..., 1 in each of B samples; NaN if `total` is 0.

    Precision at a recall is the highest one at that or a higher recall. Recall changes only at true positives, so each
    true positive stands for as many of the 101 recalls as lie between the one before and itself.

    Args:
        true_positives, wrong: (N, B) counts of right and wrong predictions up to each of N true positives, best first.
        total: (B,) number of boxes to find.
    """
    if not len(true_positives):
        return np.where(total > 0, 0.0, np.nan)
    wrong += true_positives
    predicted = np.maximum(wrong, 1e-12, out=wrong)
    precision = np.divide(true_positives, predicted, out=wrong)[::-1]
    precision = np.maximum.accumulate(precision, axis=0, out=precision)[::-1]
    steps = true_positives * (100 / np.maximum(total, 1e-12)).astype(np.float32)
    steps += np.float32(1e-4)
    np.floor(steps, out=steps)
    steps += true_positives > 0  # recall 0 belongs to the first one
    reached = np.einsum("nb,nb->b", precision, steps)
    reached -= np.einsum("nb,nb->b", precision[1:], steps[:-1])
    return np.where(total > 0, reached / 101, np.nan)


def _share(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    return np.divide(
        part,
        total,
        out=np.full(total.shape, np.nan, np.float64),
        where=total > 0,
    )
