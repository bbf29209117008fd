"""COCO documents in memory, for the tests of checks: in columns, and checked."""

from toolkit.data.annotations import Annotations
from toolkit.data.checks import Checked, check


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


def checked(document: dict, file: str = "f.json") -> Checked:
    return check(columns_of(document), file)
