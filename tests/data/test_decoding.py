"""Images are decoded upright, in the right colours, whole or at a reduced scale, or an error says why not."""

import io
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import HEIGHT, IMAGES, TURNED, WIDTH, encode, exif_of, ramp, turned_file, with_tags
from PIL import Image, ImageOps
from samples import noise
from torchvision.transforms.v2 import functional as F

from toolkit.base.errors import BadInput
from toolkit.data.decoding import ImageError, _jpeg_size, decode_image, decode_reduced, probe_image, reduction
from toolkit.tools.predict.predictor import as_image

SQUARE = (220, 30, 30)
GROUND = (235, 230, 220)
UNREADABLE = ("truncated.jpg", "zero_byte.jpg", "html_error_page.jpg", "missing.jpg")
LOSSLESS = {  # formats, and the modes that they keep
    "PNG": "1 L LA P RGB RGBA I;16".split(),
    "BMP": "1 L P RGB".split(),
    "PPM": "1 L RGB I".split(),
    "TIFF": "1 L LA P RGB RGBA CMYK YCbCr LAB I F I;16".split(),
    "GIF": "L P".split(),
}
MODES = "1 L LA P RGB RGBA RGBa La CMYK YCbCr LAB HSV I F I;16 I;16B I;16L".split()


def waves(width, height):
    """A picture of smooth colours that differ along both sides."""
    y, x = np.mgrid[:height, :width]
    shades = [
        np.sin(x / 9),
        np.cos(y / 11),
        np.sin((x + 2 * y) / 23),
    ]
    return Image.fromarray((np.stack(shades, axis=2) * 100 + 128).astype(np.uint8))


def apart(one, other):
    """Mean difference of the pixels of an image from those of another one, made as small."""
    smaller = F.resize(
        other,
        list(one.shape[-2:]),
        antialias=True,
    )
    return (one.int() - smaller.int()).abs().float().mean()


def outcome(decode, *arguments):
    """The pixels, or why there are none, without the place."""
    try:
        return decode(*arguments)
    except (ImageError, BadInput) as error:
        return str(error).rpartition(": ")[2]


def decode_quarter(data):
    return decode_reduced(data, (15, 20))[0]


@pytest.mark.parametrize("name", ["control.jpg", "cmyk.jpg", "palette_alpha.png", "png_bytes.jpg"])
def test_colours_are_kept(name):
    pixels = decode_image(IMAGES / name)
    assert pixels.shape == (3, 48, 64)
    assert pixels.dtype == torch.uint8
    # palette_alpha: the square is opaque, the ground transparent, and neither colour changes
    assert np.allclose(pixels[:, 18, 18], SQUARE, atol=6)
    assert np.allclose(pixels[:, 2, 2], GROUND, atol=6)


@pytest.mark.parametrize("kind", TURNED)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_are_those_of_pillow(kind, orientation):
    """The check of the data goes by the header, training by the pixels: both must say the same."""
    picture = Image.new("RGB", (160, 96), (40, 60, 200))
    picture.paste((250, 20, 20), (0, 0, 80, 24))  # so that no two orientations look the same
    data = turned_file(picture, kind, orientation)
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    whole = decode_image(data)
    height, width = upright.shape[:2]
    assert np.array_equal(whole.permute(1, 2, 0), upright)
    assert probe_image(data).size_hw == (height, width)
    reduced, file_hw = decode_reduced(data, (8, 8))
    assert file_hw == (height, width)
    if kind.startswith("JPEG"):
        assert reduced.shape == (3, height // 8, width // 8)
        assert apart(reduced, whole) < 5
    else:
        assert torch.equal(reduced, whole)


sides = st.integers(1, 150)


@settings(max_examples=80, deadline=None)
@given(
    sides,
    sides,
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from(["RGB", "L", "CMYK"]),
)
def test_a_reduced_picture_is_the_whole_one_made_smaller(width, height, divisor, turn, progressive, mode):
    picture = waves(width, height).convert(mode)
    data = encode(picture, "JPEG", quality=95, exif=exif_of(turn), progressive=progressive)
    whole = decode_image(data)
    full_h, full_w = whole.shape[-2:]
    least_hw = (max(1, full_h // divisor), max(1, full_w // divisor))
    found, file_hw = decode_reduced(data, least_hw)
    by = reduction(file_hw, least_hw)
    assert file_hw == (full_h, full_w)
    assert found.dtype == torch.uint8
    assert found.shape == (3, full_h // by, full_w // by)
    if by == 1:
        assert torch.equal(found, whole)
        return
    assert apart(found, whole) < (3 if min(found.shape[-2:]) >= 8 else 6)


def test_the_first_picture_of_an_mpo_is_reduced():
    data = encode(
        waves(200, 120),
        "MPO",
        save_all=True,
        append_images=[ramp(200, 120)],
    )
    found, file_hw = decode_reduced(data, (30, 50))
    assert file_hw == (120, 200)
    assert found.shape == (3, 30, 50)
    assert apart(found, decode_image(data)) < 3


lengths = st.integers(1, 5000)


@given(
    lengths,
    lengths,
    st.integers(1, 3000),
    st.integers(1, 3000),
)
def test_the_largest_divisor_that_leaves_enough_is_taken(height, width, least_h, least_w):
    by = reduction((height, width), (least_h, least_w))
    assert by in (1, 2, 4, 8)
    if by > 1:
        assert height // by >= least_h
        assert width // by >= least_w
    larger = 2 * by
    is_enough = height // larger >= least_h and width // larger >= least_w
    pays = larger > 2 or (height % 2 == 0 and width % 2 == 0)
    assert by == 8 or not (is_enough and pays)


def test_a_reduced_picture_has_no_more_pixels_than_the_limit():
    data = encode(waves(80, 60), "JPEG")
    decode_reduced(data, (15, 20), 4800)
    with pytest.raises(ImageError, match="80 x 60 pixels are more than data.max_image_pixels 4799"):
        decode_reduced(data, (15, 20), 4799)


# ---- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"restart_marker_blocks": 4}),
        ("PNG", {}),
    ],
)
def test_a_truncated_file_is_an_error_wherever_it_ends(format, options):
    data = encode(Image.fromarray(noise(60, 80)), format, **options)
    assert decode_image(data).shape == (3, 60, 80)
    ends = list(range(3, len(data) - 9, len(data) // 40))
    if format == "JPEG":
        ends += range(len(data) - 9, len(data))
    for end in ends:
        whole = outcome(decode_image, data[:end])
        assert isinstance(whole, str), end
        assert outcome(decode_quarter, data[:end]) == whole, end


def test_a_damaged_file_is_the_same_error_at_a_reduced_scale():
    rng = np.random.default_rng(1)
    data = encode(waves(80, 60), "JPEG")
    errors = set()
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(2, len(data), 2):
            damaged[at] = rng.integers(256)
        whole = outcome(decode_image, bytes(damaged))
        reduced = outcome(decode_quarter, bytes(damaged))
        if isinstance(whole, str):
            assert reduced == whole
            errors.add(whole)
        else:
            assert not isinstance(reduced, str)
    assert errors


def test_a_damaged_last_marker_is_an_error():
    """Pillow alone decodes such a file."""
    picture = Image.new("RGB", (64, 48), (9, 99, 200))
    data = bytearray(encode(picture, "JPEG", quality=90, restart_marker_blocks=4))
    data[-68] = 0x55
    data[-1] = 0
    assert outcome(decode_reduced, bytes(data), (12, 16)) == "image data truncated"


@pytest.mark.parametrize(
    ("name", "words"),
    zip(UNREADABLE, ["image data truncated", "empty image file", "not an image", "image file not found"], strict=True),
)
def test_errors_name_the_file_and_the_reason(name, words):
    for decode, *arguments in (
        (decode_image,),
        (decode_reduced, (4, 4)),
        (probe_image,),
    ):
        if decode is probe_image and name == "truncated.jpg":
            continue  # of which the header is whole
        with pytest.raises(ImageError, match=words) as caught:
            decode(IMAGES / name, *arguments)
        assert name in str(caught.value)
        assert caught.value.path == IMAGES / name


def test_damage_behind_the_first_frame_is_a_note():
    frames = [
        Image.fromarray(
            np.full(
                (30, 40, 3),
                value,
                np.uint8,
            )
        )
        for value in (10, 200)
    ]
    data = bytearray(
        encode(
            frames[0],
            "TIFF",
            save_all=True,
            append_images=frames[1:],
        )
    )
    second = max(data.rfind(b"\x01\x01" + kind) for kind in (b"\x03\x00", b"\x04\x00"))  # the tag of its height
    data[second : second + 2] = b"\xff\xfe"
    assert decode_image(bytes(data))[0, 0, 0] == 10
    assert "what follows it in the file is damaged" in " ".join(probe_image(bytes(data)).notes)


@pytest.mark.parametrize(
    ("name", "note"),
    [("cmyk.jpg", "CMYK converted to RGB"), ("palette_alpha.png", "alpha channel dropped, the colours under it kept")],
)
def test_what_decoding_changes_is_told(name, note):
    assert probe_image(IMAGES / name).notes == (note,)


def test_bands_that_are_left_out_are_told():
    pixels = bytes(4 * 6 * 5)
    tags = {
        WIDTH: ("L", [6]),
        HEIGHT: ("L", [4]),
        258: ("H", [8] * 5),
        262: ("H", [2]),
        273: ("L", [8]),
        277: ("H", [5]),
        279: ("L", [len(pixels)]),
        338: ("H", [0, 0]),
    }
    assert probe_image(with_tags(bytes(8) + pixels, tags)).notes == ("first 3 of 5 bands used",)


# ---- what is refused before it is decoded ----------------------------------------------------------------------------


def refusal(call, *arguments):
    """What a call raises; a pipe that is waited for would hang, so the call has a thread of its own."""
    caught = []

    def catch():
        try:
            call(*arguments)
        except (ImageError, BadInput) as error:
            caught.append(str(error))

    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits"
    return caught[0]


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        ("1", "PNG"),
        ("1", "TIFF"),
        ("L", "JPEG"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_decoded(mode, format, monkeypatch):
    small = encode(ramp().convert(mode), format)
    for read in (decode_image, probe_image):
        read(small, 1200)
        with pytest.raises(ImageError, match="40 x 30 pixels are more than data.max_image_pixels 1199"):
            read(small, 1199)
    side = 16 if format == "JPEG" else 13_000
    data = encode(Image.new(mode, (side, side)), format)
    if format == "JPEG":  # its header alone says 60,000 x 60,000
        at = data.index(b"\xff\xc0")
        data = data[: at + 5] + b"\xea\x60\xea\x60" + data[at + 9 :]
    for place in ("PIL.ImageFile.ImageFile.load", "toolkit.data.decoding.decode_jpeg"):
        monkeypatch.setattr(place, None)  # nothing can be decoded
    tracemalloc.start()
    for read in (decode_image, probe_image):
        assert "more than data.max_image_pixels 100000000" in refusal(read, data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * len(data) + 2**20


def test_a_huge_picture_in_memory_is_refused_before_it_is_decoded(tmp_path):
    data = bytearray(encode(ramp(), "GIF"))
    data[6:10] = b"\xff\xff\xff\xff"
    (tmp_path / "bomb.gif").write_bytes(data)
    with Image.open(tmp_path / "bomb.gif") as opened, pytest.raises(BadInput, match="65535 x 65535 .*max_image_pixels"):
        as_image(opened)


@settings(max_examples=40)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 60_000),
)
def test_the_size_of_a_jpeg_is_that_of_its_own_header(width, height, progressive, length):
    """Whatever stands before it: thumbnails and comments have headers of their own."""
    comment = (encode(ramp(), "JPEG") + b"\xff" * length)[:60_000]
    data = encode(
        Image.new("RGB", (width, height)),
        "JPEG",
        progressive=progressive,
        comment=comment,
    )
    assert _jpeg_size(bytearray(data)) == (width, height)
    assert _jpeg_size(bytearray(b"\xff\xd8\xff" + data[3:8])) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
@pytest.mark.parametrize("read", [decode_image, probe_image])
def test_what_is_not_a_file_is_refused_and_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    with open(tmp_path / "sparse.jpg", "wb") as file:
        file.truncate(2**40)
    assert "it is a pipe" in refusal(read, tmp_path / "pipe.jpg")
    assert "it is a pipe" in refusal(read, tmp_path / "link.jpg")
    assert "it is a folder" in refusal(read, tmp_path / "folder.jpg")
    assert "it is a device" in refusal(read, Path("/dev/zero"))
    assert "name too long" in refusal(read, tmp_path / ("x" * 300 + ".jpg"))
    assert "bytes, more than" in refusal(read, tmp_path / "sparse.jpg")
    cut_off = encode(ramp(), "PNG", exif=b"Exif\0\0II*\0")
    assert refusal(read, cut_off)


# ---- pictures in memory ----------------------------------------------------------------------------------------------


def of_mode(mode):
    """A picture of a mode; of 16 bits with all of them."""
    grey = np.random.default_rng(0).integers(
        0,
        65536,
        (9, 12),
        dtype=np.uint16,
    )
    colours = Image.fromarray(noise(9, 12))
    if mode == "I;16":
        return Image.fromarray(grey)
    if mode in ("I;16L", "I;16B"):
        order = "<" if mode == "I;16L" else ">"
        return Image.frombytes(
            mode,
            (12, 9),
            grey.astype(f"{order}u2").tobytes(),
        )
    if mode == "I":
        return Image.fromarray(grey.astype(np.int32))
    if mode == "P":
        return colours.quantize(16)
    through = {
        "F": ("L",),
        "LA": ("L",),
        "La": ("L", "LA"),
        "RGBa": ("RGBA",),
    }
    for step in through.get(mode, ()):
        colours = colours.convert(step)
    return colours.convert(mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_in_memory_is_what_training_makes_of_its_file(mode, tmp_path):
    """Of every mode of Pillow, in every format that keeps its pixels: equal, or refused with the same reason."""
    picture = of_mode(mode)
    in_memory = outcome(as_image, picture)
    assert isinstance(in_memory, str) == (mode == "F")
    for format, kept in LOSSLESS.items():
        if mode not in kept:
            continue
        path = tmp_path / f"picture.{format.lower()}"
        picture.save(path, format)
        of_file = outcome(decode_image, path)
        with Image.open(path) as opened:
            again = outcome(as_image, opened)
        if mode == "F":
            assert again == of_file
            continue
        assert of_file.shape == (3, 9, 12), format
        assert torch.equal(of_file, again), format
        if format in ("PNG", "BMP") and mode != "P":
            assert torch.equal(of_file, in_memory), format


def test_turned_pictures_and_first_frames_are_the_same_in_memory(tmp_path):
    of_mode("I;16").save(tmp_path / "turned.png", exif=exif_of(6))
    first = of_mode("RGB")
    frames = {"save_all": True, "append_images": [ramp(12, 9)]}
    first.save(tmp_path / "frames.tiff", **frames)
    first.save(tmp_path / "frames.webp", lossless=True, **frames)
    for path in tmp_path.iterdir():
        with Image.open(path) as opened:
            assert torch.equal(decode_image(path), as_image(opened)), path.name
    assert decode_image(tmp_path / "turned.png").shape == (3, 12, 9)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("JPEG", {}),
        ("PNG", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
        ("PPM", {}),
    ],
)
def test_a_damaged_file_is_refused_in_memory_too(format, options, tmp_path):
    """Pillow reads pixels late: a picture that it has opened may be cut off, or have a byte of another value."""
    whole = encode(Image.fromarray(noise(60, 80)), format, **options)
    path = tmp_path / f"picture.{format.lower()}"
    refused = 0
    for number in range(12):
        data = bytearray(whole)
        at = len(data) * number // 13
        if number % 2:
            del data[at:]
        else:
            data[at] ^= 0xFF
        path.write_bytes(data)
        try:
            opened = Image.open(path)
        except OSError:  # refused by Pillow itself
            refused += 1
            continue
        with opened:
            is_refused = isinstance(outcome(as_image, opened), str)
        assert isinstance(outcome(decode_image, path), str) == is_refused, number
        refused += is_refused
    assert refused >= 2
