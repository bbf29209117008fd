"""Ranks at which predictions find annotated relations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from toolkit.boxes import common_and_union

NEVER = np.iinfo(np.int64).max
MATCH_IOU = 0.5


@dataclass
class Matches:
    """Annotated relations of all images, one row each, and the best predictions that find them.

    image, predicate: (R,) of each relation. triplets: (R, 3) subject class, object class, predicate.
    counts: (images,) relations per image.
    constrained, unconstrained, given_pairs: (R,) int64 rank of the best prediction; `NEVER` when none finds it.
    `given_pairs` ranks only the predicted pairs that are annotated pairs.
    """

    image: np.ndarray
    predicate: np.ndarray
    triplets: np.ndarray
    counts: np.ndarray
    constrained: np.ndarray
    unconstrained: np.ndarray
    given_pairs: np.ndarray


def match_relations(truths: Sequence[Mapping], predictions: Sequence[Mapping], mode: str, keep: int) -> Matches:
    """Match every predicted pair, and the `keep` best (pair, predicate) combinations, with the annotated relations.

    Arguments as in `evaluate_scene_graphs`. Pairs are taken in the given order with their best predicate
    (constrained); combinations are ranked by subject score x object score x predicate score (unconstrained).
    """
    relations = [np.asarray(truth["relations"], np.int64).reshape(-1, 3) for truth in truths]
    counts = np.asarray([len(rows) for rows in relations], np.int64)
    triplets, ranks = [np.zeros((0, 3), np.int64)], [np.zeros((3, 0), np.int64)]
    for truth, prediction, rows in zip(truths, predictions, relations, strict=True):
        if len(rows):
            triplets.append(np.column_stack([np.asarray(truth["labels"])[rows[:, :2]], rows[:, 2]]))
            ranks.append(_first_ranks(truth, prediction, rows, mode, keep))
    triplets = np.concatenate(triplets)
    image = np.repeat(np.arange(len(counts)), counts)
    return Matches(image, triplets[:, 2], triplets, counts, *np.concatenate(ranks, axis=1))


def _first_ranks(truth: Mapping, prediction: Mapping, relations: np.ndarray, mode: str, keep: int) -> np.ndarray:
    """(3, R) the columns `constrained`, `unconstrained` and `given_pairs` of the relations (R, 3) of an image."""
    subjects, objects, wanted = relations.T
    same = same_boxes(truth, truth if mode == "predcls" else prediction)
    may_be_subject, may_be_object = same[:, subjects], same[:, objects]  # (boxes, R)
    pairs = np.ascontiguousarray(np.asarray(prediction["pairs"], np.int64).reshape(-1, 2).T)  # (2, P)

    def found_by(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _places(may_be_subject.take(pairs[0], 0) & may_be_object.take(pairs[1], 0))

    row, relation = found_by(pairs)
    right = best_predicates(prediction, row) == wanted[relation]
    row, relation = row[right], relation[right]
    size = 1 + max(pairs.max(initial=0), subjects.max(), objects.max())
    annotated = np.zeros(size**2, bool)
    annotated[subjects * size + objects] = True
    given = annotated.take(pairs[0] * size + pairs[1])
    pair, predicate = _combinations(prediction, pairs, mode, keep).T
    rank, other = found_by(pairs[:, pair])
    right = predicate[rank] == wanted[other]
    own = given[row]
    ranks = np.full((3, len(relations)), NEVER)
    # Rows ascend: of those that find a relation the first is written last.
    ranks[0, relation[::-1]] = row[::-1]
    ranks[1, other[right][::-1]] = rank[right][::-1]
    ranks[2, relation[own][::-1]] = (np.cumsum(given) - 1)[row[own]][::-1]
    return ranks


def same_boxes(truth: Mapping, found: Mapping) -> np.ndarray:
    """(M, N) bool: may a predicted box be an annotated one? Of the same class, and IoU >= 0.5 with "+1" widths."""
    same = np.asarray(found["labels"])[:, None] == np.asarray(truth["labels"])[None]
    box, true_box = _places(same)  # few boxes have the right class
    boxes, true_boxes = (np.asarray(each["boxes"], np.float32) for each in (found, truth))
    common, union = common_and_union(boxes[box], true_boxes[true_box], pixel=1)
    same[box, true_box] = common / union >= MATCH_IOU
    return same


def _places(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`mask.nonzero()` of (n, m), many times faster."""
    return np.divmod(np.flatnonzero(mask), mask.shape[1])


def _combinations(prediction: Mapping, pairs: np.ndarray, mode: str, keep: int) -> np.ndarray:
    if "combinations" in prediction:
        return np.asarray(prediction["combinations"][:keep], np.int64)
    given = mode == "predcls"
    pair_scores = np.ones(pairs.shape[1], np.float32) if given else _pair_scores(prediction, pairs)
    return best_combinations(prediction["predicate_scores"], pair_scores, keep)


def _pair_scores(prediction: Mapping, pairs: np.ndarray) -> np.ndarray:
    scores = np.asarray(prediction["scores"])
    return scores.take(pairs[0]) * scores.take(pairs[1])


def compact_graph(prediction: Mapping, keep: int) -> dict[str, np.ndarray]:
    """A prediction that says as much to `match_relations` with that `keep`, and is much smaller: `predicates (P,)` and
    `combinations (<= keep, 2)` int32, see `best_combinations`, in place of `predicate_scores`."""
    scores = np.asarray(prediction["predicate_scores"])
    pair_scores = _pair_scores(prediction, np.asarray(prediction["pairs"]).T)
    compact = {
        "predicates": scores.argmax(1) if len(scores) else np.zeros(0, np.int64),
        "combinations": best_combinations(scores, pair_scores, keep).astype(np.int32),
    }
    return {name: value for name, value in prediction.items() if name != "predicate_scores"} | compact


def best_predicates(prediction: Mapping, rows: np.ndarray | slice) -> np.ndarray:
    """The best predicate of these pairs of an image, from 0."""
    if "combinations" in prediction:
        return np.asarray(prediction["predicates"])[rows]
    return np.asarray(prediction["predicate_scores"])[rows].argmax(1)


def best_combinations(predicate_scores: np.ndarray, pair_scores: np.ndarray, keep: int) -> np.ndarray:
    """(<= keep, 2) int64 row of the pair and predicate of the best combinations of an image, best first.

    predicate_scores: (P, predicates), pair_scores: (P,) that they are multiplied by. The best `keep` lie in the `keep`
    pairs whose best predicate scores highest, so only those are sorted. Equal ones are ranked by pair, then predicate.
    """
    scores, count = np.asarray(predicate_scores), np.shape(predicate_scores)[1]
    if not len(scores):
        return np.zeros((0, 2), np.int64)
    # By torch, which compares whole vectors along a row: the largest of each in a fifth of NumPy's time.
    best = torch.from_numpy(np.require(scores, requirements="W")).amax(1).numpy()
    rows = np.sort(_largest(best * pair_scores, keep))
    products = (scores[rows] * pair_scores[rows, None]).ravel()
    chosen = np.sort(_largest(products, keep))
    chosen = chosen[np.argsort(-products[chosen], kind="stable")]
    return np.column_stack([rows[chosen // count], chosen % count])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """(<= count,) indices of the largest values, in no particular order."""
    return np.arange(len(values)) if len(values) <= count else np.argpartition(values, len(values) - count)[-count:]
