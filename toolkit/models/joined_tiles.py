"""Detections in the tiles of a picture, joined to those of the picture: one for each object, across all seams."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from toolkit.base.masks import Rle, overlaps_in, selected_masks, shifted, united
from toolkit.models.nms import nms_by_label

NMS_IOU = 0.5  # boxes of a class that overlap more are one
SAME_MASK_IOU = 0.5  # above it, cut masks of a class are pieces of one object; counted where both tiles show them
MIN_CONTAINED_SHARE = 0.8  # share of a box inside another one of its class from which it counts as a part of that
MIN_SCORE_RATIO = 0.25  # of such another box to the box: a weak box does not remove a good part
MIN_CUT_SCORE_RATIO = 0.5  # the same where the other box is cut too and both overlap so much that they are one
SAME_BOX_IOU = 0.9  # two boxes that overlap more have the same sides; the score decides between them
BORDER_SHARE = 0.025  # of a tile's side: a box that ends this near to a border is cut there; few end on it exactly
COLUMNS = ("boxes", "scores", "labels", "tile")  # tensors of detections; and, while tiles are joined, the tile of each

Detections = dict[str, Tensor | list[Rle]]  # K of an image: `boxes (K, 4)`, `scores (K,)`, `labels (K,)`; `masks`


def join_tiles(
    parts: Sequence[Mapping[str, Tensor | list[Rle]]],
    tiles_xyxy: np.ndarray | Tensor,
    size_hw: Sequence[int],
    tile_side: int,
    nms_iou: float = NMS_IOU,
    most_of_class: int | None = None,
) -> Detections:
    """Join the detections in the tiles of a picture, best first, by non-maximum suppression class by class.

    Before that, masks that a border between tiles cuts are joined to those of whole objects, see `_with_joined_pieces`;
    and a box that a border cuts is dropped where another one of its class, which is not much less sure, has most of it.

    Args:
        parts: of each tile, on the CPU: `boxes (K, 4)` xyxy in pixels of the tile, `scores (K,)`, `labels (K,)`, and of
            a detector of masks `masks`, K run lengths in the tile.
        tiles_xyxy: (W, 4) in pixels of the picture, one for each part; at least one.
        size_hw: height and width of the picture.
        tile_side: longer side in pixels of the tiles of pictures that are larger than one.
        nms_iou: boxes of a class that overlap more are one.
        most_of_class: number of detections of each class that are kept, the best ones; None: all.

    Returns boxes in pixels of the picture, scores, labels, and masks in the picture.
    """
    height, width = size_hw
    moved = []
    cut = []
    for number, (part, (left, top, right, bottom)) in enumerate(zip(parts, tiles_xyxy.tolist(), strict=True)):
        boxes = part["boxes"]
        after = torch.tensor([right - left, bottom - top]) - boxes[:, 2:]
        space = torch.cat([boxes[:, :2], after], dim=1)  # between each side of a box and that of its tile
        is_inner = torch.tensor([left > 0, top > 0, right < width, bottom < height])  # borders between tiles
        is_near = space <= BORDER_SHARE * tile_side
        cut.append((is_near & is_inner).any(1))
        corner = torch.tensor([left, top, left, top], dtype=boxes.dtype)
        moved.append({**part, "boxes": boxes + corner, "tile": torch.full((len(boxes),), number)})
    detections = concatenated(moved)
    is_cut = torch.cat(cut)
    tiles_xyxy = np.asarray(tiles_xyxy)
    if "masks" in detections:
        is_piece = is_cut & ~_inside_another(detections, is_cut, nms_iou, is_whole=True)
        pieces = is_piece.nonzero()[:, 0].tolist()
        _move_masks(detections, pieces, tiles_xyxy, (height, width))
        detections, is_cut = _with_joined_pieces(detections, pieces, is_cut, tiles_xyxy)
    joined = merged([detections], nms_iou, is_cut)
    if most_of_class is not None:
        joined = best_of_classes(joined, most_of_class)
    if "masks" in joined:
        _move_masks(joined, range(len(joined["masks"])), tiles_xyxy, (height, width))
    del joined["tile"]
    return joined


def _move_masks(detections: Detections, rows: Iterable[int], tiles_xyxy: np.ndarray, size_hw: tuple[int, int]) -> None:
    """Make the masks of these rows, if they are still those of a tile, masks of the whole picture."""
    masks = detections["masks"]
    for row in rows:
        if masks[row].size_hw != size_hw:
            left, top, *_ = tiles_xyxy[detections["tile"][row]].tolist()
            masks[row] = shifted(masks[row], left, top, size_hw)


def merged(parts: Sequence[Mapping], nms_iou: float, cut: Tensor | None = None) -> Detections:
    """Merge several sets of detections of one image, best first, by non-maximum suppression class by class.

    cut: (K,) bool, boxes of all parts that end where a tile ends; they are dropped if a whole box has most of them.
    """
    joined = concatenated(parts)
    if cut is not None and cut.any():
        keep = ~(cut & _inside_another(joined, cut, nms_iou))
        joined = rows_of(joined, keep.nonzero()[:, 0])
    kept = nms_by_label(joined["boxes"], joined["scores"], joined["labels"], nms_iou)
    return rows_of(joined, kept)


def concatenated(parts: Sequence[Mapping]) -> Detections:
    """Return the detections of all parts, in order."""
    joined = {key: torch.cat([part[key] for part in parts]) for key in COLUMNS if key in parts[0]}
    if "masks" in parts[0]:
        joined["masks"] = [mask for part in parts for mask in part["masks"]]
    return joined


def rows_of(detections: Detections, rows: Tensor) -> Detections:
    """Return the detections with these row numbers."""
    return {key: selected_masks(column, rows) for key, column in detections.items()}


def _with_joined_pieces(
    detections: Detections, pieces: Sequence[int], is_cut: Tensor, tiles_xyxy: np.ndarray
) -> tuple[Detections, Tensor]:
    """Join the pieces into which borders between tiles cut an object: those whose masks agree, see `_agreeing`.

    The surest pairs come first. An object has at most one piece in a tile, and no piece with less than
    `MIN_SCORE_RATIO` of the score of another. It gets the best score, all masks united, and the box around all boxes.

    Args:
        detections: K of all tiles (W, 4), in the picture; `tile` is the row in `tiles_xyxy`, not decreasing.
        pieces: rows of cut detections that no whole one contains, ascending.
        is_cut: (K,) bool.

    Returns the detections, and `is_cut` of these; a joined object is whole.
    """
    scores = detections["scores"].tolist()
    tile_of = detections["tile"].tolist()
    objects = {row: [row] for row in pieces}  # the pieces of its object, the surest first
    pairs = _agreeing(detections, np.array(pieces, int), tiles_xyxy)
    for pair in sorted(pairs, key=lambda pair: -min(scores[row] for row in pair)):
        both = sorted(chain(*(objects[row] for row in pair)), key=lambda row: (-scores[row], row))
        is_sure = scores[both[-1]] >= MIN_SCORE_RATIO * scores[both[0]]
        if is_sure and len({tile_of[row] for row in both}) == len(both):
            objects.update(dict.fromkeys(both, both))
    boxes = detections["boxes"].clone()
    masks = list(detections["masks"])
    is_cut = is_cut.clone()
    is_left = torch.ones(len(scores), dtype=torch.bool)
    for row, of_object in objects.items():
        if row != of_object[0]:
            is_left[row] = False
        elif len(of_object) > 1:
            of_pieces = detections["boxes"][of_object]
            boxes[row] = torch.cat([of_pieces[:, :2].amin(0), of_pieces[:, 2:].amax(0)])
            masks[row] = united([detections["masks"][piece] for piece in of_object])
            is_cut[row] = False
    rows = is_left.nonzero()[:, 0]
    return rows_of({**detections, "boxes": boxes, "masks": masks}, rows), is_cut[rows]


def _agreeing(detections: Detections, pieces: np.ndarray, tiles_xyxy: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs of these rows of detections that are of one class, in two tiles, and have masks with an IoU of
    more than `SAME_MASK_IOU` in the region that both tiles show.

    Of two masks that have no pixel in common, no mask agrees by more than half with both.
    """
    labels = detections["labels"].numpy()
    masks = detections["masks"]
    tile_of = detections["tile"].numpy()[pieces]
    of_tiles = np.split(pieces, np.searchsorted(tile_of, np.arange(1, len(tiles_xyxy))))
    tiles = np.unique(tile_of)
    agreeing = []
    for number, tile in enumerate(tiles.tolist(), start=1):
        later = tiles[number:]
        low = np.maximum(tiles_xyxy[tile, :2], tiles_xyxy[later, :2])
        high = np.minimum(tiles_xyxy[tile, 2:], tiles_xyxy[later, 2:])
        for at in np.flatnonzero((high > low).all(1)).tolist():
            rows = of_tiles[tile]
            others = of_tiles[later[at]]
            region_xyxy = [*low[at], *high[at]]
            iou = overlaps_in(region_xyxy, [masks[row] for row in rows], [masks[row] for row in others])
            first, second = np.nonzero((iou > SAME_MASK_IOU) & (labels[rows, None] == labels[others]))
            agreeing += zip(rows[first].tolist(), others[second].tolist(), strict=True)
    return agreeing


def _inside_another(detections: Detections, cut: Tensor, nms_iou: float, is_whole: bool = False) -> Tensor:
    """Return (K,) bool, true for a cut box if another one of its class contains `MIN_CONTAINED_SHARE` of it, is whole
    or larger, is not the same box, and is not much less sure: has at least `MIN_SCORE_RATIO` of its score, or
    `MIN_CUT_SCORE_RATIO` if it is cut too and suppression would take them for one. Works class by class, since all
    pairs of the detections in a hundred tiles would take gigabytes.

    is_whole: the other one must be whole; a larger cut one does not count.
    """
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
        shows_more = ~cut[None, others] | (area[None, others] > area[parts, None]) & (not is_whole)
        iou = shared / (area[parts, None] + area[None, others] - shared)
        least_ratio = torch.where(cut[None, others] & (iou > nms_iou), MIN_CUT_SCORE_RATIO, MIN_SCORE_RATIO)
        is_as_sure = scores[None, others] >= least_ratio * scores[parts, None]
        is_another = (parts[:, None] != others) & (iou <= SAME_BOX_IOU)
        inside[parts] = (is_contained & shows_more & is_as_sure & is_another).any(1)
    return inside


def best_of_classes(detections: Detections, most: int) -> Detections:
    """Return the first `most` detections of each class, in the order they have."""
    labels = detections["labels"]
    if len(labels) <= most:
        return dict(detections)
    keep = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        keep[(labels == label).nonzero()[:most, 0]] = True
    return rows_of(detections, keep.nonzero()[:, 0])
