"""Relations in pictures: arrows from subjects to objects, and the graph beside the picture."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from report_data import found_of

from toolkit.detectors.scene_graphs.graph_pictures import draw_arrow, draw_found, left_out_in_words
from toolkit.evaluation.draw import CLASS_COLOURS


def pixels_in(picture, label: int) -> tuple:
    """Rows and columns of the pixels in the colour of this class."""
    colour = [int(CLASS_COLOURS[label][i : i + 2], 16) for i in (1, 3, 5)]
    return (np.asarray(picture)[..., :3] == colour).all(-1).nonzero()


def drawn(path, boxes, pairs, **options) -> np.ndarray:
    """A picture of 640 x 320 with relations, the first of predicate 3, and their graph beside it."""
    graph = found_of(boxes, [0, 1] * (len(boxes) // 2), [0.9] * len(boxes))
    graph["pairs"] = torch.tensor(pairs)
    graph["predicates"] = torch.tensor([3, 2])[: len(pairs)]
    graph["triplet_scores"] = torch.full((len(pairs),), 0.5)
    image = torch.zeros(3, 320, 640, dtype=torch.uint8)
    path = draw_found(image, graph, ["cup", "plate"], ["on", "under", "in", "beside"], path, **options)
    return np.asarray(Image.open(path))


def test_a_relation_is_an_arrow_from_its_subject_to_its_object(tmp_path):
    boxes = [[10, 140, 50, 180], [590, 140, 630, 180]]
    rows, columns = pixels_in(drawn(tmp_path / "a.png", boxes, [[0, 1]])[:, :640], 3)
    assert 150 < rows.min() <= rows.max() < 175
    assert columns.min() < 35
    assert 600 < columns.max() < 612
    unsure = drawn(tmp_path / "b.png", boxes, [[0, 1]], relation_score=0.6)
    assert not len(pixels_in(unsure[:, :640], 3)[0])


def test_an_arrow_ends_before_its_object():
    picture = Image.new("RGB", (100, 100))
    draw_arrow(ImageDraw.Draw(picture), (50, 10), (50, 90), CLASS_COLOURS[0], 8, gap=20)
    rows, _ = pixels_in(picture, 0)
    assert rows.min() == 10
    assert 64 < rows.max() <= 70


def test_beside_the_picture_objects_lie_on_a_circle(tmp_path):
    """In the order of their angles around their middle: 0 left, 1, 2 below right."""
    boxes = [[x, y, x, y] for x, y in ((100, 100), (200, 100), (150, 300), (600, 20))]
    rows, columns = pixels_in(drawn(tmp_path / "a.png", boxes, [[0, 2], [0, 1]])[:, 640:], 3)
    assert columns.min() < 100
    assert rows.min() > 140
    assert rows.max() > 200


def test_relations_that_are_left_out_are_told():
    assert left_out_in_words(1, 1, 20, 0.0) == ""
    assert left_out_in_words(0, 0, 20, 0.0) == "no relations"
    assert left_out_in_words(20, 100, 20, 0.0) == "20 of 100 relations are drawn"
    some = left_out_in_words(0, 9, 20, 0.5)
    assert some == "0 of 9 relations are drawn: no other has a score of 0.5 or more"
