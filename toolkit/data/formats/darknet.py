"""Darknet's description of a data set: `obj.data` with lists of images, or only the lists.

A list is a text file with the path of an image in each line. `obj.data` has lines `train = train.txt`,
`valid = valid.txt` and `names = obj.names`; paths may be those of another computer.
"""

import os
from pathlib import Path

from toolkit.data.decoding import IMAGE_SUFFIXES
from toolkit.data.layout import Layout, split_of

KEYS = ("train", "valid", "val", "test", "names")


def settings_of(layout: Layout) -> tuple[Path | None, dict]:
    """Return `obj.data` or a list, and the lists of the splits and the class names as a data.yaml would name them.

    Returns None and {} if the folder has neither.
    """
    folder = layout.folder
    for path in layout.files(folder, ".data"):
        settings = _content(path)
        if {"train", "valid", "val"} & settings.keys():
            names = _found(layout, settings.pop("names", ""))
            return path, settings | ({"names": lines_of(names)} if names else {})
    lists = {}
    for path in layout.files(folder, ".txt"):
        split = split_of(path.name)
        if split and is_list(path):
            lists.setdefault(split, path.name)
    first = next(iter(lists.values()), None)
    return (folder / first, lists) if "train" in lists else (None, {})


def is_list(path: Path) -> bool:
    """Return whether a text file lists images: its first line is the path of one."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            first = next(filter(None, map(str.strip, file)), "")
    except OSError:
        return False
    return os.path.splitext(first)[1].lower() in IMAGE_SUFFIXES


def lines_of(file: Path) -> list[str]:
    """Read the lines of a text file that are not empty."""
    lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _content(path: Path) -> dict[str, str]:
    """Return the lines `key = value` of a file."""
    pairs = (line.partition("=") for line in lines_of(path) if not line.startswith("#"))
    content = {key.strip(): value.strip() for key, _, value in pairs}
    return {key: value for key, value in content.items() if key in KEYS and value}


def _found(layout: Layout, name: str) -> Path | None:
    """Return the file that a path names, in the folder: by its last parts."""
    parts = Path(name.replace("\\", "/")).parts
    for start in range(len(parts)):
        path = layout.folder.joinpath(*(part for part in parts[start:] if part not in ("/", "..")))
        if layout.has_file(path):
            return path
    return None
