"""Detections in tiles become those of the picture: one box for each object."""

import pytest
import torch

from toolkit.models.joined_tiles import best_of_classes, join_tiles, merged


def part(side, score, label=0):
    """One square box."""
    return {
        "boxes": torch.tensor([[0.0, 0.0, side, side]]),
        "scores": torch.tensor([score]),
        "labels": torch.tensor([label]),
    }


def test_boxes_of_other_classes_do_not_suppress_each_other():
    assert merged([part(9, 0.9), part(9, 0.8, 1)], 0.5)["labels"].tolist() == [0, 1]
    assert merged([part(9, 0.9), part(9, 0.9)], 0.5)["labels"].tolist() == [0]


@pytest.mark.parametrize(("score", "left"), [(0.01, [0.9, 0.01]), (0.5, [0.5])])
def test_no_guess_takes_a_part_away_that_is_nearly_sure(score, left):
    kept = merged(
        [part(30, 0.9), part(60, score)],
        0.5,
        torch.tensor([True, False]),
    )
    assert kept["scores"].tolist() == pytest.approx(left)


@pytest.mark.parametrize(
    ("right", "scores", "is_other_cut", "expected"),
    [
        (30.1, (0.9, 0.3), True, 0),  # the same cut object, seen a little wider by a detector that is not sure
        (30.1, (0.9, 0.8), True, 0),
        (30.1, (0.3, 0.9), True, 1),
        (30.1, (0.9, 0.3), False, 0),  # it ends near a border, and is as whole as the other
        (45.0, (0.9, 0.3), True, 0),
        (45.0, (0.9, 0.6), True, 1),  # it shows more of the object, and is nearly as sure
        (45.0, (0.9, 0.3), False, 1),  # all of the object
        (45.0, (0.9, 0.2), False, 0),  # a guess
    ],
)
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_of_two_boxes_of_a_cut_object_the_better_one_is_left(right, scores, is_other_cut, expected, order):
    boxes = torch.tensor([[0.0, 0.0, 30.0, 40.0], [0.0, 0.0, right, 40.0]])
    found = {
        "boxes": boxes[order],
        "scores": torch.tensor(scores)[order],
        "labels": torch.zeros(2, dtype=torch.int64),
    }
    kept = merged(
        [found],
        0.5,
        torch.tensor([True, is_other_cut])[order],
    )
    assert kept["boxes"].tolist() == [boxes[expected].tolist()]


def test_of_each_class_the_best_are_kept():
    found = {
        "boxes": torch.arange(20.0).reshape(5, 4),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]),
        "labels": torch.tensor([0, 1, 0, 0, 1]),
    }
    assert best_of_classes(found, 2)["scores"].tolist() == pytest.approx([0.9, 0.8, 0.7, 0.5])
    assert len(best_of_classes(found, 5)["labels"]) == 5


def test_boxes_of_tiles_come_to_their_place_in_the_picture():
    tiles = torch.tensor([[0, 0, 100, 100], [80, 0, 180, 100]])
    joined = join_tiles(
        [part(20, 0.9), part(30, 0.8)],
        tiles,
        (100, 180),
        100,
    )
    assert joined["boxes"].tolist() == [[0, 0, 20, 20], [80, 0, 110, 30]]
