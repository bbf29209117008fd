"""Box geometry shared by detectors, losses and transforms.

Boxes are tensors `(..., 4)`; the format is in the name: `xyxy` = left, top, right, bottom; `cxcywh` = centre and size.
Functions of boxes keep dtype and device, accept zero boxes, and are differentiable.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest float type of a device: float64, or float32 on Apple's MPS."""
    if device.type == "mps":
        return torch.float32
    return torch.float64


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Convert boxes `(..., 4)` from centre and size to corners."""
    cx, cy, width, height = boxes_cxcywh.unbind(-1)
    left = cx - width / 2
    top = cy - height / 2
    right = cx + width / 2
    bottom = cy + height / 2
    return torch.stack((left, top, right, bottom), dim=-1)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Convert boxes `(..., 4)` from corners to centre and size."""
    left, top, right, bottom = boxes_xyxy.unbind(-1)
    cx = (left + right) / 2
    cy = (top + bottom) / 2
    width = right - left
    height = bottom - top
    return torch.stack((cx, cy, width, height), dim=-1)


def moved_ends(boxes_xyxy: Tensor, pixels: float) -> Tensor:
    """Move the right and bottom edges of boxes `(..., 4)` by `pixels`."""
    left_top = boxes_xyxy[..., :2]
    right_bottom = boxes_xyxy[..., 2:] + pixels
    return torch.cat([left_top, right_bottom], dim=-1)


def normalize_boxes(boxes: Tensor, sizes_hw: Tensor) -> Tensor:
    """Convert boxes, either xyxy or cxcywh, from pixels to fractions of the image.

    Args:
        boxes: `(..., N, 4)` pixels.
        sizes_hw: `(..., 2)` height and width in pixels, one per set of N boxes.
    """
    return boxes / _whwh(boxes, sizes_hw)


def denormalize_boxes(boxes: Tensor, sizes_hw: Tensor) -> Tensor:
    """Convert boxes `(..., N, 4)` from fractions of the image to pixels, the inverse of `normalize_boxes`."""
    return boxes * _whwh(boxes, sizes_hw)


def resize_boxes(boxes: Tensor, sizes_hw: Tensor, new_sizes_hw: Tensor) -> Tensor:
    """Rescale boxes `(..., N, 4)` in pixels from images of `sizes_hw (..., 2)` to the same images at `new_sizes_hw`."""
    factors_hw = new_sizes_hw.to(boxes) / sizes_hw.to(boxes)
    return boxes * _whwh(boxes, factors_hw)


def clip_boxes(boxes_xyxy: Tensor, sizes_hw: Tensor) -> Tensor:
    """Clip boxes `(..., N, 4)` to the borders of their images of `sizes_hw (..., 2)`."""
    largest = _whwh(boxes_xyxy, sizes_hw)
    return boxes_xyxy.clamp(min=0).minimum(largest)


def _whwh(boxes: Tensor, sizes_hw: Tensor) -> Tensor:
    """Return width, height, width, height of each image, `(..., 1, 4)`, which broadcasts to its boxes."""
    sizes_hw = sizes_hw.to(device=boxes.device, dtype=boxes.dtype)
    height, width = sizes_hw.unbind(-1)
    scale = torch.stack((width, height, width, height), dim=-1)
    return scale.unsqueeze(-2)


def box_iou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Compute the intersection over union, element by element: `(..., 4)`, `(..., 4)` -> `(...)`, with broadcasting.

    Two boxes without area have IoU 0 (torchvision: NaN), so that padding rows cannot poison a gradient.
    For all pairs use `pairwise_iou`.
    """
    intersection, union = intersection_and_union(boxes1_xyxy, boxes2_xyxy)
    return _ratio(intersection, union)


def generalized_box_iou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Compute GIoU in [-1, 1], element by element: `(..., 4)`, `(..., 4)` -> `(...)`.

    The definition is that of Rezatofighi et al., CVPR 2019, eq. 3. The boxes must be ordered (x0 <= x1, y0 <= y1);
    boxes without area do not give NaN.
    """
    _, giou = iou_and_giou(boxes1_xyxy, boxes2_xyxy)
    return giou


def iou_and_giou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `box_iou` and `generalized_box_iou`, in the operations of the latter."""
    planes1 = boxes1_xyxy.unbind(-1)
    planes2 = boxes2_xyxy.unbind(-1)
    intersection, union = _intersection_and_union(planes1, planes2)
    left1, top1, right1, bottom1 = planes1
    left2, top2, right2, bottom2 = planes2
    hull_width = torch.maximum(right1, right2) - torch.minimum(left1, left2)
    hull_height = torch.maximum(bottom1, bottom2) - torch.minimum(top1, top2)
    hull = hull_width * hull_height
    iou = _ratio(intersection, union)
    return iou, iou - _ratio(hull - union, hull)


def intersection_and_union(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the areas of intersection and union, element by element: `(..., 4)`, `(..., 4)` -> `(...)` each.

    The shapes broadcast.
    """
    return _intersection_and_union(boxes1_xyxy.unbind(-1), boxes2_xyxy.unbind(-1))


def _intersection_and_union(planes1: Sequence[Tensor], planes2: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    # One coordinate at a time: contiguous planes are several times faster than slices [..., :2] of the last axis.
    left1, top1, right1, bottom1 = planes1
    left2, top2, right2, bottom2 = planes2
    width = torch.minimum(right1, right2) - torch.maximum(left1, left2)
    height = torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2)
    intersection = width.clamp(min=0) * height.clamp(min=0)
    area1 = (right1 - left1) * (bottom1 - top1)
    area2 = (right2 - left2) * (bottom2 - top2)
    union = area1 + area2 - intersection
    return intersection, union


def pairwise_iou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Compute the IoU of all pairs within each leading index: `(..., N, 4)`, `(..., M, 4)` -> `(..., N, M)`."""
    rows = boxes1_xyxy[..., :, None, :]  # (..., N, 1, 4)
    columns = boxes2_xyxy[..., None, :, :]  # (..., 1, M, 4)
    return box_iou(rows, columns)


def pairwise_generalized_iou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Compute the GIoU of all pairs within each leading index: `(..., N, 4)`, `(..., M, 4)` -> `(..., N, M)`."""
    rows = boxes1_xyxy[..., :, None, :]  # (..., N, 1, 4)
    columns = boxes2_xyxy[..., None, :, :]  # (..., 1, M, 4)
    return generalized_box_iou(rows, columns)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute a ratio: 0 with a zero gradient where the denominator is exactly 0; NaN stays NaN."""
    empty = denominator == 0
    quotient = numerator / denominator.masked_fill(empty, 1)
    return quotient.masked_fill(empty, 0)
