"""Decoding: upright, right colours, whole or an error.   Run: pytest tests/test_images.py"""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from toolkit.data.decoding import ImageError, decode_image, probe_image

IMAGES = Path(__file__).parent / "data" / "dirty" / "images"
SQUARE, GROUND = (220, 30, 30), (235, 230, 220)


def encode(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def scene(width=40, height=30):
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    return Image.fromarray(ramp.astype(np.uint8))


@pytest.mark.parametrize("name", ["control.jpg", "cmyk.jpg", "palette_alpha.png", "png_bytes.jpg"])
def test_colours(name):
    pixels = decode_image(IMAGES / name)
    assert pixels.shape == (3, 48, 64) and pixels.dtype == torch.uint8
    # palette_alpha: the square is opaque, the ground transparent, and neither colour changes
    for (y, x), colour in (((18, 18), SQUARE), ((2, 2), GROUND)):
        assert np.allclose(pixels[:, y, x], colour, atol=6)


def test_16_bit_grey_is_scaled_not_clipped():
    pixels = decode_image(IMAGES / "gray16.png")
    assert pixels[:, 18, 18].tolist() == [195] * 3 and pixels[:, 2, 2].tolist() == [78] * 3
    extremes = Image.fromarray(np.array([[0, 65535, 257, 128]], np.uint16))
    assert decode_image(encode(extremes, "PNG"))[0].tolist() == [[0, 255, 1, 0]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_every_exif_orientation_as_pillow_has_it(orientation, format):
    exif = Image.Exif()
    exif[274] = orientation
    data = encode(scene(), format, exif=exif)
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(decode_image(data).permute(1, 2, 0).numpy(), upright)
    assert probe_image(data).size_hw == upright.shape[:2]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_every_mode_becomes_three_channels(mode, format):
    image = scene().convert("L").convert(mode) if mode == "I;16" else scene().convert(mode)
    try:
        data = encode(image, format)
    except (OSError, KeyError):
        pytest.skip(f"{format} has no {mode}")
    assert decode_image(data).shape == (3, 30, 40)
    assert probe_image(data).size_hw == (30, 40)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True, "subsampling": 0}])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_truncation_is_an_error_wherever_the_file_ends(format, options):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8))
    data = encode(noise, format, **options)
    for part in (0.1, 0.3, 0.55, 0.9, 0.99):
        with pytest.raises(ImageError):
            decode_image(data[: int(part * len(data))])
    decode_image(data)


@pytest.mark.parametrize(("name", "words"), [
    ("truncated.jpg", "image data truncated"), ("zero_byte.jpg", "empty image file"),
    ("html_error_page.jpg", "not an image"), ("missing.jpg", "image file not found"),
])  # fmt: skip
def test_errors_name_the_file_and_the_reason(name, words):
    with pytest.raises(ImageError, match=words) as caught:
        decode_image(IMAGES / name)
    assert name in str(caught.value) and caught.value.path == IMAGES / name
    if name != "truncated.jpg":  # a header tells the rest
        with pytest.raises(ImageError, match=words):
            probe_image(IMAGES / name)


def test_values_outside_16_bits_are_refused():
    with pytest.raises(ImageError, match="expected 8 or 16 bits"):
        decode_image(encode(Image.fromarray(np.array([[70000]], np.int32)), "TIFF"))
    with pytest.raises(ImageError, match="floating-point"):
        decode_image(encode(Image.fromarray(np.array([[0.5]], np.float32)), "TIFF"))


def test_a_pixel_bomb_is_an_error(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match="exceeds limit"):
        decode_image(encode(scene(), "PNG"))


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_exif_that_is_cut_off_is_an_error_in_words(format):
    data = encode(scene(), format, exif=b"Exif\0\0II*\0")
    for read in (decode_image, probe_image):
        with pytest.raises(ImageError):
            read(data)
