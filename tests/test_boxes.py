"""Box geometry."""

import pytest
import torch
import torchvision.ops
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from toolkit.box_ops import (
    box_iou,
    cxcywh_to_xyxy,
    denormalize_boxes,
    generalized_box_iou,
    normalize_boxes,
    pairwise_generalized_iou,
    pairwise_iou,
    xyxy_to_cxcywh,
)
from toolkit.boxes import common_and_union


@st.composite
def boxes_xyxy(draw, count: int | None = None):
    """Ordered boxes (N, 4) float64, some of them without area, some equal."""
    count = draw(st.integers(0, 6)) if count is None else count
    whole = hnp.arrays("float64", (count, 4), elements=st.floats(0, 64, width=16))
    corner_and_size = torch.from_numpy(draw(whole))
    return torch.cat([corner_and_size[:, :2], corner_and_size[:, :2] + corner_and_size[:, 2:]], dim=1)


@given(boxes_xyxy(), st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
def test_conversions_have_inverses(boxes, hw):
    torch.testing.assert_close(cxcywh_to_xyxy(xyxy_to_cxcywh(boxes)), boxes)
    torch.testing.assert_close(xyxy_to_cxcywh(boxes), torchvision.ops.box_convert(boxes, "xyxy", "cxcywh"))
    size = torch.tensor(hw)
    torch.testing.assert_close(denormalize_boxes(normalize_boxes(boxes, size), size), boxes)


def test_normalising_divides_x_by_the_width_and_keeps_images_apart():
    boxes = torch.tensor([[[10.0, 20, 30, 40]], [[10.0, 20, 30, 40]]])
    normalized = normalize_boxes(boxes, torch.tensor([[100, 200], [50, 10]]))
    torch.testing.assert_close(normalized, torch.tensor([[[0.05, 0.2, 0.15, 0.4]], [[1.0, 0.4, 3.0, 0.8]]]))


@given(boxes_xyxy(), boxes_xyxy())
def test_overlaps_of_all_pairs_equal_torchvision_where_it_is_defined(first, second):
    for ours, theirs in (
        (pairwise_iou, torchvision.ops.box_iou),
        (pairwise_generalized_iou, torchvision.ops.generalized_box_iou),
    ):
        value, wanted = ours(first, second), theirs(first, second)
        assert value.shape == (len(first), len(second)) and value.isfinite().all()
        torch.testing.assert_close(value[wanted.isfinite()], wanted[wanted.isfinite()])
    common, union = common_and_union(first.numpy()[:, None], second.numpy()[None])
    torch.testing.assert_close(torch.from_numpy(common), pairwise_iou(first, second) * torch.from_numpy(union))
    grown = [boxes.numpy() + [0, 0, 1, 1] for boxes in (first, second)]
    for found, wanted in zip(common_and_union(first.numpy()[:, None], second.numpy()[None], pixel=1),
                             common_and_union(grown[0][:, None], grown[1][None]), strict=True):  # fmt: skip
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(wanted))


@given(boxes_xyxy(count=3), boxes_xyxy(count=3))
def test_one_by_one_is_the_diagonal_a_leading_index_keeps_images_apart_and_gradients_are_finite(first, second):
    torch.testing.assert_close(generalized_box_iou(first, second), pairwise_generalized_iou(first, second).diagonal())
    stacked = pairwise_iou(torch.stack([first, second]), torch.stack([second, second]))
    torch.testing.assert_close(stacked, torch.stack([pairwise_iou(first, second), pairwise_iou(second, second)]))
    torch.testing.assert_close(box_iou(first, first), ((first[:, 2:] - first[:, :2]).prod(1) > 0).double())
    first.requires_grad_()  # also of boxes without area
    pairwise_generalized_iou(first, second).sum().backward()
    assert first.grad.isfinite().all()


@pytest.mark.parametrize("overlap", [box_iou, generalized_box_iou])
def test_nan_boxes_give_nan_and_not_a_silent_zero(overlap):
    assert overlap(torch.full((1, 4), float("nan")), torch.tensor([[0.0, 0, 1, 1]])).isnan().all()
