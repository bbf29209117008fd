"""A table whose images are tiles of the pictures of another, for training and judging on tiles of large pictures."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from toolkit.base.boxes import Boxes, Relations, offsets_of, rows_of_lists
from toolkit.base.masks import Shape, areas, shifted
from toolkit.data.columns import TEXT, Columns
from toolkit.data.image_sources import Stored
from toolkit.data.sampling import MIXED_PICTURES
from toolkit.data.table import DetectionTable
from toolkit.data.tiff_crops import decode_tiff_crop
from toolkit.data.tiling import Tiling, clip_to_tiles

CACHE_BYTES = 2**29  # of decoded pictures, in each process that reads them
PAIRS_AT_ONCE = 2**18  # of tiles and boxes that are compared; all at once would take gigabytes


class DecodedPictures:
    """The pictures that were decoded last, as far as they fit into `limit` bytes; the newest is always kept.

    A copy in another process begins empty.
    """

    def __init__(self, limit: int = CACHE_BYTES):
        self.limit = limit
        self.decoded = 0  # pictures, for tests and measurements
        self._pictures: OrderedDict[int, Tensor] = OrderedDict()
        self._bytes = 0

    def get(self, index: int, decode: Callable[[], Tensor]) -> Tensor:
        """Return the picture with this index; it is decoded by `decode` if it is not kept. Raises as `decode`."""
        if index in self._pictures:
            self._pictures.move_to_end(index)
            return self._pictures[index]
        picture = decode()
        self.decoded += 1
        self._pictures[index] = picture
        self._bytes += picture.nbytes
        while self._bytes > self.limit and len(self._pictures) > 1:
            _, oldest = self._pictures.popitem(last=False)
            self._bytes -= oldest.nbytes
        return picture

    def has(self, index: int) -> bool:
        """Return whether the picture with this index is kept."""
        return index in self._pictures

    def has_room(self, size_hw: Sequence[int]) -> bool:
        """Return whether as many pictures of this height and width as training mixes can be kept."""
        height, width = size_hw
        return MIXED_PICTURES * 3 * height * width <= self.limit

    def __reduce__(self):
        return DecodedPictures, (self.limit,)


@dataclass(eq=False)
class TileTable(DetectionTable):
    """The tiles of the pictures of a table, one row per tile, picture by picture; made by `tiles_of_table`.

    Boxes and masks of a tile are in its own pixels, and boxes are clipped to it. An object of which it shows less than
    the share `tiling.visible` is marked as a crowd region, which is neither object nor background. An object that two
    tiles show is in both, with the same id. The area of a cut object is the number of pixels of its mask that the tile
    shows, and the share is that of these pixels; without a pixel the object is not in the tile. Of an object without a
    mask, the share is that of its box, and the area is multiplied by it.
    The image id of a tile is a text, "17@640,0" for that of the picture 17 at left 640 and top 0. Relations are left
    out. `row` has `tile`, the xyxy of a tile in its picture, and `picture`, the row of that in `pictures`.

    pictures: the table of whole pictures. tiling: how they are cut.
    """

    pictures: DetectionTable | None = None
    tiling: Tiling | None = None
    decoded: DecodedPictures = field(default_factory=DecodedPictures, init=False, repr=False)

    @property
    def tiles_xyxy(self) -> np.ndarray:
        """The place of each tile in its picture, (W, 4) int64 xyxy in pixels."""
        return self.columns.images["tile"]

    @property
    def picture_of_tile(self) -> np.ndarray:
        """The row in `pictures` of each tile's picture, (W,) int64, not decreasing."""
        return self.columns.images["picture"]

    def has_objects(self) -> np.ndarray:
        """Return (W,) bool: whether a tile has a box that is not a crowd region."""
        return self.num_objects() > 0

    def masks_of(self, index: int) -> list[Shape]:
        """Return the masks of the objects of a tile in its pixels, see `DetectionTable.masks_of`. Polygons may reach
        beyond the tile; run lengths are cut to it."""
        left, top, right, bottom = self.tiles_xyxy[index].tolist()
        tile_hw = (bottom - top, right - left)
        return [shifted(shape, -left, -top, tile_hw) for shape in super().masks_of(index)]

    def image_source(self, row: Mapping) -> Path | Stored | bytes:
        """Return the place of the whole picture, or its encoded bytes."""
        return self.pictures.image_source(self.pictures.row(row["picture"]))

    def decode_image(self, row: Mapping, least_hw: tuple[int, int] | None = None) -> Tensor:
        """Return the pixels of the tile of a row, uint8 (3, H, W); see `DetectionTable.decode_image`.

        The pictures that were decoded last are kept, see `DecodedPictures`. They are decoded whole, whatever `least_hw`
        is, because tiles lie in pixels of the whole picture. Of a TIFF file that is too large to be kept, only the
        blocks of the tile are decoded.
        """
        index = row["picture"]
        if not self.decoded.has(index):
            tile = self._tile_alone(row)
            if tile is not None:
                return tile
        picture = self.decoded.get(index, lambda: self.pictures.decode_image(self.pictures.row(index)))
        left, top, right, bottom = row["tile"]
        tile = picture[:, top:bottom, left:right]
        return tile.permute(1, 2, 0).clone().permute(2, 0, 1)  # a view would keep the whole picture in memory

    def _tile_alone(self, row: Mapping) -> Tensor | None:
        """Return the pixels of the tile of a row without decoding its picture; None if the whole has to be."""
        picture = self.pictures.row(row["picture"])
        size_hw = (picture["height"], picture["width"])
        source = self.pictures.image_source(picture)
        if not isinstance(source, Path) or self.decoded.has_room(size_hw):
            return None
        return decode_tiff_crop(source, row["tile"], size_hw, self.max_image_pixels, self.white)

    def __str__(self) -> str:
        height, width = self.tiling.tile_hw
        boxes = self.boxes()
        ignored = int(boxes.iscrowd.sum())
        empty = int((~self.has_objects()).sum())
        return (
            f"{len(self):,} tiles of at most {height} x {width} px (height x width) of {len(self.pictures):,} "
            f"pictures; {empty:,} of them without objects; {ignored:,} of their {len(boxes):,} boxes are ignored: "
            f"crowd regions, and objects of which a tile shows less than {self.tiling.visible:g}"
        )


def tiles_of_table(pictures: DetectionTable, tiling: Tiling) -> TileTable:
    """Return the tiles of the pictures of a table as a table; no picture is read, but the masks of cut objects are.

    Raises BadInput: there are too many.
    """
    tiling.check_number(pictures.sizes_hw())
    tiles, picture_of_tile = _layout(pictures.sizes_hw(), tiling)
    columns = Columns(
        _images_of_tiles(pictures, tiles, picture_of_tile),
        _clipped(pictures, tiles, picture_of_tile, tiling.visible),
        Relations.none(len(tiles)),
    )
    values = {each.name: getattr(pictures, each.name) for each in fields(DetectionTable)}
    values["columns"] = columns
    values["predicates"] = ()
    values["fingerprint"] = f"{pictures.fingerprint}-{tiling}"
    values["before_classes"] = None
    values["arrow_files"] = ()
    return TileTable(**values, pictures=pictures, tiling=tiling)


def _layout(sizes_hw: np.ndarray, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """Return the tiles of all pictures, (W, 4) int64, and the row of each one's picture, (W,) int64.

    sizes_hw: (P, 2) of the pictures.
    """
    sizes, size_of_picture = np.unique(sizes_hw, axis=0, return_inverse=True)
    of_sizes = [tiling.tiles(size_hw) for size_hw in sizes.tolist()]
    offsets_of_sizes = offsets_of([len(tiles) for tiles in of_sizes])
    offsets, rows = rows_of_lists(offsets_of_sizes, size_of_picture.reshape(-1))
    tiles = np.concatenate([np.zeros((0, 4), np.int64), *of_sizes])[rows]
    picture_of_tile = np.repeat(np.arange(len(sizes_hw)), np.diff(offsets))
    return tiles, picture_of_tile


def _images_of_tiles(
    pictures: DetectionTable, tiles: np.ndarray, picture_of_tile: np.ndarray
) -> dict[str, np.ndarray]:
    columns = {}
    for name, column in pictures.columns.images.items():
        if name != "image":
            columns[name] = column[picture_of_tile]
    left_top = tiles[:, :2]
    right_bottom = tiles[:, 2:]
    image_ids = []
    for image_id, (left, top) in zip(columns["image_id"].tolist(), left_top.tolist(), strict=True):
        image_ids.append(f"{image_id}@{left},{top}")
    columns["image_id"] = np.array(image_ids, TEXT)
    columns["size_hw"] = np.ascontiguousarray((right_bottom - left_top)[:, ::-1])
    columns["tile"] = tiles
    columns["picture"] = picture_of_tile
    return columns


def _clipped(pictures: DetectionTable, tiles: np.ndarray, picture_of_tile: np.ndarray, visible: float) -> Boxes:
    """Return the boxes of all tiles (W, 4) as `TileTable` has them."""
    boxes = pictures.columns.boxes
    pairs = np.cumsum(np.diff(boxes.offsets)[picture_of_tile])  # of each tile and those before it
    first_of_parts = np.flatnonzero(np.diff(pairs // PAIRS_AT_ONCE)) + 1
    parts = []
    for rows in np.split(np.arange(len(tiles)), first_of_parts):
        parts.append(_clipped_part(pictures, tiles[rows], picture_of_tile[rows], visible))
    return Boxes.concatenated(parts)


def _clipped_part(pictures: DetectionTable, tiles: np.ndarray, picture_of_tile: np.ndarray, visible: float) -> Boxes:
    """Return what each tile (W, 4) shows of the objects of its picture."""
    boxes = pictures.columns.boxes.of_images(picture_of_tile)  # for each tile all those of its picture
    clipped, share = clip_to_tiles(boxes.xyxy.astype(np.float64), tiles[boxes.image_index])
    is_shown = (clipped[:, 2:] > clipped[:, :2]).all(1)
    share = share[is_shown]
    shown = boxes[is_shown]
    shown = replace(
        shown,
        xyxy=clipped[is_shown].astype(np.float32),
        area=(shown.area * share).astype(np.float32),
    )
    if pictures.has_masks:
        shown, share = _with_cut_masks(pictures, shown, share, tiles, picture_of_tile)
    return replace(shown, iscrowd=shown.iscrowd | (share < visible))


def _with_cut_masks(
    pictures: DetectionTable, boxes: Boxes, share: np.ndarray, tiles: np.ndarray, picture_of_tile: np.ndarray
) -> tuple[Boxes, np.ndarray]:
    """Return the boxes of tiles (W, 4) that have a pixel there, with the areas of their cut masks, and the share that
    the tiles show of each object: of its mask, if that is cut.

    share: (N,) of each box.
    """
    area = boxes.area.copy()
    share = share.copy()
    masks_of_picture = functools.lru_cache(maxsize=1)(pictures.stored_masks)  # tiles come picture by picture
    sizes_hw = pictures.sizes_hw()
    for row in np.flatnonzero(share < 1).tolist():
        tile = boxes.image_index[row]
        picture = picture_of_tile[tile]
        mask = masks_of_picture(picture)[boxes.extra["stored_mask"][row]]
        if mask is None:
            continue
        left, top, right, bottom = tiles[tile].tolist()
        tile_hw = (bottom - top, right - left)
        (area[row],) = areas([shifted(mask, -left, -top, tile_hw)], tile_hw)
        (whole,) = areas([mask], tuple(sizes_hw[picture].tolist()))
        share[row] = area[row] / max(whole, 1.0)
    has_pixels = share > 0
    return replace(boxes, area=area)[has_pixels], share[has_pixels]


def tiles_of_loader(loader: object) -> TileTable | None:
    """Return the table of the tiles that a loader of `toolkit.data.batches` yields; None if it yields no tiles."""
    batches = getattr(loader, "dataset", None)
    table = getattr(getattr(batches, "dataset", None), "table", None)
    return table if isinstance(table, TileTable) else None
