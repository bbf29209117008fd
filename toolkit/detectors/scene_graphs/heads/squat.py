"""SQUAT (Jung et al., CVPR 2023, hesedjds/SQUAT): relevant pairs attend to the pairs and objects of their image.

Three small networks score every pair. The best of the first score are updated, and read the best of the second.
"""

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import pad_rows, rows_of, send, unpad_rows
from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.batch import RelationBatch, RelationOutput, object_mask, of_images
from toolkit.detectors.scene_graphs.frequency import FrequencyBias
from toolkit.detectors.scene_graphs.geometry import PAIR_GEOMETRY_DIM, pair_numbers, scaled_box_numbers
from toolkit.detectors.scene_graphs.heads.layers import (
    HeadSizes,
    check_mode,
    class_embedding,
    empty_output,
    fc,
    object_features,
    paired,
    position_embedding,
    xavier_linear,
)
from toolkit.detectors.scene_graphs.heads.prototypes import detector_labels

ATTENTION_HEADS = 8
SCORE_NAMES = ("query", "e2e", "n2e")  # the names of their losses; nothing is chosen by the last


class PairScore(nn.Module):
    """Scores (B, R) of padded pairs (B, R, D), from each pair and the mean over its image."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden_dim), nn.GELU())
        layers = nn.Linear(hidden_dim, hidden_dim // 2), nn.GELU(), nn.Linear(hidden_dim // 2, hidden_dim // 4)
        self.last = nn.Sequential(*layers, nn.GELU(), nn.Linear(hidden_dim // 4, 1))

    def forward(self, pairs: Tensor, real: Tensor) -> Tensor:
        own, shared = self.first(pairs).float().chunk(2, -1)
        shared = (shared * real[..., None]).sum(1) / real.sum(1).clamp(min=1)[:, None]
        return self.last(torch.cat([own, shared[:, None].expand_as(own)], -1))[..., 0].float()


class SelectiveLayer(nn.Module):
    """A layer in which the chosen pairs attend to each other, then to some pairs and to the objects of their image."""

    def __init__(self, dim: int, inner_dim: int, dropout: float):
        super().__init__()
        self.among_pairs, self.among_objects, self.to_pairs, self.to_objects = (
            nn.MultiheadAttention(dim, ATTENTION_HEADS, dropout, batch_first=True) for _ in range(4)
        )
        self.pair_norm, self.object_norm, self.seen_norm, self.out_norm = (nn.LayerNorm(dim) for _ in range(4))
        inner = nn.Linear(dim, inner_dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner_dim, dim)
        self.inner = nn.Sequential(*inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, chosen: Tensor, objects: Tensor, pairs: Tensor, rows: dict, real: dict) -> Tensor:
        """Return the updated pairs.

        chosen: (B, Q, D), the pairs at `rows["query"]` (B, Q). objects: (B, M, D). pairs: (B, R, D), all of them before
        any layer; those at `rows["e2e"]` (B, K) are read. real: masks that are false for padding, by name.
        """
        attended = self._attend(self.among_pairs, chosen, chosen, real["query"])
        chosen = self.pair_norm(chosen + attended)
        objects = self.object_norm(objects + self._attend(self.among_objects, objects, objects, real["objects"]))
        read = rows_of(with_rows(pairs, chosen, rows["query"], real["query"]), rows["e2e"])
        attended = self._attend(self.to_pairs, chosen, read, real["e2e"])
        attended = attended + self._attend(self.to_objects, chosen, objects, real["objects"])
        chosen = self.seen_norm(chosen + attended)
        return self.out_norm(chosen + self.dropout(self.inner(chosen)))

    def _attend(self, attention: nn.Module, queries: Tensor, values: Tensor, real: Tensor) -> Tensor:
        first = torch.arange(real.shape[1], device=real.device) == 0  # attention to nothing would be NaN
        return self.dropout(attention(queries, values, values, ~(real | first), need_weights=False)[0])


def with_rows(pairs: Tensor, chosen: Tensor, rows: Tensor, real: Tensor) -> Tensor:
    """Return (B, R, D) with the real ones of `chosen` (B, Q, D) at `rows` (B, Q)."""
    chosen = torch.where(real[..., None], chosen, rows_of(pairs, rows))
    return pairs.scatter(1, rows[..., None].expand_as(chosen), chosen)


def best_rows(scores: Tensor, real: Tensor, counts: list[int], share: float) -> tuple[Tensor, Tensor]:
    """Return the (B, K) rows of the best `share` of each image's pairs, at least one, and a mask that is false for
    padding."""
    kept = [max(1, int(count * share)) if count else 0 for count in counts]
    rows = scores.masked_fill(~real, -torch.inf).topk(max(kept), 1).indices
    return rows, object_mask(kept, scores.device)


class SquatHead(nn.Module):
    """The SQUAT head, which keeps the detector's labels. Its losses beside the cross entropy say which pairs have a
    relation, in either direction: a third of the binary cross entropy of each score."""

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

        dim: width of a pair, a multiple of 8. query_share, key_share: the shares of an image's pairs that are updated
        and read (rho and beta). use_union: add the features of union boxes, which the published configuration leaves
        out.
        """
        super().__init__()
        _check(sizes, dim, query_share, key_share)
        self.mode = check_mode(mode)
        self.sizes = sizes
        self.nms_threshold = nms_threshold
        self.reads_union = use_union
        self.shares = {"query": query_share, "e2e": key_share}
        hidden = sizes.hidden_dim
        object_dim = sizes.embed_dim + sizes.roi_dim + hidden
        self.embed_in, self.embed_out = class_embedding(sizes), class_embedding(sizes)
        self.position = position_embedding()
        self.object_in = fc(sizes.object_dim, hidden)
        self.split = fc(object_dim, 2 * hidden)
        place = xavier_linear(PAIR_GEOMETRY_DIM, hidden), nn.ReLU(), xavier_linear(hidden, 2 * hidden), nn.ReLU()
        self.positions = nn.Sequential(*place)
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
        features = torch.cat([self.embed_out(labels), batch.roi_features, context], 1)
        pairs = pad_rows(self._pairs(batch, features).float(), batch.num_pairs)
        real = object_mask(batch.num_pairs, pairs.device)
        scores = {name: score(pairs, real) for name, score in self.scores.items()}
        if len(batch.pairs):
            pairs = self._updated(batch, pairs, real, scores, self.objects(features).relu().float())
        frequency = self.frequency(*labels[batch.pairs].unbind(1))
        relation_logits = self.out(unpad_rows(pairs, batch.num_pairs)) + frequency
        losses = self._losses(batch, scores) if self.training else {}
        stay = batch.found_labels is not None
        return RelationOutput(logits, relation_logits, labels, pairs.new_zeros(0), losses, stay)

    def _pairs(self, batch: RelationBatch, features: Tensor) -> Tensor:
        numbers = scaled_box_numbers(batch.boxes_xyxy, batch.sizes_hw[batch.image])
        places = self.positions(pair_numbers(numbers[batch.pairs[:, 0]], numbers[batch.pairs[:, 1]]))
        pairs = self.join(torch.cat(paired(self.split(features), batch.pairs), 1) * places).relu()
        return pairs if self.union is None else pairs + self.union(batch.union_features)

    def _updated(self, batch: RelationBatch, pairs: Tensor, real: Tensor, scores: dict, objects: Tensor) -> Tensor:
        best = {name: best_rows(scores[name], real, batch.num_pairs, share) for name, share in self.shares.items()}
        rows, kept = ({name: part[i] for name, part in best.items()} for i in range(2))
        kept["objects"] = object_mask(batch.num_objects, pairs.device)
        objects = pad_rows(objects, batch.num_objects)
        chosen = rows_of(pairs, rows["query"])
        for layer in self.layers:
            chosen = layer(chosen, objects, pairs, rows, kept)
        return with_rows(pairs, chosen, rows["query"], kept["query"])

    @staticmethod
    def _losses(batch: RelationBatch, scores: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (sums, denominators) of the images by name: an image counts once if it has objects."""
        starts = send(torch.tensor([0, *accumulate(batch.num_objects)]), batch.pairs.device)
        subjects, others = batch.pairs.unbind(1)
        related = batch.related[subjects, others - starts[batch.image[subjects]]].float()
        pairs, objects = send(torch.tensor([batch.num_pairs, batch.num_objects]), batch.pairs.device)
        losses = {}
        for name, each in scores.items():
            loss = F.binary_cross_entropy_with_logits(unpad_rows(each, batch.num_pairs), related, reduction="none")
            loss = of_images(loss, batch.num_pairs) / pairs.clamp(min=1) / len(SCORE_NAMES)
            losses[f"loss_mask_{name}"] = loss, (objects > 0).to(loss)
        return losses


def _check(sizes: HeadSizes, dim: int, query_share: float, key_share: float) -> None:
    faults = [
        f"{key} is {value}; squat takes multiples of {of}"
        for key, value, of in (
            ("model.head_options.dim", dim, ATTENTION_HEADS),
            ("model.hidden_dim", sizes.hidden_dim, 4),
        )
        if value % of
    ]
    faults += [
        f"model.head_options.{key} is {value}; expected above 0 to 1"
        for key, value in (("query_share", query_share), ("key_share", key_share))
        if not 0 < value <= 1
    ]
    if faults:
        raise BadInput(faults)
