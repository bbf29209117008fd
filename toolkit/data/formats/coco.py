"""COCO annotation files (also with relations) to the Arrow table, and back."""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from toolkit.data.check_files import find_image_root, rows_of_good_files
from toolkit.data.checks import settle, validate_document
from toolkit.data.formats.coco_stream import STREAMED_BYTES, listed_names, read_streamed
from toolkit.data.places import Places, digest_of, open_places
from toolkit.data.table import TABLE_VERSION, DetectionTable, Problem, cache_root, open_table, write_table
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS
from toolkit.modes import uncollected


def read_coco(
    annotation_file: str | Path,
    image_dir: str | Path | Sequence[str] | Places | None = None,
    *,
    on_error: str = "raise",
    cache_dir: str | Path | None = None,
    check_images: bool | str = True,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    siblings: Sequence[Path] = (),
) -> DetectionTable:
    """Reads a COCO `instances` file (polygons and masks are not kept) into a memory-mapped DetectionTable.

    image_dir: what `file_name` is relative to, as `open_places` takes it; None looks near the annotation file.
    on_error: "raise" -> BadInput with every defect; "drop" -> unusable images and annotations are left out.
    check_images: True, "full" (decode each), "header", or False (the files are not looked at).
    max_image_pixels: an image with more of them cannot be used, and is refused before it is decoded.
    siblings: annotation files of other splits, whose images may lie in the same folder.
    The table and the verdict are cached by the content of the JSON, the options, and the names, sizes and times of
    the images, so that a second start reads neither. A file of 64 MiB or more is read item by item, with memory for a
    few thousand images (`toolkit.data.formats.coco_stream`). `rel_categories` and `rel_annotations`, or triplets
    `relations` (rows of subject annotation id, object annotation id, predicate id), become `relations`; `attribute_ids`
    of annotations, ids of `attribute_categories`, become `attributes`.
    """
    if on_error not in ("raise", "drop"):
        raise BadInput(f"on_error is {on_error!r}; expected 'raise' or 'drop'")
    if check_images not in (True, False, "full", "header"):
        raise BadInput(f"check_images is {check_images!r}; expected True, False, 'full' or 'header'")
    annotation_file = Path(annotation_file).expanduser()
    image_dir = open_places(image_dir)
    options = f"{check_images} {max_image_pixels}"
    cache_file = _cache_file(annotation_file, image_dir, options, cache_root(cache_dir))
    cached = open_table(cache_file)
    if cached and all(digest_of(place) == digest for place, digest in cached[1].items()):
        table = dataclasses.replace(cached[0], name=str(annotation_file))
    else:
        table = _read(annotation_file, image_dir, check_images, max_image_pixels, cache_file, siblings)
    table.max_image_pixels = max_image_pixels
    settle(table.problems, on_error if len(table) else "raise", str(annotation_file))
    if not len(table):
        raise BadInput(f"{annotation_file}: not one usable image")
    return table


def write_coco(table: DetectionTable, path: str | Path, file_names: Sequence[str] | None = None) -> None:
    """Writes a table's images, boxes, relations and attributes as a COCO file, with the categories' original ids.

    file_names: other names for the image files, in the order of the rows.
    """
    images, annotations, relations = [], [], []
    for index in range(len(table)):
        row = table.row(index)
        images.append({"id": row["image_id"], **{key: row[key] for key in ("file_name", "width", "height")}})
        if file_names is not None:
            images[-1]["file_name"] = file_names[index]
        objects = {name: values.tolist() for name, values in row["objects"].items()}
        named = objects.pop("attributes", [()] * len(objects["id"]))
        for id_, (x1, y1, x2, y2), label, area, crowd, attributes in zip(*objects.values(), named, strict=True):
            annotations.append({"id": id_, "image_id": row["image_id"], "category_id": table.categories[label].id,
                                "bbox": [x1, y1, x2 - x1, y2 - y1], "area": area, "iscrowd": crowd})
            if table.attributes:
                annotations[-1]["attribute_ids"] = [attribute for attribute in attributes if attribute]
        for subject, object_, predicate in zip(*(part.tolist() for part in row["relations"].values()), strict=True):
            relations.append({"id": len(relations) + 1, "image_id": row["image_id"],
                              "subject_id": objects["id"][subject], "object_id": objects["id"][object_],
                              "predicate_id": predicate + 1})
    document = {"images": images, "annotations": annotations,
                "categories": [dataclasses.asdict(category) for category in table.categories]}
    if table.predicates:
        document["rel_categories"] = [{"id": row + 1, "name": name} for row, name in enumerate(table.predicates)]
        document["rel_annotations"] = relations
    if table.attributes:
        document["attribute_categories"] = [{"id": row + 1, "name": name} for row, name in enumerate(table.attributes)]
    Path(path).write_text(json.dumps(document))


def _cache_file(annotation_file: Path, image_dir: Path | Places | None, options: str, cache: Path) -> Path:
    try:
        mode = os.stat(annotation_file).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would be waited for, a device read without end
            raise BadInput(f"{annotation_file}: no file, but a pipe or a device; it is read twice, so give a file")
        with open(annotation_file, "rb") as file:
            digest = hashlib.file_digest(file, hashlib.blake2b)
    except FileNotFoundError as error:
        raise BadInput(f"{annotation_file}: no such annotation file") from error
    except OSError as error:
        raise BadInput(f"{annotation_file}: cannot be read: {error.strerror}") from error
    place = f"in {image_dir.resolve()}" if image_dir else f"near {annotation_file.resolve()}"
    digest.update(f"coco {TABLE_VERSION} {options} {place}".encode())
    return cache / "tables" / f"{digest.hexdigest()[:32]}.json"


def _read(
    annotation_file: Path, image_dir: Path | Places | None, check_images: bool | str, max_pixels: int, cache_file: Path,
    siblings: Sequence[Path],
) -> DetectionTable:
    if annotation_file.stat().st_size >= STREAMED_BYTES:
        with uncollected():
            return read_streamed(annotation_file, image_dir, check_images, max_pixels, cache_file, siblings)
    with uncollected():
        document, notes = _parse(annotation_file)
        valid = validate_document(document, str(annotation_file), max_pixels)
        del document
    image_root = image_dir or find_image_root(annotation_file, [row["file_name"] for row in valid.rows])
    # The siblings are read only where the images are checked.
    listed = valid.listed.union(*map(listed_names, siblings)) if check_images and valid.rows else valid.listed
    rows, found, checked = rows_of_good_files(valid.rows, listed, image_root, check_images, max_pixels)
    problems = notes + valid.problems + found
    return write_table(
        rows,
        cache_file=cache_file,
        categories=valid.categories,
        predicates=valid.predicates,
        attributes=valid.attributes,
        attribute_columns=valid.attribute_columns,
        image_root=image_root.resolve(),
        problems=problems,
        name=str(annotation_file),
        checked=checked,
    )


def _parse(annotation_file: Path) -> tuple[object, list[Problem]]:
    data = annotation_file.read_bytes()
    notes = []
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        notes.append(Problem("warning", str(annotation_file), None, None, "byte order mark skipped"))
    if not data.strip():
        raise BadInput(f"{annotation_file}: empty file")
    try:
        # Python's own reader also takes NaN, as json.dump writes it; the annotation that holds it is reported
        return json.loads(data.decode()), notes
    except UnicodeDecodeError as error:
        raise BadInput(f"{annotation_file}: not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadInput(f"{annotation_file}: invalid JSON at {where}: {error.msg}") from error
    except ValueError as error:  # a number of thousands of digits
        raise BadInput(f"{annotation_file}: invalid JSON: {error}") from error
    except RecursionError as error:
        raise BadInput(f"{annotation_file}: invalid JSON: nested too deep") from error
