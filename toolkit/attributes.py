"""The attributes of objects as targets list them, and as losses and metrics compare them."""

import torch
from torch import Tensor


def attribute_targets(attributes: Tensor, num_attributes: int) -> tuple[Tensor, Tensor]:
    """(N, A) attribute ids from 1, ended by 0 -> (N, num_attributes) float32 0/1 and (N,) bool "has any"."""
    listed = (attributes > 0).cumprod(1)
    targets = torch.zeros(len(attributes), num_attributes, device=attributes.device)
    targets.scatter_(1, attributes * listed, 1.0)  # what comes after the end is written to column 0 ...
    targets[:, 0] = 0.0  # ... which is background and never a target
    return targets, attributes.sum(1) > 0
