"""VIA (VGG Image Annotator) 1 and 2: a project, or annotations exported as JSON or CSV, with the regions of all images.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.data.annotations import Reading
from toolkit.data.formats.annotated import LabelledShape, image_of_shapes
from toolkit.data.formats.drawn import Drawn, NoArea, ellipse, numbers_in, polygon, rectangle
from toolkit.data.formats.look_alikes import json_in
from toolkit.data.formats.per_set import Document, SetFormat, find_documents, read_document
from toolkit.data.layout import Layout, Splits
from toolkit.data.table import DetectionTable, Problem

TITLE = "VIA"
USUAL_NAMES = ("class", "label", "name", "category", "type", "object")  # of the attribute that is the class
NO_CLASS = "object"
LINES = ("point", "polyline", "line")


def find(layout: Layout) -> Splits | None:
    """Return the splits of a folder of VIA's files, or of one file; None if there are none.

    Of several files with the same content the first by name is read, and JSON before CSV.
    """
    return find_documents(FORMAT, layout)


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.per_set.read_document`.

    The class is the one attribute of the regions, or of several the one with a usual name. If no region has an
    attribute, all are objects of one class.
    """
    return read_document(FORMAT, found, split, reading)


def _parse(path: Path) -> Document:
    entries = list(_rows(path) if path.suffix.lower() == ".csv" else _entries(json_in(path)))
    regions = [region for _, of_image in entries for region in of_image]
    attribute = _class_attribute(regions)

    def read_region(region: Mapping) -> LabelledShape:
        given = region["region_attributes"].get(attribute) if attribute else NO_CLASS
        return LabelledShape(_class_of(given), _drawn(region["shape_attributes"]))

    images = [image_of_shapes(name, (None, None), of_image, read_region, path.name) for name, of_image in entries]
    message = f"no region has an attribute; all are of the class {NO_CLASS!r}, which data.classes can rename"
    notes = [Problem("note", path.name, None, None, message)] if regions and not attribute else []
    return Document(images, problems=notes)


def _entries(content: Mapping) -> Iterator[tuple[str, list]]:
    """Yield (file name, regions) of each image of a JSON file."""
    metadata = content.get("_via_img_metadata", content)
    for key, entry in metadata.items():
        if not isinstance(entry, Mapping) or "filename" not in entry:
            raise ValueError(f"the image {key!r} has no `filename`")
        regions = entry.get("regions") or []
        yield _name(entry["filename"]), list(regions.values() if isinstance(regions, Mapping) else regions)


def _rows(path: Path) -> Iterator[tuple[str, list]]:
    """Yield the same of a CSV file, which has a row for each region, and one for an image without any."""
    of_images: dict[str, list] = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            values = {str(key).lstrip("#"): value or "" for key, value in row.items()}
            try:
                columns = ("region_shape_attributes", "region_attributes")
                region = {column.replace("region_shape", "shape"): json.loads(values[column]) for column in columns}
                regions = of_images.setdefault(_name(values["filename"]), [])
            except (KeyError, ValueError) as error:
                raise ValueError(f"line {number}: expected a file name and two cells with JSON ({error})") from error
            if region["shape_attributes"]:
                regions.append(region)
    yield from of_images.items()


def _name(filename: str) -> str:
    return filename.replace("\\", "/").split("://")[-1]


def _class_attribute(regions: list) -> str | None:
    """Return the name of the attribute that is the class; None if there are no attributes. Raises ValueError if several
    can be it, unless they say the same of every region.
    """
    found = [region.get("region_attributes") for region in regions if isinstance(region, Mapping)]
    found = [attributes for attributes in found if isinstance(attributes, Mapping)]
    used: dict[str, None] = {}
    for attributes in found:
        used |= dict.fromkeys(name for name, value in attributes.items() if _is_set(value))
    by_usual_name = {name.strip().lower(): name for name in reversed(used)}
    usual = [by_usual_name[name] for name in USUAL_NAMES if name in by_usual_name]
    differ = any(len({repr(attributes.get(name)) for name in used}) > 1 for attributes in found)
    if differ and not usual:
        raise ValueError(f"its regions have the attributes {', '.join(used)}; call the one that is the class `class`")
    return next(iter([*usual, *used]), None)


def _is_set(value: object) -> bool:
    return any(value.values()) if isinstance(value, Mapping) else bool(value)


def _class_of(value: object) -> object:
    """Return the value of an attribute; of a check box, the one that is set."""
    if not isinstance(value, Mapping):
        return value
    chosen = [name for name, is_set in value.items() if is_set]
    if len(chosen) > 1:
        raise ValueError(f"it has the classes {', '.join(chosen)}; expected one")
    return next(iter(chosen), None)


def _drawn(shape: Mapping) -> Drawn:
    kind = shape["name"]
    if kind in LINES:
        raise NoArea(kind)
    if kind == "polygon":
        xs = numbers_in(shape["all_points_x"])
        ys = numbers_in(shape["all_points_y"])
        if len(xs) != len(ys):
            raise ValueError(f"it has {len(xs)} and {len(ys)} coordinates; expected as many of y as of x")
        return polygon(list(zip(xs, ys, strict=True)))
    if kind == "rect":
        x, y, width, height = numbers_in([shape[key] for key in ("x", "y", "width", "height")], 4)
        return rectangle([(x, y), (x + width, y + height)])
    if kind in ("circle", "ellipse"):
        keys = ("cx", "cy", "r", "r") if kind == "circle" else ("cx", "cy", "rx", "ry")
        x, y, across, down = numbers_in([shape[key] for key in keys], 4)
        return ellipse((x, y), (across, down), math.degrees(float(shape.get("theta", 0.0))))
    raise ValueError(f"it is a {kind}, which is not read; expected a polygon, rect, circle or ellipse")


FORMAT = SetFormat("via", TITLE, (".json", ".csv"), _parse)
