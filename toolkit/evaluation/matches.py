"""The matching of predictions with annotated boxes, once per data set; all detection metrics are computed from it.

The greedy matching is COCO's (Lin et al. 2014), for all images, classes, IoU thresholds and areas at once: in round r
the r-th best prediction of every image and class chooses its box. No two predictions of a round compete for one box.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from toolkit.base.boxes import Boxes, intersection_area
from toolkit.base.text import escaped
from toolkit.evaluation.predictions import boxes_of, usable

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
AREA_RANGES = {  # square pixels
    "all": (0.0, 1e10),
    "s": (0.0, 32.0**2),
    "m": (32.0**2, 96.0**2),
    "l": (96.0**2, 1e10),
}
BACKGROUND_IOU = 0.1  # a prediction that overlaps nothing by more lies on the background (Bolya et al. 2020)
MAX_DETECTIONS = (1, 10, 100)  # of an image and class that count for recall; the last number for precision too
PAIRS_PER_CHUNK = 2**20


@dataclass(frozen=True)
class Matches:
    """Predictions and annotated boxes of I images with their overlaps.

    There are D predictions and G annotated boxes of K classes, and P pairs of a prediction and a box.

    truth: all annotated boxes, crowds too, in the order of the table.
    found: the predictions, at most `max_detections[-1]` of each image and class, in the order of the images; in an
        image best first, whatever the class.
    rank: (D,) place of a prediction, from 0, among those of its image and class.
    order: (D,) rows of `found`, best first over all images; equal scores stay in the order of their rows.
    det, gt: (P,) rows of `found` and `truth`: all pairs in the same image, of any classes, with an `iou` of at least
        0.1; sorted by `det`, then `gt`.
    iou: (P,) IoU of each pair; for a crowd the share of the prediction's area that lies in it.
    by_mask: whether `iou`, and the areas of predictions, are those of masks (`toolkit.evaluation.mask_matches`).
    sizes_hw: (I, 2) height and width of each image in pixels.
    """

    image_ids: Sequence
    class_names: Sequence[str]
    sizes_hw: np.ndarray
    truth: Boxes
    found: Boxes
    rank: np.ndarray
    order: np.ndarray
    det: np.ndarray
    gt: np.ndarray
    iou: np.ndarray
    max_detections: tuple[int, ...] = MAX_DETECTIONS
    by_mask: bool = False

    @property
    def num_images(self) -> int:
        """The number I of images."""
        return len(self.image_ids)

    @property
    def num_classes(self) -> int:
        """The number K of classes."""
        return len(self.class_names)

    @cached_property
    def crowd(self) -> np.ndarray:
        """Whether a box is a crowd, (G,) bool."""
        return self.truth.iscrowd

    @cached_property
    def same_class(self) -> np.ndarray:
        """Whether the two boxes of a pair have the same class, (P,) bool."""
        return self.found.labels[self.det] == self.truth.labels[self.gt]

    @cached_property
    def num_truth(self) -> np.ndarray:
        """The number of boxes to find of each class, (K,)."""
        return np.bincount(self.truth.labels[~self.crowd], minlength=self.num_classes)

    def ignored(self, area: str) -> np.ndarray:
        """Return which annotated boxes need not be found, (G,) bool: crowds, and boxes outside of the area range.

        area: a key of `AREA_RANGES`.
        """
        low, high = AREA_RANGES[area]
        return self.crowd | (self.truth.area < low) | (self.truth.area > high)

    @cached_property
    def coco(self) -> "CocoMatches":
        """COCO's matching at ten IoU thresholds and four areas."""
        return _greedy(self)

    @cached_property
    def at_half(self) -> np.ndarray:
        """The row in `truth` of the box, crowds too, that each prediction finds at IoU 0.5, (D,) int64; -1: none."""
        rows = np.full(len(self.found), -1, np.int64)
        rows[self.coco.det] = self.coco.gt[0, 0]
        return rows

    @cached_property
    def right(self) -> np.ndarray:
        """Whether each prediction is a true positive at IoU 0.5, (D,) bool."""
        return (self.at_half >= 0) & self.counts

    @cached_property
    def counts(self) -> np.ndarray:
        """Whether each prediction counts as right or wrong at IoU 0.5, (D,) bool; those that find a crowd do not."""
        in_crowd = np.append(self.crowd, False)[self.at_half]  # -1, nothing found, is the last one
        return ~in_crowd


@dataclass(frozen=True)
class CocoMatches:
    """The C predictions with an IoU of at least 0.5 with a box of their class, and the box that each of them finds.

    det: (C,) rows of `found`, ascending. gt: (4, 10, C) rows of `truth` by area and IoU threshold; -1: none.
    """

    det: np.ndarray
    gt: np.ndarray


def match_predictions(predictions: Boxes | Mapping, table, max_detections: Sequence[int] = MAX_DETECTIONS) -> Matches:
    """Match the predictions for all images of a table with its annotated boxes.

    Predictions of a class that the annotations of an image do not label are left out.

    Args:
        predictions: as `boxes_of` takes them.
        max_detections: ascending numbers of detections per image and class, of which the largest is used here; the
            metrics use all of them.

    Raises:
        BadInput: image ids of predictions and table differ.
    """
    image_ids = table.image_ids().tolist()
    names = class_keys(table)
    detections = usable(boxes_of(predictions, image_ids), len(names), image_ids)
    if table.labelled_classes is not None:
        labelled = table.labelled_classes[table.set_of_image()]
        detections = detections[labelled[detections.image_index, detections.labels]]
    return match_boxes(table.boxes(), detections, image_ids, names, table.sizes_hw(), max_detections)


def match_boxes(
    truth: Boxes,
    detections: Boxes,
    image_ids: Sequence,
    class_names: Sequence[str],
    sizes_hw: np.ndarray,
    max_detections: Sequence[int] = MAX_DETECTIONS,
) -> Matches:
    """Match detections with the annotated boxes of the same images; see `Matches` for the arguments.

    The detections must be finite and have labels from 0 to len(class_names) - 1.
    """
    detections, rank = _best_of_each_class(detections, max_detections[-1])
    order = np.argsort(-detections.scores, kind="stable")
    det, gt, iou = _overlaps(detections, truth)
    return Matches(
        image_ids,
        class_names,
        sizes_hw,
        truth=truth,
        found=detections,
        rank=rank,
        order=order,
        det=det,
        gt=gt,
        iou=iou,
        max_detections=tuple(max_detections),
    )


def any_class(matches: Matches) -> Matches:
    """Return matches in which all predictions and boxes are of one class; of an image the best `max_detections[-1]`
    predictions count. No overlap is computed again."""
    m = matches
    rank = np.arange(len(m.found)) - m.found.offsets[m.found.image_index]  # best first within an image
    kept = rank < m.max_detections[-1]
    row = np.cumsum(kept) - 1  # of each prediction among those kept
    near = kept[m.det]
    found = replace(m.found, labels=np.zeros_like(m.found.labels))[kept]
    return replace(
        m,
        class_names=("any class",),
        truth=replace(m.truth, labels=np.zeros_like(m.truth.labels)),
        found=found,
        rank=rank[kept],
        order=np.argsort(-found.scores, kind="stable"),
        det=row[m.det[near]],
        gt=m.gt[near],
        iou=m.iou[near],
    )


def class_keys(table) -> list[str]:
    """Return class names as used in metric names; a name that several classes share gets the original id added."""
    names = [category.name for category in table.categories]
    ids = [category.id for category in table.categories]
    return metric_keys(names, ids)


def metric_keys(names: Sequence[str], ids: Sequence | None = None) -> list[str]:
    """Return distinct names of metrics, for rows of metrics and experiment trackers.

    Each is on one line, without control characters, and has at most 80 columns. If several names are the same after
    this, the id is added to each of them.

    ids: the id of each name; None: its position.
    """
    ids = range(len(names)) if ids is None else ids
    short = [escaped(name) for name in names]
    counts = Counter(short)
    used = set()
    keys = []
    for name, id_ in zip(short, ids, strict=True):
        key = name if counts[name] == 1 else f"{name} ({escaped(id_)})"
        while key in used:  # a class that is called like another one with its id
            key += "'"
        used.add(key)
        keys.append(key)
    return keys


def _best_of_each_class(detections: Boxes, most: int) -> tuple[Boxes, np.ndarray]:
    """Sort detections by image, then best first; return them with the rank of each in its image and class.

    Labels 3, 5, 3 of one image, best first, have the ranks 0, 0, 1.
    """
    best_first = np.lexsort((-detections.scores, detections.image_index))
    detections = detections[best_first]
    by_group = np.lexsort((detections.labels, detections.image_index))  # stable: best first within image and class
    key = np.stack([detections.image_index[by_group], detections.labels[by_group]])  # (2, D)
    position = np.arange(len(by_group))
    is_first = np.ones(len(by_group), bool)
    is_first[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    start = np.maximum.accumulate(np.where(is_first, position, 0))
    rank = np.empty(len(by_group), np.int64)
    rank[by_group] = position - start
    keep = rank < most
    return detections[keep], rank[keep]


def pairs_within_groups(first_groups: np.ndarray, second_groups: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all pairs of rows (first, second) with the same group, sorted, in chunks of about PAIRS_PER_CHUNK pairs.

    first_groups, second_groups: (N,), (M,) int64 from 0, the group of each row, such as its image.

    Groups [0, 2] and [2, 0, 2] give the pairs (0, 1), (1, 0) and (1, 2).
    """
    order = np.argsort(second_groups, kind="stable")  # second rows by group
    sizes = np.bincount(second_groups, minlength=int(first_groups.max(initial=-1)) + 1)
    starts = np.cumsum(sizes) - sizes  # of each group in `order`
    first = starts[first_groups]  # (N,) where in `order` the partners of a first row begin
    repeats = sizes[first_groups]  # (N,) its number of partners
    ends = np.cumsum(repeats)
    start = 0
    while start < len(first_groups):
        done = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, done + PAIRS_PER_CHUNK))
        stop = max(stop, start + 1)
        some = repeats[start:stop]
        rows = np.repeat(np.arange(start, start + len(some)), some)
        before = np.cumsum(some) - some  # pairs of the rows before each
        within = np.arange(len(rows)) - np.repeat(before, some)
        yield rows, order[first[rows] + within]
        start = stop


def best_pairs(det: np.ndarray, gt: np.ndarray, iou: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (largest IoU, box with this IoU) of each prediction, (size,) each.

    det, gt, iou: (P,) pairs of a prediction and a box. size: number of predictions. Of several boxes with the same IoU
    the first counts. A prediction without a pair has IoU 0 and box -1.
    """
    rows = np.lexsort((-gt, iou))
    best = np.zeros(size)
    box = np.full(size, -1, np.int64)
    best[det[rows]] = iou[rows]  # the last one stays
    box[det[rows]] = gt[rows]
    return best, box


def _overlaps(detections: Boxes, truth: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (det, gt, iou) of all pairs in one image that overlap by 0.1, computed as pycocotools does."""
    xywh_found = detections.xywh
    xywh_truth = truth.xywh
    corners_found = _xywh_to_xyxy(xywh_found)
    corners_truth = _xywh_to_xyxy(xywh_truth)
    area_found = xywh_found[:, 2] * xywh_found[:, 3]
    area_truth = xywh_truth[:, 2] * xywh_truth[:, 3]
    all_det = [np.zeros(0, np.int64)]
    all_gt = [np.zeros(0, np.int64)]
    all_iou = [np.zeros(0)]
    for det, gt in pairs_within_groups(detections.image_index, truth.image_index):
        common = intersection_area(corners_found[det], corners_truth[gt])
        area = area_found[det]
        union = area + area_truth[gt] - common
        whole = np.where(truth.iscrowd[gt], area, union)  # for a crowd the share that is in it
        iou = np.divide(common, whole, out=np.zeros_like(common), where=whole > 0)
        keep = iou >= BACKGROUND_IOU
        all_det.append(det[keep])
        all_gt.append(gt[keep])
        all_iou.append(iou[keep])
    return np.concatenate(all_det), np.concatenate(all_gt), np.concatenate(all_iou)


def _xywh_to_xyxy(xywh: np.ndarray) -> np.ndarray:
    left_top = xywh[:, :2]
    right_bottom = left_top + xywh[:, 2:]
    return np.concatenate([left_top, right_bottom], axis=1)


def _greedy(m: Matches) -> CocoMatches:
    """Match in rounds: in round r the r-th best prediction of every image and class chooses its box.

    Shapes: A areas, T IoU thresholds, C predictions with a near box, G boxes; in one round p pairs of c predictions.
    """
    near = m.same_class & (m.iou >= IOU_THRESHOLDS[0])
    det = m.det[near]
    gt = m.gt[near]
    iou = m.iou[near]
    rows, row = np.unique(det, return_inverse=True)
    shape = (len(AREA_RANGES), len(IOU_THRESHOLDS))
    matched = np.full((*shape, len(rows)), -1, np.int64)
    free = np.ones((*shape, len(m.truth)), bool)
    required = np.stack([~m.ignored(area) for area in AREA_RANGES])[:, None]  # (A, 1, G)
    thresholds = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)[:, None]  # (T, 1)
    rounds = m.rank[det]
    order = np.argsort(rounds, kind="stable")
    cuts = np.searchsorted(rounds[order], np.arange(rounds.max(initial=-1) + 2))
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        if start == stop:
            continue
        now = order[start:stop]  # pairs of this round, those of a prediction side by side
        g = gt[now]
        d = row[now]
        # Predictions [4, 4, 7] have the pairs from first = [0, 2] on; segment = [0, 0, 1].
        first = np.flatnonzero(np.diff(d, prepend=-1))  # (c,)
        pairs_of_each = np.diff([*first, len(d)])
        segment = np.repeat(np.arange(len(first)), pairs_of_each)  # (p,)
        overlaps = iou[now] >= thresholds  # (T, p)
        allowed = overlaps & (free[:, :, g] | m.crowd[g])  # (A, T, p)
        wish = iou[now] + 2 * required[:, :, g]  # a box that must be found goes first
        wish = np.where(allowed, wish, -1.0)
        best = np.maximum.reduceat(wish, first, axis=2)  # (A, T, c)
        is_best = wish == best[:, :, segment]
        position = np.where(is_best, np.arange(len(d)), -1)
        chosen = np.maximum.reduceat(position, first, axis=2)  # the last of equal ones: pycocotools
        some = best > 0
        matched[:, :, d[first]] = np.where(some, g[chosen], -1)
        a, t, where = np.nonzero(some)
        taken = g[chosen[a, t, where]]
        free[a, t, taken] = False
    return CocoMatches(rows, matched)
