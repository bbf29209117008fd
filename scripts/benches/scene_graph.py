"""Scene graphs: evaluation against a straightforward program of the same definition, image by image in NumPy; relation
heads on a batch against one image at a time."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from toolkit.detectors.scene_graphs.heads import HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs
from toolkit.detectors.scene_graphs.pair_sampling import pairs_to_ask
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch

from .measuring import against, in_turn, random_boxes, row

RECALL_AT = (20, 50, 100)


def bench_graph_evaluation(
    num_images: int = 500, num_objects: int = 80, num_pairs: int = 2048, num_predicates: int = 50, repeats: int = 5
) -> list[dict]:
    """Measure the seconds from predictions to all metrics: medians of interleaved rounds.

    Rows: ours, the plain program, their ratio, ours against itself (the noise), and the largest difference of a metric.
    The mode is sgcls, where all metrics are defined, but the boxes are matched like detections.
    """
    data = random_scene_graphs(num_images, num_objects, num_pairs, num_predicates)
    ours, plain = (partial(f, *data, num_predicates) for f in (our_evaluation, plain_evaluation))
    actual = ours()
    expected = plain()
    apart = max(float(np.abs(actual[name] - value).max()) for name, value in expected.items())
    rows = against("scene graph evaluation", "plain", in_turn(ours, plain, repeats))
    return [*rows, row("scene graph evaluation, largest difference", apart, "recall")]


def bench_relation_heads(num_images: int = 8, num_objects: int = 10, repeats: int = 15) -> list[dict]:
    """Measure the seconds of a forward in evaluation, on a batch and on its images one at a time: medians of
    interleaved rounds.

    Rows for each of two heads: the batch, single images, their ratio, the batch against itself (the noise), and the
    largest difference of a logit.
    """
    rows = []
    for name in ("motifs", "vctree"):
        head, images, batch = head_and_batches(name, num_images, num_objects)
        together = partial(_logits, head, [batch])
        alone = partial(_logits, head, images)
        with torch.inference_mode():
            joined = together()
            separate = alone()
            rounds = in_turn(together, alone, repeats)
        rows += against(f"relation head {name}", "alone", rounds, ours="together")
        apart = float((joined - separate).abs().max())
        rows.append(row(f"relation head {name}, largest difference", apart, "logit"))
    return rows


def random_scene_graphs(num_images: int, num_objects: int, num_pairs: int, num_predicates: int, num_classes: int = 150):
    """Make random truths, predictions and unseen triplets, the first arguments and `zero_shot` of
    `evaluate_scene_graphs`.

    The predictions find about half of the relations; a tenth of the triplets that occur counts as unseen.
    """
    rng = np.random.default_rng(0)
    truths = []
    predictions = []
    for _ in range(num_images):
        boxes = random_boxes(rng, num_objects, 400, 20, 200)
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
    triplets = np.unique(np.concatenate([_triplets(t["labels"], t["relations"]) for t in truths]), axis=0)
    return truths, predictions, rng.permutation(triplets)[: -(-len(triplets) // 10)]


def our_evaluation(truths: Sequence[Mapping], predictions: Sequence[Mapping], zero_shot: np.ndarray, num_predicates):
    return evaluate_scene_graphs(truths, predictions, "sgcls", num_predicates, zero_shot, top=RECALL_AT).values


def plain_evaluation(
    truths: Sequence[Mapping], predictions: Sequence[Mapping], zero_shot: np.ndarray, num_predicates: int
) -> dict[str, np.ndarray]:
    """Compute R, ngR, zR, ngzR, mR, ngmR and A at RECALL_AT in NumPy, image by image as in the original."""
    recall: dict[str, list] = {"R": [], "ngR": [], "zR": [], "ngzR": []}
    per_predicate = {name: [[[] for _ in range(num_predicates)] for _ in RECALL_AT] for name in ("mR", "ngmR")}
    accuracy = []
    for truth, pred in zip(truths, predictions, strict=True):
        relations = truth["relations"]
        pairs = pred["pairs"]
        scores = pred["predicate_scores"]
        unseen = (_triplets(truth["labels"], relations)[:, None] == zero_shot).all(-1).any(1)
        constrained = np.column_stack([pairs, scores.argmax(1)])
        everything = pred["scores"][pairs].prod(1)[:, None] * scores
        best = np.unravel_index(np.argsort(-everything.ravel())[: RECALL_AT[-1]], everything.shape)
        unconstrained = np.column_stack([pairs[best[0]], best[1]])
        for prefix, triplets in (("ng", unconstrained), ("", constrained)):
            matched = _plain_matches(truth, pred, triplets)
            for k, lists in zip(RECALL_AT, per_predicate[f"{prefix}mR"], strict=True):
                hit = matched[:, :k].any(1)
                recall[f"{prefix}R"].append(hit.mean())
                if unseen.any():
                    recall[f"{prefix}zR"].append(hit[unseen].mean())
                for predicate in np.unique(relations[:, 2]):
                    lists[predicate].append(hit[relations[:, 2] == predicate].mean())
        given = (pairs[:, None] == relations[:, :2]).all(-1).any(1)
        accuracy.append([matched[:, given][:, :k].any(1).sum() for k in RECALL_AT])
    result = {name: np.reshape(values, (-1, len(RECALL_AT))).mean(0) for name, values in recall.items()}
    for name, tops in per_predicate.items():
        result[name] = np.asarray([np.mean([np.mean(v) if v else 0.0 for v in lists]) for lists in tops])
    return result | {"A": np.sum(accuracy, 0) / sum(len(truth["relations"]) for truth in truths)}


def _triplets(labels: np.ndarray, relations: np.ndarray) -> np.ndarray:
    """Return (R, 3): class of the subject, class of the object, predicate."""
    return np.column_stack([labels[relations[:, 0]], labels[relations[:, 1]], relations[:, 2]])


def _plain_matches(truth: Mapping, pred: Mapping, triplets: np.ndarray) -> np.ndarray:
    """Return (R, P) bool, true if the prediction finds the relation."""
    relations = truth["relations"]
    named = _triplets(pred["labels"], triplets)
    matched = (_triplets(truth["labels"], relations)[:, None] == named).all(-1)
    for r, columns in enumerate(matched):
        for end in (0, 1):
            box = truth["boxes"][relations[r, end]]
            boxes = pred["boxes"][triplets[columns.nonzero()[0], end]]
            wide = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2]) + 1
            inter = np.maximum(wide, 0).prod(-1)
            union = (box[2:] - box[:2] + 1).prod() + (boxes[:, 2:] - boxes[:, :2] + 1).prod(-1) - inter
            columns[columns] = inter / union >= 0.5
    return matched


def random_batch(num_objects: list[int], sizes: HeadSizes, seed: int = 0) -> RelationBatch:
    """Make a batch of images with random boxes, features and logits for sgcls, and every ordered pair of objects.

    num_objects: number of objects of each image. sizes: widths of the features.
    """
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


def head_and_batches(
    name: str, num_images: int, num_objects: int
) -> tuple[torch.nn.Module, list[RelationBatch], RelationBatch]:
    """Return a head in evaluation mode, batches of one image with `num_objects` objects each, and one batch of all
    these images."""
    sizes = HeadSizes(31, 21, roi_dim=256, union_dim=256, hidden_dim=128, pooling_dim=256, embed_dim=50)
    torch.manual_seed(0)
    head = build_relation_head(name, "sgcls", sizes, torch.randn(31, 31, 21)).eval()
    alone = [random_batch([num_objects], sizes, seed) for seed in range(num_images)]
    joined = ("boxes_xyxy", "sizes_hw", "roi_features", "union_features", "logits")
    together = RelationBatch(
        **{key: torch.cat([getattr(batch, key) for batch in alone]) for key in joined},
        num_objects=[num_objects] * num_images,
        pairs=torch.cat([batch.pairs + num_objects * i for i, batch in enumerate(alone)]),
        num_pairs=[len(batch.pairs) for batch in alone],
    )
    return head, alone, together


def _logits(head: torch.nn.Module, batches: Sequence[RelationBatch]) -> torch.Tensor:
    return torch.cat([head(batch).relation_logits for batch in batches])
