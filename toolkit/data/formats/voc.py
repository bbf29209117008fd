"""Pascal VOC: one XML file per image."""

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from toolkit.base.errors import BadInput
from toolkit.base.files import folders_below, without_suffix
from toolkit.base.text import shown
from toolkit.data.annotations import ImageRow, Reading
from toolkit.data.check_files import image_names, parallel
from toolkit.data.formats.annotated import (
    UNSPLIT,
    Listing,
    called_first,
    folders_in,
    folders_of_splits,
    may_hold,
    not_among,
    open_annotated,
    ordered,
    sorted_classes,
    split_in_name,
)
from toolkit.data.formats.voc_masks import MASK_FOLDER, ObjectNumbers, masks_of_objects
from toolkit.data.image_sources import open_sources, watched_of
from toolkit.data.missing_images import find_missing, root_or_base
from toolkit.data.table import DetectionTable, Problem

TITLE = "Pascal VOC"
CLASS_FILES = ("labels.txt", "classes.txt", "labelmap.txt", "predefined_classes.txt")
ANNOTATION_FOLDERS = ("Annotations", "annotations", "labels", "xmls", "")
IMAGE_FOLDERS = ("JPEGImages", "images", "Images", "imgs", "")
NO_OBJECT = ("background", "__background__", "_background_")
CORNERS = ("xmin", "ymin", "xmax", "ymax")


class _Parsed(NamedTuple):
    """The content of an XML file: image and its size (None: not given), boxes as `Listing.add` takes them.

    masks: the picture with the masks of the objects, if masks are read.
    """

    file_name: str
    width: int | None
    height: int | None
    boxes: list[tuple[str, tuple[float, ...], str, bool]]
    masks: Path | None = None


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the splits of a folder of VOC annotations; None if it is not one.

    Recognised are `ImageSets/Main/<split>.txt` beside `Annotations` and `JPEGImages`, a folder for each split with the
    XML files in it or in a folder of their own, one folder without splits, and several years below `VOCdevkit`.

    Raises BadInput: of several years, some have splits and some have none.
    """
    by_year = {}
    for year in _data_sets(folder):
        splits = _splits(year)
        if splits:
            by_year[year] = splits
    if (UNSPLIT,) in by_year.values() and len(set(by_year.values())) > 1:
        kinds = []
        for year, splits in by_year.items():
            kind = "not split" if splits == (UNSPLIT,) else "split"
            kinds.append(f"{year} ({kind})")
        years = ", ".join(kinds)
        raise BadInput(f"{folder}: only some of its data sets are split: {years}; choose one of them (data.path)")
    return ordered(set().union(*by_year.values())) or None


def together(folder: Path) -> str:
    """Describe which years below `folder` are read as one data set; "" if there is only one."""
    years = [year for year in _data_sets(folder) if _splits(year)]
    if len(years) <= 1:
        return ""
    names = ", ".join(str(year.relative_to(folder)) for year in years)
    return f", {names} together (data.path chooses one)"


def folders_with_annotations(folder: Path) -> list[Path]:
    """Find folders, up to four levels below `folder`, whose XML files are VOC annotations."""
    matches = []
    level = [folder]
    for _ in range(5):
        matches += [directory for directory in level if _has_xml(directory)]
        below = chain.from_iterable(map(folders_in, level))
        level = list(below)[:1000]
    return matches


def unused(folder: Path) -> list[str]:
    """Return the names of the lists and folders of splits that are not read.

    The lists of single classes are left out, because their images are in another list too.
    """
    names = []
    for data_set in _data_sets(folder):
        lists = [path for path in _lists(data_set) if not _is_of_class(path)]
        inner = chain.from_iterable(_folders_of_splits(data_set).values())
        annotated = [entry for entry in inner if _annotations(entry)]
        used = [*_image_sets(data_set).values(), *_annotation_folders(data_set).values()]
        names += not_among([*lists, *annotated], used, folder)
    return names


def read(folder: Path, split: str, reading: Reading) -> DetectionTable:
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
    data_sets = _data_sets(folder)
    root = data_sets[0] if len(data_sets) == 1 else folder
    listing = partial(_listing, root, data_sets, split, reading)
    return open_annotated("voc", root, split, listing, reading)


def _data_sets(folder: Path) -> list[Path]:
    """Return the folders of the years of a `VOCdevkit`, wherever it lies; `folder` itself if there are none."""
    inner = [directory for directory in folders_in(folder) if directory.name.startswith("VOC")]
    if not inner or _has_xml(folder / "Annotations"):
        return [folder]
    years = []
    for directory in inner:
        years += [year for year in _data_sets(directory) if _splits(year)]
    return years or [folder]


def _has_xml(folder: Path) -> bool:
    """Return whether the first XML file in a folder is a VOC annotation."""
    for path in _xml_files(folder):
        try:
            return ElementTree.parse(path).getroot().tag == "annotation"
        except (ElementTree.ParseError, LookupError, ValueError, OSError):  # also of an encoding that Python lacks
            return b"<annotation" in path.read_bytes()[:400]
    return False


def _xml_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.lower().endswith(".xml")]
        yield from (folder / name for name in sorted(names))


def _xml_below(folder: Path) -> Iterator[Path]:
    """Yield the XML files of a folder and of its subfolders, as predictions for folders of images are written."""
    for inner in folders_below(folder):
        if not any(part.startswith(".") for part in inner.relative_to(folder).parts):
            yield from _xml_files(inner)


def _annotations(folder: Path) -> Path | None:
    """Find the folder of the XML files of a data set or a split: one of the usual names, else the only one with any."""
    for name in ANNOTATION_FOLDERS:
        if _has_xml(folder / name):
            return folder / name
    for name in ("Annotations", "annotations"):
        with_files = dict.fromkeys(path.parent for path in _xml_below(folder / name))
        if any(map(_has_xml, with_files)):
            return folder / name
    unnamed = [directory for directory in folders_in(folder) if split_in_name(directory.name) is None]
    others = [directory for directory in unnamed if _has_xml(directory)]
    return others[0] if len(others) == 1 else None


def _splits(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the splits of one data set."""
    return ordered(_annotation_folders(folder)) or None


def _annotation_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of the XML files of each split of one data set; the same for all if lists choose from it."""
    sets = _image_sets(folder)
    if sets:
        return dict.fromkeys(sets, folder / "Annotations")
    named = {}
    for split, folders in _folders_of_splits(folder).items():
        having = [xml for xml in map(_annotations, folders) if xml]
        if having:
            named[split] = having[0]
    if named:
        return named
    xml = _annotations(folder)
    return {UNSPLIT: xml} if xml else {}


def _folders_of_splits(folder: Path) -> dict[str, list[Path]]:
    return folders_of_splits(folder / "Annotations", folder / "annotations", folder)


def _image_sets(folder: Path) -> dict[str, Path]:
    """Return the list of each split; of several the one that is called like it, then the first."""
    if not _has_xml(folder / "Annotations"):
        return {}
    named: dict[str, Path] = {}
    for path in _lists(folder):
        split = "trainval" if path.stem == "trainval" else split_in_name(path.name)
        if split:
            named.setdefault(split, path)
    return named


def _lists(folder: Path) -> list[Path]:
    """Find the lists of images of a data set: those of `ImageSets/Main`, or of `ImageSets` if there are none."""
    sets = folder / "ImageSets"
    for directory in (sets / "Main", sets):
        lists = called_first(directory.glob("*.txt")) if directory.is_dir() else []
        if any(path.stem == "trainval" or split_in_name(path.name) for path in lists):
            return lists
    return []


def _is_of_class(path: Path) -> bool:
    """Return whether a list is one of a class, with 1 or -1 behind each image."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return len(file.readline().split()) > 1


def _listing(folder: Path, data_sets: list[Path], split: str, reading: Reading) -> Listing:
    """List a split of all data sets that have it; the classes are those of all of them."""
    image_dir = reading.image_dir
    xml_folders = {data_set: _annotation_folders(data_set) for data_set in data_sets}
    parsed: dict[Path, dict[str, _Parsed | str]] = {}
    names = set()  # of the classes
    for by_split in xml_folders.values():
        for directory in by_split.values():
            if directory in parsed:
                continue
            parsed[directory] = _parse_all(directory)
            for image in parsed[directory].values():
                if isinstance(image, _Parsed):
                    names |= {name for name, *_ in image.boxes}
    class_files = []
    for directory in dict.fromkeys((folder, *data_sets)):
        files = [directory / name for name in CLASS_FILES]
        class_files += [file for file in files if file.is_file()]
    classes, problems = _class_list(class_files, names)
    parts = []
    for data_set, by_split in xml_folders.items():
        if split in by_split:
            parts.append(_read_data_set(data_set, split, by_split[split], parsed, reading))
    roots, images_of_parts, watched, listed, more = zip(*parts, strict=True)
    root = roots[0] if len(roots) == 1 else image_dir or open_sources(roots)
    images = list(chain(*images_of_parts))
    rows = []
    for number, image in enumerate(images, start=1):
        rows.append(ImageRow(number, image.file_name, image.width, image.height))
    found = find_missing(rows, root, image_dir or folder, may_hold(split))
    listing = Listing(
        found.image_root,
        found.images,
        classes,
        [*parsed, *_folders_of(parsed), *class_files, *chain(*watched), *found.watched],
        found.names(set().union(*listed)),
        [*problems, *chain(*more), *found.problems],
        reading.masks,
    )
    masks = [ObjectNumbers(None)] * len(images)
    if reading.masks:
        files = [image.masks for image in images]
        masks = parallel(partial(masks_of_objects, max_pixels=reading.max_image_pixels), files, "reading masks")
    for index, image in enumerate(images):
        numbers = masks[index]
        for place, box in enumerate(image.boxes, start=1):
            listing.add(index, *box, segmentation=numbers.of_object(place), mask_fault=numbers.fault)
    return listing


def _folders_of(parsed: Mapping[Path, dict]) -> list[Path]:
    """Return the subfolders of folders of XML files that have XML files too."""
    inner = {}  # each once, in order
    for folder, entries in parsed.items():
        inner |= dict.fromkeys(folder / os.path.dirname(stem) for stem in entries)
    return [folder for folder in inner if folder not in parsed]


def _read_data_set(
    folder: Path,
    split: str,
    xml_folder: Path,
    parsed: dict,
    reading: Reading,
) -> tuple:
    """Return (root of the images, images, watched, listed, problems) of the split of one data set.

    xml_folder: of its XML files. parsed: the content of the files of all these folders.
    """
    image_dir = reading.image_dir
    sets = _image_sets(folder)
    images = []
    problems = []
    entries = parsed[xml_folder]
    if sets:
        of_masks = _list_of_masks(folder, sets[split])
        if reading.masks and of_masks.is_file():
            sets[split] = of_masks
        entries, problems = _listed_entries(entries, sets[split], xml_folder.name, split)
    folders = list(dict.fromkeys(["", *map(os.path.dirname, entries)]))
    root = image_dir or root_or_base(partial(_image_root, folder, xml_folder, split, folders), folder)
    present = set(image_names(root, folders))
    stems_of = {without_suffix(name): name for name in present}
    stem_of: dict[str, str] = {}  # the XML file of an image
    for stem, image in entries.items():
        if isinstance(image, str):
            problems.append(Problem("error", f"{stem}.xml", None, None, image))
            continue
        name = _image_of(stem, image.file_name, present, stems_of)
        if stem_of.setdefault(name, stem) != stem and os.path.dirname(stem):
            message = f"{stem_of[name]}.xml is an annotation of {name} too; keep one of them"
            problems.append(Problem("error", f"{stem}.xml", None, None, message))
            continue
        image = image._replace(file_name=name)
        if reading.masks:
            image = image._replace(masks=folder / MASK_FOLDER / f"{stem}.png")
        images.append(image)
    watched = list(watched_of(root))
    if reading.masks:
        watched.append(folder / MASK_FOLDER)
    if reading.masks and sets:
        watched.append(_list_of_masks(folder, sets[split]))  # also if it is made later
    listed = set()
    if sets:
        watched.append(sets[split])
        listed = present  # the other lists have the rest
    return root, images, watched, listed, problems


def _list_of_masks(folder: Path, file: Path) -> Path:
    """Return where the list of the images with masks may be, for a list of images."""
    return folder / "ImageSets" / "Segmentation" / file.name


def _image_of(stem: str, file_name: str, present: Set[str], stems_of: Mapping[str, str]) -> str:
    """Find the image of an XML file: the name in the file, else one called like the file, in its folder, else above.

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


def _listed_entries(entries: dict, file: Path, folder_name: str, split: str) -> tuple[dict, list[Problem]]:
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


def _parse_all(folder: Path) -> dict[str, _Parsed | str]:
    """Parse every XML file of a folder; return by its path without the suffix the content, or why it cannot be read.

    Files in subfolders are read if they are annotations.
    """

    def parse(path: Path) -> list:
        stem = without_suffix(path.relative_to(folder).as_posix())
        try:
            if path.parent != folder and ElementTree.parse(path).getroot().tag != "annotation":
                return []
            return [(stem, _parse(path))]
        except ElementTree.ParseError as error:
            return [(stem, f"invalid XML: {error}")]
        except LookupError as error:
            return [(stem, f"{error}; save the file as UTF-8")]
        except (ValueError, OSError) as error:
            return [(stem, str(error))]

    return dict(parallel(parse, list(_xml_below(folder)), f"reading {folder.name}"))


def _read_side(root: ElementTree.Element, tag: str) -> int | None:
    """Read the width or height in <size>, in pixels; None if it is empty. Raises ValueError if it is not a number."""
    text = (root.findtext(f"size/{tag}") or "").strip()
    if not text:
        return None
    try:
        return int(float(text))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"<size> has the {tag} {shown(text)}; expected a whole number of pixels") from error


def _parse(path: Path) -> _Parsed:
    root = ElementTree.parse(path).getroot()
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
        boxes.append((name.strip(), xyxy, path.name, ignored))
    file_name = (root.findtext("filename") or "").strip()
    file_name = file_name.replace("\\", "/").rsplit("/", 1)[-1]
    return _Parsed(file_name or path.stem, width or None, height or None, boxes)


def _image_root(folder: Path, xml_folder: Path, split: str, folders: Sequence[str]) -> Path:
    """Find the folder of the images: beside the XML files, or in a folder of their own.

    folders: its subfolders in which images may lie.
    """
    near = [xml_folder]
    if xml_folder.parent != folder.parent:
        near.append(xml_folder.parent)
    names = (*IMAGE_FOLDERS, f"images/{split}", f"images/{xml_folder.name}")
    candidates = [at / name for at in near for name in names]
    candidates.append(folder / "images" / xml_folder.name)
    candidates.append(folder / "JPEGImages" / xml_folder.name)
    for candidate in candidates:
        if any(image_names(candidate, folders)):
            return candidate
    tried = ", ".join(str(candidate) for candidate in dict.fromkeys(candidates))
    raise BadInput(f"{folder}: no images found; tried {tried}; set their folder (--data.image_dir)")


def _class_list(files: list[Path], names: set[str]) -> tuple[list[tuple[int, str]], list[Problem]]:
    """Return the classes of the first file that lists all names, else the sorted names; a warning for each other file.
    """
    problems = []
    for file in files:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        if file.name == "labelmap.txt":  # CVAT's: "name:colour:parts:actions", with a comment
            lines = [line.split(":")[0] for line in lines if not line.lstrip().startswith("#")]
        distinct = dict.fromkeys(map(str.strip, lines))
        listed = [name for name in distinct if name and (name in names or name not in NO_OBJECT)]
        if names <= set(listed):
            return list(enumerate(listed, start=1)), problems
        missing = ", ".join(sorted(names - set(listed))[:10])
        message = f"lists {len(listed)} classes, but not {missing}, which the annotations name; the file is not used"
        problems.append(Problem("warning", file.name, None, None, message))
    return sorted_classes(names), problems
