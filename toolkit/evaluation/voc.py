"""Mean average precision as defined by Pascal VOC, in addition to COCO's: the metric of GluonCV's detectors.

Devkit rules (Everingham et al. 2010): each prediction is compared with the one box it overlaps most, sides include the
last pixel (+ 1), the IoU threshold is 0.5, a second prediction of a box is wrong. Boxes marked as crowd are VOC's
"difficult": they need not be found, and predictions that match them are ignored. VOC07 means precision over 11
recalls, VOC12 over all of them.
"""

import numpy as np

from toolkit.boxes import Boxes, common_and_union
from toolkit.evaluation.matches import Matches

RECALLS_07 = np.arange(0.0, 1.1, 0.1)  # with its rounding: 0.3 is 0.30000000000000004, as in the programs of the field
_BLOCK = 2**20  # pairs of boxes at once


def voc_metrics(matches: Matches, iou: float = 0.5) -> dict[str, float | None]:
    """`voc07_mAP`, `voc12_mAP` and `voc07/<class>`, `voc12/<class>` of matched boxes; from 0 to 1.

    Args:
        matches: of each image and class its best predictions, as COCO counts them; VOC itself counts all.
        iou: least IoU of a prediction that is right.

    Returns:
        None where a class has no boxes to find; such classes are left out of the means.
    """
    names, found, truth = matches.class_names, matches.found, matches.truth
    best_iou, best_box = _most_overlapped(found, truth, len(names))
    result: dict[str, float | None] = {}
    for label, name in enumerate(names):
        total = int(matches.num_truth[label])
        rows = np.flatnonzero(found.labels == label)
        hit = best_iou[rows] >= iou
        first = np.zeros(len(rows), bool)  # of the predictions of a box; within an image the best comes first
        boxes, place = np.unique(best_box[rows[hit]], return_index=True)
        first[np.flatnonzero(hit)[place]] = True
        difficult = hit & (truth.iscrowd[best_box[rows]]) if len(truth) else np.zeros(len(rows), bool)
        order = np.argsort(-found.scores[rows], kind="stable")
        right, wrong = (first & ~difficult)[order], (~difficult & ~first)[order]
        result[f"voc07/{name}"] = _average_precision(right, wrong, total, _eleven_points)
        result[f"voc12/{name}"] = _average_precision(right, wrong, total, _all_points)
    means = {}
    for year in ("voc07", "voc12"):
        defined = [v for key, v in result.items() if key.startswith(f"{year}/") and v is not None]
        means[f"{year}_mAP"] = float(np.mean(defined)) if defined else None
    return means | result


def _most_overlapped(found: Boxes, truth: Boxes, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """(D,) largest IoU with a box of the same image and class, and its row in `truth` (0 where there is none)."""
    groups = [boxes.image_index * classes + boxes.labels for boxes in (found, truth)]
    order = np.argsort(groups[1], kind="stable")
    sizes = np.bincount(groups[1], minlength=int(groups[0].max(initial=0)) + 1)
    starts = np.cumsum(sizes) - sizes
    iou, box = np.zeros(len(found)), np.zeros(len(found), np.int64)
    corners = [boxes.xyxy + [0, 0, 1, 1] for boxes in (found, truth)]  # VOC's boxes end with their last pixel
    rows = np.flatnonzero(sizes[groups[0]] > 0)
    ends = np.cumsum(sizes[groups[0][rows]])
    cuts = np.searchsorted(ends, np.arange(_BLOCK, int(ends[-1]) if len(ends) else 0, _BLOCK))
    for some in np.split(rows, cuts):
        count = sizes[groups[0][some]]
        if not len(some):
            continue
        first = np.cumsum(count) - count
        within = np.arange(count.sum()) - np.repeat(first, count)
        gt = order[np.repeat(starts[groups[0][some]], count) + within]
        values = np.divide(*common_and_union(corners[0][np.repeat(some, count)], corners[1][gt]))
        best = np.maximum.reduceat(values, first)
        place = np.where(values == np.repeat(best, count), np.arange(len(values)), len(values))
        iou[some], box[some] = best, gt[np.minimum.reduceat(place, first)]  # of equal ones the first
    return iou, box


def _average_precision(right: np.ndarray, wrong: np.ndarray, total: int, mean) -> float | None:
    if not total:
        return None
    found = np.cumsum(right)
    seen = found + np.cumsum(wrong)
    precision = np.divide(found, seen, out=np.zeros(len(seen)), where=seen > 0)
    return float(mean(found / total, precision))


def _eleven_points(recall: np.ndarray, precision: np.ndarray) -> float:
    return sum(precision[recall >= r].max(initial=0.0) / 11 for r in RECALLS_07)


def _all_points(recall: np.ndarray, precision: np.ndarray) -> float:
    recall = np.concatenate([[0.0], recall, [1.0]])
    best = np.maximum.accumulate(np.concatenate([[0.0], precision, [0.0]])[::-1])[::-1]
    return float((np.diff(recall) * best[1:]).sum())
