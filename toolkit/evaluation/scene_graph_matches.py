"""Which predicted relation finds which annotated one: flat arrays over many images, no loop over boxes or pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CHUNK_IMAGES = 64  # bounds memory


@dataclass
class Matches:
    """Annotated relations of all images, one row each, and the predictions that find them.

    image, index, predicate: (R,) image, index among the image's relations, predicate of each relation.
    triplets: (R, 3) subject class, object class, predicate. counts: (images,) relations per image.
    constrained, unconstrained, given_pairs: (M, 2) relation row, rank. `given_pairs` ranks only the predicted pairs
    that are annotated pairs.
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
        """(R,) int64 rank of the best prediction that finds each relation; the largest int64 when none does."""
        rank = np.full(len(self.image), np.iinfo(np.int64).max)
        np.minimum.at(rank, matches[:, 0], matches[:, 1])
        return rank

    def rows(self, matches: np.ndarray) -> np.ndarray:
        """(M, 3) image, rank, index of the relation in its image, sorted."""
        relation = matches[:, 0]
        rows = np.stack([self.image[relation], matches[:, 1], self.index[relation]], 1)
        return rows[np.lexsort(rows.T[::-1])]


def match_relations(
    truths: Sequence[Mapping], predictions: Sequence[Mapping], mode: str, iou_threshold: float, keep: int
) -> Matches:
    """Match every predicted pair, and the `keep` best (pair, predicate) combinations, with the annotated relations.

    Arguments as in `evaluate_scene_graphs`. Pairs are taken in the given order with their best predicate
    (constrained); combinations are ranked by subject score x object score x predicate score (unconstrained).
    """
    chunks, start = [], 0
    for lo in range(0, len(truths), CHUNK_IMAGES):
        hi = lo + CHUNK_IMAGES
        chunk = _Chunk(truths[lo:hi], predictions[lo:hi], mode, iou_threshold)
        chunks.append(chunk.match(keep, first_image=lo, first_relation=start))
        start += len(chunks[-1].image)
    return Matches(*(_joined([getattr(chunk, name) for chunk in chunks], name) for name in Matches.__annotations__))


def _joined(parts: list[np.ndarray], name: str) -> np.ndarray:
    if parts:
        return np.concatenate(parts)
    widths = {"triplets": (0, 3), "constrained": (0, 2), "unconstrained": (0, 2), "given_pairs": (0, 2)}
    return np.zeros(widths.get(name, (0,)), np.int64)


class _Chunk:
    """Flat arrays of some images; `slots` is the largest number of annotated relations of an image."""

    def __init__(self, truths: Sequence[Mapping], predictions: Sequence[Mapping], mode: str, iou_threshold: float):
        self.union, self.threshold = mode == "phrdet", np.float32(iou_threshold)
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
        self.predicate_scores = [np.asarray(p["predicate_scores"]) for p in predictions]  # they are most of the data
        if mode == "predcls":
            self.pair_scores = np.ones(len(self.pairs), np.result_type(*self.predicate_scores))
        else:
            self.pair_scores = _flat([np.asarray(p["scores"]) for p in predictions], (0,))[self.pairs].prod(1)
        self.candidates = self._box_matches(0), self._box_matches(1)

    def _read_truth(self, truths: Sequence[Mapping], relations: list[np.ndarray]) -> None:
        """Padded (images, slots, ...) arrays; a padded slot has class -2, which nothing equals."""
        shape = (len(truths), int(self.counts.max(initial=0)))
        self.ends = np.zeros((*shape, 2), np.int64)  # the box indices of subject and object in their image
        self.end_boxes, self.end_labels = np.zeros((*shape, 2, 4), np.float32), np.full((*shape, 2), -2, np.int64)
        self.predicates = np.full(shape, -2, np.int64)
        for i, (truth, rows) in enumerate(zip(truths, relations, strict=True)):
            if not len(rows):
                continue
            self.ends[i, : len(rows)] = rows[:, :2]
            self.end_boxes[i, : len(rows)] = np.asarray(truth["boxes"], np.float32)[rows[:, :2]]
            self.end_labels[i, : len(rows)] = np.asarray(truth["labels"])[rows[:, :2]]
            self.predicates[i, : len(rows)] = rows[:, 2]

    def _box_matches(self, end: int) -> np.ndarray:
        """(boxes, words) uint64, a bit for each slot: may the box be the subject (0) or object (1) of its relation?"""
        matches = self.labels[:, None] == self.end_labels[self.box_image, :, end]
        if not self.union:  # few boxes have the right class
            box, slot = matches.nonzero()
            ious = _iou(self.boxes[box], self.end_boxes[self.box_image[box], slot, end])
            matches[box, slot] = ious >= self.threshold
        bits = np.packbits(matches, axis=1)
        bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))
        return np.ascontiguousarray(bits).view(np.uint64)

    def _candidates(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row of `pairs` (n, 2) and slot of a relation, wherever both boxes may be its ends; rows ascend."""
        hit = self.candidates[0][pairs[:, 0]] & self.candidates[1][pairs[:, 1]]
        rows = hit.any(1).nonzero()[0]
        row, slot = np.unpackbits(hit[rows].view(np.uint8), axis=1).nonzero()
        return rows[row], slot

    def match(self, keep: int, first_image: int, first_relation: int) -> Matches:
        pair, slot = self._candidates(self.pairs)
        image = self.pair_image[pair]
        right = self._predicate_scores_of(pair).argmax(1) == self.predicates[image, slot] if len(pair) else image > 0
        pair, slot = self._unions_match(pair[right], slot[right])
        relation = self.starts[self.pair_image[pair]] + slot + first_relation
        constrained = np.stack([relation, self.rank[pair]], 1)
        given, given_rank = self._annotated_pairs()
        labels = self.end_labels[self.image, self.slot]
        predicate = self.predicates[self.image, self.slot]
        return Matches(
            image=self.image + first_image,
            index=self.slot,
            predicate=predicate,
            triplets=np.column_stack([labels, predicate]),
            counts=self.counts,
            constrained=constrained,
            unconstrained=self._match_unconstrained(keep) + np.asarray([[first_relation, 0]]),
            given_pairs=np.stack([relation, given_rank[pair]], 1)[given[pair]],
        )

    def _match_unconstrained(self, keep: int) -> np.ndarray:
        """(M, 2) relation row in this chunk, rank among the `keep` best (pair, predicate) combinations."""
        pair, predicate, rank = self._best_combinations(keep)
        row, slot = self._candidates(self.pairs[pair])
        right = predicate[row] == self.predicates[self.pair_image[pair[row]], slot]
        row, slot = row[right], slot[right]
        kept_pair, kept = self._union_mask(pair[row], slot)
        return np.stack([(self.starts[self.pair_image[kept_pair]] + slot)[kept], rank[row][kept]], 1)

    def _best_combinations(self, keep: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pair, predicate and rank of the `keep` best combinations of every image.

        The best `keep` combinations lie in the `keep` pairs whose best predicate scores highest, so only those are
        sorted. Equal scores are ranked by pair, then predicate.
        """
        if not len(self.pairs):
            return (np.zeros(0, np.int64),) * 3
        num_images, longest = len(self.num_pairs), int(self.num_pairs.max())
        dtype = np.result_type(self.pair_scores, *self.predicate_scores)
        best = np.full((num_images, longest), -np.inf, dtype)
        for own, start, out in zip(self.predicate_scores, self.pair_start, best, strict=True):
            out[: len(own)] = _row_maxima(own) * self.pair_scores[start : start + len(own)]
        rows = _largest(best, keep)
        real = rows < self.num_pairs[:, None]
        pair = np.where(real, rows + self.pair_start[:, None], 0)  # (images, kept pairs), pads point anywhere
        num_predicates = self.predicate_scores[0].shape[1]
        scores = np.full((*pair.shape, num_predicates), -np.inf, dtype)
        for own, kept, is_pair, out in zip(self.predicate_scores, rows, real, scores, strict=True):
            out[is_pair] = own[kept[is_pair]]
        scores *= self.pair_scores[pair][..., None]
        scores = scores.reshape(num_images, -1)
        chosen = _largest(scores, keep)
        chosen_scores = np.take_along_axis(scores, chosen, 1)
        chosen_pair = np.take_along_axis(pair, chosen // num_predicates, 1)
        predicate = chosen % num_predicates
        order = np.lexsort((predicate, chosen_pair, -chosen_scores))
        rank = np.broadcast_to(np.arange(order.shape[1]), order.shape)
        kept = np.take_along_axis(chosen_scores, order, 1) > -np.inf
        chosen_pair, predicate = (np.take_along_axis(values, order, 1) for values in (chosen_pair, predicate))
        return chosen_pair[kept], predicate[kept], rank[kept]

    def _predicate_scores_of(self, pair: np.ndarray) -> np.ndarray:
        """(n, P) of ascending rows of all pairs."""
        cuts = np.searchsorted(pair, np.append(self.pair_start, len(self.pairs)))
        images = zip(self.predicate_scores, self.pair_start, cuts[:-1], cuts[1:], strict=True)
        return np.concatenate([own[pair[first:last] - start] for own, start, first, last in images if first < last])

    def _annotated_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(P,) is the predicted pair an annotated pair, and its rank among those of its image."""
        if not len(self.pairs):
            return np.zeros(0, bool), np.zeros(0, np.int64)
        size = 1 + int(max(self.local_pairs.max(initial=0), self.ends.max(initial=0)))
        table = np.zeros((len(self.counts), size, size), bool)
        table[self.image, self.ends[self.image, self.slot, 0], self.ends[self.image, self.slot, 1]] = True
        given = table[self.pair_image, self.local_pairs[:, 0], self.local_pairs[:, 1]]
        total = np.cumsum(given)
        before = np.concatenate([[0], total])[self.pair_start]
        return given, total - before[self.pair_image] - 1

    def _unions_match(self, pair: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, kept = self._union_mask(pair, slot)
        return pair[kept], slot[kept]

    def _union_mask(self, pair: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pairs, and whether their union box matches that of the relation (always, unless phrdet)."""
        if not self.union:
            return pair, np.ones(len(pair), bool)
        predicted = _union(self.boxes[self.pairs[pair, 0]], self.boxes[self.pairs[pair, 1]])
        true = self.end_boxes[self.pair_image[pair], slot]
        return pair, _iou(predicted, _union(true[:, 0], true[:, 1])) >= self.threshold


def _positions(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sum,) group of every element and its place in the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def _flat(parts: list[np.ndarray], empty_shape: tuple[int, ...]) -> np.ndarray:
    full = [part for part in parts if len(part)]
    return np.concatenate(full) if full else np.zeros(empty_shape, parts[0].dtype if parts else np.float32)


def _row_maxima(values: np.ndarray) -> np.ndarray:
    """(rows,) largest of each row. Along the first axis NumPy compares whole vectors: a tenth of the time."""
    return np.ascontiguousarray(values.T).max(0) if len(values) else values[:, 0]


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """(rows, <= count) column indices of the largest values of each row, in no particular order."""
    if values.shape[1] <= count:
        return np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return np.argpartition(values, values.shape[1] - count, axis=1)[:, -count:]


def _iou(boxes1: np.ndarray, boxes2: np.ndarray) -> np.ndarray:
    """IoU of boxes (..., 4) xyxy, element by element, in float32 with widths x2 - x1 + 1 as in the original."""
    left_top = np.maximum(boxes1[..., :2], boxes2[..., :2])
    right_bottom = np.minimum(boxes1[..., 2:], boxes2[..., 2:])
    sides = np.maximum(right_bottom - left_top + 1, 0)
    inter = sides[..., 0] * sides[..., 1]
    areas = [(b[..., 2] - b[..., 0] + 1) * (b[..., 3] - b[..., 1] + 1) for b in (boxes1, boxes2)]
    return inter / (areas[0] + areas[1] - inter)


def _union(boxes1: np.ndarray, boxes2: np.ndarray) -> np.ndarray:
    return np.concatenate([np.minimum(boxes1, boxes2)[..., :2], np.maximum(boxes1, boxes2)[..., 2:]], -1)
