"""Pascal VOC: one XML file for each image."""

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from toolkit.data.check_files import parallel
from toolkit.data.formats.annotated import (
    ALL,
    Annotated,
    Box,
    Listing,
    copy_image,
    file_names,
    images_in,
    open_annotated,
    ordered,
    sorted_classes,
    split_of,
)
from toolkit.data.places import Places, watched_of
from toolkit.data.table import DetectionTable, Problem
from toolkit.errors import BadInput

TITLE = "Pascal VOC"
CLASS_FILES = ("labels.txt", "classes.txt", "labelmap.txt", "predefined_classes.txt")
ANNOTATION_FOLDERS = ("Annotations", "annotations", "labels", "xmls", "")
IMAGE_FOLDERS = ("JPEGImages", "images", "Images", "imgs", "")
CORNERS = ("xmin", "ymin", "xmax", "ymax")


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Names of the splits of a folder of VOC annotations; None: it is none.

    Known are `ImageSets/Main/<split>.txt` beside `Annotations` and `JPEGImages`, a folder for each split with the XML
    files in it or in a folder of their own, and one folder without splits.
    """
    folder = _devkit(folder)
    if _image_sets(folder):
        return ordered(_image_sets(folder))
    splits = {name: place for place in _folders(folder) if (name := split_of(place.name)) and _annotations(place)}
    splits |= {name: place for under in ("Annotations", "annotations") for place in _folders(folder / under)
               if (name := split_of(place.name)) and _has_xml(place)}
    if splits:
        return ordered(splits)
    return (ALL,) if _annotations(folder) else None


def read(folder: Path, split: str, *, image_dir: Path | Places | None = None, **options) -> DetectionTable:
    """One split; options as in `toolkit.data.formats.annotated.open_annotated`.

    Boxes are taken as they stand, xmin to xmax and ymin to ymax, as annotation tools write them; in files of the VOC
    challenges themselves (`<database>The VOC...`) pixels count from 1 and xmax belongs to the box, so that xmin and
    ymin are lowered by 1. `difficult` objects are ignored in evaluation, like COCO's crowds. Classes are the names of
    all splits in alphabetical order, or those of `labels.txt`.
    """
    folder = _devkit(folder)
    return open_annotated("voc", folder, split, lambda: _listing(folder, split, image_dir), **options)


def write(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> None:
    """`Annotations/*.xml`, `JPEGImages/`, `ImageSets/Main/<split>.txt`, and `labels.txt` with all class names in order.

    Ignored are what VOC cannot say: annotated areas, ids, relations and attributes. Corners keep every digit.
    """
    names = file_names(table)
    sets = folder / "ImageSets" / "Main"
    sets.mkdir(parents=True, exist_ok=True)
    stems = []
    for index, name in enumerate(names):
        row = table.row(index)
        name = f"{split}_{name}" if (folder / "JPEGImages" / name).exists() else name
        stem = os.path.splitext(name)[0]
        stem = name.replace(".", "_") if stem in stems else stem
        stems.append(stem)
        copy_image(table, row, folder / "JPEGImages" / name, link)
        target = folder / "Annotations" / f"{stem}.xml"
        target.parent.mkdir(parents=True, exist_ok=True)
        _xml(table, row, name).write(target, encoding="utf-8")
    (sets / f"{split}.txt").write_text("".join(f"{stem}\n" for stem in stems), encoding="utf-8")
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in table.class_names), encoding="utf-8")


def _xml(table: DetectionTable, row: dict, name: str) -> ElementTree.ElementTree:
    root = ElementTree.Element("annotation")
    for tag, text in (("folder", "JPEGImages"), ("filename", name)):
        ElementTree.SubElement(root, tag).text = text
    size = ElementTree.SubElement(root, "size")
    for tag in ("width", "height"):
        ElementTree.SubElement(size, tag).text = str(row[tag])
    ElementTree.SubElement(size, "depth").text = "3"
    objects = row["objects"]
    for box, label, crowd in zip(objects["bbox"], objects["category"], objects["iscrowd"], strict=True):
        entry = ElementTree.SubElement(root, "object")
        ElementTree.SubElement(entry, "name").text = table.categories[label].name
        ElementTree.SubElement(entry, "difficult").text = str(int(crowd))
        corners = ElementTree.SubElement(entry, "bndbox")
        for tag, value in zip(CORNERS, box.tolist(), strict=True):
            ElementTree.SubElement(corners, tag).text = f"{value:.9g}"
    ElementTree.indent(root)
    return ElementTree.ElementTree(root)


def _devkit(folder: Path) -> Path:
    """The year's folder of a `VOCdevkit`, where there is only one."""
    years = [place for place in _folders(folder) if place.name.startswith("VOC") and place.name != "VOCdevkit"]
    if len(years) == 1 and not _has_xml(folder / "Annotations"):
        return years[0]
    if folder.name.startswith("VOC") and not folder.name == "VOCdevkit":
        return folder
    inner = [place for place in _folders(folder) if place.name == "VOCdevkit"]
    return _devkit(inner[0]) if len(inner) == 1 else folder


def _folders(folder: Path) -> list[Path]:
    return sorted(place for place in folder.iterdir() if place.is_dir()) if folder.is_dir() else []


def _has_xml(folder: Path) -> bool:
    """Whether the first XML file in a folder is a VOC annotation."""
    for path in _xml_files(folder):
        try:
            return ElementTree.parse(path).getroot().tag == "annotation"
        except (ElementTree.ParseError, OSError):
            return b"<annotation" in path.read_bytes()[:400]
    return False


def _xml_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.lower().endswith(".xml")]
        yield from (folder / name for name in sorted(names))


def _annotations(folder: Path) -> Path | None:
    """The folder of the XML files of a data set or a split."""
    return next((folder / name for name in ANNOTATION_FOLDERS if _has_xml(folder / name)), None)


def _image_sets(folder: Path) -> dict[str, Path]:
    sets = folder / "ImageSets"
    if not _has_xml(folder / "Annotations"):
        return {}
    for place in (sets / "Main", sets):
        found = {path.stem: path for path in sorted(place.glob("*.txt"))} if place.is_dir() else {}
        named = {split_of(stem) or stem: path for stem, path in found.items() if split_of(stem) or stem == "trainval"}
        if named:
            return named
    return {}


def _places(folder: Path, split: str) -> tuple[Path, list[Path], list[str] | None]:
    """(folder of this split's XML files, those of all splits, stems of the split where a list names them)."""
    sets = _image_sets(folder)
    if sets:
        if split not in sets:
            raise BadInput(f"{folder}: no split {split!r}; there are {', '.join(sets)}")
        lines = sets[split].read_text(encoding="utf-8-sig").splitlines()
        return folder / "Annotations", [folder / "Annotations"], [line.strip() for line in lines if line.strip()]
    if split == ALL:
        return _annotations(folder), [_annotations(folder)], None
    under = [place for top in ("", "Annotations", "annotations") for place in _folders(folder / top)
             if split_of(place.name)]  # fmt: skip
    places = {split_of(place.name): _annotations(place) for place in under if _annotations(place)}
    if split not in places:
        raise BadInput(f"{folder}: no split {split!r}; there are {', '.join(places)}")
    return places[split], list(places.values()), None


def _listing(folder: Path, split: str, image_dir: Path | Places | None) -> Listing:
    place, everywhere, stems = _places(folder, split)
    problems: list[Problem] = []
    parsed = {place: _parse_all(place) for place in everywhere}
    found = parsed[place]
    if stems is not None:
        chosen = {}
        for line in stems:
            stem = line if line in found else line.rsplit(None, 1)[0]  # the lists of a class have 1 or -1 behind
            if stem in found:
                chosen[stem] = found[stem]
            else:
                message = f"no annotation {place.name}/{stem}.xml, which the list of {split} names"
                problems.append(Problem("error", stem, None, None, message))
        found = chosen
    names = {box.name for each in parsed.values() for image in each.values() if isinstance(image, Annotated)
             for box in image.boxes}  # fmt: skip
    root = image_dir or _image_root(folder, place, split)
    present = {name: name for name in images_in(root)}
    stems_of = {os.path.splitext(name)[0]: name for name in present}
    images = []
    for stem, image in found.items():
        if isinstance(image, str):
            problems.append(Problem("error", f"{stem}.xml", None, None, image))
            continue
        if image.file_name not in present:  # a tool that renamed the files, or left the suffix away
            image.file_name = stems_of.get(stem, stems_of.get(os.path.splitext(image.file_name)[0], image.file_name))
        images.append(image)
    watched = [*everywhere, *watched_of(root), *(folder / name for name in CLASS_FILES if (folder / name).is_file())]
    if _image_sets(folder):
        watched.append(_image_sets(folder)[split])
    every = set(present) if stems is not None else set()  # the other lists have the rest
    return Listing(root, images, _classes(folder, names), watched, every, problems)


def _parse_all(place: Path) -> dict[str, "Annotated | str"]:
    """Every XML file of a folder by its stem: what it says, or why it cannot be read."""
    found: dict[str, Annotated | str] = {}
    paths = list(_xml_files(place))

    def parse(path: Path) -> list:
        try:
            return [(path.stem, _parse(path))]
        except ElementTree.ParseError as error:
            return [(path.stem, f"invalid XML: {error}")]
        except (ValueError, OSError) as error:
            return [(path.stem, str(error))]

    found.update(parallel(parse, paths, f"reading {place.name}"))
    return found


def _parse(path: Path) -> Annotated:
    root = ElementTree.parse(path).getroot()
    size = [root.findtext(f"size/{tag}") for tag in ("width", "height")]
    width, height = (int(float(value)) if value and value.strip() else None for value in size)
    lowered = 1.0 if (root.findtext("source/database") or "").startswith("The VOC") else 0.0
    boxes = []
    for number, entry in enumerate(root.iter("object"), start=1):
        name, corners = entry.findtext("name"), [entry.findtext(f"bndbox/{tag}") for tag in CORNERS]
        if name is None or not name.strip():
            raise ValueError(f"object {number} has no <name>")
        try:
            x1, y1, x2, y2 = map(float, corners)
        except (TypeError, ValueError) as error:
            raise ValueError(f"object {number} ({name}): expected numbers in <bndbox> xmin, ymin, xmax, ymax; found "
                             f"{corners}") from error  # fmt: skip
        ignored = (entry.findtext("difficult") or "0").strip() in ("1", "true", "True")
        boxes.append(Box(name.strip(), (x1 - lowered, y1 - lowered, x2, y2), ignored))
    name = (root.findtext("filename") or "").strip().replace("\\", "/").rsplit("/", 1)[-1]
    return Annotated(name or path.stem, boxes, width or None, height or None, path.name)


def _image_root(folder: Path, place: Path, split: str) -> Path:
    """The folder of the images: beside the XML files, or in a folder of their own."""
    near = [place, place.parent] if place.parent != folder.parent else [place]
    candidates = [at / name for at in near for name in (*IMAGE_FOLDERS, f"images/{split}", f"images/{place.name}")]
    candidates += [folder / "images" / place.name, folder / "JPEGImages" / place.name]
    for candidate in candidates:
        if images_in(candidate):
            return candidate
    tried = ", ".join(str(candidate) for candidate in dict.fromkeys(candidates))
    raise BadInput(f"{folder}: no images found; tried {tried}; set their folder (--data.image_dir)")


def _classes(folder: Path, names: set[str]) -> list[tuple[int, str]]:
    for file in CLASS_FILES:
        if (folder / file).is_file():
            lines = (folder / file).read_text(encoding="utf-8-sig").splitlines()
            # CVAT's labelmap.txt: "name:colour:parts:actions", with a comment and a class for what is no object
            listed = [line.split(":")[0].strip() if file == "labelmap.txt" else line.strip() for line in lines]
            listed = [name for name in dict.fromkeys(listed)
                      if name and not name.startswith("#") and not (name in ("background", "__background__", "_background_") and name not in names)]  # noqa: E501  # fmt: skip
            if names <= set(listed):
                return list(enumerate(listed, start=1))
    return sorted_classes(names)
