"""Conversion of the logits of a relation head to ranked triplets."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.base.batch import image_of_each, pad_rows, send_dicts, to_host, unpad_rows
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput

OBJECT_FIELDS = ("boxes", "labels", "scores", "attribute_scores")
TRIPLET_FIELDS = ("pairs", "predicate_scores", "predicates", "triplet_scores")
PAIRS_PER_CHUNK = 2**23  # boxes compared with boxes, of all classes: 32 MB of float32


@torch.no_grad()
def late_nms(boxes_per_class: Tensor, logits: Tensor, num_objects: list[int] | int, threshold: float) -> Tensor:
    """Return labels (N,) int64 of detected objects, chosen greedily so that overlapping objects of an image get
    different labels.

    In each step, the largest (object, class) probability of an image gives this object this label. The class is then
    excluded for the objects of the image whose box for this class has an IoU of at least `threshold` with the object's
    (1 is added to widths and heights). An object for which all classes are excluded gets label 0. All images are
    processed together, one object each per step.

    Args:
        boxes_per_class: (N, C, 4).
        logits: (N, C), background first.
        num_objects: number of objects of each image, or one number for all images.
    """
    alike = isinstance(num_objects, int)
    most = num_objects if alike else max(num_objects, default=0)
    num_classes = logits.shape[1]
    if not most:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    scores = F.pad(logits.float().softmax(1)[:, 1:], (1, 0))
    if alike:
        scores = scores.unflatten(0, (-1, most))
        boxes = boxes_per_class.unflatten(0, (-1, most))
    else:
        scores = pad_rows(scores, num_objects)
        boxes = pad_rows(boxes_per_class, num_objects)
    scores = scores.flatten(1)  # (B, N_max x C) cells; 0 is out of the question

    # With 2 objects of 3 classes, the cells are 0 1 2 and 3 4 5. The rivals of cell 4 are those of its class, 1 and 4,
    # which it strikes where the boxes overlap, and those of its object, 3 4 5, which it strikes in any case.
    cells = torch.arange(most * num_classes, device=logits.device).view(most, num_classes)
    of_its_class = cells.T.repeat(most, 1)
    of_its_object = cells.repeat_interleave(num_classes, 0)
    rivals = torch.cat([of_its_class, of_its_object], 1)  # (N_max x C, N_max + C)
    overlaps = _overlaps(boxes, threshold)
    struck = F.pad(overlaps, (0, num_classes), value=True)  # (B, N_max x C, N_max + C)

    image = torch.arange(scores.shape[0], device=logits.device)
    values = []
    winners = []
    for _ in range(most):
        value, winner = scores.max(1)
        values.append(value)
        winners.append(winner)
        out = torch.where(struck[image, winner], rivals[winner], winner[:, None])
        scores = scores.scatter(1, out, 0.0)
    values = torch.stack(values, 1)
    winners = torch.stack(winners, 1)
    objects = torch.where(values > 0, winners // num_classes, most)
    labels = winners.new_zeros(scores.shape[0], most + 1)  # the last column is for results after all objects were done
    labels = labels.scatter(1, objects, winners % num_classes)[:, :most]
    return labels.flatten() if alike else unpad_rows(labels, num_objects)


def late_labels(batch: RelationBatch, logits: Tensor, threshold: float) -> Tensor:
    """Return `late_nms` of the objects in the batch. The result is kept in `batch.late`, so that labels that a head has
    already computed from the same logits are not computed again."""
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
    chunks = [boxes_per_class] if torch.compiler.is_exporting() else boxes_per_class.split(at_once)
    for boxes in chunks:
        # As `iou_plus_one`, one coordinate at a time, which is several times faster on so many pairs.
        left, top, right, bottom = boxes.unbind(-1)  # (B, C, N)
        common = _common_length(left, right).mul_(_common_length(top, bottom))
        area = (right - left + 1) * (bottom - top + 1)
        iou = common / (area[..., None] + area[..., None, :] - common)
        parts.append(iou >= threshold)
    return torch.cat(parts).transpose(1, 2).flatten(1, 2)


def _common_length(first: Tensor, last: Tensor) -> Tensor:
    """Count the pixels that two ranges share: (..., N) first and last pixels along an axis -> (..., N, N)."""
    begin = torch.maximum(first[..., None], first[..., None, :])
    end = torch.minimum(last[..., None], last[..., None, :])
    shared = end - begin
    return shared.add_(1).clamp_(min=0)


@torch.no_grad()
def rank_triplets(
    output: RelationOutput,
    batch: RelationBatch,
    given_boxes: bool,
    nms_threshold: float = 0.5,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the columns of all objects and the columns of all triplets, image after image, the triplets of an image
    best first.

    The label of an object is the best class other than background for given boxes; for detected ones it is from
    `late_nms`, or the head's if `output.labels_stay`. Its score is the softmax value of the label. Triplets are ranked
    by predicate probability x both scores; equal ones are in the order of the pairs.

    Returns `boxes` (N, 4), `labels` (N,) from 0 (-1 if all classes were excluded) and `scores` (N,) of N objects; and
    of R pairs `pairs` (R, 2) rows of `boxes`, `predicate_scores` (R, P - 1) of the P predicates without "no relation",
    not renormalised, `predicates` (R,) from 0, `triplet_scores` (R,), and `annotated` (R,) bool if boxes are given and
    the batch has the annotation.
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
        of_label = labels[:, None, None].expand(-1, 1, 4)
        boxes = batch.boxes_per_class.gather(1, of_label)[:, 0]
    scores = probability.gather(1, labels[:, None])[:, 0]
    predicate_scores = output.relation_logits.float().softmax(1)[:, 1:]
    best, predicates = predicate_scores.max(1)
    subjects, others = batch.pairs.unbind(1)
    triplet_scores = best * scores[subjects] * scores[others]
    order = triplet_scores.sort(descending=True, stable=True).indices
    image = image_of_each(batch.num_pairs, order.device)
    # By image, then by score: scores 0.2, 0.9, 0.5 of images 0, 1, 0 are first in the order 1, 2, 0, then 2, 0, 1.
    order = order[image[order].sort(stable=True).indices]
    triplets = {
        "pairs": batch.pairs,
        "predicate_scores": predicate_scores,
        "predicates": predicates,
        "triplet_scores": triplet_scores,
    }
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
    """Return the columns of the `top_k` best triplets of each image, followed by those of its annotated triplets, and
    the number of rows of each image.

    The number of annotated triplets is known only on the device, so rows are reserved for `num_annotated` of each
    image, and the column `keep (r,)` is False for rows that are not needed; see `graphs_on_host`.

    Args:
        triplets: columns, see `rank_triplets`.
        num_pairs: number of rows of each image in these columns.
        num_annotated: largest number of annotated triplets of each image.
    """
    counts = [min(top_k + more, pairs) for pairs, more in zip(num_pairs, num_annotated, strict=True)]
    starts = accumulate([0, *num_pairs])
    first_rows = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=False)]
    columns = {
        "image": image_of_each(num_pairs, "cpu"),
        "best": torch.cat([torch.arange(pairs) < top_k for pairs in num_pairs]),
        "rows": torch.cat(first_rows),
    }
    (columns,) = send_dicts([columns], triplets["pairs"].device)
    rows = columns["rows"]
    if "annotated" not in triplets:
        return {name: triplets[name][rows] for name in TRIPLET_FIELDS}, counts
    keep = columns["best"] | triplets["annotated"]
    # In each image the rows to keep come first: if they are 1 and 2 of rows of the images 0, 0, 1, 1, the keys are
    # 1, 0, 2, 3, and the order is 1, 0, 2, 3.
    kept_first = (2 * columns["image"] + ~keep).sort(stable=True).indices
    rows = kept_first[rows]
    short = {name: triplets[name][rows] for name in TRIPLET_FIELDS}
    short["keep"] = keep[rows]
    return short, counts


def graphs_on_host(
    objects: dict[str, Tensor],
    triplets: dict[str, Tensor],
    num_objects: Sequence[int],
    num_triplets: Sequence[int],
) -> list[dict[str, Tensor]]:
    """Return a graph on the CPU for each image, from the columns of `rank_triplets` or `shortlist`, with one wait for
    the device. Triplets whose `keep` is False are left out; `pairs` become rows of the image's own objects."""
    on_host = to_host([*objects.values(), *triplets.values()])
    columns = dict(zip([*objects, *triplets], on_host, strict=True))
    by_image = {}
    for name, column in columns.items():
        by_image[name] = column.split(list(num_objects if name in objects else num_triplets))
    graphs = []
    starts = accumulate([0, *num_objects])
    for i, start in zip(range(len(num_objects)), starts, strict=False):
        graph = {name: by_image[name][i].clone() for name in objects}  # a copy, which frees the batch's memory
        keep = by_image["keep"][i] if "keep" in triplets else slice(None)
        for name in triplets:
            if name != "keep":
                graph[name] = by_image[name][i][keep]
        graph["pairs"] = graph["pairs"] - start
        graphs.append(graph)
    return graphs


def strong_only(graph: dict[str, Tensor], score_threshold: float) -> dict[str, Tensor]:
    """Return a graph without the objects whose score is at or below the threshold, and without their pairs. A threshold
    of 0 or less keeps the graph unchanged."""
    if score_threshold <= 0:
        return graph
    strong = graph["scores"] > score_threshold
    rows = strong[graph["pairs"]].all(1)
    kept = dict(graph)
    kept |= {name: graph[name][strong] for name in OBJECT_FIELDS if name in graph}
    kept |= {name: graph[name][rows] for name in TRIPLET_FIELDS}
    row_of = strong.cumsum(0) - 1  # of an object among the strong ones
    kept["pairs"] = row_of[kept["pairs"]]
    return kept
