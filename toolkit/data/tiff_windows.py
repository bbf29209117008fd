"""Windows of TIFF files, decoded without the rest of the picture.

A TIFF file stores its pixels in blocks, strips of rows or tiles, each of which is compressed alone. libtiff decodes
single blocks, but Pillow asks it for the whole picture. So the blocks that a window touches are copied, still
compressed, into a small TIFF file in memory, which Pillow decodes (TIFF 6.0, sections 2, 3 and 15; BigTIFF of libtiff).
"""

import io
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torch import Tensor

from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.data.decoding import EXTENSIONS, XMP_ORIENTATION, ImageError, decode_image, open_image_file

MOST_OF_FILE = 0.5  # share of a file's blocks from which the whole file is decoded, and can be kept
MOST_ENTRY_BYTES = 2**26  # of the values of one tag
WIDTH, HEIGHT, COMPRESSION, ORIENTATION, PLANES, XMP = 256, 257, 259, 274, 284, 700
STRIP_OFFSETS, ROWS_PER_STRIP, STRIP_BYTES = 273, 278, 279
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_BYTES = 322, 323, 324, 325
# Beside those above, the tags that decide how blocks become pixels: bits, colours, fill order, samples, predictor,
# colour map, inks, extra samples, sample format, JPEG tables, and the subsampling and positions of YCbCr.
DECODING_TAGS = (258, 262, 266, 277, 317, 320, 332, 334, 338, 339, 347, 529, 530, 531, 532)
# None, LZW, JPEG, Deflate (two numbers), PackBits and Zstandard, whose blocks do not depend on each other.
COMPRESSIONS = (1, 5, 7, 8, 32946, 32773, 50000)
SHORT, LONG = 3, 4
TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8, 17: 8, 18: 8}
NUMBER_FORMATS = {1: "B", SHORT: "H", LONG: "L", 16: "Q"}
ONLY_IN_BIG = (16, 17, 18)  # types of 8 bytes, which a plain TIFF file does not have


class Entry(NamedTuple):
    """A tag of a TIFF file: the code of its type, the number of its values, and their bytes in the file's order."""

    type: int
    count: int
    data: bytes


class Blocks(NamedTuple):
    """The grid of blocks of a TIFF file: their height and width in pixels, and of each one, row by row, its place in
    the file and its length in bytes."""

    hw: tuple[int, int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    is_tiled: bool


class _Unsupported(Exception):
    """The file has to be decoded as a whole, which also says what is wrong with a damaged one."""


def decode_tiff_window(
    path: Path,
    window_xyxy: Sequence[int],
    size_hw: tuple[int, int],
    max_pixels: int = MAX_IMAGE_PIXELS,
    white: int | None = None,
) -> Tensor | None:
    """Decode a window of a TIFF file, uint8 (3, h, w); its pixels are those of `decode_image`.

    Args:
        path: of the file.
        window_xyxy: left, top, right and bottom in whole pixels, within the picture.
        size_hw: height and width that the picture should have.
        max_pixels, white: as for `decode_image`.

    Returns None if the picture has to be decoded as a whole: another format, another size, a turned picture, samples in
    separate planes, an uncommon compression, a damaged file, or a window that touches more than half of the blocks.
    """
    if path.suffix.lower() not in EXTENSIONS["TIFF"] or size_hw[0] * size_hw[1] > max_pixels:
        return None
    with suppress(_Unsupported, ImageError, OSError, struct.error):
        with open_image_file(path, max_pixels) as file:
            small, (left, top) = _small_file(file, window_xyxy, size_hw)
        pixels = decode_image(small, max_pixels, white)
        width = window_xyxy[2] - window_xyxy[0]
        height = window_xyxy[3] - window_xyxy[1]
        return pixels[:, top : top + height, left : left + width]
    return None


def _small_file(file: BinaryIO, window_xyxy: Sequence[int], size_hw: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
    """Return a TIFF file of the blocks that a window touches, and the left and top of the window in its picture.

    Raises _Unsupported as `decode_tiff_window` returns None, and struct.error for a file that ends too early.
    """
    order, entries = _read_entries(file)
    _check(order, entries, size_hw)
    blocks = _blocks_of(order, entries, size_hw)
    left, top, right, bottom = window_xyxy
    height, width = blocks.hw
    columns = range(left // width, -(-right // width))
    rows = range(top // height, -(-bottom // height))
    per_row = -(-size_hw[1] // width)
    chosen = [row * per_row + column for row in rows for column in columns]
    if len(chosen) > MOST_OF_FILE * len(blocks.offsets):
        raise _Unsupported
    contents = [_read_at(file, blocks.offsets[block], blocks.lengths[block]) for block in chosen]
    small_hw = (min(rows.stop * height, size_hw[0]) - rows.start * height,
                min(columns.stop * width, size_hw[1]) - columns.start * width)  # fmt: skip
    corner = (left - columns.start * width, top - rows.start * height)
    return _written(order, entries, blocks, small_hw, contents), corner


def _read_entries(file: BinaryIO) -> tuple[str, dict[int, Entry]]:
    """Return the byte order, as `struct` names it, and the tags of the first picture of a TIFF file."""
    start = file.read(16)
    order = {b"II": "<", b"MM": ">"}.get(start[:2])
    if order is None:
        raise _Unsupported
    (version,) = struct.unpack_from(order + "H", start, 2)
    is_big = version == 43
    if version not in (42, 43):
        raise _Unsupported
    number = order + ("Q" if is_big else "L")  # of an offset or a count
    (at,) = struct.unpack_from(number, start, 8 if is_big else 4)
    count_format = order + ("Q" if is_big else "H")
    count_size = struct.calcsize(count_format)
    (count,) = struct.unpack(count_format, _read_at(file, at, count_size))
    inline = struct.calcsize(number)  # bytes of values that stand in the entry itself
    entry_size = 4 + 2 * inline
    table = _read_at(file, at + count_size, count * entry_size)
    wanted = {*DECODING_TAGS, WIDTH, HEIGHT, COMPRESSION, ORIENTATION, PLANES, XMP, STRIP_OFFSETS, ROWS_PER_STRIP,
              STRIP_BYTES, TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_BYTES}  # fmt: skip
    entries = {}
    for first in range(0, len(table), entry_size):
        tag, kind = struct.unpack_from(order + "HH", table, first)
        (values,) = struct.unpack_from(number, table, first + 4)
        size = values * TYPE_SIZES.get(kind, 1)
        place = first + 4 + inline
        if tag not in wanted:
            continue
        if size <= inline:
            data = table[place : place + size]
        else:
            data = _read_at(file, *struct.unpack_from(number, table, place), size)
        entries[tag] = Entry(kind, values, data)
    return order, entries


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """Read bytes at a place. Raises _Unsupported if the file does not have them all."""
    if offset + size > os.fstat(file.fileno()).st_size or size > MOST_ENTRY_BYTES:
        raise _Unsupported
    file.seek(offset)
    return file.read(size)


def _numbers(order: str, entries: Mapping[int, Entry], tag: int, default: int | None = None) -> tuple[int, ...]:
    """Return the whole numbers of a tag. Raises _Unsupported if it is missing, without a default, or has others."""
    if tag not in entries and default is not None:
        return (default,)
    if tag not in entries or entries[tag].type not in NUMBER_FORMATS:
        raise _Unsupported
    entry = entries[tag]
    return struct.unpack(f"{order}{entry.count}{NUMBER_FORMATS[entry.type]}", entry.data)


def _check(order: str, entries: Mapping[int, Entry], size_hw: tuple[int, int]) -> None:
    """Raise _Unsupported for a picture whose blocks cannot be copied as they are."""
    stored_hw = (_numbers(order, entries, HEIGHT)[0], _numbers(order, entries, WIDTH)[0])
    is_turned = _numbers(order, entries, ORIENTATION, 1)[0] != 1 or (
        XMP in entries and XMP_ORIENTATION in entries[XMP].data
    )
    is_in_planes = _numbers(order, entries, PLANES, 1)[0] != 1
    is_uncommon = _numbers(order, entries, COMPRESSION, 1)[0] not in COMPRESSIONS
    if stored_hw != tuple(size_hw) or is_turned or is_in_planes or is_uncommon:
        raise _Unsupported


def _blocks_of(order: str, entries: Mapping[int, Entry], size_hw: tuple[int, int]) -> Blocks:
    is_tiled = TILE_OFFSETS in entries
    if is_tiled:
        hw = (_numbers(order, entries, TILE_HEIGHT)[0], _numbers(order, entries, TILE_WIDTH)[0])
        places = (TILE_OFFSETS, TILE_BYTES)
    else:
        rows = _numbers(order, entries, ROWS_PER_STRIP, size_hw[0])[0]
        hw = (min(rows, size_hw[0]), size_hw[1])
        places = (STRIP_OFFSETS, STRIP_BYTES)
    offsets, lengths = (_numbers(order, entries, tag) for tag in places)
    if min(hw) < 1:
        raise _Unsupported
    count = -(-size_hw[0] // hw[0]) * -(-size_hw[1] // hw[1])
    if len(offsets) != count or len(lengths) != count:
        raise _Unsupported
    return Blocks(hw, offsets, lengths, is_tiled)


def _written(
    order: str, entries: Mapping[int, Entry], blocks: Blocks, small_hw: tuple[int, int], contents: Sequence[bytes]
) -> bytes:
    """Return a TIFF file of blocks (not a BigTIFF, whatever they are from): header, blocks, tags, values of tags."""
    body = io.BytesIO()
    body.write(bytes(8))
    offsets = []
    for content in contents:
        offsets.append(body.tell())
        body.write(content + bytes(len(content) % 2))
    own = {tag: entry for tag, entry in entries.items() if tag in (*DECODING_TAGS, COMPRESSION)}
    if any(entry.type in ONLY_IN_BIG for entry in own.values()):
        raise _Unsupported
    own[HEIGHT] = _longs(order, small_hw[:1])
    own[WIDTH] = _longs(order, small_hw[1:])
    if blocks.is_tiled:
        own[TILE_HEIGHT] = _longs(order, blocks.hw[:1])
        own[TILE_WIDTH] = _longs(order, blocks.hw[1:])
    else:
        own[ROWS_PER_STRIP] = _longs(order, blocks.hw[:1])
    own[TILE_OFFSETS if blocks.is_tiled else STRIP_OFFSETS] = _longs(order, offsets)
    own[TILE_BYTES if blocks.is_tiled else STRIP_BYTES] = _longs(order, [len(content) for content in contents])
    at = body.tell()
    values_at = at + 2 + 12 * len(own) + 4
    table = struct.pack(order + "H", len(own))
    values = b""
    for tag, entry in sorted(own.items()):
        table += struct.pack(order + "HHL", tag, entry.type, entry.count)
        if len(entry.data) <= 4:
            table += entry.data.ljust(4, b"\0")
        else:
            table += struct.pack(order + "L", values_at + len(values))
            values += entry.data + bytes(len(entry.data) % 2)
    body.write(table + bytes(4) + values)
    start = b"II" if order == "<" else b"MM"
    body.seek(0)
    body.write(start + struct.pack(order + "HL", 42, at))
    return body.getvalue()


def _longs(order: str, numbers: Sequence[int]) -> Entry:
    return Entry(LONG, len(numbers), struct.pack(f"{order}{len(numbers)}L", *numbers))
