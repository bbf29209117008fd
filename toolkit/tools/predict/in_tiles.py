"""Predicts on large images in tiles, or on each image and its mirror image, and merges the detections."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit.base.box_ops import pairwise_iou
from toolkit.base.errors import BadInput
from toolkit.base.masks import mirrored_mask
from toolkit.base.progress import ShownProgress
from toolkit.data.pipeline import tiling_of_run
from toolkit.data.tiling import MAX_OVERLAP, Tiling, tile_hw
from toolkit.evaluation.predictions import Detections
from toolkit.models.joined_tiles import NMS_IOU, concatenated, join_tiles, rows_of
from toolkit.models.nms import nms_by_label
from toolkit.run.layers import layer_of
from toolkit.run.open_run import run_folder_of
from toolkit.run.settings_check import check_values
from toolkit.run.settings_file import CONFIG_FILE, GROUPS, read_groups
from toolkit.tools.predict.predictor import Predictor

DEFAULT_OVERLAP = Tiling.overlap


def data_settings_of(source: str | Path) -> Mapping:
    """Return the group `data` of the settings of the run that a file or folder belongs to; {} if it belongs to none.

    Raises BadInput: the settings of the run cannot be read.
    """
    try:
        folder = run_folder_of(Path(source).expanduser())
    except BadInput:
        return {}
    path = folder / CONFIG_FILE
    data = read_groups(path).get("data") or {}  # the group alone: another detector's class need not be imported for it
    faults = check_values(layer_of(str(path), {"data": data}), GROUPS)
    if faults:
        raise BadInput(faults)
    return data


def chosen_tiling(
    tile: int | None, overlap: float | None, data: Mapping, size: Mapping[str, int] | None
) -> Tiling | None:
    """Return the way in which pictures are cut for a prediction; None: they are not.

    Args:
        tile: longer side of the tiles in pixels; 0: whole pictures; None: as the run was trained.
        overlap: share of a side that neighbours have in common; None: as the run was trained, else 0.2.
        data: the group `data` of the settings of the run; {} without a run.
        size: what images are resized to, in the format of `toolkit.data.pipeline.processor_size`.

    Raises BadInput: a tile or an overlap that cannot be.
    """
    trained = tiling_of_run(data, size)
    if overlap is None:
        overlap = DEFAULT_OVERLAP if trained is None else trained.overlap
    chosen = tile or 0
    if chosen < 0 or not 0 <= overlap <= MAX_OVERLAP:
        raise BadInput(
            f"--tile {chosen} --overlap {overlap}: expected a side in pixels, or 0 for whole pictures, and 0 to "
            f"{MAX_OVERLAP} of a tile"
        )
    if tile is None:
        return None if trained is None else replace(trained, overlap=overlap)
    return None if tile == 0 else Tiling(tile_hw(tile, size), overlap)


def tiled(predictor: Predictor, tile: int, overlap: float = DEFAULT_OVERLAP, **options) -> Predictor:
    """Return a copy of a predictor that predicts on overlapping tiles of each image and merges the detections.

    Args:
        tile: longer side of a tile in pixels. Tiles have the aspect ratio of the images that the detector was trained
            on, and are squares if that is not known.
        overlap: overlap of neighbouring tiles as a fraction of their side, from 0 to 0.9; an object up to the size of
            the overlap is not cut off in at least one tile.
        options: see `in_tiles`.

    Raises:
        BadInput: `tile` is below 1, `overlap` is not in [0, 0.9], or the predictor is a scene graph model.
    """
    if tile < 1 or not 0 <= overlap <= MAX_OVERLAP:
        expected = f"expected at least one pixel, and 0 to {MAX_OVERLAP} of a tile"
        raise BadInput(f"--tile {tile} --overlap {overlap}: {expected}")
    return in_tiles(predictor, Tiling(tile_hw(tile, predictor.size), overlap), **options)


def in_tiles(
    predictor: Predictor,
    tiling: Tiling,
    *,
    nms_iou: float = NMS_IOU,
    batch_size: int = 8,
    as_evaluated: bool = False,
) -> Predictor:
    """Return a copy of a predictor that predicts on the tiles of each image and joins the detections, see
    `join_tiles`.

    An image that fits into one tile is predicted on as a whole. Every tile is resized to the size that the detector was
    trained with.

    Args:
        nms_iou: IoU above which the worse of two boxes of a class is dropped.
        batch_size: number of tiles in a batch.
        as_evaluated: keep only what an evaluation of a run keeps, see `predict_dataset`: `max_detections` of the
            predictor count in each tile, and as many of each class in an image.

    Raises:
        BadInput: the predictor is a scene graph model.
    """
    refuse_joining("--tile", bool(predictor.predicates))
    tile_side = max(tiling.tile_hw)
    most = predictor.max_detections if as_evaluated else None

    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Detections]:
        tiles = [tiling.tiles(image.shape[-2:]) for image in images]
        predictions = []
        with ShownProgress(f"{len(images)} images in tiles", sum(map(len, tiles)), "tiles") as progress:
            for image, tiles_xyxy in zip(images, tiles, strict=True):
                parts = []
                for cuts in _cut(image, tiles_xyxy, batch_size):
                    for detections in predictor.predict(cuts, score_threshold):
                        parts.append({key: column[:most] for key, column in detections.items()})
                    progress.add(len(cuts))
                predictions.append(join_tiles(parts, tiles_xyxy, image.shape[-2:], tile_side, nms_iou, most))
        return predictions

    return replace(predictor, predict=predict, max_detections=None if as_evaluated else predictor.max_detections)


def _cut(image: Tensor, tiles_xyxy: np.ndarray, batch_size: int) -> Iterator[list[Tensor]]:
    """Yield the tiles of an image, views of its pixels, some at a time."""
    for first in range(0, len(tiles_xyxy), batch_size):
        some = tiles_xyxy[first : first + batch_size].tolist()
        yield [image[:, top:bottom, left:right] for left, top, right, bottom in some]


def flipped(predictor: Predictor, nms_iou: float = 0.6) -> Predictor:
    """Return a copy of a predictor that predicts on every image and on its mirror image (left to right), and merges the
    detections.

    Boxes of a class with an IoU of at least `nms_iou` are merged into one, whose coordinates are the mean weighted by
    the scores; the mask is that of the best one. Raises BadInput for a scene graph model.
    """
    refuse_joining("--flip", bool(predictor.predicates))

    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Detections]:
        plain = predictor.predict(images, score_threshold)
        mirrored = predictor.predict([image.flip(-1) for image in images], score_threshold)
        for image, detections in zip(images, mirrored, strict=True):
            left, top, right, bottom = detections["boxes"].unbind(1)
            detections["boxes"] = torch.stack(
                [image.shape[-1] - right, top, image.shape[-1] - left, bottom],
                dim=1,
            )
            if "masks" in detections:
                detections["masks"] = [mirrored_mask(mask) for mask in detections["masks"]]
        return [_averaged(both, nms_iou) for both in zip(plain, mirrored, strict=True)]

    return replace(predictor, predict=predict)


def _averaged(parts: Sequence[Detections], nms_iou: float) -> Detections:
    joined = concatenated(parts)
    kept = nms_by_label(joined["boxes"], joined["scores"], joined["labels"], nms_iou)
    near = pairwise_iou(joined["boxes"][kept], joined["boxes"]) >= nms_iou
    near &= joined["labels"][kept, None] == joined["labels"][None]
    near[torch.arange(len(kept)), kept] = True
    weights = near * joined["scores"]
    boxes = weights @ joined["boxes"] / weights.sum(1, keepdim=True).clamp(min=1e-9)
    return {**rows_of(joined, kept), "boxes": boxes}


def refuse_joining(flag: str, has_relations: bool) -> None:
    """Raise BadInput, which names the flag, if a detector finds relations."""
    if has_relations:
        raise BadInput(f"{flag}: relations of a scene graph cannot be merged; leave it out")
