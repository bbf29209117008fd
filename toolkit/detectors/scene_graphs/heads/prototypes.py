"""Predicates by the nearest learned prototype: PE-Net (Zheng et al., CVPR 2023) and REACT (Neau et al., 2024).

Subject, object and predicate are word embeddings corrected by visual features; a pair is compared with the prototype of
every predicate by cosine similarity. REACT is a faster PE-Net: it keeps the detector's labels, and joins subject and
object by a linear layer instead of a product of sum and difference.
"""

import math

import torch
from torch import Tensor, nn

from toolkit.base.batch import send
from toolkit.detectors.scene_graphs.heads.layers import (
    HeadSizes,
    best_labels,
    check_mode,
    class_embedding,
    empty_output,
    fc,
    given_labels,
    object_features,
    position_embedding,
)
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput, sum_by_image

# Squared distances: least one between prototypes (gamma 2), and how much nearer the right one is (gamma 1).
PROTOTYPE_DISTANCE, MARGIN = 7.0, 1.0
NEAREST = 10  # wrong prototypes that a pair is held away from


class MLP(nn.Sequential):
    """An MLP of two linear layers with a ReLU between."""

    def __init__(self, in_dim: int, inner_dim: int, out_dim: int):
        super().__init__(
            nn.Linear(in_dim, inner_dim),
            nn.ReLU(),
            nn.Linear(inner_dim, out_dim),
        )


class Residual(nn.Module):
    """The residual layer norm(dropout(relu(linear(x))) + x)."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        change = self.dropout(self.linear(values).relu())
        return self.norm(change + values)


class PrototypeHead(nn.Module):
    """PE-Net; with `refine_objects=False` and `join="linear"`, REACT.

    Losses in addition to the cross-entropy, as published: `l21_loss` and `dist_loss2` keep prototypes apart, by cosine
    and by distance; `loss_dis` moves a pair towards its prototype and away from the nearest others.
    """

    def __init__(
        self,
        mode: str,
        sizes: HeadSizes,
        dim: int = 2048,
        dropout: float = 0.2,
        refine_objects: bool = True,
        join: str = "product",
        nms_threshold: float = 0.5,
    ):
        """Build the head.

        dim: width of the prototype space. refine_objects: classify the objects again. join: "product" or "linear". The
        vectors of the predicates start from N(0, 1).
        """
        super().__init__()
        self.mode = check_mode(mode)
        self.sizes = sizes
        self.nms_threshold = nms_threshold
        self.dim = dim
        self.embed_out = class_embedding(sizes)
        self.predicate_embed = nn.Embedding(sizes.num_predicates, sizes.embed_dim)
        self.split = nn.Linear(sizes.roi_dim, 2 * dim)
        self.subject_word = MLP(sizes.embed_dim, dim // 2, dim)
        self.object_word = MLP(sizes.embed_dim, dim // 2, dim)
        self.predicate_word = MLP(sizes.embed_dim, dim // 2, dim)
        self.subject_gate = nn.Linear(2 * dim, dim)
        self.object_gate = nn.Linear(2 * dim, dim)
        self.predicate_gate = nn.Linear(2 * dim, dim)
        self.seen = nn.Sequential(
            nn.Linear(dim, 2 * dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * dim, dim),
        )
        self.subject_mix = Residual(dim, dropout)
        self.object_mix = Residual(dim, dropout)
        self.pair_mix = Residual(dim, dropout)
        self.join = nn.Linear(2 * dim, dim) if join == "linear" else None
        same = join == "linear" and sizes.union_dim == dim
        self.union = nn.Identity() if same else MLP(sizes.union_dim, dim, dim)
        self.project = MLP(dim, dim, 2 * dim)
        self.dropout = nn.Dropout(dropout)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.object_in = self.object_out = None
        if refine_objects:
            self.embed_in = class_embedding(sizes)
            self.position = position_embedding()
            self.object_in = fc(sizes.object_dim, sizes.hidden_dim)
            self.object_out = fc(sizes.hidden_dim, sizes.num_classes)
        self.of_labels = ("embed_in", "position", "object_in", "object_out") if refine_objects else ()
        self.loss_names = ("loss_rel", "loss_refine_obj", "l21_loss", "dist_loss2", "loss_dis")

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if not len(batch.boxes_xyxy):
            return empty_output(self.sizes, self.logit_scale)
        logits, labels = self._labels(batch)
        pairs = self._pairs(batch, labels)
        words = self.predicate_word(self.predicate_embed.weight)
        prototypes = self.project(self.dropout(words.relu()))  # (P, 2 dim)
        cosine = _unit(pairs) @ _unit(prototypes).T
        losses = self._losses(batch, pairs, prototypes) if self.training else {}
        return RelationOutput(
            logits,
            cosine * self.logit_scale.exp(),
            labels,
            context=pairs.new_zeros(0),
            extra_losses=losses,
            labels_stay=self.object_out is None and batch.found_labels is not None,
        )

    def _labels(self, batch: RelationBatch) -> tuple[Tensor, Tensor]:
        if self.object_out is None:
            return detector_labels(self, batch)
        if self.mode == "predcls":
            return given_labels(batch, self.sizes.num_classes)
        features = object_features(batch, self.embed_in, self.position, self.mode)
        logits = self.object_out(self.object_in(features))
        return logits, best_labels(self, batch, logits)

    def _pairs(self, batch: RelationBatch, labels: Tensor) -> Tensor:
        """Return (R, 2 dim) of the pairs, in the space of the projected prototypes."""
        as_object, as_subject = self.split(batch.roi_features).chunk(2, 1)
        words = self.embed_out(labels)
        subjects = self._corrected(
            self.subject_word(words),
            self.seen(as_subject),
            self.subject_gate,
        )
        objects = self._corrected(self.object_word(words), self.seen(as_object), self.object_gate)
        subject = self.subject_mix(subjects)[batch.pairs[:, 0]]
        other = self.object_mix(objects)[batch.pairs[:, 1]]
        if self.join is None:
            both = (subject + other).relu() - (subject - other) ** 2
        else:
            both = self.join(torch.cat([subject, other], 1)).relu()
        seen = self.seen(self.union(batch.union_features))
        gate = self.predicate_gate(torch.cat([both, seen], 1)).sigmoid()
        pairs = self.pair_mix(both - seen * gate)
        return self.project(self.dropout(pairs.relu()))

    @staticmethod
    def _corrected(words: Tensor, seen: Tensor, gate: nn.Module) -> Tensor:
        return words + seen * gate(torch.cat([words, seen], 1)).sigmoid()

    def _losses(self, batch: RelationBatch, pairs: Tensor, prototypes: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (sums, denominators) of the images by name; losses of the prototypes count once for each image with
        objects."""
        with torch.autocast(pairs.device.type, enabled=False):
            pairs = pairs.float()
            prototypes = prototypes.float()
            unit = _unit(prototypes)
            count = len(prototypes)
            cosines = unit @ unit.detach().T  # (P, P)
            alike = cosines.norm(dim=1).sum() / count**2
            between = squared_distances(prototypes, prototypes.detach()).sort(1).values
            to_nearest = between[:, :2].sum(1)  # the first distance is 0, to itself
            close = (PROTOTYPE_DISTANCE - to_nearest).clamp(min=0).mean()
            farther = farther_than_wrong(pairs, prototypes, batch.relation_labels)
            missed = (farther + MARGIN).clamp(min=0)
        return prototype_losses(batch, alike, close, missed)


def detector_labels(head: nn.Module, batch: RelationBatch) -> tuple[Tensor, Tensor]:
    """Return object logits (N, C) and labels (N,) of a head that does not classify objects: the given labels in
    predcls, else those of the detector, or, if it has none, the best by its logits."""
    if head.mode == "predcls":
        return given_labels(batch, head.sizes.num_classes)
    logits = batch.logits.detach()
    if batch.found_labels is None:
        return logits, best_labels(head, batch, logits)
    return logits, batch.found_labels


def farther_than_wrong(pairs: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    """Return, for each of R pairs with D features, (R, D), the squared distance to the prototype of its label, minus
    the mean squared distance to the `NEAREST` nearest other prototypes, (R,).

    prototypes: (P, D) of the P predicates. labels: (R,).
    """
    distances = squared_distances(pairs, prototypes)
    right = distances.gather(1, labels[:, None])[:, 0]
    wrong = distances.scatter(1, labels[:, None], math.inf).sort(1).values
    count = min(NEAREST, len(prototypes) - 1)
    return right - wrong[:, :count].mean(1)


def prototype_losses(
    batch: RelationBatch, alike: Tensor, close: Tensor, missed: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (sums, denominators) by name, each (B,) for the images: `l21_loss` from `alike` and `dist_loss2` from
    `close`, two scalars that count once for each image with objects, and `loss_dis` from `missed` (R,), one term for
    each of the R pairs."""
    has_objects = torch.tensor([float(number > 0) for number in batch.num_objects])
    images = send(has_objects, missed.device).to(missed)
    sums = sum_by_image(missed, batch.num_pairs)
    counts = sum_by_image(torch.ones_like(missed), batch.num_pairs)
    return {
        "l21_loss": (alike * images, images),
        "dist_loss2": (close * images, images),
        "loss_dis": (sums, counts),
    }


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


def squared_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the squared distances (N, M) between N rows (N, D) and M rows (M, D), without computing the differences
    (N, M, D)."""
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a b
    squares = rows.square().sum(1)[:, None] + others.square().sum(1)[None]
    distances = squares - 2 * rows @ others.T
    return distances.clamp(min=0)
