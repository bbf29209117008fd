"""Metrics of relations on Open Images: AP weighted by how often a predicate occurs.

Source: Zhang et al., "Graphical Contrastive Losses for Scene Graph Parsing", CVPR 2019; `eval_rel_results` and
`ap_eval` of their program, which PySGG and others have adopted. Tests compare the results with that program's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.detectors.scene_graphs.triplet_matches import array_iou_plus_one, array_union_boxes, best_two

MAX_PREDICTIONS = 100  # predictions of an image
MIN_TRIPLET_SCORE = 1e-5  # predictions at or below it are left out
MATCH_IOU = 0.5  # overlap of a match


@dataclass(frozen=True)
class _Relations:
    """The relations of all images, one row each.

    image: (R,) index of the image. boxes: (R, 2, 4) float32 xyxy and labels: (R, 2) of subject and object.
    predicate: (R,).
    """

    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    predicate: np.ndarray


@dataclass(frozen=True)
class _Ranked:
    """Predicted relations, best first in each image. rank: (R,) from 0 in the image. score: (R,) float64."""

    relations: _Relations
    rank: np.ndarray
    score: np.ndarray


def open_images_metrics(
    truths: Sequence[Mapping],
    predictions: Sequence[Mapping],
    num_predicates: int,
) -> dict[str, float | None]:
    """Return `wmAP_rel` (both boxes must overlap), `wmAP_phr` (the union boxes must overlap), `micro_R@50`, and
    `score_wtd`, their sum with weights 0.4, 0.4 and 0.2. All are None if no relations are annotated.

    The arguments are those of `evaluate_scene_graphs` in sgdet. The two best predicates of each pair count, and of
    these combinations the 100 best of an image by subject score x object score x predicate score. In the order of their
    scores, each prediction finds the relation with its classes and predicate that it overlaps most, with an IoU above
    0.5; a prediction whose relation has already been found is a false positive. AP is the area below the envelope of
    precision, weighted by how often a predicate is annotated. micro_R@50 is the share of all relations that one of the
    50 best predictions of their image overlaps with an IoU of at least 0.5.
    """
    relations = [np.asarray(truth["relations"], np.int64).reshape(-1, 3) for truth in truths]
    if not sum(map(len, relations)):
        return dict.fromkeys(("wmAP_rel", "wmAP_phr", "micro_R@50", "score_wtd"))
    true = _columns(
        truths,
        [rows[:, :2] for rows in relations],
        [rows[:, 2] for rows in relations],
    )
    ranked = _predictions(predictions)
    found = ranked.relations

    # Candidates: row i of `found` and row j of `true` that have the same classes and predicate in the same image.
    row, relation = _of_same_names(found, true)
    found_subjects, found_objects = found.boxes[row].swapaxes(0, 1)  # (candidates, 4) each
    true_subjects, true_objects = true.boxes[relation].swapaxes(0, 1)
    subject_iou = array_iou_plus_one(found_subjects, true_subjects)
    object_iou = array_iou_plus_one(found_objects, true_objects)
    both_iou = np.minimum(subject_iou, object_iou)
    found_unions = array_union_boxes(found_subjects, found_objects)
    true_unions = array_union_boxes(true_subjects, true_objects)
    union_iou = array_iou_plus_one(found_unions, true_unions)

    counts = np.bincount(true.predicate, minlength=num_predicates)
    by_both = _most_overlapped(row, relation, both_iou, len(ranked.score))
    by_union = _most_overlapped(row, relation, union_iou, len(ranked.score))
    ap_rel = _weighted_ap(ranked, by_both, counts)
    ap_phr = _weighted_ap(ranked, by_union, counts)
    in_time = (both_iou >= MATCH_IOU) & (ranked.rank[row] < 50)
    recall = len(np.unique(relation[in_time])) / len(true.predicate)
    return {
        "wmAP_rel": ap_rel,
        "wmAP_phr": ap_phr,
        "micro_R@50": recall,
        "score_wtd": 0.4 * ap_rel + 0.4 * ap_phr + 0.2 * recall,
    }


def _predictions(predictions: Sequence[Mapping]) -> _Ranked:
    """Return the predictions that count, best first in each image."""
    pairs = []
    predicates = []
    scores = []
    for prediction in predictions:
        best, best_scores = best_two(prediction)  # (P, 2) each: two predicates a pair, or one if there is only one
        ends = np.asarray(prediction["pairs"], np.int64).reshape(-1, 2)
        pair_scores = np.asarray(prediction["scores"])[ends].prod(1)  # (P,)
        values = (pair_scores[:, None] * best_scores).ravel()  # pair by pair
        order = np.argsort(-values, kind="stable")[:MAX_PREDICTIONS]
        order = order[values[order] > MIN_TRIPLET_SCORE]
        per_pair = max(best.shape[1], 1)
        pairs.append(ends[order // per_pair])
        predicates.append(best.ravel()[order])
        scores.append(values[order])
    return _Ranked(
        relations=_columns(predictions, pairs, predicates),
        rank=np.concatenate([np.arange(len(part)) for part in scores]),
        score=np.concatenate(scores).astype(float),
    )


def _columns(graphs: Sequence[Mapping], ends: list[np.ndarray], predicates: list[np.ndarray]) -> _Relations:
    """Join the relations of all images, from the box numbers (R_i, 2) of their ends and their predicates (R_i,)."""
    boxes = []
    labels = []
    for graph, rows in zip(graphs, ends, strict=True):
        boxes.append(np.asarray(graph["boxes"], np.float32)[rows])
        labels.append(np.asarray(graph["labels"], np.int64)[rows])
    counts = [len(rows) for rows in ends]
    return _Relations(
        image=np.repeat(np.arange(len(ends)), counts),
        boxes=np.concatenate(boxes),
        labels=np.concatenate(labels),
        predicate=np.concatenate(predicates),
    )


def _of_same_names(found: _Relations, true: _Relations) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of a prediction and of a relation of its image, wherever both classes and the predicate are the
    same.

    An image, two classes and a predicate become one number, by which the relations are sorted: the partners of a
    prediction then lie side by side. Predictions with the numbers 5, 2, 5 and relations with 5, 5, 2 give the rows
    0, 0, 1, 2, 2 and the relations 0, 1, 2, 0, 1.
    """
    found_names = _names(found)
    true_names = _names(true)
    sizes = 1 + np.max([found_names.max(0, initial=0), true_names.max(0, initial=0)], axis=0)
    found_numbers = np.ravel_multi_index(tuple(found_names.T), sizes)
    true_numbers = np.ravel_multi_index(tuple(true_names.T), sizes)

    order = np.argsort(true_numbers, kind="stable")  # (2, 0, 1) in the example
    in_order = true_numbers[order]  # (2, 5, 5)
    first = np.searchsorted(in_order, found_numbers, "left")  # (1, 0, 1)
    last = np.searchsorted(in_order, found_numbers, "right")  # (3, 1, 3), behind the last partner
    partners = last - first  # (2, 1, 2)
    row = np.repeat(np.arange(len(found_numbers)), partners)
    # The partners of a prediction begin at `first` in the order, and in the result behind those of all before it.
    begin = np.cumsum(partners) - partners  # (0, 2, 3)
    place = np.arange(len(row)) + np.repeat(first - begin, partners)  # (1, 2, 0, 1, 2)
    return row, order[place]


def _names(relations: _Relations) -> np.ndarray:
    """Return (R, 4) image, both classes and predicate, all from 0; class 0: none."""
    return np.column_stack([relations.image, relations.labels + 1, relations.predicate])


def _most_overlapped(row: np.ndarray, relation: np.ndarray, iou: np.ndarray, count: int) -> np.ndarray:
    """Return the (count,) relation that each prediction overlaps most, by more than half; -1: none.

    row, relation, iou: (candidates,), the prediction and the relation of each candidate and how far they overlap.
    """
    order = np.lexsort((relation, -iou, row))  # by prediction, the largest overlap first
    row = row[order]
    relation = relation[order]
    iou = iou[order]
    is_first = np.append(True, row[1:] != row[:-1])[: len(row)]
    best = is_first & (iou > MATCH_IOU)
    found = np.full(count, -1)
    found[row[best]] = relation[best]
    return found


def _weighted_ap(found: _Ranked, relation: np.ndarray, counts: np.ndarray) -> float:
    """Return the AP of all predicates, weighted by how often each is annotated.

    relation: (R,), which each prediction stands for, -1: none. counts: annotated relations of each predicate.
    """
    order = np.argsort(-found.score, kind="stable")
    predicate = found.relations.predicate[order]
    relation = relation[order]
    hit = np.zeros(len(order), bool)
    places = np.flatnonzero(relation >= 0)
    _, first = np.unique(relation[places], return_index=True)
    hit[places[first]] = True  # a second one on it is wrong
    total = 0.0
    for label in np.flatnonzero(counts):
        hits = np.cumsum(hit[predicate == label])
        precision = hits / np.arange(1, len(hits) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        steps = np.diff(hits, prepend=0)  # 1 where a relation is found
        total += float((steps * envelope).sum())  # AP x its count
    return total / int(counts.sum())
