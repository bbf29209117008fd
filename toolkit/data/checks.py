"""Every defect of a COCO-shaped document, found at once and before the first step, in words."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

from toolkit.data.box_formats import BoxFormats
from toolkit.data.table import OBJECT_TYPES, RELATION_TYPES, Category, Problem
from toolkit.errors import BadInput

logger = logging.getLogger(__name__)

CLIP_TOLERANCE = 0.01  # pixels; COCO rounds coordinates to two places, which alone can put an edge this far outside
LISTED_ERRORS = 200
LARGEST_AREA = 3e38  # the table's are float32
LARGEST_SIDE = 2**31  # pixels
_SUSPICIOUS = re.compile(r"^/|\.\.|[\\:\0]")  # in every name that leaves a folder
LARGEST_COORDINATE = 1e15  # pixels; sums and products of such ones stay finite


@dataclass
class Document:
    """A validated document: usable images as rows for `write_table`, classes, predicates and what was wrong."""

    rows: list[dict]
    categories: tuple[Category, ...]
    predicates: tuple[str, ...]
    attributes: tuple[str, ...]
    attribute_columns: int  # ids of each object, padding included; 0: no attributes
    problems: list[Problem]
    listed: set[str]  # every file_name of the document, those of unusable records too


def validate_document(
    document: object, file: str, max_image_pixels: int | None = None, formats: BoxFormats | None = None
) -> Document:
    """Checks a parsed COCO document (`images`, `annotations`, `categories`, optional `rel_*`, `attribute_categories`)
    and makes rows of it.

    Relations are `rel_annotations`, or triplets in `relations`; see `read_coco`. A repeated one is kept with a warning:
    it counts repeatedly in training and recall, as published numbers have it.
    Boxes become xyxy, category ids contiguous from 0 in the order of the original ids. A record with an error is left
    out of the rows and reported; a repaired one is reported as a warning. Unknown keys are ignored.
    max_image_pixels: images that are said to be larger cannot be used; None: the images themselves will tell.
    formats: takes in the boxes of one part of a file, to be judged with those of the others; None: this is all of it.
    Raises BadInput for a document without the three lists, and for one whose boxes are in another format than COCO's,
    since nothing in it can be used.
    """
    _check_top(document, file)
    problems: list[Problem] = []
    categories, labels = _categories(document["categories"], file, "category", problems)
    rows, unusable = _images(document["images"], file, max_image_pixels, problems)
    evidence = BoxFormats() if formats is None else formats
    evidence.add(document["annotations"], rows)
    if formats is None and (wrong := evidence.fault()):
        raise BadInput(f"{file}: {wrong}")
    attributes, attribute_rows = _categories(document.get("attribute_categories") or [], file, "attribute", problems)
    places = _annotations(document["annotations"], file, rows, labels, attribute_rows, problems)
    predicates, predicate_rows = _categories(document.get("rel_categories") or [], file, "predicate", problems)
    relations = [*(document.get("rel_annotations") or []), *map(_as_entry, document.get("relations") or [])]
    _relations(relations, file, rows, places, predicate_rows, problems)
    usable = [row for image_id, row in rows.items() if image_id not in unusable]
    listed = {entry["file_name"] for entry in document["images"]
              if isinstance(entry, dict) and isinstance(entry.get("file_name"), str)}
    names = (tuple(entry.name for entry in entries) for entries in (predicates, attributes))
    columns = _pad_attributes(usable) if attributes else 0
    return Document(usable, categories, *names, columns, problems, listed)


def settle(problems: list[Problem], on_error: str, file: str) -> None:
    """Raises BadInput listing every error when `on_error` is "raise"; logs how many there were when it is "drop"."""
    errors = [problem for problem in problems if problem.severity == "error"]
    warned = sum(problem.severity == "warning" for problem in problems)
    if errors and on_error == "raise":
        listed = [str(problem) for problem in errors[:LISTED_ERRORS]]
        if len(errors) > len(listed):
            listed.append(f"... and {len(errors) - len(listed)} more; scripts/check_data.py lists them all")
        raise BadInput(
            [f"{file}: {len(errors)} errors (--data.on_error drop leaves these records out):", *listed]
        )
    if errors or warned:
        logger.info("%s: %d unusable records dropped, %d warnings", file, len(errors), warned)


def unsafe_file_name(file_name: str) -> bool:
    """True for a name that could leave the image folder: absolute, of any system, or with `..` in it."""
    if not _SUSPICIOUS.search(file_name):  # parsing paths is slow
        return False
    parts = (*PurePosixPath(file_name).parts, *PureWindowsPath(file_name).parts)
    windows = PureWindowsPath(file_name)
    return ".." in parts or "\0" in file_name or file_name.startswith("/") or bool(windows.drive or windows.root)


def _check_top(document: object, file: str) -> None:
    if not isinstance(document, dict):
        hint = " (a list is the form of a results file)" if isinstance(document, list) else ""
        kind = {list: "list", str: "string", int: "number", float: "number", bool: "truth value"}.get(
            type(document), "null"
        )
        raise BadInput(f"{file}: expected an object with `images`, `annotations`, `categories`; found a {kind}{hint}")
    keys = ("images", "annotations", "categories")
    faults = [f"{file}: key `{key}` missing" for key in keys if key not in document]
    for key in (*keys, "rel_categories", "rel_annotations", "relations", "attribute_categories"):
        if key in document and not isinstance(document[key], list):
            faults.append(f"{file}: `{key}` is a {type(document[key]).__name__}; expected a list")
    for key in ("images", "categories"):
        if document.get(key) == []:
            faults.append(f"{file}: `{key}` is empty")
    if faults:
        raise BadInput(faults)


def _is_id(value: object) -> bool:
    if isinstance(value, str):
        return value != "" and _is_unicode(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _fits_int64(id_: int | str) -> bool:
    return isinstance(id_, str) or -(2**63) <= id_ < 2**63


def _wrong_id(record: Mapping, key: str) -> str:
    if key not in record:
        return f"`{key}` missing"
    return f"`{key}` is {record[key]!r}; expected an integer or a string"


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
        elif not _is_id(entry.get("id")):
            report("error", f"{what} {number}: {_wrong_id(entry, 'id')}")
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


def _images(entries: list, file: str, max_pixels: int | None, problems: list[Problem]) -> tuple[dict, set]:
    """(image id -> row, ids that cannot be used). Unusable ones keep a row, so that their annotations are checked."""
    rows: dict[int | str, dict] = {}
    unusable: set[int | str] = set()
    used_names: dict[str, int | str] = {}
    kinds = {type(entry.get("id")) for entry in entries if isinstance(entry, dict) and _is_id(entry.get("id"))}
    if len(kinds) > 1:
        raise BadInput(f"{file}: some image ids are numbers and some are strings; expected one kind")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            fault = _wrong_id(entry, "id") if isinstance(entry, dict) else f"{entry!r} is no object"
            problems.append(Problem("error", file, None, None, f"image entry {number}: {fault}"))
            continue
        image_id, name = entry["id"], entry.get("file_name")
        faults = _image_faults(entry, max_pixels)
        if not _fits_int64(image_id):
            faults.append(f"image id {image_id} does not fit into 64 bits; write it as a string")
        shown = name if isinstance(name, str) and name else file
        if image_id in rows:
            other = rows[image_id]["file_name"]
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
        rows.setdefault(image_id, _empty_row(entry))
    return rows, unusable


def _image_faults(entry: Mapping, max_pixels: int | None) -> list[str]:
    faults = []
    name = entry.get("file_name")
    if not isinstance(name, str) or not name:
        faults.append("`file_name` missing" if name is None else f"`file_name` is {name!r}; expected a path")
    elif not _is_unicode(name):
        faults.append(f"`file_name` is {name!r}, which is no Unicode; rename the file")
    elif unsafe_file_name(name):
        faults.append("unsafe file_name: it leaves the image folder; refused before opening")
    for key in ("width", "height"):
        value = entry.get(key)
        if value is None:
            faults.append(f"`{key}` missing")
        elif not _is_side(value):
            faults.append(f"`{key}` is {value!r}; expected a positive number of pixels")
    width, height = entry.get("width"), entry.get("height")
    if max_pixels is not None and not faults and width * height > max_pixels:
        faults.append(f"{width} x {height} pixels are more than data.max_image_pixels {max_pixels}")
    return faults


def _is_side(value: object) -> bool:
    """Whether `value` is a number of pixels, as large as a 32-bit one at most."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= LARGEST_SIDE and not value % 1


def _is_unicode(text: str) -> bool:
    """False for text with halves of surrogate pairs, which no file and no table can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _empty_row(entry: Mapping) -> dict:
    return {
        "image_id": entry["id"],
        "file_name": entry.get("file_name"),
        "width": entry.get("width"),
        "height": entry.get("height"),
        "objects": {name: [] for name in OBJECT_TYPES},
        "relations": {name: [] for name in RELATION_TYPES},
    }


def _annotations(
    entries: list, file: str, rows: dict, labels: dict, attributes: dict, problems: list[Problem]
) -> dict:
    """Fills the rows' objects; returns annotation id -> (image id, row among its objects), -1 for a dropped one."""
    times: dict[int, int] = {}
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            times[entry["id"]] = times.get(entry["id"], 0) + 1
    places: dict[int, tuple[int | str, int]] = {}
    bereft: dict[int | str, int] = {}  # image id -> annotations dropped
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            problems.append(Problem("error", file, None, None, f"annotation entry {number}: {entry!r} is no object"))
            continue
        id_, image_id = entry.get("id"), entry.get("image_id")
        row = rows.get(image_id) if _is_id(image_id) else None
        box, faults, repairs = _box(entry.get("bbox"), row) if "bbox" in entry else (None, ["`bbox` missing"], [])
        faults += _annotation_faults(entry, number, times, labels, row is not None)
        faults += _attribute_faults(entry, attributes)
        if faults or repairs:
            shown = row["file_name"] if row and isinstance(row["file_name"], str) else file
            for severity, messages in (("error", faults), ("warning", repairs)):
                problems.extend(Problem(severity, shown, image_id, id_, message) for message in messages)
        if faults:
            if row is not None:
                bereft[image_id] = bereft.get(image_id, 0) + 1
            if isinstance(id_, int):
                places[id_] = (image_id, -1)
            continue
        objects = row["objects"]
        places[id_] = (image_id, len(objects["id"]))
        objects["id"].append(id_)
        objects["bbox"].append(box)
        objects["category"].append(labels[entry["category_id"]])
        objects["area"].append(_area(entry, box, bool(repairs)))
        objects["iscrowd"].append(int(entry.get("iscrowd", 0)))
        if attributes:
            ids = dict.fromkeys(entry.get("attribute_ids", ()))
            objects.setdefault("attributes", []).append([attributes[id_] + 1 for id_ in ids])
    for image_id, count in bereft.items():
        if not rows[image_id]["objects"]["id"]:
            message = f"none of its {count} annotations is usable; with on_error drop it becomes a background image"
            problems.append(Problem("warning", str(rows[image_id]["file_name"]), image_id, None, message))
    return places


def _annotation_faults(entry: Mapping, number: int, times: Mapping, labels: Mapping, has_image: bool) -> list[str]:
    """What is wrong with an annotation, its box apart. times: how often each annotation id is used."""
    faults = []
    id_, image_id, category = entry.get("id"), entry.get("image_id"), entry.get("category_id")
    if not isinstance(id_, int) or isinstance(id_, bool):
        faults.append(f"annotation entry {number}: {_wrong_id(entry, 'id').replace(' or a string', '')}")
    elif not _fits_int64(id_):
        faults.append(f"annotation id {id_} does not fit into 64 bits")
    elif times[id_] > 1:
        often = "twice" if times[id_] == 2 else f"{times[id_]} times"
        faults.append(f"annotation id {id_} used {often}; this one has bbox {entry.get('bbox')}")
    if not has_image:
        faults.append(f"image {image_id!r} does not exist" if _is_id(image_id) else _wrong_id(entry, "image_id"))
    if not _is_id(category):
        faults.append(_wrong_id(entry, "category_id"))
    elif category not in labels:
        faults.append(f"category {category!r} is not defined")
    if entry.get("iscrowd", 0) not in (0, 1):
        faults.append(f"`iscrowd` is {entry['iscrowd']!r}; expected 0 or 1")
    return faults


def _attribute_faults(entry: Mapping, attributes: Mapping) -> list[str]:
    """attributes: row of each id; none: the document has no attributes, and `attribute_ids` is an unknown key."""
    ids = entry.get("attribute_ids", [])
    if not attributes:
        return []
    if not isinstance(ids, list):
        return [f"`attribute_ids` is {ids!r}; expected a list of ids of `attribute_categories`"]
    return [f"attribute {id_!r} is not defined" for id_ in ids if not _is_id(id_) or id_ not in attributes]


def _pad_attributes(rows: list[dict]) -> int:
    """Fills the attribute ids of every object up with 0 to one length, which is returned."""
    lists = [row["objects"].setdefault("attributes", []) for row in rows]
    columns = max((len(ids) for of_image in lists for ids in of_image), default=0) or 1
    for of_image in lists:
        of_image[:] = [ids + [0] * (columns - len(ids)) for ids in of_image]
    return columns


def _box(bbox: object, row: Mapping | None) -> tuple[tuple[float, ...] | None, list[str], list[str]]:
    """(xyxy inside the image, faults, repairs) of a COCO [x, y, width, height]."""
    if not isinstance(bbox, list | tuple):
        return None, [f"bbox is {bbox!r}; expected 4 numbers"], []
    if len(bbox) != 4:
        return None, [f"bbox needs 4 numbers, it has {len(bbox)}"], []
    for value in bbox:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None, [f"bbox {bbox!r} holds something that is no number"], []
    x, y, w, h = bbox
    largest = LARGEST_COORDINATE  # compared, not converted: a number of 400 digits has no float
    if not (-largest < x < largest and -largest < y < largest and -largest < w < largest and -largest < h < largest):
        return None, [f"non-finite coordinate in bbox {list(bbox)}"], []
    if w < 0 or h < 0:
        return None, [f"negative {'width' if w < 0 else 'height'} in bbox {list(bbox)}"], []
    if w == 0 or h == 0:
        return None, [f"zero area: bbox {list(bbox)}"], []
    if row is None or _bad_size(row):
        return (x, y, x + w, y + h), [], []
    width, height = row["width"], row["height"]
    if x >= 0 and y >= 0 and x + w <= width and y + h <= height:
        return (x, y, x + w, y + h), [], []
    x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    if x2 <= x1 or y2 <= y1:
        return None, [f"bbox {list(bbox)} lies outside the image of {width} x {height}"], []
    if max(x1 - x, y1 - y, x + w - x2, y + h - y2) <= CLIP_TOLERANCE:
        return (x1, y1, x2, y2), [], []
    clipped = [x1, y1, x2 - x1, y2 - y1]
    return (x1, y1, x2, y2), [], [f"bbox {list(bbox)} exceeds the image of {width} x {height}; clipped to {clipped}"]


def _bad_size(row: Mapping) -> bool:
    return not (_is_side(row["width"]) and _is_side(row["height"]))


def _area(entry: Mapping, box: tuple[float, ...], clipped: bool) -> float:
    """The annotation's own area (of the mask, in COCO); the box's where there is none or it was the clipped box's."""
    area = entry.get("area")
    own = isinstance(area, int | float) and not isinstance(area, bool) and 0 < area < LARGEST_AREA
    if own and not (clipped and math.isclose(area, entry["bbox"][2] * entry["bbox"][3], rel_tol=1e-6)):
        return float(area)
    return float((box[2] - box[0]) * (box[3] - box[1]))


def _as_entry(triplet: object) -> object:
    """A row [subject id, object id, predicate id] of `relations` as an entry of `rel_annotations`."""
    if not isinstance(triplet, list) or len(triplet) != 3:
        return triplet
    return dict(zip(("subject_id", "object_id", "predicate_id"), triplet, strict=True))


def _relations(entries: list, file: str, rows: dict, places: dict, predicates: dict, problems: list[Problem]) -> None:
    """Fills the rows' relations. One whose subject or object was dropped goes with it: that error is listed already."""
    seen: set[tuple] = set()
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            fault = f"{entry!r} is neither an object nor [subject id, object id, predicate id]"
            problems.append(Problem("error", file, None, None, f"relation entry {number}: {fault}"))
            continue
        faults = []
        ends = {}
        for key in ("subject_id", "object_id"):
            id_ = entry.get(key)
            ends[key] = places.get(id_) if isinstance(id_, int) else None
            if ends[key] is None:
                faults.append(f"annotation {id_!r} does not exist" if key in entry else f"`{key}` missing")
        predicate = entry.get("predicate_id")
        if not _is_id(predicate) or predicate not in predicates:
            faults.append(f"predicate {predicate!r} is not defined" if "predicate_id" in entry
                          else "`predicate_id` missing")
        if not faults:
            (subject_image, subject), (object_image, object_) = ends["subject_id"], ends["object_id"]
            if subject_image != object_image:
                faults.append(f"subject is in image {subject_image}, object in image {object_image}")
            elif entry.get("image_id", subject_image) != subject_image:
                faults.append(f"`image_id` is {entry['image_id']!r}, subject and object are in image {subject_image}")
            elif subject == object_ != -1:
                faults.append("subject and object are one annotation")
            elif subject >= 0 and object_ >= 0:
                relations = rows[subject_image]["relations"]
                relations["subject"].append(subject)
                relations["object"].append(object_)
                relations["predicate"].append(predicates[predicate])
                triplet = (entry["subject_id"], entry["object_id"], predicate)
                if triplet in seen:
                    message = f"relation {list(triplet)} (subject, object, predicate) is listed again; kept"
                    problems.append(Problem("warning", file, subject_image, None, message))
                seen.add(triplet)
        name = f"relation {entry.get('id', f'entry {number}')}"
        problems.extend(Problem("error", file, entry.get("image_id"), None, f"{name}: {fault}") for fault in faults)
