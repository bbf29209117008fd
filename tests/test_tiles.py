"""Tiles and flips, with a detector that knows what is in every picture: python -m pytest tests/test_tiles.py"""

import numpy as np
import pytest
import torch

from toolkit.boxes import pairwise_iou
from toolkit.data.table import Category
from toolkit.errors import BadInput
from toolkit.use.prediction import Predictor
from toolkit.use.tiles import flipped, merged, starts, tiled

CLASSES = [Category(0, "red"), Category(1, "green"), Category(2, "blue")]


def rectangles(found_in: torch.Tensor) -> tuple[list, list]:
    """Boxes and labels of the one-coloured rectangles of a picture; each has a value of its own."""
    boxes, labels = [], []
    for label, plane in enumerate(found_in):
        for value in plane.unique():
            if value:
                rows, columns = (plane == value).nonzero().unbind(1)
                boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                labels.append(label)
    return boxes, labels


def oracle() -> Predictor:
    """Finds every rectangle, or what a tile leaves of it, and is less sure of small ones."""

    def predict(images, score_threshold):
        found = []
        for image in images:
            boxes, labels = rectangles(image)
            boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
            scores = 0.5 + (boxes[:, 2:] - boxes[:, :2]).prod(1).clamp(max=4000) / 10000
            found.append({"boxes": boxes, "scores": scores, "labels": torch.tensor(labels, dtype=torch.int64)})
        return found

    return Predictor("oracle", CLASSES, predict)


def scene(height: int, width: int, count: int, seed: int, side: int) -> torch.Tensor:
    """uint8 (3, H, W): rectangles that do not overlap, of at most `side` pixels."""
    rng, image = np.random.default_rng(seed), torch.zeros(3, height, width, dtype=torch.uint8)
    for value in range(1, count + 1):
        for _ in range(100):
            h, w = rng.integers(side // 3, side, 2)
            y, x = rng.integers(0, height - h), rng.integers(0, width - w)
            if not image[:, max(0, y - 2) : y + h + 2, max(0, x - 2) : x + w + 2].any():
                image[int(rng.integers(3)), y : y + h, x : x + w] = value
                break
    return image


@pytest.mark.parametrize(("length", "tile", "overlap"), [(640, 640, 0.2), (641, 640, 0.2), (5000, 640, 0.3), (9, 4, 0)])
def test_tiles_cover_a_side_and_have_enough_in_common(length, tile, overlap):
    first = starts(length, tile, overlap)
    assert first[0] == 0 and first[-1] + tile >= length and first[-1] == max(0, length - tile)
    assert all(b - a <= tile * (1 - overlap) for a, b in zip(first, first[1:], strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_every_object_is_found_once_wherever_tiles_end(seed):
    image = scene(500, 640, 60, seed, side=24)
    expected = oracle().predict([image], 0)[0]
    found = tiled(oracle(), 128, overlap=0.25).predict([image], 0)[0]
    overlaps = pairwise_iou(expected["boxes"], found["boxes"]) > 0.99
    assert len(expected["labels"]) >= 50
    assert (overlaps.sum(1) == 1).all()
    assert len(found["labels"]) == len(expected["labels"])
    assert torch.equal(found["labels"][overlaps.long().argmax(1)], expected["labels"])


def test_an_object_larger_than_the_overlap_keeps_its_largest_part_only():
    image = torch.zeros(3, 100, 300, dtype=torch.uint8)
    image[0, 20:60, 30:280] = 1
    found = tiled(oracle(), 100, overlap=0.2).predict([image], 0)[0]
    assert 1 <= len(found["labels"]) <= 4 and (found["labels"] == 0).all()


def test_images_that_fit_in_a_tile_are_seen_as_they_are():
    image = scene(60, 90, 5, 0, side=20)
    plain, whole = oracle().predict([image], 0)[0], tiled(oracle(), 128).predict([image], 0)[0]
    order = plain["scores"].argsort(descending=True, stable=True)
    assert torch.equal(whole["scores"], plain["scores"][order])


def test_flips_give_the_same_boxes_once():
    image = scene(100, 150, 12, 1, side=30)
    plain, both = oracle().predict([image], 0)[0], flipped(oracle()).predict([image], 0)[0]
    assert len(both["scores"]) == len(plain["scores"])
    torch.testing.assert_close(both["boxes"], plain["boxes"][pairwise_iou(both["boxes"], plain["boxes"]).argmax(1)])


def test_classes_do_not_suppress_each_other():
    box = torch.tensor([[0.0, 0.0, 9.0, 9.0]])
    parts = [{"boxes": box, "scores": torch.tensor([s]), "labels": torch.tensor([k])} for k, s in ((0, 0.9), (1, 0.8))]
    assert merged(parts, 0.5)["labels"].tolist() == [0, 1]
    assert merged([parts[0], parts[0]], 0.5)["labels"].tolist() == [0]


def test_what_cannot_be_is_bad_input():
    for tile, overlap in ((0, 0.2), (64, 0.95), (64, -0.1)):
        with pytest.raises(BadInput, match="--tile"):
            tiled(oracle(), tile, overlap)
    graphs = Predictor("graphs", CLASSES, lambda images, _: [], predicates=["on"])
    with pytest.raises(BadInput, match="relations"):
        tiled(graphs, 64)
