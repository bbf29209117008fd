"""Predicts on large images in tiles, or on each image and its mirror image, and merges the detections."""

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
    """Return a copy of a predictor that predicts on overlapping tiles of each image and merges the detections.

    An image that fits into one tile is predicted on as a whole. Every tile is resized to the size that the detector was
    trained with. A box that is cut off by a border between tiles is dropped if another box of its class contains most
    of it.

    Args:
        tile: longer side of a tile in pixels. Tiles have the aspect ratio of the images that the detector was trained
            on, and are squares if that is not known.
        overlap: overlap of neighbouring tiles as a fraction of their side, from 0 to 0.9; an object up to the size of
            the overlap is not cut off in at least one tile.
        nms_iou: IoU above which the worse of two boxes of a class is dropped.
        batch_size: number of tiles in a batch.

    Raises:
        BadInput: `tile` is below 1, `overlap` is not in [0, 0.9], or the predictor is a scene graph model.
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
    """Return a copy of a predictor that predicts on every image and on its mirror image (left to right), and merges the
    detections.

    Boxes of a class with an IoU of at least `nms_iou` are merged into one, whose coordinates are the mean weighted by
    the scores. Raises BadInput for a scene graph model.
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
    """Return the (height, width) in pixels of tiles with a longer side of `tile` pixels.

    Tiles have the aspect ratio of `size`, or are squares if `size` has no height and width.
    """
    size = size or {}
    height, width = size.get("height", 1), size.get("width", 1)
    longer = max(height, width)
    return tuple(max(1, round(tile * side / longer)) for side in (height, width))


def starts(length: int, tile: int, overlap: float) -> list[int]:
    """Return the positions in pixels at which tiles begin along one side of an image.

    They are evenly spaced, and the last tile ends with the image.

    Args:
        length: side of the image in pixels.
        tile: side of a tile in pixels.
        overlap: smallest overlap of neighbouring tiles, as a fraction of `tile`.
    """
    if length <= tile:
        return [0]
    step = max(1, int(tile * (1 - overlap)))
    count = -(-(length - tile) // step) + 1
    return [round(i * (length - tile) / (count - 1)) for i in range(count)]


def merged(parts: Sequence[Detections], nms_iou: float, cut: Tensor | None = None) -> Detections:
    """Merge several sets of detections of one image by class-wise NMS; the result is sorted, best first.

    Args:
        nms_iou: IoU above which the worse of two boxes of a class is dropped.
        cut: (K,) bool for the K boxes of all parts together: whether a border between tiles cuts off the box. Such a
            box is dropped if another box of its class contains most of it. None: no box is cut off.
    """
    joined = {key: torch.cat([part[key] for part in parts]) for key in ("boxes", "scores", "labels")}
    if cut is not None and cut.any():
        keep = ~(cut & _inside_another(joined, cut))
        joined = {key: value[keep] for key, value in joined.items()}
    kept = nms_by_label(joined["boxes"], joined["scores"], joined["labels"], nms_iou)
    return {key: value[kept] for key, value in joined.items()}


def _inside_another(detections: Detections, cut: Tensor) -> Tensor:
    """Return (K,) bool: True for a box that is cut off if another box of its class contains `MIN_CONTAINED_SHARE` of
    it, is not cut off itself or is larger, and has at least `MIN_SCORE_RATIO` of its score.

    Computed class by class, because all pairs of the detections in a hundred tiles would take gigabytes.
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
