"""Batch augmentations of DEIM and DEIMv2 (Huang et al., 2025; DEIMv2, engine/data/dataloader.py).

Either every image is mixed with the previous one, or objects of the batch are blended into every image. Both give more
objects per image, so that more queries learn from each ("dense one-to-one matching").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.batch import Target
from toolkit.data.transforms.geometry import PER_BOX_FIELDS
from toolkit.data.transforms.mixup import join_targets

SHARES = (0.45, 0.55)  # of the image itself
OBJECTS = 3  # blended into each image
SMALLEST_AREA = 100.0  # of such an object, square pixels
MARGIN = (0.1, 0.25)  # of its sides, blended with it

Sample = tuple[Tensor, Target]


def mix_neighbours(samples: Sequence[Sample], share: float) -> list[Sample]:
    """`share` of each image and the rest of the one before it in the batch (of the first: the last), boxes of both.

    samples: uint8 images (3, H, W) of one size, after all other transforms, and their targets.
    """
    mixed = []
    for (image, target), (other, more) in zip(samples, [samples[-1], *samples[:-1]], strict=True):
        pixels = image.float().mul_(share).add_(other.float(), alpha=1 - share)
        mixed.append((pixels.round_().to(torch.uint8), join_targets((target, more))))
    return mixed


def blend_objects(samples: Sequence[Sample], share: float, generator: torch.Generator) -> list[Sample]:
    """Up to three objects of the batch in every image, each with a margin, `1 - share` of it over `share` of what is
    there, at a place that is drawn; what is behind them keeps its boxes.

    samples: as `mix_neighbours`. Crowds and objects of less than 100 square pixels are not copied.
    """
    pool = [(image, target, row) for image, target in samples for row in _copied(target)]
    return [_with_objects(sample, pool, share, generator) for sample in samples] if pool else list(samples)


def mix_batch(samples: Sequence[Sample], mixup: float, blend: float, generator: torch.Generator) -> list[Sample]:
    """With probability `mixup` `mix_neighbours`, else with probability `blend` `blend_objects`, else nothing."""
    draws = torch.rand(3, generator=generator).tolist()
    share = SHARES[0] + (SHARES[1] - SHARES[0]) * draws[0]
    if draws[1] < mixup:
        return mix_neighbours(samples, share)
    return blend_objects(samples, share, generator) if draws[2] < blend else list(samples)


def _copied(target: Target) -> list[int]:
    wanted = (target["area"] >= SMALLEST_AREA) & (target["iscrowd"] == 0)
    return wanted.nonzero().flatten().tolist()


def _with_objects(sample: Sample, pool: Sequence, share: float, generator: torch.Generator) -> Sample:
    image, target = sample[0].clone(), sample[1]
    height, width = image.shape[-2:]
    added = [target]
    for number in torch.randperm(len(pool), generator=generator)[:OBJECTS].tolist():
        source, of, row = pool[number]
        x1, y1, x2, y2 = of["boxes"][row].int().tolist()
        x2, y2 = min(x2, width), min(y2, height)
        w, h = x2 - x1, y2 - y1
        if w < 1 or h < 1:
            continue
        left, top = (_below(side + 1, generator) for side in (width - w, height - h))
        margin = MARGIN[0] + (MARGIN[1] - MARGIN[0]) * float(torch.rand((), generator=generator))
        # as far as it is there in both images
        before = [min(int(side * margin), *starts) for side, starts in ((w, (x1, left)), (h, (y1, top)))]
        after = [min(int(w * margin), width - x2, width - left - w),
                 min(int(h * margin), height - y2, height - top - h)]  # fmt: skip
        patch = source[:, y1 - before[1] : y2 + after[1], x1 - before[0] : x2 + after[0]].float()
        place = image[:, top - before[1] : top + h + after[1], left - before[0] : left + w + after[0]]
        place.copy_((place.float() * share + patch * (1 - share)).round())
        added.append(_one(of, row, [left, top, left + w, top + h]))
    return image, join_targets(added)


def _one(target: Target, row: int, box: list[int]) -> Target:
    """One object of a target at another place; relations stay behind."""
    own = {name: target[name][row : row + 1] for name in PER_BOX_FIELDS if name in target}
    own["boxes"] = torch.tensor([box], dtype=torch.float32)
    return own | ({"relations": target["relations"][:0]} if "relations" in target else {})


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))
