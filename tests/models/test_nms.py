"""Non-maximum suppression of a whole batch: in rounds as in a loop, and never across classes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops import nms

from toolkit.models import nms as nms_module
from toolkit.models.nms import (
    _batch_at_once,
    class_wise_nms,
    nms_by_label,
    nms_keep,
    repeated_until_enough,
    sorted_nms,
    top_k_rows,
)


def some_boxes(*shape: int) -> torch.Tensor:
    corner = torch.rand(*shape, 2) * 80
    return torch.cat([corner, corner + 1 + torch.rand(*shape, 2) * 30], dim=-1)


def label_by_label(boxes, scores, labels, threshold) -> torch.Tensor:
    """Return the rows that torchvision's NMS keeps of each label alone, in order."""
    kept = [labels.new_zeros(0)]
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        kept.append(rows[nms(boxes[rows], scores[rows], threshold)])
    return torch.cat(kept).sort().values


@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_suppression_by_rounds_is_greedy_nms(count, threshold):
    torch.manual_seed(count)
    boxes = some_boxes(3, count)
    valid = torch.rand(3, count) > 0.1
    labels = torch.randint(0, 3, (3, count))
    keep = sorted_nms(boxes, valid, threshold, labels)
    scores = torch.arange(count, 0, -1).float()
    for i in range(3):
        rows = valid[i].nonzero()[:, 0]
        kept = label_by_label(
            boxes[i, rows],
            scores[rows],
            labels[i, rows],
            threshold,
        )
        assert keep[i].nonzero()[:, 0].equal(rows[kept])


@pytest.mark.parametrize(("length", "runs_needed"), [(10, 1), (40, 2), (300, 5)])
def test_a_long_chain_takes_more_rounds_than_are_made_at_once(length, runs_needed, monkeypatch):
    starts = torch.arange(float(length)) * 4  # each box overlaps its neighbours alone
    chain = torch.stack(
        [
            starts,
            torch.zeros(length),
            starts + 10,
            torch.full((length,), 10.0),
        ],
        dim=1,
    )[None]
    compared = []
    compare = nms_module.intersection_and_union
    monkeypatch.setattr(nms_module, "intersection_and_union", lambda *boxes: compared.append(0) or compare(*boxes))
    runs = []

    def compute():
        keep = sorted_nms(chain, torch.ones(1, length, dtype=torch.bool), 0.3)[0]
        runs.append(keep)
        return [keep], None

    [keep], _ = repeated_until_enough(compute)
    expected = [i % 2 == 0 for i in range(length)]
    assert keep.tolist() == expected
    assert [run.tolist() == expected for run in runs] == [False] * (runs_needed - 1) + [True]
    assert len(compared) == 1, "the rounds go on"


# Boxes of 4 classes of 40: 80 ** 2 pairs.
@pytest.mark.parametrize(("usual", "largest"), [(1024, 4096), (5, 79), (5, 5)])
@pytest.mark.parametrize("is_limited", [True, False])
def test_classes_are_suppressed_on_a_device_as_on_a_cpu(monkeypatch, usual, largest, is_limited):
    monkeypatch.setattr("toolkit.models.nms.USUAL_GROUP", usual)
    monkeypatch.setattr("toolkit.models.nms.MAX_GROUP", largest)
    torch.manual_seed(0)
    boxes = some_boxes(3, 4, 40)
    scores = torch.rand(3, 4, 40)
    scores = scores.where(scores > 0.6, 0)
    scores[1] = 0

    def compute():
        return [_batch_at_once(boxes, scores, 0.4)], None

    [found], _ = repeated_until_enough(compute) if is_limited else compute()
    expected = class_wise_nms(boxes, scores, 0.4)
    exported = nms_keep(boxes.flatten(0, 1), scores.flatten(0, 1), 0.4)
    assert exported.equal(expected.flatten(0, 1) > 0)
    for own, theirs in zip(found.flatten(1), expected.flatten(1), strict=True):
        count = (theirs > 0).sum()
        assert (own > 0).sum() == count
        ranks = [top_k_rows(turns[None], 160)[1][0, :count] for turns in (own, theirs)]
        assert ranks[0].equal(ranks[1])


@given(
    st.integers(0, 10**6),
    st.sampled_from([1.0, 600.0, 60_000.0, 1e7]),
    st.integers(1, 300),
    st.floats(0.2, 0.8),
)
def test_labels_never_suppress_each_other_wherever_their_boxes_lie(seed, extent, labels, threshold):
    """Far from the corner, outside of the image, left of it."""
    generator = torch.Generator().manual_seed(seed)
    centres = (torch.rand(120, 2, generator=generator) - 0.3) * extent
    sides = torch.rand(120, 2, generator=generator) * extent / 20
    boxes = torch.cat([centres - sides / 2, centres + sides / 2], dim=1)
    boxes = torch.cat([boxes, boxes + sides.repeat(1, 2) * 0.2])
    label = torch.randint(labels, (120,), generator=generator).repeat(2)
    scores = (torch.rand(240, generator=generator) * 50).round() / 50  # ties
    kept = nms_by_label(boxes, scores, label, threshold)
    expected = label_by_label(boxes, scores, label, threshold)
    assert kept.sort().values.equal(expected)
    assert scores[kept].equal(scores[kept].sort(descending=True).values)
    grouped = torch.zeros(1, labels, 240).scatter(1, label[None, None], scores[None, None].clamp(min=0.01))
    turns = class_wise_nms(boxes.expand(1, labels, -1, -1), grouped, threshold)
    assert (turns > 0).any(1)[0].nonzero()[:, 0].equal(expected)


def test_boxes_without_end_are_kept_apart():
    endless = torch.tensor(
        [
            [0.0, 0.0, torch.inf, torch.inf],
            [0.0, 0.0, 10.0, 10.0],
            [1.0, 1.0, 10.0, 10.0],
        ]
    )
    scores = torch.tensor([0.9, 0.8, 0.7])
    labels = torch.tensor([0, 1, 1])
    assert nms_by_label(endless, scores, labels, 0.5).tolist() == [0, 1]
    assert nms_by_label(endless[:0], scores[:0], labels[:0], 0.5).tolist() == []
