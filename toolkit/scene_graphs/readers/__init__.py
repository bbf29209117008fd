"""Data sets with relations: one module each, `read_<format>`, and what reads their splits as tables."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput


def open_graphs(
    source: str, image_dir: str | Path | Sequence[str] | None, format: str, name: str | Path | None, **options
) -> DetectionTable:
    """One split of a data set; arguments as of `toolkit.data.formats.open_dataset`. Raises BadInput."""
    split, _, count = source.partition(":")
    problems = []
    if name is None:
        what = "annotation file psg.json" if format == "psg" else "folder of its files"
        problems.append(f"format {format!r}: set the {what} (--data.name)")
    if image_dir is None:
        problems.append(f"format {format!r}: set the folder of the images (--data.image_dir)")
    if split not in ("train", "val", "test") or not (count.isdecimal() or source == split):
        problems.append(f"format {format!r} has no split {source!r}; expected train, val, test, train:50 or val:50")
    if problems:
        raise BadInput(problems)
    if count:
        options["num_val_images"] = int(count)
    read = getattr(importlib.import_module(f"{__name__}.{format}"), f"read_{format}")
    return read(Path(name).expanduser(), image_dir, split, **options)
