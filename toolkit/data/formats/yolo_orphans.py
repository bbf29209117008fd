"""YOLO's label files without a picture: counted and named, or their pictures found beside them."""

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from toolkit.base.files import without_suffix
from toolkit.base.text import shown
from toolkit.data.formats.yolo_rows import is_number
from toolkit.data.layout import Layout, split_of
from toolkit.data.table import Problem

MAX_NAMED = 10  # label files that are named one by one


def orphans_of(
    layout: Layout, label_folders: Iterable[Path], used: Iterable[Path], others: Sequence[str]
) -> list[Path]:
    """Return the label files in these folders that belong to no picture that is read.

    used: label files of the pictures. others: names of text files that are not labels, such as lists of classes.
    """
    used = set(used)
    candidates = chain.from_iterable(layout.files(folder, ".txt") for folder in sorted(set(label_folders)))
    left = [path for path in candidates if path.name not in others and path not in used]
    known = {os.path.realpath(path) for path in used} if left else set()  # of links, which are slow to follow
    return [path for path in left if os.path.realpath(path) not in known and _has_rows(path)]


def pictures_beside(layout: Layout, labels: Sequence[Path], split: str) -> dict[Path, Path]:
    """Return the picture of each label file that has one near it, by the path of the label file.

    Looked at are its own folder, `images` in place of `labels`, the folder around `labels`, and all folders in that one
    if its name says the split.
    """
    pictures: dict[Path, dict[str, Path]] = {}  # by the stem of the name, for each folder of labels
    found = {}
    for label in labels:
        folder = label.parent
        if folder not in pictures:
            by_stem: dict[str, Path] = {}
            for place in _places_near(layout, folder, split):
                for name in layout.images(place):
                    by_stem.setdefault(without_suffix(name), place / name)
            pictures[folder] = by_stem
        picture = pictures[folder].get(label.stem)
        if picture is not None:
            found[label] = picture
    return found


def about_orphans(labels: Sequence[Path], folder: Path) -> list[Problem]:
    """Return a warning that counts and names the label files without a picture; none if there are none."""
    if not labels:
        return []
    names = [shown(os.path.relpath(path, folder)) for path in labels]
    named = names if len(names) <= MAX_NAMED else [*names[:3], "..."]
    plural = "label files have no picture and are" if len(names) > 1 else "label file has no picture and is"
    return [Problem("warning", str(folder), None, None, f"{len(names)} {plural} not used: {', '.join(named)}")]


def about_found(pictures: Sequence[Path], folder: Path) -> list[Problem]:
    """Return a note that counts and names the pictures that `pictures_beside` found; none if there are none."""
    if not pictures:
        return []
    names = [shown(os.path.relpath(path, folder)) for path in pictures]
    some = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    message = f"{len(names)} pictures with labels that are not in the folder of the others were found: {some}"
    return [Problem("note", str(folder), None, None, message)]


def _has_rows(path: Path) -> bool:
    """Return whether a text file is empty, as that of a picture without objects, or begins with numbers."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    words = text.split("\n", 1)[0].split()
    return not text.strip() or len(words) >= 5 and all(map(is_number, words))


def _places_near(layout: Layout, folder: Path, split: str) -> list[Path]:
    """Return the folders in which the pictures of a folder of labels may lie, the usual ones first."""
    places = [folder]
    parts = list(folder.parts)
    if "labels" in parts:
        last = len(parts) - 1 - parts[::-1].index("labels")
        places.insert(0, Path(*parts[:last], "images", *parts[last + 1 :]))
    if folder.name == "labels":
        places.append(folder.parent)
        if split_of(folder.parent.name) == split:
            places += layout.below(folder.parent)
    return list(dict.fromkeys(places))
