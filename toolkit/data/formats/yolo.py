"""YOLO: one text file per image, with lines "class centre-x centre-y width height" in fractions of the image."""

import itertools
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import YamlLoader, folders_below, parse_yaml
from toolkit.data.annotations import ImageRow, Reading
from toolkit.data.check_files import parallel
from toolkit.data.formats import darknet
from toolkit.data.formats.annotated import (
    SPLIT_NAMES,
    UNKNOWN_SIZE,
    UNSPLIT,
    Listing,
    folders_of_splits,
    images_in,
    may_hold,
    not_among,
    open_annotated,
    ordered,
    split_of,
)
from toolkit.data.formats.yolo_orphans import about_found, about_orphans, orphans_of, pictures_beside
from toolkit.data.formats.yolo_rows import UNSAID, Rows, fault_of_fractions, is_number, numbers_of
from toolkit.data.image_sources import ImageSources
from toolkit.data.missing_images import find_missing
from toolkit.data.table import DetectionTable, Problem

TITLE = "YOLO"
CLASS_FILES = ("classes.txt", "obj.names", "labels.txt", "_darknet.labels")
LABEL_FOLDER = "labels"
MAX_CLASSES = 100_000


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the splits of a YOLO folder; None if it is not one.

    Recognised is `data.yaml` (any YAML file with `names` and `train` or `val`), whose splits are folders, lists of
    folders or text files that list images. Without such a file, recognised are `train/images` with `train/labels`,
    `images/train` with `labels/train`, `obj_train_data` of CVAT, Darknet's `obj.data` or `train.txt` and `valid.txt`
    with the paths of images, and one folder without splits.
    """
    _, settings = settings_of(folder)
    if settings:
        named = [split for split in SPLIT_NAMES if _entry(settings, split)]
        present = [split for split in named if not _missing_of(folder, settings, split)]
        return ordered(present) or None
    splits = [split for split in SPLIT_NAMES if _plain_folders(folder, split)]
    if splits:
        return ordered(splits)
    return (UNSPLIT,) if _plain_folders(folder, UNSPLIT) else None


def missing(folder: Path) -> list[str]:
    """Return a text for each split whose paths in data.yaml do not exist here, such as those of another computer."""
    file, settings = settings_of(folder)
    texts = []
    for split in SPLIT_NAMES:
        paths = _missing_of(folder, settings, split) if _entry(settings, split) else []
        if paths:
            texts.append(f"{split} ({file.name} names {', '.join(map(str, paths))})")
    return texts


def _missing_of(folder: Path, settings: dict, split: str) -> list[Path]:
    return [path for path in _located(folder, settings, split) if not path.exists()]


def unused(folder: Path) -> list[str]:
    """Return the names of image folders that look like a split but are not read, because other folders are used."""
    _, settings = settings_of(folder)
    used = []
    for split in SPLIT_NAMES:
        if not settings:
            plain = _plain_folders(folder, split)
            used += [plain] if plain else []
        elif _entry(settings, split):
            used += _located(folder, settings, split)
    if not used or any(path.is_file() for path in used):  # a list has images of any folder
        return []
    candidates = []
    for split in SPLIT_NAMES:
        candidates += _all_plain_folders(folder, split)
    return not_among(candidates, used, folder)


def labels_alone(folder: Path) -> Path | None:
    """Return the folder of label files in `folder`, or `folder` itself if it has label files; None if there are none.

    It is for labels whose images are elsewhere, as predict.py writes them.
    """
    labels = folder / LABEL_FOLDER
    if labels.is_dir() and any(map(_is_label_folder, folders_below(labels))):
        return labels
    if folder.name == LABEL_FOLDER and any(map(_is_label_folder, folders_below(folder))):
        return folder
    return folder if _is_label_folder(folder) else None


def read(folder: Path, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.annotated.open_annotated`.

    The path of the text file of an image is that of the image with `labels` in place of `images`, or the text file is
    beside the image. If a folder has labels alone, the images are those of `reading.image_dir` with the same names. An
    image without a text file has no objects. `Rows` decides what the numbers in a line mean. Classes keep their numbers
    from 0. With `reading.masks`, a polygon is the mask of its object.
    """
    listing = partial(_listing, folder, split, reading.image_dir, reading.masks)
    return open_annotated("yolo", folder, split, listing, reading)


def settings_of(folder: Path) -> tuple[Path | None, dict]:
    """Return the YAML file that names classes and splits, and its content, or those of Darknet; None and {} if there is
    none."""
    for path in _yaml_files(folder):
        try:
            content = _load_yaml(path.read_text(encoding="utf-8-sig"))
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # reported by `_unread`
        if not isinstance(content, dict) or "names" not in content:
            continue
        if "train" in content or "val" in content:
            return path, content
    return _lists_of_darknet(folder)


def _lists_of_darknet(folder: Path) -> tuple[Path | None, dict]:
    """Return what `darknet.settings_of` does, if no folders say the splits, and labels lie beside listed images."""
    file, settings = darknet.settings_of(folder)
    if not settings or any(_plain_folders(folder, split) for split in SPLIT_NAMES):
        return None, {}
    lists = [path for split in SPLIT_NAMES if _entry(settings, split) for path in _located(folder, settings, split)]
    for path in lists:
        names = darknet.lines_of(path)[:50] if path.is_file() else []
        if any(file.is_file() for name in names for file in _labels_of(_find_listed_image(name, path, folder))):
            return file, settings
    return None, {}


def _yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files of a folder, data.yaml first."""
    if not folder.is_dir():
        return []
    paths = (*folder.glob("*.yaml"), *folder.glob("*.yml"))
    return sorted(paths, key=lambda path: (path.stem != "data", path.name))


def _unread(folder: Path) -> list[Problem]:
    """Return an error for a data.yaml that cannot be read: without it classes would be numbered."""
    problems = []
    for path in _yaml_files(folder):
        try:
            _load_yaml(path.read_text(encoding="utf-8-sig"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            if path.stem == "data":
                reason = " ".join(str(error).split())
                message = f"cannot be read as YAML in UTF-8: {reason}"
                problems.append(Problem("error", path.name, None, None, message))
    return problems


class _NamesAsWritten(YamlLoader):
    """YAML without the types that turn a name into something else: `yes`, `007`, `null`, `1.0` stay what they are."""


# Numbers stay numbers where they are keys or counts: those of `names: {0: cat}`, `nc`, `kpt_shape`.
_NamesAsWritten.yaml_implicit_resolvers = {}


def _load_yaml(text: str) -> object:
    """Parse a YAML file, with class names as they are written.

    Raises yaml.YAMLError.
    """
    content = parse_yaml(text)
    if isinstance(content, dict) and isinstance(content.get("names"), list | dict):
        names = parse_yaml(text, _NamesAsWritten)["names"]
        content["names"] = list(names) if isinstance(names, list) else dict(names)
    return content


def _entry(settings: dict, split: str):
    """Return the entry of a split under the first of its names that has one; None if there is none."""
    for name in SPLIT_NAMES.get(split, ()):
        if settings.get(name):
            return settings[name]
    return None


def _located(folder: Path, settings: dict, split: str) -> list[Path]:
    """Return folders and lists of a split. Paths are relative to `path`, or, as some exports have it, wrong by a `../`.
    """
    entry = _entry(settings, split)
    texts = entry if isinstance(entry, list) else [entry]
    bases = [folder / str(settings.get("path") or ""), folder]
    paths = []
    for text in texts:
        text = str(text).replace("\\", "/")
        tails = [
            text,
            text.removeprefix("../"),
            str(Path(text) / "images"),
            *_ends(text),
        ]
        candidates = [base / tail for base in bases for tail in tails]
        found = (path for path in candidates if path.exists() and _is_of_split(path))
        paths.append(next(found, folder / text))
    return paths


def _ends(path: str) -> list[str]:
    """Return the last parts of a path, which may be one on another computer.

    Not `images` of `valid/images`, which would be all images.
    """
    parts = Path(path).parts
    in_split = len(parts) > 1 and split_of(parts[-2])
    counts = (3, 2) if in_split else (3, 2, 1)
    return ["/".join(parts[-count:]) for count in counts]


def _is_of_split(path: Path) -> bool:
    if path.is_file() or images_in(path) or images_in(path / "images"):
        return True
    return any(images_in(inner) for inner in path.iterdir() if inner.is_dir())


def _plain_folders(folder: Path, split: str) -> Path | None:
    """Return the folder of a split's images if there are label files but no YAML file."""
    return next(_all_plain_folders(folder, split), None)


def _all_plain_folders(folder: Path, split: str) -> Iterator[Path]:
    """Yield folders of images with their labels whose names say this split; the first is read."""
    if split == UNSPLIT:
        inside = [folder]
        of_images = [folder / "images"]
    else:
        inside = folders_of_splits(folder).get(split, [])
        of_images = folders_of_splits(folder / "images").get(split, [])
    pairs = [(directory / "images", directory / LABEL_FOLDER) for directory in inside]
    for images in of_images:
        below = images.relative_to(folder / "images")
        pairs.append((images, folder / LABEL_FOLDER / below))
    pairs += [(directory, directory) for directory in inside]
    for images, labels in pairs:
        if images_in(images) and _is_label_folder(labels):
            yield images


def _is_label_folder(folder: Path) -> bool:
    """Return whether one of the first text files has lines of a class and numbers; a `README.txt` may lie beside them.
    """
    if not folder.is_dir():
        return False
    files = (path for path in sorted(folder.glob("*.txt")) if path.name not in CLASS_FILES)
    with_text = (path for path in files if path.stat().st_size)
    for path in itertools.islice(with_text, 50):
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        first_line = text.split("\n", 1)[0]
        words = first_line.split()
        if len(words) >= 5 and all(map(is_number, words)) and float(words[0]) % 1 == 0:
            return True
    return False


def _sources(folder: Path, split: str, image_dir: Path | None) -> tuple[list[Path], Path | None]:
    """Return (folders and lists of the images of a split, the folder of their labels if it is separate).

    Raises BadInput: the images are not in `image_dir`, or not known.
    """
    _, settings = settings_of(folder)
    plain = None if settings else _plain_folders(folder, split)
    if plain or _entry(settings, split):
        sources = [plain] if plain else _located(folder, settings, split)
        if image_dir:
            root = image_dir.resolve()
            if not any(source.resolve().is_relative_to(root) for source in sources):
                named = ", ".join(map(str, sources))
                raise BadInput(f"{image_dir}: the images of {split} are in {named}; leave data.image_dir out")
        return sources, None
    if image_dir is None:
        gone = f"; not there: {', '.join(missing(folder))}" if settings else ""
        raise BadInput(f"{folder}: labels without images{gone}; give the folder of the images (data.image_dir)")
    return [image_dir], labels_alone(folder)


def _image_files(folder: Path, split: str, sources: Sequence[Path]) -> tuple[list[Path], list[Path], dict]:
    """Return (image files of a split, folders and lists to watch, content of the YAML file)."""
    file, settings = settings_of(folder)
    files = []
    watched = [file] if file else []
    for source in sources:
        if source.is_file():
            images, searched = _listed_images(source, folder, split)
            files += images
            watched += [source, *searched]
            continue
        if not source.is_dir():
            raise BadInput(f"{source}: no such folder, which {file.name} names for {split}")
        has_inner = not images_in(source) and images_in(source / "images")
        top = source / "images" if has_inner else source
        for at in folders_below(top):
            files += [at / name for name in images_in(at)]
            watched.append(at)
    return files, watched, settings


def _listed_images(file: Path, folder: Path, split: str) -> tuple[list[Path], list[str]]:
    """Return (images of a list, folders to watch); images that are not where it says are looked for in the data set."""
    lines = (line.replace("\\", "/") for line in darknet.lines_of(file))
    images = [_find_listed_image(line, file, folder) for line in lines]
    rows = []
    for number, path in enumerate(images):
        is_there = path.is_file() and path.is_relative_to(folder)
        name = path.relative_to(folder) if is_there else Path(*path.parts[-3:])  # not a path of another computer
        rows.append(ImageRow(number, str(name), None, None))
    found = find_missing(rows, folder, folder, may_hold(split))
    for number, row in enumerate(found.images):
        if not images[number].is_file():
            images[number] = found.image_root / row.file_name
    return images, found.watched


def _find_listed_image(line: str, file: Path, folder: Path) -> Path:
    """Find an image of a list: its path as it stands, relative to the list or to the folder, or by its last parts."""
    candidates = []
    for tail in (line, *_ends(line)):
        candidates += [file.parent / tail, folder / tail]
    return next((path for path in candidates if path.is_file()), candidates[0])


def _labels_of(image: Path) -> list[Path]:
    """Return the paths at which the text file of an image may lie."""
    beside = image.with_suffix(".txt")
    candidates = [beside, image.parent / LABEL_FOLDER / beside.name]
    parts = list(beside.parts)
    if "images" in parts:
        last = len(parts) - 1 - parts[::-1].index("images")
        swapped = Path(*parts[:last], LABEL_FOLDER, *parts[last + 1 :])
        candidates.insert(0, swapped)
    return candidates


def _listing(folder: Path, split: str, image_dir: Path | ImageSources | None, masks: bool) -> Listing:
    if isinstance(image_dir, ImageSources):
        raise BadInput(f"{image_dir}: YOLO data are listed by their image files; give one folder (data.image_dir)")
    sources, alone = _sources(folder, split, image_dir)
    files, watched, settings = _image_files(folder, split, sources)
    if not files:
        raise BadInput(f"{folder}: split {split!r} has no images")
    beside, orphans = ({}, []) if alone else _without_pictures(folder, split, files)
    files += sorted(beside)
    root = image_dir or folder
    if image_dir is None and not all(path.is_relative_to(folder) for path in files):
        # Not the paths behind links: the labels of a linked folder of images lie beside the link.
        files = [Path(os.path.abspath(path)) for path in files]
        beside = {Path(os.path.abspath(path)): label for path, label in beside.items()}
        root = Path(os.path.commonpath([str(path.parent) for path in files]))
    if alone:
        by_image = [[(alone / image.relative_to(root)).with_suffix(".txt")] for image in files]
    else:
        by_image = [[beside[image]] if image in beside else _labels_of(image) for image in files]
    labels = []
    label_folders = set()  # also where there are no labels yet
    for paths in by_image:
        labels.append(next((path for path in paths if path.is_file()), None))
        label_folders |= {path.parent for path in paths}

    def load(path: Path | None) -> list:
        if path is None:
            return []
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        return [(path, text.splitlines())]

    lines: dict[Path, list[str]] = dict(parallel(load, labels, "reading labels"))
    names, problems = _class_names(folder, settings, lines)
    problems += about_orphans(orphans, folder) + about_found(sorted(beside), folder)
    if not settings:
        problems += _unread(folder)
    rows = Rows(lines.values(), settings.get("kpt_shape", UNSAID))
    images = []
    for number, file in enumerate(files, start=1):
        images.append(ImageRow(number, os.path.relpath(file, root), None, None))
    boxes = []
    first_of: dict[Path, str] = {}  # the image that a file of labels was read for
    for index, path in enumerate(labels):
        image_name = images[index].file_name
        if path and first_of.setdefault(path, image_name) != image_name:
            message = f"{path.name} is the file of labels of {first_of[path]} too; give the images different names"
            problems.append(Problem("error", image_name, None, None, message))
            continue
        parsed, faults = _parse_lines(lines.get(path, []), names, rows)
        for fault in faults:
            problems.append(Problem("error", image_name, None, None, f"{path.name}, {fault}"))
        boxes += [(index, name, xyxy, path.name, polygon) for name, xyxy, polygon in parsed]
    watched += sorted(label_folders)
    watched += [folder / "data.yaml", *_class_files(folder)]  # also those that are made later
    listing = Listing(Path(root), images, list(enumerate(names)), watched, set(), problems, masks)
    for index, name, xyxy, source, polygon in boxes:
        segmentation = _segmentation(polygon, images[index]) if masks else None
        listing.add(index, name, xyxy, source, shares=True, segmentation=segmentation)
    return listing


def _segmentation(polygon: Sequence[float] | None, image: ImageRow) -> list[list[float]] | None:
    """Return a polygon in fractions of an image as COCO's `segmentation`; None if there is none, or no known size."""
    if polygon is None or image.width == UNKNOWN_SIZE:
        return None
    sides = itertools.cycle((image.width, image.height))
    return [[share * side for share, side in zip(polygon, sides, strict=False)]]


def _without_pictures(folder: Path, split: str, files: Sequence[Path]) -> tuple[dict[Path, Path], list[Path]]:
    """Return ({picture: its label file} of label files that belong to none of `files`, label files without a picture).
    """
    candidates = [_labels_of(image) for image in files]
    used = [next((path for path in paths if path.is_file()), paths[0]) for paths in candidates]
    label_folders = {path.parent for paths in candidates for path in paths}
    texts = [*CLASS_FILES, *(path.name for path in folder.glob("*.txt") if darknet.is_list(path))]
    labels = orphans_of(label_folders, used, texts)
    pictures = pictures_beside(labels, split)
    listed = any(path.is_file() for path in _sources(folder, split, None)[0])  # which pictures are of the split
    orphans = [path for path in labels if path not in pictures]
    known = set(files)
    found = {picture: label for label, picture in pictures.items() if picture not in known}
    return {} if listed else found, orphans


def _parse_lines(lines: Sequence[str], names: Sequence[str], rows: Rows) -> tuple[list[tuple], list[str]]:
    """Return ((class name, xyxy, polygon x, y, x, y, ... or None) of each line, the faults of the others).

    Boxes and polygons are in fractions of the image.
    """
    parsed = []
    faults = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        values = numbers_of(line)
        if len(values) < 5:
            faults.append(f"line {number}: {line.strip()[:80]!r}; expected a class and 4 numbers, or a polygon")
            continue
        label, *numbers = values
        if label % 1 or not 0 <= label < len(names):
            faults.append(f"line {number}: class {words[0]} is not defined; there are {len(names)} from 0")
            continue
        box, fault = rows.box_of(numbers)
        polygon = None if box is None else rows.polygon_of(numbers)
        outside = "" if box is None else fault_of_fractions(numbers[:4] if polygon is None else polygon, box)
        if box is None:
            faults.append(f"line {number}: {fault}")
        elif outside:
            faults.append(f"line {number}: {line.strip()[:80]!r}: {outside}")
        else:
            parsed.append((names[int(label)], box, polygon))
    return parsed, faults


def _class_names(folder: Path, settings: dict, lines: dict[Path, list[str]]) -> tuple[list[str], list[Problem]]:
    """Return class names in order: of the YAML file, or of a text file; without either, their numbers."""
    given = settings.get("names")
    if isinstance(given, dict):
        try:
            highest = max(map(int, given), default=-1)
            numbers = range(_count(highest + 1, folder))
            given = [given.get(i, given.get(str(i), f"class {i}")) for i in numbers]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"{folder}: `names` of the YAML file: expected numbers from 0 with names") from error
    if given:
        if not isinstance(given, list):
            raise BadInput(f"{folder}: `names` of the YAML file is {given!r}; expected a list of names")
        odd = [name for name in given if not isinstance(name, str)]
        if odd:
            raise BadInput(f"{folder}: `names` of the YAML file: {odd[0]!r} is not a name")
        count = settings.get("nc")
        if count is None or count == len(given):
            return given, []
        message = f"`nc` is {count!r}, and `names` has {len(given)}; `names` counts"
        return given, [Problem("warning", str(folder), None, None, message)]
    label_folders = []
    for split in (*SPLIT_NAMES, UNSPLIT):
        images = _plain_folders(folder, split)
        if images:
            label_folders += [labels.parent for labels in _labels_of(images / "x.jpg")]
        if _entry(settings, split):
            files, *_ = _image_files(folder, split, _located(folder, settings, split))
            label_folders += [path.parent for file in files for path in _labels_of(file) if path.is_file()]
    label_folders = list(dict.fromkeys(label_folders))
    listed = _listed_names(folder, label_folders)
    if listed:
        return listed, []
    highest = _highest_class(lines, label_folders)
    unnamed = "no class names (data.yaml, classes.txt or *.names); classes are numbered"
    note = Problem("note", str(folder), None, None, unnamed)
    return [f"class {i}" for i in range(_count(highest + 1, folder))], [note]


def _highest_class(lines: dict[Path, list[str]], label_folders: Sequence[Path]) -> int:
    """Return the highest class in the label files, those of other splits too; 0 without any."""
    contents = list(lines.values())
    for at in label_folders:
        for path in sorted(at.glob("*.txt")):
            if path not in lines and path.name not in CLASS_FILES:
                text = path.read_text(encoding="utf-8-sig", errors="replace")
                contents.append(text.splitlines())
    firsts = set()
    for content in contents:
        words_of = (line.split() for line in content)
        firsts |= {words[0] for words in words_of if len(words) >= 5}
    numbers = [float(word) for word in firsts if is_number(word)]
    classes = [number for number in numbers if number % 1 == 0 and 0 <= number < 1e18]
    return int(max(classes, default=0))


def _listed_names(folder: Path, label_folders: Sequence[Path]) -> list[str]:
    """Read class names of a text file: that of the data set, else those of its splits, which must agree; [] if none."""
    for file in _class_files(folder):
        names = darknet.lines_of(file) if file.is_file() else []
        if names:
            return names
    by_file = {}
    for directory in label_folders:
        files = _class_files_in(directory)
        by_file |= {file: darknet.lines_of(file) for file in files if file.is_file()}
    if len(set(map(tuple, by_file.values()))) > 1:
        named = "; ".join(f"{file}: {', '.join(names[:10])}" for file, names in by_file.items())
        raise BadInput(f"{folder}: its splits list different classes ({named}); expected the same in the same order")
    return next(iter(by_file.values()), [])


def _class_files(folder: Path) -> list[Path]:
    """Return the paths at which a text file with the class names of a data set may lie."""
    return [*_class_files_in(folder), *_class_files_in(folder / LABEL_FOLDER)]


def _class_files_in(directory: Path) -> list[Path]:
    """Return the paths of such files in one folder: those of the usual names, whether they exist or not, and `*.names`.
    """
    files = [directory / name for name in CLASS_FILES]
    others = sorted(directory.glob("*.names"))
    return files + [path for path in others if path not in files]


def _count(classes: int, folder: Path) -> int:
    if classes > MAX_CLASSES:
        raise BadInput(f"{folder}: its labels or names have the class {classes - 1}; expected at most {MAX_CLASSES:,}")
    return classes
