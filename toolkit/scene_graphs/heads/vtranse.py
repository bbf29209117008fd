"""VTransE (Zhang et al., CVPR 2017) as Scene-Graph-Benchmark has it: no context, subject minus object."""

import torch
from torch import Tensor, nn

from toolkit.scene_graphs.batch import RelationBatch
from toolkit.scene_graphs.heads.layers import (
    POSITION_DIM,
    HeadSizes,
    RunningMean,
    averaged,
    batch_box_numbers,
    check_mode,
    class_embeddings,
    fc,
    label_embedding,
    position_embedding,
)


class VTransEContext(nn.Module):
    """Labels every object by itself, in predcls too (the given labels only enter as embedding); background may win."""

    def __init__(self, mode: str, sizes: HeadSizes, keep_averages: bool = False):
        super().__init__()
        self.mode = check_mode(mode)
        self.embed_in, self.embed_out = class_embeddings(sizes)
        self.position = position_embedding()
        object_dim = sizes.roi_dim + sizes.embed_dim + POSITION_DIM
        self.object_out = fc(object_dim, sizes.num_classes)
        self.edge_out = fc(object_dim, sizes.hidden_dim)
        self.mean_object_input = RunningMean(object_dim) if keep_averages else None
        self.mean_edge_input = RunningMean(sizes.roi_dim + POSITION_DIM) if keep_averages else None

    def forward(self, batch: RelationBatch, from_averages: bool = False) -> tuple[Tensor, Tensor, Tensor, None]:
        """Object logits (N, C), labels (N,), context (N, hidden), None."""
        position = self.position(batch_box_numbers(batch))
        embedded = label_embedding(self.embed_in, batch, self.mode)
        object_input = torch.cat([batch.roi_features, embedded, position], 1)
        edge_input = torch.cat([batch.roi_features, position], 1)
        object_input = averaged(self.mean_object_input, object_input, from_averages)
        edge_input = averaged(self.mean_edge_input, edge_input, from_averages)
        logits = self.object_out(object_input)
        labels = logits.argmax(1)
        words = logits.softmax(1) @ self.embed_out.weight if from_averages else self.embed_out(labels)
        return logits, labels, self.edge_out(torch.cat([edge_input, words], 1)).relu(), None
