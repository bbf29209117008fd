"""Reads all splits of a data set, and writes them in another format; `scripts/convert.py` parses the flags."""

import argparse
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.data.classes import check_class_map, class_map_of
from toolkit.data.formats import open_dataset, recognise
from toolkit.data.splits import share_of
from toolkit.data.table import DetectionTable
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.writers import unsupported_by, write_folder


def convert(options: argparse.Namespace) -> None:
    """Write the data set of `options` in another format, and print what each split has and what it lost."""
    logging.disable(logging.WARNING)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # read when `datasets` is imported
    if options.target.exists() and (not options.target.is_dir() or any(options.target.iterdir())):
        raise BadInput(f"{options.target}: not an empty folder; give a new one")
    tables = open_source_splits(
        options.source, options.format, options.image_dir, options.on_error, options.classes, options.masks
    )
    if options.val is not None and "val" in tables:
        raise BadInput(f"--val {options.val}: {options.source} has a split val already")
    if options.val is not None:
        share = share_of(options.val)
        if share is None:
            raise BadInput(f"--val {options.val}: expected a fraction between 0 and 1, or a fold such as 1/5")
        tables["train"], tables["val"] = hold_out(tables["train"], share)
    format = "hub" if options.to == "parquet" else options.to
    for split, table in tables.items():
        without_polygon = write_folder(table, options.target, split, format, link=options.link)
        left_out = sum(problem.severity == "error" for problem in table.problems)
        lost = unsupported_by(table, format)
        lost += [f"of objects whose mask has no pixel, boxes are written: {without_polygon}"] * bool(without_polygon)
        lost += [f"{left_out} faulty records were left out"] * bool(left_out)
        remarks = f" ({'; '.join(lost)})" if lost else ""
        print(f"{options.target}: {split}, {len(table)} images, {table.described_boxes()}{remarks}")


def open_source_splits(
    source: str, format: str, image_dir: list[str] | None, on_error: str, classes: Mapping, masks: bool = False
) -> dict[str, DetectionTable]:
    """Return tables by split: all splits of a folder, or an annotation file as the split train.

    on_error: "drop" leaves faulty records out, "raise" makes them an error. classes: as `data.classes`; empty: the
    classes stay as they are. masks: read the masks of objects too.
    """
    reading = {"format": format, "image_dir": image_dir, "on_error": on_error, "classes": classes, "masks": masks}
    if not Path(source).expanduser().is_dir():
        return {"train": open_dataset(source, **reading)}
    layout = recognise(source, format)
    print(layout)
    # if train exists, trainval is the union of train and val
    names = [name for name in layout.splits if name != "trainval" or "train" not in layout.splits]
    # a split may lack a class that another one has
    tables = {name: open_dataset(name, path=source, classes_must_exist=False, **reading) for name in names}
    as_read = [table.before_classes or table for table in tables.values()]
    listed = dict.fromkeys(name for table in as_read for name in table.class_names)
    check_class_map(class_map_of(classes), list(listed), source)
    return {"train" if name == "all" else name: table for name, table in tables.items()}
