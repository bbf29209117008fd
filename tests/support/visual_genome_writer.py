"""Writes a table in the layout of `toolkit.detectors.scene_graphs.readers.visual_genome`."""

import json
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
    if len({(*table.class_names, *table.predicates, *table.attributes) for table, _ in tables}) > 1:
        raise BadInput("classes, predicates or attributes differ")
    columns = {
        key: []
        for key in (
            "boxes_1024",
            "labels",
            "attributes",
            "relationships",
            "predicates",
            "split",
        )
    }
    ranges = {f"img_to_{end}_{kind}": [] for end in ("first", "last") for kind in ("box", "rel")}
    written, images = {"box": 0, "rel": 0}, []
    for table, split in tables:
        for i in range(len(table)):
            row = table.row(i)
            images.append({key: row[key] for key in ("image_id", "width", "height")})
            columns["split"].append([split])
            _append(row, columns, ranges, written)
    folder.mkdir(parents=True, exist_ok=True)
    _write_h5(folder / "VG-SGG-with-attri.h5", columns, ranges)
    (folder / "image_data.json").write_text(json.dumps(images))
    names = {
        "label": first.class_names,
        "predicate": list(first.predicates),
        "attribute": list(first.attributes),
    }
    info = {f"{kind}_to_idx": {name: n + 1 for n, name in enumerate(listed)} for kind, listed in names.items()}
    info |= {f"idx_to_{kind}": {str(n + 1): name for n, name in enumerate(listed)} for kind, listed in names.items()}
    (folder / "VG-SGG-dicts-with-attri.json").write_text(json.dumps(info))


def _append(
    row: dict,
    columns: dict[str, list],
    ranges: dict[str, list],
    written: dict[str, int],
) -> None:
    keep = row["objects"]["iscrowd"] == 0
    number = np.cumsum(keep) - 1
    ends = np.stack([row["relations"][key] for key in ("subject", "object")], 1)
    kept = keep[ends].all(1)
    corners = np.round(row["objects"]["bbox"][keep] * (BOX_SCALE / max(row["width"], row["height"]))).astype(np.int64)
    wh = np.maximum(corners[:, 2:] - corners[:, :2], 1)
    columns["boxes_1024"].append(np.concatenate([corners[:, :2] + (wh + 1) // 2, wh], 1))
    columns["labels"].append(row["objects"]["category"][keep][:, None] + 1)
    columns["attributes"].append(row["objects"].get("attributes", np.zeros((len(keep), 0), np.int64))[keep])
    columns["relationships"].append(number[ends[kept]] + written["box"])
    columns["predicates"].append(row["relations"]["predicate"][kept][:, None] + 1)
    for kind, count in (("box", int(keep.sum())), ("rel", int(kept.sum()))):
        ranges[f"img_to_first_{kind}"].append(written[kind] if count else -1)
        written[kind] += count
        ranges[f"img_to_last_{kind}"].append(written[kind] - 1 if count else -1)


def _write_h5(path: Path, columns: dict[str, list], ranges: dict[str, list]) -> None:
    wide = {"boxes_1024": 4, "labels": 1, "relationships": 2, "predicates": 1}
    wide["attributes"] = widest = max([NUM_ATTRIBUTE_COLUMNS, *(part.shape[1] for part in columns["attributes"])])
    columns["attributes"] = [np.pad(a, ((0, 0), (0, widest - a.shape[1]))) for a in columns["attributes"]]
    small = ("boxes_1024", "relationships")
    with h5py.File(path, "w") as file:
        for key, width in wide.items():
            values = np.concatenate([np.zeros((0, width), np.int64), *columns[key]])
            file[key] = values.astype(np.int32 if key in small else np.int64)
        file["split"] = np.concatenate(columns["split"]).astype(np.int64)
        for key, values in ranges.items():
            file[key] = np.asarray(values, np.int64)
