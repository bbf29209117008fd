"""Matching of relations: which box stands for an object, which combinations count, and the compact form of a graph."""

import numpy as np
import pytest
from scene_graph_data import prediction, truth

from scripts.benches import scene_graph
from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs
from toolkit.detectors.scene_graphs.triplet_matches import best_combinations, boxes_of_objects, compact_graph


def test_the_surest_box_of_an_object_stands_for_it():
    """The second of three boxes on an object is the surest; the third stands for the neighbour that it overlaps too."""
    found = prediction("", of_boxes="0 0 20 20, 0 0 20 21, 0 0 20 19, 50 50 80 80", labels="0, 0, 0, 1")
    found["scores"] = np.asarray([0.5, 0.9, 0.4, 0.3])
    true = truth("", "0 0 20 20, 50 50 80 80, 0 0 20 16", labels="0, 2, 0")
    assert boxes_of_objects(true, found).tolist() == [2, 0, -1, -1]


@pytest.fixture(scope="module")
def graphs():
    """Truths, predictions and unseen triplets of 71 images, the last without a predicted pair."""
    truths, predictions, unseen = scene_graph.random_scene_graphs(70, 9, 60, 7)
    truths.append(truth("0 1 2"))
    predictions.append(prediction("", 7))
    return truths, predictions, unseen


@pytest.mark.parametrize("mode", ["sgcls", "sgdet", "phrdet"])
def test_a_compact_graph_measures_the_same(graphs, mode):
    truths, predictions, unseen = graphs
    compact = [compact_graph(graph, 100) for graph in predictions]
    for graph in compact:
        assert "predicate_scores" not in graph
        assert len(graph["combinations"]) <= 100
        assert graph["two_scores"].shape == graph["two_predicates"].shape == (len(graph["pairs"]), 2)
    whole = evaluate_scene_graphs(truths, predictions, mode, 7, unseen)
    small = evaluate_scene_graphs(truths, compact, mode, 7, unseen)
    assert whole.as_row() == small.as_row()
    np.testing.assert_array_equal(whole.unconstrained_matches, small.unconstrained_matches)
    np.testing.assert_array_equal(whole.matches, small.matches)


def test_combinations_of_other_pairs_are_refused(graphs):
    truths, predictions, _ = graphs
    compact = compact_graph(predictions[0], 100) | {"combinations": np.asarray([[60, 0]])}
    with pytest.raises(BadInput, match="image 0: combinations and predicates do not fit 60 pairs and 7 predicates"):
        evaluate_scene_graphs(truths[:1], [compact], "sgdet", 7)


@pytest.mark.parametrize("keep", [1, 7, 100, 5000])
@pytest.mark.parametrize("pairs", [1, 20, 300])
def test_equal_combinations_rank_by_pair_then_predicate(keep, pairs):
    rng = np.random.default_rng(keep)
    scores = rng.integers(0, 5, (pairs, 12)).astype(np.float32) / 4
    of_pairs = rng.integers(0, 5, pairs).astype(np.float32) / 4
    expected = np.argsort(-(scores * of_pairs[:, None]).ravel(), kind="stable")[:keep]
    np.testing.assert_array_equal(
        best_combinations(
            scores,
            of_pairs,
            keep,
        ),
        np.stack(np.divmod(expected, 12), 1),
    )
