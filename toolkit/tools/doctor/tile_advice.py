"""The sizes that pictures and objects have in training, and whether tiles of large pictures pay by them.

What pictures are resized to is given in the format of `toolkit.data.pipeline.processor_size`, as `size`.
"""

from collections.abc import Mapping

import numpy as np

from toolkit.base.errors import BadInput
from toolkit.base.text import size_text
from toolkit.data.table import DetectionTable
from toolkit.data.tile_table import tiles_of_table
from toolkit.data.tiling import Tiling
from toolkit.data.transforms.geometry import input_hw

TINY_PX = 8  # square root of the area of a box that few detectors find, at the training size
TINY_SHARE = 0.1  # of all objects, from which tiles pay
MIN_GAIN = 0.5  # of the tiny objects, that must not be tiny in tiles
OVERLAP = Tiling.overlap  # the default of `data.tile_overlap`
# What the gain by tiles was measured with (docs/results.md).
MEASURED_EMPTY_SHARE = 0.05  # `data.tile_empty`
MEASURED_BATCH = 16  # tiles of a step


def nominal_hw(size: Mapping[str, int]) -> tuple[int, int]:
    """Return the height and width in pixels that a size names; of a shorter side a square of it."""
    shorter = size.get("shortest_edge")
    return size.get("height", shorter), size.get("width", shorter)


def words_of(size: Mapping[str, int]) -> str:
    """Return a size for a message, such as "640 px"."""
    shorter = " (shorter side)" if "shortest_edge" in size else ""
    return f"{size_text(nominal_hw(size))} px{shorter}"


def inputs_hw(sizes_hw: np.ndarray, size: Mapping[str, int]) -> np.ndarray:
    """Return the heights and widths (N, 2) in pixels that pictures (N, 2) are resized to."""
    different, place = np.unique(sizes_hw.astype(np.int64), axis=0, return_inverse=True)
    resized = [input_hw(tuple(one), size) for one in different.tolist()]
    return np.array(resized).reshape(-1, 2)[place.ravel()]


def tile_advice(split: str, table: DetectionTable, size: Mapping[str, int]) -> str | None:
    """Return a sentence that names the settings, and how long an epoch becomes, if tiles would make many tiny objects
    larger; else None.

    Tiles have the size of the images of training, so that objects keep the size they have in the pictures. They pay if
    a share of at least `TINY_SHARE` of the objects is smaller than `TINY_PX` at the training size, and less than half
    of these would be so in tiles.

    split: name of the split.
    """
    boxes = table.boxes()
    objects = boxes[~boxes.iscrowd]
    if not len(objects):
        return None
    sides_hw = (objects.xyxy[:, 2:] - objects.xyxy[:, :2])[:, ::-1]
    pictures_hw = table.sizes_hw()[objects.image_index]
    tile_hw = nominal_hw(size)
    whole = _sizes(sides_hw, pictures_hw, size)
    cut = _sizes(sides_hw, np.minimum(pictures_hw, tile_hw), size)
    tiny = np.mean(whole < TINY_PX)
    still_tiny = np.mean(cut < TINY_PX)
    if tiny < TINY_SHARE or still_tiny > MIN_GAIN * tiny:
        return None
    try:
        tiles = _tiles_of_epoch(table, tile_hw)
    except BadInput:  # more tiles than can be trained on
        return None
    pictures = len(table)
    height, width = tile_hw
    overlap_hw = OVERLAP * np.array(tile_hw)
    large = np.mean((sides_hw > overlap_hw).any(axis=1))
    setting = max(tile_hw)
    sentence = (
        f"{split}: {tiny:.0%} of the objects are smaller than {TINY_PX} px at a training size of {words_of(size)}, "
        f"and {still_tiny:.0%} in tiles of {height} x {width} px of these pictures: train and judge on tiles with "
        f"--data.tile {setting} --data.tile_empty {MEASURED_EMPTY_SHARE}; an epoch then has {tiles:,} tiles instead of "
        f"{pictures:,} pictures, about {max(1, round(tiles / pictures)):,} times as many steps (fewer --run.epochs). "
        f"Tiles paid after 300 steps of {MEASURED_BATCH}; in few steps of few tiles, whole pictures find more "
        "(docs/tiles.md)"
    )
    if large >= 0.01:
        sentence += f"; {large:.0%} are longer than the overlap of tiles, and may be whole in none"
    return sentence


def _tiles_of_epoch(table: DetectionTable, tile_hw: tuple[int, int]) -> int:
    """Return the number of tiles that an epoch has with the measured share of empty ones. Raises BadInput: too many."""
    has_objects = tiles_of_table(table, Tiling(tuple(tile_hw))).has_objects()
    return round(has_objects.sum() + MEASURED_EMPTY_SHARE * (~has_objects).sum())


def _sizes(sides_hw: np.ndarray, shown_hw: np.ndarray, size: Mapping[str, int]) -> np.ndarray:
    """Return the square roots of the areas of objects (N,) when what is shown of their pictures gets the size of
    training."""
    return np.sqrt((sides_hw * inputs_hw(shown_hw, size) / shown_hw).prod(axis=1))
