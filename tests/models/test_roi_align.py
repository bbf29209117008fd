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
    """Return boxes (R, 5) float64 inside, beside and around images of this side, some of them without area."""
    corners = torch.rand(count, 2).double() * 1.6 * side - 0.3 * side
    sizes = torch.rand(count, 2).double() ** 2 * 1.2 * side
    sizes[::5] = 0
    image = torch.randint(images, (count, 1)).double()
    return torch.cat([image, corners, corners + sizes], dim=1)


def pooled_with_gradient(pool, features, rois, side, scale, ratio) -> tuple[torch.Tensor, torch.Tensor]:
    pooled = pool(features, rois, side, scale, ratio)
    generator = torch.Generator().manual_seed(0)
    of_pooled = torch.randn(pooled.shape, generator=generator).to(pooled.dtype)
    [gradient] = torch.autograd.grad(pooled, features, of_pooled)
    return pooled, gradient


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
    given = (
        features,
        some_rois(count, images, stride * max(size_hw)),
        side,
        1 / stride,
        ratio,
    )
    with mock.patch.object(module, "MULTIPLICATIONS", math.inf):  # also where they do not pay
        found, gradient = pooled_with_gradient(pooled_regions, *given)
    assert found.grad_fn.name() == FAST
    expected, expected_gradient = pooled_with_gradient(roi_align, *given)
    assert found.equal(expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_rounded_once(dtype):
    """Under autocast both compute in float32 and round the gradient to the type of the features."""
    torch.manual_seed(1)
    features = torch.randn(2, 8, 16, 16).to(dtype).requires_grad_()
    given = (features, some_rois(40, 2, 64).float(), 7, 0.25, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found, gradient = pooled_with_gradient(pooled_regions, *given)
        expected, expected_gradient = pooled_with_gradient(roi_align, *given)
    assert found.equal(expected)
    assert gradient.dtype == dtype
    difference = (gradient - expected_gradient).abs().max() / expected_gradient.abs().max()
    assert difference < 2 * torch.finfo(dtype).eps + 1e-6


# Samples whose number follows the box are not a grid of one size; the time of products grows with the map.
@pytest.mark.parametrize(("ratio", "side", "is_fast"), [(2, 16, True), (0, 16, False), (2, 250, False)])
def test_where_products_do_not_pay_it_is_torchvisions(ratio, side, is_fast):
    features = torch.randn(1, 2, side, side)
    rois = some_rois(4, 1, 64).float()
    assert pooled_regions(features, rois, 7, 0.25, ratio).grad_fn is None  # nobody wants a gradient
    pooled = pooled_regions(features.requires_grad_(), rois, 7, 0.25, ratio)
    assert (pooled.grad_fn.name() == FAST) == is_fast
