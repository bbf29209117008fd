"""Losses of relation heads as (B,) sums and (B,) denominators per image, so that accumulation and ranks are exact."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.batch import attribute_targets, pad_rows, send
from toolkit.scene_graphs.batch import RelationBatch, RelationOutput, object_mask


def of_images(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """(B,) sums of the rows (R,) of each image, which has so many of them."""
    return pad_rows(rows, counts).sum(1)


def predicate_loss(
    logits: Tensor, labels: Tensor, counts: Sequence[int], smoothing: float = 0.0, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`loss_rel`: cross entropy over all sampled pairs, "no relation" included.

    logits: (R, P), labels: (R,), counts: how many each image has. weights: (P,) per predicate; the denominator is then
    the sum of the weights of the labels (the number of pairs without). smoothing: e / P to every predicate, 1 - e to
    the right one.
    """
    labels = labels.long()
    loss = F.cross_entropy(logits, labels, weight=weights, reduction="none", label_smoothing=smoothing)
    return of_images(loss, counts), of_images(torch.ones_like(loss) if weights is None else weights[labels], counts)


def head_losses(
    output: RelationOutput, batch: RelationBatch, smoothing: float = 0.0, weights: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Every loss of a head in training, by name: `loss_rel`, `loss_refine_obj` and its extras."""
    losses = {
        "loss_rel": predicate_loss(
            output.relation_logits.float(), batch.relation_labels, batch.num_pairs, smoothing, weights
        ),
        "loss_refine_obj": predicate_loss(output.object_logits.float(), batch.labels, batch.num_objects, smoothing),
    }
    return losses | output.extra_losses


def relatedness_loss(logits: Tensor, related: Tensor, num_objects: list[int]) -> tuple[Tensor, Tensor]:
    """VCTree's `binary_loss`; its denominator is 1 for an image with objects.

    logits, related: (B, N_max, N_max) padded. Per image the mean binary cross entropy over all ordered pairs.
    """
    counts = send(torch.as_tensor(num_objects), logits.device)
    mask = object_mask(num_objects, logits.device)
    loss = F.binary_cross_entropy_with_logits(logits.float(), related.float(), reduction="none")
    loss = (loss * (mask[:, :, None] & mask[:, None])).sum((1, 2)) / counts.clamp(min=1) ** 2
    return loss, (counts > 0).to(loss)


def attribute_loss(
    logits: Tensor, attributes: Tensor, counts: Sequence[int], scale: float = 20.0
) -> tuple[Tensor, Tensor]:
    """`loss_refine_att`: binary cross entropy over the objects with attributes; its denominator are its entries.

    logits: (N, num_attributes), attributes: (N, A), counts: objects of each image. The published weight is
    num_attributes / `scale`.
    """
    targets, has_any = attribute_targets(attributes, logits.shape[1])
    loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    sums = of_images(loss * has_any, counts) * (logits.shape[1] / scale)
    return sums, of_images(has_any.to(loss), counts) * logits.shape[1]


def mean(total: Tensor, count: Tensor) -> Tensor:
    """total / count; where nothing was counted `total`, which is then an exact zero with gradient."""
    return total / (count + (count == 0))
