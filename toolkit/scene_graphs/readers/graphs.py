"""Relation data of other layouts: read into columns once, checked, and cached as a table."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.data.annotations import Annotations
from toolkit.data.check_files import with_good_files
from toolkit.data.checks import Checked, check
from toolkit.data.image_sources import ImageSources, open_sources
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cached_table, file_digest, write_table
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS


def read_graphs(
    files: Sequence[Path],
    read: Callable[[Path | ImageSources], Annotations | Checked],
    image_dir: str | Path | Sequence[str],
    what: str,
    *,
    key: Sequence[object] = (),
    on_error: str = "raise",
    cache_dir: str | Path | None = None,
    check_images: bool | str = True,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> DetectionTable:
    """The table of images with relations, from the cache where files, images and options are those of before.

    Args:
        files: that the data are made of; their content is the key of the cache.
        read: reads them; it is told where the images lie. What it has not checked itself is checked here.
        what: format, split and options in words, for the name of the table. key: the same for the cache, where it is
            more than `what`.
        others: as in `read_coco`.

    Raises:
        BadInput: a file that is not there or no JSON; what `read_coco` raises.
    """
    if missing := [f"{file}: no such annotation file" for file in files if not file.is_file()]:
        raise BadInput(missing)
    places, name = open_sources(image_dir, must_exist=bool(check_images)), f"{files[0]} {what}"

    def make(cache_file: Path) -> DetectionTable:
        annotations = read(places)
        checked = annotations
        if not isinstance(checked, Checked):
            checked = check(annotations, str(files[0]), max_image_pixels)
        good, digests = with_good_files(checked, places, check_images, max_image_pixels)
        location = {"cache_file": cache_file, "image_root": places.resolve()}
        return write_table(**good.columns(), **location, name=name, checked=digests)

    parts = [*(key or [what]), check_images, places.resolve(), *map(file_digest, files)]
    checking = {"on_error": on_error, "max_image_pixels": max_image_pixels}
    return cached_table(parts, make, name=name, cache_dir=cache_dir, **checking)


def read_json(file: Path, kind: type) -> dict | list:
    """The JSON object (kind dict) or list in a file. Raises BadInput."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(document, kind):
        raise BadInput(f"{file}: a JSON {type(document).__name__}; expected a {kind.__name__}")
    return document


def empty_graphs(classes: Sequence[str], predicates: Sequence[str]) -> Annotations:
    """No images yet; ids of classes and predicates count from 0."""
    annotations = Annotations([{"id": number, "name": name} for number, name in enumerate(classes)])
    annotations.predicates = [{"id": number, "name": name} for number, name in enumerate(predicates)]
    return annotations


def add_graph(to: Annotations, image: dict, boxes: Sequence[tuple], relations: Sequence[tuple]) -> None:
    """One image with its boxes and relations; ids of annotations count from 1.

    image: `id`, `file_name`, `width`, `height`. boxes: (class from 0, [x, y, width, height]). relations: (subject,
    object, predicate from 0), the first two places in `boxes`.
    """
    first = len(to) + 1
    to.add_image(image)
    for position, (label, xywh) in enumerate(boxes):
        to.add({"id": first + position, "image_id": image["id"], "category_id": label, "bbox": list(xywh)})
    for subject, other, predicate in relations:
        to.relations.add({"image_id": image["id"], "subject_id": first + subject, "object_id": first + other,
                          "predicate_id": predicate})  # fmt: skip
