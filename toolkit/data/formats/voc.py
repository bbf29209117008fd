"""Pascal VOC: one XML file per image."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from toolkit.base.errors import BadInput
from toolkit.base.text import shown
from toolkit.data.annotations import Reading
from toolkit.data.check_files import map_in_threads
from toolkit.data.formats.annotated import Listing, ParsedBox, ParsedImage, open_annotated
from toolkit.data.formats.per_image import (
    AnnotationFiles,
    Entries,
    ImageFormat,
    Part,
    annotation_folder,
    annotation_folders,
    folders_of_splits,
)
from toolkit.data.formats.voc_masks import MASK_FOLDER, masks_of_objects
from toolkit.data.layout import UNSPLIT, Layout, Splits, called_first, split_in_name
from toolkit.data.table import DetectionTable, Problem

TITLE = "Pascal VOC"
CORNERS = ("xmin", "ymin", "xmax", "ymax")


class DataSet(NamedTuple):
    """A folder of VOC data, such as the one of a year.

    annotations: the folder of the XML files of each split; the same for all if lists choose from it. lists: of the
    images of each split, if there are any.
    """

    folder: Path
    annotations: dict[str, Path]
    lists: dict[str, Path]


@dataclass(frozen=True)
class VocSplits(Splits):
    """The splits of one or several folders of VOC data, which are read as one."""

    data_sets: Sequence[DataSet] = ()


def find(layout: Layout) -> VocSplits | None:
    """Return the splits of a folder of VOC annotations; None if it is not one.

    Recognised are `ImageSets/Main/<split>.txt` with `Annotations` and `JPEGImages`, a folder for each split with the
    XML files in it or in a folder of their own, one folder without splits, and several years below `VOCdevkit`.

    Raises BadInput: of several years, some have splits and some have none.
    """
    data_sets = [data_set for data_set in _data_sets(layout, layout.folder) if data_set.annotations]
    if not data_sets:
        return None
    _check_alike(layout.folder, data_sets)
    sources: dict[str, list[Path]] = {}
    candidates = []
    for folder, annotations, lists in data_sets:
        for split, xml_folder in annotations.items():
            sources.setdefault(split, []).extend([xml_folder, lists[split]] if lists else [xml_folder])
        # The images of the list of a class are in another list too.
        candidates += [path for path in _lists(layout, folder) if not _is_of_class(path)]
        inner = chain.from_iterable(folders_of_splits(layout, folder).values())
        candidates += [entry for entry in inner if annotation_folder(FORMAT, layout, entry)]
    together = ""
    if len(data_sets) > 1:
        names = ", ".join(str(data_set.folder.relative_to(layout.folder)) for data_set in data_sets)
        together = f", {names} together (data.path chooses one)"
    return VocSplits(layout, sources, candidates, together=together, data_sets=data_sets)


def folders_with_annotations(layout: Layout) -> list[Path]:
    """Find folders, up to four levels below that of the layout, whose XML files are VOC annotations."""
    matches = []
    level = [layout.folder]
    for _ in range(5):
        matches += [directory for directory in level if FORMAT.is_in(layout, directory)]
        below = chain.from_iterable(map(layout.folders, level))
        level = list(below)[:1000]
    return matches


def read(found: VocSplits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.annotated.open_annotated`.

    Boxes are xmin to xmax and ymin to ymax without a change, as annotation tools write them. In the files of the VOC
    challenges themselves (`<database>The VOC...`) pixels count from 1 and the pixel xmax belongs to the box, so xmin
    and ymin are lowered by 1. `difficult` objects are ignored in evaluation, like COCO's crowds. Classes are the names
    of all splits in alphabetical order, or those of `labels.txt`. If there are several years, the splits of this name
    of all years are joined.

    With `reading.masks`, the mask of the object at place k in the XML file is where `SegmentationObject/<name>.png` has
    the number k (`toolkit.data.formats.voc_masks`); and if `ImageSets/Segmentation` has a list of this name, the
    images are those of this list, since only these have masks in the VOC challenges.
    """
    root = found.data_sets[0].folder if len(found.data_sets) == 1 else found.folder
    return open_annotated("voc", root, split, partial(_listing, found, root, split, reading), reading)


# ---- where the files are ---------------------------------------------------------------------------------------------


def _data_sets(layout: Layout, folder: Path) -> list[DataSet]:
    """Return the years of a `VOCdevkit`, wherever it lies; the folder itself if there are none."""
    inner = [directory for directory in layout.folders(folder) if directory.name.startswith("VOC")]
    years = []
    if inner and not FORMAT.is_in(layout, folder / "Annotations"):
        for directory in inner:
            years += [year for year in _data_sets(layout, directory) if year.annotations]
    return years or [_data_set(layout, folder)]


def _data_set(layout: Layout, folder: Path) -> DataSet:
    lists = _image_sets(layout, folder)
    if lists:
        return DataSet(folder, dict.fromkeys(lists, folder / "Annotations"), lists)
    return DataSet(folder, annotation_folders(FORMAT, layout, folder), {})


def _check_alike(folder: Path, data_sets: Sequence[DataSet]) -> None:
    """Raise BadInput if some data sets are split, and some are not."""
    are_split = {UNSPLIT not in data_set.annotations for data_set in data_sets}
    if len(are_split) == 1:
        return
    kinds = []
    for data_set in data_sets:
        kind = "not split" if UNSPLIT in data_set.annotations else "split"
        kinds.append(f"{data_set.folder} ({kind})")
    years = ", ".join(kinds)
    raise BadInput(f"{folder}: only some of its data sets are split: {years}; choose one of them (data.path)")


def _image_sets(layout: Layout, folder: Path) -> dict[str, Path]:
    """Return the list of each split; of several the one that is called like it, then the first."""
    if not FORMAT.is_in(layout, folder / "Annotations"):
        return {}
    named: dict[str, Path] = {}
    for path in _lists(layout, folder):
        split = _split_of_list(path)
        if split:
            named.setdefault(split, path)
    return named


def _lists(layout: Layout, folder: Path) -> list[Path]:
    """Find the lists of images of a data set: those of `ImageSets/Main`, or of `ImageSets` if there are none."""
    sets = folder / "ImageSets"
    for directory in (sets / "Main", sets):
        lists = called_first(layout.files(directory, ".txt"))
        if any(map(_split_of_list, lists)):
            return lists
    return []


def _split_of_list(path: Path) -> str | None:
    return "trainval" if path.stem == "trainval" else split_in_name(path.name)


def _is_of_class(path: Path) -> bool:
    """Return whether a list is one of a class, with 1 or -1 behind each image."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return len(file.readline().split()) > 1


# ---- what the files say ----------------------------------------------------------------------------------------------


def _listing(found: VocSplits, root: Path, split: str, reading: Reading) -> Listing:
    """List a split of all data sets that have it; the classes are those of all of them."""
    xml_folders = chain.from_iterable(data_set.annotations.values() for data_set in found.data_sets)
    data_sets = [data_set.folder for data_set in found.data_sets]
    files = AnnotationFiles(FORMAT, found.layout, xml_folders, [root, *data_sets])
    parts = []
    masks = []  # pictures with the masks of the objects of each image
    listed: set[str] = set()
    watched: list[Path] = []
    for data_set in found.data_sets:
        if split in data_set.annotations:
            part = _part(files, data_set, split, reading)
            parts.append(part)
            masks += [data_set.folder / MASK_FOLDER / f"{stem}.png" for stem in part.images]
            listed |= part.present if data_set.lists else set()  # the other lists have the rest
            watched += _watched(data_set, split, reading)
    listing, images = files.listing(parts, split, reading.image_dir, listed, reading.masks)
    listing.watched += watched
    listing.add_all(_with_masks(images, masks, reading) if reading.masks else images)
    return listing


def _part(files: AnnotationFiles, data_set: DataSet, split: str, reading: Reading) -> Part:
    """Return the images of the split of one data set, those of its list if there is one."""
    annotations = data_set.annotations[split]
    if not data_set.lists:
        return files.part(data_set.folder, annotations, split, reading.image_dir)
    file = data_set.lists[split]
    of_masks = _list_of_masks(data_set, split)
    if reading.masks and of_masks.is_file():
        file = of_masks
    entries, missing = _listed_entries(files.entries[annotations], file, annotations.name, split)
    part = files.part(data_set.folder, annotations, split, reading.image_dir, entries)
    part.problems[:0] = missing
    return part


def _watched(data_set: DataSet, split: str, reading: Reading) -> list[Path]:
    """Return the files and folders of a data set, other than annotations and images, whose change changes the
    listing."""
    watched = []
    if reading.masks:
        watched.append(data_set.folder / MASK_FOLDER)
    if data_set.lists:
        watched.append(data_set.lists[split])
        if reading.masks:
            watched.append(_list_of_masks(data_set, split))  # also if it is made later
    return watched


def _list_of_masks(data_set: DataSet, split: str) -> Path:
    """Return where the list of the images with masks may be."""
    return data_set.folder / "ImageSets" / "Segmentation" / data_set.lists[split].name


def _with_masks(images: Sequence[ParsedImage], masks: Sequence[Path], reading: Reading) -> Iterator[ParsedImage]:
    """Yield the images with the masks of their boxes, which the pictures `masks` show."""
    read_one = partial(masks_of_objects, max_pixels=reading.max_image_pixels)
    for image, numbers in zip(images, map_in_threads(read_one, masks, "reading masks"), strict=True):
        boxes = []
        for place, box in enumerate(image.boxes, start=1):
            boxes.append(box._replace(segmentation=numbers.of_object(place), mask_fault=numbers.fault))
        yield image._replace(boxes=boxes)


def _listed_entries(
    entries: Entries, file: Path, folder_name: str, split: str
) -> tuple[Entries, list[Problem]]:
    """Return the entries that a list of stems names, and a problem for each that is missing."""
    chosen = {}
    problems = []
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    for line in filter(None, map(str.strip, lines)):
        stem = line if line in entries else line.rsplit(None, 1)[0]  # the lists of a class have 1 or -1 behind
        if stem in entries:
            chosen[stem] = entries[stem]
        else:
            message = f"no annotation {folder_name}/{stem}.xml, which the list of {split} names"
            problems.append(Problem("error", stem, None, None, message))
    return chosen, problems


def _is_annotation(path: Path) -> bool:
    try:
        return ElementTree.parse(path).getroot().tag == "annotation"
    except (ElementTree.ParseError, LookupError, ValueError, OSError):  # also of an encoding that Python lacks
        return re.search(rb"<annotation[\s>]", path.read_bytes()[:400]) is not None


def _read_side(root: ElementTree.Element, tag: str) -> int | None:
    """Read the width or height in <size>, in pixels; None if it is empty. Raises ValueError if it is not a number."""
    text = (root.findtext(f"size/{tag}") or "").strip()
    if not text:
        return None
    try:
        return int(float(text))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"<size> has the {tag} {shown(text)}; expected a whole number of pixels") from error


def _parse(path: Path) -> ParsedImage:
    """Parse an XML file. Raises ValueError if it cannot be read, or a box has no name or not four numbers."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"invalid XML: {error}") from error
    except LookupError as error:
        raise ValueError(f"{error}; save the file as UTF-8") from error
    width = _read_side(root, "width")
    height = _read_side(root, "height")
    database = root.findtext("source/database") or ""
    lowered = 1.0 if database.startswith("The VOC") else 0.0
    boxes = []
    for number, entry in enumerate(root.iter("object"), start=1):
        name = entry.findtext("name")
        corners = [entry.findtext(f"bndbox/{tag}") for tag in CORNERS]
        if name is None or not name.strip():
            raise ValueError(f"object {number} has no <name>")
        try:
            x1, y1, x2, y2 = map(float, corners)
        except (TypeError, ValueError) as error:
            expected = "expected numbers in <bndbox> xmin, ymin, xmax, ymax"
            raise ValueError(f"object {number} ({name}): {expected}; found {corners}") from error
        difficult = (entry.findtext("difficult") or "0").strip()
        ignored = difficult in ("1", "true", "True")
        xyxy = (x1 - lowered, y1 - lowered, x2, y2)
        boxes.append(ParsedBox(name.strip(), xyxy, path.name, ignored))
    file_name = (root.findtext("filename") or "").strip()
    file_name = file_name.replace("\\", "/").rsplit("/", 1)[-1]
    return ParsedImage(file_name or path.stem, width or None, height or None, boxes)


FORMAT = ImageFormat(".xml", _is_annotation, _parse)
