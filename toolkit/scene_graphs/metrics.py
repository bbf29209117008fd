"""Scene graph metrics: R@K, ng-R@K, zR@K, ng-zR@K, mR@K, ng-mR@K, A@K, over all images at once.

Definitions follow Scene-Graph-Benchmark (`sgg_eval.py`), which goes back to Neural Motifs (Zellers et al., 2018),
VCTree for mR (Tang et al., 2019) and Zhang et al., 2019 for A. Classes and predicates are counted from 0, without
background.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.errors import BadInput
from toolkit.scene_graphs.batch import MODES
from toolkit.scene_graphs.matches import Matches, match_relations

PROTOCOLS = ("original", "strict")


@dataclass(frozen=True)
class SceneGraphMetrics:
    """What `evaluate_scene_graphs` measures; K is the length of `top`.

    values: (K,) float64 for each of R, ngR, zR, ngzR, mR, ngmR, F1 (harmonic mean of R and mR) and, when the boxes
        are given (predcls, sgcls), A. NaN where nothing was evaluated.
    per_image: (K, images) for R, ngR (columns `evaluated_images`) and zR, ngzR (columns `zero_shot_images`).
    per_predicate: (K, num_predicates) for mR and ngmR.
    images_per_predicate: (num_predicates,) evaluated images that contain the predicate.
    """

    top: tuple[int, ...]
    values: dict[str, np.ndarray]
    per_image: dict[str, np.ndarray]
    per_predicate: dict[str, np.ndarray]
    images_per_predicate: np.ndarray
    evaluated_images: np.ndarray
    zero_shot_images: np.ndarray

    def as_row(self, predicate_names: Sequence[str] = ()) -> dict[str, float | None]:
        """{"R@20": ..., "mR@50": ..., "mR@100/on": ...}; None where a metric is undefined (JSON has no NaN)."""
        row = {f"{name}@{k}": v for name, values in self.values.items() for k, v in zip(self.top, values, strict=True)}
        if predicate_names:
            last = self.per_predicate["mR"][-1]
            row |= {f"mR@{self.top[-1]}/{name}": v for name, v in zip(predicate_names, last, strict=True)}
        return {key: None if np.isnan(value) else float(value) for key, value in row.items()}


def evaluate_scene_graphs(
    truths: Sequence[Mapping],
    predictions: Sequence[Mapping],
    mode: str,
    num_predicates: int,
    zero_shot: np.ndarray | None = None,
    top: Sequence[int] = (20, 50, 100),
    protocol: str = "original",
) -> SceneGraphMetrics:
    """Compare predicted scene graphs with the annotated ones, image by image in the same order.

    Args:
        truths: per image `boxes` (N, 4) xyxy pixels, `labels` (N,), `relations` (R, 3) subject, object, predicate.
        predictions: per image, in the pixels of the truth: `boxes` (M, 4), `labels` (M,), `scores` (M,), `pairs`
            (P, 2) rows of `boxes`, best first (the order is trusted), `predicate_scores` (P, num_predicates)
            without background, or what `compact_graph` makes of them. In predcls boxes, labels and scores are taken
            from the truth.
        mode: predcls, sgcls or sgdet.
        zero_shot: (Z, 3) subject class, object class, predicate never seen in training.
        protocol: "original" leaves images without a predicted pair out of every mean and lets a predicate that the
            truth lacks count 0 in mR, as published numbers do. "strict" counts such images as recall 0 and leaves
            such predicates out.

    Images without annotated relation are left out in both. Boxes match at IoU >= 0.5, with the "+1 pixel"
    widths of the field. One prediction may find several relations, a repeated relation counts repeatedly.
    Raises BadInput for an unknown mode or protocol and for predictions that do not fit their image.
    """
    _check(truths, predictions, mode, protocol, num_predicates)
    found = match_relations(truths, predictions, mode, max(top))
    evaluated = found.counts > 0
    if protocol == "original":
        evaluated &= np.asarray([len(prediction["pairs"]) > 0 for prediction in predictions], dtype=bool)
    return _measure(found, evaluated, num_predicates, zero_shot, tuple(top), mode, protocol)


def _check(truths, predictions, mode: str, protocol: str, num_predicates: int) -> None:
    problems = []
    if mode not in MODES:
        problems.append(f"mode is {mode!r}; expected predcls, sgcls or sgdet")
    if protocol not in PROTOCOLS:
        problems.append(f"protocol is {protocol!r}; expected original or strict")
    if len(truths) != len(predictions):
        raise BadInput([*problems, f"{len(predictions)} predictions for {len(truths)} images; expected one per image"])
    for index, (truth, prediction) in enumerate(zip(truths, predictions, strict=True)):
        pairs = prediction["pairs"]
        num_boxes = len((truth if mode == "predcls" else prediction)["boxes"])
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
    rows, predicates = prediction["combinations"], prediction["predicates"]
    inside = not len(rows) or (rows.min() >= 0 and rows[:, 0].max() < pairs and rows[:, 1].max() < num_predicates)
    if inside and len(predicates) == pairs:
        return []
    return [f"combinations and predicates do not fit {pairs} pairs and {num_predicates} predicates"]


def _measure(
    found: Matches,
    evaluated: np.ndarray,
    num_predicates: int,
    zero_shot: np.ndarray | None,
    top: tuple[int, ...],
    mode: str,
    protocol: str,
) -> SceneGraphMetrics:
    images = np.flatnonzero(evaluated)
    unseen = _in_triplets(found, zero_shot) & evaluated[found.image]
    seen_images = np.flatnonzero(np.bincount(found.image[unseen], minlength=len(evaluated)))
    values, per_image, per_predicate, shape = {}, {}, {}, (len(evaluated), num_predicates)
    relations = _by_predicate(found, evaluated[found.image], shape)
    images_per_predicate = (relations > 0).sum(0)
    for prefix, rank in (("", found.constrained), ("ng", found.unconstrained)):
        hits = [rank < k for k in top]
        everything = np.ones(len(rank), dtype=bool)
        per_image[f"{prefix}R"] = np.stack([_recall(found, hit, everything)[images] for hit in hits])
        per_image[f"{prefix}zR"] = np.stack([_recall(found, hit, unseen)[seen_images] for hit in hits])
        counted = (_by_predicate(found, evaluated[found.image] & hit, shape) for hit in hits)
        shares = [(each / np.maximum(relations, 1)).sum(0) for each in counted]  # of 0 where an image has none
        per_predicate[f"{prefix}mR"] = np.stack(shares) / np.maximum(images_per_predicate, 1)
    undefined = np.full(len(top), np.nan)
    for name, recalls in per_image.items():
        values[name] = recalls.mean(1) if recalls.shape[1] else undefined
    present = images_per_predicate > 0 if protocol == "strict" else np.ones(num_predicates, dtype=bool)
    for name, recalls in per_predicate.items():
        values[name] = recalls[:, present].mean(1) if present.any() else undefined
    values["F1"] = _harmonic_mean(values["R"], values["mR"])
    if mode in ("predcls", "sgcls"):
        hits = np.stack([(found.given_pairs < k) & evaluated[found.image] for k in top]).sum(1)
        values["A"] = hits / found.counts[images].sum() if len(images) else undefined
    return SceneGraphMetrics(
        top=top,
        values=_ordered(values),
        per_image=_ordered(per_image),
        per_predicate=per_predicate,
        images_per_predicate=images_per_predicate,
        evaluated_images=images,
        zero_shot_images=seen_images,
    )


def _ordered(metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: metrics[name] for name in "R ngR zR ngzR mR ngmR F1 A".split() if name in metrics}


def _recall(found: Matches, hit: np.ndarray, among: np.ndarray) -> np.ndarray:
    """(images,) share of the relations `among` that are hit; NaN for an image without any."""
    size = len(found.counts)
    total = np.bincount(found.image[among], minlength=size)
    with np.errstate(invalid="ignore"):
        return np.bincount(found.image[among & hit], minlength=size) / total


def _by_predicate(found: Matches, among: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """(images, predicates) how many of the relations `among` each image has of each predicate."""
    cell = found.image * shape[1] + found.predicate
    return np.bincount(cell[among], minlength=shape[0] * shape[1]).reshape(shape)


def _in_triplets(found: Matches, triplets: np.ndarray | None) -> np.ndarray:
    """(R,) bool: is the relation's (subject class, object class, predicate) listed?"""
    if triplets is None or not len(triplets) or not len(found.triplets):
        return np.zeros(len(found.triplets), dtype=bool)
    both = np.concatenate([np.asarray(triplets, dtype=np.int64), found.triplets])
    _, key = np.unique(both, axis=0, return_inverse=True)
    key = key.reshape(-1)
    return np.isin(key[len(triplets) :], key[: len(triplets)])


def _harmonic_mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = a + b
    return np.divide(2 * a * b, total, out=np.where(np.isnan(total), np.nan, 0.0), where=total > 0)
