"""A view of a table whose images are windows of its pictures, for training and judging on tiles of large pictures."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor

from toolkit.base.boxes import Boxes, Relations, offsets_of
from toolkit.data.annotations import ImageRow
from toolkit.data.image_sources import Stored
from toolkit.data.sampling import MIXED_PICTURES
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import rows_in_memory
from toolkit.data.tiff_windows import decode_tiff_window
from toolkit.data.tiles import Tiling, clip_to_windows

CACHE_BYTES = 2**29  # of decoded pictures, in each process that reads them


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
class WindowTable(DetectionTable):
    """The windows of the pictures of a table, one row per window, picture by picture; made by `windows_of_table`.

    The boxes of a window are in its own pixels and clipped to it. A box of which it shows less than the share
    `tiling.visible` is marked as a crowd region, which is neither object nor background. A box that two windows show is
    in both, with the same id. The area of a cut object is its area times the share of its box that the window shows.
    The image id of a window is a text, "17@640,0" for that of the picture 17 at left 640 and top 0. Relations are left
    out.

    pictures: the table of whole pictures. tiling: how they are cut.
    """

    pictures: DetectionTable | None = None
    tiling: Tiling | None = None
    decoded: DecodedPictures = field(default_factory=DecodedPictures, init=False, repr=False)

    @functools.cached_property
    def _layout(self) -> tuple[np.ndarray, np.ndarray]:
        """The windows of all pictures, (W, 4) int64, and the row of each one's picture, (W,) int64.

        Raises BadInput: there are too many.
        """
        self.tiling.check_number(self.pictures.sizes_hw())
        of_size: dict[tuple[int, int], np.ndarray] = {}
        parts = [np.zeros((0, 4), np.int64)]
        counts = []
        for height, width in self.pictures.sizes_hw().tolist():
            size_hw = (height, width)
            if size_hw not in of_size:
                of_size[size_hw] = self.tiling.windows(size_hw)
            parts.append(of_size[size_hw])
            counts.append(len(of_size[size_hw]))
        pictures = np.repeat(np.arange(len(counts)), counts)
        return np.concatenate(parts)[: self.count], pictures[: self.count]

    @property
    def windows_xyxy(self) -> np.ndarray:
        """The place of each window in its picture, (W, 4) int64 xyxy in pixels."""
        return self._layout[0]

    @property
    def picture_of_window(self) -> np.ndarray:
        """The row in `pictures` of each window's picture, (W,) int64, not decreasing."""
        return self._layout[1]

    @functools.cached_property
    def _content(self) -> tuple[pa.Table, dict]:
        boxes = self._clipped_boxes()
        relations = Relations.none(len(self.windows_xyxy))
        sets = self.pictures.set_of_image()[self.picture_of_window] if self.sets else None
        return rows_in_memory(self._image_rows(), boxes, relations, sets), {}

    def _image_rows(self) -> list[ImageRow]:
        whole = self.pictures.image_rows()
        rows = []
        for window, picture in zip(self.windows_xyxy.tolist(), self.picture_of_window.tolist(), strict=True):
            left, top, right, bottom = window
            image_id = f"{whole[picture].image_id}@{left},{top}"
            rows.append(ImageRow(image_id, whole[picture].file_name, right - left, bottom - top))
        return rows

    def _clipped_boxes(self) -> Boxes:
        whole = self.pictures.boxes()
        windows = self.windows_xyxy
        first_window = np.searchsorted(self.picture_of_window, np.arange(len(self.pictures) + 1))
        counts = [np.zeros(0, np.int64)]
        rows = [np.zeros(0, np.int64)]
        xyxy = [np.zeros((0, 4))]
        shares = [np.zeros(0)]
        for picture in range(len(self.pictures)):
            own_windows = windows[first_window[picture] : first_window[picture + 1]]
            own_boxes = whole.of_image(picture)
            clipped, share = clip_to_windows(whole.xyxy[own_boxes][None], own_windows[:, None])
            is_shown = (clipped[..., 2:] > clipped[..., :2]).all(-1)  # (windows, boxes)
            _, box = is_shown.nonzero()
            counts.append(is_shown.sum(1))
            rows.append(own_boxes.start + box)
            xyxy.append(clipped[is_shown])
            shares.append(share[is_shown])
        row = np.concatenate(rows)
        share = np.concatenate(shares)
        extra = {name: column[row] for name, column in whole.extra.items()}
        return Boxes(
            offsets_of(np.concatenate(counts)),
            np.concatenate(xyxy),
            whole.labels[row],
            scores=None,
            area=whole.area[row] * share,
            iscrowd=whole.iscrowd[row] | (share < self.tiling.visible),
            ids=whole.ids[row],
            extra=extra,
        )

    def has_objects(self) -> np.ndarray:
        """Return (W,) bool: whether a window has a box that is not a crowd region."""
        boxes = self.boxes()
        counts = np.bincount(boxes.image_index[~boxes.iscrowd], minlength=len(self))
        return counts > 0

    def row(self, index: int) -> dict:
        """Return one window as `DetectionTable.row` does, with `window`, its xyxy in the picture, and `picture`, the
        row of that in `pictures`."""
        row = super().row(index)
        row["window"] = self.windows_xyxy[index].tolist()
        row["picture"] = int(self.picture_of_window[index])
        return row

    def image_source(self, row: Mapping) -> Path | Stored | bytes:
        """Return the place of the whole picture, or its encoded bytes."""
        return self.pictures.image_source(self.pictures.row(row["picture"]))

    def decode_image(self, row: Mapping, least_hw: tuple[int, int] | None = None) -> Tensor:
        """Return the pixels of the window of a row, uint8 (3, H, W); see `DetectionTable.decode_image`.

        The pictures that were decoded last are kept, see `DecodedPictures`. They are decoded whole, whatever `least_hw`
        is, because windows lie in pixels of the whole picture. Of a TIFF file that is too large to be kept, only the
        blocks of the window are decoded.
        """
        index = row["picture"]
        if not self.decoded.has(index):
            window = self._window_alone(row)
            if window is not None:
                return window
        picture = self.decoded.get(index, lambda: self.pictures.decode_image(self.pictures.row(index)))
        left, top, right, bottom = row["window"]
        window = picture[:, top:bottom, left:right]
        return window.permute(1, 2, 0).clone().permute(2, 0, 1)  # a view would keep the whole picture in memory

    def _window_alone(self, row: Mapping) -> Tensor | None:
        """Return the pixels of the window of a row without decoding its picture; None if the whole has to be."""
        picture = self.pictures.row(row["picture"])
        size_hw = (picture["height"], picture["width"])
        source = self.pictures.image_source(picture)
        if not isinstance(source, Path) or self.decoded.has_room(size_hw):
            return None
        return decode_tiff_window(source, row["window"], size_hw, self.max_image_pixels, self.white)

    @functools.cached_property
    def identity(self) -> dict[str, str | int]:
        """Return JSON values that describe this table, see `DetectionTable.identity`; no file has its rows."""
        boxes = int(self.num_objects().sum())
        identity = {"fingerprint": self.fingerprint, "file": "", "images": len(self), "boxes": boxes}
        if self.class_map:
            identity["classes"] = dict(self.class_map)
        return identity

    def __str__(self) -> str:
        height, width = self.tiling.tile_hw
        boxes = self.boxes()
        ignored = int(boxes.iscrowd.sum())
        empty = int((~self.has_objects()).sum())
        return (
            f"{len(self):,} windows of at most {height} x {width} px (height x width) of {len(self.pictures):,} "
            f"pictures; {empty:,} of them without objects; {ignored:,} of their {len(boxes):,} boxes are ignored: "
            f"crowd regions, and objects of which a window shows less than {self.tiling.visible:g}"
        )


def windows_of_table(pictures: DetectionTable, tiling: Tiling) -> WindowTable:
    """Return the windows of the pictures of a table as a table; nothing is written, and no picture is read."""
    return WindowTable(
        arrow_file=pictures.arrow_file,
        categories=pictures.categories,
        attributes=pictures.attributes,
        image_root=pictures.image_root,
        problems=pictures.problems,
        name=pictures.name,
        fingerprint=f"{pictures.fingerprint}-{tiling}",
        max_image_pixels=pictures.max_image_pixels,
        white=pictures.white,
        sets=pictures.sets,
        class_map=pictures.class_map,
        pictures=pictures,
        tiling=tiling,
    )


def windows_of_loader(loader: object) -> WindowTable | None:
    """Return the table of the windows that a loader of `toolkit.data.batches` yields; None if it yields no windows."""
    batches = getattr(loader, "dataset", None)
    table = getattr(getattr(batches, "dataset", None), "table", None)
    return table if isinstance(table, WindowTable) else None
