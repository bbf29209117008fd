"""A tiny Faster or Mask R-CNN, and four images for it: objects, none, one object, and a crowd."""

import numpy as np
import torch
import yaml
from rows import boxes, integers

from toolkit.base.masks import Masks
from toolkit.models import build_detector

CLASSES = ("red", "white", "platelet")
SIDE = 64
TINY = yaml.safe_load("""
    backbone: test_resnet
    norm: group
    freeze: none
    strides: [8, 16]
    fpn_channels: 16
    anchor_sizes: [[16], [32], [48]]
    aspect_ratios: [1.0]
    representation_size: 24
    rpn_pre_nms_top_n_train: 40
    rpn_post_nms_top_n_train: 30
    rpn_pre_nms_top_n_test: 40
    rpn_post_nms_top_n_test: 20
    rpn_batch_size_per_image: 32
    box_batch_size_per_image: 16
""")
MASKS = {"masks": True, "mask_convs": 2, "mask_channels": 8}
# Nothing is drawn: all anchors and proposals are sampled.
EVERYTHING = {"rpn_batch_size_per_image": 10**6, "box_batch_size_per_image": 10**6}


def tiny(**options):
    torch.manual_seed(0)
    return build_detector("faster_rcnn", class_names=CLASSES, **TINY | options)


def target(objects: str, crowds: str = ""):
    """Objects that are diamonds in their boxes; labels count the boxes, and crowds are numbers of boxes."""
    numbered = boxes(objects)
    rings = []
    for left, top, right, bottom in numbered.tolist():
        x = (left + right) / 2
        y = (top + bottom) / 2
        rings.append(
            (
                np.array(
                    [
                        [x, top],
                        [right, y],
                        [x, bottom],
                        [left, y],
                    ]
                ),
            )
        )
    iscrowd = torch.zeros(len(numbered), dtype=torch.int64)
    iscrowd[integers(crowds)] = 1
    return {
        "boxes": numbered,
        "labels": torch.arange(len(numbered)) % len(CLASSES),
        "iscrowd": iscrowd,
        "masks": Masks.of(rings).drawn((SIDE, SIDE)),
        "size": torch.tensor([SIDE, SIDE]),
    }


TARGETS = [
    target("4 4 30 28, 20 30 60 62"),
    target(""),
    target("10 10 40 40"),
    target("0 0 64 40, 8 42 24 60", crowds="0"),
]


def images_of(count, side=SIDE):
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(
        0,
        256,
        (count, 3, side, side),
        dtype=torch.uint8,
        generator=generator,
    )
    return images, torch.tensor([[side, side]] * count)


def losses_of(detector, targets, rows=slice(None), denominators=None):
    """Losses and outputs; rows: which of the images of `images_of` they are."""
    images, sizes = images_of(4)
    outputs = detector(
        images[rows][: len(targets)],
        sizes[rows][: len(targets)],
        targets,
    )
    losses, _ = detector.criterion(outputs, targets, denominators or detector.denominators(targets))
    return losses, outputs


def gradient_of(detector, losses):
    detector.zero_grad()
    sum(losses.values()).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in detector.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def torchvisions_losses(detector, targets):
    """Those of torchvision's own code on the same modules; it labels classes from 1."""
    from torchvision.models.detection.image_list import ImageList

    images, sizes = images_of(len(targets))
    features, images_hw = detector.features(images, sizes)
    theirs = [{**each, "labels": each["labels"] + 1} for each in targets]
    proposals, of_proposals = detector.rpn(ImageList(images, images_hw), features, theirs)
    _, of_boxes = detector.roi_heads(features, proposals, images_hw, theirs)
    return {**of_proposals, **of_boxes}


def assert_losses_are_torchvisions(detector):
    """Losses and gradients of the first image."""
    losses, _ = losses_of(detector, TARGETS[:1])
    ours = gradient_of(detector, losses)
    theirs = torchvisions_losses(detector, TARGETS[:1])
    torch.testing.assert_close(losses, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours, gradient_of(detector, theirs), rtol=1e-4, atol=1e-6)
