"""Images with 16 bits become 8 bits by the value that is to be white, from files and in memory."""

import io

import numpy as np
import pytest
import torch
from image_files import IMAGES, colour_file, encode, ramp
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.decoding import ImageError, decode_image, probe_image
from toolkit.data.formats import open_dataset
from toolkit.data.sixteen_bits import COLOUR_NOTE
from toolkit.models.final import read_white, write_white
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.predict.predict_each import predict_files
from toolkit.tools.predict.predictor import Predictor, as_image


def test_grey_is_scaled_and_not_clipped():
    pixels = decode_image(IMAGES / "gray16.png")
    assert pixels[:, 18, 18].tolist() == [195] * 3
    assert pixels[:, 2, 2].tolist() == [78] * 3
    extremes = Image.fromarray(np.array([[0, 65535, 257, 128]], np.uint16))
    assert decode_image(encode(extremes, "PNG"))[0].tolist() == [[0, 255, 1, 0]]


@pytest.mark.parametrize(
    ("value", "words"),
    [(np.int32(70_000), "expected 8 or 16 bits"), (np.float32(0.5), "floating-point")],
)
def test_other_values_are_refused(value, words):
    data = encode(Image.fromarray(np.array([[value]])), "TIFF")
    with pytest.raises(ImageError, match=words):
        decode_image(data)


@pytest.mark.parametrize("format", ["PNG", "<", ">", "< deflate", "> deflate"])
def test_colours_are_scaled_by_their_white_level(format):
    values = np.random.default_rng(0).integers(
        0,
        4200,
        (5, 7, 3),
    )
    data = colour_file(values, format)
    assert COLOUR_NOTE in probe_image(data).notes
    scaled = np.clip(np.round(values / 4095 * 255), 0, 255)
    assert np.array_equal(decode_image(data, white=4095).permute(1, 2, 0), scaled)
    assert np.array_equal(decode_image(data).permute(1, 2, 0), values >> 8)
    with Image.open(io.BytesIO(data)) as opened:
        assert np.array_equal(as_image(opened, white=4095).permute(1, 2, 0), scaled)
        assert np.array_equal(as_image(opened).permute(1, 2, 0), values >> 8)  # as Pillow has loaded them


@pytest.fixture
def read(tmp_path):
    """`read(**options)` -> (table, warnings) of a picture of 12 bits in a file of 16 and one of 8 bits."""
    values = np.linspace(0, 3499, 30 * 40).astype(np.uint16).reshape(30, 40)
    Image.fromarray(values[::-1]).save(tmp_path / "a.png")
    ramp().save(tmp_path / "b.png")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("0 0.5 0.5 0.2 0.2")

    def open_table(**options):
        table = open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache", **options)
        told = [problem.message for problem in table.problems if problem.severity == "warning"]
        return table, "; ".join(told)

    return open_table


def test_twelve_bits_in_files_of_sixteen_are_told(read):
    table, told = read()
    assert "the largest value in 1 of 1 images with 16 bits is 3499, of 65535" in told
    assert "--data.white 4095" in told
    assert table.decode_image(table.row(0)).max() == 14


@pytest.mark.parametrize("check_images", [True, "header"])
def test_one_setting_makes_whole_pictures_of_twelve_bits(read, tmp_path, check_images):
    table, told = read(white=4095, check_images=check_images)
    assert not told
    assert table.decode_image(table.row(0)).max() == 218
    # No white level changes 8 bits.
    assert torch.equal(table.decode_image(table.row(1)), decode_image(tmp_path / "b.png"))
    parts = hold_out(table, 0.5, tmp_path / "cache")
    assert [part.white for part in parts] == [4095, 4095]


def test_a_white_level_that_does_not_fit_is_told(read, tmp_path):
    assert "all above data.white 3000 becomes white" in read(white=3000)[1]
    with pytest.raises(BadInput, match="data.white is 70000; expected a value of 16-bit pixels"):
        read(white=70_000)
    ramp().save(tmp_path / "a.png")
    assert "data.white 4095 changes nothing: no image has 16 bits" in read(white=4095)[1]


def test_a_predictor_decodes_with_the_white_level_of_its_training(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(
        np.full(
            (4, 4),
            4095,
            np.uint16,
        )
    ).save(file)
    seen = []

    def predict(images, score_threshold):
        seen.extend(image.max().item() for image in images)
        none = {
            "boxes": torch.zeros(0, 4),
            "scores": torch.zeros(0),
            "labels": torch.zeros(0),
        }
        return [none for _ in images]

    write_white(4095, tmp_path)
    predictor = Predictor("test", [], predict, white=read_white(tmp_path))
    assert next(predict_files(predictor, [file])).error is None
    with Image.open(file) as opened:
        predictor(opened)
    assert seen == [255, 255]
    (tmp_path / "decoding.json").write_text('{"white": "high"}')
    with pytest.raises(BadInput, match="`white` is high; expected a whole number above 0"):
        read_white(tmp_path)
