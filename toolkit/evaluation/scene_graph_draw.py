"""Pictures of scene graphs: boxes with arrows for relations, the annotated graph beside the predicted one; and JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from toolkit.data.decoding import decode_image
from toolkit.evaluation.detections import best_first, detections_as_json, relations_as_json
from toolkit.evaluation.draw import BACKGROUND, COLOURS, GAP, PANEL, TEXT, choose_images, drawable, text_font

LINE = 18  # height in pixels of a line of text below a picture
RIGHT, WRONG = "#117733", "#D55E00"
MOST_ARROWS = 12


def write_graphs(table, predictions: Mapping, path: Path, count: int) -> Path:
    """JSON {image id: {"detections", "relations"}}, as predict.py has them, of the images that `draw_graphs` draws."""
    graphs = {}
    for row in map(table.row, choose_images(table, count)):
        found = best_first(predictions[row["image_id"]])
        graphs[str(row["image_id"])] = {
            "detections": detections_as_json(found, table.categories, table.attributes),
            "relations": relations_as_json(found, table.predicates),
        }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(graphs, indent=1))
    return path


def draw_graphs(table, predictions: Mapping, count: int, path: Path) -> Path:
    """One PNG with `count` images of a table, the same every time: the annotated graph left, the predicted one right.

    Drawn are as many of the best triplets as relations are annotated (5 to 12), right ones green; below each picture
    they stand in words. A triplet is right when classes and predicate are those of an annotated relation and both boxes
    overlap its boxes by half.

    Args:
        predictions: by image id, as `SceneGraphEvaluator.evaluate` takes them, with `predicates` and `triplet_scores`.

    Returns:
        `path`.
    """
    rows = map(table.row, choose_images(table, count))
    tiles = [graph_tile(table, row, predictions[row["image_id"]]) for row in rows]
    size = (max((t.width for t in tiles), default=PANEL) + 2 * GAP, sum(t.height + GAP for t in tiles) + GAP)
    grid = Image.new("RGB", size, BACKGROUND)
    top = GAP
    for tile in tiles:
        grid.paste(tile, (GAP, top))
        top += tile.height + GAP
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path)
    return path


def correct_triplets(triplets: np.ndarray, boxes: np.ndarray, labels: np.ndarray, truth: Mapping) -> np.ndarray:
    """(T,) bool of rows subject, object, predicate of predicted boxes (M, 4) and labels (M,); see `draw_graphs`."""
    ends, predicates = truth["relations"][:, :2], truth["relations"][:, 2]
    low = np.maximum(boxes[:, None, :2], truth["boxes"][None, :, :2])
    sides = (np.minimum(boxes[:, None, 2:], truth["boxes"][None, :, 2:]) - low).clip(min=0)
    areas = [(b[:, 2:] - b[:, :2]).prod(1) for b in (boxes, truth["boxes"])]
    common = sides.prod(2)
    same = common >= 0.5 * (areas[0][:, None] + areas[1][None] - common)
    same &= labels[:, None] == truth["labels"][None]
    matched = same[triplets[:, 0]][:, ends[:, 0]] & same[triplets[:, 1]][:, ends[:, 1]]
    return (matched & (triplets[:, 2:] == predicates[None])).any(1)


def graph_tile(table, row: Mapping, prediction: Mapping) -> Image.Image:
    """The annotated graph of a row of the table left, the predicted one right; see `draw_graphs`."""
    from toolkit.scene_graphs.evaluator import true_graph

    truth = true_graph(row)
    boxes, labels = (np.asarray(prediction[key]) for key in ("boxes", "labels"))
    shown = min(max(5, len(truth["relations"])), MOST_ARROWS)
    triplets = np.column_stack([np.asarray(prediction["pairs"]), np.asarray(prediction["predicates"])])[:shown]
    right = correct_triplets(triplets, boxes, labels, truth)
    used = np.isin(np.arange(len(boxes)), triplets[:, :2])  # other detections would only cover the picture
    pixels = decode_image(table.image_source(row), table.max_image_pixels)
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    names, predicates = (list(map(drawable, each)) for each in (table.class_names, table.predicates))
    known = truth["relations"][:MOST_ARROWS]
    left = _panel(picture, truth["boxes"], truth["labels"], np.ones(len(truth["boxes"]), bool), known,
                  [TEXT] * len(known), names, predicates)  # fmt: skip
    colours = [RIGHT if good else WRONG for good in right]
    scores = [f"{score:.2f}" for score in np.asarray(prediction["triplet_scores"])[:shown]]
    other = _panel(picture, boxes, labels, used, triplets, colours, names, predicates, scores)
    tile = Image.new("RGB", (left.width + other.width + GAP, max(left.height, other.height)), BACKGROUND)
    tile.paste(left, (0, 0))
    tile.paste(other, (left.width + GAP, 0))
    return tile


def _panel(
    picture: Image.Image,
    boxes: np.ndarray,
    labels: np.ndarray,
    used: np.ndarray,
    triplets: np.ndarray,
    colours: Sequence[str],
    names: Sequence[str],
    predicates: Sequence[str],
    scores: Sequence[str] = (),
) -> Image.Image:
    """The picture with the boxes and an arrow per triplet, and the triplets in words below."""
    scale = PANEL / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    panel = Image.new("RGB", (PANEL, size[1] + LINE * len(triplets) + 4), BACKGROUND)
    panel.paste(picture.resize(size, Image.Resampling.BICUBIC), (0, 0))
    draw, boxes = ImageDraw.Draw(panel), boxes * scale
    for (subject, object_, _), colour in zip(triplets.tolist(), colours, strict=True):
        _arrow(draw, _centre(boxes[subject]), _centre(boxes[object_]), colour)
    for number in np.flatnonzero(used).tolist():
        colour = COLOURS[number % len(COLOURS)]
        draw.rectangle(tuple(boxes[number].tolist()), outline=colour, width=2)
        _tag(draw, boxes[number][:2].tolist(), _name(number, labels, names), colour)
    for line, (subject, object_, predicate) in enumerate(triplets.tolist()):
        words = f"{_name(subject, labels, names)}  {predicates[predicate]}  {_name(object_, labels, names)}"
        words += f"  {scores[line]}" if scores else ""
        draw.text((4, size[1] + 2 + line * LINE), words, fill=colours[line], font=text_font(13))
    return panel


def _name(number: int, labels: np.ndarray, names: Sequence[str]) -> str:
    label = int(labels[number])
    return f"{number} {names[label] if label >= 0 else 'no class'}"


def _centre(box: np.ndarray) -> np.ndarray:
    return (box[:2] + box[2:]) / 2


def _arrow(draw: ImageDraw.ImageDraw, start: np.ndarray, end: np.ndarray, colour: str) -> None:
    """From the subject's centre to just before the object's, moved to the right so that both directions are seen."""
    along = end - start
    length = float(np.hypot(*along))
    if length < 1:  # an object with itself, or two with one centre
        x, y = start.tolist()
        draw.ellipse((x - 8, y - 8, x + 8, y + 8), outline=colour, width=2)
        return
    along = along / length
    aside = np.array([-along[1], along[0]])
    start, end = start + 4 * aside, end + 4 * aside - min(6.0, length / 4) * along
    draw.line((*start.tolist(), *end.tolist()), fill=colour, width=2)
    tips = [end - 9 * along + 4 * aside, end - 9 * along - 4 * aside]
    draw.polygon([tuple(end.tolist()), *(tuple(tip.tolist()) for tip in tips)], fill=colour)


def _tag(draw: ImageDraw.ImageDraw, corner: Sequence[float], text: str, colour: str) -> None:
    x, y = (max(0.0, value) for value in corner)
    width = draw.textlength(text, font=text_font(12))
    draw.rectangle((x, y, x + width + 4, y + 15), fill=colour)
    draw.text((x + 2, y), text, fill="#000000", font=text_font(12))
