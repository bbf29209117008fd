"""Pictures of what a predictor found: boxes, and arrows for relations."""

from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from toolkit.evaluation.draw import COLOURS, draw_detections, picture_with_boxes, text_font
from toolkit.use.prediction import Found, Predictor

MOST_ARROWS, LEAST_SCORE = 12, 0.05


def draw_found(image: Tensor, found: Found, predictor: Predictor, path: Path) -> Path:
    """Writes a JPEG or PNG, by the suffix of `path`; its folder is made."""
    if "pairs" not in found:
        return draw_detections(image, found, predictor.class_names, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = picture_with_boxes(image, found, predictor.class_names)
    draw_relations(picture, found, predictor.predicates, picture.width / image.shape[-1]).save(path, quality=92)
    return path


def draw_relations(picture: Image.Image, found: Found, predicates, scale: float = 1.0) -> Image.Image:
    """The picture with an arrow from subject to object for each of the best relations, its predicate on it.

    scale: pixels of the picture by those of the boxes.
    """
    draw, size = ImageDraw.Draw(picture), max(12, round(max(picture.size) / 60))
    centres = ((found["boxes"][:, :2] + found["boxes"][:, 2:]) / 2 * scale).tolist()
    rows = zip(*(found[key][:MOST_ARROWS].tolist() for key in ("pairs", "predicates", "triplet_scores")), strict=True)
    for (subject, other), predicate, score in rows:
        if score < LEAST_SCORE:
            continue
        colour = COLOURS[predicate % len(COLOURS)]
        start, end = centres[subject], centres[other]
        draw.line((*start, *end), fill="#000000", width=4)
        draw.line((*start, *end), fill=colour, width=2)
        radius = size / 3
        draw.ellipse((end[0] - radius, end[1] - radius, end[0] + radius, end[1] + radius), fill=colour)
        middle = [(a + 2 * b) / 3 for a, b in zip(start, end, strict=True)]  # off the word of the way back
        font = text_font(size)
        box = draw.textbbox(middle, predicates[predicate], font=font, anchor="mm")
        draw.rectangle(box, fill="#FFFFFF")
        draw.text(middle, predicates[predicate], fill="#222222", font=font, anchor="mm")
    return picture
