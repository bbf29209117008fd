"""Readers of data sets: every format becomes one Arrow table. The module of a format is loaded when it is asked for."""

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, ModuleType

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.base.files import MAX_IMAGE_PIXELS, near_names
from toolkit.base.text import first_names
from toolkit.data.annotations import Reading
from toolkit.data.choices import FOLDERS, FORMATS, OF_FOLDERS_ALONE
from toolkit.data.classes import check_class_map, class_map_of, with_classes
from toolkit.data.formats.look_alikes import OF_SETS, about_look_alike, tool_of
from toolkit.data.image_sources import open_sources
from toolkit.data.layout import UNSPLIT, Layout, Splits, split_of
from toolkit.data.table import DetectionTable

WITHOUT_MASKS = ("csv", "visual_genome", "psg", "vrd", "gqa", "open_images")
MAX_UNUSED_NAMED = 5  # files that are not used, in one line
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
    white: int | None = None,
    streaming: bool = False,
    keep_images_without_relations: bool = False,
    unlisted_classes: str = "unknown",
    classes: Mapping[str, str | None] = MappingProxyType({}),
    classes_must_exist: bool = True,
    masks: bool = False,
    crowds: str = "ignore",
) -> DetectionTable:
    """Open one split, validated and cached; of several sources or folders one table that joins them.

    source: a COCO annotation file; "train" or "val" of the bundled shapes with format="shapes"; with `name` (a hub
        data set or a local `datasets` folder) the name of the split. With the formats "visual_genome", "vrd", "gqa" and
        "open_images" (`name` is the folder of their files) and "psg" (`name` is psg.json): "train", "val" or "test";
        "train:50" and "val:50" count 50 validation images instead of the published 5000 and 1000.
        A folder or a CSV file means its one split, or its training data, a list (`toolkit.data.joining`) for many.
    path: folder of any format of `FOLDERS`, or a list of such folders; `source` is then the name of a split.
    format: "auto" finds it by `path`, by `name` or by the suffix of `source`; with `path` "shapes" means "auto".
    unlisted_classes: how a class that one of several data sets does not list counts there: as "unknown" or as
    "background".
    classes: new name of each class by its old name; None leaves its boxes out (`toolkit.data.classes.with_classes`).
    classes_must_exist: whether an old name in `classes` that the data lack is an error; False: it is ignored.
    The other arguments are those of `Reading`.
    Raises BadInput: every defect at once (on_error="raise"), a missing file, an unknown format, every unknown old name.
    """
    reading = Reading(
        image_dir=image_dir,
        on_error=on_error,
        cache_dir=cache_dir,
        check_images=check_images,
        max_image_pixels=max_image_pixels,
        white=white,
        format=format,
        name=name,
        streaming=streaming,
        keep_images_without_relations=keep_images_without_relations,
        masks=masks,
        crowds=crowds,
    )
    class_map = class_map_of(classes)
    if is_several(path, source):
        from toolkit.data.joining import open_joined  # here, since few trainings have several data sets

        sets = pair_folders_and_splits(path, source)
        open_one = partial(_open_one, reading=reading)
        return open_joined(sets, open_one, unlisted_classes, class_map, classes_must_exist)
    table = _open_one(source, path, reading)
    if classes_must_exist:
        check_class_map(class_map, table.class_names, table.name)
    return with_classes(table, class_map)


def _open_one(source: str | Path, path: str | Path | None, reading: Reading) -> DetectionTable:
    """Open one split of one data set; `source` and `path` as of `open_dataset`.

    Raises BadInput: as `open_dataset`; masks are asked for, and the format has none.
    """
    source = str(source)
    if path is not None:
        return open_folder(path, source, reading)
    if reading.format in OF_FOLDERS_ALONE:
        return open_folder(source, "train", reading)
    if reading.format == "auto" and reading.name is None and _is_folder(source):
        return open_folder(source, "train", reading)
    format = _format_of(source, reading.name) if reading.format == "auto" else reading.format
    if reading.streaming and format != "hub":
        raise BadInput(f"format {format!r}: {NOT_STREAMED}")
    check_can_have_masks(format, source, reading)
    read = index.load(index.READERS[format])
    return read(source, replace(reading, format=format))


def check_can_have_masks(format: str, source: str, reading: Reading) -> None:
    """Raise BadInput if masks are asked for, and are not read from data of this format."""
    if reading.masks and format in WITHOUT_MASKS:
        having = [name for name in FORMATS[1:] if name not in WITHOUT_MASKS]
        raise BadInput(
            f"{source}: masks are not read from the format {format!r}; formats with masks are {', '.join(having)}; "
            "or leave model.masks out"
        )


def is_several(*values: object) -> bool:
    """Return whether one of these values (`data.path`, `data.train`, `data.val`) is a list, with one entry for each of
    several data sets.
    """
    return any(isinstance(value, list | tuple) for value in values)


def pair_folders_and_splits(
    path: str | Path | Sequence | None, source: str | Sequence
) -> list[tuple[str | Path | None, str]]:
    """Return (folder, split or file) of each data set; a folder or split that is given once counts for all of them.

    Raises BadInput: the two lists differ in length, a list is empty, or a set is named twice.
    """
    paths = list(path) if is_several(path) else [path]
    sources = list(source) if is_several(source) else [source]
    lengths = (len(paths), len(sources))
    count = max(lengths)
    if not set(lengths) <= {1, count} or not min(lengths):
        raise BadInput(
            f"data.path has {len(paths)} entries, data.train (or data.val) {len(sources)}: give as many of both, or "
            "one of them once"
        )
    if len(paths) == 1:
        paths = paths * count
    if len(sources) == 1:
        sources = sources * count
    sets = list(zip(paths, sources, strict=True))
    faults = []
    for (folder, name), times in Counter(sets).items():
        if times > 1:
            faults.append(f"{folder or name}: named twice; data.shares says how often a data set is drawn")
    if faults:
        raise BadInput(faults)
    return sets


def _is_folder(source: str) -> bool:
    """Return whether a source is a folder, or a file that is read as a folder of one."""
    path = Path(source).expanduser()
    return path.is_dir() or path.is_file() and (path.suffix.lower() == ".csv" or tool_of(path) in OF_SETS)


def _format_of(source: str, name: str | None) -> str:
    """Return the format of what is not a folder. Raises BadInput: nothing says it."""
    if name is not None:
        return "hub"
    if source.lower().endswith(".json"):
        return "coco"
    if split_of(source):
        raise BadInput(
            f"{source}: this is the name of a split, but no data set is given: give its folder as data.path, or a file "
            "in place of the split; data.val can also be a share such as 0.2, and the bundled data need data.format "
            "shapes"
        )
    path = Path(source).expanduser()
    if not path.exists():
        raise BadInput(f"{source}: no such file or folder{near_names(path)}")
    look_alike = about_look_alike(Layout(path)) if path.suffix.lower() in (".xml", ".csv") else ""
    if look_alike:
        raise BadInput(f"{source}: {look_alike}")
    rule = "a COCO file ends in .json; --data.path takes a folder, or its data.yaml"
    raise BadInput(f"{source}: cannot tell the format ({rule}); choose a format from {', '.join(FORMATS[1:])}")


# ---- folders as an annotation tool leaves them -----------------------------------------------------------------------


@dataclass(frozen=True)
class RecognisedFolder:
    """The format and the splits of a folder.

    untried: formats after `format` in `FOLDERS`, which were not tried.
    """

    format: str
    found: Splits
    untried: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The folder."""
        return self.found.folder

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits: train, val, test, then the others."""
        return self.found.names

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Further formats that the folder could be read as."""
        return tuple(name for name in self.untried if module_of(name).find(self.found.layout))

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Files and folders of splits that are not read."""
        return tuple(self.found.unused())

    def __str__(self) -> str:
        splits = "not split" if self.splits == (UNSPLIT,) else f"splits {', '.join(self.splits)}"
        also = f"; it can be read as {', '.join(self.others)} too (data.format)" if self.others else ""
        gone = f"; not there: {', '.join(self.found.missing)}" if self.found.missing else ""
        title = f"{self.path}: {module_of(self.format).TITLE}{self.found.together}, {splits}{also}{gone}"
        if not self.unused:
            return title
        named = first_names(self.unused, MAX_UNUSED_NAMED)
        return f"{title}; not used, as its split has another file or its name says none: {named}"


def module_of(format: str) -> ModuleType:
    """Import and return the module of a format in `FOLDERS`; other formats are not imported."""
    return importlib.import_module(f"toolkit.data.formats.{FOLDERS[format]}")


def recognise(path: str | Path, format: str = "auto") -> RecognisedFolder:
    """Recognise the format and the splits of a folder (or of a single annotation file).

    format: "auto": the first format of `FOLDERS` whose module recognises the folder; a name: only this format.

    Raises BadInput: the folder does not exist or has none of the formats; the message says what was looked for.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder (data.path){near_names(path)}")
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        path = path.parent  # data.yaml
    layout = Layout(path)
    tried = [name for name in FOLDERS if format in ("auto", name)]
    for place, name in enumerate(tried, start=1):
        found = module_of(name).find(layout)
        if found:
            return RecognisedFolder(name, found, tuple(tried[place:]))
    labels = module_of("yolo").find_labels(layout) if "yolo" in tried else None
    if labels:
        return RecognisedFolder("yolo", labels)
    raise _not_recognised(layout, format, tried)


def _not_recognised(layout: Layout, format: str, tried: Sequence[str]) -> BadInput:
    """Return the error for a folder that has none of the formats that were tried."""
    path = layout.folder
    others = (name for name in FOLDERS if name not in tried)
    other = next((name for name in others if module_of(name).find(layout)), None)
    if other:
        looks = module_of(other).TITLE
        wanted = f"no data of the format {format!r} were found in this folder"
        return BadInput(f"{path}: {wanted}; it looks like {looks}: leave data.format out")
    look_alike = about_look_alike(layout)
    if look_alike:
        return BadInput(f"{path}: {look_alike}")
    known = "Pascal VOC (Annotations/*.xml), YOLO (data.yaml, labels/*.txt), COCO (annotations/*.json, "
    known += "_annotations.coco.json), CSV (columns image, x1, y1, x2, y2, label), `datasets` (Parquet), and files of "
    known += "LabelMe, VIA, CVAT (for images), Label Studio or Supervisely"
    wanted = f"no data of the format {format!r} were found" if format in FOLDERS else "no data set was recognised"
    below = list(map(str, module_of("voc").folders_with_annotations(layout))) if "voc" in tried else []
    more = f", {len(below)} in all" if len(below) > 5 else ""
    hint = f"; annotations of Pascal VOC are in {', '.join(below[:5])}{more}: give the folder of one data set, "
    hint += "which has these and its images (data.path)"
    return BadInput(f"{path}: {wanted} in this folder; the formats are {known}{hint if below else ''}")


def split_in(folder: RecognisedFolder, split: str) -> str:
    """Return the name that a folder has for a split. Raises BadInput if it does not have the split."""
    wanted = split_of(split) or split
    if wanted not in folder.splits and wanted == "train":
        wanted = next((name for name in ("trainval", UNSPLIT) if name in folder.splits), wanted)
    if wanted not in folder.splits:
        advice = "; hold a share of the training data out with --data.val 0.2" if wanted == "val" else ""
        raise BadInput(f"{folder}; it has no split {split!r}{advice}")
    return wanted


def open_folder(path: str | Path, split: str, reading: Reading) -> DetectionTable:
    """Open one split of a folder; `valid` and `validation` are `val`. The format "shapes" means "auto".

    Training data is the split `train`, else `trainval`, else all there is.

    Raises BadInput: as `recognise`, or the split does not exist.
    """
    recognised = recognise(path, "auto" if reading.format == "shapes" else reading.format)
    wanted = split_in(recognised, split)
    if reading.streaming and recognised.format != "hub":
        raise BadInput(f"{recognised}; {NOT_STREAMED}")
    check_can_have_masks(recognised.format, str(recognised.path), reading)
    module = module_of(recognised.format)
    return module.read(recognised.found, wanted, replace(reading, image_dir=open_sources(reading.image_dir)))
