"""Proposals and pooled boxes of a batch at once are those of torchvision, which takes image by image."""

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, nms, remove_small_boxes
from torchvision.ops.poolers import LevelMapper

from toolkit.detectors.faster_rcnn.regions import LevelPool, apply_deltas, begin_proposals, limits_whwh

SIZES = [(60, 100), (90, 70), (100, 100)]


def some_boxes(*shape: int) -> torch.Tensor:
    corner = torch.rand(*shape, 2) * 80
    return torch.cat([corner, corner + 1 + torch.rand(*shape, 2) * 30], dim=-1)


def test_proposals_are_those_of_each_image():
    torch.manual_seed(0)
    per_level = [200, 50, 12]
    boxes = some_boxes(3, sum(per_level)) - 5
    boxes[0, :20, 2:] = boxes[0, :20, :2]  # without area
    logits = torch.randn(3, sum(per_level))
    limits = limits_whwh(SIZES, torch.device("cpu"))
    options = {"before": 60, "after": 40, "threshold": 0.7, "min_size": 1e-3, "min_score": 0.2}
    found, on_host = begin_proposals(boxes, logits, per_level, limits, **options)()
    torch.testing.assert_close(on_host, found, rtol=0, atol=0)
    for own, image_boxes, image_logits, size_hw in zip(found, boxes, logits, SIZES, strict=True):
        kept_boxes = []
        kept_scores = []
        for level_boxes, level in zip(image_boxes.split(per_level), image_logits.split(per_level), strict=True):
            best, rows = level.topk(min(60, len(level)))
            scores = best.sigmoid()
            clipped = clip_boxes_to_image(level_boxes[rows], size_hw)
            good = remove_small_boxes(clipped, 1e-3)
            good = good[scores[good] >= 0.2]
            left = good[nms(clipped[good], scores[good], 0.7)]
            kept_boxes.append(clipped[left])
            kept_scores.append(scores[left])
        order = torch.cat(kept_scores).argsort(descending=True, stable=True)[:40]
        assert own.equal(torch.cat(kept_boxes)[order])


def test_boxes_are_decoded_as_torchvision_decodes_them():
    torch.manual_seed(0)
    deltas = torch.randn(3, 50, 4) * 3
    anchors = some_boxes(50)
    weights = (10.0, 10.0, 5.0, 5.0)
    expected = BoxCoder(weights).decode(deltas.flatten(0, 1), [anchors] * 3).view(3, 50, 4)
    assert apply_deltas(deltas, anchors, weights).equal(expected)


def pool_of(kind) -> MultiScaleRoIAlign:
    pool = MultiScaleRoIAlign(["0", "1", "2"], 3, 2, canonical_scale=32)
    pool = pool if kind is MultiScaleRoIAlign else kind.of(pool)
    pool.scales = [1 / 4, 1 / 8, 1 / 16]
    pool.map_levels = LevelMapper(2, 4, 32, 4)
    return pool


def some_maps(images: int) -> dict[str, torch.Tensor]:
    sides = {"0": 32, "1": 16, "2": 8}
    return {
        name: torch.randn(
            images,
            3,
            side,
            side,
            dtype=torch.float64,
            requires_grad=True,
        )
        for name, side in sides.items()
    }


@pytest.mark.parametrize("knows_boxes", [False, True])
@pytest.mark.parametrize("counts", [[40, 0, 21], [0, 0], [1]])
def test_boxes_are_pooled_from_their_levels_as_torchvision_pools_them(counts, knows_boxes):
    torch.manual_seed(1)
    maps = some_maps(len(counts))
    shapes = [(128, 128)] * len(counts)
    boxes = [some_boxes(count).double() * torch.rand(count, 1) * 3 for count in counts]
    expected = pool_of(MultiScaleRoIAlign)(maps, boxes, shapes)
    found = pool_of(LevelPool)(maps, boxes, shapes, boxes if knows_boxes else None)
    assert found.equal(expected)
    weights = torch.arange(found.numel()).view(found.shape)
    gradients = [
        torch.autograd.grad((pooled * weights).sum(), list(maps.values()), allow_unused=True)
        for pooled in (found, expected)
    ]
    for own, gradient in zip(*gradients, strict=True):  # summed in another order
        torch.testing.assert_close(own, gradient, rtol=1e-12, atol=1e-9)


def test_a_box_that_is_nan_does_not_end_the_step():
    """The guard sees it in the losses of the same step and says where it came from."""
    maps = some_maps(1)
    boxes = some_boxes(5).double()
    pool = pool_of(LevelPool)
    sound = pool(maps, [boxes], [(128, 128)])
    boxes[2] = torch.nan
    pooled = pool(maps, [boxes], [(128, 128)])
    others = [0, 1, 3, 4]
    assert pooled[others].equal(sound[others])
    assert pooled.isfinite().all()
