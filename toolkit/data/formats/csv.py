"""CSV tables with one row per box; columns are recognised by their names in the header."""

import csv
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from toolkit.base.errors import BadInput
from toolkit.base.text import FORMULA, first_names
from toolkit.data.annotations import Reading
from toolkit.data.find_images import find_missing, find_root_near, found_name
from toolkit.data.formats.annotated import (
    Listing,
    ParsedBox,
    ParsedImage,
    open_annotated,
    rows_of,
    sorted_classes,
)
from toolkit.data.image_sources import ImageSources, is_there
from toolkit.data.layout import UNSPLIT, Layout, Splits, called_first, one_per_split, split_in_name, split_of
from toolkit.data.table import DetectionTable, Problem

TITLE = "CSV"
HEADER_NAMES = {
    "image": "image filename file_name image_path path file img image_name image_id imageid".split(),
    "x1": "x1 xmin x_min left bbox_x1".split(),
    "y1": "y1 ymin y_min top bbox_y1".split(),
    "x2": "x2 xmax x_max right bbox_x2".split(),
    "y2": "y2 ymax y_max bottom bbox_y2".split(),
    "x": "x bbox_x".split(),
    "y": "y bbox_y".split(),
    "w": "w bbox_w bbox_width box_width".split(),
    "h": "h bbox_h bbox_height box_height".split(),
    "label": "label class class_name category category_name name label_name labelname".split(),
    "width": "width image_width img_width".split(),
    "height": "height image_height img_height".split(),
    "split": "split set subset partition fold".split(),
    "ignored": "iscrowd difficult ignore isgroupof".split(),
}
HEADERLESS = ("image", "x1", "y1", "x2", "y2", "label")  # the order of keras-retinanet
WHOLE_NUMBER = re.compile(r"-?\d+(\.0+)?")


class _Row(NamedTuple):
    """A row of a table: its position, its cells, and the stripped cells of known columns by their meaning."""

    path: Path
    line: int
    words: list[str]
    values: dict[str, str]

    @property
    def split(self) -> str:
        name = self.values.get("split", UNSPLIT)
        return split_of(name) or name

    @property
    def corners(self) -> list[str]:
        names = ("x1", "y1", "x2", "y2") if "x1" in self.values else ("x", "y", "w", "h")
        return [self.values[name] for name in names]


def find(layout: Layout) -> Splits | None:
    """Return the splits of a folder of CSV files, or of one file; None if there are no tables of boxes.

    Recognised are files whose names say a split, a CSV file in the folder of each split, and a single CSV file, with or
    without a column `split`. Files whose names differ from that of a split's table only in a number are further parts
    of it.
    """
    candidates = _candidates(layout)
    sources: dict[str, list[Path]] = {}
    for split, first in one_per_split(candidates).items():
        parts = [path for known, path in candidates if known == split and _unnumbered(path) == _unnumbered(first)]
        if parts:
            sources.setdefault(split, []).extend(parts)
        elif "split" in _columns_of(first):
            for named in {row.split: None for row in _read_rows(first)}:
                sources.setdefault(named, []).append(first)
        else:
            sources[split] = [first]
    return Splits(layout, sources, [path for _, path in candidates]) if sources else None


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.annotated.open_annotated`.

    Corners are `x1, y1, x2, y2`, or `x, y, w, h`, in pixels; a row without numbers is an image without objects. If all
    coordinates are at most 1 and not all are whole numbers, they are fractions of the image. Classes are the names of
    all splits in alphabetical order.
    """
    listing = partial(_listing, found, split, reading.image_dir)
    return open_annotated("csv", found.folder, split, listing, reading)


def _as_meant(word: str) -> str:
    if word.startswith("'") and FORMULA.match(word):
        return word[1:]
    return word


def _candidates(layout: Layout) -> list[tuple[str | None, Path]]:
    """List (split, file) of the CSV files with boxes, in a folder and in those of splits; split None: not in the name.
    """
    folder = layout.folder
    if folder.is_file():
        return [(None, folder)] if _columns_of(folder) else []
    files = [(split_in_name(path.name), path) for path in called_first(layout.files(folder, ".csv"))]
    for split, folders in layout.folders_of_splits(folder).items():
        for directory in folders:
            files += [(split, path) for path in layout.files(directory, ".csv")]
    return [(split, path) for split, path in files if _columns_of(path)]


def _unnumbered(path: Path) -> Path:
    return path.with_name(re.sub(r"\d+", "", path.name))


def _columns_of(path: Path) -> dict[str, int] | None:
    """Return column positions by their meaning; None if this is not a table of boxes."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
            first = next(csv.reader(file, _dialect(file)), [])
    except (OSError, csv.Error):
        return None
    header = [word.strip().lower().replace(" ", "_") for word in first]
    columns = {}
    for meaning, names in HEADER_NAMES.items():
        present = [name for name in names if name in header]
        if present:
            columns[meaning] = header.index(present[0])
    if {"image", "label"} <= columns.keys():
        if {"x1", "y1", "x2", "y2"} <= columns.keys():
            return columns
        if not {"x", "y"} & columns.keys() and {"x1", "y1"} <= columns.keys():  # left, top, width, height
            columns["x"] = columns.pop("x1")
            columns["y"] = columns.pop("y1")
        if {"x", "y", "width", "height"} <= columns.keys() and not {"w", "h"} & columns.keys():
            columns["w"] = columns.pop("width")  # of the box, and not of the image
            columns["h"] = columns.pop("height")
        if {"x", "y", "w", "h"} <= columns.keys():
            return columns
    numbers = [word.strip() for word in first[1:5]]
    if len(first) == 6 and (not any(numbers) or all(map(_is_float, numbers))):
        columns = {meaning: column for column, meaning in enumerate(HEADERLESS)}
        return {**columns, "headerless": 0}
    return None


def _dialect(file) -> type[csv.Dialect] | csv.Dialect:
    head = file.read(4096)
    file.seek(0)
    try:
        dialect = csv.Sniffer().sniff(head, ",;\t")
    except csv.Error:
        return csv.excel
    # The sniffer may have taken apostrophes in names for quotes.
    dialect.quotechar = '"'
    dialect.doublequote = True
    return dialect


def _is_float(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _parse_side(word: str) -> int | None:
    """Return a side in pixels; None if the word is not such a number, and the image is read instead."""
    side = float(word) if _is_float(word) else 0.0
    if not abs(side) < 2**31:  # also NaN
        return None
    return int(side) or None


def _read_rows(path: Path) -> list[_Row]:
    columns = _columns_of(path)
    if columns is None:
        raise BadInput(f"{path}: not a table of boxes; expected columns named image, x1, y1, x2, y2, label")
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file, _dialect(file))
        try:
            lines = []
            for words in reader:
                if any(map(str.strip, words)):
                    lines.append((reader.line_num, words))
        except csv.Error as error:
            raise BadInput(f"{path}, line {reader.line_num}: cannot be read as CSV: {error}") from error
    loaded = []
    for number, words in lines:
        words = [_as_meant(word) for word in words]
        values = {}
        for meaning, column in columns.items():
            values[meaning] = words[column].strip() if column < len(words) else ""
        loaded.append(_Row(path, number, words, values))
    return loaded if "headerless" in columns else loaded[1:]


def _listing(found: Splits, split: str, image_dir: Path | ImageSources | None) -> Listing:
    rows, chosen = _rows_of_split(found, split)
    _write_classes_alike(rows)
    layout = found.layout
    folder = found.folder.parent if found.folder.is_file() else found.folder
    root = image_dir or _image_root(found, split, chosen)
    names, problems = _names_in(root, chosen)
    images, faults = _parse_rows(chosen, names)
    pictures = find_missing(rows_of(images), root, layout, image_dir or folder, split)
    labels = {row.values["label"] for row in rows}
    listed = {row.values["image"] for row in rows} | set(layout.images(root))
    listing = Listing(
        pictures.image_root,
        pictures.images,
        sorted_classes(labels - {""}),
        [*chain.from_iterable(found.sources.values()), *pictures.watched],
        pictures.names(listed),
        problems + faults + pictures.problems,
    )
    listing.add_all(images)
    return listing


def _rows_of_split(found: Splits, split: str) -> tuple[list[_Row], list[_Row]]:
    """Return (rows of all tables, rows of one split). Raises BadInput: the split has no rows."""
    rows = []
    chosen = []
    for path in dict.fromkeys(chain.from_iterable(found.sources.values())):
        loaded = _read_rows(path)
        rows += loaded
        splits = [name for name, paths in found.sources.items() if path in paths]
        if splits == [split]:
            chosen += loaded
        elif split in splits:
            chosen += [row for row in loaded if row.split == split]
    if not chosen and split in found.sources:
        expected = "expected one for each box, and one without numbers for an image without boxes"
        raise BadInput(f"{first_names(found.sources[split])}: a header, and no rows; {expected}")
    if not chosen:
        raise BadInput(f"{found.folder}: no split {split!r}; there are {', '.join(found.names)}")
    return rows, chosen


def _parse_rows(rows: Sequence[_Row], names: Mapping[str, str]) -> tuple[list[ParsedImage], list[Problem]]:
    """Return (images in the order of their first rows, problems of rows).

    names: of the file of each image, by its name in a row.
    """
    images: dict[str, ParsedImage] = {}
    problems = []
    shares = _are_fractions(rows)
    for row in rows:
        name = names[row.values["image"]]
        width = _parse_side(row.values.get("width", ""))
        height = _parse_side(row.values.get("height", ""))
        image = images.setdefault(name, ParsedImage(name, width, height, []))
        label = row.values["label"]
        corners = row.corners
        if not any(corners):
            continue
        if not all(map(_is_float, corners)) or not label:
            message = f"{row.path.name}, line {row.line}: {','.join(row.words)[:80]!r}; expected 4 numbers and a label"
            problems.append(Problem("error", name, None, None, message))
            continue
        x1, y1, x2, y2 = map(float, corners)
        if "x1" not in row.values:  # width and height
            x2 = x1 + x2
            y2 = y1 + y2
        ignored = row.values.get("ignored", "").lower() in ("1", "true")
        image.boxes.append(ParsedBox(label, (x1, y1, x2, y2), row.path.name, ignored, shares))
    return list(images.values()), problems


def _write_classes_alike(rows: Sequence[_Row]) -> None:
    """Make `1` and `1.0` one class where all classes are whole numbers: some programs write a column as floats.

    Other names stay as they are written: `007` is not `7`.
    """
    labels = {row.values["label"] for row in rows} - {""}
    if not all(map(WHOLE_NUMBER.fullmatch, labels)):
        return
    for row in rows:
        row.values["label"] = row.values["label"].split(".")[0]


def _names_in(root: Path | ImageSources, rows: Sequence[_Row]) -> tuple[dict[str, str], list[Problem]]:
    """Return (name of a file in `root` for each image as rows give it, a problem for two images that become one file).
    """
    names: dict[str, str] = {}
    first_of: dict[str, str] = {}  # the image that became a file
    problems = []
    for row in rows:
        given = row.values["image"]
        if given in names:
            continue
        path = os.path.normpath(given.replace("\\", "/")) if given else given
        path = _relative_to_images(root, path)
        name = path if is_there(root / path) else found_name(root, path)
        names[given] = name
        folder = os.path.dirname(path)
        first_folder = first_of.setdefault(name, folder)
        if first_folder != folder:
            message = (
                f"{row.path.name}, line {row.line}: {given} is not there, and {name} was found for an image in "
                f"{first_folder or 'no folder'} too; give the folder that the paths are relative to (data.image_dir)"
            )
            problems.append(Problem("error", name, None, None, message))
    return names, problems


def _relative_to_images(root: Path | ImageSources, name: str) -> str:
    """Return a path relative to the folder of the images if it is an absolute one of a file in that folder."""
    if not isinstance(root, Path) or not os.path.isabs(name):
        return name
    path = Path(name)
    top = os.path.abspath(root)
    return str(path.relative_to(top)) if path.is_relative_to(top) else name


def _are_fractions(rows: Sequence[_Row]) -> bool:
    """Return whether all coordinates are from 0 to 1, and not all of them whole."""
    values = []
    for row in rows:
        values += [float(word) for word in row.corners if _is_float(word)]
    are_small = all(0 <= value <= 1 for value in values)
    return bool(values) and are_small and any(value % 1 for value in values)


def _image_root(found: Splits, split: str, rows: Sequence[_Row]) -> Path:
    """Find the folder of the images by `find_root_near`.

    Images that are all given by absolute paths, as predict.py writes them, are in the folder of these paths if one of
    them exists.
    """
    names = [row.values["image"].replace("\\", "/") for row in rows]
    if all(map(os.path.isabs, names)) and any(map(os.path.isfile, names)):
        return Path(os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names]))
    is_file = found.folder.is_file()
    folder = found.folder.parent if is_file else found.folder
    said = split_in_name(found.folder.name) if is_file else split
    return find_root_near(found.layout, folder, rows[0].path, said, names)
