"""The pairs that a head learns from: as many as announced, of the right labels, drawn by the generator given."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scene_graph_data import model_of

from toolkit.detectors.scene_graphs.pair_sampling import (
    annotated_graph,
    count_sampled_pairs,
    match_labels,
    pairs_to_ask,
    relation_matrix,
    sample_detected_boxes,
    sample_given_boxes,
    sampled_pairs,
)

# A subject and an object far apart.
TRUE = torch.tensor([[0.0, 0, 99, 99], [200, 0, 299, 99]])
NOTHING = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}


def sampler_of(**options):
    """As much of a model as `sampled_pairs` looks at."""
    common = {
        "training": True,
        "given_boxes": False,
        "require_overlap": False,
        "pairs_per_image": 64,
        "positive_fraction": 0.5,
        "pairs_per_relation": 4,
        "match_iou": 0.5,
    }
    return SimpleNamespace(**common | options)


any_relations = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(any_relations, st.integers(5, 8), st.integers(1, 30), st.booleans(), st.booleans())
def test_pairs_are_as_many_as_counted_beforehand(rows, count, per_image, training, crowd):
    model = sampler_of(training=training, given_boxes=True, pairs_per_image=per_image, require_overlap=True)
    target = {
        "boxes": torch.rand(count, 2).repeat(1, 2) + torch.tensor([0.0, 0, 1, 1]),
        "labels": torch.zeros(count, dtype=torch.int64),
        "iscrowd": torch.zeros(count, dtype=torch.int64),
        "relations": torch.tensor(rows, dtype=torch.int64).reshape(-1, 3),
    }
    target["iscrowd"][0] = int(crowd)
    truth = annotated_graph(target)
    assert len(truth["boxes"]) == count - crowd
    found = sampled_pairs(model, [truth["boxes"]], [truth])
    pairs = [tuple(pair) for pair in found["pairs"].tolist()]
    labels = found["relation_labels"].tolist()
    assert count_sampled_pairs(model, [target])["relation_pairs"] == len(pairs) == len(labels)
    assert len(set(pairs)) == len(pairs), "no pair twice"
    annotated = {tuple(row[:2]) for row in truth["relations"].tolist()}
    for pair, label in zip(pairs, labels, strict=True):
        assert (label > 0) == (pair in annotated)


def test_detections_learn_the_label_of_what_they_overlap():
    truth = {"boxes": torch.tensor([[0.0, 0, 50, 50], [60, 60, 90, 90]]), "labels": torch.tensor([3, 0])}
    boxes = torch.tensor([[0.0, 0, 50, 40], [61, 60, 90, 90], [0, 60, 30, 90]])
    rows, labels = match_labels(boxes, truth, 0.5)
    assert rows.tolist() == [0, 1, -1]
    assert labels.tolist() == [4, 1, 0]
    assert match_labels(boxes, truth, 0.9)[0].tolist() == [-1, 1, -1]
    half = torch.tensor([[0.0, 0, 50, 101]])  # 51 x 51 of 51 x 102 pixels
    assert match_labels(half, truth, 0.5)[0].tolist() == [0]
    assert match_labels(half, truth, 0.51)[0].tolist() == [-1]
    assert match_labels(boxes, NOTHING, 0.5)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("per_relation", "match_iou", "expected"), [(4, 0.5, 4), (1, 0.5, 1), (4, 0.95, 1), (9, 0.5, 6)]
)
def test_pairs_of_detections_for_a_relation_are_as_many_as_asked(per_relation, match_iou, expected):
    """NUM_SAMPLE_PER_GT_REL and FG_IOU_THRESHOLD of Scene-Graph-Benchmark: three detections on the subject, two on the
    object, one of each exact."""
    truth = {"boxes": TRUE, "labels": torch.tensor([0, 1]), "relations": torch.tensor([[0, 1, 2]])}
    boxes = torch.cat([TRUE, TRUE - torch.tensor([0, 0, 0, 20.0]), TRUE[:1] - torch.tensor([0, 0, 0, 30.0])])
    model = sampler_of(pairs_per_relation=per_relation, match_iou=match_iou)
    labels = sampled_pairs(model, [boxes], [truth], torch.tensor([1, 2, 1, 2, 1]))["relation_labels"].tolist()
    assert labels.count(3) == expected


@pytest.mark.parametrize(("overlap", "expected"), [(False, {(0, 1): 4, (0, 2): 3}), (True, {(0, 1): 4, (1, 0): 0})])
def test_relations_between_boxes_apart_are_not_trained_where_overlap_is_required(overlap, expected):
    boxes = torch.tensor([[0.0, 0, 20, 20], [10, 10, 30, 30], [50, 50, 60, 60]])
    truth = {"boxes": boxes, "labels": torch.tensor([0, 1, 2]), "relations": torch.tensor([[0, 1, 3], [0, 2, 2]])}
    found = sampled_pairs(sampler_of(require_overlap=overlap), [boxes], [truth], truth["labels"] + 1)
    labels = dict(zip(map(tuple, found["pairs"].tolist()), found["relation_labels"].tolist(), strict=True))
    if not overlap:
        labels = {pair: label for pair, label in labels.items() if label}
    assert labels == expected


def test_nothing_to_sample():
    drawn = sample_given_boxes(torch.zeros(0, 0, dtype=torch.int64))
    assert len(drawn.pairs) == 0
    assert drawn.related.shape == (0, 0)
    nothing = (NOTHING["boxes"], NOTHING["labels"], torch.zeros(0, 0, dtype=torch.int64))
    drawn = sample_detected_boxes(TRUE, torch.zeros(2, dtype=torch.int64), *nothing)
    assert drawn.pairs.tolist() == [[0, 0]], "placeholder of the original"
    assert drawn.labels.tolist() == [0]
    drawn = sample_detected_boxes(*nothing[:2], *nothing)
    assert drawn.pairs.shape == (0, 2), "there is no box that a placeholder could name"
    assert pairs_to_ask(torch.zeros(0, 4)).shape == (0, 2)


@pytest.mark.parametrize(
    ("one_of_each", "least", "most"),
    [
        pytest.param(True, 0.55, 0.78, id="two of three annotations say 2"),
        pytest.param(False, 0.66, 0.84, id="1 - 1/2 x 1/2"),
    ],
)
def test_the_predicate_of_a_pair_is_drawn_by_the_generator(one_of_each, least, most):
    relations = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 1, 2], [1, 0, 3]])

    def draw(seed):
        return relation_matrix(relations, 2, one_of_each, torch.Generator().manual_seed(seed))

    draws = torch.stack([draw(seed) for seed in range(300)])
    assert torch.equal(draw(7), draws[7])
    assert least < (draws[:, 0, 1] == 2).float().mean() < most
    assert (draws[:, 1, 0] == 3).all()


def test_better_fitting_boxes_are_drawn_more_often():
    """Two proposals on one object, one relation to draw: in proportion to the IoU, 1 to 0.6."""
    labels = torch.tensor([1, 2])
    boxes = torch.cat([TRUE[:1], TRUE[:1] + torch.tensor([0, 0, 0, -40.0]), TRUE[1:]])
    relations = torch.tensor([[0, 1], [0, 0]])
    of_the_better = 0
    for seed in range(300):
        draw = torch.Generator().manual_seed(seed)
        drawn = sample_detected_boxes(boxes, labels[[0, 0, 1]], TRUE, labels, relations, per_relation=1, generator=draw)
        of_the_better += int(drawn.pairs[0, 0]) == 0
        assert drawn.labels.tolist().count(1) == 1
    assert 0.52 < of_the_better / 300 < 0.73


@pytest.mark.parametrize(("training", "added"), [(True, True), (False, True), (True, False)])
def test_annotated_boxes_are_proposals_too_in_training_only(table, batch, monkeypatch, training, added):
    """A weak detector proposes few of the objects that the relations are between."""
    model = model_of(table, "sgdet", freeze="detector", add_annotated_boxes=added).train(training)
    nothing = [NOTHING["boxes"]] * len(batch.targets)
    monkeypatch.setattr(model.detector, "_proposals", lambda *_: (nothing, nothing))
    found = model(batch.images, batch.sizes, batch.targets)["batch"].num_objects
    annotated = [int((target["iscrowd"] == 0).sum()) for target in batch.targets]
    for count, there in zip(found, annotated, strict=True):
        assert count <= min(5, there)
        assert (count > 0) == (there > 0 and training and added)
