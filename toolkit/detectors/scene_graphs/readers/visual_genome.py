"""Data in the layout of Visual Genome as Scene-Graph-Benchmark has it (VG150 and its relatives).

An HDF5 file holds boxes and relations, a JSON file the names, another JSON file the image sizes. Classes, predicates
and attributes are counted from 1 in the files and in the arrays here; in the table, classes and predicates are counted
from 0. Attributes without names are not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.data.annotations import Reading
from toolkit.data.checks import CheckedAnnotations
from toolkit.data.image_sources import ImageSources, is_there
from toolkit.data.table import Category, DetectionTable, Problem
from toolkit.data.table_cache import columns_of_rows
from toolkit.detectors.scene_graphs.readers.graphs import read_graphs
from toolkit.detectors.scene_graphs.readers.visual_genome_files import find_files

BOX_SCALE = 1024  # pixels of the longer image side that the boxes of the file refer to
CORRUPTED_IMAGES = (1592, 1722, 4616, 4617)  # listed in Visual Genome's image_data.json, left out of its graphs
VG_IMAGE_SUFFIXES = (".jpg", ".png", ".jpeg", ".tif")  # of image files, which are called by their ids
NUM_ATTRIBUTE_COLUMNS = 10
NUM_VAL_IMAGES = 5000
PER_IMAGE_ARRAYS = ("split", *(f"img_to_{end}_{kind}" for kind in ("box", "rel") for end in ("first", "last")))
ARRAY_COLUMNS = {"boxes_1024": 4, "labels": 1, "relationships": 2, "predicates": 1}  # columns of the other arrays


@dataclass
class Graphs:
    """The I images of one split, as arrays. Each list has one array for each image.

    index: (I,) rows of the images in the file's per-image arrays. boxes: (n, 4) integers xyxy, in the scale in which
    the longer image side is 1024. labels: (n,) from 1. attributes: (n, A) from 1, 0 for padding. relations: (r, 3)
    subject, object (rows of the image's boxes) and predicate from 1, including repeated ones.
    """

    index: np.ndarray
    boxes: list[np.ndarray]
    labels: list[np.ndarray]
    attributes: list[np.ndarray]
    relations: list[np.ndarray]


def load_graphs(
    h5_file: str | Path,
    split: str,
    num_val_images: int = NUM_VAL_IMAGES,
    keep_images_without_relations: bool | Literal["train"] = False,
    drop_non_overlapping: bool = False,
) -> Graphs:
    """Read the graphs of the split train, val or test.

    Args:
        num_val_images: val is this many of the file's training images, the first ones; train is the others.
        keep_images_without_relations: keep images that have boxes, but no relations; "train": only in train. Images
            without boxes are always left out.
        drop_non_overlapping: for train only, leave out relations between boxes with an IoU of 0 (1 is added to widths
            and heights), and then images without relations.

    Raises BadInput for a missing or unreadable file, a missing key, or rows that contradict each other.
    """
    if split not in ("train", "val", "test"):
        raise BadInput(f"{h5_file}: split is {split!r}; expected train, val or test")
    if drop_non_overlapping and split != "train":
        raise BadInput("relations between boxes that do not overlap are dropped from the training split only")
    data = _read_h5(Path(h5_file))
    number = 2 if split == "test" else 0  # of the split in the file, which has no val
    chosen = (data["split"] == number) & (data["img_to_first_box"] >= 0)
    counted = chosen
    if keep_images_without_relations is not True:
        counted = chosen & (data["img_to_first_rel"] >= 0)
    index = np.flatnonzero(counted)
    if split != "test":
        val = index[:num_val_images]
        everything = np.flatnonzero(chosen) if keep_images_without_relations else index
        index = val if split == "val" else np.setdiff1d(everything, val)
        if not len(index) and len(val):
            fewer = max(1, len(val) // 10)
            raise BadInput(
                f"{h5_file}: all of its {len(val)} training images are among the first {num_val_images}, which are "
                f"val; take fewer for it: train:{fewer} and val:{fewer}, for example"
            )
    _check_h5(data, index, Path(h5_file))
    corners = _integer_corners(data["boxes_1024"])
    graphs = Graphs(index, [], [], [], [])
    kept = np.ones(len(index), dtype=bool)
    for position, image in enumerate(index):
        first = data["img_to_first_box"][image]
        objects = slice(first, data["img_to_last_box"][image] + 1)
        relations = _relations_of(data, image, first)
        if drop_non_overlapping:
            relations = relations[_overlapping(corners[objects], relations)]
            kept[position] = len(relations) > 0
        if kept[position]:
            graphs.boxes.append(corners[objects])
            graphs.labels.append(data["labels"][objects, 0])
            graphs.attributes.append(data["attributes"][objects])
            graphs.relations.append(relations)
    graphs.index = index[kept]
    return graphs


def load_names(dicts_file: str | Path) -> tuple[list[str], list[str], list[str]]:
    """Return class, predicate and attribute names in the order of their ids, which start at 1; no attributes if the
    file has none. Raises BadInput if names are missing or their ids are not consecutive."""
    info = read_json(Path(dicts_file))
    names = []
    faults = []
    for key in ("label_to_idx", "predicate_to_idx", "attribute_to_idx"):
        ids = info.get(key, {} if key == "attribute_to_idx" else None)
        if not isinstance(ids, dict):
            faults.append(f"{dicts_file}: key `{key}` missing; expected an object name -> id from 1")
            continue
        expected = {str(number) for number in range(1, len(ids) + 1)}
        if {repr(number) for number in ids.values()} != expected:
            faults.append(f"{dicts_file}: ids of `{key}` are not 1 .. {len(ids)}")
        else:
            names.append(sorted(ids, key=ids.get))
    if faults:
        raise BadInput(faults)
    return names[0], names[1], names[2]


def load_image_list(image_data_file: str | Path, image_dir: Path | ImageSources, num_images: int) -> list[dict]:
    """Return the entries {image_id, width, height, file_name} of image_data.json in the order of the rows of the HDF5
    file.

    All entries are returned if there are `num_images`; else those without the four corrupted images of Visual Genome,
    if there are that many; else those whose image file exists (as the original always does). Raises BadInput if none of
    these three has `num_images` entries.
    """
    entries = read_json(Path(image_data_file), list)
    wrong = [entry for entry in entries if not _is_image(entry)]
    if wrong:
        expected = "a list of objects, each with image_id and, as whole numbers, width and height"
        raise BadInput([f"{image_data_file}: {str(entry)[:80]}; expected {expected}" for entry in wrong[:20]])
    suffix = _suffix(entries, image_dir)
    entries = [entry | {"file_name": f"{entry['image_id']}{suffix}"} for entry in entries]
    sound = [entry for entry in entries if entry["image_id"] not in CORRUPTED_IMAGES]
    for candidates in (entries, sound):
        if len(candidates) == num_images:
            return candidates
    there = [entry for entry in sound if is_there(image_dir / entry["file_name"])]
    if len(there) == num_images:
        return there
    raise BadInput(
        f"{image_data_file}: {len(entries)} images are listed, {len(there)} of them are in {image_dir}, but the graphs "
        f"are of {num_images} images; the files do not belong together or images are missing"
    )


def _suffix(entries: list[dict], image_dir: Path | ImageSources) -> str:
    """Return the suffix of the image files, judged by those of the first entries."""
    for suffix in VG_IMAGE_SUFFIXES:
        if any(is_there(image_dir / f"{entry['image_id']}{suffix}") for entry in entries[:20]):
            return suffix
    return VG_IMAGE_SUFFIXES[0]


def _is_image(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("image_id"), int | str):
        return False
    sides = (entry.get("width"), entry.get("height"))
    return all(isinstance(side, int) and 0 < side < 2**31 for side in sides)


def scale_boxes(boxes_1024: np.ndarray, size_wh: tuple[int, int]) -> np.ndarray:
    """Scale boxes (n, 4) of the file to pixels of an image with this width and height, float64, not clipped."""
    return boxes_1024 / BOX_SCALE * max(size_wh)


def clip_to_last_pixel(boxes_xyxy: np.ndarray, size_wh: tuple[int, int]) -> np.ndarray:
    """Clip boxes (n, 4) to [0, width - 1] x [0, height - 1], float32, as in the program behind the published
    results."""
    width, height = size_wh
    limit = np.asarray([width, height, width, height]) - 1
    return np.clip(boxes_xyxy, 0, limit).astype(np.float32)


def drop_empty(boxes_xyxy: np.ndarray, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) bool, True for boxes that have width and height, and the relations between such boxes, with their
    rows renumbered."""
    keep = (boxes_xyxy[:, 2:] > boxes_xyxy[:, :2]).all(1)
    row_of = np.cumsum(keep) - 1  # boxes kept: yes, no, yes; rows of these: 0, -, 1
    relations = relations[keep[relations[:, :2]].all(1)]
    ends = row_of[relations[:, :2]]
    return keep, np.column_stack([ends, relations[:, 2:]])


def read_visual_genome(
    folder: str | Path,
    split: str,
    reading: Reading,
    num_val_images: int = NUM_VAL_IMAGES,
    keep_images_without_relations: bool | Literal["train"] = False,
    drop_non_overlapping: bool = False,
) -> DetectionTable:
    """Read one split as a DetectionTable, which is cached by the content of the three files and the options.

    folder: see `find_files`. For the other options see `load_graphs`. Boxes that clipping leaves without width or
    height are dropped from train, together with their relations; val and test keep them. Repeated relations are kept.
    """
    files = find_files(Path(folder))
    options = [split, num_val_images, keep_images_without_relations, drop_non_overlapping]

    def read(images: Path | ImageSources) -> CheckedAnnotations:
        return _checked(load_graphs(files[0], *options), files, images, split)

    return read_graphs(files, read, reading, split, key=["visual_genome", *options])


def _checked(graphs: Graphs, files: Sequence[Path], image_dir: Path | ImageSources, split: str) -> CheckedAnnotations:
    h5_file, names_file, images_file = files
    classes, predicates, attributes = load_names(names_file)
    with h5py.File(h5_file, "r") as h5:
        images = load_image_list(images_file, image_dir, len(h5["split"]))
    rows = []
    problems = []
    for position, image in enumerate(graphs.index):
        faults = _faults(graphs, position, len(classes), len(predicates), len(attributes))
        image_id = images[image]["image_id"]
        for severity, message in faults:
            problems.append(Problem(severity, str(h5_file), image_id, None, message))
        if not any(severity == "error" for severity, _ in faults):
            row = _row(
                graphs,
                position,
                images[image],
                drop=split == "train",
                attributes=bool(attributes),
            )
            rows.append(row)
    listed = {entry["file_name"] for entry in images}
    categories = tuple(Category(number + 1, class_name) for number, class_name in enumerate(classes))
    return CheckedAnnotations(*columns_of_rows(rows), categories, predicates, attributes, problems, listed)


def _faults(
    graphs: Graphs,
    position: int,
    num_classes: int,
    num_predicates: int,
    num_attributes: int,
) -> list[tuple[str, str]]:
    labels = graphs.labels[position]
    relations = graphs.relations[position]
    faults = []
    wrong = np.setdiff1d(labels, np.arange(1, num_classes + 1))
    if len(wrong):
        faults.append(("error", f"class {int(wrong[0])} is not defined; ids are 1 .. {num_classes}"))
    wrong = np.setdiff1d(relations[:, 2], np.arange(1, num_predicates + 1))
    if len(wrong):
        faults.append(("error", f"predicate {int(wrong[0])} is not defined; ids are 1 .. {num_predicates}"))
    wrong = np.setdiff1d(graphs.attributes[position], np.arange(num_attributes + 1))
    if num_attributes and len(wrong):
        faults.append(("error", f"attribute {int(wrong[0])} is not defined; ids are 1 .. {num_attributes}, 0 for none"))
    if (relations[:, 0] == relations[:, 1]).any():
        faults.append(("warning", "a relation of a box to itself, kept"))
    return faults


def _row(graphs: Graphs, position: int, entry: dict, drop: bool, attributes: bool) -> dict:
    size_wh = entry["width"], entry["height"]
    boxes = clip_to_last_pixel(scale_boxes(graphs.boxes[position], size_wh), size_wh)
    labels = graphs.labels[position]
    relations = graphs.relations[position]
    of_objects = graphs.attributes[position]
    if drop:
        keep, relations = drop_empty(boxes, relations)
        boxes = boxes[keep]
        labels = labels[keep]
        of_objects = of_objects[keep]
    objects = {
        "id": list(range(1, len(boxes) + 1)),
        "bbox": boxes.tolist(),
        "category": (labels - 1).tolist(),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist(),
        "iscrowd": [0] * len(boxes),
    }
    if attributes:
        objects["attributes"] = of_objects.tolist()
    subjects, others, predicates = (relations - [0, 0, 1]).T.tolist()
    return {
        "image_id": entry["image_id"],
        "file_name": entry["file_name"],
        "width": entry["width"],
        "height": entry["height"],
        "objects": objects,
        "relations": {"subject": subjects, "object": others, "predicate": predicates},
    }


def _read_h5(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of the file: those with a row for each image (I,), the others with as many columns as
    `ARRAY_COLUMNS` says. They are integers, except boxes, which may be fractions."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file; expected the HDF5 file with the graphs")
    try:
        with h5py.File(path, "r") as file:
            keys = (*PER_IMAGE_ARRAYS, *ARRAY_COLUMNS)
            missing = [key for key in keys if not isinstance(file.get(key), h5py.Dataset)]
            if missing:
                raise BadInput([f"{path}: data set `{key}` missing" for key in missing])
            data = {key: file[key][:] for key in keys}
            attributes = file["attributes"][:] if "attributes" in file else None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:  # raised by h5py for damaged files
        raise BadInput(f"{path}: not a readable HDF5 file: {error}") from error
    if attributes is None:
        attributes = np.zeros((len(data["labels"]), NUM_ATTRIBUTE_COLUMNS), np.int64)
    data["attributes"] = attributes
    images = len(data["split"])
    faults = []
    for key, values in data.items():
        rows = values.reshape(len(values), np.prod(values.shape[1:], dtype=int))
        is_of_images = key in PER_IMAGE_ARRAYS
        width = 1 if is_of_images else ARRAY_COLUMNS.get(key, values.shape[-1])
        has_shape = rows.shape[1] == width and values.ndim <= 2
        has_length = not is_of_images or len(values) == images
        kinds = "iuf" if key == "boxes_1024" else "iu"
        if not has_shape or not has_length or values.dtype.kind not in kinds:
            expected = f"({images},)" if is_of_images else f"(N, {width})" + " or (N,)" * (width == 1)
            kind = "numbers" if key == "boxes_1024" else "integers"
            faults.append(f"{path}: data set `{key}` is {values.dtype} {values.shape}; expected {kind} {expected}")
        data[key] = rows[:, 0] if is_of_images else rows
    if faults:
        raise BadInput(faults)
    return data


def _check_h5(data: dict[str, np.ndarray], index: np.ndarray, path: Path) -> None:
    """Check that the arrays of the file are consistent; the original asserts the same."""
    faults = []
    centre_wh = data["boxes_1024"]
    centre_fits = (centre_wh[:, :2] >= 0).all(1)
    size_fits = (centre_wh[:, 2:] > 0).all(1)
    sound = np.isfinite(centre_wh).all(1) & centre_fits & size_fits
    for row in np.flatnonzero(~sound)[:20]:
        faults.append(f"{path}: box row {row} is centre x, y, w, h = {centre_wh[row].tolist()}; expected w, h > 0")
    for first, second in (("relationships", "predicates"), ("boxes_1024", "labels"), ("boxes_1024", "attributes")):
        if len(data[first]) != len(data[second]):
            faults.append(f"{path}: {len(data[first])} {first}, {len(data[second])} {second}")
    for kind, rows in (("box", len(centre_wh)), ("rel", len(data["relationships"]))):
        first = data[f"img_to_first_{kind}"][index].astype(np.int64)
        last = data[f"img_to_last_{kind}"][index].astype(np.int64)
        there = (first >= 0) | (kind == "box")
        outside = (first < 0) | (last < first) | (last >= rows)
        for image in index[there & outside][:20]:
            faults.append(f"{path}: image row {image}: its {kind} rows are not among the {rows} of the file")
    if faults:
        raise BadInput(faults)
    for image in index:
        first = data["img_to_first_box"][image]
        last = data["img_to_last_box"][image]
        relations = _relations_of(data, image, first)
        ends = relations[:, :2]
        if len(ends) and not (0 <= ends.min() and ends.max() <= last - first):
            faults.append(f"{path}: image row {image}: a relation names a box outside rows {first} .. {last}")
    if faults:
        raise BadInput(faults)


def _relations_of(data: dict[str, np.ndarray], image: int, first_box: int) -> np.ndarray:
    """Return (r, 3) int64 relations of one image, box rows counted within the image."""
    first = data["img_to_first_rel"][image]
    if first < 0:
        return np.zeros((0, 3), np.int64)
    rows = slice(first, data["img_to_last_rel"][image] + 1)
    ends = data["relationships"][rows].astype(np.int64) - first_box
    predicates = data["predicates"][rows, 0].astype(np.int64)
    return np.column_stack([ends, predicates])


def _integer_corners(centre_wh: np.ndarray) -> np.ndarray:
    """Convert centre boxes to integer corners: the left top corner is truncated towards 0, then width and height
    added."""
    corners = centre_wh.copy()
    left_top = centre_wh[:, :2] - centre_wh[:, 2:] / 2
    corners[:, :2] = left_top.astype(centre_wh.dtype)
    corners[:, 2:] += corners[:, :2]
    return corners


def _overlapping(boxes: np.ndarray, relations: np.ndarray) -> np.ndarray:
    subjects = boxes[relations[:, 0]]
    objects = boxes[relations[:, 1]]
    left_top = np.maximum(subjects[:, :2], objects[:, :2])
    right_bottom = np.minimum(subjects[:, 2:], objects[:, 2:])
    sides = right_bottom - left_top + 1
    return (sides > 0).all(1)
