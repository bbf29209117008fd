"""Inputs and outputs of a relation head. Class 0 is background and predicate 0 "no relation" everywhere in this
package; tables and evaluation count both from 0 without them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from toolkit.batch import image_of_each, send

MODES = ("predcls", "sgcls", "sgdet")  # boxes and labels given; boxes given; nothing given


@dataclass
class RelationBatch:
    """The objects and candidate pairs of B images, concatenated: N objects, R pairs, C classes, P predicates.

    boxes_xyxy: (N, 4) float32 pixels. sizes_hw: (B, 2). num_objects, num_pairs: per image, on the host.
    pairs: (R, 2) int64 subject and object, rows of the concatenated objects.
    labels: (N,) int64 from 1, known in predcls and in training (0: a proposal without an object).
    logits: (N, C) of the detector, for sgcls and sgdet. boxes_per_class: (N, C, 4) boxes regressed for each class,
        for sgdet in evaluation.
    roi_features: (N, D). union_features: (R, U) of the union boxes. spatial_features: (R, U) of where the two boxes
        are, where these are kept apart from what is in their union.
    relation_labels: (R,) predicates, in training. related: (N, N_max) bool, is there a relation to or from the i-th
        object of the same image; in training, for VCTree only.
    attributes: (N, A) ids from 1, 0 after the last, known where labels are; None: the data have none.
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
        """(N,) image of each object."""
        return image_of_each(self.num_objects, self.boxes_xyxy.device)


@dataclass
class RelationOutput:
    """What a head predicts.

    object_logits: (N, C). relation_logits: (R, P). object_labels: (N,) int64, the labels the head committed to.
    context: (N, hidden) of the objects. extra_losses: (sum, denominator) by name, in training.
    """

    object_logits: Tensor
    relation_logits: Tensor
    object_labels: Tensor
    context: Tensor | None = None
    extra_losses: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def object_mask(num_objects: list[int], device: torch.device) -> Tensor:
    """(B, N_max) bool: true where there is an object."""
    counts = send(torch.as_tensor(num_objects), device)
    return torch.arange(max(num_objects, default=0), device=device) < counts[:, None]
