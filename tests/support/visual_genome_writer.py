"""Writes a table in the layout of `toolkit.detectors.scene_graphs.readers.visual_genome`."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from toolkit.base.errors import BadInput
from toolkit.data.table import DetectionTable
from toolkit.detectors.scene_graphs.readers.visual_genome import (
    BOX_SCALE,
    NUM_ATTRIBUTE_COLUMNS,
)


def write_visual_genome(tables: Sequence[tuple[DetectionTable, int]], folder: Path) -> None:
    """Writes the HDF5 file, the names and the image list of some tables into `folder`.

    tables: (table, value of `split`: 0 train and val, 2 test), with the same classes, predicates and attributes and
    integer image ids; the reader expects each image as `<image_id>.jpg`. Boxes are rounded to whole pixels of an image
    whose longer side is 1024, at least 1 wide. Crowd regions are left out with their relations.
    """
    first = tables[0][0]
    names = names_of(first)
    for table, _ in tables:
        if names_of(table) != names:
            raise BadInput("classes, predicates or attributes differ")
    columns = defaultdict(list)
    written = {"box": 0, "rel": 0}
    images = []
    for table, split in tables:
        for i in range(len(table)):
            row = table.row(i)
            image = {key: row[key] for key in ("image_id", "width", "height")}
            images.append(image)
            columns["split"].append([split])
            _append(row, columns, written)
    folder.mkdir(parents=True, exist_ok=True)
    _write_h5(folder / "VG-SGG-with-attri.h5", columns)
    (folder / "image_data.json").write_text(json.dumps(images))
    info = {}
    for kind, listed in names.items():
        to_number = {name: number for number, name in enumerate(listed, start=1)}
        info[f"{kind}_to_idx"] = to_number
        info[f"idx_to_{kind}"] = {str(number): name for name, number in to_number.items()}
    (folder / "VG-SGG-dicts-with-attri.json").write_text(json.dumps(info))


def names_of(table: DetectionTable) -> dict[str, list[str]]:
    return {
        "label": list(table.class_names),
        "predicate": list(table.predicates),
        "attribute": list(table.attributes),
    }


def _append(row: dict, columns: dict[str, list], written: dict[str, int]) -> None:
    objects = row["objects"]
    relations = row["relations"]
    keep = objects["iscrowd"] == 0
    number = np.cumsum(keep) - 1
    subjects = relations["subject"]
    ends = np.stack([subjects, relations["object"]], 1)
    kept = keep[ends].all(1)
    scale = BOX_SCALE / max(row["width"], row["height"])
    boxes = objects["bbox"][keep] * scale
    corners = np.round(boxes).astype(np.int64)
    top_left = corners[:, :2]
    sides = corners[:, 2:] - top_left
    wh = np.maximum(sides, 1)
    centres = top_left + (wh + 1) // 2
    no_attributes = np.zeros((len(keep), 0), np.int64)
    attributes = objects.get("attributes", no_attributes)
    labels = objects["category"][keep] + 1
    predicates = relations["predicate"][kept] + 1
    of_image = {
        "boxes_1024": np.concatenate([centres, wh], 1),
        "labels": labels[:, None],
        "attributes": attributes[keep],
        "relationships": number[ends[kept]] + written["box"],
        "predicates": predicates[:, None],
    }
    for key, values in of_image.items():
        columns[key].append(values)
    counts = {
        "box": int(keep.sum()),
        "rel": int(kept.sum()),
    }
    for kind, count in counts.items():
        first = written[kind]
        written[kind] += count
        last = written[kind] - 1
        columns[f"img_to_first_{kind}"].append(first if count else -1)
        columns[f"img_to_last_{kind}"].append(last if count else -1)


def _write_h5(path: Path, columns: dict[str, list]) -> None:
    widest = max(part.shape[1] for part in columns["attributes"])
    width = max(NUM_ATTRIBUTE_COLUMNS, widest)
    padded = []
    for part in columns["attributes"]:
        wider = np.zeros((len(part), width), np.int64)
        wider[:, : part.shape[1]] = part
        padded.append(wider)
    columns["attributes"] = padded
    with h5py.File(path, "w") as file:
        for key, parts in columns.items():
            is_range = key.startswith("img_to_")
            values = np.asarray(parts) if is_range else np.concatenate(parts)
            is_small = key in ("boxes_1024", "relationships")
            file[key] = values.astype(np.int32 if is_small else np.int64)
