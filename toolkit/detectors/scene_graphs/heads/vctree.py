"""VCTree (Tang et al., CVPR 2019): a tree over the objects of each image, and LSTMs that run along it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import pad_rows, unpad_rows
from toolkit.detectors.scene_graphs.box_features import overlap_numbers
from toolkit.detectors.scene_graphs.heads.layers import (
    ContextHead,
    HeadSizes,
    ObjectBatchNorm,
    ObjectContext,
    RunningMean,
    averaged,
    batch_box_numbers,
    given_labels,
    label_embedding,
    xavier_linear,
)
from toolkit.detectors.scene_graphs.heads.trees import DownwardLSTM, Forest, TreeLSTM, grow_trees
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, object_mask

SCORE_DIM = 128


class PairScores(nn.Module):
    """A module that scores how likely two objects of an image are related, from their features and from class
    frequencies."""

    def __init__(self, sizes: HeadSizes, log_frequency: Tensor):
        super().__init__()
        hidden = sizes.hidden_dim
        num_classes = sizes.num_classes
        self.prior = nn.Linear(num_classes**2, 1, bias=False)
        self.start_from(log_frequency)
        self.overlap = self._numbers(6)
        self.box = self._numbers(9)
        self.roi = xavier_linear(sizes.roi_dim, SCORE_DIM)
        self.word = xavier_linear(sizes.embed_dim, SCORE_DIM)
        self.joined = xavier_linear(4 * SCORE_DIM, hidden)
        self.subject = xavier_linear(hidden, hidden)
        self.object = xavier_linear(hidden, hidden)
        self.vision = nn.Linear(3 * hidden + 1, 1)

    @torch.no_grad()
    def start_from(self, log_frequency: Tensor) -> None:
        """Set the prior that objects of two classes are related, from `log_frequency` (C, C, P) for P predicates, see
        `log_frequencies`."""
        one_way = log_frequency.sum(-1)  # (C, C)
        both_ways = one_way + one_way.T
        self.prior.weight.copy_(both_ways.reshape(1, -1))

    @staticmethod
    def _numbers(count: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(count, SCORE_DIM),
            ObjectBatchNorm(SCORE_DIM, momentum=0.001),
            nn.ReLU(),
        )

    def forward(self, batch: RelationBatch, embedded: Tensor, logits: Tensor) -> Tensor:
        """Return logits (B, N_max, N_max), padded, of a relation between the object in the row (in the role of object)
        and that in the column (as subject).

        embedded: (N, E) label embeddings of E numbers. logits: (N, C). Neither these nor the RoI features get a
        gradient from here.
        """
        mask = object_mask(batch.num_objects, embedded.device)
        overlaps = overlap_numbers(pad_rows(batch.boxes_xyxy, batch.num_objects), mask)
        overlaps = unpad_rows(overlaps, batch.num_objects)
        words = self.word(embedded.detach())
        rois = self.roi(batch.roi_features.detach())
        boxes = self.box(batch_box_numbers(batch))
        joined = torch.cat([rois, words, boxes, self.overlap(overlaps)], 1)
        joined = self.joined(joined).relu()
        with torch.autocast(embedded.device.type, enabled=False):  # trees hang on small differences
            return self._bilinear(joined.float(), logits.detach().float(), batch.num_objects)

    def _bilinear(self, joined: Tensor, logits: Tensor, num_objects: list[int]) -> Tensor:
        """Compute the two bilinear layers, which the published code expands to N x N x C^2 and N x N x 3 hidden; same
        result."""
        subject = pad_rows(self.subject(joined).relu(), num_objects)
        obj = pad_rows(self.object(joined).relu(), num_objects)
        classes = pad_rows(logits.softmax(1), num_objects)
        num_classes = classes.shape[-1]
        prior_weight = self.prior.weight.view(num_classes, num_classes)
        prior = classes @ prior_weight @ classes.transpose(1, 2)  # (B, N_max, N_max)
        # Weights of the product of both, of the subject, of the object, and of the prior.
        product_weight, subject_weight, object_weight = self.vision.weight[0, :-1].chunk(3)
        vision = (obj * product_weight) @ subject.transpose(1, 2)
        vision = vision + (subject @ subject_weight)[:, None] + (obj @ object_weight)[:, :, None]
        vision = vision + self.vision.weight[0, -1] * prior + self.vision.bias
        return vision.sigmoid() * prior


class TreeDecoder(nn.Module):
    """A decoder that labels the objects from the roots to the leaves, with the parent's label as input."""

    def __init__(self, in_dim: int, sizes: HeadSizes, dropout: float):
        super().__init__()
        self.in_dim = in_dim
        self.dropout = dropout
        self.embed = nn.Embedding(sizes.num_classes + 1, sizes.embed_dim)  # first that of no parent
        self.lstm = DownwardLSTM(in_dim + sizes.embed_dim, sizes.hidden_dim)
        self.out = nn.Linear(sizes.hidden_dim, sizes.num_classes)

    def forward(
        self,
        features: Tensor,
        forest: Forest,
        image: Tensor,
        clocks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits (N, C), and the best labels other than background (N,).

        Args:
            features: (N, in_dim).
            image: (N,) index of the image of each object.
            clocks: (N, C - 1) random numbers, see `drawn_columns`, in training. With them, the label that an object
                passes on to its children is drawn by its probabilities; without, it is the best label.
        """
        direct, from_parent_direct = self._project(self.lstm.direct, features)
        projected, from_parent = self._project(self.lstm.input, features)
        # One mask for all objects of an image.
        ones = features.new_ones(forest.num_images, self.lstm.dim)
        kept = F.dropout(ones, self.dropout, self.training)[image]
        state = memory = features.new_zeros(len(features), self.lstm.dim)
        parent_label = torch.zeros(len(features), dtype=torch.int64, device=features.device)
        all_logits = []
        all_labels = []
        for depth, (level, up) in enumerate(zip(forest.levels, forest.up_place, strict=True)):
            if depth == 0:
                up = torch.arange(len(level), device=level.device)  # zeros and the start token
            parent_label = parent_label[up]
            all_direct = direct[level] + from_parent_direct[parent_label]
            all_projected = projected[level] + from_parent[parent_label]
            state, memory = self.lstm.cell(all_direct, all_projected, state[up], memory[up])
            state = state * kept[level]
            logits = self.out(state)
            labels = logits[:, 1:].argmax(1) + 1
            all_logits.append(logits)
            all_labels.append(labels)
            parent_label = labels + 1
            if clocks is not None:
                probabilities = logits.float().softmax(1)[:, 1:]
                parent_label = drawn_columns(probabilities, clocks[level]) + 2
        logits = torch.cat(all_logits)
        labels = torch.cat(all_labels)
        return logits[forest.inverse], labels[forest.inverse]

    def _project(self, layer: nn.Linear, features: Tensor) -> tuple[Tensor, Tensor]:
        """Apply a layer to [features, parent's label]: return its part for all objects and its part for all labels."""
        weight = layer.weight[:, : self.in_dim]
        label_weight = layer.weight[:, self.in_dim :]
        of_objects = F.linear(features, weight, layer.bias)
        of_labels = F.linear(self.embed.weight, label_weight)
        return of_objects, of_labels


def drawn_columns(weights: Tensor, clocks: Tensor) -> Tensor:
    """Draw a column (N,) from each row of weights (N, C) as `multinomial` does, but without its check for finite
    weights, for which the host would wait for a GPU.

    clocks: (N, C) exponentially distributed numbers.
    """
    return (weights / clocks).argmax(1)


def clocks_of(batch: RelationBatch, columns: int) -> Tensor:
    """Draw (N, columns) exponentially distributed numbers for the N objects, those of each image from its own random
    generator."""
    draws = batch.draws or [None] * len(batch.num_objects)
    clocks = batch.boxes_xyxy.new_empty(sum(batch.num_objects), columns, dtype=torch.float32)
    for rows, draw in zip(clocks.split(batch.num_objects), draws, strict=True):
        rows.exponential_(generator=draw)
    return clocks


class VCTreeContext(ObjectContext):
    """The context of VCTree, which builds the trees, labels the objects and computes a context feature for each."""

    def __init__(
        self,
        mode: str,
        sizes: HeadSizes,
        log_frequency: Tensor,
        dropout: float = 0.2,
        keep_averages: bool = False,
    ):
        super().__init__(mode, sizes)
        self.scores = PairScores(sizes, log_frequency)
        object_dim = sizes.object_dim
        edge_dim = sizes.embed_dim + sizes.roi_dim
        self.object_lstm = TreeLSTM(object_dim, sizes.hidden_dim)
        self.decoder = TreeDecoder(object_dim + sizes.hidden_dim, sizes, dropout)
        self.edge_lstm = TreeLSTM(edge_dim + sizes.hidden_dim, sizes.hidden_dim)
        self.mean_decoder_input = RunningMean(object_dim + sizes.hidden_dim) if keep_averages else None
        self.mean_edge_input = RunningMean(edge_dim) if keep_averages else None

    def plant(self, batch: RelationBatch, embedded: Tensor) -> tuple[Forest, Tensor]:
        """Return the trees, and the relatedness logits (B, N_max, N_max) from which they were grown.

        embedded: (N, E) label embeddings of E numbers.
        """
        logits = batch.logits
        if self.mode == "predcls":
            logits, _ = given_labels(batch, self.sizes.num_classes)
        related = self.scores(batch, embedded, logits)
        return grow_trees(related.sigmoid(), batch.num_objects), related

    def forward(self, batch: RelationBatch, from_averages: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return object logits (N, C), labels (N,), context (N, hidden), and relatedness logits (B, N_max, N_max).

        from_averages: compute the results of decoder and edge LSTM from the running means of their inputs, as for
        objects without evidence.
        """
        embedded = label_embedding(self.embed_in, batch, self.mode)
        position = self.position(batch_box_numbers(batch))
        features = torch.cat([batch.roi_features, embedded, position], 1)
        forest, related = self.plant(batch, embedded)
        context = self.object_lstm(features, forest)
        decoder_input = torch.cat([features, context], 1)
        logits, labels = self._labels(batch, decoder_input, forest, from_averages)
        edge_input = torch.cat([self.embed_out(labels), batch.roi_features], 1)
        edge_input = averaged(self.mean_edge_input, edge_input, from_averages)
        edges = self.edge_lstm(torch.cat([edge_input, context], 1), forest)
        return logits, labels, edges, related

    def _labels(self, batch, decoder_input, forest, from_averages: bool) -> tuple[Tensor, Tensor]:
        if self.mode == "predcls":
            return given_labels(batch, self.sizes.num_classes)
        decoder_input = averaged(
            self.mean_decoder_input,
            decoder_input,
            from_averages,
            batch.num_objects,
        )
        clocks = clocks_of(batch, self.sizes.num_classes - 1) if self.training else None
        return self.decoder(decoder_input, forest, batch.image, clocks)


class VCTreeHead(ContextHead):
    """The head of VCTree, with the loss `binary_loss` of the relatedness from which the trees are grown."""

    loss_names = (*ContextHead.loss_names, "binary_loss")

    def __init__(self, mode: str, sizes: HeadSizes, log_frequency: Tensor, dropout: float = 0.2):
        super().__init__(VCTreeContext(mode, sizes, log_frequency, dropout), sizes, log_frequency)

    def roles(self, context: Tensor) -> Tensor:
        return super().roles(context).relu()
