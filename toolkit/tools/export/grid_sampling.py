"""Bilinear sampling without the operator GridSample, for runtimes that lack it or compute it differently."""

import torch
from torch import Tensor


def grid_sample_by_gather(
    maps: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = False,
) -> Tensor:
    """Return `torch.nn.functional.grid_sample` of maps (N, C, H, W) at the points of grid (N, h, w, 2), computed by one
    Gather and arithmetic: (N, C, h, w).

    Raises ValueError for other arguments than those of deformable attention: bilinear, zeros outside, no aligned
    corners.
    """
    if (mode, padding_mode, bool(align_corners)) != ("bilinear", "zeros", False):
        raise ValueError(f"grid_sample {mode}, {padding_mode}, align_corners {align_corners} has no form by gather")
    height, width = maps.shape[-2:]
    half_size = grid.new_tensor([width, height]) / 2
    pixels = (grid.flatten(1, 2) + 1) * half_size - 0.5  # (B, points, 2): -1 is the left edge, 1 the right one
    x, y = pixels.unbind(-1)
    left, top = x.floor(), y.floor()
    columns = torch.stack([left, left + 1, left, left + 1], 1)  # the four cells around each point
    rows = torch.stack([top, top, top + 1, top + 1], 1)
    in_x = 1 - (x[:, None] - columns).abs()
    in_y = 1 - (y[:, None] - rows).abs()
    weights = in_x * in_y
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    cells = (rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)).long()
    # Gather whole rows of channels from one table: GatherElements, channel by channel, takes twice the time.
    table = maps.flatten(2).transpose(1, 2).flatten(0, 1)
    first_cells = height * width * torch.arange(maps.shape[0], device=maps.device)  # of each image
    picked = table[cells + first_cells[:, None, None]]
    weighted = picked * weights.where(inside, 0)[..., None]
    found = weighted.sum(1).transpose(1, 2)
    return found.unflatten(2, grid.shape[1:3])
