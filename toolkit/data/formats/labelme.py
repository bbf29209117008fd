"""LabelMe and X-AnyLabeling: one JSON file per image, with polygons, rectangles, circles and masks."""

import math
from collections.abc import Mapping
from pathlib import Path

from toolkit.base.masks import Size
from toolkit.data.annotations import Reading
from toolkit.data.formats.annotated import LabelledShape, ParsedImage, image_of_shapes
from toolkit.data.formats.drawn import (
    Drawn,
    NoArea,
    bitmap,
    ellipse,
    numbers_in,
    picture_pixels,
    points_in,
    polygon,
    rectangle,
)
from toolkit.data.formats.look_alikes import json_in, tool_of
from toolkit.data.formats.per_image import ImageFormat, find_files, read_files
from toolkit.data.layout import Layout, Splits
from toolkit.data.table import DetectionTable

TITLE = "LabelMe"
RECTANGLES = ("rectangle", "rotation", "oriented_rectangle")
LINES = ("point", "points", "line", "linestrip")


def find(layout: Layout) -> Splits | None:
    """Return the splits of a folder of LabelMe's files, beside the images or in folders of their own; None if none."""
    return find_files(FORMAT, layout)


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.per_image.read_files`.

    A rectangle is a box without a mask, turned or not. Shapes of one label and one `group_id` are the parts of one
    object. What X-AnyLabeling calls `difficult` is a crowd region, as in VOC. Points and lines are left out.
    """
    return read_files("labelme", FORMAT, found, split, reading)


def _is_annotation(path: Path) -> bool:
    return tool_of(path) == TITLE


def _parse(path: Path) -> ParsedImage | None:
    content = json_in(path)
    if not isinstance(content, Mapping) or "shapes" not in content:
        return None
    if not isinstance(content["shapes"], list):
        raise ValueError("`shapes` is not a list")
    size_wh = (content.get("imageWidth"), content.get("imageHeight"))
    name = str(content.get("imagePath") or path.stem).replace("\\", "/").rsplit("/", 1)[-1]

    def read_shape(entry: Mapping) -> LabelledShape:
        drawn = _drawn(entry, size_wh[::-1])
        return LabelledShape(entry.get("label"), drawn, entry.get("difficult") is True, entry.get("group_id"))

    return image_of_shapes(name, size_wh, content["shapes"], read_shape, path.name)


def _drawn(entry: Mapping, size_hw: Size) -> Drawn:
    kind = entry.get("shape_type") or "polygon"
    if kind in LINES:
        raise NoArea(kind)
    points = points_in(entry["points"])
    if kind in RECTANGLES:
        return rectangle(points)
    if kind == "polygon":
        return polygon(points)
    if kind == "circle" and len(points) == 2:
        radius = math.dist(*points)
        return ellipse(points[0], (radius, radius))
    if kind == "mask":
        left, top = numbers_in(points[0], 2)
        return bitmap(picture_pixels(entry["mask"], "its mask"), left, top, size_hw)
    expected = "expected a polygon, rectangle, circle or mask"
    raise ValueError(f"it is a {kind} of {len(points)} points, which is not read; {expected}")


FORMAT = ImageFormat(".json", _is_annotation, _parse, may_lie=True)
