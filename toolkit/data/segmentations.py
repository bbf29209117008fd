"""Masks as annotation files write them, read into `toolkit.base.masks.Shape`."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from toolkit.base.masks import Polygons, Rle, Shape, decompressed, tight_boxes
from toolkit.base.text import shown

LEAST_CORNERS = 3
MAX_MASK_COORDINATE_PX = 1e6  # pixels; larger values are not places in pictures
MAX_MASK_PIXELS = 2**32 - 1  # pycocotools counts in 32 bits
MAX_OUTLINE_PX = 1e6  # of a mask; with pycocotools' 80 bytes for each pixel of it, 80 MB while it is drawn
NUMBER_TYPES = {int, float}
MAX_QUOTED = 60  # characters


def shape_of(segmentation: object) -> tuple[Shape, list[str]]:
    """Read a value of COCO's key `segmentation`.

    segmentation: a list of polygons [x1, y1, x2, y2, ...] in pixels, or {"size": [height, width], "counts": run lengths
        as a list of whole numbers, also written as 3.0, or as COCO's compressed text}; None and an empty list are not
        masks.

    Returns the mask, None if there is none that can be used, and a phrase for each fault. A polygon with faults is left
    out; the others make up the mask.
    """
    if segmentation is None or segmentation == []:
        return None, []
    if isinstance(segmentation, Mapping):
        return _run_lengths(segmentation)
    if not isinstance(segmentation, list):
        return None, [f"`segmentation` is {_quoted(segmentation)}; expected polygons or run lengths"]
    if all(type(value) in NUMBER_TYPES for value in segmentation):
        segmentation = [segmentation]  # some tools write a single polygon without the outer list
    if _are_plain(segmentation):
        return tuple(np.array(flat, np.float64).reshape(-1, 2) for flat in segmentation), []
    rings = []
    faults = []
    for number, flat in enumerate(segmentation, start=1):
        fault = _ring_fault(flat)
        if fault:
            which = f"polygon {number} of {len(segmentation)}" if len(segmentation) > 1 else "the polygon"
            faults.append(f"{which} {fault}")
        else:
            rings.append(np.array(flat, np.float64).reshape(-1, 2))
    return tuple(rings) or None, faults


def _are_plain(polygons: list) -> bool:
    """Return True, at little cost, if all polygons are usable, as in most files; False if they may not be."""
    if set(map(type, polygons)) != {list}:
        return False
    lengths = list(map(len, polygons))
    if min(lengths) < 2 * LEAST_CORNERS or any(length % 2 for length in lengths):
        return False
    numbers = list(chain.from_iterable(polygons))
    if not NUMBER_TYPES.issuperset(map(type, numbers)):
        return False
    # NaN may be passed over by `min` and `max`, but not by `sum`.
    is_moderate = -MAX_MASK_COORDINATE_PX < min(numbers) and max(numbers) < MAX_MASK_COORDINATE_PX
    return is_moderate and not math.isnan(sum(numbers))


def _ring_fault(flat: object) -> str:
    """Describe what is wrong with a polygon [x1, y1, x2, y2, ...]; "" if nothing is."""
    if not isinstance(flat, list):
        return f"is {_quoted(flat)}; expected a list [x1, y1, x2, y2, ...]"
    if not all(type(value) in NUMBER_TYPES for value in flat):
        return "has something that is not a number"
    if len(flat) % 2:
        return f"has {len(flat)} numbers; expected pairs of x and y"
    if len(flat) < 2 * LEAST_CORNERS:
        points = len(flat) // 2
        return f"has {points} {'point' if points == 1 else 'points'}; expected at least three"
    if not all(-MAX_MASK_COORDINATE_PX < value < MAX_MASK_COORDINATE_PX for value in flat):
        return "has a coordinate that is not finite or lies far outside any picture"
    return ""


def box_of_mask(segmentation: object) -> list[float] | None:
    """Return the box [x, y, width, height] in pixels around a value of COCO's key `segmentation`, zeros if it is empty;
    None if it is not a mask that can be used."""
    shape, _ = shape_of(segmentation)
    if shape is None:
        return None
    if isinstance(shape, Rle):
        left, top, right, bottom = tight_boxes([shape], shape.size_hw)[0].tolist()
    else:
        corners = np.concatenate(shape)
        left, top = corners.min(axis=0).tolist()
        right, bottom = corners.max(axis=0).tolist()
    return [left, top, right - left, bottom - top]


def with_box_of_mask(entry: object) -> object:
    """Return an entry of COCO, annotated or found, with the box around its mask as `bbox` if it has none itself."""
    if not isinstance(entry, dict) or entry.get("bbox"):
        return entry
    box = box_of_mask(entry.get("segmentation"))
    return entry if box is None else {**entry, "bbox": box}


def _quoted(value: object) -> str:
    """Return a value of a file for a message, of a long one the beginning."""
    return shown(repr(value), MAX_QUOTED)


def _whole_numbers(values: Sequence) -> list[int] | None:
    """Return whole numbers as int, also those that a file writes as 3.0; None if there are other values."""
    whole = []
    for value in values:
        if type(value) not in NUMBER_TYPES or value % 1 != 0:  # it is NaN for infinity
            return None
        whole.append(int(value))
    return whole


def _run_lengths(segmentation: Mapping) -> tuple[Shape, list[str]]:
    size = segmentation.get("size")
    size_hw = _whole_numbers(size) if isinstance(size, list | tuple) else None
    if not size_hw or len(size_hw) != 2 or min(size_hw) <= 0:
        return None, [f"`size` of the run lengths is {_quoted(size)}; expected [height, width]"]
    height, width = size_hw
    if height * width > MAX_MASK_PIXELS:
        return None, [f"the run lengths are of {height} x {width} pixels, more than a picture can have"]
    counts = segmentation.get("counts")
    runs = None
    if isinstance(counts, list):
        counts = _whole_numbers(counts)
        if counts is not None and all(0 <= run <= height * width for run in counts):
            runs = np.array(counts, np.int64)
    elif isinstance(counts, str | bytes):
        runs = decompressed(counts)
    else:
        return None, [f"`counts` of the run lengths is {_quoted(counts)}; expected a list of whole numbers or a text"]
    if runs is None or (runs < 0).any():
        return None, ["the run lengths cannot be read"]
    # Checked here, since pycocotools writes as many pixels as the runs say.
    if runs.sum() != height * width:
        return None, [f"the run lengths cover {runs.sum()} pixels; their size {height} x {width} has {height * width}"]
    if isinstance(counts, list):
        from pycocotools import mask as coco_mask  # here, so that those who train boxes need not import it

        compressed = coco_mask.frPyObjects({"size": size_hw, "counts": counts}, height, width)
        return Rle((height, width), compressed["counts"]), []
    return Rle((height, width), counts.encode() if isinstance(counts, str) else counts), []


def to_segmentation(shape: Shape) -> list | dict:
    """Return a mask as a value of COCO's key `segmentation`, which `shape_of` reads; [] for None.

    Whole numbers are written without a decimal point, and all others with every digit.
    """
    if shape is None:
        return []
    if isinstance(shape, Rle):
        return {"size": list(shape.size_hw), "counts": shape.counts.decode("ascii")}
    polygons = []
    for ring in shape:
        flat = ring.ravel().tolist()
        polygons.append([int(value) if value.is_integer() else value for value in flat])
    return polygons


def near_picture(shape: Polygons | Rle, size_hw: tuple[int, int]) -> Polygons | Rle:
    """Return a mask whose polygons are cut where they are further from a picture of this size than its longer side.

    pycocotools draws edges as far as they go, in 80 bytes for each pixel of their length. Polygons that are nearer than
    that keep their corners, since a cut may move single pixels of the edge.
    """
    if isinstance(shape, Rle):
        return shape
    margin = max(size_hw)
    height, width = size_hw
    corners = np.concatenate(shape)
    is_near = (corners >= -margin) & (corners <= [width + margin, height + margin])
    return shape if is_near.all() else clipped(shape, size_hw, margin)


def clipped(rings: Polygons, size_hw: tuple[int, int], margin: float = 0.0) -> Polygons:
    """Return polygons cut to a picture of this size with a margin of `margin` pixels on each side; those with less than
    three corners left are dropped.

    After Sutherland and Hodgman, "Reentrant polygon clipping" (1974): parts of a polygon that the cut separates stay
    joined by edges on the border, which enclose no area.
    """
    height, width = size_hw
    inside = []
    for ring in rings:
        for axis, side in ((0, width), (1, height)):
            ring = _cut_at(ring, axis, 0.0 - margin, 1)  # not -0.0, which would be written to files
            ring = _cut_at(ring, axis, side + margin, -1)
        if len(ring) >= LEAST_CORNERS:
            inside.append(ring)
    return tuple(inside)


def _cut_at(ring: np.ndarray, axis: int, limit: float, sign: int) -> np.ndarray:
    """Return the part of a ring (P, 2) where sign * coordinate >= sign * limit on this axis."""
    depth = sign * (ring[:, axis] - limit)  # of each corner inside
    if not len(ring) or (depth >= 0).all():
        return ring
    corners = []
    for at, corner in enumerate(ring):
        before = ring[at - 1]
        if (depth[at] >= 0) != (depth[at - 1] >= 0):
            share = depth[at - 1] / (depth[at - 1] - depth[at])
            crossing = before + share * (corner - before)
            crossing[axis] = limit
            corners.append(crossing)
        if depth[at] >= 0:
            corners.append(corner)
    return np.array(corners).reshape(-1, 2)


def polygon_areas(rings: Sequence[np.ndarray]) -> np.ndarray:
    """Return the area that each of R rings (P, 2) encloses by its corners, in square pixels, (R,) float64."""
    if not len(rings):
        return np.zeros(0)
    corners, following, starts = _edges(rings)
    x, y = corners.T
    next_x, next_y = following.T
    doubled = np.add.reduceat(x * next_y - next_x * y, starts)
    return np.abs(doubled) / 2


def outline_lengths(rings: Sequence[np.ndarray]) -> np.ndarray:
    """Return the length of each of R rings (P, 2), (R,) float64: of each edge the pixels along its longer axis, which
    are those that pycocotools draws."""
    if not len(rings):
        return np.zeros(0)
    corners, following, starts = _edges(rings)
    of_edges = np.abs(following - corners).max(axis=1)
    return np.add.reduceat(of_edges, starts)


def outline_fault(shape: Polygons | Rle) -> str:
    """Describe a mask whose outline is too long to be drawn; "" if it is not."""
    length = 0.0 if isinstance(shape, Rle) else outline_lengths(shape).sum()
    if length <= MAX_OUTLINE_PX:
        return ""
    return f"its outline is {length:.0f} pixels long; at most {MAX_OUTLINE_PX:.0f} are drawn"


def _edges(rings: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first and the second corner of each edge of R rings, (E, 2) each, and the first edge of each ring."""
    lengths = np.array([len(ring) for ring in rings])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    corners = np.concatenate(rings)
    following = np.arange(1, len(corners) + 1)
    following[starts + lengths - 1] = starts
    return corners, corners[following], starts

