"""Geometry of the tiles that large pictures are cut into: where they lie, and what of each box is in them.

A tile is left, top, right and bottom in whole pixels of its picture. Training (`data.tile`) and prediction
(`scripts/predict.py --tile`) cut pictures by the same functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.base.errors import BadInput

MAX_OVERLAP = 0.9  # of a side; beyond it a picture has a hundred times as many tiles as without overlap
MAX_TILES = 5_000_000  # of all pictures of a table, or of one: more would take gigabytes, and days


@dataclass(frozen=True)
class Tiling:
    """The way in which pictures are cut.

    tile_hw: height and width of a tile in pixels; a picture that is smaller has smaller tiles.
    overlap: share of a side that neighbours have in common at least, 0 to 0.9.
    visible: share of a box, from 0 to 1, that a tile must show for the box to be an object in it.

    Raises BadInput: a value outside these limits.
    """

    tile_hw: tuple[int, int]
    overlap: float = 0.2
    visible: float = 0.25

    def __post_init__(self):
        faults = []
        if len(self.tile_hw) != 2 or min(self.tile_hw) < 1:
            faults.append(f"data.tile is {list(self.tile_hw)}; expected a side or [height, width], in pixels above 0")
        if not 0 <= self.overlap <= MAX_OVERLAP:
            faults.append(f"data.tile_overlap is {self.overlap}; expected the share of a tile from 0 to {MAX_OVERLAP}")
        if not 0 <= self.visible <= 1:
            faults.append(f"data.tile_visible is {self.visible}; expected the share of a box from 0 to 1")
        if faults:
            raise BadInput(faults)

    def tiles(self, size_hw: Sequence[int]) -> np.ndarray:
        """Return `tiles_of` a picture of this height and width in pixels."""
        return tiles_of(size_hw, self.tile_hw, self.overlap)

    def check_number(self, sizes_hw: np.ndarray) -> None:
        """Raise BadInput if pictures (P, 2) of these heights and widths have too many tiles; none is made for it."""
        sizes, times = np.unique(sizes_hw, axis=0, return_counts=True)
        of_sizes = [count_tiles(size_hw, self.tile_hw, self.overlap) for size_hw in sizes.tolist()]
        total = sum(count * repeated for count, repeated in zip(of_sizes, times.tolist(), strict=True))
        if total > MAX_TILES:
            raise _too_many(total, f"{len(sizes_hw):,} pictures", self.tile_hw, self.overlap)

    def __str__(self) -> str:
        height, width = self.tile_hw
        return f"tile{height}x{width}-overlap{self.overlap:g}-visible{self.visible:g}"


def tile_hw(tile: int | Sequence[int], size: Mapping[str, int] | None) -> tuple[int, int]:
    """Return the (h, w) in pixels of tiles.

    Args:
        tile: their longer side in pixels; or [height, width], which is returned as it is.
        size: what images are resized to, in the format of `toolkit.data.pipeline.processor_size`; tiles whose longer
            side is given have its aspect ratio if it has one, and are squares otherwise.
    """
    if not isinstance(tile, int):
        return tuple(int(side) for side in tile)
    size = size or {}
    height = size.get("height", 1)
    width = size.get("width", 1)
    longer = max(height, width)
    return max(1, round(tile * height / longer)), max(1, round(tile * width / longer))


def starts(length: int, tile: int, overlap: float) -> list[int]:
    """Return where tiles begin along a side of `length` pixels: evenly spaced, the last one ends with the picture.

    tile: pixels of a tile along this side. overlap: share of it that neighbours have in common at least.
    """
    count = _count(length, tile, overlap)
    if count == 1:
        return [0]
    return [round(i * (length - tile) / (count - 1)) for i in range(count)]


def _count(length: int, tile: int, overlap: float) -> int:
    """Return the number of tiles along a side; arguments as of `starts`."""
    if length <= tile:
        return 1
    step = max(1, int(tile * (1 - overlap)))
    return -(-(length - tile) // step) + 1


def count_tiles(size_hw: Sequence[int], tile_hw: Sequence[int], overlap: float) -> int:
    """Return the number of the tiles of `tiles_of`, by arithmetic."""
    along = [_count(int(length), tile, overlap) for length, tile in zip(size_hw, tile_hw, strict=True)]
    return along[0] * along[1]


def _too_many(count: int, pictures: str, tile_hw: Sequence[int], overlap: float) -> BadInput:
    height, width = tile_hw
    return BadInput(
        f"{pictures} would have {count:,} tiles of {height} x {width} px (height x width) with an overlap of "
        f"{overlap:g}; at most {MAX_TILES:,} are possible: give a larger data.tile (--tile), or less overlap"
    )


def tiles_of(size_hw: Sequence[int], tile_hw: Sequence[int], overlap: float) -> np.ndarray:
    """Return the tiles of a picture, (W, 4) int64 xyxy in pixels, row by row from the top.

    Every pixel is in at least one tile, and none reaches beyond the picture. A picture that is smaller than a tile
    along a side has one tile along it, of its own length.

    Args:
        size_hw: height and width of the picture in pixels.
        tile_hw: height and width of a tile in pixels.
        overlap: share of a side that neighbours have in common at least.

    Raises BadInput: there would be more than `MAX_TILES`.
    """
    height, width = map(int, size_hw)
    count = count_tiles(size_hw, tile_hw, overlap)
    if count > MAX_TILES:
        raise _too_many(count, f"a picture of {height} x {width} px", tile_hw, overlap)
    rows, columns = tile_hw
    top = np.array(starts(height, rows, overlap))[:, None]
    left = np.array(starts(width, columns, overlap))[None]
    sides = (left, top, np.minimum(width, left + columns), np.minimum(height, top + rows))
    return np.stack(np.broadcast_arrays(*sides), axis=-1).astype(np.int64).reshape(-1, 4)


def clip_to_tiles(boxes_xyxy: np.ndarray, tiles_xyxy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what tiles show of boxes: the boxes in pixels of the tiles, and the shares of them that remain.

    A box that is whole in its tile keeps its size and has the share 1. Of a box that is not in its tile at all a
    box without an area is returned, with the share 0.

    Args:
        boxes_xyxy: (..., 4) float64 in pixels of the picture.
        tiles_xyxy: (..., 4) in pixels of the picture; the two shapes broadcast.

    Returns boxes (..., 4) float64, and shares (...) float64 of their areas, from 0 to 1.
    """
    low = np.maximum(boxes_xyxy[..., :2], tiles_xyxy[..., :2])
    high = np.minimum(boxes_xyxy[..., 2:], tiles_xyxy[..., 2:])
    high = np.maximum(low, high)
    whole_area = (boxes_xyxy[..., 2:] - boxes_xyxy[..., :2]).prod(-1)
    shown_area = (high - low).prod(-1)
    shown = np.concatenate([low, high], axis=-1)
    share = shown_area / np.maximum(whole_area, np.finfo(np.float64).tiny)
    return to_tile(shown, tiles_xyxy), np.minimum(share, 1.0)


def to_tile(boxes_xyxy: np.ndarray, tiles_xyxy: np.ndarray) -> np.ndarray:
    """Return boxes (..., 4), given in pixels of a picture, in pixels of tiles (..., 4) of it, without clipping."""
    corner = tiles_xyxy[..., :2]
    return boxes_xyxy - np.concatenate([corner, corner], axis=-1)


def to_picture(boxes_xyxy: np.ndarray, tiles_xyxy: np.ndarray) -> np.ndarray:
    """Return boxes (..., 4), given in pixels of tiles (..., 4), in pixels of the picture: undoes `to_tile`."""
    corner = tiles_xyxy[..., :2]
    return boxes_xyxy + np.concatenate([corner, corner], axis=-1)
