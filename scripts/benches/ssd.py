"""SSD: matching and multibox loss against torchvision's, which works image by image, with the same anchors."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torchvision.models.detection import _utils as detection
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_iou

from toolkit.base.box_ops import cxcywh_to_xyxy
from toolkit.detectors.ssd.criterion import SsdCriterion, anchor_scales, level_anchors

from .measuring import losses_against, random_target

STRIDES = (8, 16, 32, 64, 128)
RATIOS = (2, 3)


def bench_ssd(
    batch: int = 16, side: int = 320, boxes: int = 8, num_classes: int = 80, repeats: int = 7, seed: int = 0
) -> list[dict]:
    """Measure the losses from outputs and boxes, as rows of `losses_against`. Ours includes the count of positives for
    gradient accumulation, for which anchors are matched a second time."""
    generator = torch.Generator().manual_seed(seed)
    levels = zip(STRIDES, anchor_scales(len(STRIDES), 0.1, 1.05), strict=True)
    anchors = torch.cat([level_anchors((-(-side // s),) * 2, scales, RATIOS) for s, scales in levels])
    logits = torch.randn(batch, len(anchors), num_classes + 1, generator=generator)
    offsets = torch.randn(batch, len(anchors), 4, generator=generator)
    targets = [random_target(boxes, side, num_classes, generator, 0.05) for _ in range(batch)]
    both = [partial(f, anchors=anchors, side=side, targets=targets) for f in (our_losses, torchvision_losses)]
    return losses_against("ssd", "torchvision", both, (logits, offsets), repeats)


def our_losses(logits: Tensor, offsets: Tensor, anchors: Tensor, side: int, targets: list[dict]) -> dict[str, Tensor]:
    """Compute the losses with the toolkit's functions, as in training."""
    criterion = SsdCriterion()
    image_hw = torch.tensor([side, side])
    denominators = criterion.denominators(anchors, targets, image_hw)
    losses, _ = criterion(logits, offsets, anchors, image_hw, targets, denominators)
    return losses


def torchvision_losses(
    logits: Tensor, offsets: Tensor, anchors: Tensor, side: int, targets: list[dict]
) -> dict[str, Tensor]:
    """Compute the losses with torchvision's matcher and `SSD.compute_loss`, as in `SSD.forward`; its labels start at
    1."""
    boxes = cxcywh_to_xyxy(anchors) * side
    matcher = detection.SSDMatcher(0.5)
    matched = [matcher(box_iou(target["boxes"], boxes)) for target in targets]
    model = SimpleNamespace(box_coder=detection.BoxCoder((10.0, 10.0, 5.0, 5.0)), neg_to_pos_ratio=3)
    named = [{**target, "labels": target["labels"] + 1} for target in targets]
    outputs = {"bbox_regression": offsets, "cls_logits": logits}
    losses = SSD.compute_loss(model, named, outputs, [boxes] * len(targets), matched)
    return {"loss_cls": losses["classification"], "loss_loc": losses["bbox_regression"]}
