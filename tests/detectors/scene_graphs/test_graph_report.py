"""Recall and confusions of predicates for a report."""

import numpy as np
import pytest
from report_data import table_of
from scene_graph_data import prediction

from toolkit.detectors.scene_graphs.graph_report import judge_graphs


@pytest.fixture
def judged(tmp_path):
    """Of three relations one is found second, one has another predicate, and the boxes of one are not in the graph."""
    objects = [([0, 0, 20, 20], 0), ([50, 50, 80, 80], 1), ([0, 60, 30, 90], 2)]
    image = {"objects": objects, "relations": [(0, 1, 1), (2, 0, 0), (1, 2, 0)]}
    table = table_of(tmp_path, [image], ("a", "b", "c"), draw=False, predicates=("on", "of"))
    return judge_graphs({10: prediction("0 1 0, 0 1 1, 2 0 1", 2)}, table, {"scores": {"zR@20": 0.5, "R@20": 9.0}})


def test_confusions_have_a_column_for_pairs_that_were_not_found(judged):
    assert judged.mode == "sgdet"
    assert judged.confusions.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert judged.frequency.tolist() == [2, 1]
    np.testing.assert_allclose(judged.images, [1 / 3])
    assert judged.whole == 0


def test_zero_shot_recall_is_that_of_the_run(judged):
    """The triplets that training had are not known here."""
    assert judged.row["zR@20"] == 0.5
    assert judged.row["R@20"] == pytest.approx(1 / 3)
    assert judged.as_json(("on", "of"))["predicates"]["of"] == {"relations": 1, "recall@100": 1.0}
