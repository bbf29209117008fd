"""Shapes as annotation tools draw them, as a box and a value of COCO's key `segmentation`, in pixels.

A rectangle is a box without a mask; every other shape is a mask too. Functions raise ValueError, with a phrase, for
what cannot be read, and its subclass `NoArea` for what is not an area: a point, a line.
"""

import base64
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.masks import Size, rle
from toolkit.base.text import shown
from toolkit.data.segmentations import LEAST_CORNERS, shape_of

CORNERS_OF_ELLIPSE = 64
FLIPPED_DOWN = (6, 7)  # values of EXIF's orientation: the picture lies on its side, and is mirrored on this axis before
FLIPPED_ACROSS = (7, 8)  # its axes are exchanged
ON_ITS_SIDE = (5, 6, 7, 8)


class Drawn(NamedTuple):
    """A shape. segmentation: polygons or run lengths; None: the shape is a box alone."""

    xyxy: tuple[float, float, float, float]
    segmentation: list | dict | None = None


class NoArea(ValueError):
    """A shape that is not an area, such as a point. The text says what it is."""


def numbers_in(values: object, count: int | None = None) -> list[float]:
    """Return finite numbers, of a list or of a text with commas; count: how many there must be."""
    try:
        given = values.split(",") if isinstance(values, str) else values
        numbers = [float(value) for value in given]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if not all(map(math.isfinite, numbers)) or len(numbers) != (count or len(numbers)) or not numbers:
        expected = f"{count} numbers" if count else "numbers"
        raise ValueError(f"{shown(repr(values), 60)} was found; expected {expected}")
    return numbers


def points_in(values: object) -> list[list[float]]:
    """Return the points [x, y] of a list of such, or of a list of mappings with `x` and `y`."""
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"its points are {shown(repr(values), 60)}; expected a list of [x, y]")
    return [numbers_in([value.get("x"), value.get("y")] if isinstance(value, dict) else value, 2) for value in values]


def polygon(points: Sequence[Sequence[float]]) -> Drawn:
    if len(points) < LEAST_CORNERS:
        raise NoArea(f"polygon of {len(points)} {'point' if len(points) == 1 else 'points'}")
    flat = [float(value) for point in points for value in point]
    return Drawn(_around(points), [flat])


def rectangle(points: Sequence[Sequence[float]]) -> Drawn:
    """Return the box around two or four corners, which may be turned."""
    if len(points) not in (2, 4):
        raise ValueError(f"it is a rectangle of {len(points)} points; expected 2 or 4 corners")
    return Drawn(_around(points))


def turned_about(points: Sequence[Sequence[float]], centre: Sequence[float], degrees: float) -> list[list[float]]:
    """Return points turned clockwise about a centre."""
    cosine = math.cos(math.radians(degrees))
    sine = math.sin(math.radians(degrees))
    turned = []
    for x, y in points:
        right = x - centre[0]
        down = y - centre[1]
        turned.append([centre[0] + right * cosine - down * sine, centre[1] + right * sine + down * cosine])
    return turned


def turned_rectangle(box_xyxy: Sequence[float], degrees: float, about: Sequence[float] | None = None) -> Drawn:
    """Return a rectangle that is turned clockwise; about: None is its centre."""
    left, top, right, bottom = box_xyxy
    if not degrees:
        return rectangle([(left, top), (right, bottom)])
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return rectangle(turned_about(corners, about or ((left + right) / 2, (top + bottom) / 2), degrees))


def ellipse(centre: Sequence[float], radii: Sequence[float], degrees: float = 0.0) -> Drawn:
    if min(radii) < 0:
        raise ValueError(f"its radius is {min(radii):g}; expected a length")
    x, y = centre
    angles = [2 * math.pi * number / CORNERS_OF_ELLIPSE for number in range(CORNERS_OF_ELLIPSE)]
    upright = [[x + radii[0] * math.cos(angle), y + radii[1] * math.sin(angle)] for angle in angles]
    cosine = math.cos(math.radians(degrees))
    sine = math.sin(math.radians(degrees))
    half_width = math.hypot(radii[0] * cosine, radii[1] * sine)
    half_height = math.hypot(radii[0] * sine, radii[1] * cosine)
    outline = polygon(turned_about(upright, centre, degrees))
    return outline._replace(xyxy=(x - half_width, y - half_height, x + half_width, y + half_height))


def bitmap(pixels: np.ndarray, left: float, top: float, size_hw: Size | None) -> Drawn:
    """Return pixels (h, w), not 0 inside, whose upper left corner is here in an image of this size."""
    from pycocotools import mask as coco_mask  # here, so that those who train boxes need not import it

    canvas = np.zeros(checked_size(size_hw), np.uint8, order="F")
    row = round(top)
    column = round(left)
    rows = slice(max(0, -row), max(0, canvas.shape[0] - row))
    columns = slice(max(0, -column), max(0, canvas.shape[1] - column))
    inside = pixels[rows, columns] != 0
    if not inside.any():
        raise NoArea("mask without a pixel in the image")
    row = max(0, row)
    column = max(0, column)
    canvas[row : row + inside.shape[0], column : column + inside.shape[1]] = inside
    runs = coco_mask.encode(canvas)
    x, y, width, height = map(float, coco_mask.toBbox(runs))
    return Drawn((x, y, x + width, y + height), _as_text(runs))


def with_holes(outer: Drawn, holes: Sequence[Drawn], size_hw: Size | None) -> Drawn:
    """Return a polygon without the pixels of others in it."""
    if not holes:
        return outer
    from pycocotools import mask as coco_mask

    pixels = coco_mask.decode(_runs(outer, size_hw))
    for hole in holes:
        pixels &= 1 - coco_mask.decode(_runs(hole, size_hw))
    return bitmap(pixels, 0, 0, size_hw)


def united(parts: Sequence[Drawn], size_hw: Size | None) -> Drawn:
    """Return the parts of one object as one shape; it has no mask if one of them has none."""
    if len(parts) == 1:
        return parts[0]
    corners = np.array([part.xyxy for part in parts])
    xyxy = (*corners[:, :2].min(axis=0).tolist(), *corners[:, 2:].max(axis=0).tolist())
    masks = [part.segmentation for part in parts]
    if None in masks:
        return Drawn(xyxy)
    if not any(isinstance(mask, dict) for mask in masks):
        return Drawn(xyxy, [ring for mask in masks for ring in mask])
    from pycocotools import mask as coco_mask

    return Drawn(xyxy, _as_text(coco_mask.merge([_runs(part, size_hw) for part in parts])))


def picture_pixels(encoded: object, what: str) -> np.ndarray:
    """Return the pixels (h, w) bool of a small picture in base64, or its bytes: those that are opaque and not 0."""
    try:
        data = encoded if isinstance(encoded, bytes) else base64.b64decode(encoded, validate=True)
        with Image.open(io.BytesIO(data)) as image:
            checked_size(image.size)
            has_alpha = "A" in image.getbands() or "transparency" in image.info
            return np.array(image.convert("RGBA").getchannel("A") if has_alpha else image) > 0
    except UnidentifiedImageError as error:
        raise ValueError(f"{what} is not a picture") from error
    except (TypeError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{what} cannot be read: {error}") from error


def pixels_of_runs(runs: Sequence[int], width: int, height: int) -> np.ndarray:
    """Return the pixels (h, w) of run lengths row by row, the first of which are outside."""
    checked_size((height, width))
    if min(runs) < 0 or sum(runs) != width * height:
        raise ValueError(f"its run lengths cover {sum(runs)} pixels; expected {width} x {height} = {width * height}")
    return np.repeat(np.arange(len(runs)) % 2, runs).reshape(height, width)


def turned_upright(drawn: Drawn, orientation: int, size_hw: Size) -> Drawn:
    """Return a shape of a picture of this size, as it is stored on its side, in the upright picture.

    orientation: EXIF's, one of `ON_ITS_SIDE`.
    """
    height, width = size_hw

    def moved(flat: Sequence[float]) -> list[float]:
        turned = []
        for x, y in zip(flat[0::2], flat[1::2], strict=True):
            turned.append(height - y if orientation in FLIPPED_DOWN else y)
            turned.append(width - x if orientation in FLIPPED_ACROSS else x)
        return turned

    corners = moved(drawn.xyxy)
    xyxy = _around([corners[:2], corners[2:]])
    if not isinstance(drawn.segmentation, dict):
        return Drawn(xyxy, drawn.segmentation and [moved(ring) for ring in drawn.segmentation])
    from pycocotools import mask as coco_mask

    pixels = coco_mask.decode(_runs(drawn, size_hw))
    down = -1 if orientation in FLIPPED_DOWN else 1
    across = -1 if orientation in FLIPPED_ACROSS else 1
    return Drawn(xyxy, _as_text(coco_mask.encode(np.asfortranarray(pixels[::down, ::across].T))))


def _around(points: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    xs, ys = zip(*points, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def checked_size(size_hw: Size | None) -> Size:
    """Return the size of a picture that a mask is drawn in, if it is one."""
    if size_hw is None or not all(isinstance(side, int) and side > 0 for side in size_hw):
        raise ValueError("it is a mask, for which the file must say width and height of the image")
    if size_hw[0] * size_hw[1] > MAX_IMAGE_PIXELS:
        raise ValueError(f"it is a mask of {size_hw[1]} x {size_hw[0]} pixels; at most {MAX_IMAGE_PIXELS} are drawn")
    return size_hw


def _runs(drawn: Drawn, size_hw: Size | None) -> dict:
    shape, faults = shape_of(drawn.segmentation)
    if faults:
        raise ValueError(faults[0])
    return rle(shape, checked_size(size_hw)).as_coco()


def _as_text(runs: dict) -> dict:
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}
