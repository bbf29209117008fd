"""The objects and pairs that a relation head classifies: annotated ones, or detections."""

from collections.abc import Mapping, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from toolkit.batch import on_host
from toolkit.scene_graphs.geometry import intersection_areas, iou_plus_one
from toolkit.scene_graphs.sampling import (
    SampledPairs,
    join_samples,
    pairs_to_ask,
    relation_matrix,
    sample_detected_boxes,
    sample_given_boxes,
)
from toolkit.step.freezing import eval_mode


def annotated_graph(target: Mapping) -> dict[str, Tensor]:
    """`boxes (N, 4)`, `labels (N,)` and `relations (R, 3)` of a target, without crowd regions; all from 0. Where the
    target has `attributes (N, A)`, these too, from 1."""
    keep = target["iscrowd"] == 0
    relations = target["relations"]
    relations = relations[keep[relations[:, :2]].all(1)]
    ends = (keep.cumsum(0) - 1)[relations[:, :2]]
    relations = torch.cat([ends, relations[:, 2:]], 1)
    names = [name for name in ("boxes", "labels", "attributes") if name in target]
    return {name: target[name][keep] for name in names} | {"relations": relations}


def given_objects(
    model: nn.Module, maps: Mapping, images_hw: Sequence, truths: Sequence[Mapping], known: Sequence[Mapping]
) -> dict:
    """Fields of a RelationBatch for annotated boxes; sgcls also asks the detector what they are.

    truths: annotated graphs on the device. known: the same on the host.
    """
    boxes, boxes_on_host = ([graph["boxes"] for graph in graphs] for graphs in (truths, known))
    pooled = model.detector.box_pool(dict(maps), boxes, list(images_hw), boxes_on_host)
    logits = None
    if model.mode == "sgcls":
        logits = model.detector.class_logits(maps, boxes, pooled).detach()
    return {
        "boxes_xyxy": torch.cat(boxes),
        "num_objects": [len(b) for b in boxes],
        "roi_features": model.box_features(pooled),
        "labels": torch.cat([truth["labels"] for truth in truths]) + 1,
        "attributes": torch.cat([truth["attributes"] for truth in truths]) if "attributes" in truths[0] else None,
        "logits": logits,
    }


def detected_objects(
    model: nn.Module,
    maps: Mapping,
    images_hw: Sequence,
    truths: Sequence[Mapping] | None,
    known: Sequence[Mapping] | None,
    outputs: Mapping | None = None,
) -> tuple[dict, list[Tensor], dict]:
    """Fields of a RelationBatch for what the detector finds, the boxes on the host, and the labels (and attributes) of
    what each overlaps, on the host too; these with truths only, see `given_objects`. outputs: what the detector says of
    the maps in evaluation, where that is known.

    In training the annotated boxes are proposals too, unless the settings say otherwise: a weak detector finds few of
    the objects that have relations.
    """
    annotated = [truth["boxes"] for truth in truths] if model.training and model.add_annotated_boxes else None
    with eval_mode(model.detector):
        found = model.detector.detect_with_logits(
            maps, images_hw, top_k=model.detections_per_image, further_boxes=annotated, outputs=outputs
        )
    boxes, boxes_on_host = [image["boxes"] for image in found], [on_host(image)["boxes"] for image in found]
    pooled = model.detector.box_pool(dict(maps), boxes, list(images_hw), boxes_on_host)
    fields = {
        "boxes_xyxy": torch.cat(boxes),
        "num_objects": [len(b) for b in boxes],
        "roi_features": model.box_features(pooled),
        "logits": torch.cat([image["logits"] for image in found]).detach(),
        "boxes_per_class": torch.cat([image["boxes_per_class"] for image in found]).detach(),
    }
    learned = {}
    if known is not None:
        matched = (match_labels(own, truth, model.match_iou) for own, truth in zip(boxes_on_host, known, strict=True))
        rows, labels = zip(*matched, strict=True)
        learned["labels"] = torch.cat(labels)
        if "attributes" in known[0]:
            named = (F.pad(truth["attributes"], (0, 0, 0, 1)) for truth in known)  # row -1: none, for no object
            learned["attributes"] = torch.cat([ids[r] for ids, r in zip(named, rows, strict=True)])
    return fields, boxes_on_host, learned


def match_labels(boxes_xyxy: Tensor, truth: Mapping, match_iou: float) -> tuple[Tensor, Tensor]:
    """(K,) row of the annotated object that each detection overlaps most (-1: none by `match_iou`), and its label from
    1."""
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
    """`pairs`, `num_pairs`, `relation_labels`, `related` of a RelationBatch: a sample in training, else all pairs.

    boxes: (N_i, 4) of each image. labels: (N,) from 1 of the boxes that the detector found, in training. All of it and
    the truths are on the host, which decides without waiting. draws: generator of each image; none: torch's own.
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
    matrices = [relation_matrix(_from_one(truth), len(truth["boxes"]), generator=draw)
                for truth, draw in zip(truths, draws, strict=True)]  # fmt: skip
    if model.given_boxes:
        images = zip(matrices, draws, strict=True)
        return join_samples([sample_given_boxes(matrix, **size, generator=draw) for matrix, draw in images], counts)
    size |= {"fg_iou": model.match_iou, "per_relation": model.pairs_per_relation}
    size |= {"require_overlap": model.require_overlap}
    samples = []
    for b, own, truth, matrix, draw in zip(boxes, labels.split(counts), truths, matrices, draws, strict=True):
        seen = (b, own, truth["boxes"], truth["labels"] + 1, matrix)
        samples.append(sample_detected_boxes(*seen, **size, generator=draw))
    return join_samples(samples, counts)


def _without_relations_apart(truth: Mapping) -> dict:
    """The graph without relations between boxes that do not overlap (+1 widths): evaluation asks no such pair."""
    subjects, objects = truth["boxes"][truth["relations"][:, :2]].unbind(1)
    return {**truth, "relations": truth["relations"][intersection_areas(subjects, objects) > 0]}


def _asked(model: nn.Module, boxes: Tensor, truth: Mapping | None, require_overlap: bool) -> SampledPairs:
    """All pairs of an image, with the predicates that are annotated for them, the same one of several every time."""
    pairs = pairs_to_ask(boxes, require_overlap)
    labels = pairs.new_zeros(len(pairs))
    if truth is not None and len(truth["boxes"]) and len(pairs):
        matrix = relation_matrix(_from_one(truth), len(truth["boxes"]), generator=Generator().manual_seed(0))
        if model.given_boxes:
            labels = matrix[pairs[:, 0], pairs[:, 1]]
        else:
            ends = match_labels(boxes, truth, model.match_iou)[0][pairs]
            labels = torch.where((ends >= 0).all(1), matrix[ends[:, 0], ends[:, 1]], 0)
    related = torch.zeros(len(boxes), len(boxes), dtype=torch.bool, device=boxes.device)
    return SampledPairs(pairs, labels, related)


def _from_one(truth: Mapping) -> Tensor:
    """Relations with predicates from 1, as heads count them."""
    relations = truth["relations"]
    return torch.cat([relations[:, :2], relations[:, 2:] + 1], 1)


def count_sampled_pairs(model: nn.Module, targets: Sequence[Mapping]) -> dict[str, float]:
    """How many pairs, objects (those with attributes, too) and images with objects `sampled_pairs` will give for
    annotated boxes."""
    pairs = objects = images = named = 0
    for truth in map(annotated_graph, targets):
        count = len(truth["boxes"])
        objects, images = objects + count, images + (count > 0)
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
