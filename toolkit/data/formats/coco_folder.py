"""Folders with one COCO file per split: `annotations/instances_*.json`, or `_annotations.coco.json` in each split."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from toolkit.data.formats.annotated import ALL, copy_images, file_names, ordered, split_of
from toolkit.data.formats.coco import read_coco, write_coco
from toolkit.data.image_sources import ImageSources
from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput

TITLE = "COCO"
HEAD = 4096  # bytes that a COCO file must show one of its keys in
OTHER_TASKS = ("captions", "person_keypoints", "stuff", "panoptic", "image_info", "results")


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Names of the splits of a folder of COCO files; None: there are none."""
    return ordered(_files(Path(folder))) or None


def read(folder: Path, split: str, *, image_dir: Path | ImageSources | None = None, **options) -> DetectionTable:
    """One split, by `read_coco`; the folder of the images is looked for near the annotation file."""
    files = _files(Path(folder))
    if split not in files:
        raise BadInput(f"{folder}: no split {split!r}; there are {', '.join(files)}")
    siblings = [file for name, file in files.items() if name != split]
    return read_coco(files[split], image_dir, siblings=siblings, **options)


def write(
    table: DetectionTable, folder: Path, split: str, *, link: bool = False, names: Sequence[str] | None = None
) -> None:
    """`annotations/<split>.json` and the images in `<split>/`; nothing that a table holds is lost.

    names: of the image files, by default those of the table.
    """
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    names = names or file_names(table)
    copy_images(table, names, folder / split, link)
    write_coco(table.labelled().renamed(names), folder / "annotations" / f"{split}.json")


def annotation_file(folder: Path, split: str) -> Path:
    """The COCO file of a split."""
    return _files(Path(folder))[split]


def _files(folder: Path) -> dict[str, Path]:
    """The annotation file of each split. Of several for one split the one in `annotations`, then the first, counts."""
    if folder.is_file():
        return {split_of(folder.name) or ALL: folder} if _is_coco(folder) else {}
    if not folder.is_dir():
        return {}
    found: dict[str, Path] = {}
    single: list[Path] = []
    for place in (folder / "annotations", folder):
        for path in sorted(place.glob("*.json")) if place.is_dir() else ():
            if path.name.startswith(OTHER_TASKS) or not _is_coco(path):
                continue
            split = split_of(re.sub(r"\.coco$", "", path.stem))
            found.setdefault(split, path) if split else single.append(path)
    for place in sorted(each for each in folder.iterdir() if each.is_dir() and split_of(each.name)):
        for path in sorted(place.glob("*.json")):
            if _is_coco(path):
                found.setdefault(split_of(place.name), path)
    return found or ({ALL: single[0]} if single else {})


def _is_coco(path: Path) -> bool:
    """Whether a JSON file begins like an object with COCO's lists; a large file is not read for it."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            tail = b""
            if os.path.getsize(path) > HEAD:
                file.seek(-min(HEAD, os.path.getsize(path)), os.SEEK_END)
                tail = file.read()
    except OSError:
        return False
    text = head.lstrip(b"\xef\xbb\xbf \r\n\t")
    keys = (b'"images"', b'"annotations"', b'"categories"', b'"info"', b'"licenses"')
    return text.startswith(b"{") and any(key in head + tail for key in keys)

