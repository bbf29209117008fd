"""Detection mixup (Zhang et al., Bag of Freebies for Object Detection, 2019), as GluonCV's MixupDetection."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.batch import Target
from toolkit.data.transforms.geometry import PER_BOX_FIELDS


def draw_mixup_lambda(generator: torch.Generator, alpha: float = 1.5) -> float:
    """The first image's share from Beta(alpha, alpha), a function of the generator's state."""
    seed = torch.randint(2**63 - 1, (), generator=generator).item()
    return float(np.random.default_rng(seed).beta(alpha, alpha))


def mixup(first: tuple[Tensor, Target], second: tuple[Tensor, Target], lam: float) -> tuple[Tensor, Target]:
    """lam * first + (1 - lam) * second, both at the upper left of a black canvas that holds both.

    Args:
        first, second: uint8 images (3, H, W) of any size and their targets, before other transforms.
        lam: clipped to [0, 1]. At 1 the first sample is returned alone, in its own size.

    Returns a uint8 image (float32 sum, truncated) and a target with the boxes of both, and `mixup` (N,) float32: the
    share of the image that each box comes from, also where it is 0. image_id is the first's.
    """
    lam = min(max(float(lam), 0.0), 1.0)
    (image1, target1), (image2, target2) = first, second
    if lam >= 1:
        return image1, target1 | {"mixup": torch.ones(len(target1["labels"]))}
    height, width = (max(image1.shape[i], image2.shape[i]) for i in (1, 2))
    canvas = torch.zeros(3, height, width)
    canvas[:, : image1.shape[1], : image1.shape[2]] = image1.float() * lam
    canvas[:, : image2.shape[1], : image2.shape[2]] += image2.float() * (1 - lam)
    size = torch.tensor([height, width])
    weights = [torch.full((len(t["labels"]),), w) for t, w in ((target1, lam), (target2, 1 - lam))]
    joined = join_targets((target1, target2)) | {"mixup": torch.cat(weights)}
    return canvas.to(torch.uint8), joined | {"orig_size": size, "size": size.clone()}


def join_targets(targets: Sequence[Target]) -> Target:
    """One target with the boxes and relations of several, in order; everything else is the first's."""
    joined = dict(targets[0])
    for name in PER_BOX_FIELDS:
        if all(name in target for target in targets):
            joined[name] = torch.cat([target[name] for target in targets])
    if all("relations" in target for target in targets):
        relations, first = [], 0
        for target in targets:  # subject and object are rows of the boxes
            relations.append(target["relations"] + torch.tensor([first, first, 0]))
            first += len(target["labels"])
        joined["relations"] = torch.cat(relations)
    return joined
