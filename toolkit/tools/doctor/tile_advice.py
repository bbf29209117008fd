"""Whether training on tiles of large pictures pays, by the sizes that objects have with and without them."""

import numpy as np

from toolkit.base.errors import BadInput
from toolkit.base.text import size_text
from toolkit.data.table import DetectionTable
from toolkit.data.tile_table import tiles_of_table
from toolkit.data.tiling import Tiling

TINY_PX = 8  # square root of the area of a box that few detectors find, at the training size
TINY_SHARE = 0.1  # of all objects, from which tiles pay
MIN_GAIN = 0.5  # of the tiny objects, that must not be tiny in tiles
OVERLAP = Tiling.overlap  # the default of `data.tile_overlap`
# What the gain by tiles was measured with (docs/results.md).
MEASURED_EMPTY_SHARE = 0.05  # `data.tile_empty`
MEASURED_BATCH = 16  # tiles of a step


def tile_advice(split: str, table: DetectionTable, image_hw: tuple[int, int]) -> str | None:
    """Return a sentence that names the settings, and how long an epoch becomes, if tiles would make many tiny objects
    larger; else None.

    Tiles have the size of the images of training, so that objects keep the size they have in the pictures. They pay if
    a share of at least `TINY_SHARE` of the objects is smaller than `TINY_PX` at the training size, and less than half
    of these would be so in tiles.

    Args:
        split: name of the split.
        table: the split.
        image_hw: height and width in pixels that images are trained at.
    """
    boxes = table.boxes()
    objects = boxes[~boxes.iscrowd]
    if not len(objects):
        return None
    sides_hw = (objects.xyxy[:, 2:] - objects.xyxy[:, :2])[:, ::-1]
    pictures_hw = table.sizes_hw()[objects.image_index]
    tiles_hw = np.minimum(pictures_hw, image_hw)
    whole = _sizes(sides_hw, pictures_hw, image_hw)
    cut = _sizes(sides_hw, tiles_hw, image_hw)
    tiny = np.mean(whole < TINY_PX)
    still_tiny = np.mean(cut < TINY_PX)
    if tiny < TINY_SHARE or still_tiny > MIN_GAIN * tiny:
        return None
    try:
        tiles = _tiles_of_epoch(table, image_hw)
    except BadInput:  # more tiles than can be trained on
        return None
    pictures = len(table)
    height, width = image_hw
    overlap_hw = OVERLAP * np.array(image_hw)
    large = np.mean((sides_hw > overlap_hw).any(axis=1))
    setting = max(image_hw)
    sentence = (
        f"{split}: {tiny:.0%} of the objects are smaller than {TINY_PX} px at a training size of {size_text(image_hw)} "
        f"px, and {still_tiny:.0%} in tiles of {height} x {width} px of these pictures: train and judge on tiles with "
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


def _sizes(sides_hw: np.ndarray, shown_hw: np.ndarray, image_hw: tuple[int, int]) -> np.ndarray:
    """Return the square roots of the areas of objects (N,) when what is shown of their pictures gets the size of
    training."""
    return np.sqrt((sides_hw * np.array(image_hw) / shown_hw).prod(axis=1))
