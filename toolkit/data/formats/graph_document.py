"""Relation data of other layouts: made a COCO document with relations once, checked, and cached as a table."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.data.check_files import rows_of_good_files
from toolkit.data.checks import settle, validate_document
from toolkit.data.places import Places, digest_of, open_places
from toolkit.data.table import TABLE_VERSION, DetectionTable, cache_root, open_table, write_table
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS


def read_graph_document(
    files: Sequence[Path],
    as_coco: Callable[[Path | Places], dict],
    image_dir: str | Path | Sequence[str],
    what: str,
    *,
    on_error: str = "raise",
    cache_dir: str | Path | None = None,
    check_images: bool | str = True,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> DetectionTable:
    """The table of a document, from the cache where files, images and options are those of before.

    Args:
        files: that the document is made of; their content is the key of the cache.
        as_coco: makes the document, with `rel_categories` and `rel_annotations`; it is told where the images lie.
        what: format, split and options in words: the name of the table and the rest of the key.
        others: as in `read_coco`.

    Raises:
        BadInput: a file that is not there or no JSON; what `read_coco` raises.
    """
    if missing := [f"{file}: no such annotation file" for file in files if not file.is_file()]:
        raise BadInput(missing)
    places = open_places(image_dir, must_exist=bool(check_images))
    key = hashlib.blake2b(f"{what} {TABLE_VERSION} {check_images} {max_image_pixels} {places.resolve()}".encode())
    for file in files:
        with open(file, "rb") as stream:
            key.update(hashlib.file_digest(stream, hashlib.blake2b).digest())
    cache_file = cache_root(cache_dir) / "tables" / f"{key.hexdigest()[:32]}.json"
    cached, name = open_table(cache_file), f"{files[0]} {what}"
    if cached and all(digest_of(place) == found for place, found in cached[1].items()):
        table = dataclasses.replace(cached[0], name=name)
    else:
        valid = validate_document(as_coco(places), str(files[0]), max_image_pixels)
        rows, found, checked = rows_of_good_files(valid.rows, valid.listed, places, check_images, max_image_pixels)
        table = write_table(
            rows,
            cache_file=cache_file,
            categories=valid.categories,
            predicates=valid.predicates,
            image_root=places.resolve(),
            problems=valid.problems + found,
            name=name,
            checked=checked,
        )
    table.max_image_pixels = max_image_pixels
    settle(table.problems, on_error, str(files[0]))
    return table


def read_json(file: Path, kind: type) -> dict | list:
    """The JSON object (kind dict) or list in a file. Raises BadInput."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(document, kind):
        raise BadInput(f"{file}: a JSON {type(document).__name__}; expected a {kind.__name__}")
    return document


class Document:
    """A COCO document with relations that grows image by image; ids of annotations count from 1."""

    def __init__(self, classes: Sequence[str], predicates: Sequence[str]):
        self.images: list[dict] = []
        self.annotations: list[dict] = []
        self.relations: list[dict] = []
        self.names = list(classes), list(predicates)

    def add(self, image: dict, boxes: Sequence[tuple], relations: Sequence[tuple]) -> None:
        """image: `id`, `file_name`, `width`, `height`. boxes: (class from 0, [x, y, width, height]). relations:
        (subject, object, predicate from 0), the first two places in `boxes`."""
        first = len(self.annotations) + 1
        self.images.append(image)
        for place, (label, bbox) in enumerate(boxes):
            self.annotations.append({"id": first + place, "image_id": image["id"], "category_id": label,
                                     "bbox": list(bbox), "iscrowd": 0})  # fmt: skip
        for subject, other, predicate in relations:
            self.relations.append({"image_id": image["id"], "subject_id": first + subject,
                                   "object_id": first + other, "predicate_id": predicate})  # fmt: skip

    def as_coco(self) -> dict:
        classes, predicates = ([{"id": number, "name": name} for number, name in enumerate(names)]
                               for names in self.names)  # fmt: skip
        return {"images": self.images, "annotations": self.annotations, "categories": classes,
                "rel_annotations": self.relations, "rel_categories": predicates}  # fmt: skip
