"""The images of a YOLO split and the label file of each; label files without a picture are counted and named."""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from toolkit.base.errors import BadInput
from toolkit.base.files import without_suffix
from toolkit.base.text import first_names, shown
from toolkit.data.annotations import ImageRow
from toolkit.data.find_images import find_missing
from toolkit.data.formats import darknet
from toolkit.data.formats.yolo_rows import is_row
from toolkit.data.layout import UNSPLIT, Layout, split_of
from toolkit.data.table import Problem

LABEL_FOLDER = "labels"
CLASS_FILES = ("classes.txt", "obj.names", "labels.txt", "_darknet.labels")
MAX_NAMED = 10  # label files that are named one by one


class Pairs(NamedTuple):
    """The images of a split, and the label file of each, None if there is none.

    root: folder that has all images. watched: files and folders whose change changes the pairs. problems: warnings and
    notes on label files without an image in the folders of the others.
    """

    root: Path
    images: list[Path]
    labels: list[Path | None]
    watched: list[Path | str]
    problems: list[Problem]


def pairs_of(layout: Layout, split: str, sources: Sequence[Path], image_dir: Path | None) -> Pairs:
    """Find the images of a split and their label files.

    sources: folders of images and lists of them. image_dir: the folder that all images are in; None: that of the data
        set, or the one around all images.

    Raises BadInput: no source is in `image_dir`.
    """
    if image_dir and not any(source.resolve().is_relative_to(image_dir.resolve()) for source in sources):
        named = ", ".join(map(str, sources))
        raise BadInput(f"{image_dir}: the images of {split} are in {named}; leave data.image_dir out")
    images, watched = images_of(layout, split, sources)
    root = image_dir or layout.folder
    if image_dir is None and not _are_in(root, images):
        # Not the paths behind links: the labels of a linked folder of images lie beside the link.
        images = [Path(os.path.abspath(path)) for path in images]
    labels = [label_of(layout, image) for image in images]
    label_folders = {path.parent for image in images for path in label_paths(image)}
    orphans = _orphans_of(layout, label_folders, [label for label in labels if label])
    pictures = _pictures_beside(layout, orphans, split)
    beside = _unlisted(pictures, images, sources)
    for picture in sorted(beside):
        images.append(picture)
        labels.append(beside[picture])
    if image_dir is None and not _are_in(root, images):
        root = Path(os.path.commonpath([str(path.parent) for path in images]))
    watched += sorted(label_folders)  # also where there are no labels yet
    problems = _about_orphans([label for label in orphans if label not in pictures], layout.folder)
    problems += _about_found(sorted(beside), layout.folder)
    return Pairs(root, images, labels, watched, problems)


def _unlisted(pictures: Mapping[Path, Path], images: Iterable[Path], sources: Sequence[Path]) -> dict[Path, Path]:
    """Return the label file of each picture that belongs to the split and is not among its images.

    pictures: by their label files. sources: of the split; a list says which pictures belong to it.
    """
    if any(source.is_file() for source in sources):
        return {}
    known = set(images)
    return {picture: label for label, picture in pictures.items() if picture not in known}


def pairs_elsewhere(layout: Layout, labels: Path, image_dir: Path) -> Pairs:
    """Pair the images in `image_dir` with the files of the same names in a folder of labels."""
    images, watched = images_of(layout, UNSPLIT, [image_dir])
    paths = [(labels / image.relative_to(image_dir)).with_suffix(".txt") for image in images]
    there = [path if layout.has_file(path) else None for path in paths]
    watched += sorted({path.parent for path in paths})
    return Pairs(image_dir, images, there, watched, [])


def _are_in(folder: Path, paths: Iterable[Path]) -> bool:
    return all(path.is_relative_to(folder) for path in paths)


# ---- images ----------------------------------------------------------------------------------------------------------


def images_of(layout: Layout, split: str, sources: Iterable[Path]) -> tuple[list[Path], list[Path | str]]:
    """Return (image files of a split, files and folders to watch); sources: as of `pairs_of`."""
    files = []
    watched: list[Path | str] = []
    for source in sources:
        if source.is_file():
            images, searched = _listed_images(layout, source, split)
            files += images
            watched += [source, *searched]
            continue
        has_inner = not layout.images(source) and layout.images(source / "images")
        for at in layout.below(source / "images" if has_inner else source):
            files += [at / name for name in layout.images(at)]
            watched.append(at)
    return files, watched


def _listed_images(layout: Layout, file: Path, split: str) -> tuple[list[Path], list[str]]:
    """Return (images of a list, folders to watch); images that are not where it says are looked for in the data set."""
    folder = layout.folder
    lines = (line.replace("\\", "/") for line in darknet.lines_of(file))
    images = [find_listed_image(layout, line, file) for line in lines]
    rows = []
    for number, path in enumerate(images):
        is_there = layout.has_file(path) and path.is_relative_to(folder)
        name = path.relative_to(folder) if is_there else Path(*path.parts[-3:])  # not a path of another computer
        rows.append(ImageRow(number, str(name), None, None))
    found = find_missing(rows, folder, layout, folder, split)
    for number, row in enumerate(found.images):
        if not layout.has_file(images[number]):
            images[number] = found.image_root / row.file_name
    return images, found.watched


def find_listed_image(layout: Layout, line: str, file: Path) -> Path:
    """Find an image of a list: by its path as written, relative to the list or to the folder, or by its last parts."""
    candidates = []
    for tail in (line, *last_parts(line)):
        candidates += [file.parent / tail, layout.folder / tail]
    return next(filter(layout.has_file, candidates), candidates[0])


def last_parts(path: str) -> list[str]:
    """Return the last parts of a path, which may be one on another computer.

    Not `images` of `valid/images`, which would be all images.
    """
    parts = Path(path).parts
    in_split = len(parts) > 1 and split_of(parts[-2])
    counts = (3, 2) if in_split else (3, 2, 1)
    return ["/".join(parts[-count:]) for count in counts]


# ---- label files -----------------------------------------------------------------------------------------------------


def label_paths(image: Path) -> list[Path]:
    """Return the paths at which the text file of an image may lie."""
    beside = image.with_suffix(".txt")
    candidates = [beside, image.parent / LABEL_FOLDER / beside.name]
    parts = list(beside.parts)
    if "images" in parts:
        last = len(parts) - 1 - parts[::-1].index("images")
        swapped = Path(*parts[:last], LABEL_FOLDER, *parts[last + 1 :])
        candidates.insert(0, swapped)
    return candidates


def label_of(layout: Layout, image: Path) -> Path | None:
    """Return the text file of an image; None if there is none."""
    return next(filter(layout.has_file, label_paths(image)), None)


def _orphans_of(layout: Layout, label_folders: Iterable[Path], used: Sequence[Path]) -> list[Path]:
    """Return the label files in these folders that belong to no picture that is read.

    used: label files of the pictures, links among them.
    """
    lists = [path.name for path in layout.files(layout.folder, ".txt") if darknet.is_list(path)]
    others = {*CLASS_FILES, *lists}  # texts that are not labels
    paths_used = set(used)
    candidates = chain.from_iterable(layout.files(folder, ".txt") for folder in sorted(set(label_folders)))
    left = [path for path in candidates if path.name not in others and path not in paths_used]
    known = {os.path.realpath(path) for path in used} if left else set()  # of links, which are slow to follow
    return [path for path in left if os.path.realpath(path) not in known and _has_rows(path)]


def _pictures_beside(layout: Layout, labels: Sequence[Path], split: str) -> dict[Path, Path]:
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


def _about_orphans(labels: Sequence[Path], folder: Path) -> list[Problem]:
    """Return a warning that counts and names the label files without a picture; none if there are none."""
    if not labels:
        return []
    names = [shown(os.path.relpath(path, folder)) for path in labels]
    named = names if len(names) <= MAX_NAMED else [*names[:3], "..."]
    plural = "label files have no picture and are" if len(names) > 1 else "label file has no picture and is"
    return [Problem("warning", str(folder), None, None, f"{len(names)} {plural} not used: {', '.join(named)}")]


def _about_found(pictures: Sequence[Path], folder: Path) -> list[Problem]:
    """Return a note that counts and names the pictures that `_pictures_beside` found; none if there are none."""
    if not pictures:
        return []
    names = [shown(os.path.relpath(path, folder)) for path in pictures]
    where = "are not in the folder of the others"
    message = f"{len(names)} pictures with labels that {where} were found: {first_names(names)}"
    return [Problem("note", str(folder), None, None, message)]


def _has_rows(path: Path) -> bool:
    """Return whether a text file is empty, as that of a picture without objects, or begins with numbers."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    words = text.split("\n", 1)[0].split()
    return not text.strip() or is_row(words)


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
