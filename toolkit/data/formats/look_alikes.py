"""Recognises files of annotation tools that are not read, to say which they are and how to convert them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from toolkit.data.layout import Layout

MAX_BYTES = 2**26  # of a file that is parsed to recognise it
MAX_FOLDERS = 200
SUFFIXES = (".json", ".xml", ".csv")
FILES_PER_FOLDER = 5
# What writes COCO from the files of each tool.
TO_COCO = {
    "LabelMe": "`pip install labelme2coco`, then `labelme2coco FOLDER`",
    "VIA": "VIA itself (Annotation, Export Annotations, COCO format)",
    "CVAT XML": "CVAT itself (Export task dataset, COCO 1.0)",
    "Label Studio": "Label Studio itself (Export, COCO)",
    "Supervisely": "Supervisely's app `Export to COCO`",
}


def about_look_alike(layout: Layout) -> str:
    """Return a sentence on the annotations in a folder, or in a file, if another tool wrote them; "" if none are known.
    """
    for file in _candidates(layout):
        tool = tool_of(file)
        if tool:
            where = "" if file == layout.folder else f" ({file.name})"
            return f"this looks like {tool}{where}, which is not read; convert it to COCO with {TO_COCO[tool]}"
    return ""


def tool_of(file: Path) -> str | None:
    """Return the name of the tool that wrote a JSON, XML or CSV file; None if it is none of `TO_COCO`."""
    try:
        if os.path.getsize(file) > MAX_BYTES:
            return None
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    except OSError:
        return None
    suffix = file.suffix.lower()
    if suffix == ".xml":
        is_cvat = "<annotations" in text[:4096] and "<image " in text and "<annotation>" not in text[:4096]
        return "CVAT XML" if is_cvat else None
    if suffix == ".csv":
        return "VIA" if "region_shape_attributes" in text.partition("\n")[0] else None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _tool_of_list(content) if isinstance(content, list) else _tool_of_object(content)


def _tool_of_list(entries: list) -> str | None:
    """Return the tool of a JSON list: Label Studio's tasks, in its full or its short form."""
    first = entries[0] if entries and isinstance(entries[0], dict) else {}
    is_task = "data" in first and {"annotations", "completions", "predictions"} & first.keys()
    is_short_task = {"image", "annotator", "annotation_id"} <= first.keys()
    return "Label Studio" if is_task or is_short_task else None


def _tool_of_object(content: object) -> str | None:
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("shapes"), list) and {"imagePath", "imageData", "flags"} & content.keys():
        return "LabelMe"
    if "_via_img_metadata" in content or "_via_settings" in content:
        return "VIA"
    first = next(iter(content.values()), None)
    if isinstance(first, dict) and {"filename", "regions"} <= first.keys():
        return "VIA"
    if isinstance(content.get("objects"), list) and isinstance(content.get("size"), dict):
        return "Supervisely"
    classes = content.get("classes")
    has_shapes = isinstance(classes, list) and all(isinstance(one, dict) and "shape" in one for one in classes)
    return "Supervisely" if has_shapes and classes else None


def _candidates(layout: Layout) -> Iterator[Path]:
    """Yield the files that may be annotations: the one that is given, or some of each folder."""
    if layout.folder.is_file():
        yield layout.folder
        return
    for folder in layout.below(layout.folder)[:MAX_FOLDERS]:
        names = [name for name in layout.names(folder) if name.lower().endswith(SUFFIXES)]
        yield from (folder / name for name in names[:FILES_PER_FOLDER])
