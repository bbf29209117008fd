"""The relation head Transformer of Scene-Graph-Benchmark (Tang et al., 2020), which encodes objects and their edges by
self-attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import pad_rows, unpad_rows
from toolkit.detectors.scene_graphs.frequency import FrequencyBias
from toolkit.detectors.scene_graphs.heads.layers import (
    POSITION_DIM,
    HeadSizes,
    best_labels,
    check_mode,
    class_embedding,
    empty_output,
    given_labels,
    object_features,
    split_layer,
    subject_object_features,
    union_projection,
    xavier_linear,
)
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput, object_mask


class EncoderLayer(nn.Module):
    """A layer of post-norm self-attention and feed-forward; keys and values may have other widths than the features."""

    def __init__(self, dim: int, heads: int, key_dim: int, value_dim: int, inner_dim: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, heads * key_dim)
        self.key = nn.Linear(dim, heads * key_dim)
        self.value = nn.Linear(dim, heads * value_dim)
        self.out = nn.Linear(heads * value_dim, dim)
        for layer, size in ((self.query, key_dim), (self.key, key_dim), (self.value, value_dim)):
            nn.init.normal_(layer.weight, std=(2.0 / (dim + size)) ** 0.5)
        nn.init.xavier_normal_(self.out.weight)
        self.attention_norm = nn.LayerNorm(dim)
        self.inner_norm = nn.LayerNorm(dim)
        self.inner_in = nn.Linear(dim, inner_dim)
        self.inner_out = nn.Linear(inner_dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.attention_dropout = dropout

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Encode features (B, n, dim) of n padded objects, in the same shape. mask: (B, n) bool, True for objects and
        False for padding; every image needs at least one object."""
        query = self._heads(self.query(features))
        key = self._heads(self.key(features))
        value = self._heads(self.value(features))
        dropout = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask[:, None, None], dropout)
        joined = mixed.transpose(1, 2).flatten(2)  # (B, n, heads * value_dim)
        features = self.attention_norm(features + self.dropout(self.out(joined)))
        inner = self.inner_out(self.inner_in(features).relu())
        return self.inner_norm(features + self.dropout(inner))

    def _heads(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class ObjectEncoder(nn.ModuleList):
    """Encoder layers that encode the objects of each image, (N, dim) in all, to the same shape."""

    def forward(self, features: Tensor, num_objects: list[int]) -> Tensor:
        num_objects = [count for count in num_objects if count]  # attention over nothing would be NaN
        mask = object_mask(num_objects, features.device)
        padded = pad_rows(features, num_objects)
        for layer in self:
            padded = layer(padded, mask)
        return unpad_rows(padded, num_objects)


class TransformerHead(nn.Module):
    """A head that predicts predicates from three parts, which are added: the contexts of both objects, these contexts
    multiplied by the union features, and the frequency bias."""

    loss_names = ("loss_rel", "loss_refine_obj")
    of_labels = ("object_out",)

    def __init__(
        self,
        mode: str,
        sizes: HeadSizes,
        log_frequency: Tensor,
        object_layers: int = 4,
        edge_layers: int = 2,
        heads: int = 8,
        key_dim: int = 64,
        value_dim: int = 64,
        inner_dim: int = 2048,
        dropout: float = 0.1,
        nms_threshold: float = 0.5,
    ):
        super().__init__()
        self.mode = check_mode(mode)
        self.sizes = sizes
        self.nms_threshold = nms_threshold
        hidden = sizes.hidden_dim
        self.embed_in = class_embedding(sizes)
        self.embed_out = class_embedding(sizes)
        self.position = nn.Sequential(
            nn.Linear(9, 32),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(32, POSITION_DIM),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.object_in = nn.Linear(sizes.object_dim, hidden)
        self.edge_in = nn.Linear(sizes.embed_dim + hidden + sizes.roi_dim, hidden)
        self.object_out = nn.Linear(hidden, sizes.num_classes)
        shape = (hidden, heads, key_dim, value_dim, inner_dim, dropout)
        self.object_encoder = ObjectEncoder(EncoderLayer(*shape) for _ in range(object_layers))
        self.edge_encoder = ObjectEncoder(EncoderLayer(*shape) for _ in range(edge_layers))
        self.split = split_layer(hidden, 2 * hidden)
        self.join = xavier_linear(2 * hidden, sizes.pooling_dim)
        self.union = union_projection(sizes)
        self.visual_out = xavier_linear(sizes.pooling_dim, sizes.num_predicates)
        self.context_out = xavier_linear(2 * hidden, sizes.num_predicates)
        self.frequency = FrequencyBias(log_frequency)

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if not len(batch.boxes_xyxy):
            return empty_output(self.sizes, self.visual_out.weight)
        features = object_features(batch, self.embed_in, self.position, self.mode)
        objects = self.object_encoder(self.object_in(features), batch.num_objects)
        logits, labels = self._labels(batch, objects)
        edge_features = torch.cat([batch.roi_features, objects, self.embed_out(labels)], 1)
        context = self.edge_encoder(self.edge_in(edge_features), batch.num_objects)
        both = torch.cat(subject_object_features(self.split(context), batch.pairs), 1)
        visual = self.join(both) * self.union(batch.union_features)
        subject_labels, object_labels = labels[batch.pairs].unbind(1)
        frequency = self.frequency(subject_labels, object_labels)
        relation_logits = self.visual_out(visual) + self.context_out(both) + frequency
        return RelationOutput(logits, relation_logits, labels, context)

    def _labels(self, batch: RelationBatch, objects: Tensor) -> tuple[Tensor, Tensor]:
        if self.mode == "predcls":
            return given_labels(batch, self.sizes.num_classes)
        logits = self.object_out(objects)
        return logits, best_labels(self, batch, logits)
