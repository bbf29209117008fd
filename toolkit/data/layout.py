"""The scan of a data set: its folders, each listed once, and the splits that names say.

A format finds its splits in a `Layout` (`Splits`), and reads one of them; whatever else looks like a split is reported
as not used, by one rule for all formats.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from toolkit.base.files import folders_below
from toolkit.data.decoding import IMAGE_SUFFIXES
from toolkit.data.image_sources import ImageSources

# Names of folders and files by the split that they say.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval", "evaluation", "minival"),
    "test": ("test", "testing"),
}
FILE_NAME_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of a file's name: `testLabels` has two
UNSPLIT = "all"  # the one split of a folder that has none


class _Entries(NamedTuple):
    """The names directly in a folder, sorted; links count as what they lead to.

    files: a dict, for its order and its fast `in`. broken: links that lead nowhere.
    """

    folders: list[str]
    files: dict[str, None]
    broken: list[str]


class Layout:
    """The folders and files of a data set.

    Every folder is listed when it is first asked for, and then remembered: all formats, and the searches for pictures,
    look at a folder of 100,000 files on a slow disk once. Folders that nobody asks for are not listed, so a home folder
    that is given by mistake is not walked through. Paths outside of `folder` can be asked for too.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._entries: dict[Path, _Entries] = {}

    def folders(self, at: Path) -> list[Path]:
        """Return the folders directly in a folder, sorted; none if it cannot be read."""
        return [at / name for name in self._of(at).folders]

    def names(self, at: Path) -> Iterable[str]:
        """Return the names of the files directly in a folder, sorted; none if it cannot be read."""
        return self._of(at).files.keys()

    def files(self, at: Path, suffix: str) -> list[Path]:
        """Return the files directly in a folder whose names end in `suffix`, sorted."""
        return [at / name for name in self.names(at) if name.endswith(suffix)]

    def images(self, root: Path | ImageSources, folder: str = "") -> list[str]:
        """Return the names, relative to a root of images, of the image files directly in one of its folders, sorted.

        Links that lead nowhere are among them, so that they are reported as faults.

        folder: relative to the root; "" is the root itself.
        """
        if isinstance(root, Path):
            entries = self._of(root / folder)
            names = [os.path.join(folder, name) for name in (*entries.files, *entries.broken)]
        else:
            names = chain.from_iterable(part.names(folder) for part in root.parts)
        return sorted(name for name in names if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES)

    def has_file(self, path: Path) -> bool:
        """Return whether this is a file."""
        return path.name in self._of(path.parent).files

    def below(self, at: Path) -> list[Path]:
        """Return a folder and all folders in it, as `toolkit.base.files.folders_below`."""
        return folders_below(at, lambda folder: self._of(Path(folder)).folders)

    def folders_of_splits(self, *parents: Path) -> dict[str, list[Path]]:
        """Return the subfolders of `parents` that are named after a split, by split; exact names come first."""
        found: dict[str, list[Path]] = {}
        for folder in chain.from_iterable(called_first(self.folders(parent)) for parent in parents):
            split = split_in_name(folder.name)
            if split:
                found.setdefault(split, []).append(folder)
        return found

    def _of(self, at: Path) -> _Entries:
        if at not in self._entries:
            self._entries[at] = _listed(at)
        return self._entries[at]


@dataclass(frozen=True)
class Splits:
    """The splits of a data set, as one format finds them.

    sources: the files, or the folders of files, that are read for each split.
    candidates: all files and folders that look like those of a split, read or not.
    missing: a text for each split that the data set describes and that is not there.
    together: says that several data sets are read as one; "" if it is one.
    """

    layout: Layout
    sources: Mapping[str, Sequence[Path]]
    candidates: Sequence[Path] = ()
    missing: Sequence[str] = ()
    together: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the splits: train, val, test, then the others."""
        return ordered(self.sources)

    @property
    def folder(self) -> Path:
        """The folder of the data set."""
        return self.layout.folder

    def unused(self) -> list[str]:
        """Return the names, relative to the folder, of the candidates that have nothing to do with a source.

        A candidate is used if it is a source, is inside of one, or contains one.
        """
        used = [path.resolve() for path in chain.from_iterable(self.sources.values())]
        left = []
        for candidate in self.candidates:
            here = candidate.resolve()
            if not any(here.is_relative_to(path) or path.is_relative_to(here) for path in used):
                left.append(str(candidate.relative_to(self.folder)))
        return list(dict.fromkeys(left))


def split_of(name: str) -> str | None:
    """Return train, val or test if a file or folder is called like this split or a synonym; else None.

    The suffix, a number at the end, and the words `instances_` before and `_annotations` after the name are ignored.
    """
    stem = Path(name).stem.lower()
    stem = stem.removeprefix("instances_").removesuffix("_annotations")
    stem = stem.rstrip("0123456789").rstrip("-_ ") or stem
    for split, names in SPLIT_NAMES.items():
        if stem in names:
            return split
    return None


def split_in_name(name: str) -> str | None:
    """Return train, val or test if one of these words, or a synonym, occurs in a name; else None.

    `custom_train.json` is of train, `test_labels.csv` and `testset` of test. A name with the words of several splits is
    of none of them, with one exception: a name with a word for test and none for train, such as `test-dev`, is of test,
    so that test images are never trained on.
    """
    words = [word.lower().removesuffix("set") for word in FILE_NAME_WORD.findall(Path(name).stem)]
    found = {split for split, names in SPLIT_NAMES.items() if not set(names).isdisjoint(words)}
    if "test" in found and "train" not in found:
        return "test"
    return found.pop() if len(found) == 1 else None


def one_per_split(candidates: Iterable[tuple[str | None, Path]]) -> dict[str, Path]:
    """Return the annotation file of each split, of candidates (split that the name says or None, file).

    Of several for one split the first counts. If none is called train, the only one whose name says no split is the
    training data: `annotations.json` beside `annotations_test.json`. If no name says a split, the first is all there
    is.
    """
    files: dict[str, Path] = {}
    unnamed = []
    for split, path in candidates:
        if split is None:
            unnamed.append(path)
        else:
            files.setdefault(split, path)
    if not files:
        return {UNSPLIT: unnamed[0]} if unnamed else {}
    if "train" not in files and len(unnamed) == 1:
        files["train"] = unnamed[0]
    return files


def may_hold(folder_name: str, split: str | None) -> bool:
    """Return whether pictures of this split can be in a folder of this name; split None: it is not known.

    They cannot be in the folder of another split, where files often have the same names.
    """
    own = {"trainval": ("train", "val")}.get(split, (split,))
    said = split_in_name(folder_name)
    return said is None or split in (None, UNSPLIT) or said in own


def called_first(paths: Iterable[Path]) -> list[Path]:
    """Sort paths: first those that `split_of` recognises (`train.json`), then all others; both by name."""
    return sorted(paths, key=lambda path: (split_of(path.name) is None, path.name))


def ordered(splits: Iterable[str]) -> tuple[str, ...]:
    """Sort names of splits: train, val, test, then the others."""
    order = list(SPLIT_NAMES)

    def place(name: str) -> tuple[int, str]:
        return (order.index(name) if name in order else len(order), name)

    return tuple(sorted(set(splits), key=place))


def _listed(at: Path) -> _Entries:
    folders = []
    files = []
    broken = []
    try:
        with os.scandir(at) as entries:
            for entry in entries:
                is_link = entry.is_symlink()  # what is not a link needs no further look at the disk
                if os.path.isdir(entry) if is_link else entry.is_dir():
                    folders.append(entry.name)
                elif os.path.isfile(entry) if is_link else entry.is_file():
                    files.append(entry.name)
                elif is_link and not os.path.exists(entry):
                    broken.append(entry.name)
    except (OSError, ValueError):  # ValueError: a path with a NUL, as a list of images may have it
        return _Entries([], {}, [])
    return _Entries(sorted(folders), dict.fromkeys(sorted(files)), sorted(broken))
