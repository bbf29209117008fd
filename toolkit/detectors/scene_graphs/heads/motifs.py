"""Neural Motifs (Zellers et al., CVPR 2018): bidirectional LSTMs over the objects from right to left."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from toolkit.detectors.scene_graphs.box_features import reading_order
from toolkit.detectors.scene_graphs.heads.layers import (
    ContextHead,
    HeadSizes,
    ObjectContext,
    RunningMean,
    averaged,
    given_labels,
    object_features,
)
from toolkit.detectors.scene_graphs.postprocess import late_labels
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch
from toolkit.step.execution import has_lstm_kernel


class LabelDecoder(nn.Module):
    """A highway LSTM that labels the objects one by one, with the previous label as input."""

    def __init__(self, in_dim: int, sizes: HeadSizes, dropout: float):
        super().__init__()
        self.in_dim = in_dim
        self.hidden_dim = sizes.hidden_dim
        self.dropout = dropout
        self.embed = nn.Embedding(sizes.num_classes + 1, sizes.embed_dim)  # first "nothing before"
        self.input = nn.Linear(in_dim + sizes.embed_dim, 6 * sizes.hidden_dim)
        self.state = nn.Linear(sizes.hidden_dim, 5 * sizes.hidden_dim)
        self.out = nn.Linear(sizes.hidden_dim, sizes.num_classes)
        nn.init.zeros_(self.input.bias)
        nn.init.zeros_(self.state.bias)

    def forward(self, features: Tensor, batch_sizes: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits (N, C) and labels (N,) for packed features (N, in_dim), in the same order.

        Args:
            batch_sizes: number of images that have an object at each step, see `reading_order`.
            labels: (N,) packed, in training: each is the input for the next object of its image; where it is 0, the
                best class is. None: the best class other than background is always the input. The labels returned are
                these inputs.
        """
        # The input layer's part for the features is known for all steps, and its part for a label for all labels.
        from_features = F.linear(
            features,
            self.input.weight[:, : self.in_dim],
            self.input.bias,
        )
        from_label = F.linear(self.embed.weight, self.input.weight[:, self.in_dim :])  # (1 + C, 6 hidden)
        counts = batch_sizes.tolist()  # images that still run, of each step
        teacher = None if labels is None else (labels - 1).split(counts)
        state = memory = features.new_zeros(int(batch_sizes[0]), self.hidden_dim)
        # One mask for all steps (Gal and Ghahramani, 2016).
        kept = F.dropout(torch.ones_like(state), self.dropout, self.training)
        start_token = torch.zeros(len(state), dtype=torch.int64, device=features.device)
        before = from_label[start_token]
        all_logits = []
        all_labels = []
        for step, projected in enumerate(from_features.split(counts)):
            count = len(projected)  # the images still running come first
            known = projected + before[:count]
            state, memory = self._step(known, state[:count], memory[:count])
            if self.training:
                state = state * kept[:count]
            logits = self.out(state)
            label = logits[:, 1:].argmax(1)  # without background: from 0
            if teacher is not None:
                label = torch.where(teacher[step] < 0, label, teacher[step])
            before = from_label[2:][label]
            all_logits.append(logits)
            all_labels.append(label)
        return torch.cat(all_logits), torch.cat(all_labels) + 1

    def _step(self, projected: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        width = self.hidden_dim
        gates = projected[:, : 5 * width] + self.state(state)
        direct = projected[:, 5 * width :]
        into, forget = gates[:, : 2 * width].sigmoid().chunk(2, 1)
        out, highway = gates[:, 3 * width :].sigmoid().chunk(2, 1)
        new = gates[:, 2 * width : 3 * width].tanh()
        memory = into * new + forget * memory
        state = highway * out * memory.tanh() + (1 - highway) * direct
        return state, memory


class MotifsContext(ObjectContext):
    """The context of Neural Motifs, which labels the objects and computes a context feature for each."""

    def __init__(
        self,
        mode: str,
        sizes: HeadSizes,
        dropout: float = 0.2,
        nms_threshold: float = 0.5,
        keep_averages: bool = False,
    ):
        """Build the context. keep_averages: keep running means of inputs, which causal effects need; see
        `CausalHead`."""
        super().__init__(mode, sizes)
        self.nms_threshold = nms_threshold
        object_dim = sizes.object_dim
        edge_dim = sizes.embed_dim + sizes.roi_dim
        hidden = sizes.hidden_dim
        self.object_lstm = nn.LSTM(object_dim, hidden, bidirectional=True)
        self.object_out = nn.Linear(2 * hidden, hidden)
        self.decoder = LabelDecoder(object_dim + hidden, sizes, dropout)
        self.edge_lstm = nn.LSTM(edge_dim + hidden, hidden, bidirectional=True)
        self.edge_out = nn.Linear(2 * hidden, hidden)
        self.mean_decoder_input = RunningMean(object_dim + hidden) if keep_averages else None
        self.mean_edge_input = RunningMean(edge_dim) if keep_averages else None

    def forward(self, batch: RelationBatch, from_averages: bool = False) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return object logits (N, C), labels (N,), context (N, hidden), and None.

        from_averages: compute the results of decoder and edge LSTM from the running means of their inputs, as for
        objects without evidence.
        """
        boxes = batch.boxes_xyxy if batch.on_host is None else batch.on_host[0]
        order, inverse, batch_sizes = reading_order(
            boxes,
            batch.num_objects,
            batch.boxes_xyxy.device,
        )
        features = object_features(batch, self.embed_in, self.position, self.mode)
        features = features[order]
        context = self.object_out(_run(self.object_lstm, features, batch_sizes))
        decoder_input = torch.cat([features, context], 1)
        decoder_input = averaged(self.mean_decoder_input, decoder_input, from_averages)
        logits, labels = self._labels(batch, decoder_input, order, inverse, batch_sizes)
        edge_input = torch.cat([self.embed_out(labels), batch.roi_features], 1)
        edge_input = averaged(self.mean_edge_input, edge_input, from_averages)
        edge_input = torch.cat([edge_input[order], context], 1)
        edges = self.edge_out(_run(self.edge_lstm, edge_input, batch_sizes))
        return logits, labels, edges[inverse], None

    def _labels(self, batch, decoder_input, order, inverse, batch_sizes) -> tuple[Tensor, Tensor]:
        if self.mode == "predcls":
            return given_labels(batch, self.sizes.num_classes)
        teacher = batch.labels[order] if self.training else None
        logits, labels = (out[inverse] for out in self.decoder(decoder_input, batch_sizes, teacher))
        if self.mode == "sgdet" and not self.training:
            labels = late_labels(batch, logits, self.nms_threshold)
        return logits, labels


def _run(lstm: nn.LSTM, packed: Tensor, batch_sizes: Tensor) -> Tensor:
    device = packed.device.type
    if torch.is_autocast_enabled(device) and not has_lstm_kernel(device, torch.get_autocast_dtype(device)):
        with torch.autocast(device, enabled=False):
            return lstm(PackedSequence(packed.float(), batch_sizes))[0].data
    return lstm(PackedSequence(packed, batch_sizes))[0].data


class MotifsHead(ContextHead):
    """The head of Neural Motifs."""

    def __init__(
        self,
        mode: str,
        sizes: HeadSizes,
        log_frequency: Tensor,
        dropout: float = 0.2,
        nms_threshold: float = 0.5,
    ):
        super().__init__(MotifsContext(mode, sizes, dropout, nms_threshold), sizes, log_frequency)
