"""Shared code of the readers of VOC, YOLO and CSV data: from their boxes to a checked, cached table.

Each format is a module with three functions. `recognise(folder)` returns the names of the folder's splits, or None for
a folder of another format. `unused(folder)` returns the names of files and folders that look like a split but are not
read. `read(folder, split, ...)` returns a table. The writers of these formats are in `toolkit.tools.writers`.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Annotations, ImageRow, Reading
from toolkit.data.check_files import image_names, parallel, waits_for, with_good_files
from toolkit.data.checks import check
from toolkit.data.decoding import ImageError, probe_image
from toolkit.data.image_sources import ImageSources, digest_of
from toolkit.data.table import DetectionTable, Problem
from toolkit.data.table_cache import cached_table, write_table

# Names of folders and files by the split that they say.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval", "evaluation", "minival"),
    "test": ("test", "testing"),
}
FILE_NAME_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of a file's name: `testLabels` has two
UNSPLIT = "all"  # the one split of a folder that has none
UNKNOWN_SIZE = 2**31


@dataclass
class Listing:
    """A split as its files describe it, in columns.

    images: numbered from 1, names relative to `image_root`; sizes that the files omit are None, and are read from
        the headers of the images. If that fails, a problem is added, and the image gets `UNKNOWN_SIZE` as width and
        height.
    classes: (id, name) of each class.
    watched: files and folders whose change makes the cached table stale.
    listed: names of the images of all splits, as far as they are known.
    masks: whether masks are read.
    """

    image_root: Path | ImageSources
    images: list[ImageRow]
    classes: list[tuple[int, str]]
    watched: list[Path | str]
    listed: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    masks: bool = False

    def __post_init__(self):
        self.annotations = Annotations([{"id": id_, "name": name} for id_, name in self.classes], self.masks)
        self.annotations.images = self.images
        self._ids = {name: id_ for id_, name in self.classes}
        indices = range(len(self.images))
        self.problems += parallel(self._fill_size, indices, "reading sizes", waits_for(self.image_root))

    def _fill_size(self, index: int) -> list[Problem]:
        image = self.images[index]
        if image.width and image.height:
            return []
        try:
            height, width = probe_image(self.image_root / image.file_name).size_hw
            fault = []
        except ImageError as error:
            height = UNKNOWN_SIZE
            width = UNKNOWN_SIZE
            fault = [Problem("error", image.file_name, image.image_id, None, error.reason)]
        self.images[index] = image._replace(width=width, height=height)
        return fault

    def add(
        self,
        index: int,
        name: str,
        xyxy: Sequence[float],
        source: str,
        ignored: bool = False,
        shares: bool = False,
        segmentation: object = None,
        mask_fault: str = "",
    ) -> None:
        """Add a box of the image at `index`.

        name: of the class. xyxy: in pixels, or in fractions of the image if `shares`. source: the file of the box, for
        messages. ignored: True for objects that need not be found: VOC's `difficult`, COCO's crowds. segmentation: mask
        of the object in pixels, see `toolkit.data.segmentations.shape_of`; not used if masks are not read. mask_fault:
        why there is no mask, for messages.
        """
        image = self.images[index]
        x1, y1, x2, y2 = xyxy
        if shares:
            if image.width == UNKNOWN_SIZE:
                return
            x1 = x1 * image.width
            y1 = y1 * image.height
            x2 = x2 * image.width
            y2 = y2 * image.height
        if x1 == x2 or y1 == y2:
            message = f"box {[x1, y1, x2, y2]} ({name}) in {source} has no area; left out"
            self.problems.append(Problem("warning", image.file_name, image.image_id, None, message))
        else:
            if self.masks:
                number = len(self.annotations)
                self.annotations.add_segmentation(number, segmentation)
                if mask_fault:
                    self.annotations.mask_faults[number] = [mask_fault]
            id_ = len(self.annotations) + 1
            xywh = (x1, y1, x2 - x1, y2 - y1)
            self.annotations.add_box(id_, image.image_id, self._ids[name], xywh, ignored)


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


def may_hold(split: str | None) -> Callable[[str], bool]:
    """Return a function that says by the name of a folder whether pictures of this split can be in it.

    They cannot be in the folder of another split, where files often have the same names.
    """
    own = {"trainval": ("train", "val")}.get(split, (split,))

    def is_of_split(folder_name: str) -> bool:
        said = split_in_name(folder_name)
        return said is None or split in (None, UNSPLIT) or said in own

    return is_of_split


def called_first(paths: Iterable[Path]) -> list[Path]:
    """Sort paths: first those that `split_of` recognises (`train.json`), then all others; both by name."""
    return sorted(paths, key=lambda path: (split_of(path.name) is None, path.name))


def folders_of_splits(*parents: Path) -> dict[str, list[Path]]:
    """Return the subfolders of `parents` that are named after a split, by split; exact names come first."""
    found: dict[str, list[Path]] = {}
    for parent in parents:
        for folder in called_first(folders_in(parent)):
            split = split_in_name(folder.name)
            if split:
                found.setdefault(split, []).append(folder)
    return found


def folders_in(parent: Path) -> list[Path]:
    """Return the folders directly in a folder, sorted; an empty list if it cannot be read."""
    try:
        with os.scandir(parent) as entries:
            return sorted(parent / entry.name for entry in entries if os.path.isdir(entry.path))
    except OSError:
        return []


def not_among(candidates: Iterable[Path], used: Iterable[Path], folder: Path) -> list[str]:
    """Return the names, relative to `folder`, of the candidates that have nothing to do with a used path.

    Left out are candidates that are a used path, are inside of a used folder, or contain a used path.
    """
    resolved = [path.resolve() for path in used]
    left = []
    for candidate in candidates:
        here = candidate.resolve()
        if not any(here.is_relative_to(path) or path.is_relative_to(here) for path in resolved):
            left.append(str(candidate.relative_to(folder)))
    return list(dict.fromkeys(left))


def ordered(splits: Iterable[str]) -> tuple[str, ...]:
    """Sort names of splits: train, val, test, then the others."""
    order = list(SPLIT_NAMES)

    def place(name: str) -> tuple[int, str]:
        return (order.index(name) if name in order else len(order), name)

    return tuple(sorted(set(splits), key=place))


def images_in(root: Path | ImageSources) -> list[str]:
    """Return the names of the image files directly in a root, sorted; none if the root does not exist."""
    return sorted(image_names(root, [""]))


def open_annotated(
    kind: str,
    folder: Path,
    split: str,
    listing: Callable[[], Listing],
    reading: Reading,
) -> DetectionTable:
    """Open the table of a split, from the cache if the files that it was made from have not changed; else make it.

    Checks and problems are those of `read_coco`, but a box without width or height, which an accidental click in an
    annotation tool makes, is left out with a warning.

    kind: name of the format, for the key of the cache. listing: function that reads the files of the split. reading:
    its `image_dir` is the opened root of the images, or None if `listing` looks for them.

    Raises BadInput: the split has no images, or has defects and `reading.on_error` is "raise".
    """
    name = f"{folder} ({split})"
    image_dir = reading.image_dir

    def make(cache_file: Path) -> DetectionTable:
        contents = listing()
        if not contents.images:
            raise BadInput([f"{name}: no images", *map(str, contents.problems)])
        valid = check(contents.annotations, name, reading.max_image_pixels, reading.crowds)
        # Reported once, as the file's fault: that an unreadable image is too large is not a fault of its own.
        unread = {problem.image_id for problem in contents.problems if problem.severity == "error"}
        unread.discard(None)
        problems = list(contents.problems)
        for problem in valid.problems:
            if problem.annotation_id is not None or problem.image_id not in unread:
                problems.append(problem)
        valid = replace(valid, problems=problems)
        good, digests = with_good_files(
            valid,
            contents.image_root,
            reading.check_images,
            reading.max_image_pixels,
            contents.listed,
            "annotations",
            reading.white,
        )
        of_watched = {str(path): digest_of(path) for path in contents.watched}
        return write_table(
            **good.columns(),
            cache_file=cache_file,
            image_root=contents.image_root.resolve(),
            name=name,
            checked={**of_watched, **digests},
        )

    where = f"in {image_dir.resolve()}" if image_dir else ""
    key = [kind, split, reading.check_images, folder.resolve(), where]
    return cached_table(key, make, reading, name=name)


def sorted_classes(names: Iterable[str]) -> list[tuple[int, str]]:
    """Return (id, name) of each distinct name, in alphabetical order with ids from 1."""
    return list(enumerate(sorted(set(names)), start=1))
