"""Small pictures inside the page: images and crops with boxes, as JPEG in the HTML itself."""

import base64
import io
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image

from toolkit.data.decoding import ImageError, decode_image
from toolkit.evaluation.draw import Mark, draw_marks, fitted, picture_of

SIDE = 360  # longest side of a picture, in pixels
TRUTH, RIGHT, WRONG = "#F0E442", "#56B4E9", "#D55E00"  # Okabe & Ito
BUDGET = 3_200_000  # bytes of all pictures of a page, before base64 makes a third more of them


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
        return self.figure(_drawn(picture_of(pixels), marks, focus), caption, self.link(row))

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
    part = (0, 0, *picture.size) if focus is None else _around(focus, picture.size)
    drawn = fitted(picture.crop(part), SIDE)
    draw_marks(drawn, marks, scale=SIDE / max(part[2] - part[0], part[3] - part[1]), corner=part[:2], size=13)
    return drawn


def _around(box: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box with as much again around it, at least 64 pixels wide, inside the image."""
    x1, y1, x2, y2 = np.nan_to_num(np.asarray(box, dtype=float)).tolist()
    half = max(abs(x2 - x1), abs(y2 - y1), 32.0)
    cx, cy = min(max((x1 + x2) / 2, 0), size[0]), min(max((y1 + y2) / 2, 0), size[1])
    left, top = max(0, int(cx - half)), max(0, int(cy - half))
    return left, top, max(left + 1, min(size[0], int(cx + half))), max(top + 1, min(size[1], int(cy + half)))
