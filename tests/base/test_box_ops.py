"""Geometry of boxes: conversions with their inverses, and overlaps that stay finite."""

import numpy as np
import pytest
import torch
import torchvision.ops
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pytest import approx
from torch.testing import assert_close

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
    if count is None:
        count = draw(st.integers(0, 6))
    floats = st.floats(0, 64, width=16)
    rows = hnp.arrays("float64", (count, 4), elements=floats)
    xywh = torch.from_numpy(draw(rows))
    corners, sides = xywh.split(2, dim=1)
    return torch.cat([corners, corners + sides], dim=1)


SIDES = st.integers(1, 2000)


@given(boxes_xyxy(), st.tuples(SIDES, SIDES))
def test_conversions_have_inverses(boxes, hw):
    centred = xyxy_to_cxcywh(boxes)
    assert_close(cxcywh_to_xyxy(centred), boxes)
    expected = torchvision.ops.box_convert(boxes, "xyxy", "cxcywh")
    assert_close(centred, expected)
    size = torch.tensor(hw)
    normalized = normalize_boxes(boxes, size)
    again = denormalize_boxes(normalized, size)
    assert_close(again, boxes)


def test_normalising_divides_x_by_the_width_and_keeps_images_apart():
    box = [10.0, 20, 30, 40]
    boxes = torch.tensor([[box], [box]])
    sizes = torch.tensor([[100, 200], [50, 10]])
    normalized = normalize_boxes(boxes, sizes)
    (first,), (second,) = normalized.tolist()
    assert first == approx([0.05, 0.2, 0.15, 0.4])
    assert second == approx([1.0, 0.4, 3.0, 0.8])


@pytest.mark.parametrize(("ours", "theirs"), PAIRWISE)
@given(boxes_xyxy(), boxes_xyxy())
def test_overlaps_of_all_pairs_are_torchvisions_where_it_is_defined(ours, theirs, first, second):
    found = ours(first, second)
    expected = theirs(first, second)
    assert found.shape == expected.shape
    assert found.isfinite().all()
    is_defined = expected.isfinite()
    assert_close(found[is_defined], expected[is_defined])


@given(boxes_xyxy(), boxes_xyxy())
def test_overlaps_of_numpy_columns(first, second):
    rows = first.numpy()[:, None]
    columns = second.numpy()[None]
    common, union = common_and_union(rows, columns)
    iou = pairwise_iou(first, second).numpy()
    assert_close(common, iou * union)
    # A box that includes its last pixel is one pixel wider.
    wider = np.array([0, 0, 1, 1])
    found = common_and_union(rows, columns, pixel=1)
    expected = common_and_union(rows + wider, columns + wider)
    assert_close(found, expected)


THREE_BOXES = boxes_xyxy(count=3)


@given(THREE_BOXES, THREE_BOXES)
def test_one_by_one_is_the_diagonal_and_leading_indices_are_kept_apart(first, second):
    of_pairs = pairwise_generalized_iou(first, second)
    one_by_one = generalized_box_iou(first, second)
    assert_close(one_by_one, of_pairs.diagonal())
    rows = torch.stack([first, second])
    columns = torch.stack([second, second])
    of_first, of_second = pairwise_iou(rows, columns)
    assert_close(of_first, pairwise_iou(first, second))
    assert_close(of_second, pairwise_iou(second, second))


@given(THREE_BOXES, THREE_BOXES)
def test_boxes_without_area_overlap_nothing_with_a_finite_gradient(first, second):
    corners, ends = first.split(2, dim=1)
    has_area = (ends > corners).all(1)
    with_itself = box_iou(first, first)
    assert_close(with_itself, has_area.double())
    first.requires_grad_()
    overlaps = pairwise_generalized_iou(first, second)
    overlaps.sum().backward()
    assert first.grad.isfinite().all()


@pytest.mark.parametrize("overlap", [box_iou, generalized_box_iou])
def test_boxes_that_are_nan_do_not_overlap_by_zero(overlap):
    unknown = torch.full((1, 4), float("nan"))
    box = torch.tensor([[0.0, 0, 1, 1]])
    found = overlap(unknown, box)
    assert found.isnan().all()
