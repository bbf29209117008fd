"""Crops of TIFF files: their pixels are those of the whole picture, and only their blocks are read."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import ORIENTATION, tiled_tiff, xmp_of
from PIL import Image
from samples import noise

from toolkit.data.decoding import ImageError, decode_image
from toolkit.data.tiff_crops import decode_tiff_crop

ROWS_PER_STRIP = 278
XMP = 700
MODES = ("RGB", "L", "P", "RGBA", "LA", "CMYK", "1", "I;16")
COMPRESSIONS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
KINDS = (("<", False), (">", False), ("<", True))  # the last is a BigTIFF; Pillow opens no big-endian ones


@st.composite
def tiles_in(draw, height, width):
    left = draw(st.integers(0, width - 1))
    top = draw(st.integers(0, height - 1))
    right = draw(st.integers(left + 1, width))
    bottom = draw(st.integers(top + 1, height))
    return [left, top, right, bottom]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("tiff") / "picture.tif"


def is_decoded_alone(file, tile):
    """Whether it was; asserts that a tile has the pixels of the whole picture."""
    whole = decode_image(file)
    found = decode_tiff_crop(file, tile, tuple(whole.shape[-2:]))
    left, top, right, bottom = tile
    assert found is None or torch.equal(found, whole[:, top:bottom, left:right])
    return found is not None


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.integers(1, 150),
    st.integers(1, 150),
    st.sampled_from([16, 32, 48]),
)
def test_tiles_have_the_pixels_of_the_whole_picture(file, data, height, width, side):
    order, big = data.draw(st.sampled_from(KINDS))
    file.write_bytes(
        tiled_tiff(
            noise(height, width),
            side,
            order,
            big,
            data.draw(st.booleans()),
        )
    )
    tile = data.draw(tiles_in(height, width))
    columns = -(-tile[2] // side) - tile[0] // side
    rows = -(-tile[3] // side) - tile[1] // side
    blocks = -(-height // side) * -(-width // side)
    assert is_decoded_alone(file, tile) == (2 * columns * rows <= blocks)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.integers(2, 90),
    st.integers(1, 60),
    st.integers(1, 20),
    st.sampled_from(MODES),
)
def test_strips_have_the_pixels_of_the_whole_picture(file, data, height, width, rows, mode):
    compression = data.draw(st.sampled_from(COMPRESSIONS if mode in ("RGB", "L") else COMPRESSIONS[:-1]))
    pixels = noise(height, width)
    if mode == "I;16":
        picture = Image.fromarray(pixels[..., 0] * np.uint16(257))
    else:
        picture = Image.fromarray(pixels).convert(mode)
    rows = 8 * rows if compression == "jpeg" else rows
    # Pillow alone writes uncompressed pictures in one strip, libtiff does as it is asked
    picture.save(file, compression=compression, tiffinfo={ROWS_PER_STRIP: rows})
    is_decoded_alone(file, data.draw(tiles_in(height, width)))


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_strips_are_decoded_alone(file, compression):
    Image.fromarray(noise(100, 70)).save(
        file,
        compression=compression,
        tiffinfo={ROWS_PER_STRIP: 16},
    )
    assert is_decoded_alone(file, [10, 20, 60, 48])


def test_blocks_outside_of_the_tile_are_not_read(file):
    pixels = noise(64, 64)
    content = bytearray(tiled_tiff(pixels, 16))
    last = content.rindex(zlib.compress(pixels[48:, 48:].tobytes()))
    content[last : last + 20] = bytes(20)
    file.write_bytes(content)
    found = decode_tiff_crop(file, [0, 0, 30, 30], (64, 64))
    assert np.array_equal(found.permute(1, 2, 0).numpy(), pixels[:30, :30])
    # The whole picture says what is wrong.
    assert decode_tiff_crop(file, [40, 40, 60, 60], (64, 64)) is None
    with pytest.raises(ImageError):
        decode_image(file)


def test_other_sizes_and_missing_files_are_left_to_the_whole(file):
    tile = [0, 0, 10, 10]
    file.write_bytes(tiled_tiff(noise(64, 64), 16))
    assert decode_tiff_crop(file, tile, (64, 64), max_pixels=4096) is not None
    assert decode_tiff_crop(file, tile, (64, 64), max_pixels=4095) is None
    assert decode_tiff_crop(file, tile, (64, 65)) is None
    assert decode_tiff_crop(file.with_name("no.tif"), tile, (64, 64)) is None


def test_a_file_that_ends_anywhere_raises_nothing(file):
    content = tiled_tiff(noise(64, 64), 16)
    for length in range(0, len(content), 97):
        file.write_bytes(content[:length])
        decode_tiff_crop(file, [0, 0, 10, 10], (64, 64))


@pytest.mark.parametrize(
    "tags",
    [
        {ORIENTATION: 6},
        {ORIENTATION: 3},
        {XMP: xmp_of(6)},
    ],
)
def test_turned_pictures_are_left_to_the_whole(file, tags):
    picture = Image.fromarray(noise(64, 64))
    picture.save(file, compression="tiff_lzw", tiffinfo={ROWS_PER_STRIP: 8, **tags})
    assert decode_tiff_crop(file, [0, 0, 10, 10], (64, 64)) is None


def test_another_format_under_the_name_of_a_tiff_is_left_to_the_whole(file):
    Image.fromarray(noise(64, 64)).save(file, format="PNG")
    assert decode_tiff_crop(file, [0, 0, 10, 10], (64, 64)) is None
