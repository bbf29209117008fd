"""Masks of objects: polygons and run lengths, as COCO writes them, where they lie in an image, and their pixels.

A mask is a `Shape`: polygons, run lengths, or None if the object has no mask. Shapes stay as annotated until their
pixels are needed. They are drawn by pycocotools, so that pixels, areas and IoU are those of COCO's evaluation.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NONE = -1  # number of rings in the stored form: the object has no mask
RUNS = -2  # of a mask that is run lengths
CHECKSUM_BYTES = 4  # of the masks of an image

BORDER_EPS = 1e-6  # distance in pixels from which on a point is not on the border of a pixel; above what rounding makes
MASKS_AT_ONCE = 255  # with more of them, pycocotools' `area` fails (OverflowError)
MAX_SIGNS = 7  # of a number in compressed run lengths, which is 35 bits: more than any run needs

Size = tuple[int, int]  # height, width in pixels


class Rle(NamedTuple):
    """A mask as COCO's compressed run lengths, column by column. size_hw: of the picture that it is drawn in."""

    size_hw: Size
    counts: bytes

    def as_coco(self) -> dict:
        """Return the dict that pycocotools' functions take."""
        return {"size": list(self.size_hw), "counts": self.counts}

    def as_json(self) -> dict:
        """Return the mask as the `segmentation` of COCO's JSON files."""
        return {"size": list(self.size_hw), "counts": self.counts.decode("ascii")}


Polygons = tuple[np.ndarray, ...]  # rings (P, 2) float64 of at least 3 corners each, x and y in pixels
Shape = Polygons | Rle | None


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of N objects of one image, as annotated, and where they lie in the image as it is now.

    shapes: of the N objects.
    scale, shift: (N, 2) float64, for x and y: the point p of a shape is now at scale * p + shift. A negative scale
        mirrors.
    visible_xyxy: (N, 4) float64, in pixels of the image as it is now: only what lies inside is drawn.
    """

    shapes: Sequence[Shape]
    scale: np.ndarray
    shift: np.ndarray
    visible_xyxy: np.ndarray

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> "Masks":
        """Build the masks as they were annotated: neither scaled, moved nor cut."""
        count = len(shapes)
        everywhere = np.tile([-np.inf, -np.inf, np.inf, np.inf], (count, 1))
        return cls(tuple(shapes), np.ones((count, 2)), np.zeros((count, 2)), everywhere)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, rows: Tensor | np.ndarray) -> "Masks":
        """Return the masks that a bool mask (N,) or row numbers select."""
        rows = np.arange(len(self))[np.asarray(rows)]
        shapes = tuple(self.shapes[row] for row in rows)
        return Masks(shapes, self.scale[rows], self.shift[rows], self.visible_xyxy[rows])

    def resized(self, x: float, y: float) -> "Masks":
        """Return the masks in the image after both axes are multiplied by these factors."""
        factors = np.array([x, y])
        visible = self.visible_xyxy * np.tile(factors, 2)
        return replace(self, scale=self.scale * factors, shift=self.shift * factors, visible_xyxy=visible)

    def moved(self, x: float, y: float) -> "Masks":
        """Return the masks after every point is moved by (x, y) pixels."""
        by = np.array([x, y], float)
        return replace(self, shift=self.shift + by, visible_xyxy=self.visible_xyxy + np.tile(by, 2))

    def mirrored(self, width: int) -> "Masks":
        """Return the masks after the image, `width` pixels wide, is mirrored left to right."""
        scale = self.scale * [-1, 1]
        shift = self.shift * [-1, 1] + [width, 0]
        left, top, right, bottom = self.visible_xyxy.T
        visible = np.stack([width - right, top, width - left, bottom], axis=1)
        return replace(self, scale=scale, shift=shift, visible_xyxy=visible)

    def cut(self, left: float, top: float, right: float, bottom: float) -> "Masks":
        """Return the masks cut to this region, in pixels of the image; nothing is moved."""
        low = np.maximum(self.visible_xyxy[:, :2], [left, top])
        high = np.minimum(self.visible_xyxy[:, 2:], [right, bottom])
        return replace(self, visible_xyxy=np.concatenate([low, high], axis=1))

    def drawn(self, size_hw: Size) -> Tensor:
        """Return the pixels of the masks in an image of this size, (N, H, W) uint8, 1 inside; 0 everywhere for None."""
        pixels = np.zeros((len(self), *size_hw), np.uint8)
        for row, shape in enumerate(self.shapes):
            if shape is None:
                continue
            left, top, right, bottom = _whole_pixels(self.visible_xyxy[row], size_hw)
            seen = pixels[row, top:bottom, left:right]
            if not seen.size:
                continue
            scale = self.scale[row]
            shift = self.shift[row] - [left, top]
            if isinstance(shape, Rle):
                _draw_runs(shape, scale, shift, seen)
            else:
                _draw_rings([ring * scale + shift for ring in shape], seen)
        return torch.from_numpy(pixels)


def joined(parts: Sequence[Masks]) -> Masks:
    """Return the masks of all parts, in order."""
    shapes = [shape for part in parts for shape in part.shapes]
    return Masks(
        tuple(shapes),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.shift for part in parts]),
        np.concatenate([part.visible_xyxy for part in parts]),
    )


def _whole_pixels(part_xyxy: np.ndarray, size_hw: Size) -> list[int]:
    """Return left, top, right and bottom of a part of an image in whole pixels inside an image of this size."""
    height, width = size_hw
    inside = np.clip(part_xyxy, 0, [width, height, width, height])
    return np.rint(inside).astype(int).tolist()


def _draw_rings(rings: Sequence[np.ndarray], canvas: np.ndarray) -> None:
    """Set the pixels of rings (P, 2), united, in an empty canvas (H, W), as COCO draws them.

    Only the part of the canvas around the rings is drawn: of 20 objects in 800 x 1333 pixels, in a tenth of the time.
    Single pixels of the edge may differ from those of `bitmap`, because COCO's function rounds halves by the last bit
    of coordinates, which are smaller here.
    """
    part, corner = _part_around(np.concatenate(rings), canvas)
    if part.size:
        part[:] = bitmap(tuple(ring - corner for ring in rings), part.shape)


def _draw_runs(runs: Rle, scale: np.ndarray, shift: np.ndarray, canvas: np.ndarray) -> None:
    """Set the pixels of run lengths, moved by scale and shift, in an empty canvas (H, W); the nearest pixel counts."""
    from pycocotools import mask as coco_mask

    x, y, width, height = coco_mask.toBbox(runs.as_coco())
    if not (width and height):
        return
    box = np.array([[x, y], [x + width, y + height]])
    part, corner = _part_around(box * scale + shift, canvas)
    if part.size:
        part[:] = _moved_pixels(runs, scale, shift, corner, part.shape)


def _part_around(points: np.ndarray, canvas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of a canvas (H, W) that holds all points (P, 2) on it, as a view, and its upper left corner."""
    around_xyxy = np.concatenate([np.floor(points.min(0)), np.ceil(points.max(0))])
    left, top, right, bottom = _whole_pixels(around_xyxy, canvas.shape)
    return canvas[top:bottom, left:right], np.array([left, top])


def _moved_pixels(runs: Rle, scale: np.ndarray, shift: np.ndarray, corner: np.ndarray, size_hw: Size) -> np.ndarray:
    """Return the part of an image that has this corner (x, y) and size, with run lengths moved into the image by scale
    and shift; the nearest pixel counts.

    Of two that are as near, such as all at half the size, the left and the right one count in turn: if it was always
    the same one, the mask would be moved by a quarter of a pixel.
    """
    places = []  # in the part, of rows and of columns that have a source
    sources = []
    for axis, length, source_length in ((1, size_hw[0], runs.size_hw[0]), (0, size_hw[1], runs.size_hw[1])):
        pixels = corner[axis] + np.arange(length)
        points = (pixels + 0.5 - shift[axis]) / scale[axis]
        borders = np.rint(points)
        on_border = abs(points - borders) < BORDER_EPS
        nearest = np.where(on_border, borders - pixels % 2, np.floor(points)).astype(int)
        inside = np.flatnonzero((nearest >= 0) & (nearest < source_length))
        places.append(inside)
        sources.append(nearest[inside])
    moved = np.zeros(size_hw, np.uint8)
    rows, columns = sources
    if len(rows) and len(columns):
        left, top = columns.min(), rows.min()
        source = pixels_in(runs, (left, top, columns.max() + 1, rows.max() + 1))
        moved[np.ix_(*places)] = source[np.ix_(rows - top, columns - left)]
    return moved


def rectangle(xyxy: Sequence[float]) -> Polygons:
    """Return a box as a polygon."""
    left, top, right, bottom = map(float, xyxy)
    return (np.array([[left, top], [right, top], [right, bottom], [left, bottom]]),)


# ---- pixels and run lengths ------------------------------------------------------------------------------------------


def rle(shape: Shape, size_hw: Size) -> Rle:
    """Return a mask as run lengths in a picture of this size, as COCO's `annToRLE`: rings are united; None is empty."""
    if isinstance(shape, Rle):
        return shape
    from pycocotools import mask as coco_mask  # here, so that those who train boxes need not import it

    if not shape:
        return rles_of(torch.zeros(1, *size_hw, dtype=torch.uint8))[0]
    height, width = size_hw
    rings = coco_mask.frPyObjects([ring.ravel().tolist() for ring in shape], height, width)
    return Rle(size_hw, coco_mask.merge(rings)["counts"])


def bitmap(shape: Shape, size_hw: Size) -> np.ndarray:
    """Return a mask as pixels (H, W) uint8, 1 inside."""
    from pycocotools import mask as coco_mask

    return coco_mask.decode(rle(shape, size_hw).as_coco())


def decompressed(counts: str | bytes) -> np.ndarray | None:
    """Return the run lengths (R,) int64 of COCO's compressed text; None if it is not such a text.

    After pycocotools' `rleFrString`: five bits in each character; a sixth says that the number goes on, and from the
    fourth number on each is the difference to the one before the last.
    """
    try:
        signs = np.frombuffer(counts.encode("ascii") if isinstance(counts, str) else counts, np.uint8).astype(np.int64)
    except UnicodeEncodeError:
        return None
    signs = signs - 48
    if not len(signs) or (signs < 0).any() or (signs > 63).any() or signs[-1] & 32:
        return None
    is_last = (signs & 32) == 0
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > MAX_SIGNS:
        return None
    place = np.arange(len(signs)) - np.repeat(starts, lengths)
    values = np.add.reduceat((signs & 31) << (5 * place), starts)
    is_negative = (signs[ends] & 16) != 0
    values -= np.where(is_negative, np.int64(1) << (5 * lengths), 0)
    values[1::2] = np.cumsum(values[1::2])
    values[2::2] = np.cumsum(values[2::2])
    return values


def pixels_in(runs: Rle, part_xyxy: Sequence[int]) -> np.ndarray:
    """Return the pixels (h, w) uint8 that a mask has in a part of its picture, left, top, right and bottom in whole
    pixels. Only the columns of the part are decoded: a picture of 10,000 x 10,000 pixels would take 100 MB."""
    left, top, right, bottom = part_xyxy
    height, _ = runs.size_hw
    ends = np.cumsum(decompressed(runs.counts)).clip(left * height, right * height)
    lengths = np.diff(ends, prepend=left * height)
    is_inside = np.arange(len(lengths)) % 2
    columns = np.repeat(is_inside.astype(np.uint8), lengths).reshape(right - left, height)
    return columns.T[top:bottom]


def shifted(shape: Shape, x: int, y: int, size_hw: Size) -> Shape:
    """Return a mask moved by whole pixels into another picture of this size, such as a tile.

    Run lengths are cut to that picture; polygons keep all of their corners. None stays None.
    """
    if shape is None:
        return None
    if not isinstance(shape, Rle):
        return tuple(ring + [x, y] for ring in shape)
    height, width = size_hw
    box = tight_boxes([shape], shape.size_hw)[0]
    part = box.clip([-x, -y, -x, -y], [width - x, height - y, width - x, height - y]).astype(int).tolist()
    left, top, *_ = part
    return encoded(pixels_in(shape, part), (left + x, top + y), size_hw)


def mirrored_mask(mask: Rle) -> Rle:
    """Return a mask in its picture mirrored left to right."""
    return encoded(bitmap(mask, mask.size_hw)[:, ::-1], (0, 0), mask.size_hw)


def rles_of(pixels: Tensor) -> list[Rle]:
    """Return masks (N, H, W) on the CPU, true or not 0 inside, as run lengths, see `encoded`."""
    size_hw = tuple(pixels.shape[-2:])
    return [encoded(mask, (0, 0), size_hw) for mask in pixels.bool().contiguous().view(torch.uint8).numpy()]


def encoded(pixels: np.ndarray, corner_xy: tuple[int, int], size_hw: Size) -> Rle:
    """Return pixels (h, w) of 0 and 1 as the run lengths of `pycocotools.mask.encode` in a picture of this size, in
    which their upper left pixel lies at `corner_xy`.

    Only the pixels in the box around a mask are looked at one by one, since most masks are small.
    """
    from pycocotools import mask as coco_mask

    height, width = size_hw
    counts = np.diff(_changes(pixels, corner_xy, height), prepend=0, append=height * width).tolist()
    if counts[-1] == 0:
        del counts[-1]
    runs = {"size": [height, width], "counts": counts}
    return Rle(size_hw, coco_mask.frPyObjects(runs, height, width)["counts"])


def _changes(mask: np.ndarray, corner_xy: tuple[int, int], height: int) -> np.ndarray:
    """Return where a mask (h, w) of 0 and 1 changes in a picture of this height, as of `encoded`, column by column, as
    ascending numbers of pixels.

    The first change is from 0 to 1: a mask that begins with 1 has it at 0.
    """
    columns = np.flatnonzero(np.bitwise_or.reduce(mask, axis=0))
    if not len(columns):
        return columns
    left = columns[0]
    part = mask[:, left : columns[-1] + 1]
    rows = np.flatnonzero(np.bitwise_or.reduce(part, axis=1))
    top = rows[0]
    part = part[top : rows[-1] + 1]
    framed = np.zeros((part.shape[1], len(part) + 2), np.uint8)  # every column begins and ends with 0
    framed[:, 1:-1] = part.T
    column, row = np.nonzero(framed[:, 1:] != framed[:, :-1])
    x, y = corner_xy
    changes = (x + left + column) * height + y + top + row
    # Where a run goes on at the top of the next column, it ends and begins at the same pixel.
    goes_on = np.flatnonzero(changes[1:] == changes[:-1])
    return np.delete(changes, np.concatenate([goes_on, goes_on + 1]))


def areas(shapes: Sequence[Shape], size_hw: Size) -> np.ndarray:
    """Return the number of pixels of each of N masks in a picture of this size, (N,) float64."""
    from pycocotools import mask as coco_mask

    parts = [np.zeros(0)]
    for start in range(0, len(shapes), MASKS_AT_ONCE):
        encoded = [rle(shape, size_hw).as_coco() for shape in shapes[start : start + MASKS_AT_ONCE]]
        parts.append(np.array(coco_mask.area(encoded), np.float64))
    return np.concatenate(parts)


def overlaps_in(region_xyxy: Sequence[float], ones: Sequence[Rle], others: Sequence[Rle]) -> np.ndarray:
    """Return the IoU (A, B) of A and B masks, at least one each, in a region of the picture of all; it is 0 for two
    without a pixel there."""
    from pycocotools import mask as coco_mask

    region = rle(rectangle(region_xyxy), ones[0].size_hw).as_coco()
    inside = [[coco_mask.merge([mask.as_coco(), region], intersect=True) for mask in masks] for masks in (ones, others)]
    return coco_mask.iou(*inside, np.zeros(len(others), np.uint8))


def united(masks: Sequence[Rle]) -> Rle:
    """Return the union of masks, at least one, of one picture."""
    from pycocotools import mask as coco_mask

    union = coco_mask.merge([mask.as_coco() for mask in masks])
    return Rle(masks[0].size_hw, union["counts"])


def tight_boxes(shapes: Sequence[Shape], size_hw: Size) -> np.ndarray:
    """Return the boxes (N, 4) float64 xyxy around the pixels of N masks in a picture of this size; zeros if empty."""
    from pycocotools import mask as coco_mask

    encoded = [rle(shape, size_hw).as_coco() for shape in shapes]
    xywh = np.array(coco_mask.toBbox(encoded), np.float64).reshape(-1, 4)
    return np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1)


def boxes_around(pixels: Tensor) -> Tensor:
    """Return the tight boxes (N, 4) float32 xyxy of masks (N, H, W) on the CPU; zeros for an empty mask."""
    boxes = tight_boxes(rles_of(pixels), tuple(pixels.shape[-2:]))
    return torch.from_numpy(boxes).float()


def column_of(shapes: Sequence[Shape]) -> np.ndarray:
    """Return N masks as an object array (N,), the form of the column `masks` of `Boxes.extra`."""
    column = np.empty(len(shapes), object)
    for row, shape in enumerate(shapes):
        column[row] = shape  # one by one: NumPy would take tuples apart
    return column


def selected_masks(masks: Tensor | Sequence[Rle], rows: Tensor) -> Tensor | list[Rle]:
    """Return the masks with these row numbers, of a tensor (K, ...) or of a list."""
    if isinstance(masks, Tensor):
        return masks[rows]
    return [masks[row] for row in rows.tolist()]


# ---- as stored in a table --------------------------------------------------------------------------------------------


def to_bytes(shapes: Sequence[Shape]) -> bytes:
    """Return the shapes of an image as bytes that `from_bytes` reads, to the last bit of every number.

    Little-endian: N; for each object the number of its rings, or `NONE`, or `RUNS`; for each ring its number of
    corners, for run lengths height, width and number of bytes, all int32; then padding to 8 bytes, all corners as
    float64, the bytes of all run lengths, and the CRC-32 of all this.
    """
    kinds = []
    sizes = []
    corners = []
    runs = []
    for shape in shapes:
        if shape is None:
            kinds.append(NONE)
        elif isinstance(shape, Rle):
            kinds.append(RUNS)
            sizes += [*shape.size_hw, len(shape.counts)]
            runs.append(shape.counts)
        else:
            kinds.append(len(shape))
            sizes += [len(ring) for ring in shape]
            corners += [np.asarray(ring, "<f8").tobytes() for ring in shape]
    head = np.array([len(kinds), *kinds, *sizes], "<i4").tobytes()
    padding = b"\0" * (-len(head) % 8)
    content = b"".join([head, padding, *corners, *runs])
    return content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little")


def from_bytes(stored: bytes) -> list[Shape]:
    """Return the shapes that `to_bytes` stored; of no bytes, no shapes.

    Raises ValueError: they are not the bytes that were stored. pycocotools, which trusts what it is given, would draw
    other masks from them, or write beyond its memory.
    """
    if not stored:
        return []
    stored, checksum = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
    if checksum != _checksum(stored):
        raise ValueError("the checksum of masks does not fit their bytes")
    numbers = np.frombuffer(stored, "<i4", len(stored) // 4)
    count = int(numbers[0])
    kinds = numbers[1 : 1 + count].tolist()
    at = 1 + count
    plan = []  # (kind, sizes) of each object
    for kind in kinds:
        length = {NONE: 0, RUNS: 3}.get(kind, kind)
        plan.append((kind, numbers[at : at + length].tolist()))
        at += length
    place = 4 * at + (-4 * at) % 8
    corners = place
    runs = place + sum(16 * sum(sizes) for kind, sizes in plan if kind >= 0)
    shapes: list[Shape] = []
    for kind, sizes in plan:
        if kind == NONE:
            shapes.append(None)
        elif kind == RUNS:
            height, width, length = sizes
            shapes.append(Rle((height, width), stored[runs : runs + length]))
            runs += length
        else:
            rings = []
            for size in sizes:
                rings.append(np.frombuffer(stored, "<f8", 2 * size, corners).reshape(-1, 2))
                corners += 16 * size
            shapes.append(tuple(rings))
    if runs != len(stored):
        raise ValueError(f"the masks end at byte {runs} of {len(stored)}")
    return shapes
