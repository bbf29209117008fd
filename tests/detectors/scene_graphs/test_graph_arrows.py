"""Relations in pictures: arrows from subjects to objects, and the graph beside the picture."""

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw
from report_data import found_of

from toolkit.detectors.scene_graphs.graph_pictures import draw_arrow, draw_found, left_out_in_words
from toolkit.evaluation.draw import CLASS_COLOURS


def pixels_in(picture, label: int) -> tuple:
    """Rows and columns of the pixels in the colour of this class."""
    colour = ImageColor.getrgb(CLASS_COLOURS[label])
    rgb = np.asarray(picture)[..., :3]
    is_equal = (rgb == colour).all(-1)
    return is_equal.nonzero()


def drawn(path, boxes, pairs, **options) -> np.ndarray:
    """A picture of 640 x 320 with relations, the first of predicate 3, and their graph beside it."""
    num_boxes = len(boxes)
    num_pairs = len(pairs)
    graph = found_of(
        boxes,
        [0, 1] * (num_boxes // 2),
        [0.9] * num_boxes,
    )
    graph["pairs"] = torch.tensor(pairs)
    graph["predicates"] = torch.tensor([3, 2][:num_pairs])
    graph["triplet_scores"] = torch.tensor([0.5] * num_pairs)
    path = draw_found(
        torch.zeros(3, 320, 640, dtype=torch.uint8),
        graph,
        ["cup", "plate"],
        ["on", "under", "in", "beside"],
        path,
        **options,
    )
    return np.asarray(Image.open(path))


def test_a_relation_is_an_arrow_from_its_subject_to_its_object(tmp_path):
    subject = [10, 140, 50, 180]
    object_ = [590, 140, 630, 180]
    boxes = [subject, object_]
    picture = drawn(tmp_path / "a.png", boxes, [[0, 1]])
    rows, columns = pixels_in(picture[:, :640], 3)
    assert 150 < rows.min()
    assert rows.max() < 175
    assert columns.min() < 35
    assert 600 < columns.max() < 612
    unsure = drawn(tmp_path / "b.png", boxes, [[0, 1]], relation_score=0.6)
    rows, _ = pixels_in(unsure[:, :640], 3)
    assert not len(rows)


def test_an_arrow_ends_before_its_object():
    picture = Image.new("RGB", (100, 100))
    draw_arrow(
        ImageDraw.Draw(picture),
        (50, 10),
        (50, 90),
        CLASS_COLOURS[0],
        8,
        gap=20,
    )
    rows, _ = pixels_in(picture, 0)
    assert rows.min() == 10
    assert 64 < rows.max() <= 70


def test_beside_the_picture_objects_lie_on_a_circle(tmp_path):
    """In the order of their angles around their middle: 0 left, 1, 2 below right."""
    places = ((100, 100), (200, 100), (150, 300), (600, 20))
    boxes = [[x, y, x, y] for x, y in places]
    picture = drawn(tmp_path / "a.png", boxes, [[0, 2], [0, 1]])
    rows, columns = pixels_in(picture[:, 640:], 3)
    assert columns.min() < 100
    assert rows.min() > 140
    assert rows.max() > 200


def test_relations_that_are_left_out_are_told():
    assert left_out_in_words(1, 1, 20, 0.0) == ""
    assert left_out_in_words(0, 0, 20, 0.0) == "no relations"
    assert left_out_in_words(20, 100, 20, 0.0) == "20 of 100 relations are drawn"
    some = left_out_in_words(0, 9, 20, 0.5)
    assert some == "0 of 9 relations are drawn: no other has a score of 0.5 or more"
