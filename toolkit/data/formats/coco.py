"""Reads COCO annotation files, with or without relations, item by item into columns whatever their size; writes
them."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from toolkit.boxes import Boxes, Relations
from toolkit.data.annotations import Annotations, ImageRow, RelationColumns
from toolkit.data.check_files import find_image_root, with_good_files
from toolkit.data.checks import check
from toolkit.data.formats.json_stream import Whole, items_of, stream_lists
from toolkit.data.image_sources import ImageSources, open_sources
from toolkit.data.table import DetectionTable, LabelledImages, Problem
from toolkit.data.table_cache import cached_table, file_digest, write_table
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS, write_text_atomic
from toolkit.imports import uncollected

AT_ONCE = 2048  # annotations that wait for their columns
LISTS = ("images", "annotations", "categories")
OTHER_LISTS = ("rel_categories", "rel_annotations", "relations", "attribute_categories")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_coco(
    annotation_file: str | Path,
    image_dir: str | Path | Sequence[str] | ImageSources | None = None,
    *,
    on_error: str = "raise",
    cache_dir: str | Path | None = None,
    check_images: bool | str = True,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    siblings: Sequence[Path] = (),
) -> DetectionTable:
    """Reads a COCO `instances` file (polygons and masks are not kept) into a memory-mapped DetectionTable.

    image_dir: what `file_name` is relative to, as `open_sources` takes it; None looks near the annotation file.
    on_error: "raise" -> BadInput with every defect; "drop" -> unusable images and annotations are left out.
    check_images: True, "full" (decode each), "header", or False (the files are not looked at).
    max_image_pixels: an image with more of them cannot be used, and is refused before it is decoded.
    siblings: annotation files of other splits, whose images may lie in the same folder.
    The table and the verdict are cached by the content of the JSON, the options, and the names, sizes and times of
    the images, so that a second start reads neither. `rel_categories` and `rel_annotations`, or triplets `relations`
    (rows of subject annotation id, object annotation id, predicate id), become `relations`; `attribute_ids` of
    annotations, ids of `attribute_categories`, become `attributes`.
    """
    if on_error not in ("raise", "drop"):
        raise BadInput(f"on_error is {on_error!r}; expected 'raise' or 'drop'")
    if check_images not in (True, False, "full", "header"):
        raise BadInput(f"check_images is {check_images!r}; expected True, False, 'full' or 'header'")
    file = Path(annotation_file).expanduser()
    image_dir = open_sources(image_dir)
    place = f"in {image_dir.resolve()}" if image_dir else f"near {file.resolve()}"
    return cached_table(
        ["coco", check_images, place, file_digest(file)],
        lambda cache_file: _read(file, image_dir, check_images, max_image_pixels, cache_file, siblings),
        name=str(file), cache_dir=cache_dir, on_error=on_error, max_image_pixels=max_image_pixels,
    )  # fmt: skip


def read_annotations(file: Path) -> Annotations:
    """What a COCO file says, in columns: 66 bytes for each box. Raises BadInput for what is no such file."""
    lists: dict[str, object] = {}
    found, triplets = Annotations(), RelationColumns()
    add = {"images": found.add_image, "rel_annotations": found.relations.add,
           "relations": triplets.add_triplet, "categories": found.categories.append,
           "rel_categories": found.predicates.append, "attribute_categories": found.attributes.append}  # fmt: skip
    waiting: list = []  # annotations
    for key, item in stream_lists(file):
        if isinstance(item, Whole):
            lists[key] = item.value
        elif key == "annotations":
            waiting.append(item)
            if len(waiting) == AT_ONCE:
                found.add_all(waiting)
                waiting = []
        elif key in add:
            lists.setdefault(key, [item])  # not empty
            add[key](item)
    if waiting or len(found):
        lists["annotations"] = [None]
    found.add_all(waiting)
    _check_lists(lists, str(file))
    found.relations.extend(triplets)
    return found


def listed_names(annotation_file: Path) -> Iterator[str]:
    """File names of the images of a COCO file; what is no name, or no COCO file, is passed over."""
    try:
        for _, item in items_of(annotation_file, ("images",)):
            if isinstance(item, dict) and isinstance(item.get("file_name"), str):
                yield item["file_name"]
    except (BadInput, OSError):  # said where that split is read
        return


def write_coco(labelled: LabelledImages, path: str | Path) -> None:
    """Writes a COCO file with the original ids of images and categories, every number to its last bit.

    Annotated boxes become a file of images, annotations, categories, relations and attributes; boxes with scores COCO's
    list of results, `{image_id, category_id, bbox [x, y, width, height], score}`, a line for each image.
    """
    text = json.dumps(_document(labelled)) if labelled.boxes.scores is None else _results(labelled)
    write_text_atomic(Path(path), text)


def _document(labelled: LabelledImages) -> dict:
    boxes, image_ids = labelled.boxes, np.array([row.image_id for row in labelled.images], object)
    category_ids = np.array([category.id for category in labelled.categories], object)
    keys = "id", "image_id", "category_id", "bbox", "area", "iscrowd"
    ids = boxes.ids, image_ids[boxes.image_index], category_ids[boxes.labels]
    columns = (column.tolist() for column in (*ids, boxes.xywh, boxes.area, boxes.iscrowd.astype(int)))
    annotations = [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]
    document = {
        "images": [dict(zip(("id", *ImageRow._fields[1:]), row, strict=True)) for row in labelled.images],
        "annotations": annotations,
        "categories": [dataclasses.asdict(category) for category in labelled.categories],
    }
    if labelled.predicates:
        document["rel_categories"] = _numbered(labelled.predicates)
        document["rel_annotations"] = _relations(boxes, labelled.relations, image_ids)
    if labelled.attributes:
        for annotation, attributes in zip(annotations, boxes.extra["attributes"].tolist(), strict=True):
            annotation["attribute_ids"] = [attribute for attribute in attributes if attribute]
        document["attribute_categories"] = _numbered(labelled.attributes)
    return document


def _relations(boxes: Boxes, relations: Relations, image_ids: np.ndarray) -> list[dict]:
    images = np.arange(len(image_ids)).repeat(np.diff(relations.offsets))
    first, keys = boxes.offsets[images], ("id", "image_id", "subject_id", "object_id", "predicate_id")
    ends = boxes.ids[first + relations.subject], boxes.ids[first + relations.object]
    columns = np.arange(1, len(relations) + 1), image_ids[images], *ends, relations.predicate + 1
    return [dict(zip(keys, values, strict=True)) for values in zip(*(c.tolist() for c in columns), strict=True)]


def _numbered(names: Sequence[str]) -> list[dict]:
    return [{"id": number, "name": name} for number, name in enumerate(names, start=1)]


def _results(labelled: LabelledImages) -> str:
    ids, lines = [category.id for category in labelled.categories], []
    for row, found in labelled.by_image():
        entries = [
            {"image_id": row.image_id, "category_id": ids[label], "bbox": [x1, y1, x2 - x1, y2 - y1], "score": score}
            for label, (x1, y1, x2, y2), score, _ in found
        ]
        if entries:
            lines.append(json.dumps(entries)[1:-1])
    return "[" + ",\n".join(lines) + "]\n"


def _read(
    file: Path, image_dir: ImageSources | None, check_images: bool | str, max_pixels: int, cache_file: Path,
    siblings: Sequence[Path],
) -> DetectionTable:
    with uncollected():
        checked = check(read_annotations(file), str(file), max_pixels)
    root = image_dir or find_image_root(file, [row.file_name for row in checked.images])
    # The siblings are read only where the images are checked.
    others = set(chain.from_iterable(map(listed_names, siblings))) if check_images and checked.images else set()
    good, digests = with_good_files(checked, root, check_images, max_pixels, others)
    problems = [*_notes(file), *good.problems]
    return write_table(
        good.images, good.boxes, good.relations, cache_file=cache_file, categories=good.categories,
        predicates=good.predicates, attributes=good.attributes, image_root=root.resolve(), problems=problems,
        name=str(file), checked=digests,
    )  # fmt: skip


def _notes(file: Path) -> list[Problem]:
    with open(file, "rb") as stream:
        marked = stream.read(3) == BYTE_ORDER_MARK
    return [Problem("warning", str(file), None, None, "byte order mark skipped")] if marked else []


def _check_lists(lists: dict[str, object], file: str) -> None:
    faults = [f"{file}: key `{key}` missing" for key in LISTS if key not in lists]
    faults += [f"{file}: `{key}` is a {type(lists[key]).__name__}; expected a list"
               for key in (*LISTS, *OTHER_LISTS) if key in lists and not isinstance(lists[key], list)]  # fmt: skip
    faults += [f"{file}: `{key}` is empty" for key in ("images", "categories") if lists.get(key) == []]
    if faults:
        raise BadInput(faults)
