"""Drawings of boxes with labels, image grids, and ground truth beside predictions."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from toolkit.base.text import JOINERS, escaped, shown

# Okabe & Ito (2008), distinct with every kind of colour vision; without black, plus three of Tol's.
CLASS_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#AA4499")
CLASS_COLOURS += ("#DDCC77", "#117733")
PANEL_SIDE_PX = 384  # longest side of an image in the grid, in pixels
MIN_DRAWN_SCORE = 0.3  # lowest score of predictions in the grid
CAPTION_HEIGHT_PX = 24
GAP_PX = 10
BACKGROUND_COLOUR = "#FFFFFF"
TEXT_COLOUR = "#222222"


@dataclass
class Mark:
    """A box (xyxy, pixels of the image) with a colour and, if it is not empty, a text beside it."""

    box: Sequence[float]
    colour: str
    text: str = ""
    dashed: bool = False


@functools.cache
def text_font(size: int) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans, which comes with matplotlib; Pillow's own has few letters beyond ASCII. `size` in pixels."""
    from matplotlib import font_manager  # half a second, which the start of a run can avoid

    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)


@functools.cache
def _letters() -> frozenset[int]:
    """Return the code points of the glyphs in `text_font`."""
    from matplotlib import font_manager, ft2font

    return frozenset(ft2font.FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())


def drawable(text: object, limit: int = 30) -> str:
    """Escape text as `toolkit.base.text.shown`, with code points in place of letters that `text_font` lacks.

    The empty boxes of missing glyphs would all look alike.
    """
    supported = _letters()
    names = (c if ord(c) in supported or c in JOINERS else f"<{ord(c):X}>" for c in escaped(text, limit))
    return shown("".join(names), limit)


def choose_images(table, count: int) -> list[int]:
    """Return positions of `count` images, evenly spread over those with boxes (over all if none has)."""
    candidates = np.flatnonzero(table.num_boxes() > 0)
    if not len(candidates):
        candidates = np.arange(len(table))
    return candidates[np.linspace(0, len(candidates) - 1, min(count, len(candidates))).astype(int)].tolist()


def draw_predictions(table, predictions: Mapping, count: int, path: Path) -> Path:
    """Draw `draw_grid` of `count` images of a table, always the same ones; predictions by image id."""
    samples = []
    for position in choose_images(table, count):
        row = table.row(position)
        objects = row["objects"]
        truth = {
            "name": table.image_name(position),
            "boxes": torch.as_tensor(np.array(objects["bbox"], dtype=np.float32)).reshape(-1, 4),
            "labels": torch.as_tensor(np.array(objects["category"], dtype=np.int64)),
            "iscrowd": torch.as_tensor(np.array(objects["iscrowd"], dtype=np.int64)),
        }
        image = table.decode_image(row)
        samples.append((image, predictions[row["image_id"]], truth))
    return draw_grid(samples, table.class_names, path)


def draw_grid(samples: Sequence[tuple[Tensor, Mapping, Mapping]], class_names: Sequence[str], path: Path) -> Path:
    """Write one PNG with a pair of panels per image, two pairs in a row. Returns `path`.

    The left panel has the ground truth (crowds dashed), the right one the predictions with a score of at least
    `MIN_DRAWN_SCORE`.

    Args:
        samples: (image uint8 (3, H, W), predictions {boxes (K, 4), scores, labels}, ground truth {name, boxes (N, 4),
            labels, optional iscrowd}); boxes xyxy in pixels of that image, tensors on any device.
        path: file to write; its folder is made.
    """
    panels = []
    for image, predictions, truth in samples:
        strong = predictions["scores"] >= MIN_DRAWN_SCORE
        kept = {key: predictions[key][strong] for key in ("boxes", "scores", "labels")}
        objects = f"{drawable(truth['name'], 60)}:  {_counted(len(truth['labels']), 'object')}"
        panels.append(_panel(image, truth, class_names, objects))
        caption = f"{_counted(len(kept['labels']), 'prediction')} ≥ {MIN_DRAWN_SCORE:g}"
        panels.append(_panel(image, kept, class_names, caption))
    return save_picture(montage(panels, 2 * min(2, len(samples)) or 1), path)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def _panel(image: Tensor, objects: Mapping, class_names: Sequence[str], caption: str) -> Image.Image:
    """Draw an image with its boxes, as long as `PANEL_SIDE_PX`, below a line of text."""
    picture = fitted(picture_of(image), PANEL_SIDE_PX)
    draw_marks(picture, marks_of(objects, class_names, image.shape[-2:]), scale=picture.width / image.shape[-1])
    panel = Image.new("RGB", (picture.width, picture.height + CAPTION_HEIGHT_PX), BACKGROUND_COLOUR)
    panel.paste(picture, (0, CAPTION_HEIGHT_PX))
    draw = ImageDraw.Draw(panel)
    font = text_font(14)
    draw.text((2, 2), _shortened(caption, picture.width, draw, font), fill=TEXT_COLOUR, font=font)
    return panel


def draw_detections(image: Tensor, objects: Mapping, class_names: Sequence[str], path: Path) -> Path:
    """Write `picture_with_boxes` of `image` as a JPEG or PNG, by the suffix of `path`; its folder is made."""
    return save_picture(picture_with_boxes(image, objects, class_names), path)


def picture_with_boxes(
    image: Tensor, objects: Mapping, class_names: Sequence[str], smallest_side: int = 640
) -> Image.Image:
    """Draw the image with boxes and tags; lines and letters grow with it.

    Args:
        image: uint8 (3, H, W).
        objects: `boxes (K, 4)` xyxy pixels of the image, `labels (K,)`, and `scores (K,)` for detections or
            `iscrowd (K,)` for ground truth.
        smallest_side: an image whose longer side is shorter, in pixels, is enlarged to that, so that tags can be read.
    """
    picture = picture_of(image)
    if max(picture.size) < smallest_side:
        picture = fitted(picture, smallest_side)
    marks = marks_of(objects, class_names, image.shape[-2:])
    scale = max(picture.size) / max(image.shape[-2:])
    draw_marks(picture, marks, scale=scale, size=max(14, round(max(picture.size) / 50)))
    return picture


def picture_of(image: Tensor) -> Image.Image:
    """Convert uint8 (3, H, W) on any device to a picture."""
    return Image.fromarray(image.detach().cpu().permute(1, 2, 0).contiguous().numpy())


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """Resize a picture so that its longer side has `side` pixels."""
    scale = side / max(picture.size)
    return picture.resize([max(1, round(length * scale)) for length in picture.size], Image.Resampling.BICUBIC)


def montage(pictures: Sequence[Image.Image], columns: int, gap: int = GAP_PX) -> Image.Image:
    """Arrange pictures in a grid of `columns`, `gap` pixels apart and from the edges."""
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    widths = [max(picture.width for picture in pictures[i::columns]) for i in range(min(columns, len(pictures)))]
    heights = [max(picture.height for picture in row) for row in rows]
    lefts, tops = (np.cumsum([gap, *(side + gap for side in sides)]).tolist() for sides in (widths, heights))
    whole = Image.new("RGB", (max(lefts[-1], 1), max(tops[-1], 1)), BACKGROUND_COLOUR)
    for row, top in zip(rows, tops, strict=False):
        for picture, left in zip(row, lefts, strict=False):
            whole.paste(picture, (left, top))
    return whole


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Write a picture in the format of the suffix of `path`; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, quality=92)
    return path


def marks_of(objects: Mapping, class_names: Sequence[str], size_hw: Sequence[int]) -> list[Mark]:
    """Return marks in the colours of their classes, the best last; `objects` as in `picture_with_boxes`."""
    objects = {key: objects[key].detach().cpu() for key in ("boxes", "labels", "scores", "iscrowd") if key in objects}
    height, width = size_hw
    boxes = torch.minimum(objects["boxes"].float().nan_to_num(0).clamp(min=0), torch.tensor([width, height] * 2))
    scores = objects["scores"].tolist() if "scores" in objects else [None] * len(boxes)
    crowd = objects["iscrowd"].tolist() if "iscrowd" in objects else [0] * len(boxes)
    marks = []
    for i in sorted(range(len(boxes)), key=lambda i: scores[i] or 0):
        label = int(objects["labels"][i])
        name = drawable(class_names[label]) if 0 <= label < len(class_names) else f"label {label}?"
        text = name if scores[i] is None else f"{name} {scores[i]:.2f}"
        marks.append(Mark(boxes[i].tolist(), CLASS_COLOURS[label % len(CLASS_COLOURS)], text, bool(crowd[i])))
    return marks


def draw_marks(
    picture: Image.Image,
    marks: Sequence[Mark],
    *,
    scale: float = 1.0,
    corner: tuple[float, float] = (0.0, 0.0),
    size: int = 12,
) -> None:
    """Draw the boxes into the picture, the last on top, and then their tags: no line crosses a text.

    Args:
        scale: pixels of the picture per pixel of the image. corner: x, y of the image at the picture's corner.
        size: of the letters in pixels.
    """
    draw = ImageDraw.Draw(picture)
    font = text_font(size)
    line = max(2, round(size / 5))
    edges = np.array([picture.width, picture.height] * 2)
    boxes = []
    for mark in marks:
        box = (np.nan_to_num(np.asarray(mark.box, dtype=float)) - [*corner, *corner]) * scale
        # A side outside is not visible, one on the edge is.
        box = np.where(abs(box - edges) < 1, edges - 1, box).clip(-2 * line, edges + 2 * line)
        x1, y1 = np.minimum(box[:2], box[2:]).tolist()
        x2, y2 = np.maximum(box[:2], box[2:]).tolist()
        boxes.append((x1, y1, x2, y2))
        if mark.dashed:
            _dashed(draw, boxes[-1], mark.colour, line)
        else:
            draw.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline="#000000", width=line + 2)  # on any background
            draw.rectangle(boxes[-1], outline=mark.colour, width=line)
    tags: list[tuple] = []
    named = [(mark, box) for mark, box in zip(marks, boxes, strict=True) if mark.text]
    for mark, box in reversed(named):  # the best comes first and gets the best place
        width = draw.textlength(mark.text, font=font) + size // 2
        tags.append(_place_of_tag(box, width, size + 4, picture.size, tags))
    for tag, (mark, _) in zip(reversed(tags), named, strict=True):
        draw.rectangle(tag, fill=mark.colour)
        x, y = tag[0] + size // 4, (tag[1] + tag[3]) / 2
        draw.text((x, y), mark.text, fill=_contrast(mark.colour), font=font, anchor="lm")


def _place_of_tag(box: tuple, width: float, height: float, picture_size: tuple, tags: list[tuple]) -> tuple:
    """Return (x1, y1, x2, y2) of a tag at a corner of its box, with the least overlap with other tags."""
    x1, y1, x2, y2 = box
    left, right = x1 - 1, x2 + 2 - width
    places = []
    for x, y in ((left, y1 - height), (left, y2), (right, y1 - height), (right, y2), (left, y1), (right, y2 - height)):
        x = max(0, min(x, picture_size[0] - width))
        inside = max(0, min(y, picture_size[1] - height))
        if inside == y or not places:
            places.append((x, inside, x + width, inside + height))
    return min(places, key=lambda corner: sum(_overlap(corner, other) for other in tags))


def _overlap(a: tuple, b: tuple) -> float:
    """Return the common area of two boxes."""
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def _dashed(draw: ImageDraw.ImageDraw, box: tuple, colour: str, line: int, dash: int = 8) -> None:
    x1, y1, x2, y2 = box
    dashes = [(x, y, min(x + dash, x2), y) for x in np.arange(x1, x2, 2 * dash).tolist() for y in (y1, y2)]
    dashes += [(x, y, x, min(y + dash, y2)) for y in np.arange(y1, y2, 2 * dash).tolist() for x in (x1, x2)]
    for fill, width in (("#000000", line + 2), (colour, line)):
        for segment in dashes:
            draw.line(segment, fill=fill, width=width)


def _contrast(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#FFFFFF"


def _shortened(text: str, width: int, draw: ImageDraw.ImageDraw, font) -> str:
    while text and draw.textlength(text, font=font) > width - 4:
        text = text[:-2] + "…" if len(text) > 2 else ""
    return text
