"""Label Studio: tasks exported as JSON, or in the short form, with rectangles, polygons, ellipses and brushes."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from toolkit.base.masks import Size
from toolkit.data.annotations import Reading
from toolkit.data.decoding import IMAGE_SUFFIXES
from toolkit.data.formats.annotated import LabelledShape, ParsedImage, image_of_shapes
from toolkit.data.formats.drawn import (
    Drawn,
    NoArea,
    bitmap,
    checked_size,
    ellipse,
    numbers_in,
    points_in,
    polygon,
    turned_rectangle,
)
from toolkit.data.formats.look_alikes import json_in
from toolkit.data.formats.per_set import Document, SetFormat, find_documents, read_document
from toolkit.data.layout import Layout, Splits
from toolkit.data.table import DetectionTable, Problem

TITLE = "Label Studio"
UPLOADED = re.compile(r"^[0-9a-f]{8}-(?=.)")  # what Label Studio puts before the names of uploaded files


def find(layout: Layout) -> Splits | None:
    """Return the splits of a folder with an export of Label Studio, or of one file; None if there is none."""
    return find_documents(FORMAT, layout)


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `toolkit.data.formats.per_set.read_document`.

    Of several annotations of a task the one marked as ground truth is read, else the newest. Tasks without one, or with
    predictions alone, are left out, since their images would be taken for background.
    """
    return read_document(FORMAT, found, split, reading)


def _parse(path: Path) -> Document:
    tasks = json_in(path)
    images = []
    without = 0
    several = 0
    for task in tasks if isinstance(tasks, list) else [tasks]:
        annotations = _annotations(task)
        without += not annotations
        several += len(annotations) > 1
        if annotations:
            images.append(_image(task, annotations[-1], path.name))
    problems = []
    if without:
        message = f"{without} tasks are not annotated, or were skipped; their images are left out"
        problems.append(Problem("note", path.name, None, None, message))
    if several:
        message = f"{several} tasks have several annotations; the one that is ground truth is read, else the newest"
        problems.append(Problem("warning", path.name, None, None, message))
    return Document(images, problems=problems)


def _annotations(task: Mapping) -> list[list]:
    """Return the results of each annotation of a task, the one that counts last."""
    if "data" not in task:  # the short form, with results by the name of their control
        lists = [value for value in task.values() if isinstance(value, list)]
        return [[{"value": value, **value} for of_control in lists for value in of_control]]
    done = [one for one in task.get("annotations", task.get("completions", ())) if not one.get("was_cancelled")]
    done.sort(key=lambda one: (bool(one.get("ground_truth")), str(one.get("updated_at", ""))))
    return [one.get("result") or [] for one in done]


def _image(task: Mapping, results: Sequence, source: str) -> ParsedImage:
    name = _name_of(task)
    shapes = [result for result in results if isinstance(result, Mapping) and _is_labelled(result.get("value"))]
    sizes = [(shape.get("original_width"), shape.get("original_height")) for shape in shapes]
    return image_of_shapes(name, sizes[0] if sizes else (None, None), shapes, _shape, source)


def _name_of(task: Mapping) -> str:
    """Return the path of the image: of an address the path, of a local file that in `?d=`."""
    data = task.get("data", task)
    for value in (*data.values(), task.get("file_upload")):
        if isinstance(value, str):
            address = urlsplit(value.replace("\\", "/"))
            path = parse_qs(address.query).get("d", [unquote(address.path)])[0]
            if Path(path).suffix.lower() in IMAGE_SUFFIXES:
                return path.lstrip("/")
    raise ValueError(f"task {task.get('id')} names no image: {str(data)[:100]}")


def _without_prefix(name: str) -> str | None:
    file = name.rsplit("/", 1)[-1]
    return UPLOADED.sub("", file) if UPLOADED.match(file) else None


def _is_labelled(value: object) -> bool:
    return isinstance(value, Mapping) and any(key.endswith("labels") for key in value)


def _shape(result: Mapping) -> LabelledShape:
    value = result["value"]
    labels = next(labels for key, labels in value.items() if key.endswith("labels"))
    if len(labels) != 1:
        raise ValueError(f"it has the labels {', '.join(labels) or 'none'}; expected one")
    if result.get("image_rotation"):
        raise ValueError(f"the image was turned by {result['image_rotation']} degrees in Label Studio; turn it back")
    width, height = numbers_in([result["original_width"], result["original_height"]], 2)
    return LabelledShape(labels[0], _drawn(value, (round(height), round(width))))


def _drawn(value: Mapping, size_hw: Size) -> Drawn:
    """Return a shape of values in per cent of the sides of the image."""
    across = size_hw[1] / 100
    down = size_hw[0] / 100
    if "points" in value:
        return polygon([(x * across, y * down) for x, y in points_in(value["points"])])
    if "rle" in value:
        height, width = checked_size(size_hw)
        alpha = _brush(value["rle"], height * width * 4).reshape(height, width, 4)[..., 3]
        return bitmap(alpha, 0, 0, size_hw)
    x, y = numbers_in([value["x"], value["y"]], 2)
    degrees = float(value.get("rotation") or 0)
    if "radiusX" in value:
        radii = numbers_in([value["radiusX"], value["radiusY"]], 2)
        return ellipse((x * across, y * down), (radii[0] * across, radii[1] * down), degrees)
    if "height" not in value:
        raise NoArea("key point")
    width, height = numbers_in([value["width"], value["height"]], 2)
    box = (x * across, y * down, (x + width) * across, (y + height) * down)
    return turned_rectangle(box, degrees, box[:2])


def _brush(runs: Sequence[int], count: int) -> np.ndarray:
    """Return the values (count,) of Label Studio's run lengths, which are bits: a head, then runs of one value and rows
    of different ones.
    """
    bits = _Bits(runs)
    said = bits.number(32)
    if said != count:
        raise ValueError(f"its brush has {said} values; expected {count}, four for each pixel of the image")
    bits_of_value = bits.number(5) + 1
    bits_of_length = [bits.number(4) + 1 for _ in range(4)]
    values = np.zeros(count, np.uint8)
    at = 0
    while at < count:
        is_run = bits.number(1)
        length = 1 + bits.number(bits_of_length[bits.number(2)])
        if at + length > count:
            raise ValueError("its brush cannot be read: a run is longer than the image")
        values[at : at + length] = bits.number(bits_of_value) if is_run else bits.numbers(length, bits_of_value)
        at += length
    return values


class _Bits:
    """The bits of bytes, read from the first on. Raises ValueError at their end."""

    def __init__(self, data: Sequence[int]):
        self.bits = np.unpackbits(np.array(data, np.uint8))
        self.at = 0

    def numbers(self, count: int, width: int) -> np.ndarray:
        """Return the next numbers (count,) of so many bits each."""
        part = self.bits[self.at : self.at + count * width]
        if len(part) < count * width:
            raise ValueError("its brush ends too early")
        self.at += count * width
        return part.reshape(count, width) @ (1 << np.arange(width)[::-1])

    def number(self, width: int) -> int:
        return int(self.numbers(1, width)[0])


FORMAT = SetFormat("label_studio", TITLE, (".json",), _parse, also_called=_without_prefix)
