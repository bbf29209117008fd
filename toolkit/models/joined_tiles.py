"""Detections in the tiles of a picture, joined to those of the picture: one box for each object, across all seams."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.models.nms import nms_by_label

NMS_IOU = 0.5  # boxes of a class that overlap more are one
MIN_CONTAINED_SHARE = 0.8  # share of a box inside another one of its class from which it counts as a part of that
MIN_SCORE_RATIO = 0.25  # of such another box to the box: a weak box does not remove a good part
MIN_CUT_SCORE_RATIO = 0.5  # the same where the other box is cut too and both overlap so much that they are one
SAME_BOX_IOU = 0.9  # two boxes that overlap more have the same sides; the score decides between them
BORDER_SHARE = 0.025  # of a tile's side: a box that ends this near to a border is cut there; few end on it exactly


def join_tiles(
    parts: Sequence[Mapping[str, Tensor]],
    tiles_xyxy: np.ndarray | Tensor,
    size_hw: Sequence[int],
    tile_side: int,
    nms_iou: float = NMS_IOU,
    most_of_class: int | None = None,
) -> dict[str, Tensor]:
    """Join the detections in the tiles of a picture, best first, by non-maximum suppression class by class.

    A box that a border between tiles cuts is dropped where another one of its class, which is not much less sure, has
    most of it.

    Args:
        parts: of each tile, on the CPU: `boxes (K, 4)` xyxy in pixels of the tile, `scores (K,)`, `labels (K,)`.
        tiles_xyxy: (W, 4) in pixels of the picture, one for each part; at least one.
        size_hw: height and width of the picture.
        tile_side: longer side in pixels of the tiles of pictures that are larger than one.
        nms_iou: boxes of a class that overlap more are one.
        most_of_class: number of detections of each class that are kept, the best ones; None: all.

    Returns boxes in pixels of the picture, scores and labels.
    """
    height, width = size_hw
    moved = []
    cut = []
    for part, (left, top, right, bottom) in zip(parts, tiles_xyxy.tolist(), strict=True):
        boxes = part["boxes"]
        after = torch.tensor([right - left, bottom - top]) - boxes[:, 2:]
        space = torch.cat([boxes[:, :2], after], dim=1)  # between each side of a box and that of its tile
        is_inner = torch.tensor([left > 0, top > 0, right < width, bottom < height])  # borders between tiles
        is_near = space <= BORDER_SHARE * tile_side
        cut.append((is_near & is_inner).any(1))
        corner = torch.tensor([left, top, left, top], dtype=boxes.dtype)
        moved.append({**part, "boxes": boxes + corner})
    joined = merged(moved, nms_iou, torch.cat(cut))
    return joined if most_of_class is None else best_of_classes(joined, most_of_class)


def merged(parts: Sequence[Mapping[str, Tensor]], nms_iou: float, cut: Tensor | None = None) -> dict[str, Tensor]:
    """Merge several sets of detections of one image, best first, by non-maximum suppression class by class.

    cut: (K,) bool, boxes of all parts that end where a tile ends; they are dropped if a whole box has most of them.
    """
    joined = {key: torch.cat([part[key] for part in parts]) for key in ("boxes", "scores", "labels")}
    if cut is not None and cut.any():
        keep = ~(cut & _inside_another(joined, cut, nms_iou))
        joined = {key: value[keep] for key, value in joined.items()}
    kept = nms_by_label(joined["boxes"], joined["scores"], joined["labels"], nms_iou)
    return {key: value[kept] for key, value in joined.items()}


def _inside_another(detections: Mapping[str, Tensor], cut: Tensor, nms_iou: float) -> Tensor:
    """Return (K,) bool, true for a cut box if another one of its class contains `MIN_CONTAINED_SHARE` of it, is whole
    or larger, is not the same box, and is not much less sure: has at least `MIN_SCORE_RATIO` of its score, or
    `MIN_CUT_SCORE_RATIO` if it is cut too and suppression would take them for one. Works class by class, since all
    pairs of the detections in a hundred tiles would take gigabytes."""
    boxes = detections["boxes"]
    scores = detections["scores"]
    inside = torch.zeros_like(cut)
    area = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    for label in detections["labels"][cut].unique():
        of_class = detections["labels"] == label
        parts = (of_class & cut).nonzero()[:, 0]
        others = of_class.nonzero()[:, 0]
        low = torch.maximum(boxes[parts, None, :2], boxes[None, others, :2])
        high = torch.minimum(boxes[parts, None, 2:], boxes[None, others, 2:])
        shared = (high - low).clamp(min=0).prod(-1)  # (parts, others)
        is_contained = shared >= MIN_CONTAINED_SHARE * area[parts, None]
        is_whole = ~cut[None, others] | (area[None, others] > area[parts, None])
        iou = shared / (area[parts, None] + area[None, others] - shared)
        least_ratio = torch.where(cut[None, others] & (iou > nms_iou), MIN_CUT_SCORE_RATIO, MIN_SCORE_RATIO)
        is_as_sure = scores[None, others] >= least_ratio * scores[parts, None]
        is_another = (parts[:, None] != others) & (iou <= SAME_BOX_IOU)
        inside[parts] = (is_contained & is_whole & is_as_sure & is_another).any(1)
    return inside


def best_of_classes(detections: Mapping[str, Tensor], most: int) -> dict[str, Tensor]:
    """Return the first `most` detections of each class, in the order they have."""
    labels = detections["labels"]
    if len(labels) <= most:
        return dict(detections)
    keep = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        keep[(labels == label).nonzero()[:most, 0]] = True
    return {key: value[keep] for key, value in detections.items()}
