"""Augmentations that combine several images: mixup, mosaic, and the batch augmentations of DEIM.

mixup: Zhang et al., Bag of Freebies for Object Detection, 2019, as GluonCV's MixupDetection. mosaic: Bochkovskiy et
al., YOLOv4, 2020. `mix_batch`: DEIM and DEIMv2 (Huang et al., 2025; DEIMv2, engine/data/dataloader.py), where more
objects per image let more queries learn from each ("dense one-to-one matching").
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.base.batch import Target
from toolkit.base.masks import joined as join_masks
from toolkit.data.transforms.geometry import (
    PER_BOX_FIELDS,
    Sample,
    Size,
    centres_in_region,
    crop,
    draw_int,
    filled_canvas,
    keep_boxes,
    move_target,
    resize,
)

OWN_SHARE_RANGE = (0.45, 0.55)  # of the image itself
BLENDED_OBJECTS = 3  # blended into each image
MIN_BLENDED_AREA = 100.0  # of such an object, square pixels
MARGIN_SHARE_RANGE = (0.1, 0.25)  # of its sides, blended with it


def draw_mixup_lambda(generator: torch.Generator, alpha: float = 1.5) -> float:
    """Draw the share of the first image in a `mixup` from Beta(alpha, alpha)."""
    seed = torch.randint(2**63 - 1, (), generator=generator).item()
    share = np.random.default_rng(seed).beta(alpha, alpha)
    return float(share)


def mixup(first: Sample, second: Sample, lam: float) -> Sample:
    """Mix two samples: lam * first + (1 - lam) * second, both at the upper left of a black canvas that holds both.

    Args:
        first, second: uint8 images (3, H, W) of any size and their targets, before other transforms.
        lam: clipped to [0, 1]. At 1 only the first sample is returned, in its own size.

    Returns a uint8 image (float32 sum, truncated) and a target with the boxes of both, and `mixup` (N,) float32: the
    share of the image that each box comes from, also where it is 0. image_id is the first's.
    """
    lam = min(max(float(lam), 0.0), 1.0)
    image1, target1 = first
    image2, target2 = second
    num1 = len(target1["labels"])
    num2 = len(target2["labels"])
    if lam >= 1:
        return image1, {**target1, "mixup": torch.ones(num1)}
    _, height1, width1 = image1.shape
    _, height2, width2 = image2.shape
    size_hw = (max(height1, height2), max(width1, width2))
    canvas = torch.zeros(3, *size_hw)
    canvas[:, :height1, :width1] = image1.float() * lam
    canvas[:, :height2, :width2] += image2.float() * (1 - lam)
    joined = join_targets((target1, target2), size_hw)
    shares1 = torch.full((num1,), lam)
    shares2 = torch.full((num2,), 1 - lam)
    joined["mixup"] = torch.cat([shares1, shares2])
    return canvas.to(torch.uint8), joined


def join_targets(targets: Sequence[Target], size_hw: Size | None = None) -> Target:
    """Join targets to one with the boxes and relations of all, in order.

    Everything else is that of the first target, with two exceptions: `orig_size` and `size` are `size_hw` if this is
    given, and `labelled` has the classes that all targets label.
    """
    joined = dict(targets[0])
    if size_hw is not None:
        joined["orig_size"] = torch.tensor(size_hw)
        joined["size"] = torch.tensor(size_hw)
    for name in PER_BOX_FIELDS:
        if all(name in target for target in targets):
            columns = [target[name] for target in targets]
            joined[name] = join_masks(columns) if name == "masks" else torch.cat(columns)
    if "labelled" in joined:
        of_targets = torch.stack([target["labelled"] for target in targets])
        joined["labelled"] = of_targets.all(0)
    if all("relations" in target for target in targets):
        relations = []
        before = 0  # boxes of earlier targets
        for target in targets:
            shift = torch.tensor([before, before, 0])  # subject and object are rows of the boxes
            relations.append(target["relations"] + shift)
            before += len(target["labels"])
        joined["relations"] = torch.cat(relations)
    return joined


def mosaic(samples: Sequence[Sample], size_hw: Size, point_yx: tuple[int, int]) -> Sample:
    """Place four samples, in reading order, each with one corner at `point_yx`, cut off at the border of a canvas.

    Args:
        samples: uint8 images (3, h, w) of any size, and their targets. Each image is resized, its aspect kept, to the
            largest that fits `size_hw`.
        size_hw: of the canvas, pixels; the area outside the images is FILL_RGB.
        point_yx: row and column where the four meet, inside the canvas.

    Returns an image of `size_hw` and one target. Boxes whose centre is cut off are dropped, the others are clipped. The
    image_id is that of the first sample.
    """
    canvas = filled_canvas(size_hw)
    canvas_height, canvas_width = size_hw
    point_y, point_x = point_yx
    parts = []
    for quadrant, (image, target) in enumerate(samples):
        fitted_hw = _fitted_size(tuple(image.shape[-2:]), size_hw)
        image, target = resize(image, target, fitted_hw)
        is_below = quadrant in (2, 3)
        is_right = quadrant in (1, 3)
        # Rows and columns of the image that its quadrant has room for: the last ones above and left of the point.
        height, top = _span(fitted_hw[0], point_y, canvas_height, is_below)
        width, left = _span(fitted_hw[1], point_x, canvas_width, is_right)
        region = (top, left, height, width)
        target = keep_boxes(target, centres_in_region(target["boxes"], region))
        image, target = crop(image, target, region)
        y = point_y if is_below else point_y - height
        x = point_x if is_right else point_x - width
        canvas[:, y : y + height, x : x + width] = image
        parts.append(move_target(target, x, y, size_hw))
    return canvas, join_targets(parts, size_hw)


def draw_point(size_hw: Size, generator: torch.Generator) -> tuple[int, int]:
    """Draw row and column in the middle half of each side."""
    height, width = size_hw
    shares = 0.25 + 0.5 * torch.rand(2, generator=generator)
    down, right = shares.tolist()
    return int(height * down), int(width * right)


def _fitted_size(image_hw: Size, into_hw: Size) -> tuple[int, int]:
    """Return the largest size of the same aspect that fits."""
    scale = min(into_hw[0] / image_hw[0], into_hw[1] / image_hw[1])
    fitted = []
    for side, most in zip(image_hw, into_hw, strict=True):
        scaled = min(most, round(side * scale))
        fitted.append(max(1, scaled))
    return tuple(fitted)


def _span(length: int, point: int, side: int, after: bool) -> tuple[int, int]:
    """Return (length, start) of the rows of an image that fit after the point, or of its last rows that fit before it.

    On a side of 100 with the point at 30, an image of 50 rows has (50, 0) after the point, and (30, 20) before it.
    """
    if after:
        return min(length, side - point), 0
    fitting = min(length, point)
    return fitting, length - fitting


def mix_neighbours(samples: Sequence[Sample], share: float) -> list[Sample]:
    """Mix each image of a batch with the image before it (the first with the last).

    The new image is share * image + (1 - share) * previous image; its target has the boxes of both.

    samples: uint8 images (3, H, W) of one size, after all other transforms, and their targets.
    """
    mixed = []
    previous = [samples[-1], *samples[:-1]]
    for (image, target), (other_image, other_target) in zip(samples, previous, strict=True):
        pixels = image.float().mul_(share)
        pixels.add_(other_image.float(), alpha=1 - share)
        joined = join_targets((target, other_target))
        mixed.append((pixels.round_().to(torch.uint8), joined))
    return mixed


def blend_objects(samples: Sequence[Sample], share: float, generator: torch.Generator) -> list[Sample]:
    """Blend up to three objects of the batch into every image, each with a margin around it, at a random place.

    A pixel becomes share * image + (1 - share) * object. Objects of the image that are covered keep their boxes.

    samples: as for `mix_neighbours`. Crowds and objects of less than 100 square pixels are not copied.
    """
    pool = []
    for image, target in samples:
        can_be_copied = (target["area"] >= MIN_BLENDED_AREA) & (target["iscrowd"] == 0)
        rows = can_be_copied.nonzero().flatten()
        pool += [(image, target, row) for row in rows.tolist()]
    if not pool:
        return list(samples)
    return [_with_objects(sample, pool, share, generator) for sample in samples]


def mix_batch(samples: Sequence[Sample], mixup: float, blend: float, generator: torch.Generator) -> list[Sample]:
    """Apply `mix_neighbours` with probability `mixup`, else `blend_objects` with probability `blend`, else nothing.

    The share of an image itself is drawn from `OWN_SHARE_RANGE`.
    """
    draws = torch.rand(3, generator=generator).tolist()
    share = OWN_SHARE_RANGE[0] + (OWN_SHARE_RANGE[1] - OWN_SHARE_RANGE[0]) * draws[0]
    if draws[1] < mixup:
        return mix_neighbours(samples, share)
    if draws[2] < blend:
        return blend_objects(samples, share, generator)
    return list(samples)


def _with_objects(
    sample: Sample,
    pool: Sequence[tuple[Tensor, Target, int]],
    share: float,
    generator: torch.Generator,
) -> Sample:
    """Blend objects of the pool, (image, target, row) of each, into a copy of the sample."""
    image = sample[0].clone()
    height, width = image.shape[-2:]
    added = [sample[1]]
    chosen = torch.randperm(len(pool), generator=generator)[:BLENDED_OBJECTS]
    for number in chosen.tolist():
        source, source_target, row = pool[number]
        x1, y1, x2, y2 = source_target["boxes"][row].int().tolist()
        x2 = min(x2, width)
        y2 = min(y2, height)
        w = x2 - x1
        h = y2 - y1
        if w < 1 or h < 1:
            continue
        left = draw_int(0, width - w, generator)
        top = draw_int(0, height - h, generator)
        right = left + w
        bottom = top + h
        drawn = float(torch.rand((), generator=generator))
        margin = MARGIN_SHARE_RANGE[0] + (MARGIN_SHARE_RANGE[1] - MARGIN_SHARE_RANGE[0]) * drawn
        margin_x = int(w * margin)
        margin_y = int(h * margin)
        # The margins, as far as they lie in both images.
        on_left = min(margin_x, x1, left)
        on_top = min(margin_y, y1, top)
        on_right = min(margin_x, width - x2, width - right)
        below = min(margin_y, height - y2, height - bottom)
        patch = source[:, y1 - on_top : y2 + below, x1 - on_left : x2 + on_right].float()
        destination = image[:, top - on_top : bottom + below, left - on_left : right + on_right]
        blended = destination.float() * share + patch * (1 - share)
        destination.copy_(blended.round())
        added.append(_one(source_target, row, [left, top, right, bottom]))
    return image, join_targets(added)


def _one(target: Target, row: int, box: list[int]) -> Target:
    """Return one object of a target, moved to `box`, without its relations."""
    columns = {name: target[name][row : row + 1] for name in PER_BOX_FIELDS if name in target}
    columns["boxes"] = torch.tensor([box], dtype=torch.float32)
    if "relations" in target:
        columns["relations"] = target["relations"][:0]
    return columns
