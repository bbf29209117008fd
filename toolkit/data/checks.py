"""Checks of annotations before the first step, which report every defect at once in plain sentences."""

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np

from toolkit.base.boxes import Boxes, Relations
from toolkit.base.errors import BadInput
from toolkit.data.annotations import Annotations, ImageRow, fits_int64, is_id, is_unicode, slashed, wrong_id
from toolkit.data.box_checks import check_boxes, is_side
from toolkit.data.relation_checks import check_relations
from toolkit.data.table import Category, Problem

MIN_EVIDENCE_BOXES = 10  # boxes that must leave their image as they are; fewer may be slips
TIMES_BETTER = 10  # boxes that leave their image as they are, for each that does in the other format
MIN_OVERSHOOT_SHARE = 0.1  # of its own side that a box must be outside to count, and
MIN_OVERSHOOT_PX = 2.0  # at least so many pixels: rounding and padding do not count as evidence
MAX_FRACTION = 1.01  # of boxes in fractions of the image, rounding included
MIN_SHARE_OF_FRACTIONS = 0.99  # of the boxes must be fractions; a few may be slips
MIN_IMAGE_SIDE_PX = 16  # pixels of an image in which boxes of one pixel are not objects
MAX_PLAUSIBLE_PX = 1e9  # pixels; larger values are not numbers of pixels
BOX_FORMATS = {
    "xyxy": ("corners [x1, y1, x2, y2]", ("x1", "y1", "x2 - x1", "y2 - y1")),
    "cxcywh": ("centre and size [cx, cy, width, height]", ("cx - width / 2", "cy - height / 2", "width", "height")),
    "xywh": ("[x, y, width, height]", ("x", "y", "width", "height")),
}
_READ_AS = ("xywh", "xyxy", "cxcywh")  # where several fit equally well, the first is named
MAX_FOLLOW_UPS = 3  # annotations with one undefined class that are named one by one
_NOT_DEFINED = re.compile(r"(category|attribute|predicate) \S.* is not defined$")
_SUSPICIOUS = re.compile(r"^/|\.\.|[\\:\0]")  # in every name that leaves a folder


@dataclass
class CheckedAnnotations:
    """The usable part of the annotations, and the problems found.

    images: in the order of the file; `boxes` and `relations` are those of these images. listed: all file names, also
    those of unusable images.
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
        """Return the arguments of `write_table`."""
        return {name: value for name, value in vars(self).items() if name != "listed"}

    def without(self, image_ids: Set) -> "CheckedAnnotations":
        """Return a copy without the images of these ids, and without their boxes and relations."""
        if not image_ids:
            return self
        kept = np.array([row.image_id not in image_ids for row in self.images], bool)
        return replace(
            self,
            images=[row for row in self.images if row.image_id not in image_ids],
            boxes=self.boxes.of_images(kept),
            relations=self.relations.of_images(kept),
        )


def check(
    annotations: Annotations, file: str, max_image_pixels: int | None = None, crowds: str = "ignore"
) -> CheckedAnnotations:
    """Check the annotations that a reader of any format has made.

    Boxes become xyxy, category ids contiguous from 0 in the order of the original ids. A record with an error is left
    out and reported; a repaired one is reported as a warning. A relation that is listed again is kept with a warning:
    it counts repeatedly in training and recall, as published numbers have it.

    Args:
        file: name of the data, for messages.
        max_image_pixels: images that have more pixels by the annotations cannot be used; None: not checked here.
        crowds: as of `Reading`.

    Raises:
        BadInput: the boxes are in another format than [x, y, width, height], so that nothing can be used; or some image
            ids are numbers and some are strings.
    """
    problems: list[Problem] = []
    if crowds == "objects":
        annotations.take_crowds_as_objects()
    annotations.images = [slashed(row) for row in annotations.images]
    categories, labels = _categories(annotations.categories, file, "category", problems)
    rows, unusable = _usable_images(annotations, file, max_image_pixels, problems)
    wrong = format_fault(annotations, rows)
    if wrong:
        raise BadInput(f"{file}: {wrong}")
    attributes, attribute_rows = _categories(annotations.attributes, file, "attribute", problems)
    boxes, index = check_boxes(annotations, file, rows, labels, attribute_rows, problems)
    predicates, predicate_rows = _categories(annotations.predicates, file, "predicate", problems)
    relations = check_relations(annotations.relations, file, index, predicate_rows, problems)
    problems[:] = _with_follow_ups_joined(problems, file)
    checked = CheckedAnnotations(
        images=list(rows.values()),
        boxes=boxes,
        relations=relations,
        categories=categories,
        predicates=tuple(predicate.name for predicate in predicates),
        attributes=tuple(attribute.name for attribute in attributes),
        problems=problems,
        listed={row.file_name for row in annotations.images if isinstance(row.file_name, str)},
    )
    checked = checked.without(unusable)
    if not attributes:
        return checked
    return replace(checked, boxes=_narrow(checked.boxes))


def _narrow(boxes: Boxes) -> Boxes:
    """Trim the attribute columns to the largest number that a box uses, at least one."""
    wide = boxes.extra["attributes"]
    counts = (wide > 0).sum(axis=1)
    most = max(1, counts.max(initial=0))
    return replace(boxes, extra={**boxes.extra, "attributes": wide[:, :most]})


def unsafe_file_name(file_name: str) -> bool:
    """Return whether a name could leave the image folder: absolute, on any system, or with `..` in it."""
    if not _SUSPICIOUS.search(file_name):  # parsing paths is slow
        return False
    windows = PureWindowsPath(file_name)
    parts = (*PurePosixPath(file_name).parts, *windows.parts)
    is_absolute = file_name.startswith("/") or bool(windows.drive or windows.root)
    return is_absolute or ".." in parts or "\0" in file_name


def _categories(entries: list, file: str, what: str, problems: list[Problem]) -> tuple[tuple[Category, ...], dict]:
    """Return (categories in the order of their ids, original id -> row)."""

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
            # Half of a surrogate pair, which no file can hold, becomes its number.
            name = entry["name"].encode("utf-8", "backslashreplace").decode()
            names[entry["id"]] = name
            if name != entry["name"]:
                report("warning", f"{what} {entry['id']}: name {entry['name']!r} is not Unicode; it is called {name!r}")
        elif entry["name"] == names[entry["id"]]:
            report("warning", f"{what} id {entry['id']} listed twice under one name; taken once")
        else:
            report("error", f"{what} id {entry['id']} used twice: {names[entry['id']]!r} and {entry['name']!r}")
    categories = []
    seen = set()
    by_id = sorted(names.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    for id_, name in by_id:
        if name in seen:
            name = f"{name} ({id_})"
            report("warning", f"{what} name {names[id_]!r} used twice; {what} {id_} is called {name!r}")
        seen.add(name)
        categories.append(Category(id_, name))
    row_of_id = {category.id: row for row, category in enumerate(categories)}
    return tuple(categories), row_of_id


def _with_follow_ups_joined(problems: list[Problem], file: str) -> list[Problem]:
    """Return the problems with one line for each undefined class, attribute or predicate that many entries use."""
    uses: dict[str, list[Problem]] = {}
    for problem in problems:
        match = _NOT_DEFINED.search(problem.message)
        if match:
            uses.setdefault(match[0], []).append(problem)
    joined = []
    for problem in problems:
        match = _NOT_DEFINED.search(problem.message)
        alike = uses[match[0]] if match else [problem]
        if len(alike) <= MAX_FOLLOW_UPS:
            joined.append(problem)
        elif problem is alike[0]:
            what = "relations" if match[1] == "predicate" else "annotations"
            message = f"{match[0]}; {len(alike)} {what} use it, the first in image {problem.image_id}"
            joined.append(Problem("error", file, None, None, message))
    return joined


def _usable_images(
    annotations: Annotations,
    file: str,
    max_pixels: int | None,
    problems: list[Problem],
) -> tuple[dict[int | str, ImageRow], set]:
    """Return (image id -> row, ids that cannot be used).

    Unusable images keep a row, so that their annotations are checked.
    """
    rows: dict[int | str, ImageRow] = {}
    unusable: set[int | str] = set()
    used_names: dict[str, int | str] = {}
    kinds = {type(row.image_id) for row in annotations.images if row.image_id is not None}
    if len(kinds) > 1:
        raise BadInput(f"{file}: some image ids are numbers and some are strings; expected one kind")
    for number, row in enumerate(annotations.images):
        if row.image_id is None:
            entry = annotations.odd_images[number]
            fault = wrong_id(entry, "id") if isinstance(entry, dict) else f"{entry!r} is not an object"
            problems.append(Problem("error", file, None, None, f"image entry {number}: {fault}"))
            continue
        image_id = row.image_id
        name = row.file_name
        faults = _image_faults(row, max_pixels)
        if not fits_int64(image_id):
            faults.append(f"image id {image_id} does not fit into 64 bits; write it as a string")
        source = name if isinstance(name, str) and name else file
        if image_id in rows:
            other = rows[image_id].file_name
            faults.append(f"image id {image_id} used twice, by {other!r} too")
            if image_id not in unusable:
                message = f"image id {image_id} used twice, by {name!r} too"
                problems.append(Problem("error", str(other), image_id, None, message))
        elif isinstance(name, str) and name in used_names:
            message = f"this file is image {used_names[name]} too; both are kept"
            problems.append(Problem("warning", name, image_id, None, message))
        else:
            used_names[source] = image_id
        if faults:
            unusable.add(image_id)
            problems += [Problem("error", source, image_id, None, fault) for fault in faults]
        rows.setdefault(image_id, row)
    return rows, unusable


def _image_faults(row: ImageRow, max_pixels: int | None) -> list[str]:
    faults = []
    name = row.file_name
    width = row.width
    height = row.height
    if not isinstance(name, str) or not name:
        faults.append("`file_name` missing" if name is None else f"`file_name` is {name!r}; expected a path")
    elif not is_unicode(name):
        faults.append(f"`file_name` is {name!r}, which is not Unicode; rename the file")
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


def format_fault(annotations: Annotations, images: Mapping[int | str, ImageRow]) -> str | None:
    """Return a sentence if all boxes seem to be in a wrong format, with the remedy; None if not, or for too few boxes.

    Corners, centres or fractions are noticed where COCO's [x, y, width, height] is expected. One box is ambiguous: [10,
    10, 40, 50] is valid in every format. Many are not: in the wrong format some leave their image, in the right one
    none does. A file whose boxes stay inside their images as COCO boxes is never questioned. Crowd regions and entries
    that cannot be read do not count.

    Args:
        images: rows by image id; boxes of other images do not count.
    """
    boxes, sizes = _readable(annotations, images)
    large = sizes.min(axis=1, initial=math.inf) >= MIN_IMAGE_SIDE_PX
    small = large & (np.abs(boxes) <= MAX_FRACTION).all(axis=1)
    if large.sum() >= MIN_EVIDENCE_BOXES and small.sum() >= MIN_SHARE_OF_FRACTIONS * large.sum():
        fractions = boxes[large]
        if (fractions % 1 == 0).all(axis=1).sum() < 0.5 * len(fractions):
            return _fractions(fractions)  # no number exceeds 1, and most are not whole: not objects in pixels
    doubtful = _outside(boxes, "xywh", sizes)
    if doubtful < MIN_EVIDENCE_BOXES:
        return None
    outside = {name: _outside(boxes, name, sizes) for name in ("xyxy", "cxcywh")}
    other = min(outside, key=outside.get)
    wrong = outside[other]
    if wrong * TIMES_BETTER > doubtful:
        return None
    called, formula = BOX_FORMATS[other]
    return (
        f"the boxes look like {called}, expected [x, y, width, height]: read as such {doubtful} of {len(boxes)} leave "
        f"their image, read as {called} {wrong or 'none'} would; write every bbox as [{', '.join(formula)}], or clip "
        "the boxes to their images if they are [x, y, width, height] after all"
    )


def _fractions(boxes: np.ndarray) -> str:
    one = np.ones((len(boxes), 2))
    outside = {name: _outside(boxes, name, one, 0.01) for name in _READ_AS}
    name = min(_READ_AS, key=outside.get)
    called, formula = BOX_FORMATS[name]
    others = [BOX_FORMATS[other][0] for other in _READ_AS if other != name and outside[other] == outside[name]]
    if others:
        called += f" (or {' or '.join(others)}: these boxes cannot tell)"
    products = []
    for part, side in zip(formula, "WHWH", strict=True):
        factor = f"({part})" if " " in part else part
        products.append(f"{factor} * {side}")
    written = ", ".join(products)
    return (
        f"the boxes have numbers from 0 to 1 ({len(boxes)} boxes), which look like fractions of the image, {called}; "
        f"expected pixels [x, y, width, height]: write every bbox as [{written}] with the image's width W and height H"
    )


def _readable(annotations: Annotations, images: Mapping[int | str, ImageRow]) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, 4) numbers as the file has them and (N, 2) width and height of their images, of all readable boxes."""
    sizes_by_id = {id_: (row.width, row.height) for id_, row in images.items() if _is_size(row)}
    unknown = (math.nan, math.nan)
    by_code = np.array([sizes_by_id.get(id_, unknown) for id_ in annotations.image_ids.values], np.float64)
    sizes = by_code.reshape(-1, 2)[np.array(annotations.image, np.int32)]
    boxes = np.frombuffer(annotations.xywh).reshape(-1, 4)
    is_crowd = np.array(annotations.crowd, np.int8) != 0
    kept = ~is_crowd & ~np.isnan(sizes[:, 0])
    kept &= (np.abs(boxes) < MAX_PLAUSIBLE_PX).all(axis=1)
    kept[list(annotations.faults["bbox"])] = False
    if kept.all():
        return boxes, sizes
    return boxes[kept], sizes[kept]


def _is_size(row: ImageRow) -> bool:
    return all(isinstance(side, int | float) and 0 < side < MAX_PLAUSIBLE_PX for side in (row.width, row.height))


def _outside(boxes: np.ndarray, read_as: str, sizes: np.ndarray, rounding: float = MIN_OVERSHOOT_PX) -> int:
    """Count the boxes that, read in a format, have no extent or leave their image by more than a slip."""
    low = boxes[:, :2]
    high = boxes[:, 2:]
    if read_as == "xywh":
        high = low + boxes[:, 2:]
    elif read_as == "cxcywh":
        low = boxes[:, :2] - boxes[:, 2:] / 2
        high = boxes[:, :2] + boxes[:, 2:] / 2
    sides = high - low
    slip = np.maximum(MIN_OVERSHOOT_SHARE * sides, rounding)
    leaves = (low < -slip) | (high > sizes + slip)
    is_wrong = leaves | (sides <= 0)
    return int(is_wrong.any(axis=1).sum())
