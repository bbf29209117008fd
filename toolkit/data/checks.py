"""Checks annotations before the first step, and reports every defect at once, in words."""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np

from toolkit.boxes import Boxes, Relations
from toolkit.data.annotations import Annotations, ImageRow, is_id, is_unicode
from toolkit.data.box_checks import check_boxes, check_relations, fits_int64, is_side, wrong_id
from toolkit.data.box_formats import format_fault
from toolkit.data.table import Category, Problem
from toolkit.errors import BadInput

_SUSPICIOUS = re.compile(r"^/|\.\.|[\\:\0]")  # in every name that leaves a folder


@dataclass
class Checked:
    """What can be used of annotations, and what was wrong with them.

    images: in the order of the file, with `boxes` and `relations` of theirs. listed: every file name of the file, those
    of unusable images too.
    """

    images: list[ImageRow]
    boxes: Boxes
    relations: Relations
    categories: tuple[Category, ...]
    predicates: tuple[str, ...]
    attributes: tuple[str, ...]
    problems: list[Problem]
    listed: set[str]

    def columns(self) -> dict:
        """What `write_table` takes of it."""
        return {name: value for name, value in vars(self).items() if name != "listed"}

    def without(self, image_ids: Set) -> "Checked":
        """Some images less."""
        kept = np.array([row.image_id not in image_ids for row in self.images], bool)
        images = [row for row, stays in zip(self.images, kept.tolist(), strict=True) if stays]
        return replace(self, images=images, boxes=self.boxes.of_images(kept), relations=self.relations.of_images(kept))


def check(annotations: Annotations, file: str, max_image_pixels: int | None = None) -> Checked:
    """Checks what a reader yields, whatever its format.

    Boxes become xyxy, category ids contiguous from 0 in the order of the original ids. A record with an error is left
    out and reported; a repaired one is reported as a warning. A relation that is listed again is kept with a warning:
    it counts repeatedly in training and recall, as published numbers have it.

    Args:
        max_image_pixels: images that are said to be larger cannot be used; None: the images themselves will tell.

    Raises:
        BadInput: the boxes are in another format than [x, y, width, height], so that nothing can be used; image ids of
            two kinds.
    """
    problems: list[Problem] = []
    categories, labels = _categories(annotations.categories, file, "category", problems)
    rows, unusable = _images(annotations, file, max_image_pixels, problems)
    if wrong := format_fault(annotations, rows):
        raise BadInput(f"{file}: {wrong}")
    attributes, attribute_rows = _categories(annotations.attributes, file, "attribute", problems)
    boxes, places = check_boxes(annotations, file, rows, labels, attribute_rows, problems)
    predicates, predicate_rows = _categories(annotations.predicates, file, "predicate", problems)
    relations = check_relations(annotations.relations, file, places, predicate_rows, problems)
    names = (tuple(entry.name for entry in entries) for entries in (predicates, attributes))
    listed = {row.file_name for row in annotations.images if isinstance(row.file_name, str)}
    checked = Checked(list(rows.values()), boxes, relations, categories, *names, problems, listed).without(unusable)
    return replace(checked, boxes=_narrow(checked.boxes)) if attributes else checked


def _narrow(boxes: Boxes) -> Boxes:
    """With no more columns of attributes than some box needs, but one."""
    wide = boxes.extra["attributes"]
    return replace(boxes, extra={"attributes": wide[:, : max(1, (wide > 0).sum(axis=1).max(initial=0))]})


def unsafe_file_name(file_name: str) -> bool:
    """True for a name that could leave the image folder: absolute, of any system, or with `..` in it."""
    if not _SUSPICIOUS.search(file_name):  # parsing paths is slow
        return False
    parts = (*PurePosixPath(file_name).parts, *PureWindowsPath(file_name).parts)
    windows = PureWindowsPath(file_name)
    return ".." in parts or "\0" in file_name or file_name.startswith("/") or bool(windows.drive or windows.root)


def _sort_key(value: int | str) -> tuple:
    return (isinstance(value, str), value)


def _categories(entries: list, file: str, what: str, problems: list[Problem]) -> tuple[tuple[Category, ...], dict]:
    """(categories in the order of their ids, original id -> row)."""

    def report(severity: str, message: str) -> None:
        problems.append(Problem(severity, file, None, None, message))

    names: dict[int | str, str] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            report("error", f"{what} {number} is {entry!r}; expected an object with `id` and `name`")
        elif not is_id(entry.get("id")):
            report("error", f"{what} {number}: {wrong_id(entry, 'id')}")
        elif not isinstance(entry.get("name"), str) or not entry["name"].strip():
            report("error", f"{what} {entry['id']}: `name` is {entry.get('name')!r}; expected a name")
        elif entry["id"] not in names:
            names[entry["id"]] = _unicode_name(entry, what, report)
        elif entry["name"] == names[entry["id"]]:
            report("warning", f"{what} id {entry['id']} listed twice under one name; taken once")
        else:
            report("error", f"{what} id {entry['id']} used twice: {names[entry['id']]!r} and {entry['name']!r}")
    ordered = sorted(names, key=_sort_key)
    seen: set[str] = set()
    categories = []
    for id_ in ordered:
        name = names[id_]
        if name in seen:
            name = f"{name} ({id_})"
            report("warning", f"{what} name {names[id_]!r} used twice; {what} {id_} is called {name!r}")
        seen.add(name)
        categories.append(Category(id_, name))
    return tuple(categories), {id_: row for row, id_ in enumerate(ordered)}


def _unicode_name(entry: Mapping, what: str, report: Callable[[str, str], None]) -> str:
    """The name as text that files can hold; a half of a surrogate pair becomes its number."""
    name = entry["name"].encode("utf-8", "backslashreplace").decode()
    if name != entry["name"]:
        report("warning", f"{what} {entry['id']}: name {entry['name']!r} is no Unicode; it is called {name!r}")
    return name


def _images(
    annotations: Annotations, file: str, max_pixels: int | None, problems: list[Problem]
) -> tuple[dict[int | str, ImageRow], set]:
    """(image id -> row, ids that cannot be used). Unusable ones keep a row, so that their annotations are checked."""
    rows: dict[int | str, ImageRow] = {}
    unusable: set[int | str] = set()
    used_names: dict[str, int | str] = {}
    kinds = {type(row.image_id) for row in annotations.images if row.image_id is not None}
    if len(kinds) > 1:
        raise BadInput(f"{file}: some image ids are numbers and some are strings; expected one kind")
    for number, row in enumerate(annotations.images):
        if row.image_id is None:
            entry = annotations.odd_images[number]
            fault = wrong_id(entry, "id") if isinstance(entry, dict) else f"{entry!r} is no object"
            problems.append(Problem("error", file, None, None, f"image entry {number}: {fault}"))
            continue
        image_id, name = row.image_id, row.file_name
        faults = _image_faults(row, max_pixels)
        if not fits_int64(image_id):
            faults.append(f"image id {image_id} does not fit into 64 bits; write it as a string")
        shown = name if isinstance(name, str) and name else file
        if image_id in rows:
            other = rows[image_id].file_name
            faults.append(f"image id {image_id} used twice, by {other!r} too")
            if image_id not in unusable:
                problems.append(Problem("error", str(other), image_id, None,
                                        f"image id {image_id} used twice, by {name!r} too"))
        elif isinstance(name, str) and name in used_names:
            problems.append(Problem("warning", name, image_id, None,
                                    f"this file is image {used_names[name]} too; both are kept"))
        else:
            used_names[shown] = image_id
        if faults:
            unusable.add(image_id)
            problems.extend(Problem("error", shown, image_id, None, fault) for fault in faults)
        rows.setdefault(image_id, row)
    return rows, unusable


def _image_faults(row: ImageRow, max_pixels: int | None) -> list[str]:
    faults = []
    name, width, height = row[1:]
    if not isinstance(name, str) or not name:
        faults.append("`file_name` missing" if name is None else f"`file_name` is {name!r}; expected a path")
    elif not is_unicode(name):
        faults.append(f"`file_name` is {name!r}, which is no Unicode; rename the file")
    elif unsafe_file_name(name):
        faults.append("unsafe file_name: it leaves the image folder; refused before opening")
    for key, value in (("width", width), ("height", height)):
        if value is None:
            faults.append(f"`{key}` missing")
        elif not is_side(value):
            faults.append(f"`{key}` is {value!r}; expected a positive number of pixels")
    if max_pixels is not None and not faults and width * height > max_pixels:
        faults.append(f"{width} x {height} pixels are more than data.max_image_pixels {max_pixels}")
    return faults
