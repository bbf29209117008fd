"""Crops of TIFF files, decoded without the rest of the picture.

A TIFF file stores its pixels in blocks, strips of rows or tiles, each of which is compressed by itself. libtiff decodes
single blocks, but Pillow asks it for the whole picture. So the blocks that a crop touches are copied, still compressed,
into a small TIFF file in memory, which Pillow decodes (TIFF 6.0, sections 2, 3 and 15).
"""

import io
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor

from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.data.decoding import EXTENSIONS, PILLOW_ERRORS, ImageError, decode_image, open_image_file

MOST_OF_FILE = 0.5  # share of a file's blocks from which the whole file is decoded, and can be kept
WIDTH, HEIGHT, COMPRESSION, ORIENTATION, PLANES = 256, 257, 259, 274, 284
STRIP_OFFSETS, ROWS_PER_STRIP, STRIP_BYTES = 273, 278, 279
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_BYTES = 322, 323, 324, 325
# The tags that decide how blocks become pixels: bits, compression, colours, fill order, samples, predictor, colour map,
# inks, extra samples, sample format, JPEG tables, and the subsampling and positions of YCbCr.
DECODING_TAGS = (258, COMPRESSION, 262, 266, 277, 317, 320, 332, 334, 338, 339, 347, 529, 530, 531, 532)
# None, LZW, JPEG, Deflate (two numbers), PackBits and Zstandard, whose blocks do not depend on each other.
COMPRESSIONS = (1, 5, 7, 8, 32946, 32773, 50000)


class Grid(NamedTuple):
    """The blocks of a TIFF file: their height and width in pixels, and of each one, row by row, its place in the file
    and its length in bytes."""

    hw: tuple[int, int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    is_tiled: bool


class _Unsupported(Exception):
    """The file has to be decoded as a whole, which also says what is wrong with a damaged one."""


def decode_tiff_crop(
    path: Path,
    crop_xyxy: Sequence[int],
    size_hw: tuple[int, int],
    max_pixels: int = MAX_IMAGE_PIXELS,
    white: int | None = None,
) -> Tensor | None:
    """Decode a crop of a TIFF file, uint8 (3, h, w); its pixels are those of `decode_image`.

    Args:
        path: of the file.
        crop_xyxy: left, top, right and bottom in whole pixels, within the picture.
        size_hw: height and width that the picture should have.
        max_pixels, white: as for `decode_image`.

    Returns None if the picture has to be decoded as a whole: another format, another size, a turned picture, samples in
    separate planes, an uncommon compression, a damaged file, or a crop that touches more than half of the blocks.
    """
    if path.suffix.lower() not in EXTENSIONS["TIFF"] or size_hw[0] * size_hw[1] > max_pixels:
        return None
    try:
        with open_image_file(path, max_pixels) as file:
            small, (left, top) = _small_file(file, crop_xyxy, size_hw)
        pixels = decode_image(small, max_pixels, white)
    except (_Unsupported, ImageError, OSError, *PILLOW_ERRORS):
        return None
    width = crop_xyxy[2] - crop_xyxy[0]
    height = crop_xyxy[3] - crop_xyxy[1]
    return pixels[:, top : top + height, left : left + width]


def _small_file(file: BinaryIO, crop_xyxy: Sequence[int], size_hw: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
    """Return a TIFF file of the blocks that a crop touches, and the left and top of the crop in its picture.

    Raises _Unsupported as `decode_tiff_crop` returns None, and what Pillow raises for a damaged file.
    """
    image = Image.open(file, formats=("TIFF",))  # decodes nothing yet
    tags = image.tag_v2
    stored_hw = (tags[HEIGHT], tags[WIDTH])
    is_turned = image.getexif().get(ORIENTATION, 1) != 1
    is_in_planes = tags.get(PLANES, 1) != 1
    is_uncommon = tags.get(COMPRESSION, 1) not in COMPRESSIONS
    if stored_hw != tuple(size_hw) or is_turned or is_in_planes or is_uncommon:
        raise _Unsupported
    grid = _grid_of(tags, size_hw)
    left, top, right, bottom = crop_xyxy
    height, width = grid.hw
    columns = range(left // width, -(-right // width))
    rows = range(top // height, -(-bottom // height))
    per_row = -(-size_hw[1] // width)
    chosen = [row * per_row + column for row in rows for column in columns]
    if len(chosen) > MOST_OF_FILE * len(grid.offsets):
        raise _Unsupported
    blocks = [_read_at(file, grid.offsets[block], grid.lengths[block]) for block in chosen]
    small_height = min(rows.stop * height, size_hw[0]) - rows.start * height
    small_width = min(columns.stop * width, size_hw[1]) - columns.start * width
    corner = (left - columns.start * width, top - rows.start * height)
    return _written(tags, grid, (small_height, small_width), blocks), corner


def _grid_of(tags: ImageFileDirectory_v2, size_hw: tuple[int, int]) -> Grid:
    is_tiled = TILE_OFFSETS in tags
    if is_tiled:
        hw = (tags[TILE_HEIGHT], tags[TILE_WIDTH])
        offsets, lengths = tags[TILE_OFFSETS], tags[TILE_BYTES]
    else:
        rows = tags.get(ROWS_PER_STRIP, size_hw[0])
        hw = (min(rows, size_hw[0]), size_hw[1])
        offsets, lengths = tags[STRIP_OFFSETS], tags[STRIP_BYTES]
    if min(hw) < 1:
        raise _Unsupported
    count = -(-size_hw[0] // hw[0]) * -(-size_hw[1] // hw[1])
    if len(offsets) != count or len(lengths) != count:
        raise _Unsupported
    return Grid(hw, offsets, lengths, is_tiled)


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """Read bytes at a place. Raises _Unsupported if the file does not have them all."""
    if offset + size > os.fstat(file.fileno()).st_size:
        raise _Unsupported
    file.seek(offset)
    return file.read(size)


def _written(tags: ImageFileDirectory_v2, grid: Grid, small_hw: tuple[int, int], blocks: Sequence[bytes]) -> bytes:
    """Return a TIFF file of blocks (not a BigTIFF, whatever they are from). tags: of the file that they are from."""
    own = ImageFileDirectory_v2(prefix=tags.prefix)  # in the same byte order
    for tag in DECODING_TAGS:
        if tag in tags:
            own.tagtype[tag] = tags.tagtype[tag]
            own[tag] = tags[tag]
    own[HEIGHT], own[WIDTH] = small_hw
    lengths = [len(block) for block in blocks]
    starts = [0, *accumulate(lengths)][:-1]
    if grid.is_tiled:
        own[TILE_HEIGHT], own[TILE_WIDTH] = grid.hw
        own[TILE_BYTES] = lengths
        own[TILE_OFFSETS] = starts
        start = own.save(io.BytesIO())  # where the first block is
        own[TILE_OFFSETS] = [start + offset for offset in starts]
    else:
        own[ROWS_PER_STRIP] = grid.hw[0]
        own[STRIP_BYTES] = lengths
        own[STRIP_OFFSETS] = starts  # Pillow adds where the first block is
    small = io.BytesIO()
    own.save(small)
    small.write(b"".join(blocks))
    return small.getvalue()
