"""Samples the object pairs that a relation head is trained on, and selects those it classifies in evaluation.

All randomness comes from the given generator (None: torch's default).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from toolkit.scene_graphs.geometry import iou_plus_one


@dataclass
class SampledPairs:
    """pairs: (S, 2) int64 subject, object rows of this image, foreground first. labels: (S,) predicates, 0 = none.
    related: (n, n) bool, symmetric: is there a relation between the two, in whatever direction?"""

    pairs: Tensor
    labels: Tensor
    related: Tensor


def relation_matrix(relations: Tensor, num_objects: int, generator: Generator | None = None) -> Tensor:
    """(R, 3) subject, object, predicate from 1 -> (n, n) int64 with one predicate per ordered pair, 0 = none.

    A pair that is annotated more than once gets one of its predicates by chance, differently every time; those that
    are listed repeatedly weigh more.
    """
    matrix = torch.zeros(num_objects, num_objects, dtype=torch.int64, device=relations.device)
    if not len(relations):
        return matrix
    draw = torch.rand(len(relations), generator=generator).to(relations.device)
    cell = relations[:, 0] * num_objects + relations[:, 1]
    order = draw.argsort(stable=True)
    last = torch.zeros(num_objects**2, dtype=torch.int64, device=relations.device)
    rank = torch.arange(len(relations), device=relations.device)
    last = last.scatter_reduce(0, cell[order], rank, "amax")
    winners = order[last[cell].unique()]
    matrix.view(-1)[cell[winners]] = relations[winners, 2]
    return matrix


def sample_given_boxes(
    relations: Tensor, batch_size: int = 1024, positive_fraction: float = 0.25, generator: Generator | None = None
) -> SampledPairs:
    """Pairs of one image whose boxes are given (predcls, sgcls).

    relations: (n, n) of `relation_matrix`. At most batch_size * positive_fraction related pairs, filled up to
    batch_size with pairs of two different objects without a relation. A self relation is sampled like any other.
    """
    foreground = relations.nonzero()
    free = relations == 0
    free.fill_diagonal_(False)
    foreground = _draw(foreground, int(batch_size * positive_fraction), generator, always=False)
    background = _draw(free.nonzero(), batch_size - len(foreground), generator)
    pairs = torch.cat([foreground, background])
    labels = relations[pairs[:, 0], pairs[:, 1]]
    return SampledPairs(pairs, labels, (relations > 0) | (relations > 0).T)


def sample_detected_boxes(
    boxes_xyxy: Tensor,
    labels: Tensor,
    true_boxes_xyxy: Tensor,
    true_labels: Tensor,
    relations: Tensor,
    fg_iou: float = 0.5,
    require_overlap: bool = True,
    per_relation: int = 4,
    batch_size: int = 1024,
    positive_fraction: float = 0.25,
    generator: Generator | None = None,
) -> SampledPairs:
    """Pairs of the n proposals of one image with m annotated objects (sgdet).

    boxes_xyxy (n, 4), labels (n,) of the proposals, 0 = no object; relations: (m, m) of `relation_matrix`. A proposal
    stands for an annotated object of the same label and IoU > fg_iou (+1 widths). Of the proposal pairs that stand
    for one relation at most `per_relation` are drawn, weighted by IoU_subject x IoU_object; one pair may carry
    several labels. Background pairs are two proposals with a label that stand for no relation and, if
    `require_overlap`, have 0 < IoU < 1. No pair at all gives one row 0, 0 without relation if there is a proposal.
    """
    ious = iou_plus_one(true_boxes_xyxy[:, None], boxes_xyxy[None])  # (m, n)
    match = (true_labels[:, None] == labels[None]) & (ious > fg_iou)
    subject, obj = relations.nonzero().unbind(1)
    both = match[subject][:, :, None] & match[obj][:, None, :]  # (relations, n, n)
    related = both.any(0) | both.any(0).T
    both &= ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    relation, head, tail = both.nonzero().unbind(1)
    free = _background_candidates(boxes_xyxy, labels, require_overlap)
    free[head, tail] = False
    weight = ious[subject[relation], head] * ious[obj[relation], tail]
    kept = _draw_per_group(relation, weight, per_relation, generator)
    predicate = relations[subject, obj][relation]
    foreground = torch.stack([head, tail, predicate], 1)[kept]
    foreground = _draw(foreground, int(batch_size * positive_fraction), generator, always=False)
    background = _draw(free.nonzero(), batch_size - len(foreground), generator)
    rows = torch.cat([foreground, F.pad(background, (0, 1))])
    if not len(rows) and len(labels):
        rows = rows.new_zeros(1, 3)
    return SampledPairs(rows[:, :2], rows[:, 2], related)


def join_samples(samples: Sequence[SampledPairs], num_objects: Sequence[int]) -> dict[str, Tensor | list[int]]:
    """The fields `pairs`, `num_pairs`, `relation_labels` and `related` of a RelationBatch from those of its images."""
    width = max(num_objects, default=0)
    starts = [sum(num_objects[:i]) for i in range(len(num_objects))]
    return {
        "pairs": torch.cat([sample.pairs + start for sample, start in zip(samples, starts, strict=True)]),
        "num_pairs": [len(sample.pairs) for sample in samples],
        "relation_labels": torch.cat([sample.labels for sample in samples]),
        "related": torch.cat([F.pad(sample.related, (0, width - len(sample.related))) for sample in samples]),
    }


def pairs_to_ask(boxes_xyxy: Tensor, require_overlap: bool = False) -> Tensor:
    """(K, 2) every ordered pair of one image's objects, of those that overlap (+1 widths) if asked; [[0, 0]] if none
    is left and there is at least one object."""
    allowed = ~torch.eye(len(boxes_xyxy), dtype=torch.bool, device=boxes_xyxy.device)
    if require_overlap:
        allowed &= iou_plus_one(boxes_xyxy[:, None], boxes_xyxy[None]) > 0
    pairs = allowed.nonzero()
    return pairs if len(pairs) or not len(boxes_xyxy) else pairs.new_zeros(1, 2)


def _background_candidates(boxes_xyxy: Tensor, labels: Tensor, require_overlap: bool) -> Tensor:
    if require_overlap:
        ious = iou_plus_one(boxes_xyxy[:, None], boxes_xyxy[None])
        free = (ious > 0) & (ious < 1)
    else:
        free = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return free & (labels > 0)[:, None] & (labels > 0)[None]


def _draw(rows: Tensor, count: int, generator: Generator | None, always: bool = True) -> Tensor:
    """`count` random rows in random order; all of them, in order, when there are not more (unless `always`)."""
    if not always and len(rows) <= count:
        return rows
    return rows[torch.randperm(len(rows), generator=generator).to(rows.device)[:count]]


def _draw_per_group(group: Tensor, weight: Tensor, count: int, generator: Generator | None) -> Tensor:
    """Rows kept of each group: all, or `count` drawn without replacement in proportion to `weight`.

    Exponential clocks with rate `weight` ring in the order of such a draw (Efraimidis and Spirakis, 2006).
    """
    clock = torch.empty(len(group)).exponential_(generator=generator).to(weight) / weight
    order = clock.argsort()
    order = order[group[order].argsort(stable=True)]
    sizes = torch.bincount(group)
    place = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group[order]]
    return order[place < count].sort().values
