"""Makes the pictures of a report, images and crops with boxes and masks, embedded in the HTML as JPEG: best and worst
images, confident errors, probable annotation errors."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image

from toolkit.data.decoding import ImageError
from toolkit.evaluation.draw import Mark, draw_marks, fitted, picture_of
from toolkit.evaluation.matches import Matches
from toolkit.tools.report.detection_errors import ERROR_KINDS, ERROR_MEANINGS
from toolkit.tools.report.judgement import Judgement
from toolkit.tools.report.page import folded, paragraph, pictures, table, under
from toolkit.tools.report.suspects import SUSPICIONS, Suspect

PICTURE_SIDE_PX = 360  # longest side of a picture, in pixels
TRUTH_COLOUR, CORRECT_COLOUR, WRONG_COLOUR = "#F0E442", "#56B4E9", "#D55E00"  # Okabe & Ito
BUDGET_BYTES = 3_200_000  # bytes of all pictures of a page, before base64 makes a third more of them
WHOLE_IMAGES, OF_EACH_KIND, SUSPECTS, MAX_LISTED = 6, 4, 12, 200
MAX_NAMED = 5  # predictions of a whole image; names on more would hide it
LEGEND = (
    '<p class=dim><span class=sw style="background:#F0E442"></span> annotated (dashed), '
    '<span class=sw style="background:#56B4E9"></span> predicted and right, '
    '<span class=sw style="background:#D55E00"></span> predicted and wrong. '
    "A picture links to its image.</p>"
)
LEGEND_OF_IMAGES = LEGEND + paragraph(
    f"Missed boxes are named, and of more than {MAX_NAMED} predictions in an image only the wrong ones.",
    "dim",
)


class PictureMaker:
    """Makes the pictures of one page as HTML until a budget of bytes is used up.

    Images that cannot be read, and pictures beyond the budget, are left out and counted, see `notes`.

    Args:
        table: the data table with the images.
        folder: folder of the page; links to image files are relative to it.
        budget: maximum number of bytes of all pictures together.
    """

    def __init__(self, table, folder: Path, budget: int = BUDGET_BYTES):
        self.table = table
        self.folder = Path(folder)
        self.left = budget
        self.unreadable = self.too_many = 0

    def of(self, image: int, marks: Sequence[Mark], caption: str, focus: Sequence[float] | None = None) -> str:
        """Return an image with drawn boxes as an HTML `<figure>`; "" if it is left out.

        Args:
            image: row of the image in the table.
            marks: the boxes to draw.
            focus: box xyxy to which the picture is cropped, with some surroundings; None: the whole image.
        """
        if self.left <= 0:
            self.too_many += 1
            return ""
        row = self.table.row(image)
        try:
            pixels = self.table.decode_image(row)
        except (ImageError, OSError):
            self.unreadable += 1
            return ""
        return self.figure(
            drawn(picture_of(pixels), marks, focus),
            caption,
            self.link(row),
        )

    def figure(self, picture: Image.Image, caption: str, link: str = "") -> str:
        """Return a picture as an HTML `<figure>`, and subtract its bytes from the budget. link: address it links to."""
        stream = io.BytesIO()
        picture.convert("RGB").save(stream, "JPEG", quality=80, optimize=True)
        self.left -= len(stream.getvalue())
        source = base64.b64encode(stream.getvalue()).decode()
        size = f'width="{picture.width}" height="{picture.height}"'
        alt = escape(caption, quote=True)
        shown = f'<img src="data:image/jpeg;base64,{source}" {size} alt="{alt}">'
        shown = f'<a href="{link}">{shown}</a>' if link else shown
        return f"<figure class=picture>{shown}<figcaption>{escape(caption)}</figcaption></figure>"

    def link(self, row) -> str:
        """Return the address of the image file of a row, relative to the folder of the page; "" if the image is not a
        file, but embedded in the data or in an archive."""
        if self.table.image_root is None:
            return ""
        path = self.table.image_source(row)
        if not isinstance(path, Path) or not path.is_file():
            return ""
        try:
            relative = os.path.relpath(os.path.realpath(path), os.path.realpath(self.folder))
        except ValueError:  # another drive of Windows
            return escape(Path(os.path.realpath(path)).as_uri(), quote=True)
        return quote(Path(relative).as_posix())

    def notes(self) -> str:
        """Return HTML that says how many pictures are left out, and why; "" if none is."""
        notes = {"pictures are left out: their images cannot be read from here.": self.unreadable}
        notes["more pictures are left out to keep the page small."] = self.too_many
        return "".join(paragraph(f"{count} {words}", "dim") for words, count in notes.items() if count)


def drawn(
    picture: Image.Image, marks: Sequence[Mark], focus: Sequence[float] | None = None, side: int = PICTURE_SIDE_PX
) -> Image.Image:
    """Return a picture with drawn boxes, whose longer side has `side` pixels.

    focus: box xyxy to which the picture is cropped, with some surroundings; None: the whole picture.
    """
    part = (0, 0, *picture.size) if focus is None else _around(focus, picture.size)
    resized = fitted(picture.crop(part), side)
    scale = side / max(part[2] - part[0], part[3] - part[1])
    draw_marks(resized, marks, scale=scale, corner=part[:2], size=13)
    return resized


def _around(box: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the box enlarged to twice its size, at least 64 pixels wide, inside the image."""
    x1, y1, x2, y2 = np.nan_to_num(np.asarray(box, dtype=float)).tolist()
    half = max(abs(x2 - x1), abs(y2 - y1), 32.0)
    cx = min(max((x1 + x2) / 2, 0), size[0])
    cy = min(max((y1 + y2) / 2, 0), size[1])
    left = max(0, int(cx - half))
    top = max(0, int(cy - half))
    right = min(size[0], int(cx + half))
    bottom = min(size[1], int(cy + half))
    return left, top, max(left + 1, right), max(top + 1, bottom)


def images(judged: Judgement, maker: PictureMaker) -> str:
    """Return HTML with the images of the lowest and of the highest F1."""
    counts = judged.image_counts
    f1 = judged.image_f1
    with_boxes = np.flatnonzero(counts.sum(axis=1) > 0)
    mistakes = counts[:, 1] + counts[:, 2]
    worst = with_boxes[np.lexsort((-mistakes[with_boxes], f1[with_boxes]))]
    worst = worst[mistakes[worst] > 0][:WHOLE_IMAGES]
    best = with_boxes[np.lexsort((-counts[with_boxes, 0], -f1[with_boxes]))]
    best = best[~np.isin(best, worst)][:WHOLE_IMAGES]
    chosen = {"Worst images": worst.tolist(), "Best images": best.tolist()}
    parts = {name: [whole_image(judged, maker, i) for i in rows] for name, rows in chosen.items()}
    return _with_legend(parts, LEGEND_OF_IMAGES)


def hard_negatives(judged: Judgement, maker: PictureMaker) -> str:
    """Return HTML with the images without objects in which the detector is confident of some, as pictures and a list;
    "" without any."""
    chosen = judged.hard_negatives
    if not chosen:
        return ""
    text = (
        f"In {len(chosen)} of {int((np.diff(judged.matches.truth.offsets) == 0).sum())} images without an annotated "
        "box, something is found above the threshold. More such images in training make these mistakes rarer; if "
        "there is an object after all, annotate it. report.json has all of them."
    )
    rows = [(judged.table.image_name(image), judged.image_counts[image, 1]) for image in chosen[:MAX_LISTED]]
    shown = pictures([whole_image(judged, maker, image) for image in chosen[:WHOLE_IMAGES]])
    listed = folded("The list", table(["image", "predictions"], rows))
    return under("Images without objects", paragraph(text, "dim") + shown + listed)


def _with_legend(parts: Mapping[str, Sequence[str]], legend: str = LEGEND) -> str:
    """Return pictures by heading, below a legend; "" without pictures."""
    shown = "".join(under(heading, pictures(of)) for heading, of in parts.items())
    return legend + shown if shown else ""


def whole_image(judged: Judgement, maker: PictureMaker, image: int, name: str = "") -> str:
    """Return an image with its annotated boxes and all predictions above the threshold, as an HTML `<figure>`.

    Args:
        image: row of the image in the table.
        name: text before the caption, such as the name of the detector.
    """
    right, wrong, missed = judged.image_counts[image].tolist()
    marks = marks_of_image(judged.matches, judged.threshold, image)
    counted = f"{right} right, {wrong} wrong, {missed} missed"
    caption = f"{name}{judged.table.image_name(image)}: F1 {judged.image_f1[image]:.2f}; {counted}"
    return maker.of(image, marks, caption)


def marks_of_image(m: Matches, threshold: float, image: int) -> list[Mark]:
    """Return marks of the annotated boxes of an image, of which the missed ones are named, and of all its predictions
    above the threshold. image: row of the image in the table."""
    predicted = m.found.of_image(image)
    rows = np.arange(predicted.start, predicted.stop)
    rows = rows[(m.found.scores[rows] > threshold) & m.counts[rows]]
    found = set(m.at_half[rows[m.right[rows]]].tolist())
    annotated = m.truth.of_image(image)
    marks = []
    for row in range(annotated.start, annotated.stop):
        if not m.crowd[row]:
            mark = _annotated(m, row)
            marks.append(replace(mark, text="") if row in found else mark)
    for row in rows[::-1].tolist():
        mark = _predicted(m, row, CORRECT_COLOUR if m.right[row] else WRONG_COLOUR)
        is_named = len(rows) <= MAX_NAMED or not m.right[row]
        marks.append(mark if is_named else replace(mark, text=""))
    return marks


def mistakes(judged: Judgement, maker: PictureMaker) -> str:
    """Return HTML with wrong predictions of each kind, those with the highest scores, and the largest missed boxes."""
    m = judged.matches
    parts = {}
    for kind in ERROR_KINDS[:-1]:
        rows = judged.errors.of(kind)
        rows = rows[np.argsort(-m.found.scores[rows], kind="stable")][:OF_EACH_KIND]
        shown = [_mistake(judged, maker, row, kind) for row in rows.tolist()]
        parts[f"{kind.capitalize()}: {ERROR_MEANINGS[kind]}"] = shown
    missed = np.flatnonzero(judged.errors.missed)
    missed = missed[np.argsort(-m.truth.area[missed], kind="stable")][:OF_EACH_KIND]
    missed_pictures = [_missed(judged, maker, row) for row in missed.tolist()]
    parts[f"Missed: {ERROR_MEANINGS['missed']} (the largest)"] = missed_pictures
    return _with_legend(parts)


def _mistake(judged: Judgement, maker: PictureMaker, row: int, kind: str) -> str:
    m = judged.matches
    image = int(judged.matches.found.image_index[row])
    near = (m.det == row) & ~m.crowd[m.gt]
    marks = [*(_annotated(m, gt) for gt in m.gt[near]), _predicted(m, row, WRONG_COLOUR)]
    # A prediction at a wrong place belongs to an object of its class, though it may overlap another one more.
    belongs = near & m.same_class if kind == "localisation" else near
    pairs = np.flatnonzero(belongs)
    overlap = "overlaps no box"
    if len(pairs):
        nearest = pairs[m.iou[pairs].argmax()]
        overlap = f"IoU {m.iou[nearest]:.2f} with {m.class_names[m.truth.labels[m.gt[nearest]]]}"
    name = m.class_names[m.found.labels[row]]
    caption = f"{judged.table.image_name(image)}: {name}, score {m.found.scores[row]:.2f}, {overlap}"
    return maker.of(image, marks, caption, focus=m.found.xyxy[row])


def _missed(judged: Judgement, maker: PictureMaker, row: int) -> str:
    image = int(judged.matches.truth.image_index[row])
    mark = _annotated(judged.matches, row)
    return maker.of(image, [mark], f"{judged.table.image_name(image)}: {mark.text}", focus=mark.box)


def annotation_mistakes(judged: Judgement, maker: PictureMaker) -> str:
    """Return HTML with the boxes that may be annotated wrongly, as numbers, pictures and a list; "" without any."""
    if not judged.suspects:
        return ""
    by_kind = {kind: [suspect for suspect in judged.suspects if suspect.kind == kind] for kind in SUSPICIONS}
    rows = [(kind, len(by_kind[kind]), words) for kind, words in SUSPICIONS.items()]
    chosen = [suspect for some in by_kind.values() for suspect in some[: SUSPECTS // 4]]
    shown = pictures([_suspect(judged, maker, suspect) for suspect in chosen])
    listed = [
        (judged.table.image_name(s.image), s.kind, f"{s.strength:.2f}", *_what(judged.matches, s))
        for s in judged.suspects[:MAX_LISTED]
    ]
    head = ["image", "kind", "strength", "predicted", "annotated"]
    text = (
        "Where a detector that is mostly right disagrees with the annotation, either may be wrong: look before you "
        f"change a box. The {min(MAX_LISTED, len(judged.suspects))} strongest of {len(judged.suspects)} are listed; "
        "report.json has all of them, with their boxes."
    )
    return (
        paragraph(text, "dim")
        + table(["kind", "boxes", "what it is"], rows, text=(0, 2))
        + LEGEND
        + shown
        + folded("The list", table(head, listed, text=(0, 1, 3, 4)))
    )


def _marks(m: Matches, s: Suspect) -> tuple[list[Mark], list[Mark]]:
    """Return marks of the prediction and of the annotated box, each an empty list if there is none."""
    predicted = [_predicted(m, s.det, CORRECT_COLOUR)] if s.det >= 0 else []
    annotated = [_annotated(m, s.gt)] if s.gt >= 0 else []
    return predicted, annotated


def _what(m: Matches, s: Suspect) -> tuple[str, str]:
    predicted, annotated = (marks[0].text if marks else "–" for marks in _marks(m, s))
    return predicted, annotated


def _suspect(judged: Judgement, maker: PictureMaker, s: Suspect) -> str:
    predicted, annotated = _marks(judged.matches, s)
    names = " predicted {}, annotated {}".format(*_what(judged.matches, s))
    caption = f"{judged.table.image_name(s.image)}: {s.kind};{names}"
    return maker.of(
        s.image,
        annotated + predicted,
        caption,
        focus=(predicted or annotated)[0].box,
    )


def _predicted(m: Matches, row: int, colour: str) -> Mark:
    return Mark(
        m.found.xyxy[row],
        colour,
        f"{m.class_names[m.found.labels[row]]} {m.found.scores[row]:.2f}",
        mask=m.found.extra["masks"][row] if m.by_mask else None,
    )


def _annotated(m: Matches, row: int) -> Mark:
    return Mark(
        m.truth.xyxy[row],
        TRUTH_COLOUR,
        m.class_names[m.truth.labels[row]],
        dashed=True,
        mask=m.truth.extra["masks"][row] if m.by_mask else None,
    )
