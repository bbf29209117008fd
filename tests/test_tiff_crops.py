"""Crops of TIFF files: their pixels are those of the whole picture, and only their blocks are read."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from toolkit.data.decoding import ImageError, decode_image
from toolkit.data.tiff_crops import decode_tiff_crop

DEFLATE = 8


def tiled_tiff(pixels: np.ndarray, side: int, order: str = "<", big: bool = False, compressed: bool = True) -> bytes:
    """A TIFF file of square tiles, which Pillow cannot write. pixels: uint8 (H, W, 3)."""
    height, width = pixels.shape[:2]
    body, offsets, lengths = bytes(16 if big else 8), [], []
    for top in range(0, height, side):
        for left in range(0, width, side):
            tile = np.zeros((side, side, 3), np.uint8)
            part = pixels[top : top + side, left : left + side]
            tile[: part.shape[0], : part.shape[1]] = part
            data = zlib.compress(tile.tobytes()) if compressed else tile.tobytes()
            offsets.append(len(body))
            lengths.append(len(data))
            body += data + bytes(len(data) % 2)
    tags = {256: ("L", [width]), 257: ("L", [height]), 258: ("H", [8, 8, 8]), 262: ("H", [2]), 277: ("H", [3]),
            259: ("H", [DEFLATE if compressed else 1]), 322: ("H", [side]), 323: ("H", [side]),
            324: ("Q" if big else "L", offsets), 325: ("L", lengths)}  # fmt: skip
    return with_tags(body, tags, order, big)


def with_tags(body: bytes, tags: dict, order: str, big: bool) -> bytes:
    number = order + ("Q" if big else "L")
    inline = struct.calcsize(number)
    table = struct.pack(order + ("Q" if big else "H"), len(tags))
    values_at = len(body) + len(table) + len(tags) * (4 + 2 * inline) + inline
    values = b""
    for tag, (kind, numbers) in sorted(tags.items()):
        data = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
        table += struct.pack(order + "HH", tag, {"H": 3, "L": 4, "Q": 16}[kind]) + struct.pack(number, len(numbers))
        if len(data) <= inline:
            table += data.ljust(inline, b"\0")
        else:
            table += struct.pack(number, values_at + len(values))
            values += data + bytes(len(data) % 2)
    header = struct.pack(order + "HHHQ", 43, 8, 0, len(body)) if big else struct.pack(order + "HL", 42, len(body))
    start = (b"II" if order == "<" else b"MM") + header
    return start + body[len(start) :] + table + bytes(inline) + values


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@st.composite
def tiles_in(draw, size_hw):
    left = draw(st.integers(0, size_hw[1] - 1))
    top = draw(st.integers(0, size_hw[0] - 1))
    return [left, top, draw(st.integers(left + 1, size_hw[1])), draw(st.integers(top + 1, size_hw[0]))]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiff") / "picture.tif"


def assert_equal_or_whole(file: Path, tile: list[int]) -> bool:
    """Assert that a tile has the pixels of the whole picture; return whether it was decoded alone."""
    whole = decode_image(file)
    found = decode_tiff_crop(file, tile, tuple(whole.shape[-2:]))
    left, top, right, bottom = tile
    assert found is None or torch.equal(found, whole[:, top:bottom, left:right])
    return found is not None


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 150), st.integers(1, 150), st.sampled_from([16, 32, 48]))
def test_a_tile_of_a_tiled_file_has_the_pixels_of_the_whole_picture(file, data, height, width, side):
    kinds = [("<", False), (">", False), ("<", True)]  # the last is a BigTIFF; Pillow opens no big-endian ones
    order, big = data.draw(st.sampled_from(kinds))
    file.write_bytes(tiled_tiff(noise(height, width), side, order, big, data.draw(st.booleans())))
    tile = data.draw(tiles_in((height, width)))
    is_alone = assert_equal_or_whole(file, tile)
    columns = -(-tile[2] // side) - tile[0] // side
    rows = -(-tile[3] // side) - tile[1] // side
    assert is_alone == (2 * columns * rows <= -(-height // side) * -(-width // side))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 90), st.integers(1, 60), st.integers(1, 20))
def test_a_tile_of_a_file_of_strips_has_the_pixels_of_the_whole_picture(file, data, height, width, rows):
    compressions = [None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"]
    mode = data.draw(st.sampled_from(["RGB", "L", "P", "RGBA", "LA", "CMYK", "1", "I;16"]))
    compression = data.draw(st.sampled_from(compressions if mode in ("RGB", "L") else compressions[:-1]))
    picture = Image.fromarray(noise(height, width))
    picture = Image.fromarray(noise(height, width)[..., 0] * np.uint16(257)) if mode == "I;16" else picture
    picture = picture if mode == "I;16" else picture.convert(mode)
    rows = 8 * rows if compression == "jpeg" else rows
    # Pillow alone writes uncompressed pictures in one strip, libtiff does as it is asked
    picture.save(file, compression=compression or "raw", tiffinfo={278: rows})
    assert_equal_or_whole(file, data.draw(tiles_in((height, width))))


def test_strips_are_decoded_alone(tmp_path):
    picture = Image.fromarray(noise(100, 70))
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        file = tmp_path / f"{compression}.tiff"
        picture.save(file, compression=compression, tiffinfo={278: 16})
        assert assert_equal_or_whole(file, [10, 20, 60, 48]), compression


def test_blocks_outside_of_the_tile_are_not_read(tmp_path):
    file = tmp_path / "a.tif"
    pixels = noise(64, 64)
    content = bytearray(tiled_tiff(pixels, 16))
    last = content.rindex(zlib.compress(pixels[48:, 48:].tobytes()))
    content[last : last + 20] = bytes(20)
    file.write_bytes(content)
    found = decode_tiff_crop(file, [0, 0, 30, 30], (64, 64))
    assert np.array_equal(found.permute(1, 2, 0).numpy(), pixels[:30, :30])
    assert decode_tiff_crop(file, [40, 40, 60, 60], (64, 64)) is None, "the whole picture says what is wrong"
    with pytest.raises(ImageError):
        decode_image(file)


def test_what_cannot_be_decoded_in_parts_is_left_to_the_whole(tmp_path):
    file = tmp_path / "a.tif"
    tile = [0, 0, 10, 10]
    content = tiled_tiff(noise(64, 64), 16)
    file.write_bytes(content)
    assert decode_tiff_crop(file, tile, (64, 64)) is not None
    assert decode_tiff_crop(file, tile, (64, 65)) is None, "another size than the annotations say"
    assert decode_tiff_crop(file, tile, (64, 64), max_pixels=4000) is None
    assert decode_tiff_crop(tmp_path / "no.tif", tile, (64, 64)) is None
    for length in range(0, len(content), 97):
        file.write_bytes(content[:length])
        decode_tiff_crop(file, tile, (64, 64))  # whatever it returns, it raises nothing
    xmp = b'<x xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'
    for tags in ({274: 6}, {274: 3}, {700: xmp}):
        Image.fromarray(noise(64, 64)).save(file, compression="tiff_lzw", tiffinfo={278: 8, **tags})
        assert decode_tiff_crop(file, tile, (64, 64)) is None, "a turned picture"
    Image.fromarray(noise(64, 64)).save(file, format="PNG")
    assert decode_tiff_crop(file, tile, (64, 64)) is None, "another format under this name"
