"""Matching of predicted with annotated relations, as flat arrays over many images, without loops over boxes or
pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from toolkit.detectors.scene_graphs import box_features

CHUNK_IMAGES = 64  # bounds memory
COMPACT_FIELDS = ("predicates", "combinations", "two_predicates", "two_scores")  # of `compact_graph`


@dataclass
class TripletMatches:
    """The R annotated relations of all images, one row each, and the predictions that find them.

    image, index, predicate: (R,) image of each relation, its index in the image, its predicate.
    triplets: (R, 3) subject class, object class, predicate. counts: (images,) number of relations of each image.
    constrained, unconstrained, given_pairs: (M, 2) one row for each match: row of the relation, and rank of the
    prediction. In `constrained` each pair has one predicate; in `unconstrained` all combinations of pair and predicate
    are ranked; in `given_pairs` only those predicted pairs are ranked that are annotated pairs.
    """

    image: np.ndarray
    index: np.ndarray
    predicate: np.ndarray
    triplets: np.ndarray
    counts: np.ndarray
    constrained: np.ndarray
    unconstrained: np.ndarray
    given_pairs: np.ndarray

    def first_rank(self, matches: np.ndarray) -> np.ndarray:
        """Return the rank (R,) int64 of the best prediction that finds each of the R relations; the largest int64 if no
        prediction does.

        matches: one of the three arrays of matches.
        """
        rank = np.full(len(self.image), np.iinfo(np.int64).max)
        np.minimum.at(rank, matches[:, 0], matches[:, 1])
        return rank

    def rows(self, matches: np.ndarray) -> np.ndarray:
        """Return M matches as rows (M, 3) of image, rank, and index of the relation in its image, sorted.

        matches: one of the three arrays of matches.
        """
        relation = matches[:, 0]
        rows = np.stack([self.image[relation], matches[:, 1], self.index[relation]], 1)
        return rows[np.lexsort(rows.T[::-1])]


def match_relations(
    truths: Sequence[Mapping],
    predictions: Sequence[Mapping],
    mode: str,
    iou_threshold: float,
    keep: int,
    one_box_each: bool = False,
) -> TripletMatches:
    """Match every predicted pair, and the `keep` best combinations of pair and predicate, with the annotated relations.

    The other arguments are those of `evaluate_scene_graphs`. Pairs are in the order given, each with its best predicate
    (constrained); combinations are ranked by subject score x object score x predicate score (unconstrained).
    one_box_each: an annotated object can be found only by the box that `boxes_of_objects` assigns to it; not in phrdet,
    which does not compare boxes with objects.
    """
    chunks = []
    start = 0
    for lo in range(0, len(truths), CHUNK_IMAGES):
        hi = lo + CHUNK_IMAGES
        chunk = _Chunk(truths[lo:hi], predictions[lo:hi], mode, iou_threshold, one_box_each)
        chunks.append(chunk.match(keep, first_image=lo, first_relation=start))
        start += len(chunks[-1].image)
    columns = {}
    for name in TripletMatches.__annotations__:
        columns[name] = _concatenate_field([getattr(chunk, name) for chunk in chunks], name)
    return TripletMatches(**columns)


def _concatenate_field(parts: list[np.ndarray], name: str) -> np.ndarray:
    if parts:
        return np.concatenate(parts)
    widths = {
        "triplets": (0, 3),
        "constrained": (0, 2),
        "unconstrained": (0, 2),
        "given_pairs": (0, 2),
    }
    return np.zeros(widths.get(name, (0,)), np.int64)


def compact_graph(prediction: Mapping, keep: int) -> dict[str, np.ndarray]:
    """Return a smaller form of a prediction that gives the same results in `match_relations` with this `keep`.

    `predicate_scores` is replaced by `predicates (P,)`, the best predicate of each of the P pairs, and `combinations
    (<= keep, 2)` int32, see `best_combinations`; `two_predicates` and `two_scores` of `best_two` are added.
    """
    scores = np.asarray(prediction["predicate_scores"])
    pair_scores = np.asarray(prediction["scores"])[np.asarray(prediction["pairs"])].prod(1)
    two, two_scores = best_two(prediction)
    combinations = best_combinations(scores, pair_scores, keep)
    compact = {name: value for name, value in prediction.items() if name != "predicate_scores"}
    compact |= {
        "two_predicates": two.astype(np.int32),
        "two_scores": two_scores,
        "predicates": scores.argmax(1) if len(scores) else np.zeros(0, np.int64),
        "combinations": combinations.astype(np.int32),
    }
    return compact


def best_predicates(prediction: Mapping, rows: np.ndarray | slice) -> np.ndarray:
    """Return the best predicate, from 0, of some pairs of an image. rows: the rows of these pairs in the prediction."""
    if "combinations" in prediction:
        return np.asarray(prediction["predicates"])[rows]
    return np.asarray(prediction["predicate_scores"])[rows].argmax(1)


def best_two(prediction: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Return the two best predicates (P, 2) of each of the P pairs of an image, from 0, best first, and their scores
    (P, 2); both are (P, 1) if there is only one predicate."""
    if "two_predicates" in prediction:
        return np.asarray(prediction["two_predicates"]), np.asarray(prediction["two_scores"])
    scores = torch.from_numpy(np.require(prediction["predicate_scores"], requirements="W"))
    ranked = scores.sort(dim=1, descending=True, stable=True)
    return ranked.indices[:, :2].numpy(), ranked.values[:, :2].numpy()


def best_combinations(predicate_scores: np.ndarray, pair_scores: np.ndarray, keep: int) -> np.ndarray:
    """Return the row of the pair and the predicate, (<= keep, 2) int64, of the best combinations of an image, best
    first.

    predicate_scores: (P, predicates) of P pairs, multiplied by pair_scores: (P,). The best `keep` combinations are
    among the `keep` pairs whose best predicate scores highest, so only the combinations of these pairs are sorted.
    Equal scores are in the order of pairs, then predicates.
    """
    scores = np.asarray(predicate_scores)
    count = np.shape(predicate_scores)[1]
    if not len(scores):
        return np.zeros((0, 2), np.int64)
    # By torch, which compares whole vectors along a row: the largest of each in a fifth of NumPy's time.
    best = torch.from_numpy(np.require(scores, requirements="W")).amax(1).numpy()
    rows = _largest(best * pair_scores, keep)
    products = (scores[rows] * pair_scores[rows, None]).ravel()
    chosen = _largest(products, keep)
    chosen = chosen[np.argsort(-products[chosen], kind="stable")]
    return np.column_stack([rows[chosen // count], chosen % count])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return (<= count,) ascending indices of the largest values; ties at the cut take the first."""
    if len(values) <= count:
        return np.arange(len(values))
    smallest = np.partition(values, len(values) - count)[-count]
    above = np.flatnonzero(values > smallest)
    equal = np.flatnonzero(values == smallest)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def boxes_of_objects(truth: Mapping, prediction: Mapping, iou_threshold: float = 0.5) -> np.ndarray:
    """Return the annotated object (M,) that each of M predicted boxes is assigned to, -1 for none; each object has at
    most one box.

    As in COCO's AP, boxes are assigned in the order of their scores (of equal scores, the earlier box first): each to
    the object of its class that it overlaps most, with an IoU of at least `iou_threshold`, among those that have no box
    yet.
    """
    found = np.full(len(prediction["boxes"]), -1)
    same_class = np.asarray(prediction["labels"])[:, None] == np.asarray(truth["labels"])
    box, object_ = same_class.nonzero()
    boxes = np.asarray(prediction["boxes"], np.float32)
    objects = np.asarray(truth["boxes"], np.float32)
    ious = array_iou_plus_one(boxes[box], objects[object_])
    scores = np.asarray(prediction["scores"])[box]
    order = np.lexsort((object_, -ious, box, -scores))  # the best box first, and of it the largest overlap
    enough = ious[order] >= np.float32(iou_threshold)
    taken = set()
    for i in order[enough].tolist():
        if found[box[i]] < 0 and object_[i] not in taken:
            found[box[i]] = object_[i]
            taken.add(object_[i])
    return found


class _Chunk:
    """Flat arrays of some images; `slots` is the largest number of annotated relations of an image."""

    def __init__(
        self,
        truths: Sequence[Mapping],
        predictions: Sequence[Mapping],
        mode: str,
        iou_threshold: float,
        one_box_each: bool = False,
    ):
        self.union = mode == "phrdet"
        self.threshold = np.float32(iou_threshold)
        objects = truths if mode == "predcls" else predictions
        relations = [np.asarray(t["relations"], dtype=np.int64).reshape(-1, 3) for t in truths]
        self.counts = np.asarray([len(r) for r in relations], dtype=np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.image, self.slot = _positions(self.counts)
        self._read_truth(truths, relations)
        num_boxes = np.asarray([len(o["boxes"]) for o in objects], dtype=np.int64)
        self.boxes = _flat([np.asarray(o["boxes"], np.float32) for o in objects], (0, 4))
        self.labels = _flat([np.asarray(o["labels"]) for o in objects], (0,))
        self.box_image, _ = _positions(num_boxes)
        box_start = np.cumsum(num_boxes) - num_boxes
        pairs = [np.asarray(p["pairs"], dtype=np.int64).reshape(-1, 2) for p in predictions]
        self.num_pairs = np.asarray([len(p) for p in pairs], dtype=np.int64)
        self.pair_image, self.rank = _positions(self.num_pairs)
        self.local_pairs = _flat(pairs, (0, 2))
        self.pairs = self.local_pairs + box_start[self.pair_image, None]
        self.pair_start = np.cumsum(self.num_pairs) - self.num_pairs
        self.predictions = predictions  # their scores of predicates are most of the data
        if mode == "predcls":
            self.pair_scores = np.ones(len(self.pairs), np.float32)
        else:
            scores = _flat([np.asarray(p["scores"]) for p in predictions], (0,))
            self.pair_scores = scores[self.pairs].prod(1)
        self.stands_for = None
        if one_box_each and not self.union:
            graphs = predictions
            if mode == "predcls":
                graphs = [{**truth, "scores": np.ones(len(truth["boxes"]))} for truth in truths]
            found = []
            for truth, graph in zip(truths, graphs, strict=True):
                found.append(boxes_of_objects(truth, graph, iou_threshold))
            self.stands_for = _flat(found, (0,))
        self.candidates = (self._box_matches(0), self._box_matches(1))

    def _read_truth(self, truths: Sequence[Mapping], relations: list[np.ndarray]) -> None:
        """Set the padded arrays (images, slots, ...) of the annotated relations; a padded slot has class -2, which
        equals no class."""
        shape = (len(truths), int(self.counts.max(initial=0)))
        self.ends = np.full((*shape, 2), -2, np.int64)  # the box indices of subject and object in their image
        self.end_boxes = np.zeros((*shape, 2, 4), np.float32)
        self.end_labels = np.full((*shape, 2), -2, np.int64)
        self.predicates = np.full(shape, -2, np.int64)
        for i, (truth, rows) in enumerate(zip(truths, relations, strict=True)):
            if not len(rows):
                continue
            ends = rows[:, :2]
            boxes = np.asarray(truth["boxes"], np.float32)
            labels = np.asarray(truth["labels"])
            self.ends[i, : len(rows)] = ends
            self.end_boxes[i, : len(rows)] = boxes[ends]
            self.end_labels[i, : len(rows)] = labels[ends]
            self.predicates[i, : len(rows)] = rows[:, 2]

    def _box_matches(self, end: int) -> np.ndarray:
        """Return (boxes, words) uint64 with a bit for each slot: may the box be the subject (0) or object (1) of its
        relation?"""
        if self.stands_for is not None:
            matches = self.stands_for[:, None] == self.ends[self.box_image, :, end]
        else:
            matches = self.labels[:, None] == self.end_labels[self.box_image, :, end]
        if self.stands_for is None and not self.union:  # few boxes have the right class
            box, slot = matches.nonzero()
            ious = array_iou_plus_one(self.boxes[box], self.end_boxes[self.box_image[box], slot, end])
            matches[box, slot] = ious >= self.threshold
        bits = np.packbits(matches, axis=1)
        bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))
        return np.ascontiguousarray(bits).view(np.uint64)

    def _candidates(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return matches of pairs (n, 2) with relations whose ends both boxes may be: row of the pair, in ascending
        order, and slot of the relation."""
        subjects, objects = self.candidates
        hit = subjects[pairs[:, 0]] & objects[pairs[:, 1]]  # (n, words), a bit for each slot
        (rows,) = hit.any(1).nonzero()
        bits = np.unpackbits(hit[rows].view(np.uint8), axis=1)
        row, slot = bits.nonzero()
        return rows[row], slot

    def match(self, keep: int, first_image: int, first_relation: int) -> TripletMatches:
        pair, slot = self._candidates(self.pairs)
        image = self.pair_image[pair]
        right = self._best_predicates(pair) == self.predicates[image, slot]
        right[right] = self._unions_match(pair[right], slot[right])
        pair = pair[right]
        slot = slot[right]
        relation = self.starts[self.pair_image[pair]] + slot + first_relation
        constrained = np.stack([relation, self.rank[pair]], 1)
        given, given_rank = self._annotated_pairs()
        of_given = np.stack([relation, given_rank[pair]], 1)[given[pair]]
        unconstrained = self._match_unconstrained(keep)
        labels = self.end_labels[self.image, self.slot]
        predicate = self.predicates[self.image, self.slot]
        return TripletMatches(
            image=self.image + first_image,
            index=self.slot,
            predicate=predicate,
            triplets=np.column_stack([labels, predicate]),
            counts=self.counts,
            constrained=constrained,
            unconstrained=unconstrained + np.asarray([[first_relation, 0]]),
            given_pairs=of_given,
        )

    def _match_unconstrained(self, keep: int) -> np.ndarray:
        """Return (M, 2) relation row in this chunk, rank among the `keep` best (pair, predicate) combinations."""
        pair, predicate, rank = self._combinations(keep)
        row, slot = self._candidates(self.pairs[pair])
        right = predicate[row] == self.predicates[self.pair_image[pair[row]], slot]
        right[right] = self._unions_match(pair[row[right]], slot[right])
        row = row[right]
        slot = slot[right]
        image = self.pair_image[pair[row]]
        return np.stack([self.starts[image] + slot, rank[row]], 1)

    def _combinations(self, keep: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return pair, predicate and rank of the `keep` best combinations of every image."""
        best = []
        for prediction, start, count in zip(self.predictions, self.pair_start, self.num_pairs, strict=True):
            if "combinations" in prediction:
                best.append(prediction["combinations"][:keep])
            else:
                pair_scores = self.pair_scores[start : start + count]
                best.append(best_combinations(prediction["predicate_scores"], pair_scores, keep))
        image, rank = _positions(np.asarray([len(rows) for rows in best], np.int64))
        pair, predicate = _flat([np.asarray(rows, np.int64) for rows in best], (0, 2)).T
        return pair + self.pair_start[image], predicate, rank

    def _best_predicates(self, pair: np.ndarray) -> np.ndarray:
        """Return the (n,) best predicates of ascending rows of all pairs."""
        cuts = np.searchsorted(pair, np.append(self.pair_start, len(self.pairs)))
        parts = [np.zeros(0, np.int64)]
        for prediction, start, first, last in zip(self.predictions, self.pair_start, cuts[:-1], cuts[1:], strict=True):
            if first < last:
                rows = pair[first:last] - start
                parts.append(best_predicates(prediction, rows))
        return np.concatenate(parts)

    def _annotated_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each predicted pair (P,), whether it is annotated, and its rank among the annotated pairs of its
        image."""
        if not len(self.pairs):
            return np.zeros(0, bool), np.zeros(0, np.int64)
        size = 1 + int(max(self.local_pairs.max(initial=0), self.ends.max(initial=0)))
        table = np.zeros((len(self.counts), size, size), bool)
        ends = self.ends[self.image, self.slot]  # (R, 2)
        table[self.image, ends[:, 0], ends[:, 1]] = True
        given = table[self.pair_image, self.local_pairs[:, 0], self.local_pairs[:, 1]]
        # Given 1 0 1 and, in the next image, 1 1: the totals 1 1 2 3 4, of which 0 and 2 came before, and the ranks
        # 0 - 1 and 0 1.
        total = np.cumsum(given)
        before = np.concatenate([[0], total])[self.pair_start]
        return given, total - before[self.pair_image] - 1

    def _unions_match(self, pair: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """Return (n,) bool: does the union box of the pair match that of the relation? Always true except in phrdet."""
        if not self.union:
            return np.ones(len(pair), bool)
        subjects, objects = self.pairs[pair].T
        predicted = array_union_boxes(self.boxes[subjects], self.boxes[objects])
        true = self.end_boxes[self.pair_image[pair], slot]
        annotated = array_union_boxes(true[:, 0], true[:, 1])
        return array_iou_plus_one(predicted, annotated) >= self.threshold


def _positions(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (sum,) group of every element and its place in the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return group, np.arange(len(group)) - starts[group]


def _flat(parts: list[np.ndarray], empty_shape: tuple[int, ...]) -> np.ndarray:
    full = [part for part in parts if len(part)]
    if full:
        return np.concatenate(full)
    return np.zeros(empty_shape, parts[0].dtype if parts else np.float32)


def array_iou_plus_one(boxes1: np.ndarray, boxes2: np.ndarray) -> np.ndarray:
    """Return `box_features.iou_plus_one` of NumPy arrays (..., 4) float32, which are broadcast."""
    return box_features.iou_plus_one(torch.as_tensor(boxes1), torch.as_tensor(boxes2)).numpy()


def array_union_boxes(boxes1: np.ndarray, boxes2: np.ndarray) -> np.ndarray:
    """Return `box_features.union_boxes` of NumPy arrays (..., 4)."""
    return box_features.union_boxes(torch.as_tensor(boxes1), torch.as_tensor(boxes2)).numpy()
