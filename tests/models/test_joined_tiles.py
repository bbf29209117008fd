"""Detections in tiles become those of the picture: one box, and one mask, for each object."""

import pytest
import torch

from toolkit.base.masks import bitmap, boxes_around, rles_of
from toolkit.data.tiling import tiles_of
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


# ---- masks -----------------------------------------------------------------------------------------------------------

SIZE_HW = (150, 190)


def drawn(*rectangles):
    """The pixels (H, W) of rectangles xyxy, united."""
    pixels = torch.zeros(SIZE_HW, dtype=torch.bool)
    for left, top, right, bottom in rectangles:
        pixels[top:bottom, left:right] = True
    return pixels


def seen(pixels, scores, labels):
    """Return the detections of a detector that finds exactly the pixels it is shown."""
    masks = torch.stack(pixels)
    is_seen = masks.flatten(1).any(1)
    return {
        "boxes": boxes_around(masks[is_seen]),
        "scores": torch.tensor(scores)[is_seen],
        "labels": torch.tensor(labels)[is_seen],
        "masks": rles_of(masks[is_seen]),
    }


def joined(objects, scores_of_tiles, labels=None, tile_hw=(60, 70), overlap=0.3, **options):
    """The joined detections of objects, pixels (H, W), with scores by tile; a score of 0: the tile misses it."""
    tiles = tiles_of(SIZE_HW, tile_hw, overlap)
    parts = []
    for number, (left, top, right, bottom) in enumerate(tiles.tolist()):
        scores = scores_of_tiles(number)
        pixels = [each[top:bottom, left:right] * (score > 0) for each, score in zip(objects, scores, strict=True)]
        parts.append(seen(pixels, scores, labels or [0] * len(objects)))
    return join_tiles(parts, tiles, SIZE_HW, max(tile_hw), **options)


def pixels_of(found):
    return [torch.from_numpy(bitmap(mask, SIZE_HW)).bool() for mask in found["masks"]]


OBJECTS = {
    "in one tile": drawn([5, 5, 30, 25]),
    "in two, whole in both": drawn([50, 10, 62, 30]),
    "in two, cut by both": drawn([30, 10, 100, 30], [30, 10, 45, 50]),
    "at the corner of four": drawn([30, 40, 100, 60], [60, 20, 75, 90]),
    "longer than a tile": drawn([10, 100, 180, 110]),
    "the whole picture": drawn([0, 0, 190, 150]),
}


@pytest.mark.parametrize("pixels", OBJECTS.values(), ids=OBJECTS)
def test_an_object_is_one_with_all_of_its_mask_wherever_tiles_end(pixels):
    found = joined([pixels], lambda tile: [0.9])
    assert len(found["scores"]) == 1
    assert pixels_of(found)[0].equal(pixels)
    assert found["boxes"].equal(boxes_around(pixels[None]))


def test_an_object_has_the_score_of_its_best_piece():
    found = joined([OBJECTS["longer than a tile"]], lambda tile: [0.5 + tile / 100])
    last = len(tiles_of(SIZE_HW, (60, 70), 0.3)) - 1
    assert found["scores"].item() == pytest.approx(0.5 + last / 100)


def test_pieces_of_an_object_that_a_tile_shows_whole_do_not_take_its_place():
    """All of them together lack its corner."""
    pixels = drawn([36, 26, 60, 50])
    found = joined([pixels], lambda tile: [0.95 if tile else 0.9])
    assert found["scores"].tolist() == pytest.approx([0.9])
    assert pixels_of(found)[0].equal(pixels)


@pytest.mark.parametrize("labels", [[0, 0], [0, 1]])
def test_objects_that_touch_stay_two(labels):
    above = drawn([30, 10, 100, 30])
    below = drawn([30, 30, 100, 45])
    found = joined([above, below], lambda tile: [0.9, 0.8], labels)
    assert found["labels"].tolist() == labels
    for pixels, expected in zip(pixels_of(found), (above, below), strict=True):
        assert pixels.equal(expected)


def test_masks_of_other_classes_and_weak_ones_are_not_pieces_of_an_object():
    whole = drawn([30, 10, 100, 30])
    found = joined([whole, whole], lambda tile: [0.9 * (tile == 0), 0.8 * (tile == 1)], [0, 1])
    assert found["labels"].tolist() == [0, 1]
    found = joined([whole], lambda tile: [(0.9, 0.1)[tile] if tile < 2 else 0.0])
    assert found["scores"].tolist() == pytest.approx([0.9, 0.1])
    assert pixels_of(found)[0].equal(drawn([30, 10, 70, 30]))


def test_a_piece_belongs_to_one_object_and_an_object_has_one_piece_of_a_tile():
    whole = drawn([30, 10, 100, 30])
    again = drawn([30, 10, 100, 28])
    found = joined([whole, again], lambda tile: [0.9, 0.4])
    assert pixels_of(found)[0].equal(whole)
    assert found["scores"].tolist() == pytest.approx([0.9])  # of two that are nearly the same box the best


def test_pictures_without_detections_and_tiles_without_overlap():
    nothing = joined([drawn()], lambda tile: [0.9])
    assert nothing["masks"] == []
    assert nothing["boxes"].shape == (0, 4)
    pixels = drawn([60, 10, 130, 30])
    apart = joined([pixels], lambda tile: [0.9], tile_hw=(50, 95), overlap=0.0)
    assert len(apart["masks"]) == 2
    assert (pixels_of(apart)[0] ^ pixels_of(apart)[1]).equal(pixels)


def test_masks_stay_with_their_boxes_where_the_best_of_a_class_are_kept():
    objects = [drawn([5 + 30 * number, 5, 10 + 30 * number, 9]) for number in range(6)]
    found = joined(objects, lambda tile: [0.4, 0.9, 0.5, 0.8, 0.6, 0.7], most_of_class=3)
    assert found["scores"].tolist() == pytest.approx([0.9, 0.8, 0.7])
    assert torch.stack(pixels_of(found)).equal(torch.stack([objects[1], objects[3], objects[5]]))
