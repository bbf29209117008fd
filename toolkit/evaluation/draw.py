"""Drawings of boxes and masks with labels, image grids, and ground truth next to predictions."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from toolkit.base.masks import Masks, Rle, Shape, rle, rles_of
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
MASK_OPACITY = 0.4
MOST_TAGS = 30  # objects in a picture; the tags and thick lines of more would hide it


@dataclass
class Mark:
    """A box (xyxy, pixels of the image) with a colour and, if it is not empty, a text next to it.

    dashed: draw the lines of the box dashed, and of the mask only the outline. mask: of the whole image; None: none.
    """

    box: Sequence[float]
    colour: str
    text: str = ""
    dashed: bool = False
    mask: Rle | None = None


@functools.cache
def text_font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font DejaVu Sans of matplotlib, since Pillow's own has few letters beyond ASCII. size: in pixels."""
    from matplotlib import font_manager  # half a second, which the start of a run can avoid

    file = font_manager.findfont("DejaVu Sans")
    return ImageFont.truetype(file, size)


@functools.cache
def _letters() -> frozenset[int]:
    """Return the code points of the glyphs in `text_font`."""
    from matplotlib import font_manager, ft2font

    file = font_manager.findfont("DejaVu Sans")
    return frozenset(ft2font.FT2Font(file).get_charmap())


def drawable(text: object, limit: int = 30) -> str:
    """Escape text by `toolkit.base.text.shown`, with code points, such as <4E2D>, for letters that `text_font` lacks.

    Without this, all missing letters would be drawn as the same empty box.
    """
    supported = _letters()
    letters = []
    for letter in escaped(text, limit):
        has_glyph = ord(letter) in supported or letter in JOINERS
        letters.append(letter if has_glyph else f"<{ord(letter):X}>")
    return shown("".join(letters), limit)


def choose_images(table, count: int) -> list[int]:
    """Return the positions of at most `count` images, evenly spread over the images with boxes.

    If no image has boxes, they are spread over all images.
    """
    candidates = np.flatnonzero(table.num_boxes() > 0)
    if not len(candidates):
        candidates = np.arange(len(table))
    places = np.linspace(0, len(candidates) - 1, min(count, len(candidates)))
    return candidates[places.astype(int)].tolist()


def draw_predictions(table, predictions: Mapping, count: int, path: Path) -> Path:
    """Write the picture of `draw_grid` for `count` images of a table, see `choose_images`. Returns `path`.

    predictions: by image id, as for `draw_grid`.
    """
    samples = []
    for position in choose_images(table, count):
        row = table.row(position)
        objects = row["objects"]
        boxes = np.array(objects["bbox"], dtype=np.float32)
        labels = np.array(objects["category"], dtype=np.int64)
        iscrowd = np.array(objects["iscrowd"], dtype=np.int64)
        truth = {
            "name": table.image_name(position),
            "boxes": torch.as_tensor(boxes).reshape(-1, 4),
            "labels": torch.as_tensor(labels),
            "iscrowd": torch.as_tensor(iscrowd),
        }
        if table.has_masks:
            truth["masks"] = row["masks"]
        image = table.decode_image(row)
        samples.append((image, predictions[row["image_id"]], truth))
    return draw_grid(samples, table.class_names, path)


def draw_grid(samples: Sequence[tuple[Tensor, Mapping, Mapping]], class_names: Sequence[str], path: Path) -> Path:
    """Write one PNG with a pair of panels per image, two pairs in a row. Returns `path`.

    The left panel has the ground truth (crowds dashed), the right one the predictions with a score of at least
    `MIN_DRAWN_SCORE`.

    Args:
        samples: (image uint8 (3, H, W), predictions {boxes (K, 4), scores, labels}, ground truth {name, boxes (N, 4),
            labels, optional iscrowd}); boxes xyxy in pixels of that image, tensors on any device; `masks` of either as
            for `picture_with_boxes`.
        path: file to write; its folder is made.
    """
    panels = []
    for image, predictions, truth in samples:
        strong = predictions["scores"] >= MIN_DRAWN_SCORE
        kept = {key: predictions[key][strong] for key in ("boxes", "scores", "labels")}
        if "masks" in predictions:
            kept["masks"] = [predictions["masks"][row] for row in np.flatnonzero(strong)]
        num_objects = _counted(len(truth["labels"]), "object")
        caption = f"{drawable(truth['name'], 60)}:  {num_objects}"
        panels.append(_panel(image, truth, class_names, caption))
        num_predictions = _counted(len(kept["labels"]), "prediction")
        caption = f"{num_predictions} ≥ {MIN_DRAWN_SCORE:g}"
        panels.append(_panel(image, kept, class_names, caption))
    columns = 2 * min(2, len(samples)) or 1
    return save_picture(montage(panels, columns), path)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _panel(image: Tensor, objects: Mapping, class_names: Sequence[str], caption: str) -> Image.Image:
    """Draw an image with its boxes, as long as `PANEL_SIDE_PX`, below a line of text."""
    picture = fitted(picture_of(image), PANEL_SIDE_PX)
    marks = marks_of(objects, class_names, image.shape[-2:])
    draw_marks(picture, marks, scale=picture.width / image.shape[-1])
    panel = Image.new("RGB", (picture.width, picture.height + CAPTION_HEIGHT_PX), BACKGROUND_COLOUR)
    panel.paste(picture, (0, CAPTION_HEIGHT_PX))
    draw = ImageDraw.Draw(panel)
    font = text_font(14)
    text = _shortened(caption, picture.width, draw, font)
    draw.text((2, 2), text, fill=TEXT_COLOUR, font=font)
    return panel


def draw_detections(image: Tensor, objects: Mapping, class_names: Sequence[str], path: Path) -> Path:
    """Write `picture_with_boxes` to `path`, as JPEG or PNG by its suffix; its folder is made. Returns `path`."""
    return save_picture(picture_with_boxes(image, objects, class_names), path)


def picture_with_boxes(
    image: Tensor, objects: Mapping, class_names: Sequence[str], smallest_side: int = 640
) -> Image.Image:
    """Return the image with boxes and tags drawn on it; lines and letters grow with the image.

    Args:
        image: uint8 (3, H, W).
        objects: `boxes (K, 4)` xyxy pixels of the image, `labels (K,)`, and `scores (K,)` for detections or
            `iscrowd (K,)` for ground truth; `masks`, K shapes (`toolkit.base.masks`) or pixels (K, H, W), are drawn if
            they are there.
        smallest_side: pixels; an image whose longer side is shorter than this is enlarged to this size, so that tags
            can be read.
    """
    picture = picture_of(image)
    if max(picture.size) < smallest_side:
        picture = fitted(picture, smallest_side)
    marks = marks_of(objects, class_names, image.shape[-2:])
    longer_side = max(picture.size)
    scale = longer_side / max(image.shape[-2:])
    letters = max(14, round(longer_side / 50))  # pixels
    draw_marks(picture, marks, scale=scale, size=letters)
    return picture


def picture_of(image: Tensor) -> Image.Image:
    """Convert an image, uint8 (3, H, W) on any device, to a Pillow image."""
    pixels = image.detach().cpu().permute(1, 2, 0)  # (H, W, 3)
    return Image.fromarray(pixels.contiguous().numpy())


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """Resize a picture so that its longer side has `side` pixels."""
    scale = side / max(picture.size)
    size = [max(1, round(length * scale)) for length in picture.size]
    return picture.resize(size, Image.Resampling.BICUBIC)


def montage(pictures: Sequence[Image.Image], columns: int, gap: int = GAP_PX) -> Image.Image:
    """Return one picture with the given ones in a grid of `columns` columns.

    gap: pixels between pictures, and between pictures and the edges.
    """
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    widths = []
    for i in range(min(columns, len(pictures))):
        column = pictures[i::columns]
        widths.append(max(picture.width for picture in column))
    heights = []
    for row in rows:
        heights.append(max(picture.height for picture in row))
    lefts = _starts(widths, gap)
    tops = _starts(heights, gap)
    size = (max(lefts[-1], 1), max(tops[-1], 1))
    whole = Image.new("RGB", size, BACKGROUND_COLOUR)
    for row, top in zip(rows, tops, strict=False):
        for picture, left in zip(row, lefts, strict=False):
            whole.paste(picture, (left, top))
    return whole


def _starts(lengths: Sequence[int], gap: int) -> list[int]:
    """Return the start of each length and the end of the last, `gap` apart: [5, 7] and 1 give [1, 7, 15]."""
    starts = [gap]
    for length in lengths:
        starts.append(starts[-1] + length + gap)
    return starts


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Write a picture in the format that the suffix of `path` says; its folder is made. Returns `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, quality=92)
    return path


def marks_of(objects: Mapping, class_names: Sequence[str], size_hw: Sequence[int]) -> list[Mark]:
    """Return a mark for each object, by ascending score; crowds are dashed.

    Boxes have the colour of their class. Masks have a colour for each object, since neighbours of one class would
    merge, but not in a picture of so many objects that only colours say the classes.

    objects: as of `picture_with_boxes`. size_hw: height and width of the image, to which boxes are clipped.
    """
    masks = _run_lengths(objects["masks"], tuple(size_hw)) if "masks" in objects else None
    columns = ("boxes", "labels", "scores", "iscrowd")
    objects = {key: objects[key].detach().cpu() for key in columns if key in objects}
    height, width = size_hw
    boxes = objects["boxes"].float().nan_to_num(0).clamp(min=0)
    boxes = torch.minimum(boxes, torch.tensor([width, height] * 2))
    scores = objects["scores"].tolist() if "scores" in objects else [None] * len(boxes)
    crowd = objects["iscrowd"].tolist() if "iscrowd" in objects else [0] * len(boxes)
    best_last = sorted(range(len(boxes)), key=lambda i: scores[i] or 0)
    is_by_object = masks is not None and len(boxes) <= MOST_TAGS
    marks = []
    for i in best_last:
        label = int(objects["labels"][i])
        is_known = 0 <= label < len(class_names)
        text = drawable(class_names[label]) if is_known else f"label {label}?"
        if scores[i] is not None:
            text = f"{text} {scores[i]:.2f}"
        colour = CLASS_COLOURS[(i if is_by_object else label) % len(CLASS_COLOURS)]
        mask = None if masks is None else masks[i]
        marks.append(Mark(boxes[i].tolist(), colour, text, bool(crowd[i]), mask))
    return marks


def _run_lengths(masks: Sequence[Shape] | Tensor, size_hw: tuple[int, int]) -> list[Rle | None]:
    if isinstance(masks, Tensor):
        return rles_of(masks.detach().cpu())
    return [None if shape is None else rle(shape, size_hw) for shape in masks]


def draw_marks(
    picture: Image.Image,
    marks: Sequence[Mark],
    *,
    scale: float = 1.0,
    corner: tuple[float, float] = (0.0, 0.0),
    size: int = 12,
) -> None:
    """Draw masks and boxes into the picture, in place, the last one on top; then draw their tags, so that no line
    crosses a text. More than `MOST_TAGS` objects have thin lines and no tags: the colours say the classes.

    Args:
        scale: pixels of the picture per pixel of the image.
        corner: x, y in the image of the upper left corner of the picture.
        size: height of the letters in pixels.
    """
    for mark in marks:
        if mark.mask is not None:
            _draw_mask(picture, mark, scale, corner)
    draw = ImageDraw.Draw(picture)
    font = text_font(size)
    is_crowded = len(marks) > MOST_TAGS
    line = 1 if is_crowded else max(2, round(size / 5))
    edges = np.array([picture.width, picture.height] * 2)
    boxes = []
    for mark in marks:
        in_image = np.nan_to_num(np.asarray(mark.box, dtype=float))
        corners = (in_image - [*corner, *corner]) * scale
        # A side outside is not visible, one on the edge is.
        corners = np.where(abs(corners - edges) < 1, edges - 1, corners)
        corners = corners.clip(-2 * line, edges + 2 * line)
        x1, y1 = np.minimum(corners[:2], corners[2:]).tolist()
        x2, y2 = np.maximum(corners[:2], corners[2:]).tolist()
        box = (x1, y1, x2, y2)
        boxes.append(box)
        if mark.dashed:
            _dashed(draw, box, mark.colour, line)
        else:
            if not is_crowded:
                frame = (x1 - 1, y1 - 1, x2 + 1, y2 + 1)  # black, visible on any background
                draw.rectangle(frame, outline="#000000", width=line + 2)
            draw.rectangle(box, outline=mark.colour, width=line)
    tags: list[tuple] = []
    named = [(mark, box) for mark, box in zip(marks, boxes, strict=True) if mark.text and not is_crowded]
    for mark, box in reversed(named):  # the best comes first and gets the best place
        width = draw.textlength(mark.text, font=font) + size // 2
        tag = _place_of_tag(box, width, size + 4, picture.size, tags)
        tags.append(tag)
    for tag, (mark, _) in zip(reversed(tags), named, strict=True):
        draw.rectangle(tag, fill=mark.colour)
        left, top, _, bottom = tag
        middle_left = (left + size // 4, (top + bottom) / 2)
        draw.text(middle_left, mark.text, fill=_contrast(mark.colour), font=font, anchor="lm")


def _draw_mask(picture: Image.Image, mark: Mark, scale: float, corner: tuple[float, float]) -> None:
    """Lay the colour of a mark over the pixels of its mask, with a line along its border."""
    left, top = corner
    moved = Masks.of([mark.mask]).moved(-left, -top).resized(scale, scale)
    pixels = moved.drawn((picture.height, picture.width))[0]
    shown = Image.fromarray(255 * pixels.numpy())
    if not mark.dashed:
        picture.paste(mark.colour, mask=shown.point(lambda value: round(value * MASK_OPACITY)))
    inner = shown.filter(ImageFilter.MinFilter(3))
    border = Image.fromarray(np.asarray(shown) - np.asarray(inner))
    picture.paste(mark.colour, mask=border)


def _place_of_tag(box: tuple, width: float, height: float, picture_size: tuple, tags: list[tuple]) -> tuple:
    """Return (x1, y1, x2, y2) of a tag at a corner of its box, with the least overlap with other tags."""
    x1, y1, x2, y2 = box
    left = x1 - 1
    right = x2 + 2 - width
    corners = (
        (left, y1 - height),  # above the box
        (left, y2),  # below it
        (right, y1 - height),
        (right, y2),
        (left, y1),  # inside it
        (right, y2 - height),
    )
    places = []
    for x, y in corners:
        x = max(0, min(x, picture_size[0] - width))
        inside = max(0, min(y, picture_size[1] - height))
        if inside == y or not places:
            places.append((x, inside, x + width, inside + height))
    return min(places, key=lambda place: sum(_overlap(place, other) for other in tags))


def _overlap(a: tuple, b: tuple) -> float:
    """Return the common area of two boxes."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0, width) * max(0, height)


def _dashed(draw: ImageDraw.ImageDraw, box: tuple, colour: str, line: int, dash: int = 8) -> None:
    x1, y1, x2, y2 = box
    dashes = []
    for x in np.arange(x1, x2, 2 * dash).tolist():
        end = min(x + dash, x2)
        dashes += [(x, y1, end, y1), (x, y2, end, y2)]
    for y in np.arange(y1, y2, 2 * dash).tolist():
        end = min(y + dash, y2)
        dashes += [(x1, y, x1, end), (x2, y, x2, end)]
    strokes = (("#000000", line + 2), (colour, line))
    for fill, width in strokes:
        for segment in dashes:
            draw.line(segment, fill=fill, width=width)


def _contrast(colour: str) -> str:
    """Return black or white, whichever is legible on a colour `#RRGGBB`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    return "#000000" if brightness > 120 else "#FFFFFF"


def _shortened(text: str, width: int, draw: ImageDraw.ImageDraw, font) -> str:
    while text and draw.textlength(text, font=font) > width - 4:
        text = text[:-2] + "…" if len(text) > 2 else ""
    return text
