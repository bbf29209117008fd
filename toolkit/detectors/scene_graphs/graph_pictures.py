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
from toolkit.detectors.scene_graphs.true_graphs import given_graph, true_graph
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

CORRECT_COLOUR, WRONG_COLOUR = "#117733", "#D55E00"
MAX_ARROWS = 8  # of an annotated and a predicted graph beside each other
PANEL_LETTERS_PX = 14  # height of the letters in these graphs
WORDS_AT = 0.36  # of the length of an arrow, from its start
WORDS_ASIDE = 2.5  # distance of the words from the arrow, in units of that of two arrows between the same objects
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
    """Draw one PNG with `count` images of a table, always the same ones, each beside its annotated and its predicted
    graph.

    As many triplets are drawn as there are annotated relations (at least 5, at most 8); the best are drawn, correct
    ones in green. A text below each graph says how many there are if not all are drawn. A triplet is correct if its
    classes and predicate are those of an annotated relation and both boxes overlap the annotated boxes with an IoU of
    at least 0.5.

    Args:
        predictions: by image id, as `SceneGraphEvaluator.evaluate` takes them, with `predicates` and `triplet_scores`.

    Returns:
        `path`.
    """
    panels = []
    columns = 1
    for row in map(table.row, choose_images(table, count)):
        of_image = graph_panels(table, row, predictions[row["image_id"]])
        panels += of_image.values()
        columns = len(of_image)
    return save_picture(montage(panels, columns), path)


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


def graph_panels(table, row: Mapping, prediction: Mapping) -> dict[str, Image.Image]:
    """Draw the annotated and the predicted graph of a table row, see `draw_graphs`; return the pictures by what they
    show.

    The boxes are numbered, as in the graphs. Boxes that the model was given are in one picture; boxes that it found are
    in a picture of their own, without those of no relation that is drawn, which would only cover the image.
    """
    given = given_graph(prediction)
    truth = given or true_graph(row)
    picture = fitted(picture_of(table.decode_image(row)), PANEL_SIDE_PX)
    scale = PANEL_SIDE_PX / max(row["width"], row["height"])
    predicates = list(map(drawable, table.predicates))
    annotated = []
    for subject, object_, predicate in truth["relations"][:MAX_ARROWS].tolist():
        annotated.append((subject, object_, predicates[predicate], TEXT_COLOUR))
    boxes = np.asarray(prediction["boxes"])
    labels = np.asarray(prediction["labels"])
    shown = min(max(5, len(truth["relations"])), MAX_ARROWS)
    triplets = np.column_stack([np.asarray(prediction["pairs"]), np.asarray(prediction["predicates"])])[:shown]
    is_right = correct_triplets(triplets, boxes, labels, truth)
    scores = np.asarray(prediction["triplet_scores"])[:shown].tolist()
    predicted = []
    for triplet, right, score in zip(triplets.tolist(), is_right, scores, strict=True):
        subject, object_, predicate = triplet
        colour = CORRECT_COLOUR if right else WRONG_COLOUR
        predicted.append((subject, object_, f"{predicates[predicate]} {score:.2f}", colour))

    true_names = _numbered(truth["labels"], table.class_names)
    found_names = _numbered(labels, table.class_names)
    of_truth = truth["boxes"] * scale
    of_prediction = boxes * scale
    words = f"annotated, {len(annotated)} of {len(truth['relations'])} relations"
    annotated_graph = _graph_of(true_names, annotated, of_truth, words)
    words = f"predicted, {len(predicted)} of {len(prediction['pairs'])} relations"
    predicted_graph = _graph_of(found_names, predicted, of_prediction, words)
    if given:
        return {
            "boxes": _with_boxes(picture, of_truth, true_names),
            "annotated graph": annotated_graph,
            "predicted graph": predicted_graph,
        }
    return {
        "annotated boxes": _with_boxes(picture, of_truth, true_names),
        "annotated graph": annotated_graph,
        "predicted boxes": _with_boxes(picture, of_prediction, {i: found_names[i] for i in _ends(predicted)}),
        "predicted graph": predicted_graph,
    }


def _numbered(labels: np.ndarray, class_names: Sequence[str]) -> dict[int, str]:
    """Return the number and class of each object, such as "3 square", by the number."""
    names = {}
    for i, label in enumerate(labels.tolist()):
        names[i] = f"{i} {drawable(class_names[label], 16) if label >= 0 else 'no class'}"
    return names


def _ends(arrows: Sequence[tuple]) -> list[int]:
    """Return the numbers of the subjects and objects of relations."""
    return sorted({end for subject, object_, *_ in arrows for end in (subject, object_)})


def _with_boxes(picture: Image.Image, boxes: np.ndarray, names: Mapping[int, str]) -> Image.Image:
    """Return a copy of the picture with the boxes that have a name."""
    copy = picture.copy()
    draw_marks(copy, [Mark(boxes[i], CLASS_COLOURS[i % len(CLASS_COLOURS)], name) for i, name in names.items()])
    return copy


def _graph_of(names: Mapping[int, str], arrows: Sequence[tuple], boxes: np.ndarray, words: str) -> Image.Image:
    centres = torch.from_numpy((boxes[:, :2] + boxes[:, 2:]) / 2)
    return _draw_graph({i: names[i] for i in _ends(arrows)}, arrows, centres, PANEL_SIDE_PX, words, PANEL_LETTERS_PX)


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
    draw_arrows(draw, arrows, centres, size)
    scored = []
    for (subject, object_, words, colour), score in zip(arrows, scores, strict=True):
        scored.append((subject, object_, f"{words} {score:.2f}", colour))
    nodes = {}
    for i in _ends(arrows):
        nodes[i] = f"{i} {drawable(class_names[labels[i]])}"
    left_out = left_out_in_words(len(kept), count, relations, relation_score)
    letters = max(12, round(picture.height / 45))
    beside = _draw_graph(nodes, scored, centres, picture.height, left_out, letters)
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
    nodes: Mapping[int, str], arrows: Sequence[tuple], centres: Tensor, side: int, words_below: str, size: int
) -> Image.Image:
    """Draw the relations as a graph, `side` pixels high: objects on a circle, in the order of their angle around the
    middle of the image, so that neighbours in the image are neighbours in the graph. size: of the letters in pixels.
    """
    panel = Image.new("RGB", (side, side), BACKGROUND_COLOUR)
    draw = ImageDraw.Draw(panel)
    words_at = (side / 2, side - size if nodes else side / 2)
    draw.text(words_at, words_below, fill=TEXT_COLOUR, font=text_font(size), anchor="mm")
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
    draw_arrows(draw, arrows, positions, size, gap=1.6 * size)
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


def draw_arrows(
    draw: ImageDraw.ImageDraw,
    arrows: Sequence[tuple],
    positions: Mapping[int, Sequence[float]] | Tensor,
    size: int,
    gap: float = 0.0,
) -> None:
    """Draw arrows, and then their words, which no other arrow crosses.

    arrows: (subject, object, words, colour) of each. positions: x and y of the objects by number. size, gap: see
    `draw_arrow`.
    """
    places = []
    for subject, object_, _, colour in arrows:
        start, end = (tuple(map(float, positions[number])) for number in (subject, object_))
        places.append(draw_arrow(draw, start, end, colour, size, gap))
    for place, (_, _, words, _) in zip(places, arrows, strict=True):
        around = draw.textbbox(place, words, font=text_font(size), anchor="mm")
        draw.rectangle(around, fill="#FFFFFF")
        draw.text(place, words, fill=TEXT_COLOUR, font=text_font(size), anchor="mm")


def draw_arrow(
    draw: ImageDraw.ImageDraw,
    start: Sequence[float],
    end: Sequence[float],
    colour: str,
    size: int,
    gap: float = 0.0,
) -> tuple[float, float]:
    """Draw an arrow from `start` to a point `gap` pixels before `end`, both x and y in pixels. Return the place for
    words on it, where they do not meet those of an arrow in the opposite direction.

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
    draw.line((*begin, *tip), fill="#000000", width=5)
    draw.line((*begin, *tip), fill=colour, width=3)
    back = 0.8 * size
    half = 0.35 * size
    corners = []
    for sign in (-1, 1):
        corners.append((tip_x - back * x + sign * half * y, tip_y - back * y - sign * half * x))
    draw.polygon([tip, *corners], fill=colour, outline="#000000")
    begin_x, begin_y = begin
    words_x = begin_x + WORDS_AT * (tip_x - begin_x) + WORDS_ASIDE * aside_x
    words_y = begin_y + WORDS_AT * (tip_y - begin_y) + WORDS_ASIDE * aside_y
    return words_x, words_y
