"""Decoding: upright, right colours, whole or an error."""

import io
import json
import os
import struct
import threading
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from places import ASSETS
from test_tiff_crops import with_tags

from toolkit.base.errors import BadInput
from toolkit.data.dataset import DetectionDataset
from toolkit.data.decoding import ImageError, _jpeg_size, decode_image, decode_reduced, probe_image
from toolkit.data.formats import open_dataset
from toolkit.data.sampling import SampleKey
from toolkit.models.final import read_white, write_white
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.predict.predict_each import predict_files
from toolkit.tools.predict.predictor import Predictor, as_image

IMAGES = ASSETS / "dirty" / "images"
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


def test_16_bit_grey_is_scaled_not_clipped_and_other_values_are_refused():
    pixels = decode_image(IMAGES / "gray16.png")
    assert pixels[:, 18, 18].tolist() == [195] * 3 and pixels[:, 2, 2].tolist() == [78] * 3
    extremes = Image.fromarray(np.array([[0, 65535, 257, 128]], np.uint16))
    assert decode_image(encode(extremes, "PNG"))[0].tolist() == [[0, 255, 1, 0]]
    for wrong, words in (([[70000]], "expected 8 or 16 bits"), ([[0.5]], "floating-point")):
        dtype = np.int32 if isinstance(wrong[0][0], int) else np.float32
        with pytest.raises(ImageError, match=words):
            decode_image(encode(Image.fromarray(np.array(wrong, dtype)), "TIFF"))


def colour_file(values: np.ndarray, format: str) -> bytes:
    """A file of 16-bit colours (H, W, 3), which Pillow cannot write."""
    height, width = values.shape[:2]
    if format == "PNG":
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
        data = b"\x89PNG\r\n\x1a\n"
        for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
            data += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        return data
    order, is_packed = format[0], format.endswith("deflate")
    pixels = values.astype(f"{order}u2").tobytes()
    pixels = zlib.compress(pixels) if is_packed else pixels
    tags = {256: ("L", [width]), 257: ("L", [height]), 258: ("H", [16] * 3), 259: ("H", [8 if is_packed else 1]),
            262: ("H", [2]), 273: ("L", [8]), 277: ("H", [3]), 278: ("L", [height]),
            279: ("L", [len(pixels)])}  # fmt: skip
    return with_tags(bytes(8) + pixels + bytes(len(pixels) % 2), tags, order, big=False)


@pytest.mark.parametrize("format", ["PNG", "<", ">", "< deflate", "> deflate"])
def test_16_bit_colours_are_scaled_by_their_white_level_from_files_and_in_memory(format):
    values = np.random.default_rng(0).integers(0, 4200, (5, 7, 3))
    data = colour_file(values, format)
    assert "16-bit colours scaled to 8 bits" in probe_image(data).notes
    scaled = np.clip(np.round(values / 4095 * 255), 0, 255)
    assert np.array_equal(decode_image(data, white=4095).permute(1, 2, 0), scaled)
    with Image.open(io.BytesIO(data)) as opened:
        assert np.array_equal(as_image(opened, white=4095).permute(1, 2, 0), scaled)
        assert np.array_equal(as_image(opened).permute(1, 2, 0), values >> 8)  # as Pillow has them
    assert np.array_equal(decode_image(data).permute(1, 2, 0), values >> 8)


def test_12_bits_in_files_of_16_are_told_and_become_whole_pictures_by_one_setting(tmp_path):
    values = np.linspace(0, 3499, 30 * 40).astype(np.uint16).reshape(30, 40)
    Image.fromarray(values[::-1]).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(encode(scene(), "PNG"))  # 8 bits: no white level changes it
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("0 0.5 0.5 0.2 0.2")

    def read(**options):
        table = open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache", **options)
        told = [problem.message for problem in table.problems if problem.severity == "warning"]
        return table, "; ".join(told)

    table, told = read()
    assert "the largest value in 1 of 1 images with 16 bits is 3499, of 65535" in told
    assert "--data.white 4095" in told and table.decode_image(table.row(0)).max() == 14
    for check_images in (True, "header"):
        table, told = read(white=4095, check_images=check_images)
        assert not told and table.decode_image(table.row(0)).max() == 218
    assert torch.equal(table.decode_image(table.row(1)), decode_image(tmp_path / "b.png"))
    assert "all above data.white 3000 becomes white" in read(white=3000)[1]
    rest, part = hold_out(table, 0.5, tmp_path / "cache")
    assert rest.white == part.white == 4095
    with pytest.raises(BadInput, match="data.white is 70000; expected a value of 16-bit pixels"):
        read(white=70_000)
    (tmp_path / "a.png").write_bytes(encode(scene(), "PNG"))
    assert "data.white 4095 changes nothing: no image has 16 bits" in read(white=4095)[1]


def test_a_predictor_decodes_files_with_the_white_level_of_its_training(tmp_path):
    Image.fromarray(np.full((4, 4), 4095, np.uint16)).save(tmp_path / "a.png")
    seen = []

    def predict(images, _):
        seen.extend(image.max().item() for image in images)
        return [{"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0)} for _ in images]

    write_white(4095, tmp_path)
    predictor = Predictor("test", [], predict, white=read_white(tmp_path))
    assert next(predict_files(predictor, [tmp_path / "a.png"])).error is None
    with Image.open(tmp_path / "a.png") as opened:
        predictor(opened)
    assert seen == [255, 255]
    (tmp_path / "decoding.json").write_text('{"white": "high"}')
    with pytest.raises(BadInput, match="`white` is high; expected a whole number above 0"):
        read_white(tmp_path)


def test_bands_that_are_left_out_are_told():
    pixels = np.zeros((4, 6, 5), np.uint8).tobytes()
    tags = {256: ("L", [6]), 257: ("L", [4]), 258: ("H", [8] * 5), 262: ("H", [2]), 273: ("L", [8]), 277: ("H", [5]),
            279: ("L", [len(pixels)]), 338: ("H", [0, 0])}  # fmt: skip
    assert probe_image(with_tags(bytes(8) + pixels, tags, "<", big=False)).notes == ("first 3 of 5 bands used",)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


def xmp_of(orientation: int) -> bytes:
    return f'<x xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{orientation}"/>'.encode()


def xmp_before_exif(data: bytes) -> bytes:
    """A JPEG with a segment of XMP, which says no orientation, in front of all others: EXIF is not the first then."""
    content = b"http://ns.adobe.com/xap/1.0/\0<x/>"
    return data[:2] + b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content + data[2:]


TURNED = {
    "JPEG, EXIF": lambda turn: encode(scene(), "JPEG", exif=exif_of(turn)),
    "JPEG, EXIF behind XMP": lambda turn: xmp_before_exif(encode(scene(), "JPEG", exif=exif_of(turn))),
    "JPEG, XMP": lambda turn: encode(scene(), "JPEG", xmp=xmp_of(turn)),
    "JPEG, both": lambda turn: encode(scene(), "JPEG", exif=exif_of(turn), xmp=xmp_of(9 - turn)),
    "PNG, EXIF": lambda turn: encode(scene(), "PNG", exif=exif_of(turn)),
    "WEBP, EXIF": lambda turn: encode(scene(), "WEBP", exif=exif_of(turn)),
    "WEBP, XMP": lambda turn: encode(scene(), "WEBP", xmp=xmp_of(turn)),
    "TIFF": lambda turn: encode(scene(), "TIFF", exif=exif_of(turn)),
}


@pytest.mark.parametrize("kind", TURNED)
def test_every_orientation_as_pillow_has_it_in_file_and_header(kind):
    """The check of the data goes by the header, training by the pixels: what they disagreed about had its boxes in
    other places, in silence."""
    for orientation in range(1, 9):
        data = TURNED[kind](orientation)
        upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        assert np.array_equal(decode_image(data).permute(1, 2, 0).numpy(), upright), orientation
        assert probe_image(data).size_hw == upright.shape[:2], orientation


MODES = {"JPEG": "L RGB CMYK YCbCr", "PNG": "1 L LA P RGB RGBA I;16", "TIFF": "1 L LA P RGB RGBA CMYK YCbCr I;16"}


@pytest.mark.parametrize(("format", "modes"), MODES.items())
def test_every_mode_becomes_three_channels(format, modes):
    for mode in modes.split():
        data = encode((scene().convert("L") if mode == "I;16" else scene()).convert(mode), format)
        assert decode_image(data).shape == (3, 30, 40) and probe_image(data).size_hw == (30, 40), mode


@pytest.mark.parametrize(("format", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {})])
def test_truncation_is_an_error_wherever_the_file_ends(format, options):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8))
    data = encode(noise, format, **options)
    for part in (0.1, 0.3, 0.55, 0.9, 0.99):
        with pytest.raises(ImageError):
            decode_image(data[: int(part * len(data))])
    decode_image(data)


@pytest.mark.parametrize("options", [
    {}, {"progressive": True}, {"restart_marker_blocks": 3}, {"subsampling": 0}, {"exif": exif_of(6)},
    {"mode": "L"}, {"mode": "CMYK"},
])
@pytest.mark.parametrize("size", [(80, 60), (33, 49)])
def test_an_end_marker_behind_half_a_jpeg_does_not_make_it_whole(options, size):
    """libjpeg fills what is missing with grey, and warns in a way that nobody sees."""
    options = dict(options)
    noise = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), np.uint8)
    data = encode(Image.fromarray(noise).convert(options.pop("mode", "RGB")), "JPEG", **options)
    decode_image(data, thorough=True)
    first = data.index(b"\xff\xda") + 16
    for part in (0.02, 0.3, 0.55, 0.9):
        cut = data[: first + int(part * (len(data) - first - 8))].rstrip(b"\xff") + b"\xff\xd9"
        with pytest.raises(ImageError, match="image data truncated"):
            decode_image(cut, thorough=True)
        if "progressive" not in options or part < 0.5:  # else all but the finest scan are there
            with pytest.raises(ImageError, match="image data truncated"):
                decode_image(cut)
            with pytest.raises(ImageError, match="image data truncated"):
                decode_reduced(cut, (8, 8))


def test_a_grey_picture_is_whole():
    for mode in ("RGB", "L"):
        data = encode(Image.new(mode, (80, 60), "grey"), "JPEG")
        assert decode_image(data).eq(128).all()
        assert decode_reduced(data, (15, 20))[0].eq(128).all()


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


def raised_by(call):
    """What `call` raises; a pipe that is waited for would hang, so the call has a thread of its own."""
    caught = []

    def catch():
        try:
            call()
        except (ImageError, BadInput) as error:
            caught.append(str(error))

    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits"
    return caught[0]


@pytest.mark.parametrize(("mode", "format"), [("1", "PNG"), ("1", "TIFF"), ("L", "JPEG")])
def test_absurd_sizes_are_refused_before_anything_is_decoded(mode, format, monkeypatch):
    side = 13_000 if mode == "1" else 16
    small = encode(Image.new(mode, (side, side)), format)
    for read in (decode_image, probe_image):  # as many as the limit are decoded
        data = encode(scene().convert(mode), format)
        read(data, 1200)
        with pytest.raises(ImageError, match="40 x 30 pixels are more than data.max_image_pixels 1199"):
            read(data, 1199)
    if format == "JPEG":  # its header alone says 60,000 x 60,000
        at = small.index(b"\xff\xc0")
        small = small[: at + 5] + b"\xea\x60\xea\x60" + small[at + 9 :]
    assert format == "TIFF" or len(small) < 60_000
    for place in ("PIL.ImageFile.ImageFile.load", "toolkit.data.decoding.decode_jpeg"):
        monkeypatch.setattr(place, None)  # nothing can be decoded
    tracemalloc.start()
    for read in (decode_image, probe_image):
        assert "more than data.max_image_pixels 100000000" in raised_by(lambda read=read: read(small))
    assert tracemalloc.get_traced_memory()[1] < 3 * len(small) + 2**20
    tracemalloc.stop()


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.booleans(), st.integers(0, 60_000))
def test_the_size_in_the_header_of_a_jpeg(width, height, progressive, comment):
    """Whatever stands before it: thumbnails and comments have headers of their own."""
    thumbnail = encode(scene(), "JPEG")
    data = encode(Image.new("RGB", (width, height)), "JPEG", progressive=progressive,
                  comment=(thumbnail + b"\xff" * comment)[:60_000])  # fmt: skip
    assert _jpeg_size(bytearray(data)) == (width, height)
    assert _jpeg_size(bytearray(b"\xff\xd8\xff" + data[3:8])) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    for read in (decode_image, probe_image):
        assert "it is a pipe" in raised_by(lambda read=read: read(tmp_path / "pipe.jpg"))
        assert "it is a pipe" in raised_by(lambda read=read: read(tmp_path / "link.jpg"))
        assert "it is a folder" in raised_by(lambda read=read: read(tmp_path / "folder.jpg"))
        assert "it is a device" in raised_by(lambda read=read: read(Path("/dev/zero")))
        assert "name too long" in raised_by(lambda read=read: read(tmp_path / ("x" * 300 + ".jpg")))
        with open(tmp_path / "sparse.jpg", "wb") as file:
            file.truncate(2**40)
        assert "bytes, more than" in raised_by(lambda read=read: read(tmp_path / "sparse.jpg"))
        assert raised_by(lambda read=read: read(encode(scene(), "PNG", exif=b"Exif\0\0II*\0")))  # exif that is cut off
    pipe = {"source": tmp_path / "pipe.jpg", "format": "coco", "cache_dir": tmp_path}
    assert "a pipe or a device" in raised_by(lambda: open_dataset(**pipe))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_a_data_set_with_such_images_names_them(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    os.mkfifo(folder / "pipe.jpg")
    (folder / "large.png").write_bytes(encode(Image.new("1", (13_000, 13_000)), "PNG"))
    (folder / "good.png").write_bytes(encode(scene(), "PNG"))
    sizes = {"good.png": (40, 30), "pipe.jpg": (40, 30), "large.png": (13_000, 13_000), "x" * 300 + ".jpg": (9, 9),
             "wide.png": (1e300, 2), "half\ud800.png": (9, 9)}  # fmt: skip
    images = [{"id": i, "file_name": name, "width": w, "height": h} for i, (name, (w, h)) in enumerate(sizes.items())]
    document = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "a\ud800"}]}
    (tmp_path / "a.json").write_text(json.dumps(document))

    def read(**options):
        return open_dataset(tmp_path / "a.json", image_dir=folder, cache_dir=tmp_path / "cache", **options)

    said = raised_by(read)
    for words in ("it is a pipe", "13000 x 13000 pixels are more than data.max_image_pixels 100000000", "too long",
                  "`width` is 1e+300", "not Unicode"):  # fmt: skip
        assert words in said
    assert len(read(on_error="drop")) == 1 and len(read(on_error="drop", check_images=False)) == 3
    assert read(on_error="drop").class_names == [r"a\ud800"]
    assert len(read(on_error="drop", check_images="header", max_image_pixels=170_000_000)) == 2
    with pytest.raises(BadInput):  # not one is left
        read(on_error="drop", max_image_pixels=1000)
    table = read(on_error="drop", max_image_pixels=1200)
    assert table.max_image_pixels == 1200
    (folder / "good.png").write_bytes(encode(scene(50, 30), "PNG"))  # changed while the run goes on
    with pytest.raises(BadInput, match="50 x 30 pixels are more than data.max_image_pixels 1200"):
        DetectionDataset(table, transform=None, seed=0)[SampleKey(0, 0)]


MODES = "1 L LA P RGB RGBA RGBa La CMYK YCbCr LAB HSV I F I;16 I;16B I;16L".split()
LOSSLESS = {  # formats, and the modes that they keep
    "PNG": "1 L LA P RGB RGBA I;16".split(),
    "BMP": "1 L P RGB".split(),
    "PPM": "1 L RGB I".split(),
    "TIFF": "1 L LA P RGB RGBA CMYK YCbCr LAB I F I;16".split(),
    "GIF": "L P".split(),
}


def of_mode(mode: str, seed: int) -> Image.Image:
    """A picture of a mode; of 16 bits with all of them."""
    draw = np.random.default_rng(seed)
    grey = draw.integers(0, 65536, (9, 12), dtype=np.uint16)
    colours = Image.fromarray(draw.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    made = {
        "I;16": lambda: Image.fromarray(grey),
        "I;16L": lambda: Image.frombytes("I;16L", (12, 9), grey.astype("<u2").tobytes()),
        "I;16B": lambda: Image.frombytes("I;16B", (12, 9), grey.astype(">u2").tobytes()),
        "I": lambda: Image.fromarray(grey.astype(np.int32)),
        "F": lambda: colours.convert("L").convert("F"),
        "P": lambda: colours.quantize(16),
        "LA": lambda: colours.convert("L").convert("LA"),
        "La": lambda: colours.convert("L").convert("LA").convert("La"),
        "RGBa": lambda: colours.convert("RGBA").convert("RGBa"),
    }
    return made.get(mode, lambda: colours.convert(mode))()


def read(source) -> torch.Tensor | str:
    """Pixels, or why there are none."""
    try:
        return as_image(source) if isinstance(source, Image.Image) else decode_image(source)
    except (ImageError, BadInput) as error:
        return str(error).partition(": ")[2] or str(error)


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_in_memory_is_what_training_makes_of_its_file(mode, tmp_path):
    """Of every mode of Pillow, in every format that keeps its pixels: equal, or refused with the same reason."""
    for seed in range(3):
        picture = of_mode(mode, seed)
        in_memory = read(picture)
        assert isinstance(in_memory, torch.Tensor) == (mode != "F")
        for format, kept in LOSSLESS.items():
            if mode not in kept:
                continue
            path = tmp_path / f"{seed}.{format.lower()}"
            picture.save(path, format)
            with Image.open(path) as opened:
                of_file, again = read(path), read(opened)
            if isinstance(of_file, str):
                assert again.endswith(of_file.rpartition(": ")[2]) and mode == "F"
            else:
                assert torch.equal(of_file, again), f"{mode} as {format}"
                if format in ("PNG", "BMP") and mode != "P":
                    assert torch.equal(of_file, in_memory), f"{mode} as {format}"


def test_16_bits_turned_pictures_and_the_first_frame_are_the_same_both_ways(tmp_path):
    grey = of_mode("I;16", 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    grey.save(tmp_path / "turned.png", exif=exif)
    frames = [of_mode("RGB", seed) for seed in range(3)]
    frames[0].save(tmp_path / "frames.tiff", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "frames.webp", save_all=True, append_images=frames[1:], lossless=True)
    for path in sorted(tmp_path.iterdir()):
        with Image.open(path) as opened:
            assert torch.equal(decode_image(path), as_image(opened)), path.name
    assert decode_image(tmp_path / "turned.png").shape == (3, 12, 9)


DAMAGED = [("JPEG", {}), ("PNG", {}), ("GIF", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}),
           ("WEBP", {"lossless": True}), ("PPM", {})]  # fmt: skip


@pytest.mark.parametrize(("format", "options"), DAMAGED)
def test_a_damaged_file_is_refused_in_memory_too(format, options, tmp_path):
    """Pillow reads pixels late: a picture that it has opened may be cut off, or have a byte of another value."""
    whole = encode(Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)), format, **options)
    path = tmp_path / f"picture.{format.lower()}"
    refused = 0
    for number in range(12):
        data = bytearray(whole)
        if number % 2:
            del data[len(data) * number // 13 :]
        else:
            data[len(data) * number // 13] ^= 0xFF
        path.write_bytes(data)
        try:
            opened = Image.open(path)
        except OSError:  # refused by Pillow itself
            refused += 1
            continue
        with opened:
            of_file, in_memory = read(path), read(opened)
        assert isinstance(of_file, str) == isinstance(in_memory, str), (number, of_file, in_memory)
        refused += isinstance(of_file, str)
    assert refused >= 2


def test_a_picture_in_memory_that_says_it_is_huge_is_refused_before_it_is_decoded(tmp_path):
    data = bytearray(encode(scene(), "GIF"))
    data[6:10] = b"\xff\xff\xff\xff"
    (tmp_path / "bomb.gif").write_bytes(data)
    with Image.open(tmp_path / "bomb.gif") as opened, pytest.raises(BadInput, match="65535 x 65535 .*max_image_pixels"):
        as_image(opened)


def test_damage_behind_the_first_frame_is_a_note(tmp_path):
    frames = [Image.fromarray(np.full((30, 40, 3), value, np.uint8)) for value in (10, 200)]
    data = bytearray(encode(frames[0], "TIFF", save_all=True, append_images=frames[1:]))
    second = max(data.rfind(b"\x01\x01" + kind) for kind in (b"\x03\x00", b"\x04\x00"))  # the tag of its height
    data[second : second + 2] = b"\xff\xfe"
    assert decode_image(bytes(data))[0, 0, 0] == 10
    assert "what follows it in the file is damaged" in " ".join(probe_image(bytes(data)).notes)
