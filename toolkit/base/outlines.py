"""Polygons around the pixels of a mask, which pycocotools draws as exactly these pixels again."""

import numpy as np

from toolkit.base.masks import Polygons, Rle, Shape, Size, areas, bitmap

Corner = tuple[int, int]  # x, y


def polygons_of(shape: Shape, size_hw: Size) -> Polygons:
    """Return a mask in a picture of this size as polygons: as it is, or of run lengths the outlines of the pixels."""
    if isinstance(shape, Rle):
        return outlines(bitmap(shape, size_hw))
    return shape or ()


def one_ring(rings: Polygons, size_hw: Size) -> np.ndarray | None:
    """Return one polygon (P, 2) for a mask of several, in a picture of this size; its parts are joined by lines that
    enclose nothing. Polygons that overlap are replaced by the outlines of their pixels. None: there are none.
    """
    if len(rings) == 1:
        return rings[0]
    of_rings = areas([(ring,) for ring in rings], size_hw)
    if of_rings.sum() != areas([rings], size_hw)[0]:
        rings = outlines(bitmap(rings, size_hw))
    if not rings:
        return None
    joined = rings[0]
    for ring in rings[1:]:
        joined = _with_hole(joined, ring)
    return joined


def outlines(pixels: np.ndarray) -> Polygons:
    """Return the outlines of a mask (H, W), not 0 inside: one polygon for each part; none for an empty mask.

    The corners are those of pixels. A hole is part of the polygon around it, which goes there and back on one line.
    """
    outer = []
    holes = []
    for ring in _rings(pixels != 0):
        is_hole = _signed_area(ring) < 0
        (holes if is_hole else outer).append(ring)
    outer.sort(key=_signed_area)
    joined = list(outer)
    for hole in holes:
        # The smallest polygon around a hole is that of its part: a part in a hole of another is smaller than this one.
        number = next(number for number, ring in enumerate(outer) if _is_inside(_beside(hole), ring))
        joined[number] = _with_hole(joined[number], hole)
    return tuple(ring.astype(np.float64) for ring in joined)


def _rings(inside: np.ndarray) -> list[np.ndarray]:
    """Return all closed lines between inside and outside, (P, 2) corners each, with the inside to their right."""
    following: dict[Corner, list[Corner]] = {}
    framed = np.pad(inside, 1)
    # Of each side of a pixel: where the pixel beside it is, and from which to which corner the line goes.
    sides = (
        ((-1, 0), (0, 0), (1, 0)),
        ((0, 1), (1, 0), (1, 1)),
        ((1, 0), (1, 1), (0, 1)),
        ((0, -1), (0, 1), (0, 0)),
    )
    for (down, right), (from_x, from_y), (to_x, to_y) in sides:
        beside = framed[1 + down : framed.shape[0] - 1 + down, 1 + right : framed.shape[1] - 1 + right]
        rows, columns = np.nonzero(inside & ~beside)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            start = (column + from_x, row + from_y)
            following.setdefault(start, []).append((column + to_x, row + to_y))
    rings = []
    while following:
        start = next(iter(following))
        rings.append(_followed(following, start))
    return rings


def _followed(following: dict[Corner, list[Corner]], start: Corner) -> np.ndarray:
    """Follow a line from a corner until it closes, and take it out of `following`; return its bends (P, 2)."""
    bends = []
    at = start
    direction = None
    while True:
        ends = following[at]
        # Where two pixels touch at a corner, the line turns right, so that they stay parts of their own.
        end = ends[0] if len(ends) == 1 else max(ends, key=lambda end: _turn_right(direction, at, end))
        ends.remove(end)
        if not ends:
            del following[at]
        heading = (end[0] - at[0], end[1] - at[1])
        if heading != direction:
            bends.append(at)
        direction = heading
        at = end
        if at == start:
            break
    ring = np.array(bends)
    first = ring[1] - ring[0]
    is_bend = (first[0] != 0) != (direction[0] != 0)
    return ring if is_bend else ring[1:]


def _turn_right(direction: Corner | None, at: Corner, end: Corner) -> int:
    """Return 1 for a turn to the right (y points down), -1 for one to the left."""
    if direction is None:
        return 0
    return direction[0] * (end[1] - at[1]) - direction[1] * (end[0] - at[0])


def _signed_area(ring: np.ndarray) -> float:
    """Return the area inside a ring (P, 2), negative if the inside is to its left."""
    x, y = ring.T
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum()) / 2


def _beside(hole: np.ndarray) -> np.ndarray:
    """Return the centre, x and y, of a pixel of the mask beside the first line of a hole."""
    forward = np.sign(hole[1] - hole[0])
    to_the_right = np.array([-forward[1], forward[0]])
    return hole[0] + (forward + to_the_right) / 2


def _is_inside(point: np.ndarray, ring: np.ndarray) -> bool:
    """Return whether a point, not on a line, is inside a ring (P, 2) of upright and level lines."""
    x, y = ring.T
    next_y = np.roll(y, -1)
    crosses = (x > point[0]) & ((y > point[1]) != (next_y > point[1]))
    return bool(crosses.sum() % 2)


def _with_hole(ring: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """Return one ring that follows both, joined between two near corners; the way there and back encloses nothing."""
    distances = np.abs(ring[:, None] - hole[None]).sum(-1)
    at, of_hole = np.unravel_index(distances.argmin(), distances.shape)
    around_hole = np.concatenate([hole[of_hole:], hole[: of_hole + 1]])
    return np.concatenate([ring[: at + 1], around_hole, ring[at:]])
