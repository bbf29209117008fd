"""What an evaluation of graphs reports: groups of predicates, phrases, the boxes that were asked, attributes."""

import numpy as np
import pytest
import torch
from rows import integers, rows
from scene_graph_data import loader_of, model_of, prediction, predictions_of, truth

from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.evaluator import (
    SceneGraphEvaluator,
    attribute_r_precision,
    grouped_recall,
    predicate_groups,
)
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs
from toolkit.detectors.scene_graphs.true_graphs import true_graph
from toolkit.evaluation.coco import make_evaluator
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.tools.shapes import PREDICATES


def test_predicates_are_grouped_by_how_often_training_had_them():
    groups = predicate_groups(np.arange(50))
    assert [len(labels) for labels in groups.values()] == [16, 17, 17]
    assert groups["head"].tolist() == list(range(49, 33, -1))
    assert predicate_groups(np.asarray([9, 1, 5, 1]))["tail"].tolist() == [1, 3]


def test_recall_of_head_body_and_tail_counted_by_hand():
    """Of 6 predicates 2 in each; found are 1 and 0 of the head's, 1/2 and 1 of the body's, 0 of one of the tail's."""
    groups = predicate_groups(np.arange(6, 0, -1))
    truths = [truth("0 1 0, 1 2 1, 0 2 2, 2 0 2, 2 1 3, 1 0 4")]
    metrics = evaluate_scene_graphs(truths, [prediction("0 1 0, 0 2 2, 2 1 3, 2 0 3", 6)], "sgdet", 6, top=(100,))
    row = grouped_recall(metrics, groups, "strict")
    assert row == {"mR_head@100": 0.5, "mR_body@100": 0.75, "mR_tail@100": 0.0}


@pytest.mark.parametrize(("protocol", "expected"), [("strict", None), ("original", 0.0)])
def test_a_group_without_annotated_predicates(protocol, expected):
    metrics = evaluate_scene_graphs(
        [truth("0 1 0")],
        [prediction("0 1 0")],
        "sgdet",
        4,
        top=(20,),
    )
    assert grouped_recall(
        metrics,
        {"tail": np.asarray([1, 3])},
        protocol,
    ) == {"mR_tail@20": expected}


def true_graphs(table):
    """Annotated graphs by image id, as tensors."""
    graphs = {}
    for row in map(table.row, range(len(table))):
        graphs[row["image_id"]] = {key: torch.from_numpy(value) for key, value in true_graph(row).items()}
    return graphs


def test_phrase_detection_compares_unions(table):
    """Every subject box is as large as the union with its object: no box is right, and every union is."""
    predictions = {}
    for image_id, graph in true_graphs(table).items():
        ends = graph["relations"][:, :2]
        count = len(ends)
        subjects, objects = graph["boxes"][ends.T]
        unions = torch.cat([torch.minimum(subjects, objects)[:, :2], torch.maximum(subjects, objects)[:, 2:]], 1)
        predictions[image_id] = {
            "boxes": torch.cat([unions, objects]).float(),
            "labels": graph["labels"][ends.T.flatten()],
            "scores": torch.ones(2 * count),
            "pairs": torch.arange(2 * count).reshape(2, count).T,
            "predicate_scores": torch.eye(len(PREDICATES))[graph["relations"][:, 2]],
        }
    boxes = SceneGraphEvaluator(table, "sgdet").evaluate(predictions)
    phrases = SceneGraphEvaluator(table, "sgdet", phrase_detection=True).evaluate(predictions)
    assert boxes["R@100"] < 0.5
    assert phrases["R@100"] == 1.0
    assert boxes["wmAP_rel"] < 0.5
    assert boxes["wmAP_phr"] > 0.9  # some unions are those of two relations


def test_truth_is_that_of_the_boxes_that_were_asked(table):
    """A box that resizing left without width is in neither graph: recall is that of the others."""
    predictions = {}
    for image_id, graph in true_graphs(table).items():
        of_others = (graph["relations"][:, :2] > 0).all(1)  # without box 0
        relations = graph["relations"][of_others] - torch.tensor([1, 1, 0])
        predictions[image_id] = {
            "boxes": graph["boxes"][1:],
            "labels": graph["labels"][1:],
            "scores": torch.ones(len(graph["boxes"]) - 1),
            "pairs": relations[:, :2],
            "predicate_scores": torch.eye(len(PREDICATES))[relations[:, 2]],
            "true_labels": graph["labels"][1:],
            "true_relations": relations,
        }
    evaluator = SceneGraphEvaluator(table, "predcls")
    scores = evaluator.evaluate(predictions)
    assert scores["ngR@100"] == scores["A@100"] == 1.0
    text = evaluator.describe(scores, predictions)
    assert "left of" in text
    assert "mR its mean over predicates" in text


def test_a_detector_that_finds_nothing_has_a_recall_of_zero(table):
    nothing = {
        "boxes": torch.zeros(0, 4),
        "scores": torch.zeros(0),
        "labels": torch.zeros(0, dtype=torch.int64),
    }
    evaluator = SceneGraphEvaluator(table, "sgdet", protocol="strict")
    scores = evaluator.evaluate(dict.fromkeys(evaluator.image_ids, nothing))
    assert scores["R@100"] == scores["bbox_AP"] == 0.0


def test_the_best_pairs_and_the_annotated_ones_are_all_that_metrics_need(table):
    """`top_k` pairs of each image give the numbers that all pairs give."""
    model = model_of(table, "sgcls", "imp").eval()
    evaluator = make_evaluator(model, table, "toolkit")
    rows = {}
    for top in (1, 20, 999):
        found = predictions_of(model, table, top_k=top)
        rows[top] = evaluator.evaluate(found)
    assert max(len(graph["pairs"]) for graph in found.values()) > 20
    for k in (20, 50, 100):
        assert rows[1][f"A@{k}"] == rows[999][f"A@{k}"]
    assert rows[20]["R@20"] == rows[999]["R@20"]
    assert rows[20]["ngR@20"] == rows[999]["ngR@20"]
    assert rows[999]["bbox_AP"] is not None
    assert rows[999]["zR@20"] is None


def test_r_precision_counts_the_k_best_of_each_object():
    scores = torch.tensor(rows("0.9 0.8 0.1, 0.2 0.1 0.9, 0.5 0.5 0.5"))
    ids = integers("1 3 0, 3 0 0, 0 0 0", 3)
    assert attribute_r_precision([ids, ids[:0]], [scores, scores[:0]]) == 2 / 3
    assert attribute_r_precision([ids[2:]], [scores[2:]]) is None
    assert attribute_r_precision([integers("2 0 1", 3)], [scores[2:]]) == 0, "the list ends at 0; ties: lower id"


def test_evaluation_with_other_names_or_settings_is_refused(table):
    model = model_of(table, attributes=("red", "striped", "wet"))
    with pytest.raises(BadInput, match="attributes.*'rings'.*training data.*'red'"):
        make_evaluator(model, table, "toolkit")
    model.predicates = ("on",)
    with pytest.raises(BadInput, match="left of"):
        make_evaluator(model, table, "toolkit")
    with pytest.raises(BadInput, match="protocol"):
        SceneGraphEvaluator(table, "predcls", protocol="lenient")
    with pytest.raises(BadInput, match="eval.phrase_detection is for model.mode sgdet"):
        SceneGraphEvaluator(table, "predcls", phrase_detection=True)


def test_attribute_scores_of_detections_are_kept_only_if_asked_for(table):
    """Of VG150 they would be 1.6 GB, and no metric uses them."""
    model = model_of(table, "sgdet", "imp", attributes=table.attributes).eval()
    for graph in predictions_of(model, table).values():
        assert "attribute_scores" not in graph
    predictions = predict_dataset(model, loader_of(table), "cpu", score_threshold=0.2).by_image
    for graph in predictions.values():
        assert len(graph["attribute_scores"]) == len(graph["boxes"])
    assert "attribute_R_precision" not in make_evaluator(model, table, "toolkit").evaluate(predictions)
