"""Detections and relations of one image, sorted, and as JSON with the ids of the training data."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.data.table import Category

Found = dict[str, Tensor]
MAX_RELATIONS = 100  # of one image, as recall counts
MIN_ATTRIBUTE_SCORE = 0.5
OF_PAIRS = ("pairs", "predicates", "triplet_scores", "predicate_scores")


def best_first(detections: Mapping[str, Tensor]) -> Found:
    """Sort detections best first, on the CPU; without the boxes of a scene graph that lost every class (label -1)."""
    order = detections["scores"].argsort(descending=True, stable=True)
    order = order[detections["labels"][order] >= 0]
    of_objects = ("boxes", "scores", "labels", "attribute_scores")
    result = {key: detections[key][order] for key in of_objects if key in detections}
    if "pairs" in detections:
        position = torch.full_like(detections["labels"], -1)
        position[order] = torch.arange(len(order), device=order.device)
        pairs = position[detections["pairs"]]
        kept = (pairs >= 0).all(1) & (pairs[:, 0] != pairs[:, 1])  # the pair of a lone object is a placeholder
        result |= {"pairs": pairs[kept]} | {key: detections[key][kept] for key in OF_PAIRS[1:] if key in detections}
    return {key: value.cpu() for key, value in result.items()}


def detections_as_json(detections: Found, categories: Sequence[Category], attributes: Sequence[str] = ()) -> list[dict]:
    """Convert the detections of one image to COCO results, best first.

    `category_id` and `category` are those of the training data, `bbox` is [x, y, width, height] in pixels; `score`;
    with `attributes`, if the model predicts any, the names with scores above 0.5.
    """
    entries = []
    columns = (detections[key].tolist() for key in ("boxes", "scores", "labels"))
    for (x1, y1, x2, y2), score, label in zip(*columns, strict=True):
        category = categories[label]
        bbox = [round(value, 6) for value in (x1, y1, x2 - x1, y2 - y1)]
        entry = {"category_id": category.id, "category": category.name, "bbox": bbox, "score": round(score, 6)}
        entries.append(entry)
    if attributes and "attribute_scores" in detections:
        for entry, scores in zip(entries, detections["attribute_scores"].tolist(), strict=True):
            named = zip(attributes, scores, strict=True)
            entry["attributes"] = [name for name, score in named if score > MIN_ATTRIBUTE_SCORE]
    return entries


def without_graph_constraint(graph: Found, count: int = MAX_RELATIONS) -> Found:
    """Return the graph of an image with its `count` best combinations of pair and predicate.

    They replace the one predicate of each pair. Equal scores are in the order of pairs, then predicates, as ng-R@K
    ranks them.
    """
    ends = graph["scores"][graph["pairs"]].prod(1)
    scores = (graph["predicate_scores"] * ends[:, None]).flatten()
    best = scores.sort(descending=True, stable=True).indices[:count]
    num_predicates = graph["predicate_scores"].shape[1]
    rows = best // num_predicates
    predicates = best % num_predicates
    of_pairs = {"pairs": graph["pairs"][rows], "predicate_scores": graph["predicate_scores"][rows]}
    return graph | of_pairs | {"predicates": predicates, "triplet_scores": scores[best]}


def relations_as_json(graph: Found, predicates: Sequence[str], all_scores: bool = False) -> list[dict]:
    """Convert the best relations of one image; `subject` and `object` are positions in its detections.

    all_scores: add `predicate_scores`, the probability of every predicate of the pair by name, best first.
    """
    columns = (graph[key][:MAX_RELATIONS].tolist() for key in ("pairs", "predicates", "triplet_scores"))
    relations = [
        {"subject": subject, "object": other, "predicate": predicates[predicate], "score": round(score, 6)}
        for (subject, other), predicate, score in zip(*columns, strict=True)
    ]
    if all_scores:
        for relation, scores in zip(relations, graph["predicate_scores"].tolist(), strict=False):
            ranked = sorted(zip(predicates, scores, strict=True), key=lambda pair: -pair[1])
            relation["predicate_scores"] = {name: round(score, 6) for name, score in ranked}
    return relations
