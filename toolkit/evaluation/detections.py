"""Detections and relations of one image in order, and as JSON in the ids of the training data."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.data.table import Category

Found = dict[str, Tensor]
MAX_RELATIONS = 100  # of one image, as recall counts
MIN_ATTRIBUTE_SCORE = 0.5


def best_first(found: Mapping[str, Tensor]) -> Found:
    """Best first, on the CPU; without the boxes of a scene graph that lost every class (label -1)."""
    order = found["scores"].argsort(descending=True, stable=True)
    order = order[found["labels"][order] >= 0]
    of_objects = ("boxes", "scores", "labels", "attribute_scores")
    result = {key: found[key][order] for key in of_objects if key in found}
    if "pairs" in found:
        place = torch.full_like(found["labels"], -1)
        place[order] = torch.arange(len(order), device=order.device)
        pairs = place[found["pairs"]]
        kept = (pairs >= 0).all(1)
        result |= {"pairs": pairs[kept]} | {key: found[key][kept] for key in ("predicates", "triplet_scores")}
    return {key: value.cpu() for key, value in result.items()}


def detections_as_json(found: Found, categories: Sequence[Category], attributes: Sequence[str] = ()) -> list[dict]:
    """COCO results of one image, best first: `category_id` and `category` as in the training data, `bbox` [x, y,
    width, height] in pixels, `score`; with names of `attributes`, if the model tells any, those scoring above 0.5."""
    detections = []
    for (x1, y1, x2, y2), score, label in zip(*(found[k].tolist() for k in ("boxes", "scores", "labels")), strict=True):
        category = categories[label]
        bbox = [round(value, 6) for value in (x1, y1, x2 - x1, y2 - y1)]
        detections.append(
            {"category_id": category.id, "category": category.name, "bbox": bbox, "score": round(score, 6)}
        )
    if attributes and "attribute_scores" in found:
        for detection, scores in zip(detections, found["attribute_scores"].tolist(), strict=True):
            named = zip(attributes, scores, strict=True)
            detection["attributes"] = [name for name, score in named if score > MIN_ATTRIBUTE_SCORE]
    return detections


def relations_as_json(found: Found, predicates: Sequence[str]) -> list[dict]:
    """The best relations of one image: `subject` and `object` are positions in its detections."""
    columns = (found[key][:MAX_RELATIONS].tolist() for key in ("pairs", "predicates", "triplet_scores"))
    return [
        {"subject": subject, "object": other, "predicate": predicates[predicate], "score": round(score, 6)}
        for (subject, other), predicate, score in zip(*columns, strict=True)
    ]
