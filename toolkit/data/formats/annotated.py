"""Shared code of the readers of all formats but COCO: from the images and boxes of their files to a cached table.

Each format is a module with two functions. `find(layout)` returns the splits of a data set, or None for one of another
format. `read(found, split, reading)` returns the table of a split. The writers are in `toolkit.tools.writers`.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from toolkit.base.errors import BadInput
from toolkit.base.text import first_names, shown
from toolkit.data.annotations import Annotations, ImageRow, Reading
from toolkit.data.check_files import map_in_threads, reading_threads, with_good_files
from toolkit.data.checks import check
from toolkit.data.decoding import ImageError, probe_image
from toolkit.data.formats.drawn import ON_ITS_SIDE, Drawn, NoArea, turned_upright, united
from toolkit.data.image_sources import ImageSources, digest_of
from toolkit.data.table import DetectionTable, Problem
from toolkit.data.table_cache import cached_table, write_table

UNKNOWN_SIZE = 2**31


class ParsedBox(NamedTuple):
    """A box as a file describes it.

    name: of the class. xyxy: in pixels. source: the file of the box, for messages. ignored: True for objects that need
    not be found: VOC's `difficult`, COCO's crowds. shares: whether `xyxy`, and the corners of a polygon, are fractions
    of the image. segmentation: mask of the object, see `toolkit.data.segmentations.shape_of`; not used if masks are not
    read. mask_fault: why there is no mask, for messages.
    """

    name: str
    xyxy: Sequence[float]
    source: str
    ignored: bool = False
    shares: bool = False
    segmentation: object = None
    mask_fault: str = ""


class ParsedImage(NamedTuple):
    """An image as a file describes it: its file, its size in pixels (None: not given), its boxes, what is wrong."""

    file_name: str
    width: int | None
    height: int | None
    boxes: Sequence[ParsedBox]
    problems: Sequence[Problem] = ()

    def named(self, file_name: str) -> "ParsedImage":
        """Return the image with the name of the file that was found for it, in its problems too."""
        problems = [replace(problem, file=file_name) for problem in self.problems]
        return self._replace(file_name=file_name, problems=problems)


class LabelledShape(NamedTuple):
    """A shape with the name of its class. ignored: as of `ParsedBox`. group: shapes of one class and one group are the
    parts of one object; None: the shape is an object of its own.
    """

    name: object
    drawn: Drawn
    ignored: bool = False
    group: object = None


def image_of_shapes(
    file_name: str,
    size_wh: tuple[int | None, int | None],
    entries: Iterable,
    read_shape: Callable[[object], LabelledShape],
    source: str,
) -> ParsedImage:
    """Return an image with the shapes that a file has for it; those that cannot be read are errors, points and lines a
    warning.

    read_shape: reads an entry; raises what `toolkit.data.formats.drawn` does, or KeyError for a missing key. source:
    the file, for messages.
    """
    objects: dict[object, LabelledShape] = {}
    problems = []
    without_area: Counter[str] = Counter()
    for number, entry in enumerate(entries, start=1):
        try:
            shape = read_shape(entry)
            key = number if shape.group is None else (_name_of(shape), str(shape.group))
            parts = [objects[key].drawn, shape.drawn] if key in objects else [shape.drawn]
            objects[key] = shape._replace(name=_name_of(shape), drawn=united(parts, size_wh[::-1]))
        except NoArea as error:
            without_area[str(error)] += 1
        except KeyError as error:
            problems.append(_shape_fault(file_name, source, number, f"`{error.args[0]}` is missing"))
        except (TypeError, AttributeError, IndexError, OverflowError):
            problems.append(_shape_fault(file_name, source, number, "it is not of the form that the tool writes"))
        except ValueError as error:
            problems.append(_shape_fault(file_name, source, number, str(error)))
    boxes = []
    for name, drawn, ignored, _ in objects.values():
        boxes.append(ParsedBox(name, drawn.xyxy, source, ignored, segmentation=drawn.segmentation))
    if without_area:
        kinds = ", ".join(f"{count} {kind}" for kind, count in without_area.items())
        message = f"{source}: shapes that are not an area are left out ({kinds})"
        problems.append(Problem("warning", file_name, None, None, message))
    return ParsedImage(file_name, *size_wh, boxes, problems)


def _shape_fault(file_name: str, source: str, number: int, fault: str) -> Problem:
    return Problem("error", file_name, None, None, f"{source}, shape {number}: {fault}")


def _name_of(shape: LabelledShape) -> str:
    if not isinstance(shape.name, str) or not shape.name.strip():
        raise ValueError("it has no label; expected the name of a class")
    return shape.name.strip()


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
    may_lie: whether an image that is stored on its side may be annotated like that, which its recorded size tells; its
        boxes are then turned upright.
    """

    image_root: Path | ImageSources
    images: list[ImageRow]
    classes: list[tuple[int, str]]
    watched: list[Path | str]
    listed: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    masks: bool = False
    may_lie: bool = False

    def __post_init__(self):
        self.annotations = Annotations([{"id": id_, "name": name} for id_, name in self.classes], self.masks)
        self.annotations.images = self.images
        self._ids = {name: id_ for id_, name in self.classes}
        self._orientations: dict[int, int] = {}  # of the images that are annotated as they lie
        indices = range(len(self.images))
        self.problems += map_in_threads(self._fill_size, indices, "reading sizes", reading_threads(self.image_root))
        self.problems += self._about_lying()

    def _fill_size(self, index: int) -> list[Problem]:
        image = self.images[index]
        has_size = bool(image.width and image.height)
        if has_size and not self.may_lie:
            return []
        try:
            probe = probe_image(self.image_root / image.file_name)
            height, width = probe.size_hw
        except ImageError as error:
            if has_size:  # reported by the check of the files
                return []
            height = UNKNOWN_SIZE
            width = UNKNOWN_SIZE
            fault = [Problem("error", image.file_name, image.image_id, None, error.reason)]
            self.images[index] = image._replace(width=width, height=height)
            return fault
        lies = width != height and (image.width, image.height) == (height, width) and probe.orientation in ON_ITS_SIDE
        if lies:
            self._orientations[index] = probe.orientation
        if lies or not has_size:
            self.images[index] = image._replace(width=width, height=height)
        return []

    def _about_lying(self) -> list[Problem]:
        """Return a note that counts and names the images that are annotated as they lie; none if there are none."""
        names = [self.images[index].file_name for index in sorted(self._orientations)]
        if not names:
            return []
        some = first_names(names, written=shown)
        message = f"{len(names)} images are annotated as stored, on their side; their boxes are turned upright: {some}"
        return [Problem("note", str(self.image_root), None, None, message)]

    def add(self, index: int, box: ParsedBox) -> None:
        """Add a box of the image at `index`."""
        image = self.images[index]
        if index in self._orientations:
            drawn = Drawn(box.xyxy, box.segmentation if self.masks else None)
            turned = turned_upright(drawn, self._orientations[index], (image.width, image.height))
            box = box._replace(xyxy=turned.xyxy, segmentation=turned.segmentation)
        x1, y1, x2, y2 = box.xyxy
        segmentation = box.segmentation if self.masks else None
        if box.shares:
            if image.width == UNKNOWN_SIZE:
                return
            sides = (image.width, image.height)
            x1, y1, x2, y2 = _scaled(box.xyxy, sides)
            if segmentation is not None:
                segmentation = [_scaled(polygon, sides) for polygon in segmentation]
        if x1 == x2 or y1 == y2:
            message = f"box {[x1, y1, x2, y2]} ({box.name}) in {box.source} has no area; left out"
            self.problems.append(Problem("warning", image.file_name, image.image_id, None, message))
            return
        if self.masks:
            number = len(self.annotations)
            self.annotations.add_segmentation(number, segmentation)
            if box.mask_fault:
                self.annotations.mask_faults[number] = [box.mask_fault]
        id_ = len(self.annotations) + 1
        xywh = (x1, y1, x2 - x1, y2 - y1)
        self.annotations.add_box(id_, image.image_id, self._ids[box.name], xywh, box.ignored)

    def add_all(self, images: Iterable[ParsedImage]) -> None:
        """Add the boxes of all images, which have the order of `self.images`."""
        for index, image in enumerate(images):
            for box in image.boxes:
                self.add(index, box)


def _scaled(shares: Sequence[float], sides: tuple[int, int]) -> list[float]:
    """Return x, y, x, y, ... in pixels of numbers that are fractions of the width and the height."""
    return [share * side for share, side in zip(shares, itertools.cycle(sides), strict=False)]


def rows_of(images: Iterable[ParsedImage]) -> list[ImageRow]:
    """Return the rows of images, numbered from 1."""
    rows = []
    for number, image in enumerate(images, start=1):
        rows.append(ImageRow(number, image.file_name, image.width, image.height))
    return rows


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
