"""RoIAlign (He et al., Mask R-CNN, ICCV 2017, section 3) with a gradient that is fast on a CPU.

The values are torchvision's. Its gradient adds every sample to four cells of the map, one after another in one thread,
and took two fifths of a training step of a small Mask R-CNN. But the samples of a box are a grid, so that pooling is
the product of three matrices: which rows of the map a row of the result takes, the map, and which columns. The gradient
is then two products of matrices, for all boxes of an image at once.
"""

import torch
from torch import Tensor
from torchvision.ops import roi_align

from toolkit.base.batch import is_waited_for

MULTIPLICATIONS = 80  # in products of matrices, which take about as long as torchvision's addition of one sample


def pooled_regions(features: Tensor, rois: Tensor, side: int, scale: float, sampling_ratio: int) -> Tensor:
    """Return pooled features (R, C, side, side) of R boxes: torchvision's `roi_align`, whose boxes are not aligned.

    Args:
        features: (B, C, H, W).
        rois: (R, 5) index of the image, then the box xyxy in pixels of the model's images.
        scale: 1 / stride of the feature map.
        sampling_ratio: samples of a cell in each direction; 0: as many as the box has rows or columns.
    """
    if features.requires_grad and _products_are_faster(features, side, sampling_ratio):
        return _FastOnCpu.apply(features, rois, side, scale, sampling_ratio)
    if is_waited_for(features.device):
        # As torchvision does, which takes contiguous maps and under autocast float32, but in one pass instead of two.
        wide = features.to(torch.float32, memory_format=torch.contiguous_format)
        return roi_align(wide, rois, side, scale, sampling_ratio).to(features.dtype)
    return roi_align(features, rois, side, scale, sampling_ratio)


def _products_are_faster(features: Tensor, side: int, sampling_ratio: int) -> bool:
    """Their time grows with the map and torchvision's does not: at a side of 7 they are faster up to about 90 x 90."""
    if features.device.type != "cpu" or sampling_ratio < 1 or torch.compiler.is_compiling():
        return False
    height, width = features.shape[-2:]
    multiplications = side * width * (side + height)
    additions = 4 * (side * sampling_ratio) ** 2
    return multiplications < MULTIPLICATIONS * additions


class _FastOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features: Tensor, rois: Tensor, side: int, scale: float, sampling_ratio: int) -> Tensor:
        ctx.save_for_backward(rois)
        ctx.maps = features.shape
        ctx.scale = scale
        ctx.sampling_ratio = sampling_ratio
        return roi_align(features, rois, side, scale, sampling_ratio)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rois,) = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            of_features = _gradient(gradient, rois, ctx.maps, ctx.scale, ctx.sampling_ratio)
        return of_features, None, None, None, None


def _gradient(gradient: Tensor, rois: Tensor, maps: torch.Size, scale: float, sampling_ratio: int) -> Tensor:
    """Return the gradient (B, C, H, W) of the features from that of their R pooled boxes (R, C, side, side).

    It is computed in float32 for narrower types, as torchvision computes it under autocast.
    """
    _, channels, height, width = maps
    side = gradient.shape[-1]
    of_features = torch.zeros(maps, dtype=gradient.dtype)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    image = rois[:, 0]
    starts = rois[:, 1:3].to(wide.dtype) * scale
    ends = rois[:, 3:5].to(wide.dtype) * scale
    extents = (ends - starts).clamp(min=1)
    columns = _taken(starts[:, 0], extents[:, 0], side, sampling_ratio, width)  # (R, side, W)
    rows = _taken(starts[:, 1], extents[:, 1], side, sampling_ratio, height)  # (R, side, H)
    for index in range(maps[0]):
        here = (image == index).nonzero()[:, 0]
        if not len(here):
            continue
        by_row = wide[here].transpose(1, 2).flatten(1, 2)  # (R, side * C, side)
        along_x = torch.bmm(by_row, columns[here]).view(len(here) * side, channels * width)
        both = rows[here].view(len(here) * side, height).T @ along_x
        of_features[index] = both.view(height, channels, width).transpose(0, 1)
    return of_features


def _taken(starts: Tensor, extents: Tensor, side: int, sampling_ratio: int, cells: int) -> Tensor:
    """Return how much (R, side, cells) each row of R pooled boxes takes of each row of the map; or of columns.

    starts, extents: (R,) of the boxes, in cells of the map. The positions of samples are computed in torchvision's
    order, because a sample more than one cell outside the map does not count at all.
    """
    of_cell = (extents / side)[:, None, None]
    pooled = torch.arange(side, dtype=starts.dtype)[:, None]
    sample = torch.arange(sampling_ratio, dtype=starts.dtype) + 0.5
    positions = (starts[:, None, None] + pooled * of_cell + sample * of_cell / sampling_ratio).flatten(1)
    counts = (positions >= -1) & (positions <= cells)
    positions = positions.clamp(min=0, max=cells - 1)
    low = positions.floor()
    high = (low + 1).clamp(max=cells - 1)
    share_of_high = positions - low
    pooled_row = torch.arange(side).repeat_interleave(sampling_ratio)
    taken = starts.new_zeros(len(starts), side * cells)
    for cell, share in ((low, 1 - share_of_high), (high, share_of_high)):
        taken.scatter_add_(1, pooled_row * cells + cell.long(), share * counts / sampling_ratio)
    return taken.view(-1, side, cells)
