"""Tiles are advised where they make tiny objects larger."""

from report_data import table_of

from toolkit.tools.doctor.tile_advice import tile_advice

LARGE = [0, 0, 40, 40]
BOXES = [LARGE, [50, 50, 62, 62], [90, 90, 102, 102]]


def pictures(folder, boxes=BOXES, size=(1500, 2000)):
    """Twenty pictures with these boxes."""
    return table_of(folder, [[(box, 0) for box in boxes]] * 20, size=size, draw=False)


def test_tiles_are_advised_for_many_tiny_objects(tmp_path):
    sentence = tile_advice("train", pictures(tmp_path), (640, 640))
    assert "train: 67% of the objects are smaller than 8 px" in sentence
    assert "0% in tiles" in sentence
    assert "--data.tile 640 --data.tile_empty 0.05" in sentence
    assert "longer than the overlap" not in sentence


def test_the_length_of_an_epoch_is_said(tmp_path):
    """Of the 4 x 3 tiles of a picture the first has objects, and one in twenty of the others is taken."""
    sentence = tile_advice("train", pictures(tmp_path), (640, 640))
    assert "an epoch then has 31 tiles instead of 20 pictures, about 2 times as many steps" in sentence


def test_objects_that_are_longer_than_the_overlap_are_counted(tmp_path):
    assert "33% are longer than the overlap" in tile_advice("train", pictures(tmp_path), (180, 180))


def test_nothing_is_advised_where_tiles_do_not_pay(tmp_path):
    small = pictures(tmp_path / "small", size=(640, 640))
    assert tile_advice("train", small, (640, 640)) is None, "tiles would be the pictures"
    assert tile_advice("train", pictures(tmp_path / "large", [LARGE]), (640, 640)) is None
    assert tile_advice("train", pictures(tmp_path / "none", []), (640, 640)) is None
    huge = pictures(tmp_path / "huge", size=(500_000, 500_000))
    assert tile_advice("train", huge, (640, 640)) is None, "more tiles than can be trained on"
