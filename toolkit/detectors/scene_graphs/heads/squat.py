"""SQUAT (Jung et al., CVPR 2023, hesedjds/SQUAT): relevant pairs attend to the pairs and objects of their image.

Three small networks score every pair. The pairs with the best first scores are updated; they attend to the pairs with
the best second scores. The third score is only trained.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import pad_rows, rows_of, send, unpad_rows
from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.box_features import PAIR_GEOMETRY_DIM, pair_numbers, scaled_box_numbers
from toolkit.detectors.scene_graphs.frequency import FrequencyBias
from toolkit.detectors.scene_graphs.heads.layers import (
    HeadSizes,
    check_mode,
    class_embedding,
    empty_output,
    fc,
    object_features,
    position_embedding,
    subject_object_features,
    xavier_linear,
)
from toolkit.detectors.scene_graphs.heads.prototypes import detector_labels
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput, object_mask, sum_by_image

ATTENTION_HEADS = 8
# The published names of the three scores, in those of their losses. "query" chooses the pairs that are updated, "e2e"
# (edge to edge) those that they read. "n2e" (node to edge) is learned with them, but nothing is chosen by it.
SCORE_NAMES = ("query", "e2e", "n2e")


@dataclass(frozen=True)
class ChosenPairs:
    """The pairs that a score has chosen in each image, at most K.

    rows: (B, K) int64, indices of the pairs in their image, best first. real: (B, K) bool, False for padding in images
    with fewer than K chosen pairs.
    """

    rows: Tensor
    real: Tensor


class PairScore(nn.Module):
    """A network that scores R padded pairs of each image, (B, R, D), from each pair and the mean over the pairs of its
    image; the scores are (B, R)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.first = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
        )
        self.last = nn.Sequential(
            nn.Linear(hidden_dim, hidden_dim // 2),
            nn.GELU(),
            nn.Linear(hidden_dim // 2, hidden_dim // 4),
            nn.GELU(),
            nn.Linear(hidden_dim // 4, 1),
        )

    def forward(self, pairs: Tensor, real: Tensor) -> Tensor:
        hidden = self.first(pairs).float()
        own, shared = hidden.chunk(2, -1)  # (B, R, hidden_dim / 2) each
        total = (shared * real[..., None]).sum(1)
        count = real.sum(1).clamp(min=1)[:, None]
        mean = total / count  # (B, hidden_dim / 2)
        both = torch.cat([own, mean[:, None].expand_as(own)], -1)
        return self.last(both)[..., 0].float()


class SelectiveLayer(nn.Module):
    """A layer in which the chosen pairs attend to each other, and then to a selection of the pairs and to the objects
    of their image."""

    def __init__(self, dim: int, inner_dim: int, dropout: float):
        super().__init__()
        self.among_pairs = self._attention(dim, dropout)
        self.among_objects = self._attention(dim, dropout)
        self.to_pairs = self._attention(dim, dropout)
        self.to_objects = self._attention(dim, dropout)
        self.pair_norm = nn.LayerNorm(dim)
        self.object_norm = nn.LayerNorm(dim)
        self.seen_norm = nn.LayerNorm(dim)
        self.out_norm = nn.LayerNorm(dim)
        self.inner = nn.Sequential(
            nn.Linear(dim, inner_dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(inner_dim, dim),
        )
        self.dropout = nn.Dropout(dropout)

    @staticmethod
    def _attention(dim: int, dropout: float) -> nn.MultiheadAttention:
        return nn.MultiheadAttention(dim, ATTENTION_HEADS, dropout, batch_first=True)

    def forward(
        self,
        queries: Tensor,
        objects: Tensor,
        pairs: Tensor,
        updated: ChosenPairs,
        read: ChosenPairs,
        real_objects: Tensor,
    ) -> Tensor:
        """Return the updated features (B, Q, D) of the Q chosen pairs.

        Args:
            queries: (B, Q, D), D features of each chosen pair.
            objects: (B, M, D), features of the M padded objects.
            pairs: (B, R, D), features of all R padded pairs before the first layer.
            updated: which pairs are chosen, (B, Q).
            read: to which K pairs the chosen ones attend, (B, K).
            real_objects: (B, M) bool, False for padding.
        """
        attended = self._attend(self.among_pairs, queries, queries, updated.real)
        queries = self.pair_norm(queries + attended)
        attended = self._attend(self.among_objects, objects, objects, real_objects)
        objects = self.object_norm(objects + attended)

        current = with_rows(pairs, queries, updated)  # (B, R, D)
        keys = rows_of(current, read.rows)  # (B, K, D)
        from_pairs = self._attend(self.to_pairs, queries, keys, read.real)
        from_objects = self._attend(self.to_objects, queries, objects, real_objects)
        queries = self.seen_norm(queries + (from_pairs + from_objects))
        return self.out_norm(queries + self.dropout(self.inner(queries)))

    def _attend(self, attention: nn.Module, queries: Tensor, values: Tensor, real: Tensor) -> Tensor:
        first = torch.arange(real.shape[1], device=real.device) == 0  # attention to nothing would be NaN
        is_ignored = ~(real | first)
        attended, _ = attention(queries, values, values, is_ignored, need_weights=False)
        return self.dropout(attended)


def with_rows(pairs: Tensor, values: Tensor, chosen: ChosenPairs) -> Tensor:
    """Return a copy of `pairs` (B, R, D), the D features of R pairs per image, in which the Q chosen ones are replaced
    by `values` (B, Q, D)."""
    values = torch.where(chosen.real[..., None], values, rows_of(pairs, chosen.rows))  # padding keeps what is there
    places = chosen.rows[..., None].expand_as(values)
    return pairs.scatter(1, places, values)


def top_share_rows(scores: Tensor, real: Tensor, counts: list[int], share: float) -> ChosenPairs:
    """Choose the best pairs of each image, the `share` of their number, and at least one; none in an image without
    pairs.

    Args:
        scores: (B, R) of R padded pairs per image.
        real: (B, R) bool, False for padding.
        counts: number of pairs of each image. For images of 3, 0 and 10 pairs and a share of 0.7, K is 7, and 2, 0 and
            7 pairs are chosen.
    """
    kept = [max(1, int(count * share)) if count else 0 for count in counts]
    of_real = scores.masked_fill(~real, -torch.inf)
    rows = of_real.topk(max(kept), 1).indices
    return ChosenPairs(rows, object_mask(kept, scores.device))


class SquatHead(nn.Module):
    """The SQUAT head, which keeps the detector's labels. It has a loss for each of the three scores in addition to the
    cross-entropy: a third of the binary cross-entropy of whether the pair has a relation in either direction."""

    loss_names = ("loss_rel", "loss_refine_obj", *(f"loss_mask_{name}" for name in SCORE_NAMES))

    def __init__(
        self,
        mode: str,
        sizes: HeadSizes,
        log_frequency: Tensor,
        dim: int = 2048,
        layers: int = 3,
        query_share: float = 0.7,
        key_share: float = 0.7,
        use_union: bool = False,
        dropout: float = 0.1,
        nms_threshold: float = 0.5,
    ):
        """Build the head.

        Args:
            dim: width of the features of a pair, a multiple of 8.
            layers: number of `SelectiveLayer`s.
            query_share, key_share: shares of an image's pairs that are updated, and to which these attend (rho and
                beta).
            use_union: add the features of union boxes, which the published configuration leaves out.

        Raises:
            BadInput: a width is not such a multiple, or a share is not above 0 and at most 1.
        """
        super().__init__()
        _check_head_options(sizes, dim, query_share, key_share)
        self.mode = check_mode(mode)
        self.sizes = sizes
        self.nms_threshold = nms_threshold
        self.reads_union = use_union
        self.query_share = query_share
        self.key_share = key_share
        hidden = sizes.hidden_dim
        object_dim = sizes.embed_dim + sizes.roi_dim + hidden
        self.embed_in = class_embedding(sizes)
        self.embed_out = class_embedding(sizes)
        self.position = position_embedding()
        self.object_in = fc(sizes.object_dim, hidden)
        self.split = fc(object_dim, 2 * hidden)
        self.positions = nn.Sequential(
            xavier_linear(PAIR_GEOMETRY_DIM, hidden),
            nn.ReLU(),
            xavier_linear(hidden, 2 * hidden),
            nn.ReLU(),
        )
        self.join = fc(2 * hidden, dim)
        self.objects = fc(object_dim, dim)
        self.union = xavier_linear(sizes.union_dim, dim) if use_union else None
        self.scores = nn.ModuleDict({name: PairScore(dim, hidden) for name in SCORE_NAMES})
        self.layers = nn.ModuleList(SelectiveLayer(dim, 2 * hidden, dropout) for _ in range(layers))
        self.out = nn.Linear(dim, sizes.num_predicates)
        self.frequency = FrequencyBias(log_frequency)

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if not len(batch.boxes_xyxy):
            return empty_output(self.sizes, self.out.weight)
        logits, labels = detector_labels(self, batch)
        context = self.object_in(object_features(batch, self.embed_in, self.position, self.mode))
        features = torch.cat([self.embed_out(labels), batch.roi_features, context], 1)  # (N, object_dim)
        flat_pairs = self._pairs(batch, features).float()  # (R, dim)
        pairs = pad_rows(flat_pairs, batch.num_pairs)  # (B, R_max, dim)
        real = object_mask(batch.num_pairs, pairs.device)
        scores = {name: score(pairs, real) for name, score in self.scores.items()}
        if len(batch.pairs):
            objects = self.objects(features).relu().float()  # (N, dim)
            pairs = self._updated(batch, pairs, real, scores, objects)
        subject_labels, object_labels = labels[batch.pairs].unbind(1)
        frequency = self.frequency(subject_labels, object_labels)
        relation_logits = self.out(unpad_rows(pairs, batch.num_pairs)) + frequency
        return RelationOutput(
            logits,
            relation_logits,
            labels,
            context=pairs.new_zeros(0),
            extra_losses=self._losses(batch, scores) if self.training else {},
            labels_stay=batch.found_labels is not None,
        )

    def _pairs(self, batch: RelationBatch, features: Tensor) -> Tensor:
        """Return the features (R, dim) of all pairs, from those of the objects (N, object_dim)."""
        numbers = scaled_box_numbers(batch.boxes_xyxy, batch.sizes_hw[batch.image])
        subjects, objects = batch.pairs.unbind(1)
        places = self.positions(pair_numbers(numbers[subjects], numbers[objects]))
        both = torch.cat(subject_object_features(self.split(features), batch.pairs), 1)
        pairs = self.join(both * places).relu()
        if self.union is None:
            return pairs
        return pairs + self.union(batch.union_features)

    def _updated(
        self,
        batch: RelationBatch,
        pairs: Tensor,
        real: Tensor,
        scores: dict[str, Tensor],
        objects: Tensor,
    ) -> Tensor:
        """Return all pairs (B, R, dim), the best of them updated by the layers.

        pairs: (B, R, dim), real: (B, R), false for padding. scores: (B, R) by name. objects: (N, dim).
        """
        updated = top_share_rows(scores["query"], real, batch.num_pairs, self.query_share)
        read = top_share_rows(scores["e2e"], real, batch.num_pairs, self.key_share)
        real_objects = object_mask(batch.num_objects, pairs.device)
        objects = pad_rows(objects, batch.num_objects)
        queries = rows_of(pairs, updated.rows)
        for layer in self.layers:
            queries = layer(queries, objects, pairs, updated, read, real_objects)
        return with_rows(pairs, queries, updated)

    @staticmethod
    def _losses(batch: RelationBatch, scores: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (sums, denominators) of the images by name: an image counts once if it has objects."""
        # `related` counts the other object of a pair within its image. Images of 3 and 2 objects start at 0 and 3, so
        # the pair (3, 4) is entry [3, 4 - 3] of it.
        starts = send(torch.tensor([0, *accumulate(batch.num_objects)]), batch.pairs.device)
        subjects, others = batch.pairs.unbind(1)
        in_image = others - starts[batch.image[subjects]]
        related = batch.related[subjects, in_image].float()  # (R,)
        counts = torch.tensor([batch.num_pairs, batch.num_objects])
        num_pairs, num_objects = send(counts, batch.pairs.device)  # (B,) each
        losses = {}
        for name, padded in scores.items():
            logits = unpad_rows(padded, batch.num_pairs)  # (R,)
            loss = F.binary_cross_entropy_with_logits(logits, related, reduction="none")
            mean = sum_by_image(loss, batch.num_pairs) / num_pairs.clamp(min=1)
            third = mean / len(SCORE_NAMES)
            losses[f"loss_mask_{name}"] = third, (num_objects > 0).to(third)
        return losses


def _check_head_options(sizes: HeadSizes, dim: int, query_share: float, key_share: float) -> None:
    faults = []
    if dim % ATTENTION_HEADS:
        faults.append(f"model.head_options.dim is {dim}; squat takes multiples of {ATTENTION_HEADS}")
    if sizes.hidden_dim % 4:
        faults.append(f"model.hidden_dim is {sizes.hidden_dim}; squat takes multiples of 4")
    for key, value in (("query_share", query_share), ("key_share", key_share)):
        if not 0 < value <= 1:
            faults.append(f"model.head_options.{key} is {value}; expected above 0 to 1")
    if faults:
        raise BadInput(faults)
