"""The pairs that a head learns from: as many as announced, of the right labels, drawn by the generator given."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import boxes, integers
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

TRUE = boxes("0 0 99 99, 200 0 299 99")  # a subject and an object far apart
NO_LABELS = integers("")
NOTHING = {"boxes": boxes(""), "labels": NO_LABELS}


def sampler_of(**options):
    """As much of a model as `sampled_pairs` looks at."""
    detecting = {"training": True, "given_boxes": False, "require_overlap": False}
    amounts = {"pairs_per_image": 64, "positive_fraction": 0.5, "pairs_per_relation": 4, "match_iou": 0.5}
    return SimpleNamespace(**detecting | amounts | options)


any_relations = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 3),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    any_relations,
    st.integers(5, 8),
    st.integers(1, 30),
    st.booleans(),
    st.booleans(),
)
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


@pytest.mark.parametrize(
    ("found", "match_iou", "expected"),
    [
        ("0 0 50 40, 61 60 90 90, 0 60 30 90", 0.5, [0, 1, -1]),
        ("0 0 50 40, 61 60 90 90, 0 60 30 90", 0.9, [-1, 1, -1]),
        ("0 0 50 101", 0.5, [0]),  # 51 x 51 of 51 x 102 pixels
        ("0 0 50 101", 0.51, [-1]),
    ],
)
def test_detections_learn_the_label_of_what_they_overlap(found, match_iou, expected):
    truth = {"boxes": boxes("0 0 50 50, 60 60 90 90"), "labels": integers("3, 0")}
    rows, labels = match_labels(boxes(found), truth, match_iou)
    assert rows.tolist() == expected
    assert labels.tolist() == [
        {
            0: 4,
            1: 1,
            -1: 0,
        }[row]
        for row in expected
    ]


def test_where_nothing_is_annotated_detections_learn_the_background():
    assert match_labels(TRUE, NOTHING, 0.5)[1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("per_relation", "match_iou", "expected"),
    [
        (4, 0.5, 4),
        (4, 0.95, 1),
        (9, 0.5, 6),
    ],
)
def test_pairs_of_detections_for_a_relation_are_as_many_as_asked(per_relation, match_iou, expected):
    """NUM_SAMPLE_PER_GT_REL and FG_IOU_THRESHOLD of Scene-Graph-Benchmark: three detections on the subject, two on the
    object, one of each exact."""
    truth = {"boxes": TRUE, "labels": integers("0, 1"), "relations": integers("0 1 2", 3)}
    found = boxes("0 0 99 99, 200 0 299 99, 0 0 99 79, 200 0 299 79, 0 0 99 69")
    model = sampler_of(pairs_per_relation=per_relation, match_iou=match_iou)
    sampled = sampled_pairs(model, [found], [truth], integers("1, 2, 1, 2, 1"))
    assert sampled["relation_labels"].tolist().count(3) == expected


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (
            False,
            {
                (0, 1): 4,
                (0, 2): 3,
            },
        ),
        (True, {(0, 1): 4}),
    ],
)
def test_relations_between_boxes_apart_are_not_trained_where_overlap_is_required(overlap, expected):
    truth = {
        "boxes": boxes("0 0 20 20, 10 10 30 30, 50 50 60 60"),
        "labels": integers("0, 1, 2"),
        "relations": integers("0 1 3, 0 2 2", 3),
    }
    found = sampled_pairs(
        sampler_of(require_overlap=overlap),
        [truth["boxes"]],
        [truth],
        truth["labels"] + 1,
    )
    pairs = [tuple(pair) for pair in found["pairs"].tolist()]
    labels = dict(zip(pairs, found["relation_labels"].tolist(), strict=True))
    assert {pair: label for pair, label in labels.items() if label} == expected
    assert len(labels) == (2 if overlap else 6)


def test_nothing_to_sample():
    no_relations = integers("").view(0, 0)
    drawn = sample_given_boxes(no_relations)
    assert len(drawn.pairs) == 0
    assert drawn.related.shape == (0, 0)
    drawn = sample_detected_boxes(TRUE, integers("0, 0"), *NOTHING.values(), no_relations)
    assert drawn.pairs.tolist() == [[0, 0]], "placeholder of the original"
    assert drawn.labels.tolist() == [0]
    drawn = sample_detected_boxes(*NOTHING.values(), *NOTHING.values(), no_relations)
    assert drawn.pairs.shape == (0, 2), "there is no box that a placeholder could name"
    assert pairs_to_ask(NOTHING["boxes"]).shape == (0, 2)


@pytest.mark.parametrize(
    ("one_of_each", "least", "most"),
    [
        pytest.param(True, 0.55, 0.78, id="two of three annotations say 2"),
        pytest.param(False, 0.66, 0.84, id="1 - 1/2 x 1/2"),
    ],
)
def test_the_predicate_of_a_pair_is_drawn_by_the_generator(one_of_each, least, most):
    relations = integers("0 1 1, 0 1 2, 0 1 2, 1 0 3", 3)

    def draw(seed):
        return relation_matrix(relations, 2, one_of_each, torch.Generator().manual_seed(seed))

    draws = torch.stack([draw(seed) for seed in range(300)])
    assert torch.equal(draw(7), draws[7])
    assert least < (draws[:, 0, 1] == 2).float().mean() < most
    assert (draws[:, 1, 0] == 3).all()


def test_a_detection_has_no_relation_with_itself():
    """Two objects of one class, one on the other: each detection stands for both."""
    twice = (boxes("0 0 99 99, 0 0 99 99"), integers("1, 1"))
    drawn = sample_detected_boxes(*twice, *twice, integers("0 1, 0 0", 2))
    assert drawn.labels.tolist() == [1, 1]
    assert sorted(drawn.pairs.tolist()) == [[0, 1], [1, 0]]


def test_better_fitting_boxes_are_drawn_more_often():
    """Two proposals on one object, one relation to draw: in proportion to the IoU, 1 to 0.6."""
    proposals = (boxes("0 0 99 99, 0 0 99 59, 200 0 299 99"), integers("1, 1, 2"))
    truth = (TRUE, integers("1, 2"), integers("0 1, 0 0", 2))
    firsts = []
    for seed in range(300):
        draw = torch.Generator().manual_seed(seed)
        drawn = sample_detected_boxes(*proposals, *truth, per_relation=1, generator=draw)
        firsts.append(int(drawn.pairs[0, 0]))
    assert 0.52 < firsts.count(0) / 300 < 0.73


@pytest.mark.parametrize(
    ("training", "added"),
    [
        (True, True),
        (False, True),
        (True, False),
    ],
)
def test_annotated_boxes_are_proposals_too_in_training_only(table, batch, monkeypatch, training, added):
    """A weak detector proposes few of the objects that the relations are between."""
    model = model_of(table, "sgdet", freeze="detector", add_annotated_boxes=added).train(training)
    nothing = [NOTHING["boxes"]] * len(batch.targets)
    monkeypatch.setattr(model.detector, "_begin_proposals", lambda *_: lambda: (nothing, nothing))
    found = model(batch.images, batch.sizes, batch.targets)["batch"].num_objects
    annotated = [int((target["iscrowd"] == 0).sum()) for target in batch.targets]
    for count, there in zip(found, annotated, strict=True):
        assert count <= min(5, there)
        assert (count > 0) == (there > 0 and training and added)
