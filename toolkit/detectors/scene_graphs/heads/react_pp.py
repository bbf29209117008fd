"""REACT++ (Neau et al., Maelic/SGG-Benchmark): REACT with attention instead of gates, and with moving prototypes.

Objects attend to the word vectors of the classes, and union boxes to those of the predicates; a pair is compared with
the prototype of every predicate by cosine similarity. The prototype of a predicate is a learned vector until training
has a pair with this predicate, and from then on the moving mean of its pairs.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.heads.layers import HeadSizes, check_mode, class_embedding, empty_output
from toolkit.detectors.scene_graphs.heads.prototypes import (
    detector_labels,
    farther_than_wrong,
    prototype_losses,
    squared_distances,
)
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput

PROTOTYPE_DISTANCE, MARGIN = 1.5, 0.4  # of unit vectors: as PROTOTYPE_DISTANCE and MARGIN of prototypes.py
PROTOTYPE_MOMENTUM = 0.999  # of a prototype when it moves to the mean of a batch's pairs
MAX_LOGIT_SCALE = 100.0
EPSILON = 1e-6
ATTENTION_HEADS = 4


def linear(in_dim: int, out_dim: int) -> nn.Linear:
    """Build a linear layer without bias."""
    return nn.Linear(in_dim, out_dim, bias=False)


class RMSNorm(nn.Module):
    """A norm that divides rows by their root mean square. It computes in float32, because in float16 epsilon would be
    0."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the normalised rows (..., D) in float32."""
        rows = rows.float()
        mean_square = rows.square().mean(-1, keepdim=True)
        return rows * (mean_square + EPSILON).rsqrt() * self.weight


class GatedLayers(nn.Module):
    """SwiGLU (Shazeer, 2020): out(dropout(silu(gate(x)) * value(x))). The inner width is in_dim * expansion, rounded up
    to a multiple of 8."""

    def __init__(self, in_dim: int, out_dim: int, expansion: float, dropout: float):
        super().__init__()
        width = -(-int(in_dim * expansion) // 8) * 8
        self.gate = linear(in_dim, width)
        self.value = linear(in_dim, width)
        self.out = linear(width, out_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows: Tensor) -> Tensor:
        inner = F.silu(self.gate(rows)) * self.value(rows)
        return self.out(self.dropout(inner))


class GatedResidual(nn.Module):
    """The residual layer norm(x + gated_layers(x))."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.layers = GatedLayers(dim, dim, 4 / 3, dropout)
        self.norm = RMSNorm(dim)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows + self.layers(rows))


class WordAttention(nn.Module):
    """Attention of rows (N, D) to the words (C, D) of all classes or predicates.

    The original adds a bias that depends on the box to the logits of all words alike; the softmax cancels it, so it is
    left out.
    """

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.query = linear(dim, dim)
        self.key = linear(dim, dim)
        self.value = linear(dim, dim)
        self.out = linear(dim, dim)
        self.dropout = dropout

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        """Return for each row of (N, D) what it finds in the words (C, D), as (N, D)."""
        found = F.scaled_dot_product_attention(
            self._heads(self.query(rows)),
            self._heads(self.key(words)),
            self._heads(self.value(words)),
            dropout_p=self.dropout if self.training else 0.0,
        )
        joined = found[0].transpose(0, 1).flatten(1)  # (N, D)
        return self.out(joined)

    @staticmethod
    def _heads(values: Tensor) -> Tensor:
        """Reshape (N, D) to (1, heads, N, D / heads)."""
        return values.unflatten(1, (ATTENTION_HEADS, -1)).transpose(0, 1)[None]


class MovingPrototypes(nn.Module):
    """Prototypes (P, D) of unit length: for predicates that training has had, the moving mean of their pairs, for
    others a learned vector.

    Like the statistics of a batch norm, the means are updated with every batch in training, unless `moves` is set to
    False.
    """

    def __init__(self, num_predicates: int, dim: int):
        super().__init__()
        self.moves = True
        drawn = torch.randn(num_predicates, dim)
        self.weight = nn.Parameter(drawn * dim**-0.5)
        self.register_buffer("means", torch.zeros(num_predicates, dim))
        self.register_buffer("counts", torch.zeros(num_predicates))

    def forward(self) -> Tensor:
        """Return the prototypes (P, D) in float32."""
        return torch.where(
            self.counts[:, None] > 0,
            self.means,
            F.normalize(self.weight.float(), dim=1),
        )

    @torch.no_grad()
    def follow(self, pairs: Tensor, labels: Tensor) -> None:
        """Update the means from the pairs of a batch.

        pairs: (R, D) unit vectors of R pairs. labels: (R,) predicates; pairs with label 0, "no relation", are not
        counted.
        """
        has_predicate = (labels > 0).to(self.counts)
        found = torch.zeros_like(self.counts).index_add_(0, labels, has_predicate)
        sums = torch.zeros_like(self.means).index_add_(0, labels, pairs.to(self.means))
        means = sums / found.clamp(min=1)[:, None]
        slowly = PROTOTYPE_MOMENTUM * self.means + (1 - PROTOTYPE_MOMENTUM) * means
        moved = torch.where(self.counts[:, None] > 0, slowly, means)  # at first to the mean itself
        moved = F.normalize(moved, dim=1)
        self.means.copy_(torch.where(found[:, None] > 0, moved, self.means))
        self.counts += found > 0


class ReactPlusPlusHead(nn.Module):
    """The REACT++ head.

    Losses in addition to the cross-entropy: `l21_loss` and `dist_loss2` keep prototypes apart, by cosine and by
    distance; `loss_dis` moves a pair towards its prototype and away from the nearest others. The published recipe for
    VG150 gives these three losses the weights 1, 0.1 and 0.5.
    """

    loss_names = ("loss_rel", "loss_refine_obj", "l21_loss", "dist_loss2", "loss_dis")

    def __init__(self, mode: str, sizes: HeadSizes, dim: int = 512, dropout: float = 0.2, nms_threshold: float = 0.5):
        """Build the head. dim: width of the prototype space, a multiple of 4. The vectors of classes and predicates are
        not trained. Raises BadInput for another dim."""
        super().__init__()
        if dim % ATTENTION_HEADS:
            raise BadInput(f"model.head_options.dim is {dim}; react_pp takes multiples of {ATTENTION_HEADS}")
        self.mode = check_mode(mode)
        self.sizes = sizes
        self.nms_threshold = nms_threshold
        self.embed_out = class_embedding(sizes).requires_grad_(False)
        self.predicate_embed = nn.Embedding(sizes.num_predicates, sizes.embed_dim).requires_grad_(False)
        self.split = nn.Sequential(linear(sizes.roi_dim, 2 * dim), RMSNorm(2 * dim))
        self.class_word = GatedLayers(sizes.embed_dim, dim, 2, dropout)
        self.predicate_word = GatedLayers(sizes.embed_dim, dim, 2, dropout)
        self.subject_attention = WordAttention(dim, dropout)
        self.object_attention = WordAttention(dim, dropout)
        self.union_attention = WordAttention(dim, dropout)
        self.seen_norm = RMSNorm(dim)
        self.union_norm = RMSNorm(dim)
        self.subject_mix = GatedResidual(dim, dropout)
        self.object_mix = GatedResidual(dim, dropout)
        self.pair_mix = GatedResidual(dim, dropout)
        self.union = linear(sizes.union_dim, dim)
        self.union_gate = linear(dim, dim)
        self.project = nn.Sequential(
            linear(dim, 2 * dim),
            RMSNorm(2 * dim),
            nn.SiLU(),
            linear(2 * dim, dim),
        )
        self.prototypes = MovingPrototypes(sizes.num_predicates, dim)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if not len(batch.boxes_xyxy):
            return empty_output(self.sizes, self.logit_scale)
        logits, labels = detector_labels(self, batch)
        pairs = self.project(self._pairs(batch, labels))
        pairs = F.normalize(pairs.float(), dim=1)  # (R, dim)
        prototypes = self.project(self.prototypes())
        prototypes = F.normalize(prototypes.float(), dim=1)  # (P, dim)
        with torch.autocast(pairs.device.type, enabled=False):
            scale = self.logit_scale.exp().clamp(max=MAX_LOGIT_SCALE)
            relation_logits = pairs @ prototypes.T * scale
            losses = self._losses(batch, pairs, prototypes) if self.training else {}
        if self.training and self.prototypes.moves:
            self.prototypes.follow(pairs.detach(), batch.relation_labels)
        return RelationOutput(
            logits,
            relation_logits,
            labels,
            context=pairs.new_zeros(0),
            extra_losses=losses,
            labels_stay=batch.found_labels is not None,
        )

    def _pairs(self, batch: RelationBatch, labels: Tensor) -> Tensor:
        """Return (R, dim) of the pairs."""
        as_subject, as_object = self.split(batch.roi_features).chunk(2, 1)
        classes = self.class_word(self.embed_out.weight)
        words = self.class_word(self.embed_out(labels))
        subjects = self.seen_norm(as_subject + self.subject_attention(as_subject, classes))
        objects = self.seen_norm(as_object + self.object_attention(as_object, classes))
        subject = (self.subject_mix(subjects) + words)[batch.pairs[:, 0]]
        other = (self.object_mix(objects) + words)[batch.pairs[:, 1]]
        pairs = self.pair_mix(subject * other + subject - other)
        seen = self.union(batch.union_features)
        predicates = self.predicate_word(self.predicate_embed.weight)
        seen = self.union_norm(seen + self.union_attention(seen, predicates))
        gate = self.union_gate(pairs + seen).sigmoid()
        return pairs + gate * seen

    @staticmethod
    def _losses(batch: RelationBatch, pairs: Tensor, prototypes: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the losses of `PrototypeHead` for unit vectors, with a soft hinge."""
        cosines = prototypes @ prototypes.T  # (P, P)
        alike = cosines.norm(dim=1).sum() / len(prototypes) ** 2
        between = squared_distances(prototypes, prototypes.detach())
        itself = torch.eye(len(prototypes), dtype=torch.bool, device=between.device)
        between = between.masked_fill(itself, math.inf).sort(1).values
        to_nearest = between[:, :2].sum(1)
        close = F.softplus(PROTOTYPE_DISTANCE - to_nearest).mean()
        farther = farther_than_wrong(pairs, prototypes.detach(), batch.relation_labels)
        missed = F.softplus(farther + MARGIN)
        return prototype_losses(batch, alike, close, missed)
