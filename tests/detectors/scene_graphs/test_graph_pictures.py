"""Pictures of graphs, and the same graphs as JSON."""

import json

import pytest
from scene_graph_data import model_of, predictions_of, truth

from toolkit.detectors.scene_graphs.graph_pictures import correct_triplets, graph_panels
from toolkit.evaluation.coco import make_evaluator
from toolkit.tools.shapes import PREDICATES


def test_a_picture_comes_with_its_graphs_as_json(table, tmp_path):
    model = model_of(table, "sgdet").eval()
    evaluator = make_evaluator(model, table, "toolkit")
    path = evaluator.draw(predictions_of(model, table), 2, tmp_path / "graphs.png")
    assert path.stat().st_size > 1000
    graphs = json.loads(path.with_suffix(".json").read_text())
    assert len(graphs) == 2
    for graph in graphs.values():
        for relation in graph["relations"]:
            assert relation["predicate"] in PREDICATES
            assert relation["subject"] < len(graph["detections"])


@pytest.mark.parametrize(
    ("mode", "panels"),
    [
        ("predcls", ["boxes", "annotated graph", "predicted graph"]),
        ("sgdet", ["annotated boxes", "annotated graph", "predicted boxes", "predicted graph"]),
    ],
)
def test_boxes_that_are_given_are_drawn_once(table, mode, panels):
    model = model_of(table, mode).eval()
    row = table.row(0)
    drawn = graph_panels(table, row, predictions_of(model, table)[row["image_id"]])
    assert list(drawn) == panels


def test_a_triplet_is_correct_if_both_boxes_and_all_names_are():
    true = truth("0 1 3", "0 0 10 10, 20 20 30 30", labels="1, 2")
    found = truth("1 0 3, 0 1 3, 1 0 2, 2 0 3", "20 20 30 30, 0 0 10 9, 0 0 3 3", labels="2, 1, 1")
    correct = correct_triplets(found["relations"], found["boxes"], found["labels"], true)
    assert correct.tolist() == [True, False, False, False]
