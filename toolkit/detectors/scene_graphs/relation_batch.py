"""Inputs, outputs and losses of a relation head.

In this package, class 0 is the background and predicate 0 "no relation"; tables and evaluation have neither, and count
both from 0. Losses are returned as sums and denominators of each image, both (B,), so that accumulation over
micro-batches and processes is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from toolkit.base.batch import image_of_each, pad_rows, send

GRAPH_MODES = ("predcls", "sgcls", "sgdet")  # boxes and labels given; boxes given; nothing given


@dataclass
class RelationBatch:
    """The objects and candidate pairs of B images, concatenated: N objects, R pairs, C classes, P predicates.

    boxes_xyxy: (N, 4) float32 pixels. sizes_hw: (B, 2) height and width. num_objects, num_pairs: of each image, on the
    host.
    pairs: (R, 2) int64 subject and object, rows of the concatenated objects.
    labels: (N,) int64 from 1, known in predcls and in training (0: a proposal that overlaps no annotated object).
    found_labels: (N,) int64 from 1, the labels predicted by the detector, in sgdet.
    logits: (N, C) of the detector, for sgcls and sgdet. boxes_per_class: (N, C, 4) boxes regressed for each class, for
    sgdet in evaluation.
    roi_features: (N, D) of the boxes. union_features: (R, U) of the union boxes. spatial_features: (R, U) of the
    positions of the two boxes, if these are kept apart from the content of their union.
    relation_labels: (R,) annotated predicates, in training. related: (N, N_max) bool, True if there is a relation to or
    from the i-th object of the same image; in training, for VCTree and SQUAT.
    attributes: (N, A) ids from 1, 0 after the last, known if labels are; None if the data have none.
    on_host: boxes_xyxy and pairs on the host.
    draws: a random generator for each image, for heads that draw in training; if empty, torch's own is used.
    late: cache of `postprocess.late_labels`: logits (N, C), threshold, and the labels computed from them.
    """

    boxes_xyxy: Tensor
    sizes_hw: Tensor
    num_objects: list[int]
    pairs: Tensor
    num_pairs: list[int]
    roi_features: Tensor
    union_features: Tensor | None = None
    labels: Tensor | None = None
    found_labels: Tensor | None = None
    logits: Tensor | None = None
    boxes_per_class: Tensor | None = None
    relation_labels: Tensor | None = None
    related: Tensor | None = None
    attributes: Tensor | None = None
    spatial_features: Tensor | None = None
    on_host: tuple[Tensor, Tensor] | None = None
    draws: Sequence[Generator | None] = ()
    late: tuple[Tensor, float, Tensor] | None = None

    @property
    def image(self) -> Tensor:
        """Return the image index of each object, (N,)."""
        return image_of_each(self.num_objects, self.boxes_xyxy.device)


@dataclass
class RelationOutput:
    """Predictions of a relation head for N objects and R pairs.

    object_logits: (N, C). relation_logits: (R, P). object_labels: (N,) int64, the labels that the head has used for its
    predicates. labels_stay: these are also the labels of the graph; otherwise detected objects get theirs by
    `late_nms`. context: (N, hidden) features of the objects. extra_losses: (sum, denominator) by name, in training.
    """

    object_logits: Tensor
    relation_logits: Tensor
    object_labels: Tensor
    context: Tensor | None = None
    extra_losses: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    labels_stay: bool = False


def object_mask(num_objects: list[int], device: torch.device) -> Tensor:
    """Return a (B, N_max) bool mask, true for objects and false for padding."""
    counts = send(torch.as_tensor(num_objects), device)
    return torch.arange(max(num_objects, default=0), device=device) < counts[:, None]


def sum_by_image(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum rows (R,) by image, to (B,). counts: number of rows of each image, in order."""
    return pad_rows(rows, counts).sum(1)


def predicate_loss(
    logits: Tensor,
    labels: Tensor,
    counts: Sequence[int],
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy over all sampled pairs, including those of "no relation", as the sum and the denominator
    of each image, both (B,).

    Args:
        logits: (R, P) of P predicates for R pairs.
        labels: (R,).
        counts: number of pairs of each image.
        smoothing: e, with which the target of the right predicate is 1 - e, and e / P is added to the target of every
            predicate.
        weights: (P,) weight of each predicate. The denominator is the sum of the weights of the labels; without
            weights, the number of pairs.
    """
    labels = labels.long()
    loss = F.cross_entropy(
        logits,
        labels,
        weight=weights,
        reduction="none",
        label_smoothing=smoothing,
    )
    weight_of_pairs = torch.ones_like(loss) if weights is None else weights[labels]
    return sum_by_image(loss, counts), sum_by_image(weight_of_pairs, counts)


def head_losses(
    output: RelationOutput,
    batch: RelationBatch,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return all losses of a head in training, (sum, denominator) by name: `loss_rel` of predicates, `loss_refine_obj`
    of classes, and the extra losses of the head. smoothing and weights: see `predicate_loss`; weights are for
    `loss_rel` only."""
    losses = {
        "loss_rel": predicate_loss(
            output.relation_logits.float(), batch.relation_labels, batch.num_pairs, smoothing, weights
        ),
        "loss_refine_obj": predicate_loss(
            output.object_logits.float(),
            batch.labels,
            batch.num_objects,
            smoothing,
        ),
    }
    return losses | output.extra_losses


def relatedness_loss(logits: Tensor, related: Tensor, num_objects: list[int]) -> tuple[Tensor, Tensor]:
    """Return VCTree's `binary_loss`, for each image the mean binary cross-entropy over all ordered pairs, (B,), and its
    denominator, 1 for an image with objects and 0 for others.

    logits, related: (B, N_max, N_max), padded.
    """
    counts = send(torch.as_tensor(num_objects), logits.device)
    mask = object_mask(num_objects, logits.device)
    loss = F.binary_cross_entropy_with_logits(logits.float(), related.float(), reduction="none")
    both = mask[:, :, None] & mask[:, None]
    mean = (loss * both).sum((1, 2)) / counts.clamp(min=1) ** 2
    return mean, (counts > 0).to(mean)


def attribute_loss(
    logits: Tensor,
    attributes: Tensor,
    counts: Sequence[int],
    scale: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return `loss_refine_att`, the sum of the binary cross-entropy over the objects with attributes of each image, and
    its denominator, the number of terms in the sum, both (B,).

    logits: (N, num_attributes). attributes: (N, A) ids, at most A per object. counts: number of objects of each image.
    As in the published program, the sum is weighted by num_attributes / `scale`.
    """
    num_attributes = logits.shape[1]
    targets, has_any = attribute_targets(attributes, num_attributes)
    loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    sums = sum_by_image(loss * has_any, counts) * (num_attributes / scale)
    entries = sum_by_image(has_any.to(loss), counts) * num_attributes
    return sums, entries


def mean_or_zero(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count. Where count is 0, return total, which is then an exact zero with a gradient."""
    return total / (count + (count == 0))


def attribute_targets(attributes: Tensor, num_attributes: int) -> tuple[Tensor, Tensor]:
    """Convert attribute ids (N, A) from 1, at most A per object, 0 after the last, to targets (N, num_attributes)
    float32 0 or 1, and (N,) bool, True for objects with any attribute."""
    listed = (attributes > 0).cumprod(1)
    targets = torch.zeros(len(attributes), num_attributes, device=attributes.device)
    targets.scatter_(1, attributes * listed, 1.0)  # ids after the end are written to column 0 ...
    targets[:, 0] = 0.0  # ... which is background and never a target
    return targets, attributes.sum(1) > 0
