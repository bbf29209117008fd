"""Pixels of masks that are predicted over the whole picture."""

import pytest
import torch
from torch.nn.functional import interpolate

from toolkit.models import pasted_masks

# (side of the masks, size of the picture)
SIZES = [
    ((13, 9), (100, 71)),
    ((27, 31), (20, 40)),
    ((1, 1), (3, 2)),
    ((4, 24), (96, 96)),
]


@pytest.mark.parametrize(("side_hw", "size_hw"), SIZES)
def test_pixels_are_those_of_all_of_the_picture_interpolated(side_hw, size_hw):
    masks = torch.rand(12, *side_hw, generator=torch.Generator().manual_seed(0))
    masks[:8] *= 0.6  # few cells are inside
    masks[:3] = 0.1
    masks[1, 0, 0] = 0.9
    masks[2, -1, -1] = 0.9
    masks[3] = 0.9
    pixels = pasted_masks.masks_over_image(masks, size_hw)
    logits = interpolate(
        masks.logit()[:, None],
        size=size_hw,
        mode="bilinear",
        align_corners=False,
    )[:, 0]
    at_the_edge = logits.abs() < 1e-5
    assert not pixels[0].any()
    assert torch.equal(pixels | at_the_edge, (logits > 0) | at_the_edge)


def test_the_surroundings_of_what_is_inside_are_interpolated_alone(monkeypatch):
    sizes_hw = []

    def noted(values, size, **options):
        sizes_hw.append(size)
        return interpolate(values, size=size, **options)

    monkeypatch.setattr(pasted_masks, "interpolate", noted)
    masks = torch.zeros(5, 20, 20)
    masks[:, 4:9, 7:12] = 0.8
    assert pasted_masks.masks_over_image(masks, (500, 400)).any()
    assert (500, 400) not in sizes_hw
