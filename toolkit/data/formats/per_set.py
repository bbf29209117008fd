"""Formats with one annotation file for all images of a split: where the files lie, and the table of a split.

A format says the endings of its files, and how to parse one (`SetFormat`).
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading, is_id
from toolkit.data.find_images import find_missing, find_root_near, found_name
from toolkit.data.formats.annotated import Listing, ParsedImage, open_annotated, rows_of
from toolkit.data.formats.look_alikes import tool_of
from toolkit.data.formats.per_image import ANNOTATION_FOLDERS
from toolkit.data.image_sources import ImageSources, is_there
from toolkit.data.layout import UNSPLIT, Layout, Splits, called_first, one_per_split, split_in_name
from toolkit.data.table import DetectionTable, Problem

PROBED_FILES = 20  # of a folder: one with more has a file for each image


@dataclass
class Document:
    """What a file says. classes: in order; the names of boxes that are not among them follow. splits: of the images, in
    their order, if the file has several; else empty.
    """

    images: list[ParsedImage]
    classes: Sequence[str] = ()
    problems: list[Problem] = field(default_factory=list)
    splits: Sequence[str] = ()


@dataclass(frozen=True)
class SetFormat:
    """A format with a file for many images.

    kind: its name in `FOLDERS`. title: as `tool_of` names it. suffixes: of its files; of two files with the same
    content that of the first suffix is read. parse: reads one; raises ValueError, with a message, if it cannot.
    splits_in: returns the splits that a file names. also_called: another name that an image may have; None: there is
    none.
    """

    kind: str
    title: str
    suffixes: Sequence[str]
    parse: Callable[[Path], Document]
    splits_in: Callable[[Path], Sequence[str]] = lambda path: ()
    also_called: Callable[[str], str | None] = lambda name: None


def find_documents(format: SetFormat, layout: Layout) -> Splits | None:
    """Return the splits of a folder, or of one file; None if there is no file of this format.

    Looked at are the folder, its folder of annotations, and those of splits. Of several files for one split the first
    is read, and named with the format.
    """
    candidates = list(_candidates(format, layout))
    sources: dict[str, list[Path]] = {}
    for split, file in one_per_split(candidates).items():
        for name in format.splits_in(file) or [split]:
            sources.setdefault(name, []).append(file)
    files = [path for _, path in candidates]
    read = list(dict.fromkeys(chain.from_iterable(sources.values())))
    names = [os.path.relpath(path, layout.folder) for path in read]
    which = f" ({', '.join(names)})" if len(read) < len(files) else ""
    return Splits(layout, sources, files, together=which) if sources else None


def read_document(format: SetFormat, found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split of what `find_documents` found, by `toolkit.data.formats.annotated.open_annotated`."""
    return open_annotated(format.kind, found.folder, split, partial(_listing, format, found, split, reading), reading)


def _candidates(format: SetFormat, layout: Layout) -> Iterable[tuple[str | None, Path]]:
    """Yield (the split that its name or that of its folder says or None, file)."""
    folder = layout.folder
    if folder.is_file():
        if tool_of(folder) == format.title:
            yield split_in_name(folder.name), folder
        return
    places = [(None, folder / name) for name in ("", *filter(None, ANNOTATION_FOLDERS))]
    for split, folders in layout.folders_of_splits(folder).items():
        places += [(split, inner) for inner in folders]
    for split, place in places:
        for suffix in format.suffixes:
            for path in called_first(layout.files(place, suffix))[:PROBED_FILES]:
                if tool_of(path) == format.title:
                    yield split or split_in_name(path.name), path


def _listing(format: SetFormat, found: Splits, split: str, reading: Reading) -> Listing:
    paths = list(dict.fromkeys(chain.from_iterable(found.sources.values())))
    documents = {path: _parsed(format, path) for path in paths}
    (path,) = found.sources[split]
    images = _images_of(documents[path], split)
    folder = found.folder.parent if found.folder.is_file() else found.folder
    names = [image.file_name for image in images]
    name_there = partial(_name_there, format)
    root = reading.image_dir or find_root_near(found.layout, folder, path, split, names, name_there)
    images = [image.named(name_there(root, image.file_name)) for image in images]
    pictures = find_missing(rows_of(images), root, found.layout, reading.image_dir or folder, split)
    listed = [image.file_name for document in documents.values() for image in document.images]
    problems = [*documents[path].problems, *chain.from_iterable(image.problems for image in images)]
    listing = Listing(
        pictures.image_root,
        pictures.images,
        _classes(documents.values()),
        [*paths, *pictures.watched],
        pictures.names(name_there(root, name) for name in listed),
        problems + pictures.problems,
        reading.masks,
        may_lie=True,
    )
    listing.add_all(images)
    return listing


def _parsed(format: SetFormat, path: Path) -> Document:
    """Raises BadInput if the file cannot be read."""
    try:
        document = format.parse(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"not as {format.title} writes it ({error!r})"
        raise BadInput(f"{path}: {reason}") from error
    odd = [image.file_name for image in document.images if not is_id(image.file_name)]
    if odd:
        raise BadInput(f"{path}: the image name {odd[0]!r} cannot be that of a file; expected a path")
    return document


def _images_of(document: Document, split: str) -> list[ParsedImage]:
    if not document.splits or split == UNSPLIT:
        return document.images
    return [image for image, name in zip(document.images, document.splits, strict=True) if name == split]


def _classes(documents: Iterable[Document]) -> list[tuple[int, str]]:
    """Return (id, name) of the classes of all splits: those listed in their order, then the others by the alphabet."""
    listed: dict[str, None] = {}
    used = set()
    for document in documents:
        listed |= dict.fromkeys(document.classes)
        used |= {box.name for image in document.images for box in image.boxes}
    return list(enumerate([*listed, *sorted(used - listed.keys())], start=1))


def _name_there(format: SetFormat, root: Path | ImageSources, name: str) -> str:
    """Return the name of the picture in the folder of the images, by which the file, or the tool before it, calls it.
    """
    for known in filter(None, (name, format.also_called(name))):
        there = found_name(root, known)
        if is_there(root / there):
            return there
    return name
