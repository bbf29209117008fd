"""Whether training on tiles of large pictures pays, by the sizes that objects have with and without them."""

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.base.text import size_text
from toolkit.data.tiling import Tiling

TINY_PX = 8  # square root of the area of a box that few detectors find, at the training size
TINY_SHARE = 0.1  # of all objects, from which tiles pay
MIN_GAIN = 0.5  # of the tiny objects, that must not be tiny in tiles
OVERLAP = Tiling.overlap  # the default of `data.tile_overlap`


def tile_advice(split: str, objects: Boxes, sizes_hw: np.ndarray, image_hw: tuple[int, int]) -> str | None:
    """Return a sentence that names the setting if tiles would make many tiny objects larger; else None.

    Tiles have the size of the images of training, so that objects keep the size they have in the pictures. They pay if
    a share of at least `TINY_SHARE` of the objects is smaller than `TINY_PX` at the training size, and less than half
    of these would be so in tiles.

    Args:
        split: name of the split.
        objects: the boxes without crowd regions.
        sizes_hw: (I, 2) height and width of the pictures in pixels.
        image_hw: height and width in pixels that images are trained at.
    """
    if not len(objects):
        return None
    sides_hw = (objects.xyxy[:, 2:] - objects.xyxy[:, :2])[:, ::-1]
    pictures_hw = sizes_hw[objects.image_index]
    tiles_hw = np.minimum(pictures_hw, image_hw)
    whole = _sizes(sides_hw, pictures_hw, image_hw)
    cut = _sizes(sides_hw, tiles_hw, image_hw)
    tiny = np.mean(whole < TINY_PX)
    still_tiny = np.mean(cut < TINY_PX)
    if tiny < TINY_SHARE or still_tiny > MIN_GAIN * tiny:
        return None
    height, width = image_hw
    overlap_hw = OVERLAP * np.array(image_hw)
    large = np.mean((sides_hw > overlap_hw).any(axis=1))
    setting = max(image_hw)
    sentence = (
        f"{split}: {tiny:.0%} of the objects are smaller than {TINY_PX} px at a training size of {size_text(image_hw)} "
        f"px, and {still_tiny:.0%} in tiles of {height} x {width} px of these pictures: train and judge on tiles with "
        f"--data.tile {setting}"
    )
    if large >= 0.01:
        sentence += f"; {large:.0%} are longer than the overlap of tiles, and may be whole in none"
    return sentence


def _sizes(sides_hw: np.ndarray, shown_hw: np.ndarray, image_hw: tuple[int, int]) -> np.ndarray:
    """Return the square roots of the areas of objects (N,) when what is shown of their pictures gets the size of
    training."""
    return np.sqrt((sides_hw * np.array(image_hw) / shown_hw).prod(axis=1))
