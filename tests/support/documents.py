"""COCO documents in memory, for the tests of data: as files, in columns, and checked."""

import json
from pathlib import Path

import pytest
from places import ASSETS, BCCD

from toolkit.data.annotations import Annotations
from toolkit.data.checks import CheckedAnnotations, check

DIRTY = ASSETS / "dirty"
needs_bccd = pytest.mark.skipif(not BCCD.is_dir(), reason="no BCCD data: set DETECTION_TOOLKIT_BCCD to its folder")


def document(**changes) -> dict:
    """An image with a box, in COCO's form."""
    base = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 20, "height": 10}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 0, "bbox": [1, 1, 5, 5]}],
        "categories": [{"id": 0, "name": "cell"}],
    }
    return base | changes


def box(**changes) -> dict:
    """The annotation of `document` with other values; "absent" leaves a key out."""
    entry = document()["annotations"][0] | changes
    return {key: value for key, value in entry.items() if value != "absent"}


def image(**changes) -> dict:
    """As `box`, of its image."""
    entry = document()["images"][0] | changes
    return {key: value for key, value in entry.items() if value != "absent"}


def write(folder: Path, content: object) -> Path:
    (folder / "f.json").write_text(json.dumps(content))
    return folder / "f.json"


def row_of(image_id, boxes, size_wh=(40, 30), labels=None, relations=(), **columns) -> dict:
    """A row of a table as `write_rows` takes it, with boxes xyxy; classes count the boxes unless `labels` are given."""
    numbers = list(range(len(boxes)))
    objects = {
        "id": numbers,
        "bbox": boxes,
        "category": numbers if labels is None else labels,
    }
    objects |= {"area": [100.0] * len(boxes), "iscrowd": [0] * len(boxes)} | columns
    ends = zip(*relations, strict=True) if len(relations) else ([], [], [])
    related = dict(zip(("subject", "object", "predicate"), ends, strict=True))
    row = {
        "image_id": image_id,
        "file_name": f"{image_id}.png",
        "width": size_wh[0],
        "height": size_wh[1],
    }
    return row | {"objects": objects, "relations": related}


def columns_of(document: dict) -> Annotations:
    columns = Annotations(list(document["categories"]))
    columns.predicates = document.get("rel_categories", [])
    columns.attributes = document.get("attribute_categories", [])
    for entry in document["images"]:
        columns.add_image(entry)
    for entry in document["annotations"]:
        columns.add(entry)
    for entry in document.get("rel_annotations", []):
        columns.relations.add(entry)
    for entry in document.get("relations", []):
        columns.relations.add_triplet(entry)
    return columns


def checked(document: dict, file: str = "f.json") -> CheckedAnnotations:
    return check(columns_of(document), file)
