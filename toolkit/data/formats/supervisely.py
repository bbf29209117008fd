"""Supervisely: a project folder with `meta.json`, and in each of its data sets `ann/*.json` and `img`."""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.masks import Size
from toolkit.data.annotations import Reading
from toolkit.data.formats.annotated import LabelledShape, Listing, ParsedImage, image_of_shapes, open_annotated
from toolkit.data.formats.drawn import (
    Drawn,
    NoArea,
    bitmap,
    numbers_in,
    picture_pixels,
    points_in,
    polygon,
    rectangle,
    with_holes,
)
from toolkit.data.formats.look_alikes import json_in, tool_of
from toolkit.data.formats.per_image import AnnotationFiles, ImageFormat
from toolkit.data.layout import UNSPLIT, Layout, Splits, split_in_name
from toolkit.data.table import DetectionTable

TITLE = "Supervisely"
LINES = ("point", "line", "polyline", "graph", "any")


def find(layout: Layout) -> Splits | None:
    """Return the splits of a project, or of one of its data sets; None if it is neither.

    A data set whose name says a split is this split. Those without are all one if none says a split, else not used.
    """
    folders = [folder for folder in _annotation_folders(layout, layout.folder) if FORMAT.is_in(layout, folder)]
    sources: dict[str, list[Path]] = {}
    for folder in folders:
        inside = folder.parent.relative_to(layout.folder).parts
        splits = filter(None, map(split_in_name, inside))
        sources.setdefault(next(splits, UNSPLIT), []).append(folder)
    if len(sources) > 1:
        sources.pop(UNSPLIT, None)
    return Splits(layout, sources, folders) if sources else None


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.annotated.open_annotated`.

    Classes are those of `meta.json`. A rectangle is a box without a mask. Points and lines are left out.
    """
    listing = partial(_listing, found, split, reading)
    return open_annotated("supervisely", found.folder, split, listing, reading)


def _annotation_folders(layout: Layout, folder: Path) -> list[Path]:
    """Return the folders `ann` of a data set, of the data sets of a project, and of those nested in one."""
    found = []
    for data_set in (folder, *layout.folders(folder)):
        if any(inner.name == "ann" for inner in layout.folders(data_set)):
            found.append(data_set / "ann")
        nested = layout.folders(data_set / "datasets")
        found += chain.from_iterable(_annotation_folders(layout, inner) for inner in nested)
    return list(dict.fromkeys(found))


def _listing(found: Splits, split: str, reading: Reading) -> Listing:
    folders = list(chain.from_iterable(found.sources.values()))
    files = AnnotationFiles(FORMAT, found.layout, folders, [found.folder, found.folder.parent])
    parts = []
    for folder in found.sources[split]:
        part = files.part(folder.parent, folder, split, reading.image_dir)
        if reading.image_dir is None:  # pictures of several data sets may have one name
            below = part.root.relative_to(found.folder).as_posix()
            images = {stem: image.named(f"{below}/{image.file_name}") for stem, image in part.images.items()}
            part = replace(part, root=found.folder, images=images)
        parts.append(part)
    listing, images = files.listing(parts, split, reading.image_dir, masks=reading.masks)
    listing.add_all(images)
    return listing


def _is_annotation(path: Path) -> bool:
    return tool_of(path) == TITLE


def _parse(path: Path) -> ParsedImage:
    content = json_in(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("objects"), list):
        raise ValueError("it has no list `objects`")
    size = content.get("size")
    if not isinstance(size, Mapping):
        raise ValueError("it has no `size` with width and height")
    size_wh = (size.get("width"), size.get("height"))

    def read_shape(entry: Mapping) -> LabelledShape:
        return LabelledShape(entry.get("classTitle"), _drawn(entry, size_wh[::-1]))

    return image_of_shapes(path.stem, size_wh, content["objects"], read_shape, path.name)


def _drawn(entry: Mapping, size_hw: Size) -> Drawn:
    kind = entry.get("geometryType") or ("bitmap" if entry.get("bitmap") else "polygon")
    if kind in LINES:
        raise NoArea(kind)
    if kind == "bitmap":
        left, top = numbers_in(entry["bitmap"]["origin"], 2)
        return bitmap(picture_pixels(_unpacked(entry["bitmap"]["data"]), "its bitmap"), left, top, size_hw)
    if kind not in ("polygon", "rectangle"):
        raise ValueError(f"it is a {kind}, which is not read; expected a polygon, rectangle or bitmap")
    outer = points_in(entry["points"]["exterior"])
    if kind == "rectangle":
        return rectangle(outer)
    holes = [polygon(points_in(hole)) for hole in entry["points"].get("interior") or ()]
    return with_holes(polygon(outer), holes, size_hw)


def _unpacked(text: str) -> bytes:
    """Return the picture in the text of a bitmap, at most as many bytes as an image may have pixels."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text), MAX_IMAGE_PIXELS)
    except (TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"its bitmap cannot be read: {error}") from error


FORMAT = ImageFormat(".json", _is_annotation, _parse, may_lie=True)
