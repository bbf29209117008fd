"""Augmentations that combine several images: mixup, mosaic, and the batch augmentations of DEIM.

mixup: Zhang et al., Bag of Freebies for Object Detection, 2019, as GluonCV's MixupDetection. mosaic: Bochkovskiy et
al., YOLOv4, 2020. `mix_batch`: DEIM and DEIMv2 (Huang et al., 2025; DEIMv2, engine/data/dataloader.py), where more
objects per image let more queries learn from each ("dense one-to-one matching").
"""

from collections.abc import Sequence

import numpy as np
import torch

from toolkit.base.batch import Target
from toolkit.data.transforms.geometry import (
    PER_BOX_FIELDS,
    Sample,
    Size,
    centres_in_region,
    crop,
    draw_int,
    filled_canvas,
    keep_boxes,
    resize,
)

OWN_SHARE_RANGE = (0.45, 0.55)  # of the image itself
BLENDED_OBJECTS = 3  # blended into each image
MIN_BLENDED_AREA = 100.0  # of such an object, square pixels
MARGIN_SHARE_RANGE = (0.1, 0.25)  # of its sides, blended with it


def draw_mixup_lambda(generator: torch.Generator, alpha: float = 1.5) -> float:
    """Draw the first image's share from Beta(alpha, alpha), a function of the generator's state."""
    seed = torch.randint(2**63 - 1, (), generator=generator).item()
    return float(np.random.default_rng(seed).beta(alpha, alpha))


def mixup(first: Sample, second: Sample, lam: float) -> Sample:
    """Mix two samples: lam * first + (1 - lam) * second, both at the upper left of a black canvas that holds both.

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
    weights = [torch.full((len(t["labels"]),), w) for t, w in ((target1, lam), (target2, 1 - lam))]
    joined = join_targets((target1, target2), (height, width)) | {"mixup": torch.cat(weights)}
    return canvas.to(torch.uint8), joined


def join_targets(targets: Sequence[Target], size_hw: Size | None = None) -> Target:
    """Join targets: one with the boxes and relations of all, in order.

    Everything else is the first's, except the sizes if one is given, and `labelled`: the classes that all of them
    label.
    """
    joined = dict(targets[0])
    if size_hw is not None:
        joined |= {"orig_size": torch.tensor(size_hw), "size": torch.tensor(size_hw)}
    for name in PER_BOX_FIELDS:
        if all(name in target for target in targets):
            joined[name] = torch.cat([target[name] for target in targets])
    if "labelled" in joined:
        joined["labelled"] = torch.stack([target["labelled"] for target in targets]).all(0)
    if all("relations" in target for target in targets):
        relations = []
        first = 0
        for target in targets:  # subject and object are rows of the boxes
            relations.append(target["relations"] + torch.tensor([first, first, 0]))
            first += len(target["labels"])
        joined["relations"] = torch.cat(relations)
    return joined


def mosaic(samples: Sequence[Sample], size_hw: Size, point_yx: tuple[int, int]) -> Sample:
    """Place four samples, in reading order, each with one corner at `point_yx`, cut off at the border of a canvas.

    Args:
        samples: uint8 images (3, h, w) of any size, and their targets. Each image is resized, its aspect kept, to the
            largest that fits `size_hw`.
        size_hw: of the canvas, pixels; the area outside the images is FILL_RGB.
        point_yx: row and column where the four meet, inside the canvas.

    Returns an image of `size_hw` and one target; boxes with their centre cut off go, the others are clipped. image_id
    is the first's.
    """
    canvas = filled_canvas(size_hw)
    parts = []
    for quadrant, (image, target) in enumerate(samples):
        fitted = _fitted_size(tuple(image.shape[-2:]), size_hw)
        image, target = resize(image, target, fitted)
        below, right = divmod(quadrant, 2)
        # Rows and columns of the image that its quadrant has room for: the last ones above and left of the point.
        height, top = _span(fitted[0], point_yx[0], size_hw[0], bool(below))
        width, left = _span(fitted[1], point_yx[1], size_hw[1], bool(right))
        region = (top, left, height, width)
        image, target = crop(image, keep_boxes(target, centres_in_region(target["boxes"], region)), region)
        y, x = point_yx[0] - (0 if below else height), point_yx[1] - (0 if right else width)
        canvas[:, y : y + height, x : x + width] = image
        parts.append({**target, "boxes": target["boxes"] + torch.tensor([x, y, x, y], dtype=torch.float32)})
    return canvas, join_targets(parts, size_hw)


def draw_point(size_hw: Size, generator: torch.Generator) -> tuple[int, int]:
    """Draw row and column in the middle half of each side."""
    down, right = (0.25 + 0.5 * torch.rand(2, generator=generator)).tolist()
    return int(size_hw[0] * down), int(size_hw[1] * right)


def _fitted_size(image_hw: Size, into_hw: Size) -> tuple[int, int]:
    """Return the largest size of the same aspect that fits."""
    scale = min(into_hw[0] / image_hw[0], into_hw[1] / image_hw[1])
    return tuple(max(1, min(into_hw[i], round(image_hw[i] * scale))) for i in range(2))


def _span(length: int, point: int, side: int, after: bool) -> tuple[int, int]:
    """Return (length, start) of the rows of an image that fit after the point, or of its last rows that fit before it.
    """
    room = min(length, side - point if after else point)
    return room, 0 if after else length - room


def mix_neighbours(samples: Sequence[Sample], share: float) -> list[Sample]:
    """Mix `share` of each image with the rest of the one before it, cyclically in the batch; boxes of both.

    samples: uint8 images (3, H, W) of one size, after all other transforms, and their targets.
    """
    mixed = []
    for (image, target), (other, more) in zip(samples, [samples[-1], *samples[:-1]], strict=True):
        pixels = image.float().mul_(share).add_(other.float(), alpha=1 - share)
        mixed.append((pixels.round_().to(torch.uint8), join_targets((target, more))))
    return mixed


def blend_objects(samples: Sequence[Sample], share: float, generator: torch.Generator) -> list[Sample]:
    """Blend up to three objects of the batch into every image, each with a margin, at a place that is drawn.

    A pixel becomes `1 - share` of the object's and `share` of the image's. Objects behind them keep their boxes.

    samples: as `mix_neighbours`. Crowds and objects of less than 100 square pixels are not copied.
    """
    copied = [(target["area"] >= MIN_BLENDED_AREA) & (target["iscrowd"] == 0) for _, target in samples]
    rows_of = [mask.nonzero().flatten().tolist() for mask in copied]
    pool = [(*sample, row) for sample, rows in zip(samples, rows_of, strict=True) for row in rows]
    return [_with_objects(sample, pool, share, generator) for sample in samples] if pool else list(samples)


def mix_batch(samples: Sequence[Sample], mixup: float, blend: float, generator: torch.Generator) -> list[Sample]:
    """Apply `mix_neighbours` with probability `mixup`, else `blend_objects` with probability `blend`, else nothing."""
    draws = torch.rand(3, generator=generator).tolist()
    share = OWN_SHARE_RANGE[0] + (OWN_SHARE_RANGE[1] - OWN_SHARE_RANGE[0]) * draws[0]
    if draws[1] < mixup:
        return mix_neighbours(samples, share)
    return blend_objects(samples, share, generator) if draws[2] < blend else list(samples)


def _with_objects(sample: Sample, pool: Sequence, share: float, generator: torch.Generator) -> Sample:
    image = sample[0].clone()
    target = sample[1]
    height, width = image.shape[-2:]
    added = [target]
    for number in torch.randperm(len(pool), generator=generator)[:BLENDED_OBJECTS].tolist():
        source, of, row = pool[number]
        x1, y1, x2, y2 = of["boxes"][row].int().tolist()
        x2, y2 = min(x2, width), min(y2, height)
        w, h = x2 - x1, y2 - y1
        if w < 1 or h < 1:
            continue
        left, top = (draw_int(0, side, generator) for side in (width - w, height - h))
        least, most = MARGIN_SHARE_RANGE
        margin = least + (most - least) * float(torch.rand((), generator=generator))
        # as far as it lies in both images
        ahead = (w, x1, left), (h, y1, top)
        behind = (w, width - x2, width - left - w), (h, height - y2, height - top - h)
        before, after = ([min(int(side * margin), *rooms) for side, *rooms in sides] for sides in (ahead, behind))
        patch = source[:, y1 - before[1] : y2 + after[1], x1 - before[0] : x2 + after[0]].float()
        destination = image[:, top - before[1] : top + h + after[1], left - before[0] : left + w + after[0]]
        destination.copy_((destination.float() * share + patch * (1 - share)).round())
        added.append(_one(of, row, [left, top, left + w, top + h]))
    return image, join_targets(added)


def _one(target: Target, row: int, box: list[int]) -> Target:
    """Return one object of a target, moved to `box`, without its relations."""
    columns = {name: target[name][row : row + 1] for name in PER_BOX_FIELDS if name in target}
    columns["boxes"] = torch.tensor([box], dtype=torch.float32)
    return columns | ({"relations": target["relations"][:0]} if "relations" in target else {})
