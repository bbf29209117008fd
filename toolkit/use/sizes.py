"""Sizes of images before and after what a detector wants."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.data.transforms.geometry import shorter_side_size


def input_hw(size_hw: tuple[int, int], size: Mapping[str, int] | None) -> tuple[int, int]:
    """The (h, w) that an image of `size_hw` is resized to; `size` as in `toolkit.data.pipeline.processor_size`."""
    if size is None:
        return size_hw
    if "shortest_edge" in size:
        return shorter_side_size(size_hw, size["shortest_edge"], size.get("longest_edge"))
    return size["height"], size["width"]


def image_hw(image: Tensor) -> tuple[int, int]:
    """(h, w) of an image (..., H, W)."""
    return tuple(image.shape[-2:])


def of_one_shape(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of the tensors, those of one shape together."""
    groups: dict[torch.Size, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.shape, []).append(i)
    return list(groups.values())
