"""Speed of scene graph evaluation and heads: python scripts/benches/scene_graph.py

The evaluation of all images at once is compared with a plain per-image one of the same definition; the numbers must
be equal.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from toolkit.evaluation.scene_graph import evaluate_scene_graphs
from toolkit.models.relation import HeadSizes, build_relation_head
from toolkit.models.relation.batch import RelationBatch
from toolkit.models.relation.sampling import pairs_to_ask

TOP = (20, 50, 100)


def random_scene_graphs(num_images: int, num_objects: int, num_pairs: int, num_predicates: int, num_classes: int = 150):
    """Truths and predictions (see `evaluate_scene_graphs`) where about half of the relations can be found."""
    rng = np.random.default_rng(0)
    truths, predictions = [], []
    for _ in range(num_images):
        corner, size = rng.uniform(0, 400, (num_objects, 2)), rng.uniform(20, 200, (num_objects, 2))
        boxes = np.concatenate([corner, corner + size], 1).astype(np.float32)
        labels = rng.integers(0, num_classes, num_objects)
        every_pair = np.argwhere(~np.eye(num_objects, dtype=bool))
        pairs = every_pair[rng.permutation(len(every_pair))[:num_pairs]]
        scores = rng.dirichlet(np.full(num_predicates + 1, 0.3), len(pairs)).astype(np.float32)[:, 1:]
        count = min(20, len(pairs))
        relations = np.column_stack([pairs[rng.integers(0, len(pairs), count)], rng.integers(0, num_predicates, count)])
        relations[: count // 2, :2] = pairs[: count // 2]
        relations[: count // 2, 2] = scores[: count // 2].argmax(1)
        truths.append({"boxes": boxes, "labels": labels, "relations": relations})
        noisy = boxes + rng.normal(0, 3, boxes.shape).astype(np.float32)
        pred = {"boxes": noisy, "labels": labels, "scores": rng.uniform(0.5, 1, num_objects).astype(np.float32)}
        predictions.append(pred | {"pairs": pairs, "predicate_scores": scores})
    return truths, predictions


def plain_evaluation(truths: Sequence[Mapping], predictions: Sequence[Mapping], num_predicates: int) -> dict:
    """R, ngR, mR, ngmR at TOP in sgdet, image by image as the original does it, in NumPy."""
    recall = {"R": [], "ngR": []}
    per_predicate = {name: [[[] for _ in range(num_predicates)] for _ in TOP] for name in ("mR", "ngmR")}
    for truth, pred in zip(truths, predictions, strict=True):
        relations, pairs, scores = truth["relations"], pred["pairs"], pred["predicate_scores"]
        constrained = np.column_stack([pairs, scores.argmax(1)])
        everything = pred["scores"][pairs].prod(1)[:, None] * scores
        best = np.unravel_index(np.argsort(-everything.ravel())[: TOP[-1]], everything.shape)
        unconstrained = np.column_stack([pairs[best[0]], best[1]])
        for prefix, triplets in (("", constrained), ("ng", unconstrained)):
            found = _plain_matches(truth, pred, triplets)
            for k, lists in zip(TOP, per_predicate[f"{prefix}mR"], strict=True):
                hit = found[:, :k].any(1)
                recall[f"{prefix}R"].append(hit.mean())
                for predicate in np.unique(relations[:, 2]):
                    lists[predicate].append(hit[relations[:, 2] == predicate].mean())
    result = {name: np.reshape(values, (-1, len(TOP))).mean(0) for name, values in recall.items()}
    for name, tops in per_predicate.items():
        result[name] = np.asarray([np.mean([np.mean(v) if v else 0.0 for v in lists]) for lists in tops])
    return result


def _plain_matches(truth: Mapping, pred: Mapping, triplets: np.ndarray) -> np.ndarray:
    """(R, P) bool: does the prediction find the relation?"""
    relations = truth["relations"]
    true = np.column_stack([truth["labels"][relations[:, 0]], truth["labels"][relations[:, 1]], relations[:, 2]])
    named = np.column_stack([pred["labels"][triplets[:, 0]], pred["labels"][triplets[:, 1]], triplets[:, 2]])
    found = (true[:, None] == named[None]).all(-1)
    for r, columns in enumerate(found):
        for end in (0, 1):
            box, boxes = truth["boxes"][relations[r, end]], pred["boxes"][triplets[columns.nonzero()[0], end]]
            wide = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2]) + 1
            inter = np.maximum(wide, 0).prod(-1)
            union = (box[2:] - box[:2] + 1).prod() + (boxes[:, 2:] - boxes[:, :2] + 1).prod(-1) - inter
            columns[columns] = inter / union >= 0.5
    return found


def bench_evaluator(num_images=500, num_objects=80, num_pairs=2048, num_predicates=50) -> dict[str, float]:
    """{"plain_s", "ours_s", "speedup"}; raises AssertionError when the numbers differ."""
    truths, predictions = random_scene_graphs(num_images, num_objects, num_pairs, num_predicates)
    start = time.perf_counter()
    ours = evaluate_scene_graphs(truths, predictions, "sgdet", num_predicates, top=TOP)
    ours_s = time.perf_counter() - start
    start = time.perf_counter()
    plain = plain_evaluation(truths, predictions, num_predicates)
    plain_s = time.perf_counter() - start
    for name, value in plain.items():
        np.testing.assert_allclose(ours.values[name], value, rtol=0, atol=1e-12, err_msg=name)
    return {"plain_s": plain_s, "ours_s": ours_s, "speedup": plain_s / ours_s}


def random_batch(num_objects: list[int], sizes: HeadSizes, seed: int = 0) -> RelationBatch:
    """Images of random boxes and features for sgcls, every ordered pair asked about."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(num_objects)
    corner = torch.rand(total, 2, generator=generator) * 300
    boxes = torch.cat([corner, corner + 20 + torch.rand(total, 2, generator=generator) * 200], 1)
    pairs = [pairs_to_ask(image) for image in boxes.split(num_objects)]
    starts = [sum(num_objects[:i]) for i in range(len(num_objects))]
    pairs_flat = torch.cat([p + start for p, start in zip(pairs, starts, strict=True)])
    return RelationBatch(
        boxes_xyxy=boxes,
        sizes_hw=torch.full((len(num_objects), 2), 520),
        num_objects=num_objects,
        pairs=pairs_flat,
        num_pairs=[len(p) for p in pairs],
        roi_features=torch.randn(total, sizes.roi_dim, generator=generator),
        union_features=torch.randn(len(pairs_flat), sizes.union_dim, generator=generator),
        logits=torch.randn(total, sizes.num_classes, generator=generator),
    )


def bench_head(name: str, num_images: int = 8, num_objects: int = 10, repeats: int = 5) -> dict[str, float]:
    """{"alone_s", "together_s", "speedup"} of the evaluation forward; raises AssertionError when outputs differ."""
    sizes = HeadSizes(31, 21, roi_dim=256, union_dim=256, hidden_dim=128, pooling_dim=256, embed_dim=50)
    torch.manual_seed(0)
    head = build_relation_head(name, "sgcls", sizes, torch.randn(31, 31, 21)).eval()
    alone = [random_batch([num_objects], sizes, seed) for seed in range(num_images)]
    starts = [num_objects * i for i in range(num_images)]
    joined = {
        key: torch.cat([getattr(batch, key) for batch in alone])
        for key in ("boxes_xyxy", "sizes_hw", "roi_features", "union_features", "logits")
    }
    together = RelationBatch(
        **joined,
        num_objects=[num_objects] * num_images,
        pairs=torch.cat([batch.pairs + start for batch, start in zip(alone, starts, strict=True)]),
        num_pairs=[len(batch.pairs) for batch in alone],
    )
    with torch.no_grad():
        expected = torch.cat([head(batch).relation_logits for batch in alone])
        torch.testing.assert_close(head(together).relation_logits, expected, rtol=1e-3, atol=1e-3)
        alone_s = min(_seconds(lambda: [head(batch) for batch in alone]) for _ in range(repeats))
        together_s = min(_seconds(lambda: head(together)) for _ in range(repeats))
    return {"alone_s": alone_s, "together_s": together_s, "speedup": alone_s / together_s}


def _seconds(work: Callable) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    found = {"evaluation, 500 images x 80 boxes x 2,048 pairs x 50 predicates": bench_evaluator()}
    found |= {f"{name}, 8 images x 10 objects": bench_head(name) for name in ("motifs", "vctree")}
    for title, result in found.items():
        print(f"scene graph {title}: " + ", ".join(f"{key} {value:.3f}" for key, value in result.items()))


if __name__ == "__main__":
    main()
