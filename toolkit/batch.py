"""One micro-batch of images and targets, and its pixels as a network takes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Target = dict[str, object]  # of one image, see `toolkit.data.dataset.row_target`


@dataclass
class Batch:
    """Images of one micro-batch on one rank.

    images: uint8 (B, 3, H, W), channels-last in memory, 0 beyond each image's size (padding is right and below).
    sizes: (B, 2) int64 (h, w) of each image without its padding.
    targets: one dict per image, see `toolkit.data.dataset.row_target`. B = 0 happens in evaluation on several ranks.
    """

    images: Tensor
    sizes: Tensor
    targets: list[Target]

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The batch on `device`; the targets' small tensors travel together, one copy per dtype."""
        return Batch(
            self.images.to(device, non_blocking=non_blocking),
            self.sizes.to(device, non_blocking=non_blocking),
            _move_targets(self.targets, torch.device(device), non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """Images and sizes in page-locked memory; called by the DataLoader."""
        return Batch(self.images.pin_memory(), self.sizes.pin_memory(), self.targets)

    def __getstate__(self) -> dict:
        # A worker sends each tensor as a shared-memory file of its own: hundreds per batch with targets, which is slow
        # and runs into the limit of open files. As NumPy arrays the small ones travel inside the message itself.
        targets = [{name: _as_array(value) for name, value in target.items()} for target in self.targets]
        return {"images": self.images, "sizes": _as_array(self.sizes), "targets": targets}

    def __setstate__(self, state: dict) -> None:
        self.images, self.sizes = state["images"], _as_tensor(state["sizes"])
        self.targets = [{name: _as_tensor(value) for name, value in target.items()} for target in state["targets"]]


def pixel_mask(sizes: Tensor, hw: tuple[int, int]) -> Tensor:
    """bool (B, H, W): True inside each image's `sizes` (B, 2) h, w; on the device of `sizes`."""
    rows, columns = (torch.arange(side, device=sizes.device) for side in hw)
    return (rows[:, None] < sizes[:, 0, None, None]) & (columns < sizes[:, 1, None, None])


def normalize_images(
    images: Tensor, sizes: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """(uint8 / 255 - mean) / std in float32, then zero outside `sizes`: the padding of DETR, where zero is the mean.

    images (B, 3, H, W) uint8 and sizes (B, 2) on one device -> (B, 3, H, W) contiguous, in `dtype`.
    """
    # Planes are made of the bytes, before they are four times as many.
    normalized = images.contiguous().to(torch.float32).div_(255)
    for plane, channel_mean, channel_std in zip(normalized.unbind(1), mean, std, strict=True):
        plane.sub_(channel_mean).div_(channel_std)  # plain numbers: a tensor of them would make the host wait for a GPU
    return normalized.masked_fill_(~pixel_mask(sizes, images.shape[-2:])[:, None], 0).to(dtype)


def _as_array(value: object) -> object:
    return value.numpy() if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _as_tensor(value: object) -> object:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _move_targets(targets: list[Target], device: torch.device, non_blocking: bool) -> list[Target]:
    """Targets with their tensors on `device`: all tensors of a dtype go there as one, and are cut apart there."""
    flat = [(i, name, value) for i, target in enumerate(targets) for name, value in target.items()
            if isinstance(value, Tensor)]  # fmt: skip
    moved = [dict(target) for target in targets]
    for dtype in dict.fromkeys(value.dtype for _, _, value in flat):
        of_dtype = [entry for entry in flat if entry[2].dtype == dtype]
        joined = torch.cat([value.reshape(-1) for _, _, value in of_dtype])
        if device.type == "cuda" and joined.device.type == "cpu":
            joined = joined.pin_memory()  # or the copy would wait for everything queued on the GPU
        parts = joined.to(device, non_blocking=non_blocking).split([value.numel() for _, _, value in of_dtype])
        for (i, name, value), part in zip(of_dtype, parts, strict=True):
            moved[i][name] = part.view(value.shape)
    return moved
