"""Data sets of any format as one Arrow table."""

from pathlib import Path

from toolkit.data.coco import read_coco
from toolkit.data.hub import read_hub
from toolkit.data.shapes import SPLITS, ensure_shapes
from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput

FORMATS = ("auto", "coco", "shapes", "hub")


def open_dataset(
    source: str | Path,
    *,
    image_dir: str | Path | None = None,
    format: str = "auto",
    name: str | None = None,
    on_error: str = "raise",
    cache_dir: str | Path | None = None,
    check_images: bool | str = True,
) -> DetectionTable:
    """Opens one split, validated and cached.

    source: a COCO annotation file; "train" or "val" of the bundled shapes with format="shapes"; with `name` (a hub
        data set or a local `datasets` folder) the split's name.
    format: "auto" goes by `name` and by the suffix of `source`.
    on_error, cache_dir, check_images: as in `read_coco`.
    Raises BadInput: every defect at once (on_error="raise"), a missing file, an unknown format.
    """
    source = str(source)
    if format not in FORMATS:
        raise BadInput(f"data format {format!r} is not known; choose from {', '.join(FORMATS)}")
    if format == "auto":
        format = "hub" if name is not None else "coco" if source.lower().endswith(".json") else _unknown(source)
    if format == "hub":
        if name is None:
            raise BadInput(f"format 'hub' with split {source!r}: set the data set's name or folder (--data.name)")
        return read_hub(name, source, on_error=on_error, cache_dir=cache_dir, check_images=check_images)
    if format == "shapes":
        if source not in SPLITS:
            raise BadInput(f"the bundled shapes have no split {source!r}; choose from {', '.join(SPLITS)}")
        folder = ensure_shapes(cache_dir)
        return read_coco(folder / "annotations" / f"{source}.json", folder / source, cache_dir=cache_dir)
    return read_coco(source, image_dir, on_error=on_error, cache_dir=cache_dir, check_images=check_images)


def _unknown(source: str) -> str:
    hint = "; the bundled data needs format 'shapes'" if source in SPLITS else ""
    raise BadInput(f"{source}: cannot tell the format (a COCO file ends in .json){hint}; "
                   f"choose a format from {', '.join(FORMATS[1:])}")
