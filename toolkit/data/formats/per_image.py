"""Formats with an annotation file for each image: where the files of a split lie, and which image each is of.

A format says the suffix of its files, whether a file is an annotation, and how to parse one (`ImageFormat`). One whose
folders are the usual ones needs no more than `find_files` and `read_files`.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from toolkit.base.files import without_suffix
from toolkit.data.annotations import Reading
from toolkit.data.check_files import map_in_threads
from toolkit.data.find_images import find_missing, find_root
from toolkit.data.formats.annotated import Listing, ParsedImage, open_annotated, rows_of, sorted_classes
from toolkit.data.image_sources import ImageSources, open_sources, watched_of
from toolkit.data.layout import UNSPLIT, Layout, Splits, split_in_name
from toolkit.data.table import DetectionTable, Problem

CLASS_FILES = ("labels.txt", "classes.txt", "labelmap.txt", "predefined_classes.txt", "meta.json")
NO_OBJECT = ("background", "__background__", "_background_")
ANNOTATION_FOLDERS = ("Annotations", "annotations", "labels", "xmls", "")
IMAGE_FOLDERS = ("JPEGImages", "images", "Images", "imgs", "img", "")
# By the path of an annotation without its suffix, relative to their folder: its content, or why it cannot be read.
Entries = Mapping[str, ParsedImage | str]


@dataclass(frozen=True)
class ImageFormat:
    """A format with an annotation file for each image.

    suffix: of the files, in small letters. is_annotation: says whether a file is an annotation. parse: reads one;
    raises ValueError, with a message, if it does not have what it must have; None for a file of another kind.
    may_lie: as of `Listing`.
    """

    suffix: str
    is_annotation: Callable[[Path], bool]
    parse: Callable[[Path], ParsedImage | None]
    may_lie: bool = False

    def files(self, layout: Layout, folder: Path) -> list[Path]:
        """Return the files of this format directly in a folder, sorted."""
        return [folder / name for name in layout.names(folder) if name.lower().endswith(self.suffix)]

    def files_below(self, layout: Layout, folder: Path) -> Iterator[Path]:
        """Yield the files in a folder and its subfolders, as predictions for folders of images are written."""
        for inner in layout.below(folder):
            if not any(part.startswith(".") for part in inner.relative_to(folder).parts):
                yield from self.files(layout, inner)

    def is_in(self, layout: Layout, folder: Path) -> bool:
        """Return whether the first file in a folder is an annotation."""
        return any(self.is_annotation(file) for file in self.files(layout, folder)[:1])


def find_files(format: ImageFormat, layout: Layout) -> Splits | None:
    """Return the splits of a folder with files of a format, by the images or in folders of their own; None without any.
    """
    folders = annotation_folders(format, layout, layout.folder)
    return Splits(layout, {split: [folder] for split, folder in folders.items()}) if folders else None


def read_files(kind: str, format: ImageFormat, found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split of what `find_files` found, by `toolkit.data.formats.annotated.open_annotated`; kind: as there."""
    return open_annotated(kind, found.folder, split, partial(_listing_of, format, found, split, reading), reading)


def _listing_of(format: ImageFormat, found: Splits, split: str, reading: Reading) -> Listing:
    folders = chain.from_iterable(found.sources.values())
    files = AnnotationFiles(format, found.layout, folders, [found.folder])
    parts = [files.part(found.folder, folder, split, reading.image_dir) for folder in found.sources[split]]
    listing, images = files.listing(parts, split, reading.image_dir, masks=reading.masks)
    listing.add_all(images)
    return listing


# ---- where annotations lie -------------------------------------------------------------------------------------------


def annotation_folders(format: ImageFormat, layout: Layout, folder: Path) -> dict[str, Path]:
    """Return the folder of the annotations of each split: in the folders of splits, else of the one that is not split.
    """
    named: dict[str, Path] = {}
    for split, folders in folders_of_splits(layout, folder).items():
        for inner in folders:
            found = annotation_folder(format, layout, inner)
            if found:
                named.setdefault(split, found)
    if named:
        return named
    only = annotation_folder(format, layout, folder)
    return {UNSPLIT: only} if only else {}


def folders_of_splits(layout: Layout, folder: Path) -> dict[str, list[Path]]:
    """Return the folders of the splits of a data set, which may lie in its folder of annotations."""
    return layout.folders_of_splits(folder / "Annotations", folder / "annotations", folder)


def annotation_folder(format: ImageFormat, layout: Layout, folder: Path) -> Path | None:
    """Find the folder of the annotations of a data set or a split: one of the usual names, else the only one with any.
    """
    for name in ANNOTATION_FOLDERS:
        if format.is_in(layout, folder / name):
            return folder / name
    for name in ("Annotations", "annotations"):
        with_files = dict.fromkeys(path.parent for path in format.files_below(layout, folder / name))
        if any(format.is_in(layout, inner) for inner in with_files):
            return folder / name
    unnamed = [inner for inner in layout.folders(folder) if split_in_name(inner.name) is None]
    others = [inner for inner in unnamed if format.is_in(layout, inner)]
    return others[0] if len(others) == 1 else None


# ---- annotations and their images ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The images of a split in one data set.

    root: of the images. images: by the path of the annotation without its suffix; their names are relative to `root`.
    present: names of the images that are there.
    """

    root: Path | ImageSources
    images: dict[str, ParsedImage]
    problems: list[Problem]
    present: set[str]


class AnnotationFiles:
    """The annotations of all splits, parsed, and the classes that they name.

    Args:
        format: of the files.
        layout: of the folder of the data set, or of the folder around several.
        folders: those of the annotations.
        data_sets: the folders that may have a list of classes.
    """

    def __init__(self, format: ImageFormat, layout: Layout, folders: Iterable[Path], data_sets: Iterable[Path]):
        self.format = format
        self.layout = layout
        self.entries = {folder: self._parse_folder(folder) for folder in dict.fromkeys(folders)}
        names: set[str] = set()
        for entries in self.entries.values():
            for image in entries.values():
                if isinstance(image, ParsedImage):
                    names |= {box.name for box in image.boxes}
        self.class_paths = [folder / name for folder in dict.fromkeys(data_sets) for name in CLASS_FILES]
        class_files = [path for path in self.class_paths if layout.has_file(path)]
        self.classes, self.problems = _class_list(class_files, names)

    def _parse_folder(self, folder: Path) -> Entries:
        """Parse every file of a folder. Files in subfolders are read if they are annotations."""

        def parse(path: Path) -> list[tuple[str, ParsedImage | str]]:
            stem = without_suffix(path.relative_to(folder).as_posix())
            try:
                if path.parent != folder and not self.format.is_annotation(path):
                    return []
                parsed = self.format.parse(path)
                return [] if parsed is None else [(stem, parsed)]
            except (ValueError, OSError) as error:
                return [(stem, str(error))]

        files = list(self.format.files_below(self.layout, folder))
        return dict(map_in_threads(parse, files, f"reading {folder.name}"))

    def part(
        self,
        folder: Path,
        annotations: Path,
        split: str,
        image_dir: Path | ImageSources | None,
        entries: Entries | None = None,
    ) -> Part:
        """Find the image of each annotation of a split in one data set.

        folder: of the data set. annotations: the folder of the annotations of the split. entries: those of them that
            are read; None: all.
        """
        if entries is None:
            entries = self.entries[annotations]
        folders = list(dict.fromkeys(["", *map(os.path.dirname, entries)]))
        root = image_dir
        if root is None:
            parsed = (image.file_name for image in entries.values() if isinstance(image, ParsedImage))
            root = _image_root(self.layout, folder, annotations, split, folders, next(parsed, None))
        present = set(chain.from_iterable(self.layout.images(root, inner) for inner in folders))
        images, problems = self._with_files(entries, present)
        return Part(root, images, problems, present)

    def _with_files(self, entries: Entries, present: Set[str]) -> tuple[dict[str, ParsedImage], list[Problem]]:
        """Return (parsed images with the names of their files, a problem for each entry that cannot be used)."""
        stems_of = {without_suffix(name): name for name in sorted(present)}  # in one order on all machines
        stem_of: dict[str, str] = {}  # the annotation of an image
        images = {}
        problems = []
        suffix = self.format.suffix
        for stem, image in entries.items():
            if isinstance(image, str):
                problems.append(Problem("error", f"{stem}{suffix}", None, None, image))
                continue
            name = _image_of(stem, image.file_name, present, stems_of)
            first = stem_of.setdefault(name, stem)
            if first != stem and os.path.dirname(stem):
                message = f"{first}{suffix} is an annotation of {name} too; keep one of them"
                problems.append(Problem("error", f"{stem}{suffix}", None, None, message))
                continue
            images[stem] = image.named(name)
        return images, problems

    def listing(
        self,
        parts: Sequence[Part],
        split: str,
        image_dir: Path | ImageSources | None,
        listed: Iterable[str] = (),
        masks: bool = False,
    ) -> tuple[Listing, list[ParsedImage]]:
        """Return the listing of a split, without boxes, and its images, whose boxes are to be added.

        listed: names of images that other splits may have. masks: whether masks are read.
        """
        images: list[ParsedImage] = []
        problems = list(self.problems)
        roots = []
        for part in parts:
            images += part.images.values()
            problems += [*part.problems, *chain.from_iterable(image.problems for image in part.images.values())]
            roots.append(part.root)
        is_one = all(root == roots[0] for root in roots)
        root = roots[0] if is_one else image_dir or open_sources(roots)
        found = find_missing(rows_of(images), root, self.layout, image_dir or self.layout.folder, split)
        listing = Listing(
            found.image_root,
            found.images,
            self.classes,
            [*self._watched(roots), *found.watched],
            found.names(listed),
            problems + found.problems,
            masks,
            self.format.may_lie,
        )
        return listing, images

    def _watched(self, roots: Iterable[Path | ImageSources]) -> list[Path | str]:
        """Return the places of annotations (also in subfolders), images and class lists, there or not yet."""
        watched: list[Path | str] = [*self.class_paths]
        for folder, entries in self.entries.items():
            inner = dict.fromkeys(os.path.dirname(stem) for stem in entries)
            watched += [folder, *(folder / name for name in inner)]
        for root in roots:
            watched += watched_of(root)
        return watched


def _image_root(
    layout: Layout, folder: Path, annotations: Path, split: str, folders: Sequence[str], first: str | None
) -> Path:
    """Find the folder of the images: next to the annotations, or in a folder of their own; see `find_root`.

    folders: its subfolders in which images may lie.
    """
    near = [annotations]
    if annotations.parent != folder.parent:
        near.append(annotations.parent)
    names = (*IMAGE_FOLDERS, f"images/{split}", f"images/{annotations.name}")
    candidates = [at / name for at in near for name in names]
    candidates.append(folder / "images" / annotations.name)
    candidates.append(folder / "JPEGImages" / annotations.name)

    def holds(candidate: Path) -> bool:
        return any(layout.images(candidate, inner) for inner in folders)

    return find_root(candidates, holds, layout, folder, where=folder, first=first)


def _image_of(stem: str, file_name: str, present: Set[str], stems_of: Mapping[str, str]) -> str:
    """Find the image of an annotation: the name in the file, else one called like the file, in its folder, else above.

    A tool may have renamed the files, or left the suffix away.
    """
    folder, own_name = os.path.split(stem)
    for base in dict.fromkeys((folder, "")):
        said = os.path.join(base, file_name)
        if said in present:
            return said
        for known in (os.path.join(base, own_name), without_suffix(said)):
            if known in stems_of:
                return stems_of[known]
    return os.path.join(folder, file_name)


def _class_list(files: Sequence[Path], names: set[str]) -> tuple[list[tuple[int, str]], list[Problem]]:
    """Return the classes of the first file that lists all names, else the sorted names; a warning for each other file.
    """
    problems = []
    for file in files:
        distinct = dict.fromkeys(map(str.strip, _lines_of(file)))
        if not distinct:  # a `meta.json` of something else
            continue
        listed = [name for name in distinct if name and (name in names or name not in NO_OBJECT)]
        if names <= set(listed):
            return list(enumerate(listed, start=1)), problems
        missing = ", ".join(sorted(names - set(listed))[:10])
        message = f"lists {len(listed)} classes, but not {missing}, which the annotations name; the file is not used"
        problems.append(Problem("warning", file.name, None, None, message))
    return sorted_classes(names), problems


def _lines_of(file: Path) -> list[str]:
    """Return the lines of a list of classes; of CVAT's, and of Supervisely's, the names."""
    text = file.read_text(encoding="utf-8-sig")
    lines = text.splitlines()
    if file.name == "labelmap.txt":  # CVAT's: "name:colour:parts:actions", with a comment
        return [line.split(":")[0] for line in lines if not line.lstrip().startswith("#")]
    if file.name != "meta.json":
        return lines
    try:
        return [str(entry["title"]) for entry in json.loads(text)["classes"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
