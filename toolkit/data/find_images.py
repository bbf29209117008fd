"""Finds the folder of the images of a split, and the pictures that are not in it in all other places of the data set.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.text import first_names, shown
from toolkit.data.annotations import ImageRow
from toolkit.data.check_files import map_in_threads
from toolkit.data.checks import unsafe_file_name
from toolkit.data.decoding import ImageError, probe_image
from toolkit.data.image_sources import ImageSources, is_there
from toolkit.data.layout import Layout, may_hold
from toolkit.data.table import Problem

IMAGE_FOLDERS = ("", "images", "Images", "JPEGImages", "imgs", "img")  # beside annotations, in this order
PROBED_NAMES = 20  # of images, to find their folder
MAX_FOLDERS = 2_000  # of a data set that are looked through


@dataclass
class Found:
    """The rows of images after a search for their pictures, and the folder that their names are relative to.

    moved: path of the folder that was given, relative to `image_root`; "" if it is the same.
    problems: a note on each folder in which pictures were found.
    watched: the folders that were looked through, for `digest_of`, if a picture was not found.
    """

    images: list[ImageRow]
    image_root: Path | ImageSources
    moved: str = ""
    problems: list[Problem] = field(default_factory=list)
    watched: list[str] = field(default_factory=list)

    def names(self, listed: Iterable[str]) -> set[str]:
        """Convert names relative to the given folder to names relative to `image_root`."""
        return {os.path.join(self.moved, name) for name in listed}


def find_root(
    candidates: Iterable[Path],
    holds: Callable[[Path], bool],
    layout: Layout,
    base: Path | None,
    *,
    where: Path,
    first: str | None,
) -> Path:
    """Return the first of these folders that holds images of a split, or `base` if images lie anywhere below that.

    In `base`, `find_missing` looks for each image.

    candidates: folders in which the images usually lie. holds: says whether a folder holds one of them. base: None:
        only the candidates count. where: file or folder of the annotations, for the message. first: name of an image,
        for the message; None if none has a usable name.

    Raises BadInput that lists the candidates, if no image is found.
    """
    candidates = list(dict.fromkeys(candidates))
    for candidate in candidates:
        if holds(candidate):
            return candidate
    if base is not None and any(layout.images(folder) for folder in layout.below(base)[:MAX_FOLDERS]):
        return base
    name = repr(shown(first)) if first else "(no usable file_name)"
    tried = ", ".join(map(str, candidates))
    raise BadInput(f"{where}: no image folder found for {name}; tried {tried}; set it with --data.image_dir")


def find_root_near(
    layout: Layout,
    folder: Path,
    annotations: Path,
    split: str | None,
    names: Sequence[str],
    name_in: Callable[[Path, str], str] | None = None,
) -> Path:
    """Return the folder of the images of a file with the annotations of many, see `find_root`.

    Args:
        folder: of the data set.
        annotations: the file.
        split: of the images; None: it is not known.
        names: of the images, of which the first are looked for.
        name_in: returns the name that an image has in a folder; None: `found_name`.
    """
    above = annotations.parent.parent if annotations.parent != folder else folder
    bases = list(dict.fromkeys((annotations.parent, above, folder)))
    candidates = [base / name for base in bases for name in IMAGE_FOLDERS]
    for inner in layout.folders_of_splits(*bases, *(base / "images" for base in bases)).get(split, []):
        candidates += [inner, inner / "images"]

    def holds(candidate: Path) -> bool:
        present = ((name_in or found_name)(candidate, name) for name in names[:PROBED_NAMES])
        return any(not os.path.isabs(name) and os.path.isfile(candidate / name) for name in present)

    return find_root(candidates, holds, layout, folder, where=annotations, first=next(iter(names), None))


def found_name(root: Path | ImageSources, name: str) -> str:
    """Return the name with a suffix if an annotation omits it, or its last parts if its folder does not exist here."""
    parts = name.split("/")
    stems = [name]
    stems += ["/".join(parts[-count:]) for count in (3, 2, 1)]
    for suffix in ("", ".jpg", ".jpeg", ".png"):
        for stem in stems:
            candidate = stem + suffix
            if not os.path.isabs(candidate) and is_there(root / candidate):
                return candidate
    return name


def find_missing(
    images: Sequence[ImageRow], root: Path | ImageSources, layout: Layout, base: Path, split: str | None
) -> Found:
    """Look below the folder `base` for the pictures that `root` lacks.

    A picture is taken if its path ends with the whole name, or else with the last parts of it; if it has the size in
    the row; if no other row names it; if it is the only such file; and if no folder on its path is of another split. So
    a picture of another split, or a reduced copy, is not taken for it. Names become relative to a folder that has all
    pictures; if nothing is found, none changes.

    root: if it is not a single folder, nothing is looked for. split: of the images; None: it is not known.
    """
    images = list(images)
    if not isinstance(root, Path):
        return Found(images, root)
    named = [row for row in images if isinstance(row.file_name, str) and not unsafe_file_name(row.file_name)]
    missing = map_in_threads(
        lambda row: [] if os.path.exists(root / row.file_name) else [row], named, "looking for images"
    )
    if not missing:
        return Found(images, root)
    folders = _folders_of_split(layout, base, split)
    taken = {os.path.realpath(root / row.file_name) for row in named}
    paths = _paths_of(missing, _paths_by_name(layout, folders, missing), taken)
    watched = [f"{folder}{os.sep}" for folder in folders] if len(paths) < len(missing) else []
    if not paths:
        return Found(images, root, watched=watched)
    common, moved = _common_root(root, paths.values())
    rows = []
    for row in images:
        name = row.file_name
        if row.image_id in paths:
            name = os.path.relpath(paths[row.image_id], common)
        elif isinstance(name, str):
            name = os.path.join(moved, name)
        rows.append(row._replace(file_name=name))
    return Found(rows, Path(common), moved, _notes(paths.values(), root), watched)


def _paths_of(rows: Iterable[ImageRow], paths: Mapping[str, list[str]], taken: set[str]) -> dict[int | str, str]:
    """Return the path of the picture of each row that has one, by image id.

    paths: of the files that may be it, by their names. taken: real paths of the pictures of other rows.
    """
    found: dict[int | str, str] = {}
    taken = set(taken)
    for row in rows:
        path = _picture_of(row, paths, taken)
        if path is not None:
            found[row.image_id] = path
            taken.add(os.path.realpath(path))
    return found


def _common_root(root: Path, paths: Iterable[str]) -> tuple[str, str]:
    """Return the folder that has both `root` and all paths, and the path of `root` in it, "" if it is the same.

    For example ("data/train", "images") for the root data/train/images and the path data/train/1.png.
    """
    top = os.path.abspath(root)
    common = os.path.commonpath([top, *(os.path.dirname(os.path.abspath(path)) for path in paths)])
    return common, os.path.relpath(top, common) if common != top else ""


def _notes(paths: Iterable[str], root: Path) -> list[Problem]:
    """Return a note on each folder in which pictures were found."""
    names: dict[str, list[str]] = {}
    for path in paths:
        names.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
    notes = []
    for place, pictures in names.items():
        some = first_names(pictures, written=shown)
        message = f"{len(pictures)} pictures that are not in {root} were found here: {some}"
        notes.append(Problem("note", place, None, None, message))
    return notes


def _folders_of_split(layout: Layout, base: Path, split: str | None) -> list[Path]:
    """Return `base` and the folders below it of which every part of the path fits the split."""
    folders = layout.below(base)[:MAX_FOLDERS]
    return [folder for folder in folders if all(may_hold(part, split) for part in folder.relative_to(base).parts)]


def _paths_by_name(layout: Layout, folders: Iterable[Path], rows: Iterable[ImageRow]) -> dict[str, list[str]]:
    """Return the paths of the files in these folders that have the name of a row's picture, by that name."""
    wanted = {os.path.basename(row.file_name) for row in rows}
    paths: dict[str, list[str]] = {}
    for folder in folders:
        for name in wanted.intersection(layout.names(folder)):
            paths.setdefault(name, []).append(os.path.join(folder, name))
    return paths


def _picture_of(row: ImageRow, paths: Mapping[str, list[str]], taken: set[str]) -> str | None:
    """Return the path of the picture of a row; None if there is none, or more than one."""
    parts = Path(row.file_name).parts
    candidates = [path for path in paths.get(parts[-1], ()) if os.path.realpath(path) not in taken]
    candidates = [path for path in candidates if _has_size(path, row)]
    for start in range(len(parts)):
        tail = os.path.join("", *parts[start:])
        ending = [path for path in candidates if path.endswith(os.sep + tail)]
        if ending:
            return ending[0] if len(ending) == 1 else None
    return None


def _has_size(path: str, row: ImageRow) -> bool:
    """Return whether a picture has the width and height of the row, where these are known."""
    try:
        height, width = probe_image(path).size_hw
    except ImageError:
        return False
    return (row.width or width, row.height or height) == (width, height)
