"""SSD's anchors, matching, mining and losses: against loops, torch and inverses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import boxes, integers, rows
from torch import nn
from torchvision.ops import box_area
from torchvision.ops.boxes import _box_inter_union

from toolkit.base.box_ops import cxcywh_to_xyxy
from toolkit.detectors.ssd.criterion import (
    IGNORED_LABEL,
    SsdCriterion,
    decode_offsets,
    encode_boxes,
    level_anchors,
    match_anchors,
    mine_negatives,
    pad_objects,
)


def test_a_cells_anchors_follow_the_order_of_the_ratios_each_once():
    given = level_anchors((1, 1), (0.2, 0.3), [3, 2, 3])
    squares = torch.tensor(rows("1 1, 2.25 2.25, 3 0.3333333, 0.3333333 3, 2 0.5, 0.5 2"))
    torch.testing.assert_close(given, torch.cat([torch.full((6, 2), 0.5), 0.2 * squares.sqrt()], dim=1))


corner = st.floats(0.0, 0.875, width=32)
side = st.floats(0.0625, 0.125, width=32)
any_objects = st.lists(st.tuples(corner, corner, side, side, st.booleans()), max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(any_objects, min_size=1, max_size=3), st.sampled_from([0.3, 0.5]))
def test_matching_is_that_of_a_loop_over_anchors(images, threshold):
    anchors = torch.rand(40, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 1, 0.3, 0.3])
    anchors[:, 2:] += 0.02
    targets = []
    for objects in images:
        x, y, width, height, crowd = torch.tensor(objects).reshape(-1, 5).T
        corners = torch.stack([x, y, x + width, y + height], 1)
        targets.append({"boxes": corners, "labels": torch.arange(len(objects)), "iscrowd": crowd.long()})
    labels, index = match_anchors(anchors, pad_objects(targets, torch.tensor([1, 1])), threshold)
    for found, at, target in zip(labels, index, targets, strict=True):
        assert found.tolist() == loop_match(cxcywh_to_xyxy(anchors), target, threshold)
        positive = found > 0
        assert torch.equal(at[positive], found[positive] - 1)


def loop_match(anchors, target, threshold):
    """Labels by the rules, one anchor and one box at a time; label j + 1 for box j."""
    crowd = target["iscrowd"].bool()
    common, union = _box_inter_union(target["boxes"], anchors)
    iou = (common / (union + 1e-5)).masked_fill(crowd[:, None], -1)
    covered = (common / box_area(anchors) >= threshold) & crowd[:, None]
    labels = []
    for a in range(len(anchors)):
        if len(iou) and iou[:, a].max() >= threshold:
            labels.append(int(iou[:, a].argmax()) + 1)
        else:
            labels.append(IGNORED_LABEL if covered[:, a].any() else 0)
    for j in torch.nonzero(~crowd).flatten().tolist():
        labels[int(iou[j].argmax())] = j + 1
    return labels


length = st.floats(0.015625, 0.5, width=32)
place = st.floats(0, 0.5, width=32)
variance = st.sampled_from([0.1, 0.2, 1.0])


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(place, place, length, length),
    st.tuples(place, place, length, length),
    variance,
    variance,
)
def test_decoding_is_the_inverse_of_encoding(box, anchor, center_variance, size_variance):
    boxes = cxcywh_to_xyxy(torch.tensor([box]))
    anchors = torch.tensor([anchor])
    offsets = encode_boxes(boxes, anchors, center_variance, size_variance)
    decoded = decode_offsets(offsets, anchors, center_variance, size_variance)
    torch.testing.assert_close(decoded, boxes, rtol=0, atol=1e-5)


def test_the_hardest_negatives_of_each_image_count():
    labels = torch.zeros(3, 30, dtype=torch.int64)
    labels[0, [3, 4]] = 1
    labels[1, :12] = 2
    labels[2, 20:] = IGNORED_LABEL
    loss = torch.rand(3, 30, generator=torch.Generator().manual_seed(0))
    mined = mine_negatives(loss, labels, ratio=3)
    assert mined.sum(1).tolist() == [6, 18, 0]
    assert not mined[labels != 0].any()
    left = loss[0][~mined[0] & (labels[0] == 0)]
    assert loss[0][mined[0]].min() > left.max()


def target(objects, labels="", crowds=""):
    """Of an image of 64 x 96 pixels; crowds are numbers of objects."""
    numbered = boxes(objects)
    iscrowd = torch.zeros(len(numbered), dtype=torch.int64)
    iscrowd[integers(crowds)] = 1
    return {
        "boxes": numbered,
        "labels": integers(labels),
        "iscrowd": iscrowd,
        "size": torch.tensor([64, 96]),
    }


def test_labels_are_smoothed_in_training_mode_only():
    anchors = level_anchors((3, 3), (0.3, 0.5), [2])
    hw = torch.tensor([64, 96])
    logits, offsets = torch.randn(
        2,
        2,
        len(anchors),
        4,
        generator=torch.Generator().manual_seed(0),
    )
    targets = [target("20 10 60 50", "0"), target("1 1 95 63", "2")]

    def losses_of(criterion):
        return criterion(logits, offsets, anchors, hw, targets, {"positives": 1.0})[0]

    plain = losses_of(SsdCriterion())
    smooth = SsdCriterion(label_smoothing=0.2)
    in_evaluation = losses_of(smooth.eval())
    in_training = losses_of(smooth.train())
    assert in_evaluation == plain
    assert in_training["loss_loc"] == plain["loss_loc"]
    labels, _ = match_anchors(anchors, pad_objects(targets, hw), 0.5)
    used = mine_negatives(
        -logits.log_softmax(-1)[..., 0],
        labels,
        3,
    ) | (labels > 0)
    by_torch = nn.functional.cross_entropy(logits[used], labels[used], reduction="sum", label_smoothing=0.2)
    torch.testing.assert_close(in_training["loss_cls"], by_torch)
    assert float(by_torch) != pytest.approx(float(plain["loss_cls"]), rel=1e-3)


def test_the_weight_of_the_regression_makes_both_losses_alike():
    """Adjusted every second step and after the last; it travels with the weights and is not used in evaluation."""
    criterion = SsdCriterion(self_weighting_steps=2, self_weighting_every=2)
    weights = []
    for regression in (2.0, 2.0, 9.0, 1.0):  # the third is weighted by 3, so 3 without it; the fourth does not count
        reduced = {"loss_cls_unscaled": 6.0, "loss_loc_unscaled": regression, "positives/sum": 5.0}
        again = SsdCriterion(self_weighting_steps=2, self_weighting_every=2)
        again.load_state_dict(criterion.state_dict())
        criterion = again
        criterion.balance_losses(reduced)
        weights.append(float(criterion.balance.weight))
    assert weights == pytest.approx([1.0, 3.0, 2.0, 2.0])
    anchors = level_anchors((3, 3), (0.3, 0.5), [2])
    given = (
        torch.zeros(
            1,
            len(anchors),
            4,
        ),
        torch.ones(1, len(anchors), 4),
        anchors,
        torch.tensor([64, 96]),
    )
    losses = {}
    for training in (True, False):
        found, _ = criterion.train(training)(
            *given,
            [target("20 10 60 50", "0")],
            {"positives": 1.0},
        )
        losses[training] = float(found["loss_loc"])
    assert losses[True] == pytest.approx(2 * losses[False])
    plain = SsdCriterion()
    plain.balance_losses(reduced)
    assert plain.balance.weight == 1


def test_anchors_in_a_crowd_are_neither_positive_nor_negative():
    """The left half is a crowd; a box in the right half asks for negatives, which come from the right half alone."""
    criterion = SsdCriterion()
    anchors = level_anchors((4, 6), (0.2, 0.3), [2])
    hw = torch.tensor([64, 96])
    crowd_only = [target("0 0 48 64", "1", crowds="0")]
    assert criterion.denominators(anchors, crowd_only, hw) == {"positives": 0.0}
    inside = target("0 0 48 64, 10 10 40 50", "1, 2", crowds="0")
    assert criterion.denominators(anchors, [inside], hw)["positives"] > 0, "an object in a crowd is one"
    targets = [*crowd_only, target("0 0 48 64, 70 20 90 50", "1, 2", crowds="0")]
    logits = torch.zeros(2, len(anchors), 4, requires_grad=True)
    losses, _ = criterion(
        logits,
        torch.zeros(2, len(anchors), 4),
        anchors,
        hw,
        targets,
        {"positives": 1.0},
    )
    losses["loss_cls"].backward()
    used = logits.grad.abs().sum(-1) > 0
    assert not used[0].any()
    assert used[1].any()
    left, _, right, _ = cxcywh_to_xyxy(anchors).unbind(-1)
    in_crowd = (0.5 - left).clamp(min=0) / (right - left) >= 0.5
    assert in_crowd.any()
    assert not used[1, in_crowd & (left < 0.4)].any()
