"""Writes data sets (with their images) and predictions in the formats that `toolkit.data.formats` reads.

A function `write_<format>` writes only the boxes of `LabelledImages`, which are a data set's or predictions, and their
masks if the format can hold them.
"""

import base64
import csv
import dataclasses
import io
import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import numpy as np
import yaml
from PIL import Image

from toolkit.base.boxes import Boxes, Relations
from toolkit.base.files import distinct, without_suffix, write_text_atomic
from toolkit.base.masks import Rle, Shape, Size, bitmap
from toolkit.base.outlines import one_ring, polygons_of
from toolkit.base.text import as_cell, in_utf_8
from toolkit.data.annotations import ImageRow
from toolkit.data.decoding import EXTENSIONS, IMAGE_SUFFIXES, probe_image, read_image_file
from toolkit.data.formats.csv import HEADERLESS
from toolkit.data.formats.voc import CORNERS
from toolkit.data.formats.voc_masks import MASK_FOLDER, write_masks
from toolkit.data.formats.yolo import settings_of
from toolkit.data.formats.yolo_pairs import LABEL_FOLDER
from toolkit.data.image_sources import size_of
from toolkit.data.layout import Layout
from toolkit.data.segmentations import clipped, to_segmentation
from toolkit.data.table import DetectionTable, LabelledImages
from toolkit.evaluation.predictions import coco_results

CSV_COLUMNS = (*HEADERLESS, "width", "height", "iscrowd")
LOST_OF_MASKS = {
    "voc": "where masks overlap, the later one counts; of an image the first 254 have room",
    "yolo": "boxes become those around their masks, and run lengths become polygons",
    "csv": "masks are left out",
    "labelme": "boxes become those around their masks",
    "hub": "run lengths become polygons",
}
LONGEST_RUN = 2**16  # of values in a brush of Label Studio
BITS_OF_BRUSH = 0b00111_1111_1111_1111_1111  # each less 1: of values 8, of the four kinds of lengths 16
LABELME_VERSION = "5.4.1"  # the first one with masks is 5.3
CSV_OF_PREDICTIONS = ("score", "image_id", "category_id")  # further columns


def write_folder(table: DetectionTable, folder: Path, split: str, format: str, *, link: bool = False) -> int:
    """Write a split of a data set, including its images, to a folder; return the number of masks without a pixel, for
    which a box was written.

    Args:
        split: name of the split.
        format: one of `toolkit.data.formats.FOLDERS`.
        link: make hard links to the image files instead of copies, if the file system supports it.
    """
    return WRITERS[format](table, Path(folder), split, link=link) or 0


def unsupported_by(table: DetectionTable, format: str) -> list[str]:
    """Return a phrase for each kind of content of the table that the format cannot represent."""
    crowds = int(table.boxes().iscrowd.sum())
    lost = []
    if format == "yolo" and crowds:
        lost.append(f"{crowds} crowd regions are left out")
    if table.has_masks and format in LOST_OF_MASKS:
        lost.append(LOST_OF_MASKS[format])
    if format != "coco":
        ids = [category.id for category in table.categories]
        first = 0 if format in ("yolo", "hub") else 1
        if ids != list(range(first, first + len(ids))):
            lost.append(f"category ids become {first} to {first + len(ids) - 1}")
        named = {"relations": table.predicates, "attributes": table.attributes}
        lost += [f"{what} are left out" for what, names in named.items() if names]
    return lost


# ---- COCO ------------------------------------------------------------------------------------------------------------


def write_coco_folder(
    table: DetectionTable,
    folder: Path,
    split: str,
    *,
    link: bool = False,
    names: Sequence[str] | None = None,
) -> None:
    """Write `annotations/<split>.json` and the images in `<split>/`; nothing in the table is lost.

    Args:
        link: see `write_folder`.
        names: names of the image files; None: those in the table.
    """
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    names = copy_images(table, folder / split, link, names)
    write_coco(table.labelled().renamed(names), folder / "annotations" / f"{split}.json")


def write_coco(labelled: LabelledImages, path: str | Path) -> None:
    """Write a COCO file with the original ids of images and categories; numbers are written without rounding.

    For annotated boxes, it is a document with images, annotations, categories, relations and attributes. For boxes with
    scores, it is COCO's list of results, `{image_id, category_id, bbox [x, y, width, height], score}`, with one line
    for each image.
    """
    text = json.dumps(_coco_document(labelled)) if labelled.boxes.scores is None else coco_results(labelled)
    write_text_atomic(Path(path), text)


def _coco_document(labelled: LabelledImages) -> dict:
    boxes = labelled.boxes
    image_ids = np.array([row.image_id for row in labelled.images], object)
    category_ids = np.array([category.id for category in labelled.categories], object)
    keys = "id", "image_id", "category_id", "bbox", "area", "iscrowd"
    ids = boxes.ids, image_ids[boxes.image_index], category_ids[boxes.labels]
    columns = (column.tolist() for column in (*ids, boxes.xywh, boxes.area, boxes.iscrowd.astype(int)))
    annotations = [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]
    if "masks" in boxes.extra:
        for annotation, shape in zip(annotations, boxes.extra["masks"].tolist(), strict=True):
            annotation["segmentation"] = to_segmentation(shape)
    document = {
        "images": [dict(zip(("id", *ImageRow._fields[1:]), row, strict=True)) for row in labelled.images],
        "annotations": annotations,
        "categories": [dataclasses.asdict(category) for category in labelled.categories],
    }
    if "score" in boxes.extra:  # of detections
        for annotation, score in zip(annotations, boxes.extra["score"].tolist(), strict=True):
            annotation["score"] = score
    if labelled.predicates:
        document["rel_categories"] = _numbered(labelled.predicates)
        document["rel_annotations"] = _coco_relations(boxes, labelled.relations, image_ids)
    if labelled.attributes:
        for annotation, attributes in zip(annotations, boxes.extra["attributes"].tolist(), strict=True):
            annotation["attribute_ids"] = [attribute for attribute in attributes if attribute]
        document["attribute_categories"] = _numbered(labelled.attributes)
    return document


def _coco_relations(boxes: Boxes, relations: Relations, image_ids: np.ndarray) -> list[dict]:
    images = np.arange(len(image_ids)).repeat(np.diff(relations.offsets))
    first = boxes.offsets[images]
    keys = ("id", "image_id", "subject_id", "object_id", "predicate_id")
    ends = boxes.ids[first + relations.subject], boxes.ids[first + relations.object]
    columns = np.arange(1, len(relations) + 1), image_ids[images], *ends, relations.predicate + 1
    return [dict(zip(keys, values, strict=True)) for values in zip(*(c.tolist() for c in columns), strict=True)]


def _numbered(names: Sequence[str]) -> list[dict]:
    return [{"id": number, "name": name} for number, name in enumerate(names, start=1)]


# ---- Pascal VOC ------------------------------------------------------------------------------------------------------


def _write_voc_folder(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> None:
    """Write `Annotations/*.xml`, `JPEGImages/`, `ImageSets/Main/<split>.txt`, and `labels.txt` with all class names.

    Masks are written to `SegmentationObject/*.png`. Annotated areas, ids, relations and attributes are not written: VOC
    cannot hold them. Corners keep every digit.
    """
    names = [name.replace("/", "_") for name in file_names(table)]
    there = folder / "JPEGImages"
    taken = {path.stem for path in (folder / "Annotations").glob("*.xml")}  # by the images of other splits
    names = distinct(
        (f"{split}_{name}" if without_suffix(name) in taken else name for name in names),
        without_suffix,
    )
    copy_images(table, there, link, names)
    write_voc(
        table.labelled().renamed([f"{there.name}/{name}" for name in names]),
        folder / "Annotations",
        names,
    )
    if table.has_masks:
        for index, (name, image) in enumerate(zip(names, table.image_rows(), strict=True)):
            file = folder / MASK_FOLDER / f"{without_suffix(name)}.png"
            write_masks(table.masks_of(index), (image.height, image.width), file)
    sets = folder / "ImageSets" / "Main"
    sets.mkdir(parents=True, exist_ok=True)
    (sets / f"{split}.txt").write_text("".join(f"{without_suffix(name)}\n" for name in names), encoding="utf-8")
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in table.class_names), encoding="utf-8")


def write_voc(labelled: LabelledImages, folder: Path, names: Sequence[str]) -> None:
    """Write an XML file for each image to a folder, named after `names`; scores, if there are any, become `<score>`.

    Corners are in pixels counted from 0, as this toolkit's reader expects them, not from 1.
    """
    for name, (image, boxes) in zip(names, labelled.by_image(), strict=True):
        root = ElementTree.Element("annotation")
        path = PurePosixPath(in_utf_8(image.file_name))
        _add_texts(root, {"folder": path.parent.name, "filename": path.name})
        _add_texts(
            ElementTree.SubElement(root, "size"),
            {"width": image.width, "height": image.height, "depth": 3},
        )
        for label, xyxy, score, crowd in boxes:
            entry = ElementTree.SubElement(root, "object")
            _add_texts(
                entry,
                {"name": labelled.categories[label].name} | ({} if score is None else {"score": score}),
            )
            _add_texts(entry, {"difficult": int(crowd)})
            _add_texts(
                ElementTree.SubElement(entry, "bndbox"),
                dict(zip(CORNERS, _digits(xyxy), strict=True)),
            )
        ElementTree.indent(root)
        target = folder / f"{without_suffix(name)}.xml"
        target.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(root).write(target, encoding="utf-8")


def _add_texts(element: ElementTree.Element, texts: Mapping[str, object]) -> None:
    for tag, text in texts.items():
        ElementTree.SubElement(element, tag).text = str(text)


# ---- YOLO ------------------------------------------------------------------------------------------------------------


def _write_yolo_folder(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> int:
    """Write `images/<split>/`, `labels/<split>/*.txt` and `data.yaml`; the numbers have every digit they need.

    An object with a mask is a polygon instead of a box. Crowd regions, annotated areas, ids, relations and attributes
    are not written: YOLO cannot hold them. Returns what `write_yolo` returns.
    """
    # Programs replace the last `images` of a path to find the labels.
    names = ["/".join(part for part in name.split("/") if part != "images") for name in file_names(table)]
    names = distinct(names, _label_name)
    copy_images(table, folder / "images" / split, link, names)
    without_polygon = write_yolo(table.labelled(), folder / LABEL_FOLDER / split, names)
    entries = {split: f"images/{split}", "names": dict(enumerate(table.class_names))}
    if table.has_masks:
        entries["kpt_shape"] = None  # polygons: some could be taken for key points
    settings = settings_of(Layout(folder))[1] | entries
    (folder / "data.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return without_polygon


def write_yolo(labelled: LabelledImages, folder: Path, names: Sequence[str]) -> int:
    """Write a YOLO text file for each image to a folder, named after `names`; a score, if any, is at the end of a line.

    An object with a mask has a line with one polygon, which ends where it begins. Crowd regions are left out. A mask
    without a pixel in the image has no polygon: the box is written instead. Returns the number of these.
    """
    without_polygon = 0
    for name, (image, boxes), shapes in zip(names, labelled.by_image(), labelled.masks_by_image(), strict=True):
        lines = []
        for (label, (x1, y1, x2, y2), score, crowd), shape in zip(boxes, shapes, strict=True):
            centre = (x1 + x2) / 2 / image.width, (y1 + y2) / 2 / image.height
            numbers = *centre, (x2 - x1) / image.width, (y2 - y1) / image.height
            if shape is not None and not crowd:
                polygon = _yolo_polygon(shape, image)
                without_polygon += not polygon
                numbers = polygon or numbers
            if score is not None:
                numbers = (*numbers, score)
            if not crowd:
                lines.append(f"{label} {' '.join(map(repr, numbers))}\n")
        target = folder / f"{without_suffix(name)}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines), encoding="utf-8")
    return without_polygon


def _yolo_polygon(shape: Shape, image: ImageRow) -> list[float]:
    """Return the corners x, y, x, y, ... of a mask in fractions of the image; none for a mask without a pixel in it.

    The first corner is repeated at the end: without that, the last one could be a confidence and a track.
    """
    size_hw = (image.height, image.width)
    inside = clipped(polygons_of(shape, size_hw), size_hw)  # fractions beyond 1 would be refused
    ring = one_ring(inside, size_hw)
    if ring is None:
        return []
    closed = np.concatenate([ring, ring[:1]])
    return (closed / [image.width, image.height]).ravel().tolist()


def _label_name(name: str) -> str:
    """Return what images that share a file of labels have in common, ignoring the case of letters."""
    return without_suffix(name).lower()


# ---- LabelMe ---------------------------------------------------------------------------------------------------------


def _write_labelme_folder(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> None:
    """Write `<split>/<image>.json` beside each image, and `labels.txt` with all class names.

    An object is a rectangle; one with a mask is polygons of one `group_id`, or of run lengths a mask. Annotated areas,
    ids, relations and attributes are not written: LabelMe cannot hold them.
    """
    names = distinct(file_names(table), _label_name)
    copy_images(table, folder / split, link, names)
    labelled = table.labelled()
    for name, (image, boxes), shapes in zip(names, labelled.by_image(), labelled.masks_by_image(), strict=True):
        entries = []
        for number, ((label, xyxy, _, crowd), shape) in enumerate(zip(boxes, shapes, strict=True), start=1):
            drawn = _labelme_shapes(shape, xyxy, (image.height, image.width))
            about = {"label": labelled.categories[label].name, "group_id": number if len(drawn) > 1 else None}
            about |= {"flags": {}, "difficult": bool(crowd)}
            entries += [about | part for part in drawn]
        document = {"version": LABELME_VERSION, "flags": {}, "shapes": entries, "imagePath": Path(name).name}
        document |= {"imageData": None, "imageHeight": image.height, "imageWidth": image.width}
        write_text_atomic(folder / split / f"{without_suffix(name)}.json", json.dumps(document, ensure_ascii=False))
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in table.class_names), encoding="utf-8")


def _labelme_shapes(shape: Shape, xyxy: Sequence[float], size_hw: Size) -> list[dict]:
    """Return the shapes of one object; of a mask of run lengths without a pixel, and without a mask, a rectangle."""
    if isinstance(shape, Rle):
        pixels = bitmap(shape, size_hw)
        rows = np.flatnonzero(pixels.any(axis=1)).tolist()
        columns = np.flatnonzero(pixels.any(axis=0)).tolist()
        if rows:
            part = io.BytesIO()
            Image.fromarray(pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]).save(part, "PNG")
            mask = base64.b64encode(part.getvalue()).decode("ascii")
            points = [[columns[0], rows[0]], [columns[-1], rows[-1]]]
            return [{"shape_type": "mask", "points": points, "mask": mask}]
    elif shape:
        return [{"shape_type": "polygon", "points": ring.tolist()} for ring in shape]
    x1, y1, x2, y2 = (float(text) for text in _digits(xyxy))
    return [{"shape_type": "rectangle", "points": [[x1, y1], [x2, y2]]}]


# ---- CSV -------------------------------------------------------------------------------------------------------------


def _write_csv_folder(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> None:
    """Write `<split>.csv` and `images/<split>/`; an image without objects is a row without numbers.

    Annotated areas, ids, relations and attributes are not written: the table has no columns for them.
    """
    names = [f"images/{split}/{name}" for name in copy_images(table, folder / "images" / split, link)]
    write_csv(table.labelled().renamed(names), folder / f"{split}.csv")


def write_csv(labelled: LabelledImages, path: Path) -> None:
    """Write a CSV file with a row for each box, with the columns `CSV_OF_PREDICTIONS` too if boxes have scores.

    An image without boxes has a row without a box. An apostrophe is put before names that a spreadsheet would take for
    a formula (`=1+1`); the reader removes it again.
    """
    header = CSV_COLUMNS if labelled.boxes.scores is None else (*CSV_COLUMNS, *CSV_OF_PREDICTIONS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, header, extrasaction="ignore")
        out.writeheader()
        for image, boxes in labelled.by_image():
            about = {
                "image": in_utf_8(image.file_name),
                "width": image.width,
                "height": image.height,
                "image_id": image.image_id,
            }
            for label, xyxy, score, crowd in boxes:
                category = labelled.categories[label]
                corners = dict(zip(HEADERLESS[1:5], _digits(xyxy), strict=True))
                of_box = {
                    "label": category.name,
                    "iscrowd": int(crowd),
                    "score": score,
                    "category_id": category.id,
                }
                out.writerow(_as_texts(about | of_box) | corners)
            if not boxes:
                out.writerow(_as_texts(about))


# ---- Label Studio ----------------------------------------------------------------------------------------------------


def write_label_studio(labelled: LabelledImages, path: Path) -> None:
    """Write tasks of Label Studio with these boxes as pre-annotations; those with masks are brushes.

    Pictures are files of a local storage. The names of controls are those of Label Studio's templates: `label` is of
    the labels, `image` of the picture.
    """
    tasks = []
    for (image, boxes), shapes in zip(labelled.by_image(), labelled.masks_by_image(), strict=True):
        about = {"from_name": "label", "to_name": "image", "image_rotation": 0}
        about |= {"original_width": image.width, "original_height": image.height}
        results = []
        for number, ((label, xyxy, score, _), shape) in enumerate(zip(boxes, shapes, strict=True), start=1):
            kind, value = _label_studio_shape(shape, xyxy, (image.height, image.width))
            value[kind] = [labelled.categories[label].name]
            results.append(about | {"id": str(number), "type": kind, "score": score, "value": value})
        address = f"/data/local-files/?d={quote(in_utf_8(image.file_name))}"
        tasks.append({"data": {"image": address}, "predictions": [{"result": results}]})
    write_text_atomic(path, json.dumps(tasks))


def _label_studio_shape(shape: Shape | None, xyxy: Sequence[float], size_hw: Size) -> tuple[str, dict]:
    """Return the kind of a shape and its value: of a mask its pixels, else a rectangle in per cent of the sides."""
    pixels = None if shape is None else bitmap(shape, size_hw)
    if pixels is not None and pixels.any():
        return "brushlabels", {"format": "rle", "rle": _brush(pixels)}
    height, width = size_hw
    x1, y1, x2, y2 = (100 * corner / side for corner, side in zip(xyxy, (width, height) * 2, strict=True))
    return "rectanglelabels", {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1, "rotation": 0}


def _brush(pixels: np.ndarray) -> list[int]:
    """Return the bytes of Label Studio's run lengths of pixels (H, W), which are four values each, 0 or 255.

    The head has the number of values, and the numbers of bits of a value and of four kinds of lengths; a run has the
    bit 1, its kind, its length less 1, and its value.
    """
    flat = pixels.ravel() != 0
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    starts = np.union1d(changes, np.arange(0, flat.size, LONGEST_RUN // 4))
    lengths = 4 * np.diff(starts, append=flat.size)
    is_run = np.full(len(starts), 0b100)
    runs = np.concatenate([_bits(is_run, 3), _bits(lengths - 1, 16), _bits(255 * flat[starts], 8)], axis=1)
    head = [_bits(np.array([4 * flat.size]), 32), _bits(np.array([BITS_OF_BRUSH]), 21)]
    return np.packbits(np.concatenate([part.ravel() for part in (*head, runs)])).tolist()


def _bits(numbers: np.ndarray, width: int) -> np.ndarray:
    """Return the bits (N, width) uint8 of whole numbers (N,), the highest first."""
    return (numbers[:, None] >> np.arange(width)[::-1] & 1).astype(np.uint8)


def _as_texts(values: Mapping[str, object]) -> dict[str, object]:
    return {key: as_cell(value) for key, value in values.items()}


# ---- Parquet files of `datasets` -------------------------------------------------------------------------------------


def _write_parquet_folder(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> None:
    """Write `data/<split>-*.parquet` with the encoded images in it, in files of about 500 MB.

    Masks are polygons, as COCO writes them. Category ids, relations and attributes are not written: the format has no
    columns for them.
    """
    import datasets  # here, since other formats would wait for it

    value = datasets.Value
    several = datasets.List
    objects = {
        "id": several(value("int64")),
        "bbox": several(several(value("float32"), length=4)),
        "category": several(datasets.ClassLabel(names=table.class_names)),
        "area": several(value("float32")),
        "iscrowd": several(value("bool")),
    }
    if table.has_masks:
        objects["segmentation"] = several(several(several(value("float64"))))
    columns = {
        "image_id": value("string" if table.image_ids().dtype == object else "int64"),
        "image": datasets.Image(),
        "width": value("int64"),
        "height": value("int64"),
        "objects": objects,
    }
    features = datasets.Features(columns)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    labelled = table.labelled()
    parts = max(1, -(-_bytes_of_images(table) // 500_000_000))
    for part in range(parts):
        first, last = (len(table) * at // parts for at in (part, part + 1))
        rows = datasets.Dataset.from_list(
            list(_parquet_rows(table, labelled, first, last)),
            features=features,
        )
        target = folder / "data" / f"{'validation' if split == 'val' else split}-{part:05d}-of-{parts:05d}.parquet"
        rows.to_parquet(str(target))


def _parquet_rows(table: DetectionTable, labelled: LabelledImages, first: int, last: int) -> Iterator[dict]:
    boxes = labelled.boxes
    columns = {
        "id": boxes.ids,
        "bbox": boxes.xywh,
        "category": boxes.labels,
        "area": boxes.area,
        "iscrowd": boxes.iscrowd,
    }
    for index in range(first, last):
        image = labelled.images[index]
        part = boxes.of_image(index)
        source = table.image_source(table.row(index))
        data = source if isinstance(source, bytes) else source.read_bytes()
        about = {"image_id": image.image_id, "width": image.width, "height": image.height}
        objects = {name: column[part].tolist() for name, column in columns.items()}
        if table.has_masks:
            size_hw = (image.height, image.width)
            shapes = boxes.extra["masks"][part].tolist()
            objects["segmentation"] = [to_segmentation(polygons_of(shape, size_hw)) for shape in shapes]
        yield about | {"image": {"bytes": data, "path": image.file_name}, "objects": objects}


def _bytes_of_images(table: DetectionTable) -> int:
    sources = (table.image_source(table.row(index)) for index in range(len(table)))
    return sum(len(source) if isinstance(source, bytes) else size_of(source) for source in sources)


WRITERS = {
    "coco": write_coco_folder,
    "voc": _write_voc_folder,
    "yolo": _write_yolo_folder,
    "csv": _write_csv_folder,
    "hub": _write_parquet_folder,
    "labelme": _write_labelme_folder,
}


# ---- images ----------------------------------------------------------------------------------------------------------


def copy_images(table: DetectionTable, folder: Path, link: bool, names: Sequence[str] | None = None) -> Sequence[str]:
    """Write the encoded images of a table as files to a folder, and return the names of the files.

    Args:
        link: make hard links instead of copies, if the file system supports it.
        names: names of the files; None: see `file_names`.
    """
    names = names or file_names(table)
    for index, name in enumerate(names):
        source = table.image_source(table.row(index))
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(source, Path):
            target.write_bytes(read_image_file(source, table.max_image_pixels)[1])
        elif not (link and _linked(source, target)):
            shutil.copyfile(source, target)
    return names


def _linked(source: Path, target: Path) -> bool:
    try:
        target.unlink(missing_ok=True)
        os.link(os.path.realpath(source), target)  # of a symbolic link the file, since the link may be relative
    except OSError:  # another file system
        return False
    return True


def file_names(table: DetectionTable) -> list[str]:
    """Return a file name for the image of every row, all different; a missing suffix is chosen by the content."""
    names = table.file_names()
    for index, name in enumerate(names):
        if os.path.splitext(name)[1].lower() not in IMAGE_SUFFIXES:  # "row 3" of a `datasets` data set
            names[index] = f"{name.replace(' ', '_')}.{_kind_and_suffix(table, index)[1]}"
    return distinct(names, str.lower)


def names_by_content(table: DetectionTable) -> list[str]:
    """Return `file_names`, with each suffix that contradicts the image format of the content replaced."""
    names = file_names(table)
    for index, name in enumerate(names):
        stem, suffix = os.path.splitext(name)
        kind, right = _kind_and_suffix(table, index)
        if suffix.lower() not in EXTENSIONS.get(kind, {suffix.lower()}):
            names[index] = f"{stem}.{right}"
    return distinct(names, str.lower)


def _kind_and_suffix(table: DetectionTable, index: int) -> tuple[str, str]:
    kind = probe_image(table.image_source(table.row(index))).format
    return kind, {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}.get(kind, kind.lower())


def _digits(numbers: Sequence[float]) -> list[str]:
    """Return each number as text with as many digits as a float32 has."""
    return [f"{number:.9g}" for number in numbers]
