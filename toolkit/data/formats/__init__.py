"""Readers of data sets: every format becomes one Arrow table."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.data.formats.coco import read_coco
from toolkit.data.table import DetectionTable

FORMATS = ("auto", "coco", "shapes", "hub", *(name for name in index.READERS if name != "shapes"), "voc", "yolo", "csv")
NOT_STREAMED = (
    "data.streaming reads Parquet files of `datasets`; leave it out, or write the data by "
    "scripts/convert.py --to parquet"
)


def open_dataset(
    source: str | Path | Sequence[str],
    *,
    path: str | Path | Sequence[str] | None = None,
    image_dir: str | Path | Sequence[str] | None = None,
    format: str = "auto",
    name: str | None = None,
    on_error: str = "raise",
    cache_dir: str | Path | None = None,
    check_images: bool | str = True,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    streaming: bool = False,
    keep_images_without_relations: bool = False,
    unlisted_classes: str = "unknown",
) -> DetectionTable:
    """Open one split, validated and cached; of several sources or folders one table that joins them.

    source: a COCO annotation file; "train" or "val" of the bundled shapes with format="shapes"; with `name` (a hub
        data set or a local `datasets` folder) the split's name. With format="visual_genome" (`name` is the folder of
        the three files), "vrd", "gqa", "open_images" (of theirs) and "psg" (`name` is psg.json): "train", "val" or
        "test"; "train:50" and "val:50" count 50 validation images instead of the published 5000 and 1000.
        A folder or a CSV file stands for its one split, or for its training data. A list: several, see
        `toolkit.data.joining`.
    path: folder of any format of `toolkit.data.formats.folders`, or several; `source` is then the name of a split.
    image_dir: folder of the images, or several, or archives; see `toolkit.data.image_sources`.
    format: "auto" goes by `path`, by `name` and by the suffix of `source`. With `path` "shapes" means "auto".
    on_error, cache_dir, check_images, max_image_pixels: as in `read_coco`.
    streaming: leave the images in the Parquet files of a `datasets` data set; see `open_hub`.
    keep_images_without_relations: train on those of Visual Genome too, see `load_graphs`; other formats keep all.
    unlisted_classes: of several: how a class that is not in a set's own list counts in its images, "unknown" or
        "background".
    Raises BadInput: every defect at once (on_error="raise"), a missing file, an unknown format.
    """
    if format not in FORMATS:
        raise BadInput(f"data format {format!r} is not known; choose from {', '.join(FORMATS)}")
    options = {
        "on_error": on_error,
        "cache_dir": cache_dir,
        "check_images": check_images,
        "max_image_pixels": max_image_pixels,
    }
    if is_several(path, source):
        options["image_dir"] = image_dir
        options["format"] = format
        options["name"] = name
        options["streaming"] = streaming
        options["keep_images_without_relations"] = keep_images_without_relations
        from toolkit.data.joining import open_joined  # here, since few trainings have several data sets

        return open_joined(paired(path, source), partial(open_dataset, **options), unlisted_classes, cache_dir)
    source = str(source)
    if streaming:
        options["streaming"] = True
    if path is not None:
        kind = "auto" if format == "shapes" else format
        return _open_folder(path, source, format=kind, image_dir=image_dir, **options)
    if format in ("voc", "yolo", "csv") or format == "auto" and name is None and _is_folder(source):
        return _open_folder(source, "train", format=format, image_dir=image_dir, **options)
    if format == "auto":
        format = "hub" if name is not None else "coco" if source.lower().endswith(".json") else _unknown(source)
    if format == "hub":
        if name is None:
            raise BadInput(f"format 'hub' with split {source!r}: set the data set's name or folder (--data.name)")
        from toolkit.data.formats.hub import open_hub  # here, since every start would pay for `datasets`

        return open_hub(name, source, **options)
    if streaming:
        raise BadInput(f"format {format!r}: {NOT_STREAMED}")
    if keep_images_without_relations and format == "visual_genome":
        options["keep_images_without_relations"] = "train"
    if format in index.READERS:
        open_split = index.load(index.READERS[format])
        return open_split(source, image_dir, format, name, **options)
    return read_coco(source, image_dir, **options)


def is_several(*values: object) -> bool:
    """Return whether one of these, `data.path` and `data.train` or `data.val`, names several data sets."""
    return any(isinstance(value, list | tuple) for value in values)


def paired(path: str | Path | Sequence | None, source: str | Sequence) -> list[tuple[str | Path | None, str]]:
    """Return the folder and the split or file of each data set; one that is given once holds for all.

    Raises BadInput: the two lists differ in length, a list is empty, or a set is named twice.
    """
    columns = [list(value) if is_several(value) else [value] for value in (path, source)]
    count = max(map(len, columns))
    if any(len(column) not in (1, count) for column in columns) or not min(map(len, columns)):
        raise BadInput(
            f"data.path has {len(columns[0])} entries, data.train (or data.val) {len(columns[1])}: give as many of "
            "both, or one of them once"
        )
    sets = list(zip(*(column * count if len(column) == 1 else column for column in columns), strict=True))
    twice = [str(folder or name) for (folder, name), times in Counter(sets).items() if times > 1]
    if twice:
        raise BadInput(f"{name}: named twice; data.shares says how often a data set is drawn" for name in twice)
    return sets


def _open_folder(*args, **options) -> DetectionTable:
    from toolkit.data.formats.folders import open_folder  # here, since annotation files need none of it

    return open_folder(*args, **options)


def _is_folder(source: str) -> bool:
    path = Path(source).expanduser()
    return path.is_dir() or path.suffix.lower() == ".csv" and path.is_file()


def _unknown(source: str) -> str:
    hint = "; the bundled data needs format 'shapes'" if source in ("train", "val") else ""
    rule = "a COCO file ends in .json; --data.path takes a folder"
    raise BadInput(f"{source}: cannot tell the format ({rule}){hint}; choose a format from {', '.join(FORMATS[1:])}")
