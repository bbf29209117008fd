"""Panoptic Scene Graph annotations (psg.json, Yang et al., 2022): boxes and relations; masks are not read."""

from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.data.annotations import Annotations
from toolkit.data.image_sources import ImageSources
from toolkit.detectors.scene_graphs.readers.graphs import add_graph, empty_graphs

NUM_VAL_IMAGES = 1000
MAX_CLASSES = 100_000  # of a file that does not name them


def files_of(file: Path, split: str) -> list[Path]:
    """Return the one file, which has all splits."""
    return [file]


def annotations_of(files: list[Path], images: Path | ImageSources, split: str, num_val: int) -> Annotations:
    """Return the images of one split with their relations; category ids count from 0, as in the file. `images` is not
    used.

    test: the images of `test_image_ids`; val: the first `num_val` of the others; train: the rest. Raises BadInput for a
    file that is not as expected.
    """
    document = _checked(files[0])
    test = {str(image_id) for image_id in document["test_image_ids"]}
    entries = document["data"]
    if split == "test":
        chosen = [entry for entry in entries if str(entry["image_id"]) in test]
    else:
        others = [entry for entry in entries if str(entry["image_id"]) not in test]
        chosen = others[num_val:] if split == "train" else others[:num_val]
    names = [*document.get("thing_classes", []), *document.get("stuff_classes", [])]
    if not names:  # some files name their classes elsewhere
        ids = (box.get("category_id") for entry in entries for box in entry["annotations"])
        largest = max(filter(_is_class, ids), default=-1)
        names = [f"class {number}" for number in range(largest + 1)]
    annotations = empty_graphs(names, document["predicate_classes"])
    for entry in chosen:
        image = {
            "id": entry["image_id"],
            "file_name": entry.get("file_name"),
            "width": entry.get("width"),
            "height": entry.get("height"),
        }
        boxes = [(box.get("category_id"), _xywh(box.get("bbox"))) for box in entry["annotations"]]
        add_graph(annotations, image, boxes, entry["relations"])
    return annotations


def _checked(file: Path) -> dict:
    document = read_json(file)
    lists = [key for key in ("thing_classes", "stuff_classes") if key in document]
    faults = []
    for key in ("data", "predicate_classes", "test_image_ids", *lists):
        if key not in document:
            faults.append(f"key `{key}` missing")
        elif not isinstance(document[key], list):
            faults.append(f"key `{key}`: expected a list")
    if not faults:
        for number, entry in enumerate(document["data"]):
            faults += _entry_faults(entry, number)
    if faults:
        raise BadInput([f"{file}: {fault}" for fault in faults])
    return document


def _entry_faults(entry: object, number: int) -> list[str]:
    """Return the faults that keep an entry of `data` from being read at all; validation finds the rest."""
    if not isinstance(entry, dict):
        return [f"entry {number} of `data` is {str(entry)[:80]}; expected an object"]
    named = f"entry {number} of `data` (image {entry.get('image_id')})"
    faults = [f"{named}: key `{key}` missing" for key in ("image_id", "annotations", "relations") if key not in entry]
    lists = (
        ("annotations", dict, "objects"),
        ("relations", list, "[subject, object, predicate]"),
    )
    for key, kind, expected in lists:
        rows = entry.get(key, [])
        if not isinstance(rows, list):
            faults.append(f"{named}: `{key}` is {str(rows)[:80]}; expected a list of {expected}")
            continue
        wrong = [row for row in rows if not isinstance(row, kind) or kind is list and len(row) != 3]
        faults += [f"{named}: {key[:-1]} {str(row)[:80]}; expected {expected}" for row in wrong]
    return faults


def _is_class(number: object) -> bool:
    return isinstance(number, int) and 0 <= number < MAX_CLASSES


def _xywh(box: object) -> object:
    """Convert corners to width and height; an invalid box stays as it is, for validation to report."""
    if not isinstance(box, list) or len(box) != 4:
        return box
    if not all(isinstance(value, int | float) for value in box):
        return box
    left, top, right, bottom = box
    return [left, top, right - left, bottom - top]
