"""Inputs, outputs and losses of a relation head. Class 0 is background and predicate 0 "no relation" everywhere in this
package; tables and evaluation count both from 0 without them. Losses are (B,) sums and (B,) denominators per image, so
that accumulation and ranks are exact."""

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

    boxes_xyxy: (N, 4) float32 pixels. sizes_hw: (B, 2). num_objects, num_pairs: per image, on the host.
    pairs: (R, 2) int64 subject and object, rows of the concatenated objects.
    labels: (N,) int64 from 1, known in predcls and in training (0: a proposal without an object).
    found_labels: (N,) int64 from 1, those that the detector gave, in sgdet.
    logits: (N, C) of the detector, for sgcls and sgdet. boxes_per_class: (N, C, 4) boxes regressed for each class,
        for sgdet in evaluation.
    roi_features: (N, D). union_features: (R, U) of the union boxes. spatial_features: (R, U) of the positions of the
        two boxes, if these are kept apart from the content of their union.
    relation_labels: (R,) predicates, in training. related: (N, N_max) bool, is there a relation to or from the i-th
        object of the same image; in training, for VCTree and SQUAT.
    attributes: (N, A) ids from 1, 0 after the last, known if labels are; None: the data have none.
    on_host: boxes_xyxy and pairs on the host.
    draws: a generator for each image, for heads that draw in training; none: torch's own.
    late: logits (N, C), threshold and the labels that `postprocess.late_labels` made of them last.
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
    """Predictions of a relation head.

    object_logits: (N, C). relation_logits: (R, P). object_labels: (N,) int64, the labels the head committed to;
    labels_stay: they are those of the graph, which detected objects otherwise get by `late_nms`.
    context: (N, hidden) of the objects. extra_losses: (sum, denominator) by name, in training.
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


def of_images(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return (B,) sums of the rows (R,) of each image; counts: rows per image."""
    return pad_rows(rows, counts).sum(1)


def predicate_loss(
    logits: Tensor,
    labels: Tensor,
    counts: Sequence[int],
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `loss_rel`: cross entropy over all sampled pairs, "no relation" included.

    logits: (R, P), labels: (R,), counts: how many each image has. weights: (P,) per predicate; the denominator is then
    the sum of the weights of the labels (the number of pairs without). smoothing: e / P to every predicate, 1 - e to
    the right one.
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
    return of_images(loss, counts), of_images(weight_of_pairs, counts)


def head_losses(
    output: RelationOutput,
    batch: RelationBatch,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return every loss of a head in training, by name: `loss_rel`, `loss_refine_obj` and the head's extra losses."""
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
    """Return VCTree's `binary_loss`; its denominator is 1 for an image with objects.

    logits, related: (B, N_max, N_max) padded. Per image the mean binary cross entropy over all ordered pairs.
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
    """Return `loss_refine_att`: binary cross entropy over the objects with attributes; its denominator is the number of
    its entries.

    logits: (N, num_attributes), attributes: (N, A), counts: objects of each image. The published weight is
    num_attributes / `scale`.
    """
    num_attributes = logits.shape[1]
    targets, has_any = attribute_targets(attributes, num_attributes)
    loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    sums = of_images(loss * has_any, counts) * (num_attributes / scale)
    entries = of_images(has_any.to(loss), counts) * num_attributes
    return sums, entries


def mean(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count, or `total` if nothing was counted, which is then an exact zero with gradient."""
    return total / (count + (count == 0))


def attribute_targets(attributes: Tensor, num_attributes: int) -> tuple[Tensor, Tensor]:
    """Convert attribute ids from 1, ended by 0, (N, A) to (N, num_attributes) float32 0/1 and (N,) bool "has any"."""
    listed = (attributes > 0).cumprod(1)
    targets = torch.zeros(len(attributes), num_attributes, device=attributes.device)
    targets.scatter_(1, attributes * listed, 1.0)  # ids after the end are written to column 0 ...
    targets[:, 0] = 0.0  # ... which is background and never a target
    return targets, attributes.sum(1) > 0
