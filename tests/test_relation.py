"""Relation heads and what feeds them, at the edges."""

import json
from itertools import accumulate, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.ops import MultiScaleRoIAlign

from toolkit.base.errors import BadInput
from toolkit.data.table import Category
from toolkit.detectors.scene_graphs.batch import RelationBatch, RelationOutput, head_losses, mean, predicate_loss
from toolkit.detectors.scene_graphs.formats import relations_as_json
from toolkit.detectors.scene_graphs.frequency import predicate_weights
from toolkit.detectors.scene_graphs.geometry import iou_plus_one, reading_order
from toolkit.detectors.scene_graphs.heads import RELATION_HEADS, HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.heads.layers import AVERAGE_RATIO, RunningMean
from toolkit.detectors.scene_graphs.heads.trees import grow_trees
from toolkit.detectors.scene_graphs.heads.vctree import drawn_columns
from toolkit.detectors.scene_graphs.postprocess import graphs_on_host, late_nms, rank_triplets, shortlist
from toolkit.detectors.scene_graphs.sampling import (
    pairs_to_ask,
    relation_matrix,
    sample_detected_boxes,
    sample_given_boxes,
)
from toolkit.detectors.scene_graphs.union import UnionFeatures
from toolkit.evaluation.predictions import best_first, detections_as_json
from toolkit.models.weights.mapping import map_weights
from toolkit.step.execution import describe_float32_layers, has_lstm_kernel

CLASSES, PREDICATES = 6, 5
SIZES = HeadSizes(CLASSES, PREDICATES, roi_dim=8, union_dim=10, hidden_dim=8, pooling_dim=10, embed_dim=4)
SMALL = {"transformer": {"heads": 2, "key_dim": 3, "value_dim": 3, "inner_dim": 8, "dropout": 0.0},
         **dict.fromkeys(("penet", "react", "react_pp"), {"dim": 16, "dropout": 0.0}),
         "squat": {"dim": 16, "dropout": 0.0, "query_share": 0.1}}  # fmt: skip


def head_of(name: str, mode: str, **options):
    torch.manual_seed(0)
    frequency = torch.randn(CLASSES, CLASSES, PREDICATES)
    options = SMALL.get(name, {} if name in ("imp", "frequency") else {"dropout": 0.0}) | options
    return build_relation_head(name, mode, SIZES, frequency, **options)


def random_boxes(count: int, generator: torch.Generator) -> torch.Tensor:
    corner = torch.rand(count, 2, generator=generator) * 80
    return torch.cat([corner, corner + 5 + torch.rand(count, 2, generator=generator) * 60], 1)


def batch_of(num_objects: list[int], seed: int = 0) -> RelationBatch:
    generator = torch.Generator().manual_seed(seed)
    boxes = [random_boxes(count, generator) for count in num_objects]
    pairs = [pairs_to_ask(of_image) for of_image in boxes]
    starts, total = accumulate([0, *num_objects]), sum(num_objects)
    num_pairs = [len(of_image) for of_image in pairs]

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return RelationBatch(
        boxes_xyxy=torch.cat(boxes),
        sizes_hw=torch.tensor([[150, 200]] * len(num_objects)),
        num_objects=num_objects,
        pairs=torch.cat([of_image + start for of_image, start in zip(pairs, starts, strict=False)]),
        num_pairs=num_pairs,
        roi_features=draw(total, 8),
        union_features=draw(sum(num_pairs), 10),
        labels=torch.randint(1, CLASSES, (total,), generator=generator),
        logits=draw(total, CLASSES),
        boxes_per_class=torch.cat(boxes)[:, None] + 5 * draw(total, CLASSES, 1),
        relation_labels=torch.randint(0, PREDICATES, (sum(num_pairs),), generator=generator),
        related=torch.rand(total, max(num_objects, default=0), generator=generator) > 0.5,
    )


def image_of(batch: RelationBatch, i: int) -> RelationBatch:
    """One image of a batch."""
    objects = {name: getattr(batch, name).split(batch.num_objects)[i]
               for name in ("boxes_xyxy", "roi_features", "labels", "logits", "boxes_per_class")}  # fmt: skip
    pairs = {name: getattr(batch, name).split(batch.num_pairs)[i] for name in ("pairs", "union_features")}
    pairs["pairs"] = pairs["pairs"] - sum(batch.num_objects[:i])
    counts = {"num_objects": [batch.num_objects[i]], "num_pairs": [batch.num_pairs[i]]}
    return RelationBatch(sizes_hw=batch.sizes_hw[i : i + 1], **objects, **pairs, **counts)


@pytest.mark.parametrize("mode", ["predcls", "sgcls", "sgdet"])
@pytest.mark.parametrize("name", RELATION_HEADS)
def test_images_do_not_see_each_other(name, mode):
    """Together with others, among them one without objects and one with a single object, or alone: the same."""
    head = head_of(name, mode).eval()
    batch = batch_of([3, 0, 5, 1, 5])
    with torch.no_grad():
        together = head(batch)
        alone = [head(image_of(batch, i)) for i in range(5)]
    for key in ("object_logits", "relation_logits", "object_labels"):
        expected = torch.cat([getattr(output, key) for output in alone])
        torch.testing.assert_close(getattr(together, key), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in RELATION_HEADS if name != "frequency"])
def test_every_batch_trains(name, precision):
    """Finite losses under the announced names and gradients, for a batch without objects or pairs too."""
    for mode in ("predcls", "sgdet"):
        head = head_of(name, mode).train()
        for num_objects in ([4, 2], [1], [0, 1, 3], [0, 0]):
            batch = batch_of(num_objects)
            with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
                output = head(batch)
            values = head_losses(output, batch)
            total = sum(mean(*pair).sum() for pair in values.values())
            assert total.isfinite() and total.requires_grad
            assert set(values) <= set(head.loss_names)
            assert not sum(num_objects) or set(values) == set(head.loss_names)
            head.zero_grad()
            total.backward()
            assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)
        assert all(buffer.isfinite().all() for buffer in head.buffers())


def test_lstms_in_float32_are_told_of_where_they_are():
    """Those of Motifs (two), on a CPU that has no kernel of them for halves; other heads have matrix products."""
    motifs, tree = head_of("motifs", "predcls"), head_of("vctree", "predcls")
    told = describe_float32_layers(motifs, "cpu", "bf16")
    assert ("the 2 of the detector go in float32" in told) == (not has_lstm_kernel("cpu", torch.bfloat16))
    assert not any(describe_float32_layers(*case) for case in (
        (motifs, "cpu", "no"), (motifs, "cuda", "bf16"), (tree, "cpu", "bf16")))  # fmt: skip


def test_effects_differ_and_are_off_in_training():
    batch, outputs = batch_of([4, 3]), []
    for effect in ("none", "TDE", "NIE", "TE"):
        head = head_of("causal", "sgcls", effect=effect)
        head.train()(batch)
        with torch.no_grad():
            outputs.append(head.eval()(batch).relation_logits)
    assert all((a - b).abs().max() > 1e-3 for a, b in combinations(outputs, 2))


def test_effects_survive_half_precision():
    """The difference of two bfloat16 sums would have next to no digits left."""
    batch = batch_of([4, 3])
    head = head_of("causal", "predcls", effect="TDE").eval()
    with torch.no_grad():
        expected = head(batch).relation_logits
        head.frequency.table.weight.add_(500.0)  # cancels exactly
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = head(batch).relation_logits
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_squat_reads_union_boxes_only_where_told():
    batch = batch_of([4, 3])
    for reads in (False, True):
        head, outputs = head_of("squat", "predcls", use_union=reads).eval(), []
        for _ in range(2):
            outputs.append(head(batch).relation_logits)
            batch.union_features = batch.union_features + 1
        assert head.reads_union == reads and torch.equal(*outputs) != reads


def test_wrong_options_are_named():
    for words, head, mode, options in (
        ("motif'", "motif", "predcls", {}),
        ("predcl'", "imp", "predcl", {}),
        ("dim is 10", "react_pp", "predcls", {"dim": 10}),
        ("(?s)dim is 12.*query_share is 0.*above 0 to 1", "squat", "predcls", {"dim": 12, "query_share": 0}),
        ("(?s)'lstm'.*'max'.*'TDA'", "causal", "predcls", {"context": "lstm", "fusion": "max", "effect": "TDA"}),
    ):
        with pytest.raises(BadInput, match=words):
            head_of(head, mode, **options)


def plain_late_nms(boxes, logits, threshold):
    """The published loop, for one image."""
    scores = logits.softmax(1)
    scores[:, 0] = 0
    ious = iou_plus_one(boxes[:, None], boxes[None])
    labels, free = torch.zeros(len(boxes), dtype=torch.int64), set(range(len(boxes)))
    while free:
        n, c = max(((n, c) for n in free for c in range(scores.shape[1])), key=lambda nc: float(scores[nc]))
        if scores[n, c] > 0:
            labels[n] = c
            for other in free:
                if ious[n, other, c] >= threshold:
                    scores[other, c] = 0
        free.remove(n)
    return labels


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 10**6))
def test_late_nms_equals_the_loop(num_objects, seed):
    batch = batch_of(num_objects, seed)
    labels = late_nms(batch.boxes_per_class, batch.logits, num_objects, 0.3)
    images = (column.split(num_objects) for column in (labels, batch.boxes_per_class, batch.logits))
    for found, boxes, logits in zip(*images, strict=True):
        assert torch.equal(found, plain_late_nms(boxes, logits, 0.3))


def test_a_box_that_lost_every_class_scores_nothing():
    output = RelationOutput(torch.zeros(4, 3), torch.randn(12, PREDICATES), None)
    batch = batch_of([4])
    batch.boxes_per_class = torch.tensor([[0.0, 0, 50, 50]]).expand(4, 3, 4)
    (graph,) = graphs_on_host(*rank_triplets(output, batch, given_boxes=False), [4], [12])
    assert sorted(graph["labels"].tolist()) == [-1, -1, 0, 1]
    assert (graph["scores"][graph["labels"] < 0] == 0).all()
    assert (graph["triplet_scores"].diff() <= 0).all()
    found = best_first(graph)
    categories = [Category(7, "cat"), Category(9, "dog")]
    assert sorted(entry["category_id"] for entry in detections_as_json(found, categories)) == [7, 9]
    written = json.loads(json.dumps(relations_as_json(found, list("abcd"))))
    assert [sorted((entry["subject"], entry["object"])) for entry in written] == [[0, 1], [0, 1]]


def test_react_keeps_the_labels_of_the_detector():
    """As its original: overlapping boxes keep a class that late NMS, as of PE-Net, gives to one of them alone."""
    batch = batch_of([4, 3])
    batch.found_labels = torch.tensor([2, 2, 1, 1, 3, 3, 3])
    batch.boxes_per_class = torch.tensor([[0.0, 0, 50, 50]]).expand(7, CLASSES, 4)
    for name, keeps in (("react", True), ("react_pp", True), ("squat", True), ("penet", False)):
        with torch.no_grad():
            objects, _ = rank_triplets(head_of(name, "sgdet").eval()(batch), batch, given_boxes=False)
        assert torch.equal(objects["labels"], batch.found_labels - 1) == keeps
    probability = batch.logits.softmax(1).gather(1, batch.found_labels[:, None])[:, 0]
    objects, _ = rank_triplets(head_of("react", "sgdet").eval()(batch), batch, given_boxes=False)
    torch.testing.assert_close(objects["scores"], probability)


def test_a_running_mean_moves_once_for_each_image_or_for_the_batch():
    rows, value = torch.randn(6, 3), torch.zeros(3)
    of_images, of_batch = RunningMean(3).train(), RunningMean(3).train()
    for _ in range(2):
        of_images(rows, counts=[1, 0, 3, 2])
        of_batch(rows)
        for image in (rows[:1], rows[1:4], rows[4:]):  # the published loop
            value = value * (1 - AVERAGE_RATIO) + AVERAGE_RATIO * image.mean(0)
    torch.testing.assert_close(of_images.value, value)
    torch.testing.assert_close(of_batch.value, AVERAGE_RATIO * (2 - AVERAGE_RATIO) * rows.mean(0))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 10**6), st.sampled_from([0, 1, 7, 100]))
def test_the_best_triplets_are_those_of_each_image(num_objects, seed, top_k):
    """The best of each image, then what else is annotated, each best first; equal scores in the order of the pairs."""
    batch, total = batch_of(num_objects, seed), sum(num_objects)
    batch.relation_labels = batch.relation_labels.clamp(max=2) // 2  # some
    predicates = torch.randint(0, 2, (sum(batch.num_pairs), PREDICATES)).float()  # equal ones
    output = RelationOutput(torch.randint(0, 2, (total, CLASSES)).float(), predicates, None)
    objects, triplets = rank_triplets(output, batch, given_boxes=True)
    annotated = [int(own.sum()) for own in batch.relation_labels.split(batch.num_pairs)]
    short, counts = shortlist(triplets, batch.num_pairs, top_k, [count + 1 for count in annotated])
    graphs = graphs_on_host(objects, short, num_objects, counts)
    probability, related = predicates.softmax(1)[:, 1:], batch.relation_labels > 0
    first = pair = 0
    for graph, count, pairs in zip(graphs, num_objects, batch.num_pairs, strict=True):
        own = slice(pair, pair + pairs)
        ends = batch.pairs[own]
        scores = probability[own].amax(1) * objects["scores"][ends[:, 0]] * objects["scores"][ends[:, 1]]
        order = sorted(range(pairs), key=lambda row: -float(scores[row]))
        order = order[:top_k] + [row for row in order[top_k:] if related[own][row]]
        expected = {"pairs": ends - first, "triplet_scores": scores, "predicate_scores": probability[own]}
        assert all(torch.equal(graph[name], column[order]) for name, column in expected.items())
        assert len(graph["boxes"]) == count
        first, pair = first + count, own.stop


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(0, 10**6))
def test_trees_reach_every_object_once(num_objects, seed):
    size, total = max(num_objects), sum(num_objects)
    scores = torch.rand(len(num_objects), size, size, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    forest = grow_trees(scores, num_objects)
    assert sorted(forest.order.tolist()) == list(range(total))
    children = torch.cat([forest.left, forest.right])
    assert sorted(children[children >= 0].tolist()) == torch.where(forest.parent >= 0)[0].tolist()
    for i, (start, own) in enumerate(
        zip(accumulate([0, *num_objects]), forest.parent.split(num_objects), strict=False)
    ):
        expected = plain_tree(scores[i, : len(own), : len(own)])
        assert torch.where(own >= 0, own - start, -1).tolist() == expected


def plain_tree(scores: torch.Tensor) -> list[int]:
    """Parents of the greedy tree; equal scores: first the earlier tree node, then the lower object."""
    parents = [-1] * len(scores)
    if not len(scores):
        return parents
    tree = [int(scores.double().mean(1).argmax())]
    free = [n for n in range(len(scores)) if n != tree[0]]
    while free:
        best = scores[tree][:, free]
        parent, child = (best == best.max()).nonzero()[0].tolist()
        parents[free[child]] = tree[parent]
        tree.append(free.pop(child))
    return parents


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 10**6))
def test_reading_order_has_an_inverse(num_objects, seed):
    boxes = random_boxes(sum(num_objects), torch.Generator().manual_seed(seed))
    order, inverse, sizes = reading_order(boxes, num_objects)
    assert torch.equal(order[inverse], torch.arange(len(boxes)))
    assert sizes.sum() == len(boxes) and (sizes.diff() <= 0).all()


def test_sampling_without_relations_or_objects():
    drawn = sample_given_boxes(torch.zeros(0, 0, dtype=torch.int64))
    assert len(drawn.pairs) == 0 and drawn.related.shape == (0, 0)
    boxes, labels = random_boxes(3, torch.Generator().manual_seed(0)), torch.zeros(3, dtype=torch.int64)
    nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.int64)
    drawn = sample_detected_boxes(boxes, labels, *nothing)
    assert drawn.pairs.tolist() == [[0, 0]] and drawn.labels.tolist() == [0], "placeholder of the original"
    assert pairs_to_ask(torch.zeros(0, 4)).shape == (0, 2)
    drawn = sample_detected_boxes(boxes[:0], labels[:0], *nothing)
    assert drawn.pairs.shape == (0, 2), "there is no box that a placeholder could name"


def test_relation_matrix_is_a_function_of_the_generator():
    relations = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 1, 2], [1, 0, 3]])
    seeded = [torch.Generator().manual_seed(seed) for seed in range(600)]
    draws, halves = ([relation_matrix(relations, 2, one_of_each, generator) for generator in generators]
                     for one_of_each, generators in ((True, seeded[:300]), (False, seeded[300:])))  # fmt: skip
    assert torch.equal(relation_matrix(relations, 2, True, torch.Generator().manual_seed(7)), draws[7])
    shares = [sum(int(matrix[0, 1] == 2) for matrix in some) / 300 for some in (draws, halves)]
    assert 0.55 < shares[0] < 0.78, "two of three annotations say 2"
    assert 0.66 < shares[1] < 0.84, "1 - 1/2 * 1/2"
    assert all(matrix[1, 0] == 3 for matrix in draws + halves)


def test_weighted_draws_follow_the_iou():
    """Two proposals on one object, one relation to draw: the better fit is drawn more often."""
    true, labels = torch.tensor([[0.0, 0, 99, 99], [200, 0, 299, 99]]), torch.tensor([1, 2])
    boxes = torch.cat([true[:1], true[:1] + torch.tensor([0, 0, 0, -40.0]), true[1:]])
    relations, counts = torch.tensor([[0, 1], [0, 0]]), [0, 0]
    for seed in range(300):
        given = boxes, labels[[0, 0, 1]], true, labels, relations
        drawn = sample_detected_boxes(*given, per_relation=1, generator=torch.Generator().manual_seed(seed))
        counts[int(drawn.pairs[0, 0])] += 1
        assert drawn.labels.tolist().count(1) == 1
    assert 0.52 < counts[0] / 300 < 0.73, "1 to 0.6"


def test_rare_predicates_weigh_more():
    counts = torch.zeros(2, 2, 4, dtype=torch.int64).numpy()
    counts[0, 1, 1], counts[1, 0, 2] = 100, 4
    weights = predicate_weights(counts)
    assert weights[2] / weights[1] == pytest.approx(5.0) and weights[0] == weights[3] == 1
    assert 100 * weights[1] + 4 * weights[2] == pytest.approx(104.0)
    logits, labels = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    total, count = predicate_loss(logits, labels, [3], weights=weights)
    assert float(total / count) == pytest.approx(float(torch.log(torch.tensor(4.0))))


def test_union_features_of_all_images_at_once(monkeypatch):
    pool = MultiScaleRoIAlign(["0"], output_size=7, sampling_ratio=2)
    union = UnionFeatures(pool, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6 * 49, 10)), 6)
    batch = batch_of([3, 0, 2])
    maps = {"0": torch.randn(3, 6, 10, 13)}
    features, _ = union.eval()(maps, batch.boxes_xyxy, batch.pairs, batch.num_pairs, batch.sizes_hw)
    assert features.shape == (8, 10)
    one = image_of(batch, 2)
    alone, _ = union({"0": maps["0"][2:]}, one.boxes_xyxy, one.pairs, one.num_pairs, one.sizes_hw)
    torch.testing.assert_close(features[6:], alone)
    seen = []
    pool.register_forward_hook(lambda _, __, pooled: seen.append(len(pooled)))
    monkeypatch.setattr("toolkit.detectors.scene_graphs.union.PAIRS_PER_CHUNK", 5)
    in_parts, _ = union(maps, batch.boxes_xyxy, batch.pairs, batch.num_pairs, batch.sizes_hw)
    torch.testing.assert_close(in_parts, features)
    assert seen == [5, 3], "the pairs of an image may be in two parts"
    none, _ = union.train()(maps, torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64), [0, 0, 0], batch.sizes_hw)
    none.sum().backward()
    assert none.shape == (0, 10) and union.rectangles.conv[2].running_mean.isfinite().all()


def test_weights_are_mapped_explicitly():
    checkpoint = {"box.fc.weight": torch.ones(2, 3), "box.fc.bias": torch.ones(2)}
    model = {"relation.union.fc.weight": torch.zeros(2, 3), "context.fc.bias": torch.zeros(2)}
    mapped = map_weights(model, checkpoint, {"relation.union": "box"})
    assert mapped.new == ["context.fc.bias"] and mapped.unused == ["box.fc.bias"], "a suffix in common is no reason"
    with pytest.raises(BadInput) as caught:
        map_weights(model | {"box.fc.bias": torch.zeros(5)}, checkpoint, {"relatoin": "box", "relation": "boks"})
    assert all(part in str(caught.value) for part in ("'relatoin'", "'boks'", "(2,)", "(5,)"))


def test_columns_are_drawn_as_multinomial_draws_them():
    weights = torch.rand(500, 9, generator=torch.Generator().manual_seed(0))[:, 1:]
    torch.manual_seed(3)
    expected = weights.multinomial(1)[:, 0]
    torch.manual_seed(3)
    assert torch.equal(drawn_columns(weights, torch.empty(500, 8).exponential_()), expected)
