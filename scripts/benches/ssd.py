"""SSD: matching and multibox loss against torchvision's, which goes image by image, at the same anchors."""

import statistics
import timeit
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torchvision.models.detection import _utils as detection
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_iou

from toolkit.box_ops import cxcywh_to_xyxy
from toolkit.models.ssd.criterion import SsdCriterion, anchor_scales, level_anchors

STRIDES = (8, 16, 32, 64, 128)
RATIOS = (2, 3)


def bench_ssd(
    batch: int = 16, side: int = 320, boxes: int = 8, num_classes: int = 80, repeats: int = 7, seed: int = 0
) -> list[dict]:
    """Seconds from outputs and boxes to losses (and gradients): medians of interleaved rounds.

    Rows with `name`, `value` and `unit`. Ours includes the counting of positives that accumulation needs, which is the
    matching once more. The largest difference is that of a loss.
    """
    generator = torch.Generator().manual_seed(seed)
    levels = zip(STRIDES, anchor_scales(len(STRIDES), 0.1, 1.05), strict=True)
    anchors = torch.cat([level_anchors((-(-side // s),) * 2, scales, RATIOS) for s, scales in levels])
    logits = torch.randn(batch, len(anchors), num_classes + 1, generator=generator)
    offsets = torch.randn(batch, len(anchors), 4, generator=generator)
    targets = [random_target(boxes, side, num_classes, generator) for _ in range(batch)]
    rows, found = [], []
    for what, gradient in (("losses", False), ("losses and gradients", True)):
        runs = [
            lambda f=f, gradient=gradient: run(f, logits, offsets, anchors, side, targets, gradient)
            for f in (our_losses, torchvision_losses)
        ]
        found = [once() for once in runs]
        rounds = [[timeit.timeit(once, number=1) for once in (*runs, runs[0])] for _ in range(repeats)]
        rows += [
            {"name": f"ssd {what}, ours", "value": statistics.median(t[0] for t in rounds), "unit": "s"},
            {"name": f"ssd {what}, torchvision", "value": statistics.median(t[1] for t in rounds), "unit": "s"},
            {
                "name": f"ssd {what}, torchvision / ours",
                "value": statistics.median(t[1] / t[0] for t in rounds),
                "unit": "x",
            },
            {"name": f"ssd {what}, ours / ours", "value": statistics.median(t[2] / t[0] for t in rounds), "unit": "x"},
        ]
    difference = max(float((ours / theirs - 1).abs()) for ours, theirs in zip(*found, strict=True))
    return [*rows, {"name": "ssd losses, largest difference", "value": difference, "unit": "relative"}]


def random_target(boxes: int, side: int, num_classes: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Boxes of 5 % to 60 % of the side anywhere in the image, none of them a crowd."""
    sizes = side * (0.05 + 0.55 * torch.rand(boxes, 2, generator=generator) ** 2)
    corners = torch.rand(boxes, 2, generator=generator) * (side - sizes)
    labels = torch.randint(num_classes, (boxes,), generator=generator)
    crowd = torch.zeros(boxes, dtype=torch.int64)
    return {"boxes": torch.cat((corners, corners + sizes), dim=1), "labels": labels, "iscrowd": crowd}


def our_losses(logits: Tensor, offsets: Tensor, anchors: Tensor, side: int, targets: list[dict]) -> list[Tensor]:
    """The toolkit's, as training calls them."""
    criterion, image_hw = SsdCriterion(), torch.tensor([side, side])
    denominators = criterion.denominators(anchors, targets, image_hw)
    losses, _ = criterion(logits, offsets, anchors, image_hw, targets, denominators)
    return [losses["loss_cls"], losses["loss_loc"]]


def torchvision_losses(
    logits: Tensor, offsets: Tensor, anchors: Tensor, side: int, targets: list[dict]
) -> list[Tensor]:
    """torchvision's matcher and `SSD.compute_loss`, as its `SSD.forward` calls them; there labels start at 1."""
    boxes = cxcywh_to_xyxy(anchors) * side
    matcher = detection.SSDMatcher(0.5)
    matched = [matcher(box_iou(target["boxes"], boxes)) for target in targets]
    model = SimpleNamespace(box_coder=detection.BoxCoder((10.0, 10.0, 5.0, 5.0)), neg_to_pos_ratio=3)
    named = [{**target, "labels": target["labels"] + 1} for target in targets]
    outputs = {"bbox_regression": offsets, "cls_logits": logits}
    losses = SSD.compute_loss(model, named, outputs, [boxes] * len(targets), matched)
    return [losses["classification"], losses["bbox_regression"]]


def run(
    losses: Callable, logits: Tensor, offsets: Tensor, anchors: Tensor, side: int, targets: list[dict], gradient: bool
) -> list[Tensor]:
    leaves = logits.detach().requires_grad_(gradient), offsets.detach().requires_grad_(gradient)
    result = losses(*leaves, anchors, side, targets)
    if gradient:
        sum(result).backward()
    return [loss.detach() for loss in result]


if __name__ == "__main__":
    for row in bench_ssd():
        print(f"{row['name']}: {row['value']:.4g} {row['unit']}")
