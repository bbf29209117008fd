"""Small pictures inside the page: images and parts of images with boxes, as JPEG in the HTML itself."""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image, ImageDraw

from toolkit.data.decoding import ImageError, decode_image
from toolkit.evaluation.draw import text_font

SIDE = 360  # longest side of a picture, in pixels
TRUTH, RIGHT, WRONG = "#F0E442", "#56B4E9", "#D55E00"  # Okabe & Ito
BUDGET = 3_200_000  # bytes of all pictures of a page, before base64 makes a third more of them


@dataclass
class Mark:
    """A box (xyxy, pixels of the image) with a colour and, where it is not empty, a few letters above it."""

    box: Sequence[float]
    colour: str
    text: str = ""
    dashed: bool = False


class Pictures:
    """Makes the pictures of one page until their budget is spent; what cannot be read is left out and counted.

    folder: of the page, which links to the images themselves start from.
    """

    def __init__(self, table, folder: Path, budget: int = BUDGET):
        self.table, self.folder, self.left = table, Path(folder), budget
        self.unreadable = self.too_many = 0

    def of(self, image: int, marks: Sequence[Mark], caption: str, focus: Sequence[float] | None = None) -> str:
        """A `<figure>` of a row of the table; focus: a box, of which with its surroundings alone is shown."""
        if self.left <= 0:
            self.too_many += 1
            return ""
        row = self.table.row(image)
        try:
            pixels = decode_image(self.table.image_source(row))
        except (ImageError, OSError):
            self.unreadable += 1
            return ""
        picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        return self.figure(_drawn(picture, marks, focus), caption, self.link(row))

    def figure(self, picture: Image.Image, caption: str, link: str = "") -> str:
        """Any picture as a `<figure>`; its bytes count."""
        stream = io.BytesIO()
        picture.convert("RGB").save(stream, "JPEG", quality=80, optimize=True)
        self.left -= len(stream.getvalue())
        source = base64.b64encode(stream.getvalue()).decode()
        shown = (f'<img src="data:image/jpeg;base64,{source}" width="{picture.width}" height="{picture.height}" '
                 f'alt="{escape(caption, quote=True)}">')  # fmt: skip
        shown = f'<a href="{link}">{shown}</a>' if link else shown
        return f"<figure class=picture>{shown}<figcaption>{escape(caption)}</figcaption></figure>"

    def link(self, row) -> str:
        """To the image file, from the folder of the page; empty where the image lies in a table or an archive."""
        if self.table.image_root is None:
            return ""
        path = self.table.image_source(row)
        if not isinstance(path, Path) or not path.is_file():
            return ""
        try:
            relative = os.path.relpath(path.resolve(), self.folder.resolve())
        except ValueError:  # another drive of Windows
            return escape(path.resolve().as_uri(), quote=True)
        return quote(Path(relative).as_posix())

    def notes(self) -> list[str]:
        notes = []
        if self.unreadable:
            notes.append(f"{self.unreadable} pictures are left out: their images cannot be read from here.")
        if self.too_many:
            notes.append(f"{self.too_many} more pictures are left out to keep the page small.")
        return notes


def _drawn(picture: Image.Image, marks: Sequence[Mark], focus: Sequence[float] | None) -> Image.Image:
    left, top = 0.0, 0.0
    if focus is not None:
        left, top, right, bottom = _around(focus, picture.size)
        picture = picture.crop((left, top, right, bottom))
    scale = SIDE / max(picture.size)
    picture = picture.resize([max(1, round(side * scale)) for side in picture.size], Image.Resampling.BICUBIC)
    draw, font = ImageDraw.Draw(picture), text_font(13)
    for mark in marks:
        box = (np.nan_to_num(np.asarray(mark.box, dtype=float)) - [left, top, left, top]) * scale
        x1, x2 = np.clip(sorted(box[[0, 2]]), -4, picture.width + 4).tolist()
        y1, y2 = np.clip(sorted(box[[1, 3]]), -4, picture.height + 4).tolist()
        if mark.dashed:
            _dashed(draw, (x1, y1, x2, y2), mark.colour)
        else:
            draw.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline="#000000", width=1)
            draw.rectangle((x1, y1, x2, y2), outline=mark.colour, width=3)
    for mark in marks:  # after all boxes: no line crosses a text
        if mark.text:
            box = (np.nan_to_num(np.asarray(mark.box, dtype=float)) - [left, top, left, top]) * scale
            width = draw.textlength(mark.text, font=font) + 6
            x = min(max(0.0, min(box[0], box[2])), max(0.0, picture.width - width))
            y = min(box[1], box[3]) - 17 if not mark.dashed else max(box[1], box[3]) + 1
            y = min(max(0.0, y), max(0.0, picture.height - 17))
            draw.rectangle((x, y, x + width, y + 17), fill=mark.colour)
            draw.text((x + 3, y + 8), mark.text, fill="#FFFFFF" if mark.colour == WRONG else "#000000", font=font,
                      anchor="lm")  # fmt: skip
    return picture


def _around(box: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box with as much again around it, at least 64 pixels wide, inside the image."""
    x1, y1, x2, y2 = np.nan_to_num(np.asarray(box, dtype=float)).tolist()
    half = max(abs(x2 - x1), abs(y2 - y1), 32.0)
    cx, cy = min(max((x1 + x2) / 2, 0), size[0]), min(max((y1 + y2) / 2, 0), size[1])
    left, top = max(0, int(cx - half)), max(0, int(cy - half))
    return left, top, max(left + 1, min(size[0], int(cx + half))), max(top + 1, min(size[1], int(cy + half)))


def _dashed(draw: ImageDraw.ImageDraw, box: tuple, colour: str, dash: int = 7) -> None:
    x1, y1, x2, y2 = box
    for colour_, width in (("#000000", 5), (colour, 3)):
        for a in np.arange(x1, x2, 2 * dash).tolist():
            for y in (y1, y2):
                draw.line((a, y, min(a + dash, x2), y), fill=colour_, width=width)
        for b in np.arange(y1, y2, 2 * dash).tolist():
            for x in (x1, x2):
                draw.line((x, b, x, min(b + dash, y2)), fill=colour_, width=width)
