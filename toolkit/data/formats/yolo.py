"""YOLO: one text file per image, with lines "class centre-x centre-y width height" in fractions of the image."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import without_suffix
from toolkit.data.annotations import ImageRow
from toolkit.data.check_files import parallel
from toolkit.data.formats.annotated import ALL, SPLIT_NAMES, Listing, copy_images, images_in, open_annotated, ordered
from toolkit.data.image_sources import ImageSources
from toolkit.data.table import DetectionTable, LabelledImages, Problem

TITLE = "YOLO"
CLASS_FILES = ("classes.txt", "obj.names", "labels.txt", "_darknet.labels")
LABEL_FOLDER = "labels"
MAX_CLASSES = 100_000


def recognise(folder: Path) -> tuple[str, ...] | None:
    """Names of the splits of a YOLO folder; None: it is none.

    Known are `data.yaml` (any YAML file with `names` and `train` or `val`), whose splits are folders, lists of folders
    or text files that list images; and without it `train/images` with `train/labels`, `images/train` with
    `labels/train`, and one folder without splits.
    """
    _, settings = _settings(folder)
    if settings:
        splits = [split for split in SPLIT_NAMES if _entry(settings, split)]
        return ordered(s for s in splits if all(path.exists() for path in _located(folder, settings, s))) or None
    splits = [name for name in SPLIT_NAMES if _plain_folders(folder, name)]
    return ordered(splits) or ((ALL,) if _plain_folders(folder, ALL) else None)


def read(folder: Path, split: str, *, image_dir: Path | ImageSources | None = None, **options) -> DetectionTable:
    """One split; options as in `toolkit.data.formats.annotated.open_annotated`.

    The text file of an image lies where its path says `labels` instead of `images`, or beside it; an image without
    one has no objects. What the numbers of a line are, `_Rows` says. Classes keep their numbers from 0.
    """
    return open_annotated("yolo", folder, split, lambda: _listing(folder, split, image_dir), **options)


def write(table: DetectionTable, folder: Path, split: str, *, link: bool = False) -> None:
    """`images/<split>/`, `labels/<split>/*.txt` and `data.yaml`; the numbers have every digit they need.

    Crowd regions, annotated areas, ids, relations and attributes are not written: YOLO cannot hold them.
    """
    names = copy_images(table, folder / "images" / split, link)
    write_yolo(table.labelled(), folder / LABEL_FOLDER / split, names)
    entries = {split: f"images/{split}", "names": dict(enumerate(table.class_names))}
    settings = _settings(folder)[1] | entries
    (folder / "data.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def write_yolo(labelled: LabelledImages, folder: Path, names: Sequence[str]) -> None:
    """A text file for each image, called as `names` are; of boxes with scores a line ends with the score."""
    for name, (image, boxes) in zip(names, labelled.by_image(), strict=True):
        lines = []
        for label, (x1, y1, x2, y2), score, crowd in boxes:
            centre = (x1 + x2) / 2 / image.width, (y1 + y2) / 2 / image.height
            numbers = *centre, (x2 - x1) / image.width, (y2 - y1) / image.height, *([] if score is None else [score])
            if not crowd:
                lines.append(f"{label} {' '.join(map(repr, numbers))}\n")
        target = folder / f"{without_suffix(name)}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines))


def _settings(folder: Path) -> tuple[Path | None, dict]:
    """The YAML file that names classes and splits, and what it says; None and {} where there is none."""
    paths = (*folder.glob("*.yaml"), *folder.glob("*.yml")) if folder.is_dir() else ()
    for path in sorted(paths, key=lambda path: (path.stem != "data", path.name)):
        try:
            content = _load_yaml(path.read_text(encoding="utf-8-sig"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(content, dict) and "names" in content and ("train" in content or "val" in content):
            return path, content
    return None, {}


class _NamesAsWritten(yaml.SafeLoader):
    """YAML without the types that turn a name into something else: `yes`, `007`, `null`, `1.0` stay what they are."""


# Numbers stay numbers where they are keys or counts: those of `names: {0: cat}`, `nc`, `kpt_shape`.
_NamesAsWritten.yaml_implicit_resolvers = {}


def _load_yaml(text: str) -> object:
    """The content of a YAML file, with class names as they are written.

    Raises yaml.YAMLError, RecursionError.
    """
    content = yaml.safe_load(text)
    if isinstance(content, dict) and isinstance(content.get("names"), list | dict):
        names = yaml.load(text, _NamesAsWritten)["names"]  # a SafeLoader with fewer types
        content["names"] = list(names) if isinstance(names, list) else dict(names)
    return content


def _entry(settings: dict, split: str):
    return next((settings[name] for name in SPLIT_NAMES[split] if settings.get(name)), None)


def _located(folder: Path, settings: dict, split: str) -> list[Path]:
    """Folders and lists of a split. Paths are relative to `path`, or, as some exports have it, wrong by a `../`."""
    entry = _entry(settings, split)
    paths = []
    for text in entry if isinstance(entry, list) else [entry]:
        text = str(text).replace("\\", "/")
        bases = [folder / str(settings.get("path") or ""), folder]
        tails = [text, text.removeprefix("../"), str(Path(text) / "images"), *_ends(text)]
        candidates = [base / tail for base in bases for tail in tails]
        paths.append(next((path for path in candidates if path.exists() and _is_of_split(path)), folder / text))
    return paths


def _ends(path: str) -> list[str]:
    """The last parts of a path, which may be one on another computer."""
    return ["/".join(Path(path).parts[-count:]) for count in (3, 2, 1)]


def _is_of_split(path: Path) -> bool:
    if path.is_file() or images_in(path) or images_in(path / "images"):
        return True
    return any(images_in(inner) for inner in path.iterdir() if inner.is_dir())


def _plain_folders(folder: Path, split: str) -> Path | None:
    """The folder of a split's images, where there is no YAML file but there are label files."""
    names = SPLIT_NAMES.get(split, ("",))
    for name in names:
        inside, beside = folder / name, (folder / "images" / name, folder / LABEL_FOLDER / name)
        for images, labels in ((inside / "images", inside / LABEL_FOLDER), beside, (inside, inside)):
            if images_in(images) and _is_label_folder(labels):
                return images
    return None


def _is_label_folder(folder: Path) -> bool:
    """Whether the first text file with a line has lines of a class and numbers."""
    if not folder.is_dir():
        return False
    for path in sorted(folder.glob("*.txt"))[:50]:
        words = path.read_text(encoding="utf-8-sig", errors="replace").split("\n", 1)[0].split()
        if path.name not in CLASS_FILES and words:
            return len(words) >= 5 and all(map(_is_number, words)) and float(words[0]) % 1 == 0
    return False


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _images(folder: Path, split: str) -> tuple[list[Path], list[Path], dict]:
    """(image files of a split, folders and lists to watch, what the YAML file says)."""
    file, settings = _settings(folder)
    sources = _located(folder, settings, split) if settings else [_plain_folders(folder, split)]
    files, watched = [], [file] if file else []
    for source in sources:
        if source.is_file():
            lines = source.read_text(encoding="utf-8-sig").splitlines()
            files += [_listed(line.strip(), source, folder) for line in lines if line.strip()]
            watched.append(source)
            continue
        if not source.is_dir():
            raise BadInput(f"{source}: no such folder, which {file.name} names for {split}")
        inner = source / "images" if not images_in(source) and images_in(source / "images") else source
        for at in [inner, *sorted(entry for entry in inner.rglob("*") if entry.is_dir())]:
            files += [at / name for name in images_in(at)]
            watched.append(at)
    return files, watched, settings


def _listed(line: str, file: Path, folder: Path) -> Path:
    """An image of a list: its path as it stands, relative to the list or to the folder, or by its last parts."""
    candidates = [base / tail for tail in (line, *_ends(line)) for base in (file.parent, folder)]
    return next((path for path in candidates if path.is_file()), candidates[0])


def _labels_of(image: Path) -> list[Path]:
    """Where the text file of an image may lie."""
    parts = list(image.with_suffix(".txt").parts)
    candidates = []
    if "images" in parts:
        at = len(parts) - 1 - parts[::-1].index("images")
        candidates.append(Path(*parts[:at], LABEL_FOLDER, *parts[at + 1 :]))
    return [*candidates, image.with_suffix(".txt"), image.parent / LABEL_FOLDER / image.with_suffix(".txt").name]


def _listing(folder: Path, split: str, image_dir: Path | ImageSources | None) -> Listing:
    if isinstance(image_dir, ImageSources):
        raise BadInput(f"{image_dir}: YOLO data are listed by their image files; give one folder (data.image_dir)")
    files, watched, settings = _images(folder, split)
    if not files:
        raise BadInput(f"{folder}: split {split!r} has no images")
    root = image_dir or folder
    if image_dir is None and not all(path.is_relative_to(folder) for path in files):
        # Not the paths behind links: the labels of a linked folder of images lie beside the link.
        files = [Path(os.path.abspath(path)) for path in files]
        root = Path(os.path.commonpath([str(path.parent) for path in files]))
    labels = [next((path for path in _labels_of(image) if path.is_file()), None) for image in files]

    def load(path: Path | None) -> list:
        return [(path, path.read_text(encoding="utf-8-sig", errors="replace").splitlines())] if path else []

    lines: dict[Path, list[str]] = dict(parallel(load, labels, "reading labels"))
    names, problems = _names(folder, settings, lines)
    rows = _Rows(lines.values(), "kpt_shape" in settings)
    images = [ImageRow(number, os.path.relpath(file, root), None, None) for number, file in enumerate(files, start=1)]
    boxes = []
    for index, path in enumerate(labels):
        parsed, faults = _parse_lines(lines.get(path, []), names, rows)
        problems += [Problem("error", images[index].file_name, None, None, f"{path.name}, {fault}") for fault in faults]
        boxes += [(index, name, xyxy, path.name) for name, xyxy in parsed]
    watched += sorted({path.parent for path in lines})
    listing = Listing(Path(root), images, list(enumerate(names)), watched, set(), problems)
    for box in boxes:
        listing.add(*box, shares=True)
    return listing


class _Rows:
    """What the numbers behind the class of a line are, decided by all lines of a split.

    4: a box. 5: a box and its confidence, as predictions have it. 6: a box, its confidence and a track, which is a
    whole number above 1; or a triangle, in data that have larger polygons too, and where the box would leave the
    image. From 8 on, even: a polygon. Odd: a
    polygon and its confidence. With `kpt_shape` in data.yaml: a box and key points. What could be two of these is a
    fault: a guess would be other boxes, in silence.

    Args:
        files: lines of all label files. has_keypoints: data.yaml says `kpt_shape`.
    """

    def __init__(self, files: Iterable[Sequence[str]], has_keypoints: bool):
        self.has_keypoints = has_keypoints
        self.has_polygons = False
        looks_like_pose = []
        for line in (line for lines in files for line in lines):
            numbers = _numbers_of(line)[1:]
            if len(numbers) >= 8 and len(numbers) % 2 == 0:
                self.has_polygons = True
            if len(numbers) >= 8:
                looks_like_pose.append(_may_be_pose(numbers))
        # One polygon may look like key points by chance, all of them do not.
        self.look_like_pose = len(looks_like_pose) >= MIN_POSES and all(looks_like_pose)

    def box_of(self, numbers: Sequence[float]) -> tuple[tuple[float, float, float, float] | None, str]:
        """Return the box of a line, xyxy in fractions of the image; or None, and why there is none."""
        count = len(numbers)
        if count <= 5 or self.has_keypoints:
            return _corners(numbers), ""
        if count == 6:
            if numbers[5] > 1 and numbers[5] == int(numbers[5]):
                return _corners(numbers), ""
            if self.has_polygons or not _is_inside(_corners(numbers)):
                return _around(numbers), ""
            return None, (
                "6 numbers can be a triangle, or a box with its confidence and a track; leave out what is behind the "
                "first 4, or write the first corner of the triangle once more at its end"
            )
        if self.look_like_pose:
            return None, (
                f"{count} numbers look like a box with key points, and would be read as a polygon; say so by "
                "`kpt_shape: [points, 2 or 3]` in data.yaml"
            )
        if count % 2 == 0:
            return _around(numbers), ""
        if not 0 <= numbers[-1] <= 1 or count == 7 and numbers[6] in (0, 1):
            return None, (
                f"{count} numbers are no polygon; expected pairs x y, or pairs and a confidence from 0 to 1. Of key "
                "points say `kpt_shape: [points, 2 or 3]` in data.yaml"
            )
        return _around(numbers[:-1]), ""


MIN_POSES = 3  # lines that must all look like key points


def _may_be_pose(numbers: Sequence[float]) -> bool:
    """Whether numbers can be a box (centre, size) and points in it, with or without a visibility of 0, 1 or 2."""
    left, top, right, bottom = _corners(numbers)
    rest = numbers[4:]
    for step in (3, 2):
        if len(rest) % step:
            continue
        if step == 3 and not all(flag in (0, 1, 2) for flag in rest[2::3]):
            continue
        points = list(zip(rest[0::step], rest[1::step], strict=True))
        labelled = [(x, y) for x, y in points if (x, y) != (0, 0)]
        if labelled and all(left - 0.02 <= x <= right + 0.02 and top - 0.02 <= y <= bottom + 0.02 for x, y in labelled):
            return True
    return False


def _corners(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """The corners of a box that is given by centre and size."""
    cx, cy, width, height = numbers[:4]
    return cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2


def _is_inside(xyxy: Sequence[float]) -> bool:
    """Whether a box in fractions lies in its image, but for rounding."""
    return all(-0.01 <= value <= 1.01 for value in xyxy)


def _around(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """The box around a polygon."""
    return min(numbers[0::2]), min(numbers[1::2]), max(numbers[0::2]), max(numbers[1::2])


def _numbers_of(line: str) -> list[float]:
    """The numbers of a line, the class first; empty where one of its words is not a number."""
    words = line.split()
    return list(map(float, words)) if all(map(_is_number, words)) else []


def _parse_lines(
    lines: Sequence[str], names: Sequence[str], rows: _Rows
) -> tuple[list[tuple[str, tuple]], list[str]]:
    """((class name, xyxy in fractions) of each line, what is wrong with the others)."""
    parsed = []
    faults = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        values = _numbers_of(line)
        if len(values) < 5:
            faults.append(f"line {number}: {line.strip()[:80]!r}; expected a class and 4 numbers, or a polygon")
            continue
        label, *numbers = values
        if label % 1 or not 0 <= label < len(names):
            faults.append(f"line {number}: class {words[0]} is not defined; there are {len(names)} from 0")
            continue
        box, fault = rows.box_of(numbers)
        if box is None:
            faults.append(f"line {number}: {fault}")
        else:
            parsed.append((names[int(label)], box))
    return parsed, faults


def _names(folder: Path, settings: dict, lines: dict[Path, list[str]]) -> tuple[list[str], list[Problem]]:
    """Class names in order: of the YAML file, or of a text file; without either, their numbers."""
    given = settings.get("names")
    if isinstance(given, dict):
        try:
            numbers = range(_count(max(map(int, given), default=-1) + 1, folder))
            given = [given.get(i, given.get(str(i), f"class {i}")) for i in numbers]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"{folder}: `names` of the YAML file: expected numbers from 0 with names") from error
    if given:
        if not isinstance(given, list):
            raise BadInput(f"{folder}: `names` of the YAML file is {given!r}; expected a list of names")
        return [str(name) for name in given], []
    for file in (directory / name for directory in (folder, folder / LABEL_FOLDER) for name in CLASS_FILES):
        if file.is_file():
            listed = file.read_text(encoding="utf-8-sig").splitlines()
            return [name.strip() for name in listed if name.strip()], []
    images = [_plain_folders(folder, split) for split in (*SPLIT_NAMES, ALL)]
    label_folders = {labels.parent for directory in images if directory for labels in _labels_of(directory / "x.jpg")}
    everywhere = [path for path in folder.rglob("*.txt") if path.parent in label_folders]
    unread = (path for path in everywhere if path not in lines and path.name not in CLASS_FILES)
    others = (path.read_text(encoding="utf-8-sig", errors="replace").splitlines() for path in unread)
    firsts = {line.split()[0] for content in (*lines.values(), *others) for line in content if line.split()}
    classes = (float(word) for word in firsts if _is_number(word))
    highest = int(max((label for label in classes if label % 1 == 0 and 0 <= label < 1e18), default=0))
    note = Problem("note", str(folder), None, None, "no class names (data.yaml or classes.txt); classes are numbered")
    return [f"class {i}" for i in range(_count(highest + 1, folder))], [note]


def _count(classes: int, folder: Path) -> int:
    if classes > MAX_CLASSES:
        raise BadInput(f"{folder}: its labels or names have the class {classes - 1}; expected at most {MAX_CLASSES:,}")
    return classes
