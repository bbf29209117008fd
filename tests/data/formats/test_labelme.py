"""LabelMe and X-AnyLabeling: `assets/dirty_sets/labelme.txt`; masks, and pictures that are stored on their side."""

import base64
import io
import json

import numpy as np
import pytest
from dirty_sets import check_set, sets_in
from PIL import Image

from toolkit.base.masks import bitmap
from toolkit.data.formats import open_dataset

SHAPE = {"label": "a", "points": [[5, 10], [25, 10], [25, 15]]}


@pytest.mark.parametrize("one", sets_in("labelme"))
def test_sets(one, tmp_path):
    check_set(one, tmp_path)


def opened(folder, shapes, size_wh=(100, 80), **options):
    document = {"imagePath": "a.jpg", "imageData": None, "imageWidth": size_wh[0], "imageHeight": size_wh[1]}
    (folder / "a.json").write_text(json.dumps(document | {"shapes": shapes}))
    return open_dataset("train", path=folder, cache_dir=folder / "cache", masks=True, **options)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_a_mask_has_the_pixels_of_its_picture(tmp_path):
    Image.new("RGB", (100, 80)).save(tmp_path / "a.jpg")
    pixels = np.array([[0, 1, 1], [1, 0, 1]], np.uint8)
    mask = {"label": "a", "shape_type": "mask", "points": [[10, 20], [12, 21]], "mask": png(pixels)}
    table = opened(tmp_path, [mask])
    drawn = bitmap(table.masks_of(0)[0], (80, 100))
    assert drawn.sum() == 4
    assert np.array_equal(drawn[20:22, 10:13], pixels)
    assert table.boxes().xyxy.tolist() == [[10, 20, 13, 22]]


def test_a_mask_and_a_polygon_of_one_group_are_united(tmp_path):
    Image.new("RGB", (100, 80)).save(tmp_path / "a.jpg")
    mask = {"label": "a", "shape_type": "mask", "points": [[40, 20], [42, 21]], "mask": png(np.ones((2, 3), np.uint8))}
    square = {"label": "a", "points": [[2, 2], [6, 2], [6, 6], [2, 6]]}
    table = opened(tmp_path, [part | {"group_id": 7} for part in (mask, square)])
    assert bitmap(table.masks_of(0)[0], (80, 100)).sum() == 16 + 6
    assert table.boxes().xyxy.tolist() == [[2, 2, 43, 22]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_shapes_on_a_picture_as_it_is_stored_are_turned_with_it(tmp_path, orientation):
    """Old versions of LabelMe show pictures as they are stored; where these lie on their side, the size says so."""
    stored = np.zeros((40, 60, 3), np.uint8)
    stored[10:15, 5:25] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / "a.jpg", exif=exif, quality=100)
    block = {"label": "a", "points": [[5, 10], [25, 10], [25, 15], [5, 15]]}
    mask = {"label": "a", "shape_type": "mask", "points": [[5, 10], [24, 14]], "mask": png(np.ones((5, 20), np.uint8))}
    table = opened(tmp_path, [block, mask], (60, 40))
    if orientation in (2, 3, 4):  # the size does not tell: taken as upright
        assert table.boxes().xyxy[0].tolist() == [5, 10, 25, 15]
        return
    row = table.row(0)
    bright = table.decode_image(row).numpy()[0] > 127
    left, top, right, bottom = map(int, row["objects"]["bbox"][0])
    assert bright[top:bottom, left:right].all()
    assert bright.sum() == 100
    for shape in table.masks_of(0):
        assert np.array_equal(bitmap(shape, (row["height"], row["width"])), bright)
    assert ("turned upright" in " ".join(map(str, table.problems))) == (orientation > 4)


def test_shapes_on_the_upright_picture_stay(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 40)).save(tmp_path / "a.jpg", exif=exif)
    table = opened(tmp_path, [SHAPE], (40, 60))
    assert table.boxes().xyxy.tolist() == [[5, 10, 25, 15]]
    assert not table.problems


def test_a_mask_needs_the_size_of_its_image_and_stays_in_it(tmp_path):
    Image.new("RGB", (100, 80)).save(tmp_path / "a.jpg")
    mask = {"label": "a", "shape_type": "mask", "points": [[98, -1], [100, 0]], "mask": png(np.ones((2, 3), np.uint8))}
    table = opened(tmp_path, [mask, SHAPE])
    assert table.boxes().xyxy[0].tolist() == [98, 0, 100, 1]
    outside = mask | {"points": [[300, 300], [302, 301]]}
    table = opened(tmp_path, [outside, SHAPE])
    assert "1 mask without a pixel in the image" in str(table.problems[0])
    table = opened(tmp_path, [mask, SHAPE], (None, None), on_error="drop")
    assert "shape 1: it is a mask, for which the file must say width and height" in str(table.problems[0])
