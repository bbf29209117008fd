"""Label Studio: `assets/dirty_sets/label_studio.txt`, and the run lengths of its brushes."""

import json

import numpy as np
import pytest
from dirty_sets import check_set, sets_in
from small_data import picture

from toolkit.base.masks import bitmap
from toolkit.data.formats import open_dataset

SIZES = (3, 4, 8, 16)  # bits of the lengths of runs


@pytest.mark.parametrize("one", sets_in("label_studio"))
def test_sets(one, tmp_path):
    check_set(one, tmp_path)


def brush(pixels) -> list[int]:
    """Return pixels as Label Studio's converter writes them: runs of one value, and now and then a row of values."""
    values = np.repeat(pixels.ravel().astype(np.uint8) * 255, 4)
    bits = f"{len(values):032b}{7:05b}" + "".join(f"{size - 1:04b}" for size in SIZES)
    at = 0
    while at < len(values):
        same = int((values[at : at + 256] == values[at]).cumprod().sum())
        if same > 8:
            bits += f"1{2:02b}{same - 1:08b}{values[at]:08b}"
            at += same
            continue
        row = values[at : at + 8]
        bits += f"0{0:02b}{len(row) - 1:03b}" + "".join(f"{value:08b}" for value in row)
        at += len(row)
    bits += "0" * (-len(bits) % 8)
    return [int(bits[start : start + 8], 2) for start in range(0, len(bits), 8)]


def test_a_brush_has_the_pixels_that_were_painted(tmp_path):
    picture(tmp_path / "a.png")
    pixels = np.zeros((80, 100), bool)
    pixels[10:30, 20:70] = True
    pixels[15:20, 30:40] = False
    pixels[50, 60] = True
    value = {"format": "rle", "rle": brush(pixels), "brushlabels": ["a"]}
    shape = {"type": "brushlabels", "original_width": 100, "original_height": 80, "value": value}
    tasks = [{"id": 1, "data": {"image": "a.png"}, "annotations": [{"result": [shape]}]}]
    (tmp_path / "project.json").write_text(json.dumps(tasks))
    table = open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache", masks=True)
    assert np.array_equal(bitmap(table.masks_of(0)[0], (80, 100)), pixels)
    assert table.boxes().xyxy.tolist() == [[20, 10, 70, 51]]
    value["rle"] = value["rle"][:-3]
    (tmp_path / "project.json").write_text(json.dumps(tasks))
    table = open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache", on_error="drop")
    assert "its brush ends too early" in str(table.problems[0])
