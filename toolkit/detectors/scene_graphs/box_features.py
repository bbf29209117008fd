"""Box features for relation heads. The width of a box is x2 - x1 + 1, as in the published models."""

import torch
from torch import Tensor

from toolkit.base.batch import send
from toolkit.base.box_ops import widest_float

OVERLAP_SCALE = 1024 * 1024  # square pixels that VCTree's areas are divided by
PAIR_GEOMETRY_DIM = 32  # numbers of `pair_numbers`


def box_numbers(boxes_xyxy: Tensor, sizes_hw: Tensor) -> Tensor:
    """Convert boxes (N, 4) xyxy in images of sizes (N, 2), height and width, to (N, 9): w, h, cx, cy, x1, y1, x2, y2,
    area, all relative to the image.

    Width and height count both end pixels (x2 - x1 + 1), and so do centre and area.
    """
    wh, centre = _wh_centre(boxes_xyxy)
    size_wh = sizes_hw.flip(-1).to(boxes_xyxy)
    area = wh.prod(-1, keepdim=True) / size_wh.prod(-1, keepdim=True)
    left_top = boxes_xyxy[:, :2] / size_wh
    right_bottom = boxes_xyxy[:, 2:] / size_wh
    return torch.cat([wh / size_wh, centre / size_wh, left_top, right_bottom, area], -1)


def corner_centre_numbers(boxes_xyxy: Tensor) -> Tensor:
    """Convert boxes (N, 4) xyxy to (N, 8): x1, y1, x2, y2, cx, cy, w, h."""
    wh, centre = _wh_centre(boxes_xyxy)
    return torch.cat([boxes_xyxy, centre, wh], -1)


def scaled_box_numbers(boxes_xyxy: Tensor, sizes_hw: Tensor) -> Tensor:
    """Return (N, 8): `corner_centre_numbers` of boxes (N, 4), divided by the longer side (at least 100) of their
    images, which have the sizes (N, 2), height and width."""
    longer = sizes_hw.amax(-1, keepdim=True).clamp(min=100).to(boxes_xyxy)
    return corner_centre_numbers(boxes_xyxy) / longer


def pair_numbers(subjects: Tensor, objects: Tensor) -> Tensor:
    """Convert the `scaled_box_numbers` (R, 8) of the subjects and objects of R pairs to (R, 32): subject, object, union
    and intersection of the boxes, 8 numbers each (zeros for an empty intersection).

    The width of union and intersection adds 1 to already scaled boxes, as the published models were trained.
    """
    union = union_boxes(subjects[:, :4], objects[:, :4])
    left_top = torch.maximum(subjects[:, :2], objects[:, :2])
    right_bottom = torch.minimum(subjects[:, 2:4], objects[:, 2:4])
    common = corner_centre_numbers(torch.cat([left_top, right_bottom], -1))
    common = common * (right_bottom >= left_top).all(-1, keepdim=True)
    return torch.cat([subjects, objects, corner_centre_numbers(union), common], -1)


def union_boxes(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Return the smallest box (..., 4) xyxy around each two boxes (..., 4)."""
    left_top = torch.minimum(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2])
    right_bottom = torch.maximum(boxes1_xyxy[..., 2:], boxes2_xyxy[..., 2:])
    return torch.cat([left_top, right_bottom], -1)


def intersection_areas(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Return the areas of the common parts of boxes (..., 4) xyxy, which are broadcast. Widths and heights have 1
    added."""
    left_top = torch.maximum(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2])
    right_bottom = torch.minimum(boxes1_xyxy[..., 2:], boxes2_xyxy[..., 2:])
    return (right_bottom - left_top + 1.0).clamp(min=0).prod(-1)


def iou_plus_one(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Return the IoU of boxes (..., 4) xyxy, which are broadcast: pairwise with `boxes1[:, None], boxes2[None]`. Widths
    and heights have 1 added."""
    common = intersection_areas(boxes1_xyxy, boxes2_xyxy)
    area1 = (boxes1_xyxy[..., 2:] - boxes1_xyxy[..., :2] + 1).prod(-1)
    area2 = (boxes2_xyxy[..., 2:] - boxes2_xyxy[..., :2] + 1).prod(-1)
    return common / (area1 + area2 - common)


def overlap_numbers(boxes_xyxy: Tensor, mask: Tensor) -> Tensor:
    """Measure how each object overlaps the others of its image, for VCTree.

    boxes_xyxy: (B, N_max, 4), padded. mask: (B, N_max) bool, False for padding. Returns (B, N_max, 6): number of
    overlapping objects (the object itself included), sum of the intersections, sum of the IoUs, both sums divided by
    that number, and the area of the object.
    """
    both = mask[:, :, None] & mask[:, None, :]
    first = boxes_xyxy[:, :, None]
    second = boxes_xyxy[:, None]
    common = intersection_areas(first, second) * both  # (B, N_max, N_max)
    ious = torch.where(both, iou_plus_one(first, second), 0.0)
    count = (common > 0).sum(-1).to(boxes_xyxy)
    shared = common.sum(-1) / OVERLAP_SCALE
    iou = ious.sum(-1)
    mean_shared = shared / (count + 1e-9)
    mean_iou = iou / (count + 1e-9)
    area = (boxes_xyxy[..., 2:] - boxes_xyxy[..., :2]).prod(-1) / OVERLAP_SCALE
    return torch.stack([count, shared, iou, mean_shared, mean_iou, area], -1)


def rectangle_masks(boxes_xyxy: Tensor, sizes_hw: Tensor, resolution: int = 27) -> Tensor:
    """Draw boxes (..., 4) xyxy as masks (..., resolution, resolution), float32 0 or 1. A mask covers the whole image,
    whose size is (..., 2), height and width."""
    size_wh = sizes_hw.flip(-1).to(widest_float(sizes_hw.device))
    # float64, and not `resolution / size`: torch makes a rounded reciprocal of that, and 50 * 20 / 100 ends below 10
    scale = (torch.full_like(size_wh, resolution) / size_wh).to(boxes_xyxy)
    first = (boxes_xyxy[..., :2] * scale).floor()
    last = (boxes_xyxy[..., 2:] * scale).ceil()
    cells = torch.arange(resolution, device=boxes_xyxy.device)
    inside = (cells >= first[..., None]) & (cells <= last[..., None])  # (..., 2, resolution)
    columns, rows = inside.unbind(-2)
    return (rows[..., :, None] & columns[..., None, :]).float()


def reading_order(
    boxes_xyxy: Tensor,
    num_objects: list[int],
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Order the objects of a batch for recurrent heads, in the layout of `PackedSequence`: time step by time step.

    In an image, objects run from the largest centre x to the smallest. Images with more objects come first; of images
    with equal numbers, the later one does.

    Args:
        num_objects: number of objects of each image.
        device: device of the two permutations; None: that of the boxes.

    Returns:
        (N,) int64 permutation of the objects, its inverse, and (steps,) int64, the number of images that still have an
        object at each step, on the host.
    """
    centre_x = (0.5 * (boxes_xyxy[:, 0] + boxes_xyxy[:, 2])).tolist()
    images = sorted(range(len(num_objects)), key=lambda i: (-num_objects[i], -i))
    ordered = {}
    start = 0
    for image, count in enumerate(num_objects):
        ordered[image] = sorted(range(start, start + count), key=lambda n: -centre_x[n])
        start += count
    # Images with the objects 0 1 and 2 3 4, already from right to left: the steps are 2 0, then 3 1, then 4.
    objects = []
    sizes = []
    for step in range(max(num_objects, default=0)):
        running = [ordered[image][step] for image in images if num_objects[image] > step]
        objects += running
        sizes.append(len(running))
    order = torch.as_tensor(objects, dtype=torch.int64)
    inverse = order.argsort()
    sizes = torch.as_tensor(sizes, dtype=torch.int64)
    device = boxes_xyxy.device if device is None else device
    return send(order, device), send(inverse, device), sizes


def certain_logits(labels: Tensor, num_classes: int) -> Tensor:
    """Convert labels (N,) to logits (N, C) float32: 1000 for the label, -1000 for other classes."""
    logits = torch.full((len(labels), num_classes), -1000.0, device=labels.device)
    return logits.scatter_(1, labels[:, None].long(), 1000.0)


def _wh_centre(boxes_xyxy: Tensor) -> tuple[Tensor, Tensor]:
    wh = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2] + 1
    return wh, boxes_xyxy[:, :2] + 0.5 * wh
