"""The objects and pairs that a relation head classifies: annotated objects or detections, and in training a sample of
their pairs. All random draws use the generators given (None: torch's default)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from toolkit.base.batch import on_host
from toolkit.base.box_ops import moved_ends
from toolkit.detectors.scene_graphs.box_features import intersection_areas, iou_plus_one
from toolkit.step.freezing import eval_mode


@dataclass
class SampledPairs:
    """The sampled pairs of one image with n objects.

    pairs: (S, 2) int64, rows of subject and object in this image; pairs with a relation come first. labels: (S,)
    predicates, 0 for no relation. related: (n, n) bool, symmetric, True if there is a relation between the two objects
    in either direction.
    """

    pairs: Tensor
    labels: Tensor
    related: Tensor


def annotated_graph(target: Mapping) -> dict[str, Tensor]:
    """Return `boxes (N, 4)`, `labels (N,)` and R `relations (R, 3)` of a target, without crowd regions; labels, objects
    and predicates are counted from 0. For a target with attributes, also `attributes (N, A)`, at most A per object,
    counted from 1."""
    keep = target["iscrowd"] == 0
    relations = target["relations"]
    relations = relations[keep[relations[:, :2]].all(1)]
    row_of = keep.cumsum(0) - 1  # objects kept: yes, no, yes; rows of these: 0, -, 1
    ends = row_of[relations[:, :2]]
    graph = {name: target[name][keep] for name in ("boxes", "labels", "attributes") if name in target}
    graph["relations"] = torch.cat([ends, relations[:, 2:]], 1)
    return graph


def given_objects(
    model: nn.Module,
    maps: Mapping,
    images_hw: Sequence,
    truths: Sequence[Mapping],
    truths_on_host: Sequence[Mapping],
) -> dict:
    """Return the fields of a `RelationBatch` that annotated boxes determine; in sgcls also the detector's class logits
    for these boxes.

    Args:
        model: the `SceneGraph`.
        maps, images_hw: results of the detector's `features`.
        truths: the annotated graphs, see `annotated_graph`, on the device.
        truths_on_host: the same on the host.
    """
    boxes = [graph["boxes"] for graph in truths]
    boxes_on_host = [graph["boxes"] for graph in truths_on_host]
    pooled, fields = _looked_at(model, maps, images_hw, boxes, boxes_on_host)
    fields["labels"] = torch.cat([truth["labels"] for truth in truths]) + 1
    if "attributes" in truths[0]:
        fields["attributes"] = torch.cat([truth["attributes"] for truth in truths])
    if model.mode == "sgcls":
        logits = model.detector.class_logits(maps, _behind(model, boxes), pooled)
        fields["logits"] = logits.detach()
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
    fields = {
        "boxes_xyxy": torch.cat(boxes),
        "num_objects": [len(image_boxes) for image_boxes in boxes],
        "roi_features": model.box_features(pooled),
    }
    return pooled, fields


def _behind(model: nn.Module, boxes: list[Tensor]) -> list[Tensor]:
    """Return the boxes as the detector below takes them, which end behind their last pixel; see `whole_pixels`."""
    if not model.last_pixel:
        return boxes
    return [moved_ends(image_boxes, model.last_pixel) for image_boxes in boxes]


def detected_objects(
    model: nn.Module,
    maps: Mapping,
    images_hw: Sequence,
    truths: Sequence[Mapping] | None,
    annotated_on_host: Sequence[Mapping] | None,
    outputs: Mapping | None = None,
) -> tuple[dict, list[Tensor], dict]:
    """Return the fields of a `RelationBatch` that detected objects determine, the boxes of these objects on the host,
    and, on the host too, the labels (and attributes) of the annotated objects that they overlap.

    In training the annotated boxes are proposals too, unless the settings say otherwise: a weak detector finds few of
    the objects that have relations.

    Args:
        model: the `SceneGraph`.
        maps, images_hw: results of the detector's `features`.
        truths: the annotated graphs on the device; needed in training only.
        annotated_on_host: the annotated graphs on the host; None: the last result is empty.
        outputs: the detector's outputs for these maps in evaluation, if they are already computed.
    """
    annotated = None
    if model.training and model.add_annotated_boxes:
        annotated = _behind(model, [truth["boxes"] for truth in truths])
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
    _, fields = _looked_at(model, maps, images_hw, boxes, boxes_on_host)
    fields["logits"] = torch.cat([image["logits"] for image in detections]).detach()
    boxes_per_class = torch.cat([image["boxes_per_class"] for image in detections]).detach()
    fields["boxes_per_class"] = moved_ends(boxes_per_class, -model.last_pixel)
    fields["found_labels"] = torch.cat([image["labels"] for image in detections]) + 1
    learned = {}
    if annotated_on_host is not None:
        learned = _overlapped(boxes_on_host, annotated_on_host, model.match_iou)
    return fields, boxes_on_host, learned


def _overlapped(boxes: Sequence[Tensor], truths: Sequence[Mapping], match_iou: float) -> dict[str, Tensor]:
    """Return `labels (N,)`, and `attributes (N, A)` if the data have them, of the objects that the boxes overlap."""
    labels = []
    attributes = []
    for image_boxes, truth in zip(boxes, truths, strict=True):
        rows, of_boxes = match_labels(image_boxes, truth, match_iou)
        labels.append(of_boxes)
        if "attributes" in truth:
            with_none = F.pad(truth["attributes"], (0, 0, 0, 1))  # the last row, -1: no object
            attributes.append(with_none[rows])
    learned = {"labels": torch.cat(labels)}
    if attributes:
        learned["attributes"] = torch.cat(attributes)
    return learned


def match_labels(boxes_xyxy: Tensor, truth: Mapping, match_iou: float) -> tuple[Tensor, Tensor]:
    """Return, for each of K detections, the row of the annotated object that it overlaps most (-1 if the IoU is below
    `match_iou`), and the label of this object from 1 (0 for none), both (K,).

    boxes_xyxy: (K, 4). truth: see `annotated_graph`.
    """
    count = len(boxes_xyxy)
    if not len(truth["boxes"]) or not count:
        no_rows = boxes_xyxy.new_full((count,), -1, dtype=torch.int64)
        no_labels = boxes_xyxy.new_zeros(count, dtype=torch.int64)
        return no_rows, no_labels
    value, best = iou_plus_one(truth["boxes"][:, None], boxes_xyxy[None]).max(0)
    enough = value >= match_iou
    rows = torch.where(enough, best, -1)
    labels = torch.where(enough, truth["labels"][best] + 1, 0)
    return rows, labels


def sampled_pairs(
    model: nn.Module,
    boxes: Sequence[Tensor],
    truths: Sequence[Mapping] | None,
    labels: Tensor | None = None,
    draws: Sequence[Generator | None] = (),
) -> dict:
    """Return the fields `pairs`, `num_pairs`, `relation_labels` and `related` of a `RelationBatch`: a sample of the
    pairs in training, all pairs in evaluation. All arguments are on the host, so that nothing waits for the device.

    Args:
        model: the `SceneGraph`, whose settings are used.
        boxes: (N_i, 4) of each image i.
        truths: annotated graph of each image; None: not known, in evaluation only.
        labels: (N,) from 1, of the annotated objects that detections overlap, see `detected_objects`; needed for
            detected boxes in training.
        draws: a random generator for each image; None: torch's own.
    """
    counts = [len(b) for b in boxes]
    if not model.training:
        overlap = model.require_overlap and not model.given_boxes
        samples = []
        for i, image_boxes in enumerate(boxes):
            truth = None if truths is None else truths[i]
            samples.append(_all_pairs(model, image_boxes, truth, overlap))
        return join_samples(samples, counts)
    if model.require_overlap and not model.given_boxes:
        truths = [_without_relations_apart(truth) for truth in truths]
    draws = draws or [None] * len(truths)
    matrices = [_matrix(truth, draw) for truth, draw in zip(truths, draws, strict=True)]
    samples = []
    if model.given_boxes:
        for matrix, draw in zip(matrices, draws, strict=True):
            sample = sample_given_boxes(
                matrix,
                batch_size=model.pairs_per_image,
                positive_fraction=model.positive_fraction,
                generator=draw,
            )
            samples.append(sample)
        return join_samples(samples, counts)
    images = zip(boxes, labels.split(counts), truths, matrices, draws, strict=True)
    for image_boxes, image_labels, truth, matrix, draw in images:
        sample = sample_detected_boxes(
            image_boxes,
            image_labels,
            truth["boxes"],
            truth["labels"] + 1,
            matrix,
            fg_iou=model.match_iou,
            require_overlap=model.require_overlap,
            per_relation=model.pairs_per_relation,
            batch_size=model.pairs_per_image,
            positive_fraction=model.positive_fraction,
            generator=draw,
        )
        samples.append(sample)
    return join_samples(samples, counts)


def _without_relations_apart(truth: Mapping) -> dict:
    """Remove relations between boxes that do not overlap (+1 widths): evaluation does not consider such pairs."""
    relations = truth["relations"]
    subjects, objects = truth["boxes"][relations[:, :2]].unbind(1)
    overlap = intersection_areas(subjects, objects) > 0
    return {**truth, "relations": relations[overlap]}


def _all_pairs(model: nn.Module, boxes: Tensor, truth: Mapping | None, require_overlap: bool) -> SampledPairs:
    """Return all pairs of an image with their annotated predicates; of several predicates, always the same one."""
    pairs = pairs_to_ask(boxes, require_overlap)
    labels = pairs.new_zeros(len(pairs))
    if truth is not None and len(truth["boxes"]) and len(pairs):
        matrix = _matrix(truth, Generator().manual_seed(0))
        if model.given_boxes:
            labels = matrix[pairs[:, 0], pairs[:, 1]]
        else:
            rows, _ = match_labels(boxes, truth, model.match_iou)
            ends = rows[pairs]  # (K, 2) annotated objects, -1: none
            annotated = matrix[ends[:, 0], ends[:, 1]]
            labels = torch.where((ends >= 0).all(1), annotated, 0)
    shape = (len(boxes), len(boxes))
    related = torch.zeros(shape, dtype=torch.bool, device=boxes.device)
    return SampledPairs(pairs, labels, related)


def _matrix(truth: Mapping, draw: Generator | None) -> Tensor:
    """Return `relation_matrix` of a graph, whose predicates count from 0."""
    from_one = truth["relations"] + torch.tensor([0, 0, 1])
    return relation_matrix(from_one, len(truth["boxes"]), generator=draw)


def count_sampled_pairs(model: nn.Module, targets: Sequence[Mapping]) -> dict[str, float]:
    """Return how many pairs, objects, objects with attributes and images with objects `sampled_pairs` will give for
    these targets if boxes are given."""
    pairs = objects = images = named = 0
    for truth in map(annotated_graph, targets):
        count = len(truth["boxes"])
        ordered_pairs = count * (count - 1)
        objects += count
        images += count > 0
        if "attributes" in truth:
            has_any = truth["attributes"].sum(1) > 0
            named += int(has_any.sum())
        if not model.training:
            pairs += ordered_pairs if count != 1 else 1
            continue
        related = truth["relations"][:, :2].unique(dim=0)
        related_to_others = int((related[:, 0] != related[:, 1]).sum())
        positive = min(len(related), int(model.pairs_per_image * model.positive_fraction))
        negative = min(ordered_pairs - related_to_others, model.pairs_per_image - positive)
        pairs += positive + negative
    return {
        "relation_pairs": float(pairs),
        "relation_objects": float(objects),
        "relation_images": float(images),
        "relation_named_objects": float(named),
    }


def relation_matrix(
    relations: Tensor,
    num_objects: int,
    one_of_each: bool = True,
    generator: Generator | None = None,
) -> Tensor:
    """Convert R relations (R, 3), subject, object and predicate from 1, to a matrix (n, n) int64 of n objects with one
    predicate for each ordered pair, and 0 for pairs without a relation.

    For a pair that is annotated more than once, one of its predicates is drawn at random in every call. With
    `one_of_each` it is drawn uniformly from the list, so that repeated predicates are more probable. Otherwise each
    predicate of the list replaces the one before with probability 1/2 (as in the original when it does not filter
    duplicates).
    """
    device = relations.device
    count = len(relations)
    matrix = torch.zeros(num_objects, num_objects, dtype=torch.int64, device=device)
    if not count:
        return matrix
    draw = torch.rand(count, generator=generator).to(device)
    position = torch.arange(count, device=device)
    cell = relations[:, 0] * num_objects + relations[:, 1]  # of the flat matrix
    if one_of_each:
        priority = draw
    else:  # the last one that takes over wins; the first of a pair takes over an empty cell
        first = torch.full((num_objects**2,), count, device=device)
        first = first.scatter_reduce(0, cell, position, "amin")
        takes_over = (draw > 0.5) | (first[cell] == position)
        priority = torch.where(takes_over, position, -1)
    # The highest priority of a cell wins. Of cells 5, 7, 5 with priorities 0.2, 0.9, 0.4 the order is 0, 2, 1; the last
    # of cell 5 in it is number 1, of cell 7 number 2, and the winners are the relations 2 and 1.
    order = priority.argsort(stable=True)
    last = torch.zeros(num_objects**2, dtype=torch.int64, device=device)
    last = last.scatter_reduce(0, cell[order], position, "amax")
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

    relations: (n, n), see `relation_matrix`. The sample has at most batch_size * positive_fraction related pairs, and
    is filled up to batch_size with pairs of two different objects without a relation. A relation of an object with
    itself is sampled like any other.
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
    """Sample pairs of the n detections of one image with m annotated objects (sgdet).

    A detection counts as an annotated object if it has the same label and an IoU above `fg_iou` (1 is added to widths
    and heights). Of the pairs of detections that count as one relation, at most `per_relation` are drawn, with weights
    IoU_subject x IoU_object; one pair may have several labels. Background pairs are two detections with a label that
    count as no relation and, if `require_overlap`, have 0 < IoU < 1. If this gives no pairs at all, the result is the
    one row 0, 0 without relation, provided that there is a detection.

    Args:
        boxes_xyxy, labels: (n, 4) and (n,) of the detections; label 0 means that a detection overlaps no object.
        true_boxes_xyxy, true_labels: (m, 4) and (m,) of the annotated objects, labels from 1.
        relations: (m, m), see `relation_matrix`.
        batch_size: largest number of pairs.
        positive_fraction: largest share of related pairs among them.
    """
    ious = iou_plus_one(true_boxes_xyxy[:, None], boxes_xyxy[None])  # (m, n)
    match = (true_labels[:, None] == labels[None]) & (ious > fg_iou)
    subject, obj = relations.nonzero().unbind(1)
    # (relations, n, n): whether detections i and j stand for the subject and for the object of a relation
    both = match[subject][:, :, None] & match[obj][:, None, :]
    either = both.any(0)
    related = either | either.T
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    both &= ~itself
    relation, head, tail = both.nonzero().unbind(1)
    free = _background_candidates(boxes_xyxy, labels, require_overlap)
    free[head, tail] = False
    weight = ious[subject[relation], head] * ious[obj[relation], tail]
    kept = _draw_per_group(relation, weight, per_relation, generator)
    predicate = relations[subject, obj][relation]
    foreground = torch.stack([head, tail, predicate], 1)[kept]
    foreground = _draw(foreground, int(batch_size * positive_fraction), generator, always=False)
    background = _draw(free.nonzero(), batch_size - len(foreground), generator)
    without_relation = F.pad(background, (0, 1))  # predicate 0
    rows = torch.cat([foreground, without_relation])
    if not len(rows) and len(labels):
        rows = rows.new_zeros(1, 3)
    return SampledPairs(rows[:, :2], rows[:, 2], related)


def join_samples(samples: Sequence[SampledPairs], num_objects: Sequence[int]) -> dict[str, Tensor | list[int]]:
    """Join the samples of several images, of which each has `num_objects` objects, to the fields `pairs`, `num_pairs`,
    `relation_labels` and `related` of a `RelationBatch`."""
    width = max(num_objects, default=0)
    start = 0  # of an image's objects among all
    pairs = []
    related = []
    for sample, count in zip(samples, num_objects, strict=True):
        pairs.append(sample.pairs + start)
        related.append(F.pad(sample.related, (0, width - len(sample.related))))
        start += count
    return {
        "pairs": torch.cat(pairs),
        "num_pairs": [len(sample.pairs) for sample in samples],
        "relation_labels": torch.cat([sample.labels for sample in samples]),
        "related": torch.cat(related),
    }


def pairs_to_ask(boxes_xyxy: Tensor, require_overlap: bool = False) -> Tensor:
    """Return the K ordered pairs (K, 2) of different objects of one image: all of them, or, if `require_overlap`,
    those whose boxes overlap (1 is added to widths and heights). An image with objects but without such pairs gives
    [[0, 0]]."""
    count = len(boxes_xyxy)
    allowed = ~torch.eye(count, dtype=torch.bool, device=boxes_xyxy.device)
    if require_overlap:
        allowed &= iou_plus_one(boxes_xyxy[:, None], boxes_xyxy[None]) > 0
    pairs = allowed.nonzero()
    if count and not len(pairs):
        return pairs.new_zeros(1, 2)
    return pairs


def _background_candidates(boxes_xyxy: Tensor, labels: Tensor, require_overlap: bool) -> Tensor:
    if require_overlap:
        ious = iou_plus_one(boxes_xyxy[:, None], boxes_xyxy[None])
        free = (ious > 0) & (ious < 1)
    else:
        free = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    is_object = labels > 0
    return free & is_object[:, None] & is_object[None]


def _draw(rows: Tensor, count: int, generator: Generator | None, always: bool = True) -> Tensor:
    """Draw `count` random rows in random order; all of them, in order, when there are not more (unless `always`)."""
    if not always and len(rows) <= count:
        return rows
    order = torch.randperm(len(rows), generator=generator).to(rows.device)
    return rows[order[:count]]


def _draw_per_group(group: Tensor, weight: Tensor, count: int, generator: Generator | None) -> Tensor:
    """Return the rows kept of each group: all, or `count` drawn without replacement in proportion to `weight`.

    Exponential clocks with rate `weight` ring in the order of such a draw (Efraimidis and Spirakis, 2006).
    """
    drawn = torch.empty(len(group)).exponential_(generator=generator)
    clock = drawn.to(weight) / weight
    # Rows of groups 1, 0, 1 with clocks 0.3, 0.1, 0.2 are 1, 2, 0 by clock, and 1, 2, 0 by group, then by clock. The
    # groups have 1 and 2 rows and start at 0 and 1, so the positions are 0; 0, 1: with count 1, rows 1 and 2 are kept.
    order = clock.argsort()
    order = order[group[order].argsort(stable=True)]
    sizes = torch.bincount(group)
    starts = sizes.cumsum(0) - sizes
    position = torch.arange(len(group), device=group.device) - starts[group[order]]  # in the group
    return order[position < count].sort().values
