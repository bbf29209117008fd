"""YOLO: one text file per image, with lines "class centre-x centre-y width height" in fractions of the image."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import YamlLoader, parse_yaml
from toolkit.data.annotations import Reading
from toolkit.data.check_files import map_in_threads
from toolkit.data.formats import darknet
from toolkit.data.formats.annotated import Listing, ParsedBox, ParsedImage, open_annotated, rows_of
from toolkit.data.formats.yolo_pairs import (
    CLASS_FILES,
    LABEL_FOLDER,
    Pairs,
    find_listed_image,
    images_of,
    label_of,
    label_paths,
    last_parts,
    pairs_elsewhere,
    pairs_of,
)
from toolkit.data.formats.yolo_rows import UNSAID, Rows, fault_of_fractions, is_number, is_row, mask_of, numbers_of
from toolkit.data.image_sources import ImageSources
from toolkit.data.layout import SPLIT_NAMES, UNSPLIT, Layout, Splits
from toolkit.data.segmentations import box_of_mask, shape_of
from toolkit.data.table import DetectionTable, Problem

TITLE = "YOLO"
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class YoloSplits(Splits):
    """The splits of a YOLO data set: folders of images and lists of them.

    file, settings: as of `settings_of`. labels: folder of labels whose images are elsewhere, as predict.py writes them;
    None: labels lie by the images.
    """

    file: Path | None = None
    settings: Mapping = field(default_factory=dict)
    labels: Path | None = None


def find(layout: Layout) -> YoloSplits | None:
    """Return the splits of a YOLO folder; None if it is not one.

    Recognised is `data.yaml` (any YAML file with `names` and `train` or `val`), whose splits are folders, lists of
    folders or text files that list images. Without such a file, recognised are `train/images` with `train/labels`,
    `images/train` with `labels/train`, `obj_train_data` of CVAT, Darknet's `obj.data` or `train.txt` and `valid.txt`
    with the paths of images, and one folder without splits.
    """
    file, settings = settings_of(layout)
    missing: list[str] = []
    if settings:
        sources, missing = _described(layout, file, settings)
    else:
        plain = {split: _plain_folder(layout, split) for split in (*SPLIT_NAMES, UNSPLIT)}
        sources = {split: [images] for split, images in plain.items() if images}
        if len(sources) > 1:
            sources.pop(UNSPLIT, None)
    if not sources:
        return None
    has_list = any(path.is_file() for path in chain.from_iterable(sources.values()))  # of images of any folder
    candidates = [] if has_list or UNSPLIT in sources else _all_plain_folders(layout)
    return YoloSplits(layout, sources, candidates, missing, file=file, settings=settings)


def find_labels(layout: Layout) -> YoloSplits | None:
    """Return the one split of a folder of labels whose images are elsewhere; None if there are no labels."""
    folder = layout.folder
    labels = folder / LABEL_FOLDER
    if _has_labels(layout, labels):
        alone = labels
    elif folder.name == LABEL_FOLDER and _has_labels(layout, folder) or _is_label_folder(layout, folder):
        alone = folder
    else:
        return None
    file, settings = settings_of(layout)
    missing = _described(layout, file, settings)[1] if settings else []
    candidates = _all_plain_folders(layout)
    return YoloSplits(layout, {UNSPLIT: []}, candidates, missing, file=file, settings=settings, labels=alone)


def read(found: YoloSplits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.annotated.open_annotated`.

    The path of the text file of an image is that of the image with `labels` in place of `images`, or the text file is
    next to the image. If a folder has only labels, the images are those of `reading.image_dir` with the same names. An
    image without a text file has no objects. `Rows` decides what the numbers in a line mean. Classes keep their numbers
    from 0. With `reading.masks`, a polygon is the mask of its object.
    """
    listing = partial(_listing, found, split, reading.image_dir, reading.masks)
    return open_annotated("yolo", found.folder, split, listing, reading)


# ---- where the files are ---------------------------------------------------------------------------------------------


def settings_of(layout: Layout) -> tuple[Path | None, dict]:
    """Return the YAML file that names classes and splits, and its content, or those of Darknet; None and {} if there is
    none."""
    for path in _yaml_files(layout):
        try:
            content = _load_yaml(path.read_text(encoding="utf-8-sig"))
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # reported by `_unread`
        if not isinstance(content, dict) or "names" not in content:
            continue
        if "train" in content or "val" in content:
            return path, content
    return _lists_of_darknet(layout)


def _described(layout: Layout, file: Path, settings: dict) -> tuple[dict[str, list[Path]], list[str]]:
    """Return (folders and lists of the splits that a description names, a text for each split that is not here).

    Paths that are not here may be those of another computer.
    """
    sources = {}
    missing = []
    for split in SPLIT_NAMES:
        if not _entry(settings, split):
            continue
        paths = _located(layout, settings, split)
        absent = [str(path) for path in paths if not path.exists()]
        if absent:
            missing.append(f"{split} ({file.name} names {', '.join(absent)})")
        else:
            sources[split] = paths
    return sources, missing


def _lists_of_darknet(layout: Layout) -> tuple[Path | None, dict]:
    """Return what `darknet.settings_of` does, if no folders say the splits, and labels lie beside listed images."""
    file, settings = darknet.settings_of(layout)
    if not settings or any(_plain_folder(layout, split) for split in SPLIT_NAMES):
        return None, {}
    lists = [path for split in SPLIT_NAMES if _entry(settings, split) for path in _located(layout, settings, split)]
    for path in lists:
        names = darknet.lines_of(path)[:50] if path.is_file() else []
        images = (find_listed_image(layout, name, path) for name in names)
        if any(label_of(layout, image) for image in images):
            return file, settings
    return None, {}


def _yaml_files(layout: Layout) -> list[Path]:
    """Return the YAML files of a folder, data.yaml first."""
    paths = (*layout.files(layout.folder, ".yaml"), *layout.files(layout.folder, ".yml"))
    return sorted(paths, key=lambda path: (path.stem != "data", path.name))


def _unread(layout: Layout) -> list[Problem]:
    """Return an error for a data.yaml that cannot be read: without it classes would be numbered."""
    problems = []
    for path in _yaml_files(layout):
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


def _located(layout: Layout, settings: Mapping, split: str) -> list[Path]:
    """Return folders and lists of a split. Paths are relative to `path`, or, as some exports have it, wrong by a `../`.
    """
    folder = layout.folder
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
            *last_parts(text),
        ]
        candidates = [base / tail for base in bases for tail in tails]
        found = (path for path in candidates if path.exists() and _is_of_split(layout, path))
        paths.append(next(found, folder / text))
    return paths


def _is_of_split(layout: Layout, path: Path) -> bool:
    if path.is_file() or layout.images(path) or layout.images(path / "images"):
        return True
    return any(map(layout.images, layout.folders(path)))


def _plain_folder(layout: Layout, split: str) -> Path | None:
    """Return the folder of a split's images if there are label files but no YAML file."""
    return next(_plain_folders(layout, split), None)


def _plain_folders(layout: Layout, split: str) -> Iterator[Path]:
    """Yield folders of images with their labels whose names say this split; the first is read."""
    folder = layout.folder
    if split == UNSPLIT:
        inside = [folder]
        of_images = [folder / "images"]
    else:
        inside = layout.folders_of_splits(folder).get(split, [])
        of_images = layout.folders_of_splits(folder / "images").get(split, [])
    pairs = [(directory / "images", directory / LABEL_FOLDER) for directory in inside]
    for images in of_images:
        below = images.relative_to(folder / "images")
        pairs.append((images, folder / LABEL_FOLDER / below))
    pairs += [(directory, directory) for directory in inside]
    for images, labels in pairs:
        if layout.images(images) and _is_label_folder(layout, labels):
            yield images


def _all_plain_folders(layout: Layout) -> list[Path]:
    """List the folders of images with their labels whose names say a split."""
    return list(chain.from_iterable(_plain_folders(layout, split) for split in SPLIT_NAMES))


def _has_labels(layout: Layout, folder: Path) -> bool:
    """Return whether a folder, or one in it, has label files."""
    return any(_is_label_folder(layout, inner) for inner in layout.below(folder))


def _is_label_folder(layout: Layout, folder: Path) -> bool:
    """Return whether one of the first text files has lines of a class and numbers; a `README.txt` may lie next to them.
    """
    files = (path for path in layout.files(folder, ".txt") if path.name not in CLASS_FILES)
    with_text = (path for path in files if path.stat().st_size)
    for path in itertools.islice(with_text, 50):
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        first_line = text.split("\n", 1)[0]
        words = first_line.split()
        if is_row(words) and float(words[0]) % 1 == 0:
            return True
    return False


# ---- what the files say ----------------------------------------------------------------------------------------------


def _listing(found: YoloSplits, split: str, image_dir: Path | ImageSources | None, masks: bool) -> Listing:
    if isinstance(image_dir, ImageSources):
        raise BadInput(f"{image_dir}: YOLO data are listed by their image files; give one folder (data.image_dir)")
    layout = found.layout
    if found.labels is None:
        pairs = pairs_of(layout, split, found.sources[split], image_dir)
    elif image_dir:
        pairs = pairs_elsewhere(layout, found.labels, image_dir)
    else:
        gone = f"; not there: {', '.join(found.missing)}" if found.settings else ""
        raise BadInput(f"{found.folder}: labels without images{gone}; give the folder of the images (data.image_dir)")
    if not pairs.images:
        raise BadInput(f"{found.folder}: split {split!r} has no images")
    lines = _read_labels(pairs.labels)
    names, problems = _class_names(found, lines)
    problems += pairs.problems
    if not found.settings:
        problems += _unread(layout)
    rows = Rows(lines.values(), found.settings.get("kpt_shape", UNSAID))
    images, faults = _parse_labels(pairs, lines, names, rows)
    described = [found.file] if found.file else []
    later = [found.folder / "data.yaml", *_class_files(layout)]  # also if they are made later
    watched = [*pairs.watched, *described, *later]
    classes = list(enumerate(names))
    listed = _names_in_lists(found, pairs.root)
    listing = Listing(pairs.root, rows_of(images), classes, watched, listed, problems + faults, masks)
    listing.add_all(images)
    return listing


def _names_in_lists(found: YoloSplits, root: Path) -> set[str]:
    """Return the names of the images of all splits that are lists: their images may lie in one folder."""
    names = set()
    for split, sources in found.sources.items():
        lists = [source for source in sources if source.is_file()]
        images, _ = images_of(found.layout, split, lists)
        names.update(str(image.relative_to(root)) for image in images if image.is_relative_to(root))
    return names


def _read_labels(labels: Sequence[Path | None]) -> dict[Path, list[str]]:
    """Return the lines of each label file."""

    def load(path: Path) -> list[tuple[Path, list[str]]]:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        return [(path, text.splitlines())]

    return dict(map_in_threads(load, list(filter(None, labels)), "reading labels"))


def _parse_labels(
    pairs: Pairs, lines: Mapping[Path, Sequence[str]], names: Sequence[str], rows: Rows
) -> tuple[list[ParsedImage], list[Problem]]:
    """Return (images with the boxes of their label files, a problem for each line or file that cannot be used)."""
    images = []
    problems = []
    first_of: dict[Path, str] = {}  # the image that a file of labels was read for
    for file, label in zip(pairs.images, pairs.labels, strict=True):
        name = os.path.relpath(file, pairs.root)
        boxes: list[ParsedBox] = []
        if label and first_of.setdefault(label, name) != name:
            message = f"{label.name} is the file of labels of {first_of[label]} too; give the images different names"
            problems.append(Problem("error", name, None, None, message))
        elif label:
            boxes, faults = _parse_lines(lines[label], names, rows, label.name)
            problems += [Problem("error", name, None, None, f"{label.name}, {fault}") for fault in faults]
        images.append(ParsedImage(name, None, None, boxes))
    return images, problems


def _parse_lines(
    lines: Sequence[str], names: Sequence[str], rows: Rows, source: str
) -> tuple[list[ParsedBox], list[str]]:
    """Return (the box, with its polygon if there is one, of each line, the faults of the others)."""
    parsed = []
    faults = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        mask = mask_of(words)
        values = numbers_of(words[0] if mask else line)
        if len(values) < (1 if mask else 5):
            faults.append(f"line {number}: {line.strip()[:80]!r}; expected a class and 4 numbers, or a polygon")
            continue
        label, *numbers = values
        if label % 1 or not 0 <= label < len(names):
            faults.append(f"line {number}: class {words[0]} is not defined; there are {len(names)} from 0")
            continue
        if mask:
            box, fault = _box_of_runs(mask)
            if fault:
                faults.append(f"line {number}: {fault}")
            else:
                parsed.append(ParsedBox(names[int(label)], box, source, segmentation=mask))
            continue
        box, fault = rows.box_of(numbers)
        polygon = None if box is None else rows.polygon_of(numbers)
        outside = "" if box is None else fault_of_fractions(numbers[:4] if polygon is None else polygon, box)
        if box is None:
            faults.append(f"line {number}: {fault}")
        elif outside:
            faults.append(f"line {number}: {line.strip()[:80]!r}: {outside}")
        else:
            segmentation = None if polygon is None else [polygon]
            parsed.append(ParsedBox(names[int(label)], box, source, shares=True, segmentation=segmentation))
    return parsed, faults


def _box_of_runs(mask: Mapping) -> tuple[Sequence[float], str]:
    """Return the box around run lengths in pixels, without an area if they are empty, and why they cannot be read."""
    _, faults = shape_of(mask)
    if faults:
        return (), faults[0]
    x, y, width, height = box_of_mask(mask)
    return (x, y, x + width, y + height), ""


def _class_names(found: YoloSplits, lines: Mapping[Path, Sequence[str]]) -> tuple[list[str], list[Problem]]:
    """Return class names in order: of the YAML file, or of a text file; without either, their numbers."""
    names, problems = _names_of_settings(found.settings, found.folder)
    if names:
        return names, problems
    label_folders = _label_folders(found)
    listed = _listed_names(found.layout, label_folders)
    if listed:
        return listed, []
    highest = _highest_class(found.layout, lines, label_folders)
    unnamed = "no class names (data.yaml, classes.txt or *.names); classes are numbered"
    note = Problem("note", str(found.folder), None, None, unnamed)
    return [f"class {i}" for i in range(_count(highest + 1, found.folder))], [note]


def _names_of_settings(settings: Mapping, folder: Path) -> tuple[list[str], list[Problem]]:
    """Return the class names that a YAML file has, and a warning if it counts others; [] if it has none."""
    given = settings.get("names")
    if isinstance(given, dict):
        try:
            highest = max(map(int, given), default=-1)
            numbers = range(_count(highest + 1, folder))
            given = [given.get(i, given.get(str(i), f"class {i}")) for i in numbers]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"{folder}: `names` of the YAML file: expected numbers from 0 with names") from error
    if not given:
        return [], []
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


def _label_folders(found: YoloSplits) -> list[Path]:
    """Return the folders of the labels of all splits."""
    folders = []
    for split in (*SPLIT_NAMES, UNSPLIT):
        images = _plain_folder(found.layout, split)
        if images:
            folders += [labels.parent for labels in label_paths(images / "x.jpg")]
        if found.settings and split in found.sources:
            files, _ = images_of(found.layout, split, found.sources[split])
            labels = (path for file in files for path in label_paths(file))
            folders += [path.parent for path in labels if found.layout.has_file(path)]
    return list(dict.fromkeys(folders))


def _highest_class(layout: Layout, lines: Mapping[Path, Sequence[str]], label_folders: Sequence[Path]) -> int:
    """Return the highest class in the label files, those of other splits too; 0 without any."""
    contents = list(lines.values())
    for at in label_folders:
        for path in layout.files(at, ".txt"):
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


def _listed_names(layout: Layout, label_folders: Sequence[Path]) -> list[str]:
    """Read class names of a text file: that of the data set, else those of its splits, which must agree; [] if none."""
    for file in _class_files(layout):
        names = darknet.lines_of(file) if layout.has_file(file) else []
        if names:
            return names
    by_file = {}
    for directory in label_folders:
        files = _class_files_in(layout, directory)
        by_file |= {file: darknet.lines_of(file) for file in files if layout.has_file(file)}
    if len(set(map(tuple, by_file.values()))) > 1:
        named = "; ".join(f"{file}: {', '.join(names[:10])}" for file, names in by_file.items())
        message = f"its splits list different classes ({named}); expected the same in the same order"
        raise BadInput(f"{layout.folder}: {message}")
    return next(iter(by_file.values()), [])


def _class_files(layout: Layout) -> list[Path]:
    """Return the paths at which a text file with the class names of a data set may lie."""
    folder = layout.folder
    return [*_class_files_in(layout, folder), *_class_files_in(layout, folder / LABEL_FOLDER)]


def _class_files_in(layout: Layout, directory: Path) -> list[Path]:
    """Return the paths of such files in one folder: those of the usual names, whether they exist or not, and `*.names`.
    """
    files = [directory / name for name in CLASS_FILES]
    return files + [path for path in layout.files(directory, ".names") if path not in files]


def _count(classes: int, folder: Path) -> int:
    if classes > MAX_CLASSES:
        raise BadInput(f"{folder}: its labels or names have the class {classes - 1}; expected at most {MAX_CLASSES:,}")
    return classes
