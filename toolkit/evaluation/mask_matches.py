"""The matches of predictions and annotated objects by their masks; everything is then counted as it is for boxes.

IoU and areas are those of pycocotools, and so are the rules (its `iouType="segm"`): the IoU with a crowd is the share
of the prediction that lies in it; the area of an annotated object is the one that the data name, and that of a
prediction is the number of its pixels.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.masks import areas, column_of, rectangle, rle
from toolkit.evaluation.matches import BACKGROUND_IOU, Matches

LISTED_FAULTS = 10


class TruthMasks(NamedTuple):
    """The masks of G annotated objects.

    masks: (G,) `Rle`. absent: (G,) bool, True for an object that has a box alone: what is found in this box is neither
    right nor wrong.
    """

    masks: np.ndarray
    absent: np.ndarray


def masks_of_truth(table) -> TruthMasks | None:
    """Return the masks of all annotated objects, in the order of `table.boxes()`; None: the table has none.

    An object without a mask gets its box as its mask.
    """
    if not table.has_masks:
        return None
    truth = table.boxes(masks=True)
    absent = np.array([shape is None for shape in truth.extra["masks"]], bool)
    sizes_hw = table.sizes_hw()[truth.image_index].tolist()
    encoded = []
    for shape, box, size_hw in zip(truth.extra["masks"], truth.xyxy.tolist(), sizes_hw, strict=True):
        whole = rectangle(box) if shape is None else shape
        encoded.append(rle(whole, tuple(size_hw)))
    return TruthMasks(column_of(encoded), absent)


def match_masks(matches: Matches, truth_masks: TruthMasks) -> Matches:
    """Return the matches of the same predictions and objects by their masks.

    matches: by boxes, of predictions with `found.extra["masks"]`, (D,) `Rle`. truth_masks: see `masks_of_truth`;
        objects without one count as crowd regions.

    Raises:
        BadInput: a predicted mask does not have the size of its image.
    """
    found = matches.found
    _check_sizes(matches)
    extra = {**matches.truth.extra, "masks": truth_masks.masks}
    truth = replace(matches.truth, extra=extra, iscrowd=matches.truth.iscrowd | truth_masks.absent)
    found = replace(found, area=areas(found.extra["masks"], (0, 0)))  # run lengths have their own size
    det, gt, iou = _overlaps(found, truth)
    return replace(matches, truth=truth, found=found, det=det, gt=gt, iou=iou, by_mask=True)


def matches_by_mask(matches: Matches, table) -> Matches | None:
    """Return the matches by masks; None if the table or the predictions have no masks."""
    if "masks" not in matches.found.extra:
        return None
    truth_masks = masks_of_truth(table)
    return None if truth_masks is None else match_masks(matches, truth_masks)


def named_by_mask(row: dict[str, float | None]) -> dict[str, float | None]:
    """Return metrics with the names that they have for masks: `segm_AP` for `bbox_AP`, `segm_AP/cat` for `AP/cat`."""
    return {f"segm_{name.removeprefix('bbox_')}": value for name, value in row.items()}


def _check_sizes(m: Matches) -> None:
    faults = []
    for mask, image in zip(m.found.extra["masks"], m.found.image_index.tolist(), strict=True):
        height, width = m.sizes_hw[image].tolist()
        if tuple(mask.size_hw) != (height, width):
            faults.append(
                f"prediction of image {m.image_ids[image]!r}: its mask has {mask.size_hw[0]} x {mask.size_hw[1]} "
                f"pixels (height x width); expected {height} x {width}, the size of the image"
            )
    if faults:
        more = [f"and {len(faults) - LISTED_FAULTS} more"] if len(faults) > LISTED_FAULTS else []
        raise BadInput(faults[:LISTED_FAULTS] + more)


def _overlaps(found: Boxes, truth: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (det, gt, iou) of all pairs in one image whose masks overlap by 0.1."""
    from pycocotools import mask as coco_mask

    found_masks = [mask.as_coco() for mask in found.extra["masks"]]
    truth_masks = [mask.as_coco() for mask in truth.extra["masks"]]
    all_det = [np.zeros(0, np.int64)]
    all_gt = [np.zeros(0, np.int64)]
    all_iou = [np.zeros(0)]
    for image in range(truth.num_images):
        own = found.of_image(image)
        annotated = truth.of_image(image)
        if own.start == own.stop or annotated.start == annotated.stop:
            continue
        iscrowd = truth.iscrowd[annotated].astype(np.uint8)
        iou = coco_mask.iou(found_masks[own], truth_masks[annotated], iscrowd)
        det, gt = np.nonzero(iou >= BACKGROUND_IOU)
        all_det.append(own.start + det)
        all_gt.append(annotated.start + gt)
        all_iou.append(iou[det, gt])
    return np.concatenate(all_det), np.concatenate(all_gt), np.concatenate(all_iou)
