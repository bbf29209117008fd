"""CSV tables with one row per box; columns are recognised by their names in the header."""

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from toolkit.base.errors import BadInput
from toolkit.data.annotations import ImageRow, Reading
from toolkit.data.formats.annotated import (
    SPLIT_NAMES,
    UNSPLIT,
    Listing,
    called_first,
    folders_of_splits,
    images_in,
    not_among,
    open_annotated,
    ordered,
    sorted_classes,
    split_in_name,
    split_of,
)
from toolkit.data.image_sources import ImageSources, is_there
from toolkit.data.table import DetectionTable, Problem

TITLE = "CSV"
COLUMNS = {
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
# Text that a spreadsheet would compute instead of showing it. An apostrophe is written before it, to make it text.
FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
WHOLE = re.compile(r"-?\d+(\.0+)?")
IMAGE_FOLDERS = ("", "images", "Images", "JPEGImages", "imgs")


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


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the splits of a folder of CSV files, or of one file; None if there are no tables of boxes.

    Known are files whose names say a split, a CSV file in the folder of each split, and one CSV file, with a column
    `split` or without.
    """
    splits = set()
    for split, path in _tables(folder):
        if split is None and "split" in _columns_of(path):
            splits.update(row.split for row in _load(path))
        else:
            splits.add(split or UNSPLIT)
    return ordered(splits) or None


def unused(folder: Path) -> list[str]:
    """Return the names of the tables of boxes in a folder that are not read.

    Their split has another table, or their names do not say a split.
    """
    return not_among((path for _, path in _candidates(folder)), (path for _, path in _tables(folder)), folder)


def read(folder: Path, split: str, reading: Reading) -> DetectionTable:
    """Read one split as `toolkit.data.formats.annotated.open_annotated`.

    Corners are `x1, y1, x2, y2`, or `x, y, w, h`, in pixels; a row without numbers is an image without objects. If all
    coordinates are at most 1 and not all are whole numbers, they are fractions of the image. Classes are the names of
    all splits in alphabetical order.
    """
    return open_annotated("csv", folder, split, lambda: _listing(folder, split, reading.image_dir), reading)


def _as_meant(word: str) -> str:
    return word[1:] if word.startswith("'") and FORMULA.match(word) else word


def _candidates(folder: Path) -> list[tuple[str | None, Path]]:
    """List (split, file) of the CSV files with boxes, in a folder and in those of splits; split None: not in the name.
    """
    if folder.is_file():
        return [(None, folder)] if _columns_of(folder) else []
    tables = [(split_in_name(path.name), path) for path in called_first(folder.glob("*.csv")) if _columns_of(path)]
    for split, folders in folders_of_splits(folder).items():
        inside = [path for directory in folders for path in sorted(directory.glob("*.csv"))]
        tables += [(split, path) for path in inside if _columns_of(path)]
    return tables


def _tables(folder: Path) -> list[tuple[str | None, Path]]:
    """List (split, file) of the tables that are read; the split is None if the rows say it, or nothing does.

    Of several for one split, the one that is called like it counts, then the first; files whose names differ from it in
    a number alone are further parts of it. If none is called train, the only one whose name says no split is the
    training data.
    """
    candidates = _candidates(folder)
    tables = []
    for split in SPLIT_NAMES:
        of_split = [path for known, path in candidates if known == split]
        tables += [(split, path) for path in of_split if _unnumbered(path) == _unnumbered(of_split[0])]
    unnamed = [path for split, path in candidates if split is None]
    if not tables:
        return [(None, path) for path in unnamed[:1]]
    if len(unnamed) == 1 and tables[0][0] != "train":  # annotations.csv beside annotations_test.csv
        says_splits = "split" in _columns_of(unnamed[0])
        tables.append((None if says_splits else "train", unnamed[0]))
    return tables


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
    present = {meaning: [name for name in names if name in header] for meaning, names in COLUMNS.items()}
    columns = {meaning: header.index(names[0]) for meaning, names in present.items() if names}
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
    if len(first) == 6 and (not any(numbers) or all(map(_number, numbers))):
        return {meaning: column for column, meaning in enumerate(HEADERLESS)} | {"headerless": 0}
    return None


def _dialect(file) -> type[csv.Dialect] | csv.Dialect:
    head = file.read(4096)
    file.seek(0)
    try:
        dialect = csv.Sniffer().sniff(head, ",;\t")
    except csv.Error:
        return csv.excel
    # overrides what the sniffer concludes from apostrophes in names
    dialect.quotechar = '"'
    dialect.doublequote = True
    return dialect


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _side(word: str) -> int | None:
    """Return a side in pixels; None if the word is not such a number, and the image is read instead."""
    side = float(word) if _number(word) else 0.0
    return int(side) or None if abs(side) < 2**31 else None


def _load(path: Path) -> list[_Row]:
    columns = _columns_of(path)
    if columns is None:
        raise BadInput(f"{path}: not a table of boxes; expected columns named image, x1, y1, x2, y2, label")
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file, _dialect(file))
        try:
            lines = [(reader.line_num, words) for words in reader if any(word.strip() for word in words)]
        except csv.Error as error:
            raise BadInput(f"{path}, line {reader.line_num}: cannot be read as CSV: {error}") from error
    loaded = []
    for number, words in lines:
        words = [_as_meant(word) for word in words]
        values = {key: words[column].strip() if column < len(words) else "" for key, column in columns.items()}
        loaded.append(_Row(path, number, words, values))
    return loaded if "headerless" in columns else loaded[1:]


def _listing(folder: Path, split: str, image_dir: Path | ImageSources | None) -> Listing:
    tables = _tables(folder)
    rows = [(of or row.split, row) for of, path in tables for row in _load(path)]
    chosen = [row for row_split, row in rows if row_split == split]
    if not chosen:
        raise BadInput(f"{folder}: no split {split!r}; there are {', '.join(recognise(folder) or ())}")
    here = folder.parent if folder.is_file() else folder
    _write_classes_alike([row for _, row in rows])
    given = [row.values["image"].replace("\\", "/") for row in chosen]
    named = split_in_name(folder.name) if folder.is_file() else split
    root = image_dir or _folder_of(given) or _image_root(here, named, chosen[0].path.parent, given)
    names, problems = _names_in(root, chosen)
    sizes = {}
    boxes = []
    shares = _are_fractions(chosen)
    for row in chosen:
        name = names[row.values["image"]]
        sizes.setdefault(name, [_side(row.values.get(key, "")) for key in ("width", "height")])
        label = row.values["label"]
        if not any(row.corners):
            continue
        if not all(map(_number, row.corners)) or not label:
            message = f"{row.path.name}, line {row.line}: {','.join(row.words)[:80]!r}; expected 4 numbers and a label"
            problems.append(Problem("error", name, None, None, message))
            continue
        x1, y1, x2, y2 = map(float, row.corners)
        if "x1" not in row.values:
            x2, y2 = x1 + x2, y1 + y2
        ignored = row.values.get("ignored", "").lower() in ("1", "true")
        boxes.append((name, label, (x1, y1, x2, y2), row.path.name, ignored, shares))
    indices = {name: index for index, name in enumerate(sizes)}
    images = [ImageRow(index + 1, name, *sizes[name]) for name, index in indices.items()]
    classes = sorted_classes({row.values["label"] for _, row in rows} - {""})
    listed = {row.values["image"] for _, row in rows} | set(images_in(root))
    listing = Listing(root, images, classes, [path for _, path in tables], listed, problems)
    for name, *box in sorted(boxes, key=lambda box: indices[box[0]]):
        listing.add(indices[name], *box)
    return listing


def _write_classes_alike(rows: Sequence[_Row]) -> None:
    """Make `1` and `1.0` one class where all classes are whole numbers: some programs write a column as floats.

    Other names stay as they are written: `007` is not `7`.
    """
    labels = {row.values["label"] for row in rows} - {""}
    if not all(map(WHOLE.fullmatch, labels)):
        return
    for row in rows:
        row.values["label"] = row.values["label"].split(".")[0]


def _folder_of(names: Sequence[str]) -> Path | None:
    """Return the folder of images that are all given by absolute paths, as predict.py writes them; None if none exists.
    """
    if not all(map(os.path.isabs, names)) or not any(map(os.path.isfile, names)):
        return None
    return Path(os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names]))


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
        path = _below(root, os.path.normpath(given.replace("\\", "/")) if given else given)
        names[given] = path if is_there(root / path) else _found_name(root, path)
        folder = first_of.setdefault(names[given], os.path.dirname(path))
        if folder != os.path.dirname(path):
            message = (
                f"{row.path.name}, line {row.line}: {given} is not there, and {names[given]} was found for an image in "
                f"{folder or 'no folder'} too; give the folder that the paths are relative to (data.image_dir)"
            )
            problems.append(Problem("error", names[given], None, None, message))
    return names, problems


def _below(root: Path | ImageSources, name: str) -> str:
    """Return a path relative to the folder of the images if it is an absolute one of a file in that folder."""
    if isinstance(root, Path) and os.path.isabs(name) and Path(name).is_relative_to(os.path.abspath(root)):
        return str(Path(name).relative_to(os.path.abspath(root)))
    return name


def _are_fractions(rows: Sequence[_Row]) -> bool:
    """Return whether all coordinates are from 0 to 1, and not all of them whole."""
    values = [float(word) for row in rows for word in row.corners if _number(word)]
    return bool(values) and all(0 <= value <= 1 for value in values) and any(value % 1 for value in values)


def _found_name(root: Path | ImageSources, name: str) -> str:
    """Return the name with a suffix if the table omits it, or its last parts if its folder does not exist here."""
    parts = name.split("/")
    stems = (name, *("/".join(parts[-count:]) for count in (3, 2, 1)))
    names = (stem + suffix for suffix in ("", ".jpg", ".jpeg", ".png") for stem in stems)
    return next((candidate for candidate in names if not os.path.isabs(candidate) and is_there(root / candidate)), name)


def _image_root(folder: Path, split: str | None, beside: Path, names: Sequence[str]) -> Path:
    bases = list(dict.fromkeys((beside, folder)))
    candidates = [base / tail for base in bases for tail in IMAGE_FOLDERS]
    of_split = folders_of_splits(*bases, *(base / "images" for base in bases)).get(split, [])
    candidates += [inner for directory in of_split for inner in (directory, directory / "images")]
    for candidate in candidates:
        resolved = (_found_name(candidate, name) for name in names[:20])
        if any((candidate / name).is_file() for name in resolved if not os.path.isabs(name)):
            return candidate
    tried = ", ".join(str(candidate) for candidate in candidates)
    raise BadInput(f"{folder}: no image folder found for {names[0]!r}; tried {tried}; set it with --data.image_dir")
