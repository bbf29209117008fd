"""Mean average precision as defined by Pascal VOC, in addition to COCO's: the metric of GluonCV's detectors.

Devkit rules (Everingham et al. 2010): each prediction is compared with the one box it overlaps most, sides include the
last pixel (+ 1), the IoU threshold is 0.5, a second prediction of a box is wrong. Boxes marked as crowd are VOC's
"difficult": they need not be found, and predictions that match them are ignored. VOC07 means precision over 11
recalls, VOC12 over all of them.
"""

import numpy as np

from toolkit.base.boxes import Boxes, common_and_union
from toolkit.evaluation.matches import Matches, best_pairs, paired

# With the rounding of `arange`: 0.3 is 0.30000000000000004, as in the programs of the field.
RECALL_THRESHOLDS_07 = np.arange(0.0, 1.1, 0.1)


def voc_metrics(matches: Matches) -> dict[str, float | None]:
    """Compute `voc07_mAP`, `voc12_mAP` and `voc07/<class>`, `voc12/<class>` of matched boxes; from 0 to 1.

    None for a class without boxes to find; such classes are left out of the means. The best predictions of each image
    and class count, as in COCO; VOC itself counts all.
    """
    names = matches.class_names
    detections = matches.found
    truth = matches.truth
    best_box = _most_overlapped(detections, truth, len(names))
    result: dict[str, float | None] = {}
    for label, name in enumerate(names):
        total = int(matches.num_truth[label])
        rows = np.flatnonzero(detections.labels == label)
        hit = best_box[rows] >= 0
        first = np.zeros(len(rows), bool)  # first prediction of a box; within an image the best comes first
        boxes, index = np.unique(best_box[rows[hit]], return_index=True)
        first[np.flatnonzero(hit)[index]] = True
        difficult = np.append(truth.iscrowd, False)[best_box[rows]]  # -1, no box, is the last one
        order = np.argsort(-detections.scores[rows], kind="stable")
        right = (first & ~difficult)[order]
        wrong = (~difficult & ~first)[order]
        result[f"voc07/{name}"] = _average_precision(right, wrong, total, _eleven_points)
        result[f"voc12/{name}"] = _average_precision(right, wrong, total, _all_points)
    means = {}
    for year in ("voc07", "voc12"):
        defined = [result[f"{year}/{name}"] for name, total in zip(names, matches.num_truth, strict=True) if total]
        means[f"{year}_mAP"] = float(np.mean(defined)) if defined else None
    return means | result


def _most_overlapped(detections: Boxes, truth: Boxes, classes: int) -> np.ndarray:
    """Return the row in `truth` of the box of the same image and class with the largest IoU, at least 0.5, (D,).

    A prediction without such a box gets -1.
    """
    groups = [boxes.image_index * classes + boxes.labels for boxes in (detections, truth)]
    corners = [boxes.xyxy + [0, 0, 1, 1] for boxes in (detections, truth)]  # VOC's boxes end with their last pixel
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    for det, gt in paired(*groups):
        iou = np.divide(*common_and_union(corners[0][det], corners[1][gt]))
        parts.append((det[iou >= 0.5], gt[iou >= 0.5], iou[iou >= 0.5]))
    return best_pairs(*map(np.concatenate, zip(*parts, strict=True)), len(detections))[1]


def _average_precision(right: np.ndarray, wrong: np.ndarray, total: int, mean) -> float | None:
    if not total:
        return None
    true_positives = np.cumsum(right)
    seen = true_positives + np.cumsum(wrong)
    precision = np.divide(true_positives, seen, out=np.zeros(len(seen)), where=seen > 0)
    return float(mean(true_positives / total, precision))


def _eleven_points(recall: np.ndarray, precision: np.ndarray) -> float:
    return sum(precision[recall >= r].max(initial=0.0) / 11 for r in RECALL_THRESHOLDS_07)


def _all_points(recall: np.ndarray, precision: np.ndarray) -> float:
    recall = np.concatenate([[0.0], recall, [1.0]])
    best = np.maximum.accumulate(np.concatenate([[0.0], precision, [0.0]])[::-1])[::-1]
    return float((np.diff(recall) * best[1:]).sum())
