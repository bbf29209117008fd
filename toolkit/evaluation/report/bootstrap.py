"""The twelve COCO numbers and the AP of each class, of the data and of data sets drawn from it again: the bootstrap.

Images are drawn, with replacement, as many as there are (Efron 1979). An image that is drawn twice has each of its
scores twice, which smooths less and so raises every AP by itself; the draws are therefore moved so that their mean is
the number of the data: the interval tells the spread. Two detectors are compared on the same draws, so that what makes
an image hard for both does not count (paired).
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from toolkit.evaluation.report.matches import AREAS, IOUS, Matches
from toolkit.files import usable_cores

DRAWS = 1000
TWELVE = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
RECALLS = np.linspace(0.0, 1.0, 101)
VALUES_AT_ONCE = 1_000_000  # float32 values of one array: what stays in the cache of a core


@dataclass(frozen=True)
class Resampled:
    """Numbers of B draws of the images.

    numbers: (B,) by name: AP, AP50, ...; NaN where there was nothing to find. of_class: (B, K) AP of each class.
    by_iou: (10, B) mean AP at each IoU threshold. recall_of_class: (B, K) AR100.
    """

    numbers: Mapping[str, np.ndarray]
    of_class: np.ndarray
    by_iou: np.ndarray
    recall_of_class: np.ndarray


def resample(matches: Matches, draws: int = DRAWS, seed: int = 0) -> Resampled:
    """`draws` bootstrap samples; the same images are drawn for all detectors with as many images and the same seed."""
    images = matches.num_images
    random = np.random.default_rng(seed)
    counts = random.multinomial(images, np.full(images, 1 / images), size=draws) if images else np.zeros((draws, 0))
    return weighted_numbers(matches, counts.astype(np.float32).T)


def exact_numbers(matches: Matches) -> Resampled:
    """The numbers of the data as they are (B = 1), equal to those of `CocoEvaluator`."""
    shared = _Shared(matches)
    results = [_one_class_exactly(shared, label) for label in range(matches.num_classes)]
    return _resampled(results, 1)


def weighted_numbers(matches: Matches, weights: np.ndarray) -> Resampled:
    """Numbers when image i counts `weights[i, b]` times; weights (I, B) float32."""
    draws, classes = weights.shape[1], matches.num_classes
    shared = _Shared(matches)

    def one_class(label: int) -> tuple[np.ndarray, np.ndarray]:
        width = max(16, VALUES_AT_ONCE // max(1, len(shared.near[label])))
        parts = [_one_class(shared, label, np.ascontiguousarray(weights[:, b : b + width]))
                 for b in range(0, draws, width)]  # fmt: skip
        return tuple(np.concatenate(columns, axis=-1) for columns in zip(*parts, strict=True))

    with ThreadPoolExecutor(usable_cores()) as pool:
        return _resampled(list(pool.map(one_class, range(classes))), draws)


def _resampled(results: list, draws: int) -> Resampled:
    """results: (AP (A, T, B), recall (6, T, B)) of each class."""
    if not results:
        none = np.zeros((draws, 0))
        return Resampled(dict.fromkeys(TWELVE, np.full(draws, np.nan)), none, np.full((len(IOUS), draws), np.nan), none)
    ap, recall = (np.stack(part) for part in zip(*results, strict=True))
    return Resampled(_summary(ap, recall), _mean(ap[:, 0], (1,)).T, _mean(ap[:, 0], (0,)), _mean(recall[:, 2], (1,)).T)


def interval(draws: np.ndarray, value: float, share: float = 0.95) -> tuple[float, float] | None:
    """Where the middle `share` of the draws lies when they are moved to have the mean `value`; None: no number."""
    draws = draws[np.isfinite(draws)]
    if not len(draws) or not np.isfinite(value):
        return None
    low, high = np.quantile(draws - draws.mean() + value, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


class _Shared:
    """What all classes look up: rows by class, best first, and the boxes that must be found by area.

    of_class: rows of `found`. near: places in them of predictions that some box of the class overlaps by half.
    """

    def __init__(self, matches: Matches):
        self.matches = matches
        candidate = np.full(len(matches.found), -1, np.int64)
        candidate[matches.coco.det] = np.arange(len(matches.coco.det))
        labels = matches.found.labels[matches.order]
        by_class = [matches.order[labels == label] for label in range(matches.num_classes)]
        self.near = [np.flatnonzero(candidate[rows] >= 0) for rows in by_class]
        self.candidate = [candidate[rows[near]] for rows, near in zip(by_class, self.near, strict=True)]
        self.of_class = by_class
        self.required = np.stack([~matches.ignored(area) for area in AREAS])

    def inside(self, label: int, area: str) -> np.ndarray:
        """(rows of the class,) bool: in the area range."""
        low, high = AREAS[area]
        area_of = self.matches.found.area[self.of_class[label]]
        return (area_of >= low) & (area_of <= high)


def _tops(area: int) -> tuple:
    """(row of the recalls, predictions of an image and class that count) of an area."""
    return ((0, 1), (1, 10), (2, 100)) if area == 0 else ((2 + area, 100),)


def _one_class(shared: _Shared, label: int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AP (areas, IoUs, B) and recall (AR1, AR10, AR100, s, m, l; IoUs; B) of one class; NaN: nothing to find."""
    m, draws = shared.matches, weights.shape[1]
    ap, recall = np.full((len(AREAS), len(IOUS), draws), np.nan), np.full((6, len(IOUS), draws), np.nan)
    rows, near, candidate = shared.of_class[label], shared.near[label], shared.candidate[label]
    some = weights[m.found.image_index[rows[near]]]
    for a, area in enumerate(AREAS):
        wanted = shared.required[a] & (m.truth.labels == label)
        if not wanted.any():
            continue
        total = np.bincount(m.truth.image_index[wanted], minlength=m.num_images).astype(np.float32) @ weights  # (B,)
        inside = shared.inside(label, area)
        so_far = _so_far(m.found.image_index[rows], inside, near, weights)
        for t in range(len(IOUS)):
            gt = m.coco.gt[a, t, candidate]
            at = np.flatnonzero(gt >= 0)  # what finds something, a crowd too
            right = shared.required[a][gt[at]]
            true = some[at[right]]
            places = m.rank[rows[near[at[right]]]]
            for slot, top in _tops(a):
                recall[slot, t] = _share((true[places < top] if top < 100 else true).sum(axis=0), total)
            found = np.cumsum(true, axis=0, out=true)
            if right.all() and inside[near[at]].all():
                counted = found
            else:
                counted = np.cumsum(some[at] * inside[near[at]][:, None].astype(np.float32), axis=0)[right]
            ap[a, t] = _average_precision(found, so_far[at[right]] - counted, total)
    return ap, recall


def _so_far(images: np.ndarray, inside: np.ndarray, near: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(N, B): at each of the N places `near`, how many predictions `inside` there are from the first one on."""
    until = np.cumsum(inside)[near]
    chosen = images[inside][: until[-1] if len(until) else 0]
    sums = csr_array((np.ones(len(chosen), np.float32), chosen, np.concatenate([[0], until])),
                     shape=(len(near), len(weights))) @ weights  # fmt: skip
    return np.cumsum(sums, axis=0, out=sums)


def _one_class_exactly(shared: _Shared, label: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_one_class` with every image once, with the rounding of pycocotools."""
    m = shared.matches
    ap, recall = np.full((len(AREAS), len(IOUS), 1), np.nan), np.full((6, len(IOUS), 1), np.nan)
    rows, near, candidate = shared.of_class[label], shared.near[label], shared.candidate[label]
    for a, area in enumerate(AREAS):
        total = (shared.required[a] & (m.truth.labels == label)).sum()
        if not total:
            continue
        inside = shared.inside(label, area)
        for t in range(len(IOUS)):
            gt = np.full(len(rows), -1, np.int64)
            gt[near] = m.coco.gt[a, t, candidate]
            right = (gt >= 0) & shared.required[a][gt]
            ap[a, t] = exact_average_precision(right, (gt < 0) & inside, total)
            for slot, top in _tops(a):
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


def _average_precision(found: np.ndarray, wrong: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Mean precision at recall 0, 0.01, ..., 1 of (N, B) counts at the true positives, best first; NaN for total 0.

    Precision at a recall is the best at that or a higher one. Between two true positives recall does not move, so
    each one stands for as many of the 101 recalls as lie between the one before and itself.
    """
    if not len(found):
        return np.where(total > 0, 0.0, np.nan)
    wrong += found
    precision = np.divide(found, np.maximum(wrong, 1e-12, out=wrong), out=wrong)[::-1]
    precision = np.maximum.accumulate(precision, axis=0, out=precision)[::-1]
    steps = found * (100 / np.maximum(total, 1e-12)).astype(np.float32)
    steps += np.float32(1e-4)
    np.floor(steps, out=steps)
    steps += found > 0  # recall 0 belongs to the first one
    reached = np.einsum("nb,nb->b", precision, steps)
    reached -= np.einsum("nb,nb->b", precision[1:], steps[:-1])
    return np.where(total > 0, reached / 101, np.nan)


def _share(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    return np.divide(part, total, out=np.full(total.shape, np.nan, np.float64), where=total > 0)


def _summary(ap: np.ndarray, recall: np.ndarray) -> dict[str, np.ndarray]:
    """ap (K, A, T, B), recall (K, 6, T, B): means over what is defined."""
    numbers = {"AP": _mean(ap[:, 0], (0, 1)), "AP50": _mean(ap[:, 0, 0], (0,)), "AP75": _mean(ap[:, 0, 5], (0,))}
    numbers |= {f"AP{name}": _mean(ap[:, a], (0, 1)) for a, name in enumerate(AREAS) if a}
    slots = ("AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
    return numbers | {name: _mean(recall[:, slot], (0, 1)) for slot, name in enumerate(slots)}


def _mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    defined = np.isfinite(values)
    count = defined.sum(axis=axes)
    total = np.where(defined, values, 0.0).sum(axis=axes)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)
