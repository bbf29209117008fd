"""The objects and pairs that a relation head classifies: annotated ones, or detections; in training a sample of the
pairs. All randomness comes from the given generator (None: torch's default)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import on_host
from toolkit.base.box_ops import moved_ends
from toolkit.detectors.scene_graphs.geometry import intersection_areas, iou_plus_one
from toolkit.step.freezing import eval_mode


@dataclass
class SampledPairs:
    """The sampled pairs of one image.

    pairs: (S, 2) int64 subject, object rows of this image, foreground first. labels: (S,) predicates, 0 = none.
    related: (n, n) bool, symmetric: is there a relation between the two, in either direction?
    """

    pairs: Tensor
    labels: Tensor
    related: Tensor


def annotated_graph(target: Mapping) -> dict[str, Tensor]:
    """Return `boxes (N, 4)`, `labels (N,)` and `relations (R, 3)` of a target, without crowd regions; all from 0. A
    target with `attributes (N, A)` adds these too, from 1."""
    keep = target["iscrowd"] == 0
    relations = target["relations"]
    relations = relations[keep[relations[:, :2]].all(1)]
    ends = (keep.cumsum(0) - 1)[relations[:, :2]]
    relations = torch.cat([ends, relations[:, 2:]], 1)
    names = [name for name in ("boxes", "labels", "attributes") if name in target]
    return {name: target[name][keep] for name in names} | {"relations": relations}


def given_objects(
    model: nn.Module,
    maps: Mapping,
    images_hw: Sequence,
    truths: Sequence[Mapping],
    truths_on_host: Sequence[Mapping],
) -> dict:
    """Return fields of a RelationBatch for annotated boxes; in sgcls also the detector's class logits.

    truths: annotated graphs on the device. truths_on_host: the same on the host.
    """
    boxes, boxes_on_host = ([graph["boxes"] for graph in graphs] for graphs in (truths, truths_on_host))
    pooled, fields = _looked_at(model, maps, images_hw, boxes, boxes_on_host)
    fields["labels"] = torch.cat([truth["labels"] for truth in truths]) + 1
    if "attributes" in truths[0]:
        fields["attributes"] = torch.cat([truth["attributes"] for truth in truths])
    if model.mode == "sgcls":
        fields["logits"] = model.detector.class_logits(maps, _behind(model, boxes), pooled).detach()
    return fields


def _looked_at(
    model: nn.Module,
    maps: Mapping,
    images_hw: Sequence,
    boxes: list[Tensor],
    on_host: list[Tensor],
) -> tuple[Tensor, dict]:
    """Return the pooled features of boxes, and the fields of a RelationBatch that every kind of boxes has."""
    pooled = model.detector.box_pool(
        dict(maps),
        _behind(model, boxes),
        list(images_hw),
        _behind(model, on_host),
    )
    counts = [len(image_boxes) for image_boxes in boxes]
    features = model.box_features(pooled)
    return pooled, {"boxes_xyxy": torch.cat(boxes), "num_objects": counts, "roi_features": features}


def _behind(model: nn.Module, boxes: list[Tensor]) -> list[Tensor]:
    """Return the boxes as the detector below takes them, which end behind their last pixel; see `whole_pixels`."""
    return [moved_ends(image_boxes, model.last_pixel) for image_boxes in boxes] if model.last_pixel else boxes


def detected_objects(
    model: nn.Module,
    maps: Mapping,
    images_hw: Sequence,
    truths: Sequence[Mapping] | None,
    annotated_on_host: Sequence[Mapping] | None,
    outputs: Mapping | None = None,
) -> tuple[dict, list[Tensor], dict]:
    """Return fields of a RelationBatch for detected objects, their boxes on the host, and the labels (and attributes)
    of the annotated objects that they overlap, on the host too.

    The last two need truths, see `given_objects`. outputs: the detector's outputs for the maps in evaluation, if known.

    In training the annotated boxes are proposals too, unless the settings say otherwise: a weak detector finds few of
    the objects that have relations.
    """
    annotated = [truth["boxes"] for truth in truths] if model.training and model.add_annotated_boxes else None
    annotated = None if annotated is None else _behind(model, annotated)
    with eval_mode(model.detector):
        detections = model.detector.detect_with_logits(
            maps,
            images_hw,
            top_k=model.detections_per_image,
            further_boxes=annotated,
            outputs=outputs,
        )
    boxes = [moved_ends(image["boxes"], -model.last_pixel) for image in detections]
    boxes_on_host = [moved_ends(on_host(image)["boxes"], -model.last_pixel) for image in detections]
    fields = _looked_at(model, maps, images_hw, boxes, boxes_on_host)[1]
    for name in ("logits", "boxes_per_class"):
        fields[name] = torch.cat([image[name] for image in detections]).detach()
    fields["found_labels"] = torch.cat([image["labels"] for image in detections]) + 1
    fields["boxes_per_class"] = moved_ends(fields["boxes_per_class"], -model.last_pixel)
    learned = {}
    if annotated_on_host is not None:
        images = zip(boxes_on_host, annotated_on_host, strict=True)
        rows, labels = zip(*(match_labels(*image, model.match_iou) for image in images), strict=True)
        learned["labels"] = torch.cat(labels)
        if "attributes" in annotated_on_host[0]:
            padded = [F.pad(truth["attributes"], (0, 0, 0, 1)) for truth in annotated_on_host]  # row -1: no object
            learned["attributes"] = torch.cat([ids[r] for ids, r in zip(padded, rows, strict=True)])
    return fields, boxes_on_host, learned


def match_labels(boxes_xyxy: Tensor, truth: Mapping, match_iou: float) -> tuple[Tensor, Tensor]:
    """Return the (K,) row of the annotated object that each detection overlaps most (-1: none by `match_iou`), and its
    label from 1."""
    count = len(boxes_xyxy)
    if not len(truth["boxes"]) or not count:
        return boxes_xyxy.new_full((count,), -1, dtype=torch.int64), boxes_xyxy.new_zeros(count, dtype=torch.int64)
    value, best = iou_plus_one(truth["boxes"][:, None], boxes_xyxy[None]).max(0)
    enough = value >= match_iou
    return torch.where(enough, best, -1), torch.where(enough, truth["labels"][best] + 1, 0)


def sampled_pairs(
    model: nn.Module,
    boxes: Sequence[Tensor],
    truths: Sequence[Mapping] | None,
    labels: Tensor | None = None,
    draws: Sequence[Generator | None] = (),
) -> dict:
    """Return `pairs`, `num_pairs`, `relation_labels`, `related` of a RelationBatch: a sample in training, else all
    pairs.

    boxes: (N_i, 4) of each image. labels: (N,) from 1 of the boxes that the detector found, in training. These and
    the truths are on the host, which decides without waiting. draws: generator of each image; None: torch's own.
    """
    counts = [len(b) for b in boxes]
    if not model.training:
        overlap = model.require_overlap and not model.given_boxes
        samples = [_asked(model, b, None if truths is None else truths[i], overlap) for i, b in enumerate(boxes)]
        return join_samples(samples, counts)
    size = {"batch_size": model.pairs_per_image, "positive_fraction": model.positive_fraction}
    if model.require_overlap and not model.given_boxes:
        truths = [_without_relations_apart(truth) for truth in truths]
    draws = draws or [None] * len(truths)
    matrices = [_matrix(truth, draw) for truth, draw in zip(truths, draws, strict=True)]
    if model.given_boxes:
        images = zip(matrices, draws, strict=True)
        return join_samples(
            [sample_given_boxes(matrix, **size, generator=draw) for matrix, draw in images],
            counts,
        )
    size |= {"fg_iou": model.match_iou, "per_relation": model.pairs_per_relation}
    size["require_overlap"] = model.require_overlap
    samples = []
    for b, image_labels, truth, matrix, draw in zip(boxes, labels.split(counts), truths, matrices, draws, strict=True):
        seen = (b, image_labels, truth["boxes"], truth["labels"] + 1, matrix)
        samples.append(sample_detected_boxes(*seen, **size, generator=draw))
    return join_samples(samples, counts)


def _without_relations_apart(truth: Mapping) -> dict:
    """Remove relations between boxes that do not overlap (+1 widths): evaluation does not consider such pairs."""
    subjects, objects = truth["boxes"][truth["relations"][:, :2]].unbind(1)
    return {**truth, "relations": truth["relations"][intersection_areas(subjects, objects) > 0]}


def _asked(model: nn.Module, boxes: Tensor, truth: Mapping | None, require_overlap: bool) -> SampledPairs:
    """Return all pairs of an image with their annotated predicates; of several predicates, always the same one."""
    pairs = pairs_to_ask(boxes, require_overlap)
    labels = pairs.new_zeros(len(pairs))
    if truth is not None and len(truth["boxes"]) and len(pairs):
        matrix = _matrix(truth, Generator().manual_seed(0))
        if model.given_boxes:
            labels = matrix[pairs[:, 0], pairs[:, 1]]
        else:
            ends = match_labels(boxes, truth, model.match_iou)[0][pairs]
            labels = torch.where(
                (ends >= 0).all(1),
                matrix[ends[:, 0], ends[:, 1]],
                0,
            )
    related = torch.zeros(
        len(boxes),
        len(boxes),
        dtype=torch.bool,
        device=boxes.device,
    )
    return SampledPairs(pairs, labels, related)


def _matrix(truth: Mapping, draw: Generator | None) -> Tensor:
    """Return `relation_matrix` of a graph, whose predicates count from 0."""
    return relation_matrix(
        truth["relations"] + torch.tensor([0, 0, 1]),
        len(truth["boxes"]),
        generator=draw,
    )


def count_sampled_pairs(model: nn.Module, targets: Sequence[Mapping]) -> dict[str, float]:
    """Count the pairs, objects (those with attributes, too) and images with objects that `sampled_pairs` will give for
    annotated boxes."""
    pairs = objects = images = named = 0
    for truth in map(annotated_graph, targets):
        count = len(truth["boxes"])
        objects = objects + count
        images = images + (count > 0)
        named += int((truth["attributes"].sum(1) > 0).sum()) if "attributes" in truth else 0
        if not model.training:
            pairs += count * (count - 1) if count != 1 else 1
            continue
        ends = truth["relations"][:, :2].unique(dim=0)
        apart = int((ends[:, 0] != ends[:, 1]).sum())
        positive = min(len(ends), int(model.pairs_per_image * model.positive_fraction))
        pairs += positive + min(count * (count - 1) - apart, model.pairs_per_image - positive)
    counts = {"pairs": pairs, "objects": objects, "images": images, "named_objects": named}
    return {f"relation_{what}": float(count) for what, count in counts.items()}


def relation_matrix(
    relations: Tensor,
    num_objects: int,
    one_of_each: bool = True,
    generator: Generator | None = None,
) -> Tensor:
    """Convert (R, 3) subject, object, predicate from 1 -> (n, n) int64 with one predicate per ordered pair, 0 = none.

    A pair that is annotated more than once gets one of its predicates by chance, differently every time. one_of_each:
    drawn uniformly from the list, so that repeated ones weigh more; otherwise each further one takes over with
    probability 1/2 (like the original when it does not filter duplicates).
    """
    matrix = torch.zeros(num_objects, num_objects, dtype=torch.int64, device=relations.device)
    if not len(relations):
        return matrix
    draw = torch.rand(len(relations), generator=generator).to(relations.device)
    cell = relations[:, 0] * num_objects + relations[:, 1]
    if one_of_each:
        priority = draw
    else:  # the last one that takes over wins; the first of a pair takes over an empty cell
        first = torch.full((num_objects**2,), len(relations), device=relations.device)
        position = torch.arange(len(relations), device=relations.device)
        first = first.scatter_reduce(0, cell, position, "amin")
        priority = torch.where(
            (draw > 0.5) | (first[cell] == position),
            position,
            -1,
        )
    order = priority.argsort(stable=True)
    last = torch.zeros(num_objects**2, dtype=torch.int64, device=relations.device)
    rank = torch.arange(len(relations), device=relations.device)
    last = last.scatter_reduce(0, cell[order], rank, "amax")
    winners = order[last[cell].unique()]
    matrix.view(-1)[cell[winners]] = relations[winners, 2]
    return matrix


def sample_given_boxes(
    relations: Tensor,
    batch_size: int = 1024,
    positive_fraction: float = 0.25,
    generator: Generator | None = None,
) -> SampledPairs:
    """Sample pairs of one image whose boxes are given (predcls, sgcls).

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
    """Sample pairs of the n proposals of one image with m annotated objects (sgdet).

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
    """Join the fields `pairs`, `num_pairs`, `relation_labels` and `related` of a RelationBatch from those of its
    images."""
    width = max(num_objects, default=0)
    starts = [sum(num_objects[:i]) for i in range(len(num_objects))]
    return {
        "pairs": torch.cat([sample.pairs + start for sample, start in zip(samples, starts, strict=True)]),
        "num_pairs": [len(sample.pairs) for sample in samples],
        "relation_labels": torch.cat([sample.labels for sample in samples]),
        "related": torch.cat([F.pad(sample.related, (0, width - len(sample.related))) for sample in samples]),
    }


def pairs_to_ask(boxes_xyxy: Tensor, require_overlap: bool = False) -> Tensor:
    """Return (K, 2) every ordered pair of one image's objects, only overlapping ones (+1 widths) if `require_overlap`;
    [[0, 0]] if none is left and there is at least one object."""
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
    """Draw `count` random rows in random order; all of them, in order, when there are not more (unless `always`)."""
    if not always and len(rows) <= count:
        return rows
    return rows[torch.randperm(len(rows), generator=generator).to(rows.device)[:count]]


def _draw_per_group(group: Tensor, weight: Tensor, count: int, generator: Generator | None) -> Tensor:
    """Return the rows kept of each group: all, or `count` drawn without replacement in proportion to `weight`.

    Exponential clocks with rate `weight` ring in the order of such a draw (Efraimidis and Spirakis, 2006).
    """
    clock = torch.empty(len(group)).exponential_(generator=generator).to(weight) / weight
    order = clock.argsort()
    order = order[group[order].argsort(stable=True)]
    sizes = torch.bincount(group)
    position = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group[order]]
    return order[position < count].sort().values
