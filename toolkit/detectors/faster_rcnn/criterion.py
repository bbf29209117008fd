"""Matching, sampling and losses of the two stages of Faster R-CNN (Ren et al., NeurIPS 2015), without host reads.

Box deltas are torchvision's (dx, dy, dw, dh). Definitions are those of torchvision and, for crowd regions, of seamseg.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, nll_loss, smooth_l1_loss

from toolkit.base.box_ops import pairwise_iou
from toolkit.step.losses import partial_log_softmax, times_class_weights

BACKGROUND, IGNORED = -1, -2


def match_candidates(
    candidates_xyxy: Tensor,
    boxes_xyxy: Tensor,
    iscrowd: Tensor | None,
    high: float,
    low: float,
    *,
    best_of_each_box: bool = False,
    crowd_overlap: float = 0.7,
    lowest: float = 0.0,
    padding: Tensor | None = None,
) -> Tensor:
    """Match anchors or proposals to the annotated objects of an image, or of several images at once.

    Args:
        candidates_xyxy: (..., A, 4), the A anchors or proposals.
        boxes_xyxy: (..., T, 4), the T annotated boxes of the image.
        iscrowd: (..., T), true for crowd regions, which are never matched; None if there are no crowd regions.
        high: IoU from which a candidate is matched to the object that it overlaps most.
        low: IoU below which a candidate is background. Between `low` and `high` it is ignored.
        best_of_each_box: also match each candidate that overlaps an object more than all other candidates do, however
            low the IoU. Such a candidate is matched to the object that the candidate itself overlaps most.
        crowd_overlap: a candidate with at least this share of its area in a crowd region is ignored in any case.
        lowest: a candidate whose highest IoU is below this value is ignored instead of background, if its image has an
            object.
        padding: (..., T), true for rows of `boxes_xyxy` that are only padding.

    Returns:
        (..., A) int64: row of the matched object, `BACKGROUND` or `IGNORED`. In an image without objects, candidates
        are background, or ignored in crowd regions.
    """
    if not boxes_xyxy.shape[-2]:
        shape = (*boxes_xyxy.shape[:-2], candidates_xyxy.shape[-2])
        return candidates_xyxy.new_full(shape, BACKGROUND, dtype=torch.int64)
    iou = pairwise_iou(boxes_xyxy, candidates_xyxy)
    is_object = torch.ones_like(boxes_xyxy[..., 0], dtype=torch.bool)
    for never in (iscrowd, padding):
        if never is not None:
            is_object = is_object & ~never.bool()
    iou = iou.masked_fill(~is_object[..., None], 0)
    value, best = iou.max(dim=-2)
    too_far = (value < lowest) & is_object.any(dim=-1, keepdim=True)
    match = torch.where((value < low) & ~too_far, BACKGROUND, IGNORED)
    positive = value >= high
    if best_of_each_box:
        best_iou = iou.amax(dim=-1, keepdim=True)  # of each object: (..., T, 1)
        is_best = (iou == best_iou) & (best_iou > 0)
        positive |= is_best.any(dim=-2)
    match = torch.where(positive, best, match)
    if iscrowd is None:
        return match
    is_covered = covered_share(candidates_xyxy, boxes_xyxy) >= crowd_overlap  # (..., T, A)
    in_crowd = is_covered & iscrowd.bool()[..., None]
    return match.masked_fill(in_crowd.any(dim=-2), IGNORED)


def covered_share(candidates_xyxy: Tensor, regions_xyxy: Tensor) -> Tensor:
    """Return the share of each candidate's area that lies in each region; 0 for candidates without area.

    A candidates (..., A, 4) and T regions (..., T, 4) give (..., T, A).
    """
    candidates = candidates_xyxy[..., None, :, :]
    regions = regions_xyxy[..., :, None, :]
    right_bottom = torch.minimum(candidates[..., 2:], regions[..., 2:])
    left_top = torch.maximum(candidates[..., :2], regions[..., :2])
    sides = (right_bottom - left_top).clamp(min=0)
    area = (candidates[..., 2:] - candidates[..., :2]).prod(dim=-1)
    share = sides.prod(dim=-1) / area.masked_fill(area == 0, 1)
    return share.masked_fill(area == 0, 0)


def sample(match: Tensor, size: int, positive_fraction: float, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Choose `size` of the A candidates of each image at random: positives, at most the share `positive_fraction` of
    `size`, and background for the rest.

    Args:
        match: (..., A), the result of `match_candidates`.
        keys: (..., A) random numbers in [0, 1); candidates with the largest are chosen.

    Returns:
        index (..., K) of the chosen candidates, positives first, where K = min(size, A), and their match (..., K). If
        an image has fewer positives and background candidates, other candidates with the match `IGNORED` fill the rest,
        so that the shape is known without a host read.
    """
    count = match.shape[-1]
    most_positives = int(size * positive_fraction)
    positive = match >= 0
    background = match == BACKGROUND
    positive_keys = keys.masked_fill(~positive, -1)
    largest = positive_keys.topk(min(most_positives, count), dim=-1).indices
    chosen = torch.zeros_like(positive).scatter_(-1, largest, True) & positive
    # From 2 to 3: chosen positives; from 1 to 2: background; from 0 to 1: all others, which are ignored.
    rank = keys + 2 * chosen + background
    index = rank.topk(min(size, count), dim=-1).indices
    sampled = torch.where(chosen | background, match, IGNORED)
    return index, sampled.gather(-1, index)


def shares(match: Tensor) -> Tensor:
    """Return weights (..., K) that turn a sum over the K samples of an image into their mean.

    match: (..., K), the match of each sample. A weight is 1 / the number of samples that are not ignored; ignored
    samples have the weight 0.
    """
    counted = match != IGNORED
    count = counted.sum(dim=-1, keepdim=True)
    return counted / count.clamp(min=1)


def rpn_losses(
    logits: Tensor,
    deltas: Tensor,
    match: Tensor,
    targets: Tensor,
    weights: Tensor,
    beta: float = 1 / 9,
) -> tuple[Tensor, Tensor]:
    """Return `loss_objectness` (binary cross-entropy) and `loss_rpn_box_reg` (smooth L1 of positives) as weighted
    float32 sums.

    Args:
        logits, match, weights: (N,) of N sampled anchors; for match and weights see `sample` and `shares`.
        deltas, targets: (N, 4), predicted and wanted box deltas.
        beta: difference at which smooth L1 turns from quadratic to linear (1 / sigma^2 in other programs).
    """
    positive = (match >= 0).float()
    objectness = binary_cross_entropy_with_logits(logits.float(), positive, reduction="none")
    loss_objectness = (objectness * weights).sum()
    loss_box = _box_loss(deltas, targets, positive * weights, beta)
    return loss_objectness, loss_box


def roi_losses(
    logits: Tensor,
    deltas: Tensor,
    classes: Tensor,
    targets: Tensor,
    weights: Tensor,
    beta: float = 1 / 9,
    unlabelled: Tensor | None = None,
    class_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `loss_classifier` (cross-entropy) and `loss_box_reg` (smooth L1 of the deltas of the right class) as
    weighted float32 sums over R sampled boxes.

    Args:
        logits: (R, 1 + C), background first.
        deltas: (R, 1 + C, 4), predicted for each class.
        classes: (R,) int64, 0 is background; rows of weight 0 may have any class.
        targets: (R, 4) wanted box deltas.
        weights: (R,), see `shares`.
        beta: difference at which smooth L1 turns from quadratic to linear (1 / sigma^2 in other programs).
        unlabelled: (R, 1 + C) bool, true for classes that the image of the box does not label; None: all are labelled.
        class_weights: (C,), `Detector.class_weights`; background counts 1.
    """
    log_probabilities = partial_log_softmax(logits.float(), classes, unlabelled, 0)
    classifier = nll_loss(log_probabilities, classes, reduction="none")
    if class_weights is not None:
        classifier = times_class_weights(classifier, classes - 1, class_weights)
    of_class = classes[:, None, None].expand(-1, 1, 4)
    class_deltas = deltas.gather(1, of_class)[:, 0]  # (R, 4)
    loss_classifier = (classifier * weights).sum()
    loss_box = _box_loss(class_deltas, targets, (classes > 0) * weights, beta)
    return loss_classifier, loss_box


def _box_loss(deltas: Tensor, targets: Tensor, weights: Tensor, beta: float) -> Tensor:
    # Targets of other samples than positives may be infinite: infinity times a weight of 0 would be NaN.
    targets = targets.where(weights[:, None] > 0, deltas.detach().float())
    loss = smooth_l1_loss(deltas.float(), targets, beta=beta, reduction="none")
    return (loss.sum(dim=1) * weights).sum()
