"""Pictures of scene graphs, with arrows between boxes and the annotated graph next to the predicted one, and the graphs
as JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from toolkit.base.boxes import common_and_union
from toolkit.detectors.scene_graphs.formats import MAX_RELATIONS, relations_as_json
from toolkit.detectors.scene_graphs.true_graphs import true_graph
from toolkit.evaluation.draw import (
    BACKGROUND_COLOUR,
    CLASS_COLOURS,
    PANEL_SIDE_PX,
    TEXT_COLOUR,
    Mark,
    choose_images,
    draw_detections,
    draw_marks,
    drawable,
    fitted,
    montage,
    picture_of,
    picture_with_boxes,
    save_picture,
    text_font,
)
from toolkit.evaluation.predictions import best_first, detections_as_json

LINE_HEIGHT_PX = 18  # of a line of text below a picture
CORRECT_COLOUR, WRONG_COLOUR = "#117733", "#D55E00"
MAX_ARROWS = 12  # of an annotated and a predicted graph beside each other
CIRCLE_RADIUS_SHARE = 0.36  # of the circle of nodes, as a share of the panel's side


def write_graphs(table, predictions: Mapping, path: Path, count: int) -> Path:
    """Write the predicted graphs of the images that `draw_graphs` draws as JSON, {image id: {"detections",
    "relations"}}, in the form that predict.py writes. The folder of `path` is created. Return the path."""
    graphs = {}
    for row in map(table.row, choose_images(table, count)):
        graph = best_first(predictions[row["image_id"]])
        graphs[str(row["image_id"])] = {
            "detections": detections_as_json(graph, table.categories, table.attributes),
            "relations": relations_as_json(graph, table.predicates),
        }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(graphs, indent=1), encoding="utf-8")
    return path


def draw_graphs(table, predictions: Mapping, count: int, path: Path) -> Path:
    """Draw one PNG with `count` images of a table, always the same ones, with the annotated graph on the left and the
    predicted one on the right.

    As many triplets are drawn as there are annotated relations (at least 5, at most 12); the best are drawn, correct
    ones in green. A text below each picture lists these triplets, and their total number if not all are drawn. A
    triplet is correct if its classes and predicate are those of an annotated relation and both boxes overlap the
    annotated boxes with an IoU of at least 0.5.

    Args:
        predictions: by image id, as `SceneGraphEvaluator.evaluate` takes them, with `predicates` and `triplet_scores`.

    Returns:
        `path`.
    """
    tiles = []
    for row in map(table.row, choose_images(table, count)):
        tiles.append(graph_tile(table, row, predictions[row["image_id"]]))
    return save_picture(montage(tiles, 1, gap=0), path)


def correct_triplets(triplets: np.ndarray, boxes: np.ndarray, labels: np.ndarray, truth: Mapping) -> np.ndarray:
    """Return (T,) bool, whether each of T predicted triplets is correct in the sense of `draw_graphs`.

    Args:
        triplets: (T, 3) subject, object, predicate; subject and object are rows of `boxes`.
        boxes, labels: (M, 4) and (M,) of the M predicted objects.
        truth: the annotated graph, see `true_graph`.
    """
    ends = truth["relations"][:, :2]
    predicates = truth["relations"][:, 2]
    common, union = common_and_union(boxes[:, None], truth["boxes"][None])
    same = common >= 0.5 * union
    same &= labels[:, None] == truth["labels"][None]
    subjects_match = same[triplets[:, 0]][:, ends[:, 0]]  # (T, R)
    objects_match = same[triplets[:, 1]][:, ends[:, 1]]
    predicates_match = triplets[:, 2:] == predicates[None]
    return (subjects_match & objects_match & predicates_match).any(1)


def graph_tile(table, row: Mapping, prediction: Mapping) -> Image.Image:
    """Draw the annotated graph of a table row on the left and the predicted one on the right; see `draw_graphs`."""
    truth = true_graph(row)
    picture = fitted(picture_of(table.decode_image(row)), PANEL_SIDE_PX)
    scale = PANEL_SIDE_PX / max(row["width"], row["height"])
    names = list(map(drawable, table.class_names))
    predicates = list(map(drawable, table.predicates))
    annotated = truth["relations"][:MAX_ARROWS]
    left = _panel(
        picture,
        truth["boxes"] * scale,
        truth["labels"],
        annotated,
        [TEXT_COLOUR] * len(annotated),
        names,
        predicates,
        count=len(truth["relations"]),
    )
    boxes = np.asarray(prediction["boxes"])
    labels = np.asarray(prediction["labels"])
    shown = min(max(5, len(truth["relations"])), MAX_ARROWS)
    triplets = np.column_stack([np.asarray(prediction["pairs"]), np.asarray(prediction["predicates"])])[:shown]
    colours = []
    for is_right in correct_triplets(triplets, boxes, labels, truth):
        colours.append(CORRECT_COLOUR if is_right else WRONG_COLOUR)
    right = _panel(
        picture,
        boxes * scale,
        labels,
        triplets,
        colours,
        names,
        predicates,
        count=len(prediction["pairs"]),
        scores=[f"{score:.2f}" for score in np.asarray(prediction["triplet_scores"])[:shown]],
    )
    return montage([left, right], 2)


def _panel(
    picture: Image.Image,
    boxes: np.ndarray,
    labels: np.ndarray,
    triplets: np.ndarray,
    colours: Sequence[str],
    names: Sequence[str],
    predicates: Sequence[str],
    count: int,
    scores: Sequence[str] | None = None,
) -> Image.Image:
    """Draw the picture with an arrow per triplet and the boxes, and list the triplets as text below.

    count: number of triplets, drawn or not. scores: of the triplets, if these are predicted: then boxes without a
    triplet are left out, as they would only cover the picture.
    """
    named = []
    for i, label in enumerate(labels.tolist()):
        named.append(f"{i} {names[label] if label >= 0 else 'no class'}")
    used = np.unique(triplets[:, :2]).tolist() if scores is not None else range(len(boxes))
    left_out = count > len(triplets)
    height = picture.height + LINE_HEIGHT_PX * (len(triplets) + left_out) + 4
    panel = Image.new("RGB", (PANEL_SIDE_PX, height), BACKGROUND_COLOUR)
    picture = picture.copy()
    centres = ((boxes[:, :2] + boxes[:, 2:]) / 2).tolist()
    for (subject, object_, _), colour in zip(triplets.tolist(), colours, strict=True):
        draw_arrow(ImageDraw.Draw(picture), centres[subject], centres[object_], colour, 16)
    marks = [Mark(boxes[i], CLASS_COLOURS[i % len(CLASS_COLOURS)], named[i]) for i in used]
    draw_marks(picture, marks)
    panel.paste(picture, (0, 0))
    draw = ImageDraw.Draw(panel)
    for line, (subject, object_, predicate) in enumerate(triplets.tolist()):
        words = f"{named[subject]}  {predicates[predicate]}  {named[object_]}  {scores[line] if scores else ''}"
        draw.text(
            (4, picture.height + 2 + line * LINE_HEIGHT_PX),
            words,
            fill=colours[line],
            font=text_font(13),
        )
    if left_out:
        words = f"{len(triplets)} of {count} relations are drawn"
        draw.text(
            (4, picture.height + 2 + len(triplets) * LINE_HEIGHT_PX),
            words,
            fill=TEXT_COLOUR,
            font=text_font(13),
        )
    return panel


def draw_found(
    image: Tensor,
    graph: Mapping[str, Tensor],
    class_names: Sequence[str],
    predicates: Sequence[str],
    path: Path,
    relations: int = 20,
    relation_score: float = 0.0,
) -> Path:
    """Write a picture of an image, uint8 (3, H, W), with its detections, as JPEG or PNG according to the suffix of
    `path`. The folder is created.

    For a scene graph, the image shows boxes and an arrow for each of its best relations: at most `relations` of them,
    with a score of at least `relation_score`. These relations are also drawn as a graph on the right; a text below it
    says how many relations there are if not all are drawn.
    """
    if "pairs" not in graph:
        return draw_detections(image, graph, class_names, path)
    count = min(len(graph["pairs"]), MAX_RELATIONS)
    has_score = graph["triplet_scores"][:count] >= relation_score
    kept = has_score.nonzero().flatten()[:relations]
    pairs = graph["pairs"][kept].tolist()
    scores = graph["triplet_scores"][kept].tolist()
    kinds = graph["predicates"][kept].tolist()
    labels = graph["labels"].tolist()
    colours = [CLASS_COLOURS[p % len(CLASS_COLOURS)] for p in kinds]
    arrows = [(*pair, drawable(predicates[p]), colour) for pair, p, colour in zip(pairs, kinds, colours, strict=True)]
    numbered = {"boxes": graph["boxes"], "labels": torch.arange(len(labels))}
    names = [f"{i} {class_names[label]}" for i, label in enumerate(labels)]
    picture = picture_with_boxes(image, numbered, names)
    scale = picture.width / image.shape[-1]
    centres = (graph["boxes"][:, :2] + graph["boxes"][:, 2:]) / 2 * scale
    draw = ImageDraw.Draw(picture)
    size = max(12, round(max(picture.size) / 60))
    for subject, object_, words, colour in arrows:
        draw_arrow(
            draw,
            centres[subject].tolist(),
            centres[object_].tolist(),
            colour,
            size,
            words,
        )
    scored = []
    for (subject, object_, words, colour), score in zip(arrows, scores, strict=True):
        scored.append((subject, object_, f"{words} {score:.2f}", colour))
    nodes = {}
    for i in sorted({end for pair in pairs for end in pair}):
        nodes[i] = f"{i} {drawable(class_names[labels[i]])}"
    left_out = left_out_in_words(len(kept), count, relations, relation_score)
    beside = _draw_graph(nodes, scored, centres, picture.height, left_out)
    return save_picture(montage([picture, beside], 2, gap=0), path)


def left_out_in_words(drawn: int, count: int, most: int, least_score: float) -> str:
    """Return the text below a graph in which `drawn` of `count` relations are drawn; "" if all are.

    most, least_score: the largest number and the smallest score of relations to be drawn, which explain why the other
    relations are not drawn.
    """
    if drawn == count:
        return "" if count else "no relations"
    of_score = f": no other has a score of {least_score:g} or more" if drawn < most else ""
    return f"{drawn} of {count} relations are drawn{of_score}"


def _draw_graph(
    nodes: Mapping[int, str], arrows: Sequence[tuple], centres: Tensor, side: int, left_out: str
) -> Image.Image:
    """Draw the relations as a graph, `side` pixels high: objects on a circle, in the order of their angle around the
    middle of the image, so that neighbours in the image are neighbours in the graph; `left_out` is written below."""
    panel = Image.new("RGB", (side, side), BACKGROUND_COLOUR)
    draw = ImageDraw.Draw(panel)
    size = max(12, round(side / 45))
    words_at = (side / 2, side - size if nodes else side / 2)
    draw.text(words_at, left_out, fill=TEXT_COLOUR, font=text_font(size), anchor="mm")
    if not nodes:
        return panel
    middle = centres[list(nodes)].mean(0)
    radius = CIRCLE_RADIUS_SHARE * side

    def angle_in_image(number: int) -> float:
        x, y = (centres[number] - middle).tolist()
        return math.atan2(y, x)

    positions = {}
    for index, number in enumerate(sorted(nodes, key=angle_in_image)):
        angle = 2 * math.pi * index / len(nodes) - math.pi
        x = side / 2 + radius * math.cos(angle)
        y = side / 2 + radius * math.sin(angle)
        positions[number] = (x, y)
    for subject, object_, words, colour in arrows:
        draw_arrow(
            draw,
            positions[subject],
            positions[object_],
            colour,
            size,
            words,
            gap=1.6 * size,
        )
    for number, position in positions.items():
        left, top, right, bottom = draw.textbbox(
            position,
            nodes[number],
            font=text_font(size),
            anchor="mm",
        )
        box = (left - size / 2, top - size / 3, right + size / 2, bottom + size / 3)
        draw.rounded_rectangle(
            box,
            radius=size / 2,
            fill=CLASS_COLOURS[number % len(CLASS_COLOURS)],
            outline=TEXT_COLOUR,
        )
        draw.text(
            position,
            nodes[number],
            fill="#000000",
            font=text_font(size),
            anchor="mm",
        )
    return panel


def draw_arrow(
    draw: ImageDraw.ImageDraw,
    start: Sequence[float],
    end: Sequence[float],
    colour: str,
    size: int,
    words: str = "",
    gap: float = 0.0,
) -> None:
    """Draw an arrow from `start` to a point `gap` pixels before `end`, both x and y in pixels, with the text `words` on
    it.

    size: size of the letters in pixels; the head of the arrow is scaled with it. The arrow is moved to its right, so
    that an arrow in the opposite direction is visible too.
    """
    start_x, start_y = start
    end_x, end_y = end
    along_x, along_y = end_x - start_x, end_y - start_y
    length = math.hypot(along_x, along_y)
    if length < 1:  # an object with itself, or two with the same centre
        circle = (start_x - size, start_y - size, start_x + size, start_y + size)
        draw.ellipse(circle, outline=colour, width=2)
        along_x, along_y = 1.0, 0.0
        length = 1.0
    x, y = along_x / length, along_y / length  # the direction, of length 1
    aside_x, aside_y = -y * size / 4, x * size / 4
    begin = (start_x + aside_x, start_y + aside_y)
    tip_x = end_x + aside_x - gap * x
    tip_y = end_y + aside_y - gap * y
    tip = (tip_x, tip_y)
    draw.line((*begin, *tip), fill="#000000", width=4)
    draw.line((*begin, *tip), fill=colour, width=2)
    back = 0.8 * size
    half = 0.35 * size
    corners = []
    for sign in (-1, 1):
        corners.append((tip_x - back * x + sign * half * y, tip_y - back * y - sign * half * x))
    draw.polygon([tip, *corners], fill=colour, outline="#000000")
    if words:
        middle = [a + 0.36 * (b - a) for a, b in zip(begin, tip, strict=True)]  # off the words of the way back
        around = draw.textbbox(middle, words, font=text_font(size), anchor="mm")
        draw.rectangle(around, fill="#FFFFFF")
        draw.text(middle, words, fill=TEXT_COLOUR, font=text_font(size), anchor="mm")
