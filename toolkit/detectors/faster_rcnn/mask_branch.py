"""The mask branch of Mask R-CNN (He et al., ICCV 2017): torchvision's modules, and their training targets.

A mask is predicted in a grid of 28 x 28 cells over its box, for each class separately. As in torchvision, only samples
that are matched to an object train the branch, and only the mask of the object's class.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import MultiScaleRoIAlign, roi_align

from toolkit.base.batch import on_host, send, to_host

POOLED_SIDE = 14  # cells; the transposed convolution of the predictor doubles them
MASK_SIDE = 28  # cells
PIXELS_AT_ONCE = 2**24  # of annotated masks in float32: 64 MB


class Positives(NamedTuple):
    """The P samples of all images that are matched to an object, image after image.

    boxes: (P, 4) xyxy in pixels of the model's images. boxes_on_host: the same on the CPU. classes: (P,), 0 is the
    background. objects: (P,) row of the object among those of its image, on the CPU. counts: number of samples of each
    image.
    """

    boxes: Tensor
    boxes_on_host: Tensor
    classes: Tensor
    objects: Tensor
    counts: list[int]


def add_mask_branch(
    heads: RoIHeads,
    num_classes: int,
    in_channels: int,
    convs: int = 4,
    channels: int = 256,
    norm: Callable[[int], nn.Module] | None = None,
) -> None:
    """Add a mask branch with random weights to the heads of a Faster R-CNN, under torchvision's names.

    Args:
        num_classes: including the background.
        in_channels: channels of the feature maps.
        convs, channels: number and width of the 3 x 3 convolutions of the branch.
        norm: makes the normalisation layer behind each of them from its number of channels; None: there are none.
    """
    levels = heads.box_roi_pool.featmap_names
    heads.mask_roi_pool = MultiScaleRoIAlign(levels, output_size=POOLED_SIDE, sampling_ratio=2)
    heads.mask_head = MaskRCNNHeads(in_channels, [channels] * convs, 1, norm)
    heads.mask_predictor = MaskRCNNPredictor(channels, channels, num_classes)


def positives(
    boxes_xyxy: Tensor, boxes_on_host: Tensor, match_on_host: Tensor, classes: Tensor, sizes: Sequence[int]
) -> Positives:
    """Return those of R samples of all images that are matched to an object.

    Args:
        boxes_xyxy, boxes_on_host: (R, 4) the samples on the device and on the CPU.
        match_on_host: (R,) on the CPU, see `match_candidates`.
        classes: (R,).
        sizes: number of samples of each image, R in total.
    """
    is_positive = match_on_host >= 0
    counts = [int(part.sum()) for part in is_positive.split(list(sizes))]
    rows_on_host = is_positive.nonzero()[:, 0]
    rows = send(rows_on_host, boxes_xyxy.device)
    return Positives(boxes_xyxy[rows], boxes_on_host[rows_on_host], classes[rows], match_on_host[rows_on_host], counts)


def mask_logits(
    heads: RoIHeads,
    features: Mapping[str, Tensor],
    boxes_xyxy: Tensor,
    classes: Tensor,
    counts: Sequence[int],
    boxes_on_host: Tensor,
) -> Tensor:
    """Return the mask logits (P, 28, 28) float32 of P boxes, each of its own class.

    Args:
        features: feature maps by name.
        boxes_xyxy, boxes_on_host: (P, 4) in pixels of the model's images, on the device and on the CPU.
        classes: (P,), 0 is the background.
        counts: number of boxes of each image, P in total.
    """
    if not len(boxes_xyxy):
        # The parameters get gradients of 0, and batch norms do not see an empty batch.
        parameters = [*heads.mask_head.parameters(), *heads.mask_predictor.parameters()]
        nothing = 0.0 * sum(parameter.float().sum() for parameter in parameters)
        return boxes_xyxy.new_zeros(0, MASK_SIDE, MASK_SIDE) + nothing
    boxes = boxes_xyxy.split(list(counts))
    pooled = heads.mask_roi_pool(features, boxes, None, [boxes_on_host])
    logits = heads.mask_predictor(heads.mask_head(pooled))  # (P, 1 + C, 28, 28)
    rows = torch.arange(len(classes), device=classes.device)
    return logits[rows, classes].float()


@torch.no_grad()
def training_parts(samples: Positives, targets: Sequence[Mapping]) -> dict[str, Tensor]:
    """Return the `targets` (P, 28, 28) of the samples, in [0, 1], and their `weights` (P,), by which the sum over the
    samples of an image becomes the mean of those whose objects have a mask.

    targets: of each image `masks`, (N, h, w) uint8 on the device of the samples, and `has_mask` if some have none.
    """
    device = samples.boxes.device
    wanted = [samples.boxes.new_zeros(0, MASK_SIDE, MASK_SIDE)]
    weights = [torch.zeros(0)]
    boxes = samples.boxes.split(samples.counts)
    objects = samples.objects.split(samples.counts)
    for image_boxes, image_objects, target in zip(boxes, objects, targets, strict=True):
        wanted.append(cropped_masks(target["masks"], image_boxes, image_objects))
        counted = torch.ones(len(image_objects))
        if "has_mask" in target:
            counted = on_host(target)["has_mask"][image_objects].float()
        weights.append(counted / counted.sum().clamp(min=1))
    return {"targets": torch.cat(wanted), "weights": send(torch.cat(weights), device)}


def cropped_masks(masks: Tensor, boxes_xyxy: Tensor, objects: Tensor) -> Tensor:
    """Return what is inside P boxes of the masks of their objects, (P, 28, 28) float32 in [0, 1]; torchvision's
    `project_masks_on_boxes`.

    Args:
        masks: (N, h, w) uint8 of an image.
        boxes_xyxy: (P, 4), in pixels of this image.
        objects: (P,) row of each box's mask, on the CPU.
    """
    cropped = boxes_xyxy.new_zeros(len(boxes_xyxy), MASK_SIDE, MASK_SIDE)
    pixels = max(1, masks.shape[-2] * masks.shape[-1])
    at_once = max(1, PIXELS_AT_ONCE // pixels)
    for first in range(0, len(masks), at_once):
        is_here = (objects >= first) & (objects < first + at_once)
        if not is_here.any():
            continue
        rows = send(is_here.nonzero()[:, 0], boxes_xyxy.device)
        of_mask = send(objects[is_here] - first, boxes_xyxy.device)
        rois = torch.cat([of_mask[:, None].to(boxes_xyxy), boxes_xyxy[rows]], dim=1)
        some = masks[first : first + at_once, None].to(boxes_xyxy)
        cropped[rows] = roi_align(some, rois, (MASK_SIDE, MASK_SIDE), 1.0)[:, 0]
    return cropped


def mask_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return `loss_mask`, the binary cross-entropy of P masks (P, 28, 28), averaged over their cells and summed with
    the weights (P,)."""
    by_cell = binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return (by_cell.mean((1, 2)) * weights).sum()


@torch.no_grad()
def detected_masks(
    heads: RoIHeads, features: Mapping[str, Tensor], boxes_xyxy: Tensor, labels: Tensor, is_kept: Tensor
) -> Tensor:
    """Return the masks (B, K, 28, 28) of detections, probabilities; 0 for those that are not kept. The host waits for
    the device once.

    Args:
        features: feature maps by name.
        boxes_xyxy: (B, K, 4) in pixels of the model's images.
        labels: (B, K) from 0.
        is_kept: (B, K) bool.
    """
    boxes_on_host, kept_on_host = to_host([boxes_xyxy, is_kept])
    counts = kept_on_host.sum(1).tolist()
    rows_on_host = kept_on_host.flatten().nonzero()[:, 0]
    rows = send(rows_on_host, boxes_xyxy.device)
    logits = mask_logits(
        heads,
        features,
        boxes_xyxy.flatten(0, 1)[rows],
        1 + labels.flatten()[rows],
        counts,
        boxes_on_host.flatten(0, 1)[rows_on_host],
    )
    masks = logits.new_zeros(is_kept.numel(), MASK_SIDE, MASK_SIDE)
    masks[rows] = logits.sigmoid()
    return masks.view(*is_kept.shape, MASK_SIDE, MASK_SIDE)
