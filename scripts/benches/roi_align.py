"""The gradient of RoIAlign on a CPU against torchvision's, at the sizes of a small Mask R-CNN and of larger maps."""

import torch
from torchvision.ops import roi_align

from toolkit.models.roi_align import pooled_regions

from .measuring import against, in_turn, row

CASES = {  # images, side of the map, boxes, cells of a box in each direction
    "boxes, map of 32 x 32": (8, 32, 512, 7),
    "masks, map of 32 x 32": (8, 32, 128, 14),
    "boxes, map of 64 x 64": (4, 64, 512, 7),
}


def bench_roi_align(channels: int = 64, repeats: int = 9, fewer: int = 1, seed: int = 0) -> list[dict]:
    """Measure the gradient of the feature map from that of the pooled boxes, as rows of `against`, and its largest
    difference in float64. fewer: divides the number of boxes."""
    torch.manual_seed(seed)
    rows = []
    largest = 0.0
    for title, (images, side, boxes, cells) in CASES.items():
        features = torch.randn(images, channels, side, side, dtype=torch.float64)
        rois = _some_rois(images, boxes // fewer, side)
        both = [_gradient(pool, features.float(), rois.float(), cells) for pool in (pooled_regions, roi_align)]
        rows += against(f"RoIAlign's gradient, {title}", "torchvision", in_turn(*both, repeats, warm_up=2))
        exact, expected = (_gradient(pool, features, rois, cells)() for pool in (pooled_regions, roi_align))
        largest = max(largest, float((exact - expected).abs().max()))
    return [*rows, row("RoIAlign's gradient, largest difference", largest, "")]


def _some_rois(images: int, boxes: int, side: int) -> torch.Tensor:
    corners = torch.rand(boxes, 2, dtype=torch.float64) * 3 * side
    sizes = torch.rand(boxes, 2, dtype=torch.float64) * 1.5 * side
    image = torch.arange(boxes, dtype=torch.float64)[:, None] * images // boxes
    return torch.cat([image, corners, corners + sizes], dim=1)


def _gradient(pool, features: torch.Tensor, rois: torch.Tensor, cells: int):
    """Return a function that computes the gradient of the features by this pooling, at stride 4."""
    leaf = features.clone().requires_grad_()
    pooled = pool(leaf, rois, cells, 0.25, 2)
    of_pooled = torch.ones_like(pooled).cumsum(0)
    return lambda: torch.autograd.grad(pooled, leaf, of_pooled, retain_graph=True)[0]
