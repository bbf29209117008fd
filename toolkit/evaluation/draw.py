"""Pictures of detections: ground truth and predictions side by side, many images in one PNG."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from toolkit.data.decoding import decode_image
from toolkit.text import JOINERS, escaped, shown

# Okabe & Ito (2008), told apart with every kind of colour vision; without black, plus three of Tol's.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#AA4499", "#DDCC77", "#117733")
PANEL = 384  # longest side of an image in the grid, in pixels
BAR, GAP = 24, 10
BACKGROUND, TEXT = "#FFFFFF", "#222222"


@functools.cache
def text_font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib; Pillow's own has few letters beyond ASCII. `size` in pixels."""
    from matplotlib import font_manager  # half a second that the start of a run need not wait for

    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)


@functools.cache
def _letters() -> frozenset[int]:
    """Code points that the letters of `text_font` have a picture of."""
    from matplotlib import font_manager, ft2font

    return frozenset(ft2font.FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())


def drawable(text: object, limit: int = 30) -> str:
    """`toolkit.text.shown`, with the code points of letters that `text_font` lacks: boxes that all look alike tell
    nobody which class it is."""
    known = _letters()
    names = (c if ord(c) in known or c in JOINERS else f"<{ord(c):X}>" for c in escaped(text, limit))
    return shown("".join(names), limit)


def choose_images(table, count: int) -> list[int]:
    """Positions of `count` images spread evenly over those with boxes (over all when none has): the same every time."""
    candidates = np.flatnonzero(table.num_boxes() > 0)
    if not len(candidates):
        candidates = np.arange(len(table))
    return candidates[np.linspace(0, len(candidates) - 1, min(count, len(candidates))).astype(int)].tolist()


def draw_predictions(table, predictions: Mapping, count: int, path: Path, score_threshold: float = 0.3) -> Path:
    """`draw_grid` of `count` images of a table, the same ones every time; predictions by image id."""
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
        image = decode_image(table.image_source(row), table.max_image_pixels)
        samples.append((image, predictions[row["image_id"]], truth))
    return draw_grid(samples, table.class_names, path, score_threshold)


def draw_detections(image: Tensor, found: Mapping, class_names: Sequence[str], path: Path) -> Path:
    """Writes `picture_with_boxes` of `image` as a JPEG or PNG, by the suffix of `path`; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture_with_boxes(image, found, class_names).save(path, quality=92)
    return path


def picture_with_boxes(
    image: Tensor, found: Mapping, class_names: Sequence[str], smallest_side: int = 640
) -> Image.Image:
    """The image with boxes and tags; lines and letters grow with it.

    Args:
        image: uint8 (3, H, W).
        found: `boxes (K, 4)` xyxy pixels of the image, `labels (K,)`, and `scores (K,)` where they are detections or
            `iscrowd (K,)` where they are ground truth.
        smallest_side: an image whose longer side is shorter, in pixels, is enlarged to that, so that tags can be read.
    """
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    scale = max(1.0, smallest_side / max(picture.size))
    if scale > 1:
        picture = picture.resize([max(1, round(side * scale)) for side in picture.size], Image.Resampling.BICUBIC)
    scores = found["scores"].tolist() if "scores" in found else [None] * len(found["labels"])
    crowd = found["iscrowd"].tolist() if "iscrowd" in found else [0] * len(found["labels"])
    order = sorted(range(len(scores)), key=lambda i: scores[i] or 0)  # best on top
    boxes, labels = found["boxes"][order] * scale, found["labels"][order]
    size = max(14, round(max(picture.size) / 50))
    _draw_boxes(picture, boxes, labels, [scores[i] for i in order], [crowd[i] for i in order], class_names, size)
    return picture


def draw_grid(
    samples: Sequence[tuple[Tensor, Mapping, Mapping]],
    class_names: Sequence[str],
    path: Path,
    score_threshold: float = 0.3,
    columns: int = 2,
) -> Path:
    """One PNG with a pair of panels per image: its ground truth (crowds dashed) left, its predictions right.

    Args:
        samples: (image uint8 (3, H, W), predictions {boxes (K, 4), scores, labels}, ground truth {image_id, boxes
            (N, 4), labels, optional iscrowd}); boxes xyxy in pixels of that image, tensors on any device.
        path: file to write; its folder is made.
        score_threshold: weaker predictions are not drawn.
        columns: pairs beside each other.

    Returns:
        `path`.
    """
    tiles = [_tile(*sample, class_names, score_threshold) for sample in samples]
    columns = max(1, min(columns, len(tiles)))
    width = max((t.width for t in tiles), default=PANEL)
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    heights = [max(t.height for t in row) for row in rows]
    size = (columns * (width + 2 * GAP), sum(heights) + 2 * GAP * len(rows)) if rows else (PANEL, BAR)
    grid = Image.new("RGB", size, BACKGROUND)
    top = GAP
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            grid.paste(tile, (GAP + column * (width + 2 * GAP), top))
        top += height + 2 * GAP
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path)
    return path


def _tile(image: Tensor, predictions: Mapping, truth: Mapping, class_names: Sequence[str], threshold: float):
    found = {k: predictions[k].detach().cpu() for k in ("boxes", "scores", "labels")}
    shown = found["scores"] >= threshold
    order = found["scores"][shown].argsort(stable=True)  # best on top
    found = {k: v[shown][order] for k, v in found.items()}
    picture = Image.fromarray(image.detach().cpu().permute(1, 2, 0).contiguous().numpy())
    scale = PANEL / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    picture = picture.resize(size, Image.Resampling.BICUBIC)

    left, right = picture.copy(), picture.copy()
    crowd = truth["iscrowd"].tolist() if "iscrowd" in truth else [0] * len(truth["labels"])
    _draw_boxes(left, truth["boxes"] * scale, truth["labels"], [None] * len(crowd), crowd, class_names)
    _draw_boxes(right, found["boxes"] * scale, found["labels"], found["scores"].tolist(), [0] * len(order), class_names)

    tile = Image.new("RGB", (2 * size[0] + 4, size[1] + BAR), BACKGROUND)
    tile.paste(left, (0, BAR))
    tile.paste(right, (size[0] + 4, BAR))
    draw, font = ImageDraw.Draw(tile), text_font(14)
    objects, detections = len(truth["labels"]), len(order)
    title = f"{drawable(truth.get('name', truth.get('image_id', '')), 60)}:  {objects} object{'s' * (objects != 1)}"
    draw.text((2, 2), _shortened(title, size[0], draw, font), fill=TEXT, font=font)
    caption = f"{detections} prediction{'s' * (detections != 1)} ≥ {threshold:g}"
    draw.text((size[0] + 6, 2), _shortened(caption, size[0], draw, font), fill=TEXT, font=font)
    return tile


def _draw_boxes(
    picture: Image.Image, boxes: Tensor, labels: Tensor, scores: list, dashed: list, class_names, size: int = 12
) -> None:
    """size: of the letters in pixels."""
    draw, font, line = ImageDraw.Draw(picture), text_font(size), max(2, (size + 4) // 6)
    limit = torch.tensor([picture.width - 1, picture.height - 1] * 2)
    boxes = torch.minimum(boxes.detach().cpu().float().nan_to_num(0).clamp(min=0), limit)
    tags = []
    for box, label, score, is_dashed in zip(boxes.tolist(), labels.tolist(), scores, dashed, strict=True):
        x1, y1, x2, y2 = min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3])
        colour = COLOURS[label % len(COLOURS)]
        if is_dashed:
            _dashed(draw, (x1, y1, x2, y2), colour)
        else:
            draw.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline="#000000", width=line + 2)  # on any background
            draw.rectangle((x1, y1, x2, y2), outline=colour, width=line)
        name = drawable(class_names[label]) if 0 <= label < len(class_names) else f"label {label}?"
        tags.append(((x1, y1, x2, y2), name if score is None else f"{name} {score:.2f}", colour))
    taken: list[tuple] = []
    for box, text, _ in reversed(tags):  # the best first, which gets the best place
        width = draw.textlength(text, font=font) + size // 2
        taken.append(_place_of_tag(box, width, size + 4, picture.size, taken))
    for place, (_, text, colour) in zip(reversed(taken), tags, strict=True):  # after all boxes: no line crosses a text
        x, y = place[0] + size // 4, (place[1] + place[3]) / 2
        draw.rectangle(place, fill=colour)
        draw.text((x, y), text, fill=_contrast(colour), font=font, anchor="lm")


def _place_of_tag(box: tuple, width: float, height: float, picture_size: tuple, taken: list[tuple]) -> tuple:
    """(x1, y1, x2, y2) of a tag at a corner of its box: inside the picture, and off the tags that are there already
    where one of the places is."""
    x1, y1, x2, y2 = box
    left, right = x1 - 1, x2 + 2 - width
    places = []
    for x, y in ((left, y1 - height), (left, y2), (right, y1 - height), (right, y2), (left, y1), (right, y2 - height)):
        x, inside = max(0, min(x, picture_size[0] - width)), max(0, min(y, picture_size[1] - height))
        if inside == y or not places:
            places.append((x, inside, x + width, inside + height))
    return min(places, key=lambda place: sum(_overlap(place, other) for other in taken))


def _overlap(a: tuple, b: tuple) -> float:
    """Area in common."""
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def _dashed(draw: ImageDraw.ImageDraw, box: tuple, colour: str, dash: int = 8) -> None:
    x1, y1, x2, y2 = box
    for a in np.arange(x1, x2, 2 * dash):
        draw.line((a, y1, min(a + dash, x2), y1), fill=colour, width=2)
        draw.line((a, y2, min(a + dash, x2), y2), fill=colour, width=2)
    for b in np.arange(y1, y2, 2 * dash):
        draw.line((x1, b, x1, min(b + dash, y2)), fill=colour, width=2)
        draw.line((x2, b, x2, min(b + dash, y2)), fill=colour, width=2)


def _contrast(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#FFFFFF"


def _shortened(text: str, width: int, draw: ImageDraw.ImageDraw, font) -> str:
    while text and draw.textlength(text, font=font) > width - 4:
        text = text[:-2] + "…" if len(text) > 2 else ""
    return text
