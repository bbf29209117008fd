"""Gradients of a detector's losses with respect to the logits of classes."""

import torch
from small_detectors import CLASSES, batch_of, weighted


def of_class_1(labelled: torch.Tensor | None):
    """A batch whose boxes are all of the one class that the first image labels; the second one labels all."""
    batch = batch_of([3, 2], (64, 64))
    for target in batch.targets:
        target["labels"] = torch.ones_like(target["labels"])
        if labelled is not None:
            target["labelled"] = torch.ones(3, dtype=torch.bool)
    if labelled is not None:
        batch.targets[0]["labelled"] = labelled
    return batch


def class_gradients(detector, batch) -> tuple[list[torch.Tensor], dict]:
    """Gradients (2, N, C), image by image, of the losses with respect to the class logits of all outputs; losses."""
    torch.manual_seed(0)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    outputs = outputs.get("layers", outputs)
    names = [name for name in outputs if "raw" in name or "logits" in name and name != "rpn_logits"]
    if detector.options["architecture"] == "deformable_detr" and "encoder_logits" in names:
        names.remove("encoder_logits")  # of objects of any class
    for name in names:
        outputs[name] = outputs[name].detach().requires_grad_()
    given = {"layers": outputs} if "denoising" in outputs else outputs
    losses, _ = detector.criterion(given, batch.targets, detector.denominators(batch.targets))
    weighted(detector, losses).backward()
    gradients = [_by_image(detector, outputs, name) for name in names]
    if "sizes" in outputs:  # boxes are at some of the levels of YOLOv3
        gradients = [torch.cat(gradients, 1)]
    return gradients, losses


def _by_image(detector, outputs, name: str) -> torch.Tensor:
    """(2, N, C)"""
    gradient = outputs[name].grad
    if "raw" in name:  # (B, A * (5 + C), H, W)
        gradient = gradient.unflatten(1, (-1, 5 + len(CLASSES)))[:, :, 5:].movedim(2, -1)
    elif name == "roi_logits":
        gradient = gradient.unflatten(0, (2, -1))
    by_layer = detector.divided_by == "boxes" and name == "logits" and "denoising" not in outputs
    if by_layer or detector.options["architecture"] == "detr":  # (L, B, Q, C)
        gradient = gradient.transpose(0, 1)
    background_first = name == "roi_logits" or "anchors" in outputs
    columns = slice(1, None) if background_first else slice(len(CLASSES))
    return gradient[..., columns].flatten(1, -2)
