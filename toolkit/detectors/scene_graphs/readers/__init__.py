"""Readers of data sets with relations, one module each, and the code that makes tables of their splits.

A module has `files_of(place, split)`, the files to read, `annotations_of(files, images, split, num_val)`, their
content, and `NUM_VAL_IMAGES`, the number of training images that are used for val (None: val has files of its own).
`visual_genome` has `read_visual_genome` instead, which also checks the data.
"""

import importlib
from functools import partial
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.data.table import DetectionTable
from toolkit.detectors.scene_graphs.readers.graphs import read_graphs


def open_graphs(source: str, reading: Reading) -> DetectionTable:
    """Read one split of a data set as a table.

    source: train, val or test, or with a number of validation images, such as train:50; see
    `toolkit.data.formats.open_dataset`. Raises BadInput if the setting of the files or of the image folder is missing,
    the split is unknown, or the files cannot be read.
    """
    format = reading.format
    split, _, count = source.partition(":")
    problems = []
    if reading.name is None:
        what = "annotation file psg.json" if format == "psg" else "folder of its files"
        problems.append(f"format {format!r}: set the {what} (--data.name)")
    if reading.image_dir is None:
        problems.append(f"format {format!r}: set the folder of the images (--data.image_dir)")
    if split not in ("train", "val", "test") or not (count.isdecimal() or source == split):
        problems.append(f"format {format!r} has no split {source!r}; expected train, val, test, train:50 or val:50")
    if problems:
        raise BadInput(problems)
    module = importlib.import_module(f"{__name__}.{format}")
    path = Path(reading.name).expanduser()
    num_val = int(count) if count and module.NUM_VAL_IMAGES else module.NUM_VAL_IMAGES
    if format == "visual_genome":
        kept = "train" if reading.keep_images_without_relations else False
        return module.read_visual_genome(
            path,
            split,
            reading,
            num_val,
            keep_images_without_relations=kept,
        )
    files = module.files_of(path, split)
    read = partial(module.annotations_of, files, split=split, num_val=num_val)
    what = f"{format} {split}" if num_val is None else f"{format} {split} {num_val}"
    return read_graphs(files, read, reading, what)
