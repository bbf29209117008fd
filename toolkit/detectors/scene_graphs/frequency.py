"""Frequency of predicates between two classes in the training split, the bias made from it, and the baseline that
predicts only from the frequencies (Zellers et al., Neural Motifs, 2018)."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.base.boxes import intersection_area
from toolkit.data.table import DetectionTable
from toolkit.detectors.scene_graphs.box_features import certain_logits
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput

PAIRS_PER_CHUNK = 1024  # 1,024 x 151^2 joint probabilities are 93 MB


def candidate_pairs(boxes_xyxy: np.ndarray) -> np.ndarray:
    """Return the K ordered pairs (K, 2) of boxes of one image that share area; if no boxes do, all ordered pairs."""
    other = ~np.eye(len(boxes_xyxy), dtype=bool)
    overlap = intersection_area(boxes_xyxy[:, None], boxes_xyxy[None]) > 0
    pairs = np.argwhere(overlap & other)
    return pairs if len(pairs) else np.argwhere(other)


def count_predicates(images: Iterable[dict], num_classes: int, num_predicates: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the relations and the candidate pairs of the training split by class of subject and object.

    Args:
        images: per image `boxes` (N, 4) xyxy, `labels` (N,) from 1, and R `relations` (R, 3), subject, object and
            predicate from 1; without relations between boxes that do not overlap, but with duplicates.
        num_classes, num_predicates: C and P, with background.

    Returns the numbers of relations (C, C, P) int64 and of candidate pairs (C, C) int64. Pairs with a relation are
    candidates too.
    """
    relations = np.zeros((num_classes, num_classes, num_predicates), np.int64)
    candidates = np.zeros((num_classes, num_classes), np.int64)
    for image in images:
        labels = np.asarray(image["labels"])
        rows = np.asarray(image["relations"]).reshape(-1, 3)
        subjects, objects, predicates = rows.T
        np.add.at(relations, (labels[subjects], labels[objects], predicates), 1)
        subjects, objects = candidate_pairs(np.asarray(image["boxes"])).T
        np.add.at(candidates, (labels[subjects], labels[objects]), 1)
    return relations, candidates


def table_graphs(table: DetectionTable, pairs_apart: bool = False) -> Iterator[dict]:
    """Yield the images of a training table in the form that `count_predicates` takes. Images without relations are left
    out.

    Relations between boxes that do not overlap (with 1 added to widths and heights) are left out too, unless
    `pairs_apart` is true.
    """
    for row in map(table.row, range(len(table))):
        boxes = row["objects"]["bbox"]
        columns = row["relations"]
        relations = np.stack([columns["subject"], columns["object"], columns["predicate"] + 1], 1)
        if not pairs_apart:
            ends = boxes[relations[:, :2]]
            overlap = intersection_area(ends[:, 0], ends[:, 1], pixel=1) > 0
            relations = relations[overlap]
        if len(relations):
            yield {
                "boxes": boxes,
                "labels": row["objects"]["category"] + 1,
                "relations": relations,
            }


def log_frequencies(relations: np.ndarray, candidates: np.ndarray) -> Tensor:
    """Return log(share + 1e-3), (C, C, P) float32, where share is the share of each of P predicates among the pairs of
    two classes.

    relations, candidates: see `count_predicates`. The count of predicate 0, no relation, is the number of candidate
    pairs plus 1.
    """
    counts = relations.copy()
    counts[:, :, 0] = candidates + 1
    shares = counts / counts.sum(2, keepdims=True)
    return torch.from_numpy(np.log(shares + 1e-3)).float()


def predicate_weights(relations: np.ndarray, power: float = 0.5) -> Tensor:
    """Return weights (P,) float32 of the P predicates for the predicate loss, larger for rarer predicates.

    relations: (C, C, P), see `count_predicates`. A predicate has the weight (largest count / its count) ** power; these
    weights are then scaled so that the weighted number of relations stays the same. Background and predicates without
    relations keep weight 1.
    """
    return _scaled_weights(relations, lambda counts: (counts.max() / counts) ** power)


def class_balanced_weights(relations: np.ndarray, beta: float) -> Tensor:
    """Return weights (P,) float32 of the P predicates, (1 - beta) / (1 - beta ** count), the inverse of the effective
    number of relations (Cui et al., CVPR 2019, equation 3). Background, predicates without relations and the scale are
    as in `predicate_weights`."""
    return _scaled_weights(relations, lambda counts: (1 - beta) / -np.expm1(counts * np.log(beta)))


def _scaled_weights(relations: np.ndarray, weight_of: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    counts = relations.sum((0, 1)).astype(np.float64)
    counts[0] = 0
    seen = counts > 0
    weights = np.ones(len(counts))
    if seen.any():
        weights[seen] = weight_of(counts[seen])
        weighted = (weights * counts)[seen].sum()
        weights[seen] *= counts.sum() / weighted
    return torch.from_numpy(weights).float()


def log_prior(relation_counts: Tensor) -> Tensor:
    """Return the logarithm of the share of all relations that each of P predicates has, (P,) float32, and 0 for the
    background. A predicate without relations counts as if it had one.

    relation_counts: (C, C, P), see `count_predicates`.
    """
    counts = relation_counts.sum((0, 1)).double().clamp(min=1)
    counts[0] = 0
    shares = counts[1:] / counts.sum()
    return F.pad(shares.log(), (1, 0)).float()


class FrequencyBias(nn.Module):
    """A trainable table of predicate logits by class of subject and object, which starts as `log_frequencies`."""

    def __init__(self, log_frequency: Tensor):
        """Build the table from `log_frequency` (C, C, P), by class of subject, class of object and predicate."""
        super().__init__()
        self.num_classes, _, num_predicates = log_frequency.shape
        self.table = nn.Embedding.from_pretrained(
            torch.zeros(self.num_classes**2, num_predicates),
            freeze=False,
        )
        self.start_from(log_frequency)

    @torch.no_grad()
    def start_from(self, log_frequency: Tensor) -> None:
        """Set the table to `log_frequency` (C, C, P), by class of subject, class of object and predicate."""
        self.table.weight.copy_(log_frequency.flatten(0, 1))

    def forward(self, subjects: Tensor, objects: Tensor) -> Tensor:
        """Return the logits (R, P) of P predicates for R pairs from the class labels (R,) of their subjects and
        objects."""
        return self.table(subjects * self.num_classes + objects)

    def expected(self, subjects: Tensor, objects: Tensor) -> Tensor:
        """Return the expected predicate logits (R, P) of R pairs whose classes are known as probabilities only: the
        table's logits of the P predicates, averaged over the probabilities (R, C) of the subjects and of the
        objects."""
        parts = []
        chunks = zip(subjects.split(PAIRS_PER_CHUNK), objects.split(PAIRS_PER_CHUNK), strict=True)
        for of_subjects, of_objects in chunks:
            joint = of_subjects[:, :, None] * of_objects[:, None, :]  # (R, C, C)
            parts.append(joint.flatten(1) @ self.table.weight)
        return torch.cat(parts)


class FrequencyHead(nn.Module):
    """The baseline, which predicts predicates only from the training counts and has no trained parameters. In sgcls and
    sgdet it uses the labels that the detector predicts."""

    loss_names = ()
    reads_union = False

    def __init__(self, mode: str, log_frequency: Tensor):
        super().__init__()
        self.mode = mode
        self.frequency = FrequencyBias(log_frequency).requires_grad_(False)

    def forward(self, batch: RelationBatch) -> RelationOutput:
        if self.mode == "predcls":
            logits = certain_logits(batch.labels, self.frequency.num_classes)
            labels = batch.labels
        else:
            logits = batch.logits
            labels = batch.logits[:, 1:].argmax(1) + 1
        subjects, objects = labels[batch.pairs].unbind(1)
        return RelationOutput(logits, self.frequency(subjects, objects), labels)
