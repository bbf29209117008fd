"""Scene graph metrics: R@K, ng-R@K, zR@K, ng-zR@K, mR@K, ng-mR@K, A@K, computed for all images at once.

Definitions follow Scene-Graph-Benchmark (`sgg_eval.py`), which is based on Neural Motifs (Zellers et al., 2018), VCTree
for mR (Tang et al., 2019) and Zhang et al., 2019 for A; R@relative and mR@relative follow SGG-Benchmark. Classes and
predicates are counted from 0, without background.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.triplet_matches import TripletMatches, match_relations

PROTOCOLS = ("original", "strict")


@dataclass(frozen=True)
class SceneGraphMetrics:
    """Results of `evaluate_scene_graphs`. In shapes, T is the length of `top`, the values of K.

    values: (T,) float64 for each of R, ngR, zR, ngzR, mR, ngmR, F1 (harmonic mean of R and mR) and, when the boxes are
    given (predcls, sgcls), A. NaN where nothing was evaluated.
    per_image: (T, images) for R, ngR (columns `evaluated_images`) and zR, ngzR (columns `zero_shot_images`).
    per_predicate: (T, num_predicates) for mR and ngmR.
    relative: R and mR with a K for each image, the number of its annotated relations.
    images_per_predicate: (num_predicates,) number of evaluated images that contain the predicate.
    evaluated_images, zero_shot_images: indices of the images that are counted in R, and in zR.
    accuracy_hits, accuracy_counts: (T, images) correct relations and all relations, the numbers behind A; empty in
    sgdet.
    matches, unconstrained_matches: (M, 3) int64 rows of image, rank of the prediction, and index of the relation that
    the prediction finds.
    """

    top: tuple[int, ...]
    values: dict[str, np.ndarray]
    per_image: dict[str, np.ndarray]
    per_predicate: dict[str, np.ndarray]
    relative: dict[str, float]
    images_per_predicate: np.ndarray
    evaluated_images: np.ndarray
    zero_shot_images: np.ndarray
    matches: np.ndarray
    unconstrained_matches: np.ndarray
    accuracy_hits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    accuracy_counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def as_row(self, predicate_names: Sequence[str] = ()) -> dict[str, float | None]:
        """Return {"R@20": ..., "mR@50": ..., "R@relative": ...}; None if a metric is undefined (JSON has no NaN).

        predicate_names: if given, add "mR@100/<name>" for each predicate, at the largest K.
        """
        row = {}
        for name, values in self.values.items():
            for k, value in zip(self.top, values, strict=True):
                row[f"{name}@{k}"] = value
        for name, value in self.relative.items():
            row[f"{name}@relative"] = value
        if predicate_names:
            recalls = self.per_predicate["mR"][-1]
            for name, value in zip(predicate_names, recalls, strict=True):
                row[f"mR@{self.top[-1]}/{name}"] = value
        return {key: None if np.isnan(value) else float(value) for key, value in row.items()}


def evaluate_scene_graphs(
    truths: Sequence[Mapping],
    predictions: Sequence[Mapping],
    mode: str,
    num_predicates: int,
    zero_shot: np.ndarray | None = None,
    iou_threshold: float = 0.5,
    top: Sequence[int] = (20, 50, 100),
    protocol: str = "original",
) -> SceneGraphMetrics:
    """Compare predicted scene graphs with the annotated ones, image by image in the same order.

    Args:
        truths: per image `boxes` (N, 4) xyxy pixels, `labels` (N,), `relations` (R, 3) subject, object, predicate.
        predictions: per image, in the same pixels: M objects, `boxes` (M, 4), `labels` (M,), `scores` (M,), and P
            pairs, `pairs` (P, 2) rows of `boxes`, best first (the order is not checked), and `predicate_scores` (P,
            num_predicates) without background, or instead the result of `compact_graph`. In predcls, boxes, labels and
            scores come from the truth.
        mode: predcls, sgcls, sgdet, or phrdet (sgdet with the IoU of the union boxes).
        zero_shot: (Z, 3) subject class, object class and predicate of the Z triplets never seen in training; None: zR
            is NaN.
        iou_threshold: smallest IoU of a match, with 1 added to widths and heights, as usual in the field.
        top: the values of K.
        protocol: "original", as for published numbers, leaves images without a predicted pair out of every mean, and a
            predicate that is never annotated counts 0 in mR. "strict" counts such images as recall 0, leaves such
            predicates out, and matches each object with only one box (`boxes_of_objects`; not in phrdet). Otherwise
            several boxes of one object could each bring another predicate of the same pair into R@K (Lorenz et al.,
            ECCV 2024).

    Images without annotated relations are left out in both protocols. One prediction may find several relations, and a
    repeated relation counts repeatedly.

    Raises BadInput for an unknown mode or protocol and for predictions that do not fit their image.
    """
    _check_graphs(truths, predictions, mode, protocol, num_predicates)
    matches = match_relations(
        truths,
        predictions,
        mode,
        iou_threshold,
        max(top),
        protocol == "strict",
    )
    counts = np.bincount(matches.image, minlength=len(truths))
    evaluated = counts > 0
    if protocol == "original":
        has_pairs = [len(prediction["pairs"]) > 0 for prediction in predictions]
        evaluated &= np.asarray(has_pairs, dtype=bool)
    return _measure(matches, evaluated, num_predicates, zero_shot, tuple(top), mode, protocol)


def _check_graphs(truths, predictions, mode: str, protocol: str, num_predicates: int) -> None:
    problems = []
    if mode not in ("predcls", "sgcls", "sgdet", "phrdet"):
        problems.append(f"mode is {mode!r}; expected predcls, sgcls, sgdet or phrdet")
    if protocol not in PROTOCOLS:
        problems.append(f"protocol is {protocol!r}; expected original or strict")
    if len(truths) != len(predictions):
        raise BadInput([*problems, f"{len(predictions)} predictions for {len(truths)} images; expected one per image"])
    for index, (truth, prediction) in enumerate(zip(truths, predictions, strict=True)):
        pairs = prediction["pairs"]
        with_boxes = truth if mode == "predcls" else prediction
        num_boxes = len(with_boxes["boxes"])
        if len(pairs) and not 0 <= int(pairs.min()) <= int(pairs.max()) < num_boxes:
            problems.append(f"image {index}: pairs name box {int(pairs.max())}, but there are {num_boxes} boxes")
        problems += [f"image {index}: {fault}" for fault in _wrong_scores(prediction, num_predicates)]
    if problems:
        raise BadInput(problems)


def _wrong_scores(prediction: Mapping, num_predicates: int) -> list[str]:
    pairs = len(prediction["pairs"])
    if "combinations" not in prediction:
        shape = tuple(prediction["predicate_scores"].shape)
        expected = (pairs, num_predicates)
        return [] if shape == expected else [f"predicate_scores is {shape}; expected {expected}"]
    rows = prediction["combinations"]
    predicates = prediction["predicates"]
    inside = True
    if len(rows):
        last_pair, last_predicate = rows.max(axis=0)
        inside = rows.min() >= 0 and last_pair < pairs and last_predicate < num_predicates
    if inside and len(predicates) == pairs:
        return []
    return [f"combinations and predicates do not fit {pairs} pairs and {num_predicates} predicates"]


def _measure(
    matches: TripletMatches,
    evaluated: np.ndarray,
    num_predicates: int,
    zero_shot: np.ndarray | None,
    top: tuple[int, ...],
    mode: str,
    protocol: str,
) -> SceneGraphMetrics:
    images = np.flatnonzero(evaluated)
    counts = np.bincount(matches.image, minlength=len(evaluated))
    first = {
        "": matches.first_rank(matches.constrained),
        "ng": matches.first_rank(matches.unconstrained),
    }
    unseen = _in_triplets(matches, zero_shot) & evaluated[matches.image]
    seen_images = np.flatnonzero(np.bincount(matches.image[unseen], minlength=len(evaluated)))
    values = {}
    per_image = {}
    per_predicate = {}
    tops = (*top, counts[matches.image])  # the last is relative: the number of the image's relations
    undefined = np.full(len(tops), np.nan)
    for prefix, rank in first.items():
        hits = [rank < k for k in tops]
        everything = np.ones(len(rank), dtype=bool)
        per_image[f"{prefix}R"] = np.stack([_recall(matches, hit, everything)[images] for hit in hits])
        per_image[f"{prefix}zR"] = np.stack([_recall(matches, hit, unseen)[seen_images] for hit in hits])
        recalls = [_predicate_recall(matches, hit, evaluated, num_predicates) for hit in hits]
        per_predicate[f"{prefix}mR"] = np.stack(recalls)
    for name, recalls in per_image.items():
        values[name] = recalls.mean(1) if recalls.shape[1] else undefined
    images_per_predicate = _images_per_predicate(matches, evaluated, num_predicates)
    present = images_per_predicate > 0 if protocol == "strict" else np.ones(num_predicates, dtype=bool)
    for name, recalls in per_predicate.items():
        values[name] = recalls[:, present].mean(1) if present.any() else undefined
    relative = {name: values[name][-1] for name in ("R", "mR")}
    values = _of_fixed_tops(values)
    values["F1"] = _harmonic_mean(values["R"], values["mR"])
    accuracy = {}
    if mode in ("predcls", "sgcls"):
        hits, of_images = _accuracy(matches, images, counts[images], top)
        accuracy = {"accuracy_hits": hits, "accuracy_counts": of_images}
        values["A"] = hits.sum(1) / of_images.sum(1) if len(images) else undefined[:-1]
    return SceneGraphMetrics(
        top=top,
        values=_renamed(values),
        per_image=_renamed(_of_fixed_tops(per_image)),
        per_predicate=_of_fixed_tops(per_predicate),
        relative=relative,
        images_per_predicate=images_per_predicate,
        evaluated_images=images,
        zero_shot_images=seen_images,
        matches=matches.rows(matches.constrained),
        unconstrained_matches=matches.rows(matches.unconstrained),
        **accuracy,
    )


def _of_fixed_tops(metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the metrics without their last row, which is that of the relative K."""
    return {name: results[:-1] for name, results in metrics.items()}


def _accuracy(
    matches: TripletMatches,
    images: np.ndarray,
    counts: np.ndarray,
    top: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Return (K, images) float64 hits and numbers of relations behind A@K. counts: relations of the `images`."""
    rank = matches.first_rank(matches.given_pairs)
    hits = []
    for k in top:
        of_all = np.bincount(matches.image[rank < k], minlength=len(matches.counts))
        hits.append(of_all[images])
    hits = np.stack(hits)
    of_images = np.broadcast_to(counts, hits.shape)
    return hits.astype(np.float64), of_images.astype(np.float64)


def _renamed(metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    order = ("R", "ngR", "zR", "ngzR", "mR", "ngmR", "F1", "A")
    return {name: metrics[name] for name in order if name in metrics}


def _recall(matches: TripletMatches, hit: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return the (images,) share of the relations `among` that are hit; NaN for an image without any."""
    size = len(matches.counts)
    total = np.bincount(matches.image[among], minlength=size)
    with np.errstate(invalid="ignore"):
        return np.bincount(matches.image[among & hit], minlength=size) / total


def _predicate_recall(
    matches: TripletMatches, hit: np.ndarray, evaluated: np.ndarray, num_predicates: int
) -> np.ndarray:
    """Return (num_predicates,) recall per image and predicate, averaged over the images that contain it; 0 if none
    does."""
    kept = evaluated[matches.image]
    cell = matches.image * num_predicates + matches.predicate
    size = len(evaluated) * num_predicates
    total = np.bincount(cell[kept], minlength=size).reshape(-1, num_predicates)
    hits = np.bincount(cell[kept & hit], minlength=size).reshape(-1, num_predicates)
    recall = hits / np.maximum(total, 1)
    return recall.sum(0) / np.maximum((total > 0).sum(0), 1)


def _images_per_predicate(matches: TripletMatches, evaluated: np.ndarray, num_predicates: int) -> np.ndarray:
    kept = evaluated[matches.image]
    cells = np.unique(matches.image[kept] * num_predicates + matches.predicate[kept])
    return np.bincount(cells % num_predicates, minlength=num_predicates)


def _in_triplets(matches: TripletMatches, triplets: np.ndarray | None) -> np.ndarray:
    """Return (R,) bool: is the relation's (subject class, object class, predicate) listed?"""
    if triplets is None or not len(triplets) or not len(matches.triplets):
        return np.zeros(len(matches.triplets), dtype=bool)
    both = np.concatenate([np.asarray(triplets, dtype=np.int64), matches.triplets])
    _, key = np.unique(both, axis=0, return_inverse=True)
    key = key.reshape(-1)
    return np.isin(key[len(triplets) :], key[: len(triplets)])


def _harmonic_mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = a + b
    undefined_or_0 = np.where(np.isnan(total), np.nan, 0.0)
    return np.divide(2 * a * b, total, out=undefined_or_0, where=total > 0)
