"""Mean average precision as defined by Pascal VOC, in addition to COCO's: the metric of GluonCV's detectors.

The rules are those of the devkit (Everingham et al. 2010): each prediction is compared with the one box that it
overlaps most, sides include the last pixel (+ 1), the IoU threshold is 0.5, a second prediction of a box is wrong.
Boxes marked as crowd are VOC's "difficult": they need not be found, and predictions that match them are ignored. VOC07
averages the precision over 11 recalls, VOC12 over all recalls.
"""

import numpy as np

from toolkit.base.boxes import Boxes, common_and_union
from toolkit.evaluation.matches import Matches, best_pairs, pairs_within_groups

# With the rounding of `arange`: 0.3 is 0.30000000000000004, as in the programs of the field.
RECALL_THRESHOLDS_07 = np.arange(0.0, 1.1, 0.1)


def voc_metrics(matches: Matches) -> dict[str, float | None]:
    """Compute `voc07_mAP`, `voc12_mAP` and `voc07/<class>`, `voc12/<class>` of matched boxes; from 0 to 1.

    The AP of a class without boxes to find is None, and such classes are left out of the means. Only the best
    predictions of each image and class count, as in COCO (`Matches.max_detections`); VOC itself counts all.
    """
    names = matches.class_names
    detections = matches.found
    truth = matches.truth
    best_box = _most_overlapped(detections, truth, len(names))
    result: dict[str, float | None] = {}
    is_difficult = np.append(truth.iscrowd, False)  # -1, no box, is the last one
    for label, name in enumerate(names):
        total = int(matches.num_truth[label])
        rows = np.flatnonzero(detections.labels == label)
        box = best_box[rows]
        hits = np.flatnonzero(box >= 0)
        # The first prediction of each box is right; within an image the best comes first.
        _, first_hits = np.unique(box[hits], return_index=True)
        first = np.zeros(len(rows), bool)
        first[hits[first_hits]] = True
        difficult = is_difficult[box]
        order = np.argsort(-detections.scores[rows], kind="stable")
        right = (first & ~difficult)[order]
        wrong = (~difficult & ~first)[order]
        result[f"voc07/{name}"] = _average_precision(right, wrong, total, _eleven_points)
        result[f"voc12/{name}"] = _average_precision(right, wrong, total, _all_points)
    with_boxes = [name for name, total in zip(names, matches.num_truth, strict=True) if total]
    means = {}
    for year in ("voc07", "voc12"):
        defined = [result[f"{year}/{name}"] for name in with_boxes]
        means[f"{year}_mAP"] = float(np.mean(defined)) if defined else None
    return {**means, **result}


def _most_overlapped(detections: Boxes, truth: Boxes, classes: int) -> np.ndarray:
    """Return the row in `truth` of the box of the same image and class with the largest IoU, at least 0.5, (D,).

    A prediction without such a box gets -1.
    """
    found_group = detections.image_index * classes + detections.labels
    truth_group = truth.image_index * classes + truth.labels
    # VOC's boxes end with their last pixel.
    found_xyxy = detections.xyxy + [0, 0, 1, 1]
    truth_xyxy = truth.xyxy + [0, 0, 1, 1]
    near_det = [np.zeros(0, np.int64)]
    near_gt = [np.zeros(0, np.int64)]
    near_iou = [np.zeros(0)]
    for det, gt in pairs_within_groups(found_group, truth_group):
        common, union = common_and_union(found_xyxy[det], truth_xyxy[gt])
        iou = np.divide(common, union)
        near = iou >= 0.5
        near_det.append(det[near])
        near_gt.append(gt[near])
        near_iou.append(iou[near])
    det = np.concatenate(near_det)
    gt = np.concatenate(near_gt)
    iou = np.concatenate(near_iou)
    _, best_box = best_pairs(det, gt, iou, len(detections))
    return best_box


def _average_precision(right: np.ndarray, wrong: np.ndarray, total: int, mean) -> float | None:
    if not total:
        return None
    true_positives = np.cumsum(right)
    seen = true_positives + np.cumsum(wrong)
    zeros = np.zeros(len(seen))
    precision = np.divide(true_positives, seen, out=zeros, where=seen > 0)
    recall = true_positives / total
    return float(mean(recall, precision))


def _eleven_points(recall: np.ndarray, precision: np.ndarray) -> float:
    """Return the mean over eleven recalls of the best precision at that recall or more."""
    mean = 0.0
    for least in RECALL_THRESHOLDS_07:
        best = precision[recall >= least].max(initial=0.0)
        mean += best / 11
    return mean


def _all_points(recall: np.ndarray, precision: np.ndarray) -> float:
    """Return the area under the precision over the recall, which each better precision at a higher recall raises."""
    recall = np.concatenate([[0.0], recall, [1.0]])
    precision = np.concatenate([[0.0], precision, [0.0]])
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float((np.diff(recall) * best[1:]).sum())
