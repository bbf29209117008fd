"""Recognition of the format and the splits of a folder as an annotation tool leaves it."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from toolkit.base.errors import BadInput
from toolkit.data.formats import NOT_STREAMED
from toolkit.data.formats.annotated import ALL, split_of
from toolkit.data.image_sources import open_sources
from toolkit.data.table import DetectionTable

# Modules of the formats in the order in which they are tried: the surest signs first. Names as `data.format` has them.
FOLDERS = {"hub": "hub_folder", "voc": "voc", "coco": "coco", "yolo": "yolo", "csv": "csv"}
NAMED = 5  # files that are not used, in one line


@dataclass(frozen=True)
class RecognisedFolder:
    """The format and the splits of a folder.

    others: further formats that it could be read as.
    unused: files that are not read.
    missing: splits that it names but that do not exist.
    """

    path: Path
    format: str
    splits: tuple[str, ...]
    others: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        splits = "not split" if self.splits == (ALL,) else f"splits {', '.join(self.splits)}"
        also = f"; it can be read as {', '.join(self.others)} too (data.format)" if self.others else ""
        module = module_of(self.format)
        years = module.together(self.path) if self.format == "voc" else ""
        gone = f"; not there: {', '.join(self.missing)}" if self.missing else ""
        title = f"{self.path}: {module.TITLE}{years}, {splits}{also}{gone}"
        if not self.unused:
            return title
        named = ", ".join(self.unused[:NAMED]) + ", ..." * (len(self.unused) > NAMED)
        return f"{title}; not used, as its split has another file or its name says none: {named}"


def module_of(format: str) -> ModuleType:
    """Load the module of one of `FOLDERS`; a run on one format does without the others."""
    return importlib.import_module(f"toolkit.data.formats.{FOLDERS[format]}")


def recognise(path: str | Path, format: str = "auto") -> RecognisedFolder:
    """Recognise the format and the splits of a folder (or of a single annotation file).

    format: "auto" takes the first format of `FOLDERS` that recognises it; a name takes that one.

    Raises BadInput: the folder does not exist or has none of the formats; the message says what was looked for.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInput(f"{path}: no such folder (data.path)")
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        path = path.parent  # data.yaml
    tried = [name for name in FOLDERS if format in ("auto", name)]
    matches = {name: module_of(name).recognise(path) for name in tried}
    matches = {name: splits for name, splits in matches.items() if splits}
    if not matches and "yolo" in tried and module_of("yolo").labels_alone(path):
        matches = {"yolo": (ALL,)}
    if not matches:
        known = "Pascal VOC (Annotations/*.xml), YOLO (data.yaml, labels/*.txt), COCO (annotations/*.json, "
        known += "_annotations.coco.json), CSV (columns image, x1, y1, x2, y2, label), or `datasets` (Parquet)"
        wanted = f"nothing of the format {format!r}" if format in FOLDERS else f"none of the formats: expected {known}"
        below = list(map(str, module_of("voc").folders_with_annotations(path))) if "voc" in tried else []
        more = f", {len(below)} in all" if len(below) > 5 else ""
        hint = f"; annotations of Pascal VOC lie in {', '.join(below[:5])}{more}: give the folder of one data set, "
        hint += "which has these and its images (data.path)"
        listed = "" if format == "auto" else f"; known are {known}"
        raise BadInput(f"{path}: {wanted} was found in this folder{listed}{hint if below else ''}")
    name, *others = matches
    missing = module_of("yolo").missing(path) if name == "yolo" else ()
    unused = module_of(name).unused(path)
    return RecognisedFolder(path, name, matches[name], tuple(others), tuple(unused), tuple(missing))


def split_in(folder: RecognisedFolder, split: str) -> str:
    """Return the name that a folder has for a split. Raises BadInput if it does not have the split."""
    wanted = split_of(split) or split
    if wanted not in folder.splits and wanted == "train":
        wanted = next((name for name in ("trainval", ALL) if name in folder.splits), wanted)
    if wanted not in folder.splits:
        advice = "; hold a share of the training data out with --data.val 0.2" if wanted == "val" else ""
        raise BadInput(f"{folder}; it has no split {split!r}{advice}")
    return wanted


def open_folder(
    path: str | Path, split: str, *, format: str = "auto", image_dir: str | Path | Sequence[str] | None = None,
    **options
) -> DetectionTable:
    """Open one split of a folder; `valid` and `validation` are `val`.

    Training data is the split `train`, else `trainval`, else all there is. Options as `open_dataset`.

    Raises BadInput: as `recognise`, or the split does not exist.
    """
    recognised = recognise(path, format)
    wanted = split_in(recognised, split)
    if options.get("streaming", False) and recognised.format != "hub":
        raise BadInput(f"{recognised}; {NOT_STREAMED}")
    module = module_of(recognised.format)
    return module.read(recognised.path, wanted, image_dir=open_sources(image_dir), **options)
