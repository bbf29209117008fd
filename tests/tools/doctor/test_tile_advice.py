"""Tiles are advised where they make tiny objects larger."""

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.tools.doctor.tile_advice import tile_advice

BOXES = Boxes.found(
    [3],
    np.array([[0, 0, 40, 40], [50, 50, 62, 62], [90, 90, 102, 102]]),
    np.zeros(3),
    np.zeros(3),
)
SIZE = np.array([[1500, 2000]])


def test_tiles_are_advised_for_many_tiny_objects():
    sentence = tile_advice("train", BOXES, SIZE, (640, 640))
    assert "train: 67% of the objects are smaller than 8 px" in sentence
    assert "0% in tiles" in sentence
    assert "--data.tile 640" in sentence
    assert "longer than the overlap" not in sentence


def test_objects_that_are_longer_than_the_overlap_are_counted():
    assert "33% are longer than the overlap" in tile_advice("train", BOXES, SIZE, (180, 180))


def test_nothing_is_advised_where_tiles_do_not_pay():
    assert tile_advice("train", BOXES, np.array([[640, 640]]), (640, 640)) is None, "tiles would be the pictures"
    assert tile_advice("train", BOXES[np.arange(1)], SIZE, (640, 640)) is None
    assert tile_advice("train", BOXES[np.arange(0)], SIZE, (640, 640)) is None
