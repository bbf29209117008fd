"""Geometry of boxes: conversions with their inverses, and overlaps that stay finite."""

import pytest
import torch
import torchvision.ops
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from toolkit.base.box_ops import (
    box_iou,
    cxcywh_to_xyxy,
    denormalize_boxes,
    generalized_box_iou,
    normalize_boxes,
    pairwise_generalized_iou,
    pairwise_iou,
    xyxy_to_cxcywh,
)
from toolkit.base.boxes import common_and_union

PAIRWISE = [
    (pairwise_iou, torchvision.ops.box_iou),
    (pairwise_generalized_iou, torchvision.ops.generalized_box_iou),
]


@st.composite
def boxes_xyxy(draw, count: int | None = None):
    """Draw ordered boxes (N, 4) float64, some of them without area, some equal."""
    count = draw(st.integers(0, 6)) if count is None else count
    numbers = hnp.arrays("float64", (count, 4), elements=st.floats(0, 64, width=16))
    corners, sides = torch.from_numpy(draw(numbers)).split(2, dim=1)
    return torch.cat([corners, corners + sides], dim=1)


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


@pytest.mark.parametrize(("ours", "theirs"), PAIRWISE)
@given(boxes_xyxy(), boxes_xyxy())
def test_overlaps_of_all_pairs_are_torchvisions_where_it_is_defined(ours, theirs, first, second):
    found = ours(first, second)
    expected = theirs(first, second)
    assert found.shape == expected.shape
    assert found.isfinite().all()
    is_defined = expected.isfinite()
    torch.testing.assert_close(found[is_defined], expected[is_defined])


@given(boxes_xyxy(), boxes_xyxy())
def test_overlaps_of_numpy_columns(first, second):
    rows = first.numpy()[:, None]
    columns = second.numpy()[None]
    common, union = map(torch.from_numpy, common_and_union(rows, columns))
    torch.testing.assert_close(common, pairwise_iou(first, second) * union)
    # A box that includes its last pixel is one pixel wider.
    found = common_and_union(rows, columns, pixel=1)
    expected = common_and_union(rows + [0, 0, 1, 1], columns + [0, 0, 1, 1])
    torch.testing.assert_close(found, expected)


@given(boxes_xyxy(count=3), boxes_xyxy(count=3))
def test_one_by_one_is_the_diagonal_and_leading_indices_are_kept_apart(first, second):
    torch.testing.assert_close(generalized_box_iou(first, second), pairwise_generalized_iou(first, second).diagonal())
    stacked = pairwise_iou(torch.stack([first, second]), torch.stack([second, second]))
    torch.testing.assert_close(stacked, torch.stack([pairwise_iou(first, second), pairwise_iou(second, second)]))


@given(boxes_xyxy(count=3), boxes_xyxy(count=3))
def test_boxes_without_area_overlap_nothing_with_a_finite_gradient(first, second):
    has_area = (first[:, 2:] > first[:, :2]).all(1)
    torch.testing.assert_close(box_iou(first, first), has_area.double())
    first.requires_grad_()
    pairwise_generalized_iou(first, second).sum().backward()
    assert first.grad.isfinite().all()


@pytest.mark.parametrize("overlap", [box_iou, generalized_box_iou])
def test_boxes_that_are_nan_do_not_overlap_by_zero(overlap):
    assert overlap(torch.full((1, 4), float("nan")), torch.tensor([[0.0, 0, 1, 1]])).isnan().all()
