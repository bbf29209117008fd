"""Values of images with 16 bits, and their scaling to 8 bits by the value that is to become white.

Pillow keeps all bits of grey pixels, but only the upper 8 of colours. The lower 8 are what it reads if the order of the
two bytes is said to be the other one.
"""

import io
import sys

import numpy as np
from PIL import Image, ImageOps

FULL_RANGE = 65535
BITS = 258  # tags of a TIFF file
PLANES = 284
GREY_NOTE = "16-bit grey scaled to 8 bits"
COLOUR_NOTE = "16-bit colours scaled to 8 bits"
NOTES = (GREY_NOTE, COLOUR_NOTE)
DEEP_COLOURS = ("RGB;16", "RGBA;16", "RGBX;16", "LA;16")  # Pillow's names of pixels, without the order of bytes
OTHER_ORDER = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}


class UnreadableColours(Exception):
    """Error for 16-bit colours that cannot be read; the text says why."""


def note_of(image: Image.Image) -> str | None:
    """Return the note on the 16-bit values of an opened image; None if it has 8 bits, or says its own white.

    The header of a PGM or PPM file has the largest value, by which Pillow scales. Only while a file is not loaded yet,
    its colours are known to have 16 bits.
    """
    if _says_its_white(image):
        return None
    if image.mode.startswith("I"):  # "I;16", "I;16B", or "I" holding 16 bits
        return GREY_NOTE
    return COLOUR_NOTE if ";16" in _stored_as(image) else None


def check_readable(image: Image.Image) -> None:
    """Raise UnreadableColours for uncompressed 16-bit colours in separate planes: Pillow takes the wrong bytes."""
    if image.format != "TIFF" or not _stored_as(image):
        return
    bits = image.tag_v2.get(BITS, (1,))
    if image.tag_v2.get(PLANES, 1) != 1 and max(bits) > 8 and len(_stored_as(image)) == 1:
        kind = "uncompressed 16-bit colours in separate planes"
        raise UnreadableColours(f"{kind}, which are not read; write them as plain RGB")


def grey_values(image: Image.Image) -> np.ndarray:
    """Return (H, W, 1) int64, the values of a grey image with more than 8 bits."""
    return np.asarray(image).astype(np.int64)[..., None]


def colour_values(image: Image.Image) -> np.ndarray:
    """Return the upright values of a file with 16-bit colours, (H, W, 3) int64, or (H, W, 1) of grey with alpha.

    image: opened, and not loaded yet.

    Raises UnreadableColours for colours that are not red, green and blue, that are in separate planes, or multiplied
    with their alpha; and what Pillow raises for a damaged file.
    """
    stored = _stored_as(image)
    has_planes = image.format == "TIFF" and image.tag_v2.get(PLANES, 1) != 1
    if has_planes or not stored.startswith(DEEP_COLOURS):
        kind = "separate planes" if has_planes else f"pixels {stored}"
        raise UnreadableColours(f"16-bit colours in {kind}, which data.white cannot scale; write them as plain RGB")
    at = image.fp.tell()  # from where Pillow would go on
    image.fp.seek(0)
    data = image.fp.read()
    image.fp.seek(at)
    if stored.startswith("LA"):
        # Four bytes a pixel, read as they are: upper and lower of the grey value, then those of its alpha.
        of_bytes = _read_as(data, "RGBA")
        return of_bytes[..., :1] * 256 + of_bytes[..., 1:2]
    swapped = stored[:-1] + OTHER_ORDER[stored[-1]]
    upper = _read_as(data, stored)
    lower = _read_as(data, swapped)
    return (upper * 256 + lower)[..., :3]


def to_8_bits(values: np.ndarray, white: int | None) -> np.ndarray:
    """Scale values (H, W, 1 or 3) to (H, W, 3) uint8: 0 stays 0; `white` and whatever is above becomes 255.

    white: None: `FULL_RANGE`.
    """
    largest = white or FULL_RANGE
    scaled = (values * 255 + largest // 2) // largest
    pixels = scaled.clip(max=255).astype(np.uint8)
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


def _says_its_white(image: Image.Image) -> bool:
    return any(tile.codec_name in ("ppm", "ppm_plain") for tile in getattr(image, "tile", ()))


def _stored_as(image: Image.Image) -> str:
    """Return Pillow's name of the pixels in the file of an image that is not loaded yet; "" if it is not known."""
    for tile in getattr(image, "tile", ()):
        args = tile.args
        name = args[0] if isinstance(args, tuple) and args else args
        if isinstance(name, str):
            return name
    return ""


def _read_as(data: bytes, stored: str) -> np.ndarray:
    """Return (H, W, C) int64, the upright pixels of a file that are read as if they were stored like this."""
    with Image.open(io.BytesIO(data)) as image:
        tiles = []
        for tile in image.tile:
            args = (stored, *tile.args[1:]) if isinstance(tile.args, tuple) else stored
            tiles.append(tile._replace(args=args))
        image.tile = tiles
        image.load()
        return np.asarray(ImageOps.exif_transpose(image)).astype(np.int64)
