"""From the logits of a relation head to ranked triplets."""

import torch
from torch import Tensor

from toolkit.models.relation.batch import RelationBatch, RelationOutput, object_mask, pad_objects, unpad_objects
from toolkit.models.relation.geometry import iou_plus_one

OF_OBJECTS = ("boxes", "labels", "scores", "attribute_scores")
OF_TRIPLETS = ("pairs", "predicate_scores", "predicates", "triplet_scores")


@torch.no_grad()
def late_nms(boxes_per_class: Tensor, logits: Tensor, num_objects: list[int], threshold: float) -> Tensor:
    """(N,) int64 labels, chosen greedily so that overlapping objects of an image get different ones.

    boxes_per_class: (N, C, 4), logits: (N, C). Over and over, the image's largest (object, class) probability gives
    its object that label; the class is then struck off the objects whose box for it has IoU >= threshold (+1
    widths). An object that lost all classes gets label 0. All images advance together, one object each per step.
    """
    mask = object_mask(num_objects, logits.device)
    if not mask.numel():
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    num_classes = logits.shape[1]
    boxes = pad_objects(boxes_per_class, num_objects)  # (B, N_max, C, 4)
    scores = pad_objects(logits.float().softmax(1), num_objects)
    scores[..., 0] = 0.0
    scores[~mask] = -1.0
    labels = torch.zeros(mask.shape, dtype=torch.int64, device=logits.device)
    image = torch.arange(len(mask), device=logits.device)
    for _ in range(mask.shape[1]):
        value, best = scores.flatten(1).max(1)
        chosen, label = best // num_classes, best % num_classes
        labels[image, chosen] = torch.where(value > 0, label, labels[image, chosen])
        class_boxes = boxes[image, :, label]  # (B, N_max, 4)
        struck = iou_plus_one(class_boxes[image, chosen][:, None], class_boxes) >= threshold
        column = scores[image, :, label]
        scores[image, :, label] = torch.where(struck & (column > 0), 0.0, column)
        scores[image, chosen] = torch.where(value[:, None] > 0, -1.0, scores[image, chosen])
    return unpad_objects(labels, num_objects)


@torch.no_grad()
def rank_triplets(output: RelationOutput, batch: RelationBatch, given_boxes: bool, nms_threshold: float = 0.5):
    """One dict per image, triplets best first.

    Labels: of given boxes the best class above background, of detected ones `late_nms`; the score is its softmax
    value. Triplets are ranked by predicate probability x both scores (equal ones stay in the order of the pairs).

    Returns per image `boxes` (n, 4), `labels` (n,) from 0 (-1: lost every class), `scores` (n,), `pairs` (r, 2) rows of
    `boxes`, `predicate_scores` (r, P - 1) without "no relation" and not renormalised, `predicates` (r,) from 0,
    `triplet_scores` (r,).
    """
    probability = output.object_logits.float().softmax(1)
    probability[:, 0] = 0.0
    if given_boxes:
        labels = probability[:, 1:].argmax(1) + 1
        boxes = batch.boxes_xyxy
    else:
        labels = late_nms(batch.boxes_per_class, output.object_logits, batch.num_objects, nms_threshold)
        boxes = batch.boxes_per_class.gather(1, labels[:, None, None].expand(-1, 1, 4))[:, 0]
    scores = probability.gather(1, labels[:, None])[:, 0]
    predicate_scores = output.relation_logits.float().softmax(1)[:, 1:]
    best, predicates = predicate_scores.max(1)
    triplet_scores = best * scores[batch.pairs[:, 0]] * scores[batch.pairs[:, 1]]
    graphs, first_object, first_pair = [], 0, 0
    for count, pair_count in zip(batch.num_objects, batch.num_pairs, strict=True):
        objects, rows = slice(first_object, first_object + count), slice(first_pair, first_pair + pair_count)
        order = triplet_scores[rows].sort(descending=True, stable=True).indices
        graphs.append(
            {
                "boxes": boxes[objects],
                "labels": labels[objects] - 1,
                "scores": scores[objects],
                "pairs": batch.pairs[rows][order] - first_object,
                "predicate_scores": predicate_scores[rows][order],
                "predicates": predicates[rows][order],
                "triplet_scores": triplet_scores[rows][order],
            }
        )
        first_object, first_pair = objects.stop, rows.stop
    return graphs


def shortlist(graph: dict[str, Tensor], top_k: int, annotated: Tensor | None = None) -> dict[str, Tensor]:
    """The graph, of `rank_triplets`, with its `top_k` best triplets, then those of the annotated pairs (R, 2).

    How many triplets that are, only the device knows: `keep (r,)` says which rows count, see `kept_triplets`.
    """
    pairs = graph["pairs"]
    keep = torch.arange(len(pairs), device=pairs.device) < top_k
    most = min(top_k, len(pairs))
    if annotated is not None:
        keep = keep | (pairs[:, None] == annotated[None]).all(2).any(1)
        most = min(most + len(annotated), len(pairs))
    rows = keep.to(torch.uint8).sort(descending=True, stable=True).indices[:most]
    return graph | {name: graph[name][rows] for name in OF_TRIPLETS} | {"keep": keep[rows]}


def kept_triplets(graph: dict[str, Tensor]) -> dict[str, Tensor]:
    """A `shortlist` that is on the host, without the rows that do not count."""
    keep = graph.pop("keep")
    return graph | {name: graph[name][keep] for name in OF_TRIPLETS}


def strong_only(graph: dict[str, Tensor], score_threshold: float) -> dict[str, Tensor]:
    """A graph on the host without objects of scores at or below a threshold above 0, and without their pairs."""
    if score_threshold <= 0:
        return graph
    strong = graph["scores"] > score_threshold
    rows = strong[graph["pairs"]].all(1)
    kept = {name: graph[name][strong] for name in OF_OBJECTS if name in graph}
    kept |= {name: graph[name][rows] for name in OF_TRIPLETS}
    return graph | kept | {"pairs": (strong.cumsum(0) - 1)[kept["pairs"]]}
