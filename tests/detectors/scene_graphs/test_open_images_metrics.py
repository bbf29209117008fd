"""Metrics of Open Images: counted by hand, and against figures of the published program."""

import numpy as np
import pytest
from scene_graph_data import prediction, truth

from scripts.benches import scene_graph
from toolkit.detectors.scene_graphs.open_images_metrics import open_images_metrics
from toolkit.detectors.scene_graphs.triplet_matches import compact_graph


def test_open_images_metrics_counted_by_hand():
    """Predicate 1, annotated twice: the surest finds one, the next the same again, the third the other, but
    only by the union of its boxes: AP is 1/2, and (1 + 2/3) / 2 of unions. Predicate 0, annotated once, is missed."""
    true = truth("0 1 1, 1 0 1, 0 1 0", "0 0 100 100, 200 0 300 100", labels="5, 6")
    boxes = "0 0 100 100, 200 0 300 100, 0 0 100 100, 200 0 300 40"
    found = prediction("0 1 1, 2 1 1, 3 0 1", 2, boxes, labels="5, 6, 5, 6")
    found["predicate_scores"][:, 0] = 0
    by_boxes = 2 / 3 * 1 / 2
    by_unions = 2 / 3 * (1 + 2 / 3) / 2
    expected = {"wmAP_rel": by_boxes, "wmAP_phr": by_unions, "micro_R@50": 1 / 3}
    expected["score_wtd"] = 0.4 * by_boxes + 0.4 * by_unions + 0.2 / 3
    assert open_images_metrics([true], [found], 2) == pytest.approx(expected)
    assert open_images_metrics([true], [compact_graph(found, 100)], 2) == pytest.approx(expected)
    assert open_images_metrics(
        [true],
        [prediction("", 2)],
        2,
    ) == dict.fromkeys(expected, 0.0)
    assert set(
        open_images_metrics(
            [truth("")],
            [found],
            2,
        ).values()
    ) == {None}


def test_open_images_metrics_are_those_of_the_published_program():
    """Figures of its `ap_eval` on these graphs, whose objects have three classes and boxes that are far off."""
    truths, predictions, _ = scene_graph.random_scene_graphs(25, 7, 30, 5, num_classes=3)
    for graph in predictions:
        graph["boxes"] = graph["boxes"] + np.asarray([12, -9, 20, 7], np.float32)
    found = open_images_metrics(truths, predictions, 5)
    assert found["wmAP_rel"] == pytest.approx(0.09850498135689, abs=1e-12)
    assert found["wmAP_phr"] == pytest.approx(0.29249930630124, abs=1e-12)
    assert found["micro_R@50"] == pytest.approx(0.398)
