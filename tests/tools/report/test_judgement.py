"""All statistics of one detector on one data set."""

import json

import numpy as np
import pytest
from mask_data import random_masks
from pytest import approx
from report_data import ground_truth_as_predictions, random_case, table_of

from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.predictions import write_predictions
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.report.detection_errors import ERROR_KINDS
from toolkit.tools.report.judgement import as_json, judge


def test_ground_truth_as_predictions_is_perfect(tmp_path):
    table, _ = random_case(tmp_path, crowd=0)
    truth = ground_truth_as_predictions(table)
    judged = judge("truth", truth, table, draws=20)
    boxes = int(judged.matches.num_truth.sum())
    assert judged.numbers["AP"] == 1
    assert judged.overall.best.f1 == 1
    assert judged.matrix.trace() == boxes
    assert judged.matrix.sum() == boxes
    assert not judged.suspects
    errors = judged.errors
    assert not errors.missed.any()
    for kind in ERROR_KINDS[:-1]:
        assert not len(errors.of(kind))
    assert errors.ap50 == 1
    assert errors.cost["class"] == 0


def test_graphs_travel_with_their_boxes_through_a_file(tmp_path):
    boxes = [
        [0, 0, 40, 40],
        [60, 60, 100, 100],
        [0, 60, 40, 100],
        [0, 0, 5, 5],
    ]
    image = {
        "objects": [(boxes[0], 0), (boxes[1], 1), (boxes[2], 1)],
        "relations": [(0, 1, 1), (2, 0, 0)],
    }
    table = table_of(tmp_path, [image] * 3, predicates=("on", "under"), draw=False)
    graph = {
        "boxes": np.array(boxes, np.float32),
        "labels": np.array([0, 1, 1, -1]),
        "scores": np.array([0.9, 0.8, 0.7, 0.1], np.float32),
        "pairs": np.array([[0, 1], [2, 0]]),
        "predicate_scores": np.array([[0.1, 0.9], [0.3, 0.6]], np.float32),
    }
    of_images = dict.fromkeys(table.image_ids().tolist(), graph)
    file = write_predictions(tmp_path / "g.json", of_images, table)
    read = read_predictions(file, table).predictions
    for key, value in graph.items():
        assert (read[10][key] == value).all()
    judged = judge("graphs", read, table, draws=10)
    graphs = judged.graphs
    assert graphs.mode == "sgdet"
    assert graphs.row["R@100"] == approx(0.5)
    on_is_taken_for_under = [[0, 3, 0], [0, 3, 0]]
    assert graphs.confusions.tolist() == on_is_taken_for_under
    assert graphs.recall.tolist() == [0, 1]
    assert graphs.whole == 0
    json.dumps(as_json(judged))


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return random_masks(tmp_path_factory.mktemp("masks"), 20, 2, seed=9)


def test_numbers_of_boxes_stay_beside_those_of_masks(masks):
    table, predictions = masks
    judged = judge("masks", predictions, table, draws=20)
    row = CocoEvaluator(table).evaluate(predictions)
    numbers = judged.numbers
    for name in COCO_METRICS:
        assert numbers[name] == row[f"bbox_{name}"]
        assert numbers[f"segm_{name}"] == row[f"segm_{name}"]
    low, high = judged.intervals["segm_AP"]
    assert low <= numbers["segm_AP"] <= high
    content = as_json(judged)
    of_class = content["classes"]["class 0"]
    assert of_class["segm_AP"] == approx(row["segm_AP/class 0"], nan_ok=True)
    assert content["threshold"] == judged.threshold
    assert len(content["segm_ap_by_iou"]) == 10


def test_mistakes_are_those_of_masks_where_there_are_masks(masks):
    table, predictions = masks
    boxes = {}
    for image_id, found in predictions.items():
        boxes[image_id] = dict(found)
        del boxes[image_id]["masks"]
    judged = judge("masks", predictions, table, draws=2)
    of_boxes = judge("boxes", boxes, table, draws=2)
    assert of_boxes.numbers["AP"] == judged.numbers["AP"]
    assert of_boxes.voc == judged.voc
    assert judged.overall.total == of_boxes.overall.total
    assert judged.errors.cost != of_boxes.errors.cost
    assert "segm_AP" not in of_boxes.numbers
