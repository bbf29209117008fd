"""Pictures of what a predictor found: boxes, and of scene graphs arrows and the graph beside the image."""

import math
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from toolkit.evaluation.draw import (
    BACKGROUND,
    COLOURS,
    TEXT,
    draw_detections,
    drawable,
    picture_with_boxes,
    text_font,
)
from toolkit.use.prediction import Found, Predictor

MOST_ARROWS, LEAST_SCORE = 12, 0.05
INNER = 0.36  # radius of the circle of nodes, as a share of the panel's side


def draw_found(image: Tensor, found: Found, predictor: Predictor, path: Path) -> Path:
    """Writes a JPEG or PNG, by the suffix of `path`; its folder is made. Of a scene graph, the image with boxes and an
    arrow for each of its best relations, and the graph of these relations on its right."""
    if "pairs" not in found:
        return draw_detections(image, found, predictor.class_names, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = _best_part(found)
    names = [f"{number} {predictor.class_names[label]}" for number, label in enumerate(found["labels"].tolist())]
    numbered = found | {"labels": torch.arange(len(names))}
    picture = picture_with_boxes(image, {key: numbered[key] for key in ("boxes", "labels")}, names)
    draw_relations(picture, found, predictor.predicates, picture.width / image.shape[-1])
    panel = graph_panel(found, predictor, picture.height)
    both = Image.new("RGB", (picture.width + panel.width, picture.height), BACKGROUND)
    both.paste(picture, (0, 0))
    both.paste(panel, (picture.width, 0))
    both.save(path, quality=92)
    return path


def _best_part(found: Found) -> Found:
    """The relations that are drawn, and the objects, which keep their numbers up to the last that they name."""
    kept = (found["triplet_scores"] >= LEAST_SCORE).nonzero().flatten()[:MOST_ARROWS]
    return found | {key: found[key][kept] for key in ("pairs", "predicates", "triplet_scores")}


def draw_relations(picture: Image.Image, found: Found, predicates, scale: float = 1.0) -> None:
    """Draws an arrow from subject to object for each relation into the picture, its predicate on it.

    scale: pixels of the picture by those of the boxes.
    """
    draw, size = ImageDraw.Draw(picture), max(12, round(max(picture.size) / 60))
    centres = ((found["boxes"][:, :2] + found["boxes"][:, 2:]) / 2 * scale).tolist()
    rows = zip(found["pairs"].tolist(), found["predicates"].tolist(), strict=True)
    for (subject, other), predicate in rows:
        _arrow(draw, centres[subject], centres[other], drawable(predicates[predicate]), _colour(predicate), size)


def graph_panel(found: Found, predictor: Predictor, side: int) -> Image.Image:
    """The relations as a graph, `side` pixels high: objects on a circle, in the order of their angle around the middle
    of the image, so that neighbours there are neighbours here."""
    panel = Image.new("RGB", (side, side), BACKGROUND)
    draw, size = ImageDraw.Draw(panel), max(12, round(side / 45))
    used = found["pairs"].unique().tolist()
    centres = (found["boxes"][:, :2] + found["boxes"][:, 2:]) / 2
    middle = centres[used].mean(0) if used else centres.new_zeros(2)
    angle = {n: math.atan2(*(centres[n] - middle).flip(0).tolist()) for n in used}
    places = {}
    for place, number in enumerate(sorted(used, key=angle.get)):
        turn = 2 * math.pi * place / len(used) - math.pi
        places[number] = (side / 2 + INNER * side * math.cos(turn), side / 2 + INNER * side * math.sin(turn))
    columns = (found[key].tolist() for key in ("pairs", "predicates", "triplet_scores"))
    for (subject, other), predicate, score in zip(*columns, strict=True):
        words = f"{drawable(predictor.predicates[predicate])} {score:.2f}"
        _arrow(draw, places[subject], places[other], words, _colour(predicate), size, gap=1.6 * size)
    for number, place in places.items():
        words = f"{number} {drawable(predictor.class_names[int(found['labels'][number])])}"
        left, top, right, bottom = draw.textbbox(place, words, font=text_font(size), anchor="mm")
        box = (left - size / 2, top - size / 3, right + size / 2, bottom + size / 3)
        draw.rounded_rectangle(box, radius=size / 2, fill=COLOURS[number % len(COLOURS)], outline=TEXT)
        draw.text(place, words, fill="#000000", font=text_font(size), anchor="mm")
    if not used:
        draw.text((side / 2, side / 2), "no relations", fill=TEXT, font=text_font(size), anchor="mm")
    return panel


def _colour(predicate: int) -> str:
    return COLOURS[predicate % len(COLOURS)]


def _arrow(draw: ImageDraw.ImageDraw, start, end, words: str, colour: str, size: int, gap: float = 0.0) -> None:
    """From start to `gap` pixels before end, moved to its right so that the way back is seen too; words on it."""
    along = (end[0] - start[0], end[1] - start[1])
    length = math.hypot(*along)
    if length < 1:  # an object with itself, or two with one centre
        draw.ellipse((start[0] - size, start[1] - size, start[0] + size, start[1] + size), outline=colour, width=2)
        along, length = (1.0, 0.0), 1.0
    x, y = along[0] / length, along[1] / length
    aside = (-y * size / 4, x * size / 4)
    tip = (end[0] + aside[0] - gap * x, end[1] + aside[1] - gap * y)
    begin = (start[0] + aside[0], start[1] + aside[1])
    for fill, width in (("#000000", 4), (colour, 2)):
        draw.line((*begin, *tip), fill=fill, width=width)
    back, half = 0.8 * size, 0.35 * size
    corners = [(tip[0] - back * x + sign * half * y, tip[1] - back * y - sign * half * x) for sign in (-1, 1)]
    draw.polygon([tip, *corners], fill=colour, outline="#000000")
    middle = [a + 0.36 * (b - a) for a, b in zip(begin, tip, strict=True)]  # off the words of the way back
    draw.rectangle(draw.textbbox(middle, words, font=text_font(size), anchor="mm"), fill="#FFFFFF")
    draw.text(middle, words, fill=TEXT, font=text_font(size), anchor="mm")
