"""RoIAlign with a gradient that is fast on a CPU: the values and gradients of torchvision's."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.ops import roi_align

from toolkit.models import roi_align as module
from toolkit.models.roi_align import pooled_regions

FAST = "_FastOnCpuBackward"


def some_rois(count: int, images: int, side: float) -> torch.Tensor:
    """Boxes (R, 5) float64 inside, beside and around images of this side, some of them without area."""
    corners = torch.rand(count, 2).double() * 1.6 * side - 0.3 * side
    sizes = torch.rand(count, 2).double() ** 2 * 1.2 * side
    sizes[::5] = 0
    image = torch.randint(images, (count, 1)).double()
    return torch.cat([image, corners, corners + sizes], dim=1)


def gradients(features: torch.Tensor, rois: torch.Tensor, side: int, scale: float, ratio: int) -> list[torch.Tensor]:
    """The pooled features and gradients of torchvision, then ours."""
    torch.manual_seed(0)
    of_pooled = torch.randn(len(rois), features.shape[1], side, side).to(features.dtype)
    results = []
    for pool in (roi_align, pooled_regions):
        pooled = pool(features, rois, side, scale, ratio)
        results += [pooled, torch.autograd.grad(pooled, features, of_pooled)[0]]
    return results


@settings(max_examples=60, deadline=None)
@given(
    side=st.sampled_from([1, 3, 7]),
    ratio=st.integers(1, 3),
    size_hw=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    images=st.integers(1, 3),
    count=st.integers(0, 12),
    stride=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_torchvisions(side, ratio, size_hw, images, count, stride, seed):
    torch.manual_seed(seed)
    features = torch.randn(images, 2, *size_hw, dtype=torch.float64, requires_grad=True)
    rois = some_rois(count, images, stride * max(size_hw))
    with mock.patch.object(module, "MULTIPLICATIONS", math.inf):  # also where they do not pay
        assert pooled_regions(features, rois, side, 1 / stride, ratio).grad_fn.name() == FAST
        values, gradient, our_values, our_gradient = gradients(features, rois, side, 1 / stride, ratio)
    assert torch.equal(our_values, values)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_rounded_once(dtype):
    """Under autocast both compute in float32 and round the gradient to the type of the features."""
    torch.manual_seed(1)
    features = torch.randn(2, 8, 16, 16).to(dtype).requires_grad_()
    rois = some_rois(40, 2, 64).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        values, gradient, our_values, our_gradient = gradients(features, rois, 7, 0.25, 2)
    assert torch.equal(our_values, values) and our_gradient.dtype == gradient.dtype == dtype
    difference = (our_gradient - gradient).abs().max() / gradient.abs().max()
    assert difference < 2 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize(("ratio", "size_hw"), [(0, (16, 16)), (2, (200, 300))])
def test_where_products_do_not_pay_it_is_torchvisions(ratio, size_hw):
    """Samples whose number follows the box are not a grid of one size; the time of products grows with the map."""
    features = torch.randn(1, 2, *size_hw, requires_grad=True)
    pooled = pooled_regions(features, some_rois(4, 1, 64).float(), 7, 0.25, ratio)
    assert pooled.grad_fn.name() != FAST


def test_nothing_is_kept_for_a_gradient_that_nobody_wants():
    assert pooled_regions(torch.randn(1, 2, 16, 16), some_rois(4, 1, 64).float(), 7, 0.25, 2).grad_fn is None
