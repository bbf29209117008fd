"""Tiled prediction on large images, and flip test-time augmentation, merged into one result."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from toolkit.base.box_ops import pairwise_iou
from toolkit.base.errors import BadInput
from toolkit.evaluation.predictions import Detections
from toolkit.models.nms import nms_by_label
from toolkit.tools.predict.prediction import Predictor

MIN_CONTAINED_SHARE = 0.8  # share of a box inside another one of its class from which it counts as a part of that
MIN_SCORE_RATIO = 0.25  # of such another box to the box: a weak box does not remove a good part
BORDER_SHARE = 0.025  # of a tile's side: a box that ends this near to a border is cut there; few end on it exactly


def tiled(predictor: Predictor, tile: int, overlap: float = 0.2, nms_iou: float = 0.5, batch_size: int = 8):
    """Return a predictor that runs on tiles of `tile` pixels, and on the whole image if it fits in one.

    Args:
        tile: longer side in pixels of tiles that have the aspect of the images the detector was trained on, squares if
            that is not known; every tile is resized to what the detector was trained with.
        overlap: share of a side that neighbours have in common; objects up to that size are whole in one of them.
        nms_iou: boxes of a class that overlap more are one.

    A box that a border between tiles cuts is dropped where another one of its class has most of it.

    Raises:
        BadInput: a tile of no size, an overlap outside [0, 0.9], a scene-graph detector.
    """
    if tile < 1 or not 0 <= overlap <= 0.9:
        raise BadInput(f"--tile {tile} --overlap {overlap}: expected at least one pixel, and 0 to 0.9 of a tile")
    _refuse_graphs(predictor, "--tile")
    rows, columns = tile_hw(tile, predictor.size)

    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Detections]:
        return [one(image, score_threshold) for image in images]

    def one(image: Tensor, score_threshold: float) -> Detections:
        height, width = image.shape[-2:]
        corners = [(x, y) for y in starts(height, rows, overlap) for x in starts(width, columns, overlap)]
        parts = []
        cut = []
        for first in range(0, len(corners), batch_size):
            some = corners[first : first + batch_size]
            cuts = [image[:, y : y + rows, x : x + columns] for x, y in some]
            for (x, y), detections in zip(some, predictor.predict(cuts, score_threshold), strict=True):
                boxes = detections["boxes"]
                right, bottom = min(width, x + columns), min(height, y + rows)
                space = torch.cat(
                    [boxes[:, :2], torch.tensor([right - x, bottom - y]) - boxes[:, 2:]],
                    dim=1,
                )
                inner = torch.tensor([x > 0, y > 0, right < width, bottom < height])  # borders between tiles
                cut.append(((space <= BORDER_SHARE * tile) & inner).any(1))
                parts.append(
                    {
                        **detections,
                        "boxes": boxes + torch.tensor([x, y, x, y], dtype=boxes.dtype),
                    }
                )
        return merged(parts, nms_iou, torch.cat(cut))

    return replace(predictor, predict=predict)


def flipped(predictor: Predictor, nms_iou: float = 0.6) -> Predictor:
    """Return a predictor that runs on every image twice, once mirrored left to right.

    Boxes of a class that overlap by more than `nms_iou` are one, at the mean of both places by their scores.
    """
    _refuse_graphs(predictor, "--flip")

    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Detections]:
        plain = predictor.predict(images, score_threshold)
        mirrored = predictor.predict([image.flip(-1) for image in images], score_threshold)
        for image, detections in zip(images, mirrored, strict=True):
            left, top, right, bottom = detections["boxes"].unbind(1)
            detections["boxes"] = torch.stack(
                [image.shape[-1] - right, top, image.shape[-1] - left, bottom],
                dim=1,
            )
        return [_averaged(both, nms_iou) for both in zip(plain, mirrored, strict=True)]

    return replace(predictor, predict=predict)


def tile_hw(tile: int, size: Mapping[str, int] | None) -> tuple[int, int]:
    """Return the (h, w) of tiles with a longer side of `tile` pixels and the aspect ratio of `size`, if it has one."""
    size = size or {}
    height, width = size.get("height", 1), size.get("width", 1)
    longer = max(height, width)
    return tuple(max(1, round(tile * side / longer)) for side in (height, width))


def starts(length: int, tile: int, overlap: float) -> list[int]:
    """Return where tiles begin along a side: evenly spaced, and the last one ends with the image."""
    if length <= tile:
        return [0]
    step = max(1, int(tile * (1 - overlap)))
    count = -(-(length - tile) // step) + 1
    return [round(i * (length - tile) / (count - 1)) for i in range(count)]


def merged(parts: Sequence[Detections], nms_iou: float, cut: Tensor | None = None) -> Detections:
    """Merge several sets of detections of one image, best first, by non-maximum suppression class by class.

    cut: (K,) bool, boxes of all parts that end where a tile ends; they are dropped if a whole box has most of them.
    """
    joined = {key: torch.cat([part[key] for part in parts]) for key in ("boxes", "scores", "labels")}
    if cut is not None and cut.any():
        keep = ~(cut & _inside_another(joined, cut))
        joined = {key: value[keep] for key, value in joined.items()}
    kept = nms_by_label(joined["boxes"], joined["scores"], joined["labels"], nms_iou)
    return {key: value[kept] for key, value in joined.items()}


def _inside_another(detections: Detections, cut: Tensor) -> Tensor:
    """Return (K,) bool, true for a cut box if another one of its class contains `MIN_CONTAINED_SHARE` of it, is whole
    or larger, and has at least `MIN_SCORE_RATIO` of its score. Works class by class, since all pairs of the detections
    in a hundred tiles would take gigabytes."""
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
        is_as_sure = scores[None, others] >= MIN_SCORE_RATIO * scores[parts, None]
        is_another = parts[:, None] != others
        inside[parts] = (is_contained & is_whole & is_as_sure & is_another).any(1)
    return inside


def _averaged(parts: Sequence[Detections], nms_iou: float) -> Detections:
    joined = {key: torch.cat([part[key] for part in parts]) for key in ("boxes", "scores", "labels")}
    kept = nms_by_label(joined["boxes"], joined["scores"], joined["labels"], nms_iou)
    near = pairwise_iou(joined["boxes"][kept], joined["boxes"]) >= nms_iou
    near &= joined["labels"][kept, None] == joined["labels"][None]
    near[torch.arange(len(kept)), kept] = True
    weights = near * joined["scores"]
    boxes = weights @ joined["boxes"] / weights.sum(1, keepdim=True).clamp(min=1e-9)
    return {
        "boxes": boxes,
        "scores": joined["scores"][kept],
        "labels": joined["labels"][kept],
    }


def _refuse_graphs(predictor: Predictor, flag: str) -> None:
    if predictor.predicates:
        raise BadInput(f"{flag}: relations of a scene graph cannot be merged; leave it out")
