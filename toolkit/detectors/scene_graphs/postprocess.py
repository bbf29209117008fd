"""Conversion of a relation head's logits to ranked triplets."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.base.batch import image_of_each, pad_rows, send_dicts, to_host, unpad_rows
from toolkit.detectors.scene_graphs.batch import RelationBatch, RelationOutput

OBJECT_FIELDS = ("boxes", "labels", "scores", "attribute_scores")
TRIPLET_FIELDS = ("pairs", "predicate_scores", "predicates", "triplet_scores")
PAIRS_PER_CHUNK = 2**23  # boxes compared with boxes, of all classes: 32 MB of float32


@torch.no_grad()
def late_nms(boxes_per_class: Tensor, logits: Tensor, num_objects: list[int] | int, threshold: float) -> Tensor:
    """Return (N,) int64 labels, chosen greedily so that overlapping objects of an image get different ones.

    boxes_per_class: (N, C, 4), logits: (N, C); num_objects: of each image, or of all images alike. Repeatedly, the
    image's largest (object, class) probability gives its object that label; the class is then removed from the objects
    whose box for it has IoU >= threshold (+1 widths). An object that lost all classes gets label 0. All images
    advance together, one object each per step.
    """
    alike = isinstance(num_objects, int)
    most = num_objects if alike else max(num_objects, default=0)
    num_classes = logits.shape[1]
    if not most:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    scores = F.pad(logits.float().softmax(1)[:, 1:], (1, 0))
    boxes = boxes_per_class
    scores, boxes = (
        column.unflatten(0, (-1, most)) if alike else pad_rows(column, num_objects) for column in (scores, boxes)
    )
    scores = scores.flatten(1)  # (B, N_max x C) cells; 0 is out of the question
    cells = torch.arange(most * num_classes, device=logits.device).view(most, num_classes)
    rivals = torch.cat([cells.T.repeat(most, 1), cells.repeat_interleave(num_classes, 0)], 1)  # its class, its object
    overlaps = _overlaps(boxes, threshold)
    struck = F.pad(overlaps, (0, num_classes), value=True)  # (B, N_max x C, N_max + C) of the rivals
    image = torch.arange(scores.shape[0], device=logits.device)
    winners = []
    for _ in range(most):
        winners.append(scores.max(1))
        best = winners[-1].indices
        scores = scores.scatter(
            1,
            torch.where(struck[image, best], rivals[best], best[:, None]),
            0.0,
        )
    values, best = (torch.stack(column, 1) for column in zip(*winners, strict=True))
    labels = best.new_zeros(scores.shape[0], most + 1)  # the last column is for results after all objects were done
    labels = labels.scatter(1, torch.where(values > 0, best // num_classes, most), best % num_classes)[:, :most]
    return labels.flatten() if alike else unpad_rows(labels, num_objects)


def late_labels(batch: RelationBatch, logits: Tensor, threshold: float) -> Tensor:
    """Return `late_nms` of the batch; labels that a head has already computed are reused for the graph."""
    if batch.late is None or batch.late[0] is not logits or batch.late[1] != threshold:
        labels = late_nms(batch.boxes_per_class, logits, batch.num_objects, threshold)
        batch.late = logits, threshold, labels
    return batch.late[2]


def _overlaps(boxes_per_class: Tensor, threshold: float) -> Tensor:
    """Convert (B, N, C, 4) -> (B, N x C, N) bool: does the box of an object for a class have IoU >= threshold (+1
    widths) with that of another?"""
    _, count, classes, _ = boxes_per_class.shape
    parts = []
    boxes_per_class = boxes_per_class.transpose(1, 2)
    at_once = max(1, PAIRS_PER_CHUNK // (count**2 * classes))
    for boxes in [boxes_per_class] if torch.compiler.is_exporting() else boxes_per_class.split(at_once):
        # As `iou_plus_one`, one coordinate at a time, which is several times faster on so many pairs.
        left, top, right, bottom = boxes.unbind(-1)  # (B, C, N)
        common = _common_length(left, right).mul_(_common_length(top, bottom))
        area = (right - left + 1) * (bottom - top + 1)
        parts.append(common / (area[..., None] + area[..., None, :] - common) >= threshold)
    return torch.cat(parts).transpose(1, 2).flatten(1, 2)


def _common_length(first: Tensor, last: Tensor) -> Tensor:
    """Count the pixels that two ranges share: (..., N) first and last pixels along an axis -> (..., N, N)."""
    shared = torch.minimum(last[..., None], last[..., None, :]) - torch.maximum(first[..., None], first[..., None, :])
    return shared.add_(1).clamp_(min=0)


@torch.no_grad()
def rank_triplets(
    output: RelationOutput,
    batch: RelationBatch,
    given_boxes: bool,
    nms_threshold: float = 0.5,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return columns of all objects and of all triplets, image after image, those of an image best first.

    Labels: for given boxes the best class above background, for detected ones `late_nms`, unless the head's stay; the
    score is its softmax value. Triplets are ranked by predicate probability x both scores (equal ones stay in the order
    of the pairs).

    Returns `boxes` (N, 4), `labels` (N,) from 0 (-1: lost every class), `scores` (N,); and `pairs` (R, 2) rows of
    `boxes`, `predicate_scores` (R, P - 1) without "no relation" and not renormalised, `predicates` (R,) from 0,
    `triplet_scores` (R,), and `annotated` (R,) bool if boxes are given and the batch has the annotation.
    """
    probability = output.object_logits.float().softmax(1)
    probability[:, 0] = 0.0
    if given_boxes:
        labels = probability[:, 1:].argmax(1) + 1
        boxes = batch.boxes_xyxy
    else:
        labels = output.object_labels
        if not output.labels_stay:
            labels = late_labels(batch, output.object_logits, nms_threshold)
        boxes = batch.boxes_per_class.gather(1, labels[:, None, None].expand(-1, 1, 4))[:, 0]
    scores = probability.gather(1, labels[:, None])[:, 0]
    predicate_scores = output.relation_logits.float().softmax(1)[:, 1:]
    best, predicates = predicate_scores.max(1)
    triplet_scores = best * scores[batch.pairs[:, 0]] * scores[batch.pairs[:, 1]]
    order = triplet_scores.sort(descending=True, stable=True).indices
    order = order[image_of_each(batch.num_pairs, order.device)[order].sort(stable=True).indices]
    triplets = {
        "pairs": batch.pairs,
        "predicate_scores": predicate_scores,
        "predicates": predicates,
    }
    triplets["triplet_scores"] = triplet_scores
    if given_boxes and batch.relation_labels is not None:
        triplets["annotated"] = batch.relation_labels > 0
    objects = {"boxes": boxes, "labels": labels - 1, "scores": scores}
    return objects, {name: column[order] for name, column in triplets.items()}


def shortlist(
    triplets: dict[str, Tensor],
    num_pairs: Sequence[int],
    top_k: int,
    num_annotated: Sequence[int],
) -> tuple[dict[str, Tensor], list[int]]:
    """Return the `top_k` best triplets of each image, of the `num_pairs` that `rank_triplets` gives, then its annotated
    ones.

    The number of annotated ones is known only on the device: `keep (r,)` says which rows count, see `graphs_on_host`.
    num_annotated: at most, of each image. Returns the columns, and how many of their rows each image has.
    """
    counts = [min(top_k + more, pairs) for pairs, more in zip(num_pairs, num_annotated, strict=True)]
    device = triplets["pairs"].device
    starts = accumulate([0, *num_pairs])
    columns = {
        "image": image_of_each(num_pairs, "cpu"),
        "best": torch.cat([torch.arange(pairs) < top_k for pairs in num_pairs]),
        "rows": torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=False)]),
    }
    (columns,) = send_dicts([columns], device)
    rows = columns["rows"]
    more = {}
    if "annotated" in triplets:
        keep = columns["best"] | triplets["annotated"]
        rows = (2 * columns["image"] + ~keep).sort(stable=True).indices[rows]
        more = {"keep": keep[rows]}
    return {name: triplets[name][rows] for name in TRIPLET_FIELDS} | more, counts


def graphs_on_host(
    objects: dict[str, Tensor],
    triplets: dict[str, Tensor],
    num_objects: Sequence[int],
    num_triplets: Sequence[int],
) -> list[dict[str, Tensor]]:
    """Return the graph of each image on the CPU with one wait: its rows of the columns of `rank_triplets`, without
    triplets that are not to be kept; `pairs` are rows of the image's own objects."""
    columns = dict(zip([*objects, *triplets], to_host([*objects.values(), *triplets.values()]), strict=True))
    of_objects = zip(*(columns[name].split(list(num_objects)) for name in objects), strict=True)
    of_triplets = zip(*(columns[name].split(list(num_triplets)) for name in triplets), strict=True)
    graphs = []
    starts = accumulate([0, *num_objects])
    for of_image, rows, start in zip(of_objects, of_triplets, starts, strict=False):
        graph = {name: value.clone() for name, value in zip(objects, of_image, strict=True)}  # frees the batch's memory
        rows = dict(zip(triplets, rows, strict=True))
        keep = rows.pop("keep", slice(None))
        graph |= {name: value[keep] for name, value in rows.items()}
        graphs.append(graph | {"pairs": graph["pairs"] - start})
    return graphs


def strong_only(graph: dict[str, Tensor], score_threshold: float) -> dict[str, Tensor]:
    """Return a graph on the host without objects of scores at or below a threshold above 0, and without their pairs."""
    if score_threshold <= 0:
        return graph
    strong = graph["scores"] > score_threshold
    rows = strong[graph["pairs"]].all(1)
    kept = {name: graph[name][strong] for name in OBJECT_FIELDS if name in graph}
    kept |= {name: graph[name][rows] for name in TRIPLET_FIELDS}
    return graph | kept | {"pairs": (strong.cumsum(0) - 1)[kept["pairs"]]}
