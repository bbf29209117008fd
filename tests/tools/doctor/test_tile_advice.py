"""Tiles are advised where they make tiny objects larger."""

from report_data import table_of

from toolkit.tools.doctor.tile_advice import tile_advice

LARGE = [0, 0, 40, 40]
SQUARE = {"height": 640, "width": 640}
BOXES = [LARGE, [50, 50, 62, 62], [90, 90, 102, 102]]


def pictures(folder, boxes=BOXES, size=(1500, 2000)):
    """Twenty pictures with these boxes."""
    return table_of(folder, [[(box, 0) for box in boxes]] * 20, size=size, draw=False)


def test_tiles_are_advised_for_many_tiny_objects(tmp_path):
    sentence = tile_advice("train", pictures(tmp_path), SQUARE)
    assert "train: 67% of the objects are smaller than 8 px" in sentence
    assert "0% in tiles" in sentence
    assert "--data.tile 640 --data.tile_empty 0.05" in sentence
    assert "longer than the overlap" not in sentence


def test_objects_are_judged_at_the_size_that_the_shorter_side_gives_them(tmp_path):
    """Boxes of 17 px become 8.05 px where the shorter side becomes 710 px, and 6.97 px in a square of 710 px."""
    table = pictures(tmp_path, [[0, 0, 17, 17]])
    assert tile_advice("train", table, {"shortest_edge": 710, "longest_edge": 1333}) is None
    assert "100% of the objects are smaller" in tile_advice("train", table, {"height": 710, "width": 710})
    sentence = tile_advice("train", table, {"shortest_edge": 710, "longest_edge": 900})
    assert "100% of the objects are smaller than 8 px at a training size of 710 px (shorter side)" in sentence
    assert "0% in tiles of 710 x 710 px" in sentence


def test_the_length_of_an_epoch_is_said(tmp_path):
    """Of the 4 x 3 tiles of a picture the first has objects, and one in twenty of the others is taken."""
    sentence = tile_advice("train", pictures(tmp_path), SQUARE)
    assert "an epoch then has 31 tiles instead of 20 pictures, about 2 times as many steps" in sentence


def test_objects_that_are_longer_than_the_overlap_are_counted(tmp_path):
    assert "33% are longer than the overlap" in tile_advice("train", pictures(tmp_path), {"height": 180, "width": 180})


def test_nothing_is_advised_where_tiles_do_not_pay(tmp_path):
    small = pictures(tmp_path / "small", size=(640, 640))
    assert tile_advice("train", small, SQUARE) is None, "tiles would be the pictures"
    assert tile_advice("train", pictures(tmp_path / "large", [LARGE]), SQUARE) is None
    assert tile_advice("train", pictures(tmp_path / "none", []), SQUARE) is None
    huge = pictures(tmp_path / "huge", size=(500_000, 500_000))
    assert tile_advice("train", huge, SQUARE) is None, "more tiles than can be trained on"
