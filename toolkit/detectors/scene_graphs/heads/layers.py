"""Modules shared by several relation heads."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import pad_rows, send
from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.box_features import box_numbers, certain_logits
from toolkit.detectors.scene_graphs.frequency import FrequencyBias
from toolkit.detectors.scene_graphs.postprocess import late_labels
from toolkit.detectors.scene_graphs.relation_batch import GRAPH_MODES, RelationBatch, RelationOutput, relatedness_loss

AVERAGE_RATIO = 0.0005  # of the running means that stand for "no evidence" in causal effects
POSITION_DIM = 128


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a relation head; the defaults are the published ones.

    num_classes, num_predicates: with background. roi_dim, union_dim: width of the features of objects and of union
    boxes.
    """

    num_classes: int
    num_predicates: int
    roi_dim: int = 4096
    union_dim: int = 4096
    hidden_dim: int = 512
    pooling_dim: int = 4096
    embed_dim: int = 200

    @property
    def object_dim(self) -> int:
        """Return the width of the result of `object_features`."""
        return self.roi_dim + self.embed_dim + POSITION_DIM


def check_mode(mode: str) -> str:
    """Return the mode; raise BadInput if it is not one of `GRAPH_MODES`."""
    if mode not in GRAPH_MODES:
        raise BadInput(f"relation mode is {mode!r}; expected {', '.join(GRAPH_MODES)}")
    return mode


def class_embedding(sizes: HeadSizes) -> nn.Embedding:
    """Build trainable vectors of the classes. They may be set from word vectors, see
    `toolkit.detectors.scene_graphs.start.start_from_words`."""
    return nn.Embedding(sizes.num_classes, sizes.embed_dim)


class ObjectBatchNorm(nn.BatchNorm1d):
    """Batch norm over objects that uses its running statistics for a batch of a single object, which has no
    variance."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) < 2:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                eps=self.eps,
            )
        return super().forward(input)


def position_embedding() -> nn.Sequential:
    """Build the embedding of positions, from `box_numbers` (N, 9) to (N, 128)."""
    return nn.Sequential(
        nn.Linear(9, 32),
        ObjectBatchNorm(32, momentum=0.001),
        nn.Linear(32, POSITION_DIM),
        nn.ReLU(),
    )


def batch_box_numbers(batch: RelationBatch) -> Tensor:
    """Return the `box_numbers` (N, 9) of the N boxes of a batch, relative to their images."""
    return box_numbers(batch.boxes_xyxy, batch.sizes_hw[batch.image])


class ObjectContext(nn.Module):
    """The base of contexts, modules that label each object of a batch and compute a feature that depends on the other
    objects of its image. It has the embeddings of classes and positions; a subclass does the rest.

    embed_in: vectors of the classes before labelling. embed_out: vectors of the labels that the context has assigned.
    """

    def __init__(self, mode: str, sizes: HeadSizes):
        super().__init__()
        self.mode = check_mode(mode)
        self.sizes = sizes
        self.embed_in = class_embedding(sizes)
        self.embed_out = class_embedding(sizes)
        self.position = position_embedding()


def label_embedding(embedding: nn.Embedding, batch: RelationBatch, mode: str) -> Tensor:
    """Return vectors (N, E), E numbers for each object: in predcls the vector of the given label, else the mean over
    the detector's class probabilities."""
    if mode == "predcls":
        return embedding(batch.labels)
    return batch.logits.detach().softmax(1) @ embedding.weight


def object_features(batch: RelationBatch, embedding: nn.Embedding, position: nn.Module, mode: str) -> Tensor:
    """Return features (N, D) of the objects: RoI feature, `label_embedding` and embedding of the position, side by
    side. D is `HeadSizes.object_dim`.

    embedding: of the classes. position: the module of `position_embedding`, or another with its arguments.
    """
    embedded = label_embedding(embedding, batch, mode)
    place = position(batch_box_numbers(batch))
    return torch.cat([batch.roi_features, embedded, place], 1)


def given_labels(batch: RelationBatch, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return object logits (N, C), which are certain of the given labels, and these labels (N,), in predcls."""
    return certain_logits(batch.labels, num_classes), batch.labels


def best_labels(head: nn.Module, batch: RelationBatch, logits: Tensor) -> Tensor:
    """Return labels (N,) of the objects: the best class other than background, or, for detected boxes in evaluation,
    `late_labels`."""
    if head.mode == "sgdet" and not head.training:
        return late_labels(batch, logits, head.nms_threshold)
    return logits[:, 1:].argmax(1) + 1


def empty_output(sizes: HeadSizes, parameter: nn.Parameter) -> RelationOutput:
    """Return the output of a head for a batch without objects. It is empty but depends on `parameter`, so that backward
    works."""
    zero = parameter.sum() * 0.0
    device = zero.device
    return RelationOutput(
        object_logits=torch.zeros(0, sizes.num_classes, device=device) + zero,
        relation_logits=torch.zeros(0, sizes.num_predicates, device=device) + zero,
        object_labels=torch.zeros(0, dtype=torch.int64, device=device),
        context=torch.zeros(0, sizes.hidden_dim, device=device),
    )


def subject_object_features(context: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features (R, D) of the subjects and of the objects of R pairs. In `context` (N, 2 D), the first half
    of an object's 2 D features is for its role as subject, the second half for its role as object."""
    as_subject, as_object = context.chunk(2, -1)
    return as_subject[pairs[:, 0]], as_object[pairs[:, 1]]


def split_layer(hidden_dim: int, out_dim: int) -> nn.Linear:
    """Build the layer that computes features for the two roles of an object. Its initial weights have a large
    deviation, as published."""
    layer = nn.Linear(hidden_dim, out_dim)
    nn.init.normal_(layer.weight, std=10.0 * hidden_dim**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def xavier_linear(in_dim: int, out_dim: int) -> nn.Linear:
    """Build a linear layer with weights drawn Xavier normal and biases 0."""
    layer = nn.Linear(in_dim, out_dim)
    nn.init.xavier_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def fc(in_dim: int, out_dim: int) -> nn.Linear:
    """Build a linear layer initialised as in maskrcnn-benchmark."""
    layer = nn.Linear(in_dim, out_dim)
    nn.init.kaiming_uniform_(layer.weight, a=1)
    nn.init.zeros_(layer.bias)
    return layer


def union_projection(sizes: HeadSizes) -> nn.Module:
    """Build the projection of union features to the pooled size; it is the identity if they already have this size."""
    same = sizes.union_dim == sizes.pooling_dim
    return nn.Identity() if same else xavier_linear(sizes.union_dim, sizes.pooling_dim)


class RunningMean(nn.Module):
    """The slowly moving mean of feature rows in training. It starts at 0, and a batch without rows does not change
    it."""

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("value", torch.zeros(dim))

    def forward(self, rows: Tensor, from_averages: bool = False, counts: list[int] | None = None) -> Tensor:
        """Update the mean in training, and return the rows, or, with `from_averages`, as many copies of the mean.

        rows: (N, dim). counts: number of rows of each image; the mean is then updated once for each image. Without
        counts, it is updated once for the batch.
        """
        if self.training and len(rows):
            counts = [count for count in counts or [len(rows)] if count]
            sums = pad_rows(rows.detach().float(), counts).sum(1)  # (images, dim)
            # The mean m moves to r m + (1 - r) x for each image in turn; after two it is r^2 m + r (1 - r) x1 +
            # (1 - r) x2.
            moves_after = torch.arange(len(counts) - 1, -1, -1)
            kept = (1 - AVERAGE_RATIO) ** moves_after
            weights = send(AVERAGE_RATIO * kept / torch.tensor(counts), rows.device)
            added = (sums * weights[:, None]).sum(0)
            self.value.mul_((1 - AVERAGE_RATIO) ** len(counts)).add_(added)
        return self.expanded(len(rows)) if from_averages else rows

    def expanded(self, count: int) -> Tensor:
        """Return `count` copies of the mean, (count, dim)."""
        return self.value.expand(count, -1)


def averaged(mean: RunningMean | None, rows: Tensor, from_averages: bool, counts: list[int] | None = None) -> Tensor:
    """Return `mean(rows, from_averages, counts)`, see `RunningMean.forward`, or the rows unchanged if `mean` is
    None."""
    return rows if mean is None else mean(rows, from_averages, counts)


class ContextHead(nn.Module):
    """A head that predicts predicates from the contexts of both objects, multiplied by the union features, plus the
    frequency bias."""

    loss_names = ("loss_rel", "loss_refine_obj")
    of_labels = ("context.decoder",)

    def __init__(self, context: nn.Module, sizes: HeadSizes, log_frequency: Tensor):
        """Build the head.

        context: a module that converts a batch to object logits (N, C), labels (N,), context (N, hidden), and
        relatedness logits (B, N_max, N_max) or None. log_frequency: (C, C, P), see `log_frequencies`.
        """
        super().__init__()
        self.sizes = sizes
        self.context = context
        self.split = split_layer(sizes.hidden_dim, 2 * sizes.hidden_dim)
        self.join = xavier_linear(2 * sizes.hidden_dim, sizes.pooling_dim)
        self.union = union_projection(sizes)
        self.out = xavier_linear(sizes.pooling_dim, sizes.num_predicates)
        self.frequency = FrequencyBias(log_frequency)

    def roles(self, context: Tensor) -> Tensor:
        """Return features (N, 2 hidden) of the objects, the first half as subject and the second half as object."""
        return self.split(context)

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if not len(batch.boxes_xyxy):
            return empty_output(self.sizes, self.out.weight)
        logits, labels, context, related = self.context(batch)
        both = torch.cat(subject_object_features(self.roles(context), batch.pairs), 1)
        joined = self.join(both)
        relation_logits = self.out(joined * self.union(batch.union_features))
        subject_labels, object_labels = labels[batch.pairs].unbind(1)
        relation_logits = relation_logits + self.frequency(subject_labels, object_labels)
        losses = tree_losses(related, batch) if self.training else {}
        return RelationOutput(logits, relation_logits, labels, context, losses)


def tree_losses(related: Tensor | None, batch: RelationBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `binary_loss` of relatedness logits (B, N_max, N_max) as (sum, denominator) by name; {} if `related` is
    None."""
    if related is None:
        return {}
    truth = pad_rows(batch.related.float(), batch.num_objects)
    return {"binary_loss": relatedness_loss(related, truth, batch.num_objects)}
