"""Iterative Message Passing (Xu et al., CVPR 2017): objects and pairs exchange messages for a few rounds."""

import torch
from torch import Tensor, nn

from toolkit.detectors.scene_graphs.heads.layers import (
    HeadSizes,
    check_mode,
    empty_output,
    fc,
    given_labels,
    union_projection,
)
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput


class IMPHead(nn.Module):
    """The IMP head, without word vectors and frequency bias. In each round, objects and pairs both read the states from
    before the round."""

    loss_names = ("loss_rel", "loss_refine_obj")
    of_labels = ("object_out",)

    def __init__(self, mode: str, sizes: HeadSizes, rounds: int = 3):
        super().__init__()
        self.mode = check_mode(mode)
        self.sizes = sizes
        self.rounds = rounds
        hidden = sizes.hidden_dim
        self.union = union_projection(sizes)
        self.object_in = fc(sizes.roi_dim, hidden)
        self.pair_in = fc(sizes.pooling_dim, hidden)
        self.object_gru = nn.GRUCell(hidden, hidden)
        self.pair_gru = nn.GRUCell(hidden, hidden)
        # How much of a message passes: from subject and object to the pair, and from the pair to each of them.
        self.from_subject = nn.Linear(2 * hidden, 1)
        self.from_object = nn.Linear(2 * hidden, 1)
        self.to_subject = nn.Linear(2 * hidden, 1)
        self.to_object = nn.Linear(2 * hidden, 1)
        self.object_out = fc(hidden, sizes.num_classes)
        self.pair_out = fc(hidden, sizes.num_predicates)

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if not len(batch.boxes_xyxy):
            return empty_output(self.sizes, self.pair_out.weight)
        subjects, objects = batch.pairs.unbind(1)
        nodes = self.object_gru(self.object_in(batch.roi_features))
        unions = self.union(batch.union_features)
        edges = self.pair_gru(self.pair_in(unions).relu())
        for _ in range(self.rounds):
            subject = nodes[subjects]
            obj = nodes[objects]
            with_subject = torch.cat([subject, edges], 1)
            with_object = torch.cat([obj, edges], 1)
            from_subject = _gate(self.from_subject, with_subject) * subject
            from_object = _gate(self.from_object, with_object) * obj
            to_edge = from_subject + from_object
            to_subject = _gate(self.to_subject, with_subject).to(edges) * edges
            to_nodes = torch.zeros_like(nodes).index_add(0, subjects, to_subject)
            to_object = _gate(self.to_object, with_object).to(edges) * edges
            to_nodes = to_nodes.index_add(0, objects, to_object)
            edges = self.pair_gru(to_edge, edges)
            nodes = self.object_gru(to_nodes, nodes)
        if self.mode == "predcls":
            logits, labels = given_labels(batch, self.sizes.num_classes)
        else:
            logits = self.object_out(nodes)
            labels = logits[:, 1:].argmax(1) + 1
        return RelationOutput(logits, self.pair_out(edges), labels, nodes)


def _gate(layer: nn.Linear, features: Tensor) -> Tensor:
    return layer(features).sigmoid()
