"""CVAT XML, "CVAT for images 1.1": one file with the boxes, polygons, ellipses and masks of all images."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from toolkit.base.masks import Size
from toolkit.data.annotations import Reading
from toolkit.data.formats.annotated import LabelledShape, image_of_shapes
from toolkit.data.formats.drawn import (
    Drawn,
    NoArea,
    bitmap,
    ellipse,
    numbers_in,
    pixels_of_runs,
    polygon,
    turned_rectangle,
)
from toolkit.data.formats.per_set import Document, SetFormat, find_documents, read_document
from toolkit.data.layout import UNSPLIT, Layout, Splits, split_in_name
from toolkit.data.table import DetectionTable

TITLE = "CVAT XML"
SHAPES = ("box", "polygon", "ellipse", "mask", "polyline", "points", "cuboid", "skeleton")
SUBSET = re.compile(r'<image [^>]*\bsubset="([^"]*)"')


def find(layout: Layout) -> Splits | None:
    """Return the splits of a folder with CVAT's XML files, or of one file; None if there are none.

    The subsets of a project are splits.
    """
    return find_documents(FORMAT, layout)


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.per_set.read_document`.

    Classes are the labels of the task. Shapes of one label and one `group_id` are the parts of one object, as in CVAT's
    own export as COCO. Points, lines, skeletons and cuboids are left out.
    """
    return read_document(FORMAT, found, split, reading)


def _parse(path: Path) -> Document:
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, LookupError) as error:
        raise ValueError(f"invalid XML: {error}") from error
    if root.find("track") is not None:
        raise ValueError('this is "CVAT for video 1.1"; export the task as "CVAT for images 1.1"')
    images = []
    for entry in root.iter("image"):
        size_wh = (_side(entry, "width"), _side(entry, "height"))
        shapes = [shape for shape in entry if shape.tag in SHAPES]
        name = entry.get("name", "").replace("\\", "/")
        images.append(image_of_shapes(name, size_wh, shapes, partial(_labelled, size_hw=size_wh[::-1]), path.name))
    names = [(label.findtext("name") or "").strip() for label in root.iterfind("meta//labels/label")]
    subsets = [entry.get("subset") for entry in root.iter("image")]
    splits = [_split_of(subset or UNSPLIT) for subset in subsets] if any(subsets) else []
    return Document(images, list(filter(None, names)), splits=splits)


def _splits_in(path: Path) -> Sequence[str]:
    """Return the splits of the subsets that a file names."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return list(dict.fromkeys(map(_split_of, SUBSET.findall(text))))


def _split_of(subset: str) -> str:
    return split_in_name(subset) or subset


def _side(entry: ElementTree.Element, key: str) -> int | None:
    text = entry.get(key)
    return None if text is None else round(numbers_in(text, 1)[0])


def _labelled(shape: ElementTree.Element, size_hw: Size) -> LabelledShape:
    group = shape.get("group_id") or "0"
    return LabelledShape(shape.get("label"), _drawn(shape, size_hw), group=None if group == "0" else group)


def _drawn(shape: ElementTree.Element, size_hw: Size) -> Drawn:
    if shape.tag == "box":
        return turned_rectangle(_of(shape, "xtl", "ytl", "xbr", "ybr"), float(shape.get("rotation", 0)))
    if shape.tag == "polygon":
        return polygon([numbers_in(point, 2) for point in shape.attrib["points"].split(";")])
    if shape.tag == "ellipse":
        x, y, across, down = _of(shape, "cx", "cy", "rx", "ry")
        return ellipse((x, y), (across, down), float(shape.get("rotation", 0)))
    if shape.tag == "mask":
        left, top, width, height = map(round, _of(shape, "left", "top", "width", "height"))
        runs = list(map(round, numbers_in(shape.attrib["rle"])))
        return bitmap(pixels_of_runs(runs, width, height), left, top, size_hw)
    raise NoArea(shape.tag)


def _of(shape: ElementTree.Element, *keys: str) -> list[float]:
    return numbers_in([shape.attrib[key] for key in keys], len(keys))


FORMAT = SetFormat("cvat", TITLE, (".xml",), _parse, _splits_in)
