"""Recognises the files of annotation tools: of those that are read, and of others, to say which they are."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from toolkit.data.layout import Layout

MAX_BYTES = 2**26  # of a file that is parsed to recognise it; of a larger one the first letters are looked at
PROBED_LETTERS = 4096
MAX_FOLDERS = 200
SUFFIXES = (".json", ".xml", ".csv", ".ndjson", ".manifest", ".jsonl")
FILES_PER_FOLDER = 5
# Keys of the first object of a JSON file, all of one set of which the files of a tool have.
KEYS = {
    "LabelMe": ({"shapes", "imagePath"}, {"shapes", "imageData"}, {"shapes", "flags"}),
    "VIA": ({"_via_img_metadata"}, {"_via_settings"}),
    "VIA 3": ({"project", "config", "attribute", "view"},),
    "Label Studio": (
        {"data", "annotations"},
        {"data", "completions"},
        {"data", "predictions"},
        {"image", "annotator", "annotation_id"},
    ),
    "Supervisely": ({"objects", "size"},),
    "CreateML": ({"image", "annotations"}, {"imagefilename", "annotation"}),
    "VoTT": ({"asset", "regions"}, {"assets", "visitedAssets"}, {"assets", "tags"}),
    "Labelbox": ({"data_row", "projects"}, {"Labeled Data", "Label"}),
    "Darwin (V7)": ({"item", "annotations"}, {"dataset", "image", "annotations"}),
    "SuperAnnotate": ({"metadata", "instances"},),
    "SageMaker Ground Truth": ({"source-ref"},),
    "BDD100K or Scalabel": ({"name", "labels"}, {"frames", "config"}),
    "Cityscapes": ({"imgHeight", "imgWidth", "objects"},),
}
OF_SETS = ("VIA", "CVAT XML", "Label Studio")  # tools that are read whose file is one for many images
READ = ("LabelMe", "Supervisely", *OF_SETS)
COCO_FIRST = re.compile(r'\s*\{\s*"(info|licenses|images|annotations|categories)"')


def about_look_alike(layout: Layout) -> str:
    """Return a sentence on the annotations in a folder, or in a file, if another tool wrote them; "" if none are known.
    """
    for file in _candidates(layout):
        tool = tool_of(file)
        if tool:
            where = "" if file == layout.folder else f" ({file.name})"
            if tool in READ:
                return f"this looks like {tool}{where}: give the folder of the data set as data.path"
            return f"this looks like {tool}{where}, which is not read; export COCO or Pascal VOC from the tool"
    return ""


def json_in(file: Path) -> object:
    """Parse a JSON file. Raises ValueError with a sentence if it is not one."""
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise ValueError("invalid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from error


def tool_of(file: Path) -> str | None:
    """Return the name of the tool that wrote a JSON, XML or CSV file; None if it is none of those known here."""
    try:
        status = os.stat(file)
        return _tool_of(file, status.st_size, status.st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=256)
def _tool_of(file: Path, size: int, _time: int) -> str | None:
    with open(file, encoding="utf-8-sig", errors="replace") as stream:
        head = stream.read(PROBED_LETTERS)
    suffix = file.suffix.lower()
    if COCO_FIRST.match(head):
        return None
    if suffix == ".xml":
        is_cvat = re.search(r"<annotations[\s>]", head) and not re.search(r"<annotation[\s>]", head)
        return "CVAT XML" if is_cvat else None
    if suffix == ".csv":
        return "VIA" if "region_shape_attributes" in head.partition("\n")[0] else None
    if suffix in (".ndjson", ".manifest", ".jsonl"):
        head = head.partition("\n")[0]
    elif size <= MAX_BYTES:
        head = file.read_text(encoding="utf-8-sig", errors="replace")
    try:
        content = json.loads(head)
    except (ValueError, RecursionError):
        return _tool_of_keys(dict.fromkeys(re.findall(r'"(\w+)"\s*:', head))) if size > MAX_BYTES else None
    return _tool_of_content(content[0] if isinstance(content, list) and content else content)


def _tool_of_content(content: object) -> str | None:
    if not isinstance(content, Mapping) or not content:
        return None
    tool = _tool_of_keys(content)
    first = next(iter(content.values()))
    if tool is None and isinstance(first, Mapping) and {"filename", "regions"} <= first.keys():
        return "VIA"
    classes = content.get("classes")
    has_shapes = isinstance(classes, list) and all(isinstance(one, dict) and "shape" in one for one in classes)
    return "Supervisely" if has_shapes and classes else tool


def _tool_of_keys(content: Mapping) -> str | None:
    for tool, alternatives in KEYS.items():
        if any(keys <= content.keys() for keys in alternatives):
            return tool
    return None


def _candidates(layout: Layout) -> Iterator[Path]:
    """Yield the files that may be annotations: the one that is given, or some of each folder."""
    if layout.folder.is_file():
        yield layout.folder
        return
    for folder in layout.below(layout.folder)[:MAX_FOLDERS]:
        names = [name for name in layout.names(folder) if name.lower().endswith(SUFFIXES)]
        yield from (folder / name for name in names[:FILES_PER_FOLDER])
