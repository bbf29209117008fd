"""Losses of relation heads, as sums with their denominators, so that windows and ranks can be normalised exactly."""

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.batch import attribute_targets, send
from toolkit.scene_graphs.batch import RelationBatch, RelationOutput, object_mask


def predicate_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0, weights: Tensor | None = None):
    """Sum and denominator of `loss_rel`: cross entropy over all sampled pairs, "no relation" included.

    logits: (R, P), labels: (R,). weights: (P,) per predicate; the denominator is then the sum of the weights of the
    labels (the number of pairs without). smoothing: e / P to every predicate, 1 - e to the right one.
    """
    labels = labels.long()
    loss = F.cross_entropy(logits, labels, weight=weights, reduction="sum", label_smoothing=smoothing)
    count = weights[labels].sum() if weights is not None else loss.new_full((), float(len(labels)))
    return loss, count


def head_losses(
    output: RelationOutput, batch: RelationBatch, smoothing: float = 0.0, weights: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum, denominator) of every loss of a head in training, by name: `loss_rel`, `loss_refine_obj` and its extras."""
    losses = {
        "loss_rel": predicate_loss(output.relation_logits.float(), batch.relation_labels, smoothing, weights),
        "loss_refine_obj": object_loss(output.object_logits.float(), batch.labels, smoothing),
    }
    return losses | output.extra_losses


def relatedness_loss(logits: Tensor, related: Tensor, num_objects: list[int]) -> tuple[Tensor, Tensor]:
    """Sum over images and number of images of VCTree's `binary_loss`; images without objects do not count.

    logits, related: (B, N_max, N_max) padded. Per image the mean binary cross entropy over all ordered pairs.
    """
    counts = send(torch.as_tensor(num_objects), logits.device)
    mask = object_mask(num_objects, logits.device)
    loss = F.binary_cross_entropy_with_logits(logits.float(), related.float(), reduction="none")
    loss = (loss * (mask[:, :, None] & mask[:, None])).sum((1, 2)) / counts.clamp(min=1) ** 2
    return loss.sum(), (counts > 0).sum().to(loss)


def object_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sum and denominator (objects) of `loss_refine_obj`: cross entropy of the refined labels."""
    return predicate_loss(logits, labels, smoothing)


def attribute_loss(logits: Tensor, attributes: Tensor, scale: float = 20.0) -> tuple[Tensor, Tensor]:
    """Sum and denominator (entries) of `loss_refine_att`: binary cross entropy over the objects with attributes.

    logits: (N, num_attributes), attributes: (N, A). The published weight is num_attributes / `scale`.
    """
    targets, has_any = attribute_targets(attributes, logits.shape[1])
    loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    return (loss * has_any).sum() * (logits.shape[1] / scale), (has_any.sum() * logits.shape[1]).to(loss)


def mean(total: Tensor, count: Tensor) -> Tensor:
    """total / count; `total`, which is then an exact zero with gradient, when nothing was counted."""
    return total / (count + (count == 0))
