"""Panoptic Scene Graph annotations (psg.json, Yang et al., 2022): boxes and relations; masks are not read."""

from pathlib import Path

from toolkit.data.annotations import Annotations
from toolkit.data.image_sources import ImageSources
from toolkit.errors import BadInput
from toolkit.scene_graphs.readers.graphs import empty_graphs, read_json

NUM_VAL_IMAGES = 1000


def files_of(file: Path, split: str) -> list[Path]:
    return [file]


def _checked(file: Path) -> dict:
    document = read_json(file, dict)
    if missing := [key for key in ("data", "predicate_classes", "test_image_ids") if key not in document]:
        raise BadInput([f"{file}: key `{key}` missing" for key in missing])
    if faults := [fault for number, entry in enumerate(document["data"]) for fault in _entry_faults(entry, number)]:
        raise BadInput([f"{file}: {fault}" for fault in faults])
    return document


def annotations_of(files: list[Path], images: Path | ImageSources, split: str, num_val: int) -> Annotations:
    """The images of one split with their relations; category ids stay 0-based, as in the file.

    test: the images of `test_image_ids`; val: the first `num_val` of the others; train: the rest.
    """
    document = _checked(files[0])
    test = {str(image_id) for image_id in document["test_image_ids"]}
    others = [entry for entry in document["data"] if str(entry["image_id"]) not in test]
    if split == "test":
        chosen = [entry for entry in document["data"] if str(entry["image_id"]) in test]
    else:
        chosen = others[num_val:] if split == "train" else others[:num_val]
    names = [*document.get("thing_classes", []), *document.get("stuff_classes", [])]
    if not names:  # some files name their classes elsewhere
        highest = max((a["category_id"] for e in document["data"] for a in e["annotations"]), default=-1)
        names = [f"class {number}" for number in range(highest + 1)]
    graphs = empty_graphs(names, document["predicate_classes"])
    for entry in chosen:
        image_id, annotations = entry["image_id"], entry["annotations"]
        graphs.add_image({"id": image_id} | {k: entry.get(k) for k in ("file_name", "width", "height")})
        first, count = len(graphs) + 1, len(annotations)
        for position, annotation in enumerate(annotations):
            graphs.add(_annotation(annotation, image_id, first + position))
        for subject, object_, predicate in entry["relations"]:
            ends = [  # a position that is not there becomes an id that is not there, which the check then quotes
                first + end if isinstance(end, int) and 0 <= end < count else f"at position {end} of {count}"
                for end in (subject, object_)
            ]
            graphs.relations.add({"image_id": image_id, "subject_id": ends[0], "object_id": ends[1],
                                 "predicate_id": predicate})  # fmt: skip
    return graphs


def _entry_faults(entry: object, number: int) -> list[str]:
    """Faults that make an entry of `data` unreadable; validation finds the others."""
    if not isinstance(entry, dict):
        return [f"entry {number} of `data` is {entry!r}; expected an object"]
    missing = [key for key in ("image_id", "annotations", "relations") if key not in entry]
    relations = [row for row in entry.get("relations", []) if not isinstance(row, list) or len(row) != 3]
    named = f"entry {number} of `data` (image {entry.get('image_id')})"
    faults = [f"{named}: key `{key}` missing" for key in missing]
    return faults + [f"{named}: relation {row!r}; expected [subject, object, predicate]" for row in relations]


def _annotation(annotation: dict, image_id: int | str, annotation_id: int) -> dict:
    """Corners become width and height; a box that is none stays as it is, for validation to report."""
    box = annotation.get("bbox")
    if isinstance(box, list) and len(box) == 4 and all(isinstance(value, int | float) for value in box):
        box = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
    ids = {"id": annotation_id, "image_id": image_id, "category_id": annotation.get("category_id")}
    return ids | {"bbox": box, "iscrowd": 0}
