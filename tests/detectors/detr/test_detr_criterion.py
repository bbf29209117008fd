"""DETR's matching of queries and objects, and its losses. Numbers of the original: tests/golden/test_detr.py."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_detectors import CLASSES, random_target
from torch.testing import assert_close

from toolkit.base.box_ops import box_iou, cxcywh_to_xyxy, generalized_box_iou
from toolkit.detectors.detr.detr_criterion import (
    DetrCriterion,
    MatchingCosts,
    PaddedTargets,
    assign_queries,
    box_terms,
    pad_targets,
)

BY_CLASS_ALONE = MatchingCosts(1.0, 0.0, 0.0)


def cheapest_sum(costs: torch.Tensor) -> float:
    """The smallest sum of costs that give every row, of which there are no more than columns, a column of its own."""
    rows, columns = costs.shape
    sums = []
    for chosen in permutations(range(columns), rows):
        sums.append(sum(costs[row, column].item() for row, column in enumerate(chosen)))
    return min(sums)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_matching_is_the_cheapest_assignment_in_every_layer_and_image(seed, num_queries, counts):
    generator = torch.Generator().manual_seed(seed)
    images = len(counts)
    width = max(counts)
    valid = torch.arange(width) < torch.tensor(counts)[:, None]
    valid = valid[:, torch.randperm(width, generator=generator)]  # invalid columns lie anywhere, as crowd regions do
    boxes = torch.rand(images, width, 4, generator=generator)
    targets = PaddedTargets(torch.zeros(valid.shape, dtype=torch.int64), boxes, valid)
    class_costs = torch.rand(2, images, num_queries, width, generator=generator)
    predicted = torch.rand(2, images, num_queries, 4, generator=generator)

    matches = assign_queries(class_costs, predicted, targets, BY_CLASS_ALONE)
    order = torch.stack([matches.layer, matches.image, matches.query]).T.tolist()
    assert order == sorted(order)
    for layer in range(2):
        for image, count in enumerate(counts):
            here = (matches.layer == layer) & (matches.image == image)
            queries = matches.query[here].tolist()
            chosen = matches.target[here].tolist()
            assert len(queries) == min(num_queries, count)
            assert len(set(queries)) == len(set(chosen)) == len(queries)
            assert valid[image, chosen].all()
            costs = class_costs[layer, image][:, valid[image]]
            if num_queries > count:
                costs = costs.T
            found = class_costs[layer, image, queries, chosen].sum().item()
            assert found == pytest.approx(cheapest_sum(costs), abs=1e-5)


def test_box_terms_of_two_sets_are_those_of_each_alone():
    torch.manual_seed(0)
    targets = pad_targets([random_target(2), random_target(3)], torch.device("cpu"), torch.float32)
    sets = []
    for queries in (5, 7):
        boxes = torch.rand(2, 2, queries, 4)
        sets.append((boxes, assign_queries(torch.rand(2, 2, queries, 3), boxes, targets, BY_CLASS_ALONE)))
    both = box_terms(sets, targets)
    alone = [box_terms([each], targets)[0] for each in sets]
    assert_close(both, alone, rtol=0, atol=0)
    boxes, matches = sets[0]
    found = cxcywh_to_xyxy(boxes[matches.layer, matches.image, matches.query])
    wanted = cxcywh_to_xyxy(targets.boxes_cxcywh[matches.image, matches.target])
    assert_close(both[0].iou, box_iou(found, wanted), rtol=0, atol=0)
    assert_close(both[0].loss_giou, 1 - generalized_box_iou(found, wanted), rtol=0, atol=0)


def predictions(num_layers: int, batch_size: int, num_queries: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (num_layers, batch_size, num_queries)
    logits = torch.randn(
        *shape,
        len(CLASSES) + 1,
        generator=generator,
        dtype=torch.float64,
    )
    boxes = torch.rand(*shape, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.2
    return logits, boxes


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("poisoned", [0, 1], ids=["logits", "boxes"])
def test_non_finite_predictions_give_a_non_finite_loss(poison, poisoned):
    criterion = DetrCriterion(len(CLASSES), num_layers=2)
    tensors = predictions(2, 2)
    tensors[poisoned][1, 0] = poison
    targets = [random_target(2), random_target(1)]
    losses, _ = criterion(*tensors, targets, {"boxes": 3.0, "class_weights": 4.0})
    assert not sum(losses.values()).isfinite()
    assert losses["loss_ce_0"].isfinite()
