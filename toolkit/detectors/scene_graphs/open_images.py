"""Metrics of relations on Open Images: AP weighted by how often a predicate occurs.

Zhang et al., "Graphical Contrastive Losses for Scene Graph Parsing", CVPR 2019; `eval_rel_results` and `ap_eval` of
their program, which PySGG and others took over. Tests hold ours to it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from toolkit.detectors.scene_graphs.matches import best_two, iou_plus_one, union_boxes

MAX_PREDICTIONS = 100  # predictions of an image
MIN_TRIPLET_SCORE = 1e-5  # predictions at or below it are left out
MATCH_IOU = 0.5  # overlap of a match


def open_images_metrics(
    truths: Sequence[Mapping], predictions: Sequence[Mapping], num_predicates: int
) -> dict[str, float | None]:
    """Return `wmAP_rel` (both boxes overlap), `wmAP_phr` (the union boxes overlap), `micro_R@50`, and `score_wtd`,
    their sum with weights 0.4, 0.4 and 0.2; None without annotated relations.

    Arguments as in `evaluate_scene_graphs`, in sgdet. The two best predicates of each pair count, and of these the 100
    best of an image by subject score x object score x predicate score. By falling score, a prediction finds the
    relation of its classes and predicate that it overlaps most, by more than half; a relation already found counts as a
    miss. AP is the area below the envelope of precision, weighted by how often a predicate is annotated. micro_R@50 is
    the share of all relations that the 50 best of their images overlap by half or more.
    """
    relations = [np.asarray(truth["relations"], np.int64).reshape(-1, 3) for truth in truths]
    if not sum(map(len, relations)):
        return dict.fromkeys(("wmAP_rel", "wmAP_phr", "micro_R@50", "score_wtd"))
    true = _columns(truths, [rows[:, :2] for rows in relations], [rows[:, 2] for rows in relations])
    found = _predictions(predictions)
    row, relation = _of_same_names(found, true)
    subject, object_ = (iou_plus_one(found["boxes"][row, end], true["boxes"][relation, end]) for end in (0, 1))
    both = np.minimum(subject, object_)
    union = iou_plus_one(*(union_boxes(*g["boxes"][i].swapaxes(0, 1)) for g, i in ((found, row), (true, relation))))
    counts = np.bincount(true["predicate"], minlength=num_predicates)
    rel, phr = (_weighted_ap(found, _most_overlapped(row, relation, iou, len(found["score"])), counts)
                for iou in (both, union))  # fmt: skip
    in_time = (both >= MATCH_IOU) & (found["rank"][row] < 50)
    recall = len(np.unique(relation[in_time])) / len(true["predicate"])
    score = 0.4 * rel + 0.4 * phr + 0.2 * recall
    return {"wmAP_rel": rel, "wmAP_phr": phr, "micro_R@50": recall, "score_wtd": score}


def _predictions(predictions: Sequence[Mapping]) -> dict[str, np.ndarray]:
    """Return columns of the predictions that count, best first in each image, with `rank` and `score`."""
    pairs, predicates, scores = [], [], []
    for prediction in predictions:
        of_pair, predicate_scores = best_two(prediction)
        ends = np.asarray(prediction["pairs"], np.int64).reshape(-1, 2)
        values = (np.asarray(prediction["scores"])[ends].prod(1)[:, None] * predicate_scores).ravel()
        order = np.argsort(-values, kind="stable")[:MAX_PREDICTIONS]
        order = order[values[order] > MIN_TRIPLET_SCORE]
        pairs.append(ends[order // max(of_pair.shape[1], 1)])
        predicates.append(of_pair.ravel()[order])
        scores.append(values[order])
    rank = np.concatenate([np.arange(len(part)) for part in scores])
    return _columns(predictions, pairs, predicates) | {"rank": rank, "score": np.concatenate(scores).astype(float)}


def _columns(graphs: Sequence[Mapping], ends: list[np.ndarray], predicates: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Join all images: `image`, `boxes` (R, 2, 4) and `labels` (R, 2) of subject and object, `predicate`."""
    boxes = [np.asarray(graph["boxes"], np.float32)[rows] for graph, rows in zip(graphs, ends, strict=True)]
    labels = [np.asarray(graph["labels"], np.int64)[rows] for graph, rows in zip(graphs, ends, strict=True)]
    image = np.repeat(np.arange(len(ends)), [len(rows) for rows in ends])
    columns = {"boxes": boxes, "labels": labels, "predicate": predicates}
    return {"image": image} | {name: np.concatenate(parts) for name, parts in columns.items()}


def _of_same_names(found: Mapping, true: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of a prediction and of a relation of its image, wherever both classes and the predicate are the
    same."""
    rows = [np.column_stack([g["image"], g["labels"] + 1, g["predicate"]]) for g in (found, true)]  # class 0: none
    sizes = 1 + np.max([part.max(0, initial=0) for part in rows], axis=0)
    of_found, of_true = (np.ravel_multi_index(tuple(part.T), sizes) for part in rows)
    order = np.argsort(of_true, kind="stable")
    first, last = (np.searchsorted(of_true[order], of_found, side) for side in ("left", "right"))
    row = np.repeat(np.arange(len(of_found)), last - first)
    place = np.arange(len(row)) - np.repeat(np.cumsum(last - first) - last, last - first)
    return row, order[place]


def _most_overlapped(row: np.ndarray, relation: np.ndarray, iou: np.ndarray, count: int) -> np.ndarray:
    """Return the (count,) relation that each prediction overlaps most, by more than half; -1: none."""
    order = np.lexsort((relation, -iou, row))
    row, relation, iou = row[order], relation[order], iou[order]
    best = np.append(True, row[1:] != row[:-1])[: len(row)] & (iou > MATCH_IOU)
    found = np.full(count, -1)
    found[row[best]] = relation[best]
    return found


def _weighted_ap(found: Mapping, relation: np.ndarray, counts: np.ndarray) -> float:
    order = np.argsort(-found["score"], kind="stable")
    predicate = found["predicate"][order]
    relation = relation[order]
    hit = np.zeros(len(order), bool)
    places = np.flatnonzero(relation >= 0)
    hit[places[np.unique(relation[places], return_index=True)[1]]] = True  # a second one on it is wrong
    total = 0.0
    for label in np.flatnonzero(counts):
        hits = np.cumsum(hit[predicate == label])
        precision = hits / np.arange(1, len(hits) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        total += float((np.diff(hits, prepend=0) * envelope).sum())  # AP x its count
    return total / int(counts.sum())
