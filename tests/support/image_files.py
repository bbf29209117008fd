"""Image files that are turned, or that Pillow cannot write, for the tests of decoding."""

import io
import struct
import zlib

import numpy as np
from PIL import Image
from places import ASSETS

IMAGES = ASSETS / "dirty" / "images"
WIDTH, HEIGHT, BITS, COMPRESSION, COLOURS, SAMPLES, ORIENTATION = 256, 257, 258, 259, 262, 277, 274
RGB = 2
DEFLATE = 8
SIZES = {"H": 3, "L": 4, "Q": 16}  # TIFF's numbers of types of numbers
TURNED = (
    "JPEG exif",
    "JPEG exif behind xmp",
    "JPEG xmp",
    "JPEG both",
    "PNG exif",
    "WEBP exif",
    "WEBP xmp",
    "TIFF exif",
)


def encode(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def ramp(width=40, height=30):
    """A picture that becomes lighter from pixel to pixel."""
    levels = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    return Image.fromarray(levels.astype(np.uint8))


def exif_of(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def xmp_of(orientation):
    return f'<x xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{orientation}"/>'.encode()


def turned_file(picture, kind, orientation):
    """A file of one of the kinds of `TURNED`, which say where the orientation stands."""
    format, _, place = kind.partition(" ")
    options = {}
    if place != "xmp":
        options["exif"] = exif_of(orientation)
    if place == "xmp":
        options["xmp"] = xmp_of(orientation)
    if place == "both":
        options["xmp"] = xmp_of(9 - orientation)
    data = encode(picture, format, **options)
    return xmp_before_exif(data) if "behind" in place else data


def xmp_before_exif(data):
    """A JPEG with a segment of XMP, which says no orientation, in front of all others: EXIF is not the first then."""
    content = b"http://ns.adobe.com/xap/1.0/\0<x/>"
    length = (len(content) + 2).to_bytes(2, "big")
    return data[:2] + b"\xff\xe1" + length + content + data[2:]


def colour_file(values, format):
    """A file of 16-bit colours (H, W, 3): "PNG", or the byte order of a TIFF file and, if it is packed, "deflate"."""
    height, width = values.shape[:2]
    if format == "PNG":
        return deep_png(values)
    order = format[0]
    is_packed = format.endswith("deflate")
    pixels = values.astype(f"{order}u2").tobytes()
    pixels = zlib.compress(pixels) if is_packed else pixels
    tags = {
        WIDTH: ("L", [width]),
        HEIGHT: ("L", [height]),
        BITS: ("H", [16] * 3),
        COMPRESSION: ("H", [DEFLATE if is_packed else 1]),
        COLOURS: ("H", [RGB]),
        SAMPLES: ("H", [3]),
        273: ("L", [8]),  # of the strip: its place, rows and bytes
        278: ("L", [height]),
        279: ("L", [len(pixels)]),
    }
    return with_tags(
        bytes(8) + pixels + bytes(len(pixels) % 2),
        tags,
        order,
    )


def deep_png(values):
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in chunks.items():
        data += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return data


def tiled_tiff(pixels, side, order="<", big=False, compressed=True):
    """A TIFF file of square tiles. pixels: uint8 (H, W, 3)."""
    height, width = pixels.shape[:2]
    body = bytes(16 if big else 8)
    offsets = []
    lengths = []
    for top in range(0, height, side):
        for left in range(0, width, side):
            tile = np.zeros((side, side, 3), np.uint8)
            part = pixels[top : top + side, left : left + side]
            tile[: part.shape[0], : part.shape[1]] = part
            data = zlib.compress(tile.tobytes()) if compressed else tile.tobytes()
            offsets.append(len(body))
            lengths.append(len(data))
            body += data + bytes(len(data) % 2)
    tags = {
        WIDTH: ("L", [width]),
        HEIGHT: ("L", [height]),
        BITS: ("H", [8, 8, 8]),
        COMPRESSION: ("H", [DEFLATE if compressed else 1]),
        COLOURS: ("H", [RGB]),
        SAMPLES: ("H", [3]),
        322: ("H", [side]),  # of the tiles: their width, height, places and bytes
        323: ("H", [side]),
        324: ("Q" if big else "L", offsets),
        325: ("L", lengths),
    }
    return with_tags(body, tags, order, big)


def with_tags(body, tags, order="<", big=False):
    """A TIFF file. body: begins with room for the header; tags: (type, numbers) by tag."""
    number = order + ("Q" if big else "L")
    inline = struct.calcsize(number)
    table = struct.pack(order + ("Q" if big else "H"), len(tags))
    values_at = len(body) + len(table) + len(tags) * (4 + 2 * inline) + inline
    values = b""
    for tag, (kind, numbers) in sorted(tags.items()):
        data = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
        table += struct.pack(order + "HH", tag, SIZES[kind]) + struct.pack(number, len(numbers))
        if len(data) <= inline:
            table += data.ljust(inline, b"\0")
        else:
            table += struct.pack(number, values_at + len(values))
            values += data + bytes(len(data) % 2)
    header = struct.pack(order + "HHHQ", 43, 8, 0, len(body)) if big else struct.pack(order + "HL", 42, len(body))
    start = (b"II" if order == "<" else b"MM") + header
    return start + body[len(start) :] + table + bytes(inline) + values
