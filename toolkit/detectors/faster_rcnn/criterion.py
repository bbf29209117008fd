"""Matching, sampling and losses of the two stages of Faster R-CNN (Ren et al., NeurIPS 2015), without host reads.

Box deltas are torchvision's (dx, dy, dw, dh). Definitions are those of torchvision and, for crowd regions, of seamseg.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, nll_loss, smooth_l1_loss

from toolkit.base.box_ops import pairwise_iou
from toolkit.step.losses import partial_log_softmax

BACKGROUND, IGNORED = -1, -2


def match_boxes(
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
    """Match anchors or proposals to the objects of an image, or of each of several.

    Args:
        candidates_xyxy: (..., A, 4).
        boxes_xyxy, iscrowd: (..., T, 4) and (..., T) of the image; crowd regions are never matched. None: there are no
            crowd regions.
        high, low: IoU from which a candidate takes its best object, and below which it is background; ignored between.
        best_of_each_box: the candidates that overlap an object best take their own best object, however low the IoU.
        crowd_overlap: a candidate with this share of its area in a crowd region is ignored in any case.
        lowest: candidates with a lower IoU are ignored if their image has an object.
        padding: (..., T), rows that are not boxes.

    Returns:
        (..., A) int64: row of the object, `BACKGROUND` or `IGNORED`. Without objects all is background or ignored.
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
    """Return (..., T, A), the share of each candidate's area (..., A, 4) that lies in each region (..., T, 4); 0 for
    candidates without area."""
    candidates = candidates_xyxy[..., None, :, :]
    regions = regions_xyxy[..., :, None, :]
    right_bottom = torch.minimum(candidates[..., 2:], regions[..., 2:])
    left_top = torch.maximum(candidates[..., :2], regions[..., :2])
    sides = (right_bottom - left_top).clamp(min=0)
    area = (candidates[..., 2:] - candidates[..., :2]).prod(dim=-1)
    share = sides.prod(dim=-1) / area.masked_fill(area == 0, 1)
    return share.masked_fill(area == 0, 0)


def sample(match: Tensor, size: int, positive_fraction: float, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Choose random positives, at most `positive_fraction` of `size`, and fill up with background.

    Args:
        match: (..., A) of `match_boxes`.
        keys: (..., A) random numbers in [0, 1): the order in which candidates are chosen.

    Returns:
        index (..., K) of the chosen candidates, positives first, K = min(size, A), and their match (..., K). If there
        are fewer to choose from, the rest is `IGNORED`, so that the shape is known without a host read.
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
    """Return weights (..., K) that turn a sum over an image's samples into their mean: 1 / their number, 0 for ignored
    ones."""
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
        logits, match, weights: (N,). deltas, targets: (N, 4). beta: smooth L1 is linear from there (1 / sigma^2).
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
) -> tuple[Tensor, Tensor]:
    """Return `loss_classifier` (cross-entropy) and `loss_box_reg` (smooth L1 of the right class) as weighted float32
    sums.

    Args:
        logits: (R, 1 + C), background first. deltas: (R, 1 + C, 4). targets: (R, 4). weights: (R,).
        classes: (R,) int64, 0 is background; rows of weight 0 may have any class.
        unlabelled: (R, 1 + C) bool, columns that the image does not label; None: none.
    """
    log_probabilities = partial_log_softmax(logits.float(), classes, unlabelled, 0)
    classifier = nll_loss(log_probabilities, classes, reduction="none")
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
