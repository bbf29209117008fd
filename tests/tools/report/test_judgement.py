"""All statistics of one detector on one data set."""

import json

import numpy as np
import pytest
from mask_data import random_masks
from report_data import ground_truth_as_predictions, random_case, table_of

from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.predictions import write_predictions
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.report.detection_errors import ERROR_KINDS
from toolkit.tools.report.judgement import as_json, judge


def test_ground_truth_as_predictions_is_perfect(tmp_path):
    table, _ = random_case(tmp_path, crowd=0)
    judged = judge("truth", ground_truth_as_predictions(table), table, draws=20)
    boxes = int(judged.matches.num_truth.sum())
    assert judged.numbers["AP"] == 1
    assert judged.overall.best.f1 == 1
    assert judged.matrix.trace() == judged.matrix.sum() == boxes
    assert not judged.suspects
    assert not judged.errors.missed.any()
    assert not any(len(judged.errors.of(kind)) for kind in ERROR_KINDS[:-1])
    assert judged.errors.ap50 == 1
    assert judged.errors.cost["class"] == 0


def test_graphs_travel_with_their_boxes_through_a_file(tmp_path):
    objects = [([0, 0, 40, 40], 0), ([60, 60, 100, 100], 1), ([0, 60, 40, 100], 1)]
    image = {"objects": objects, "relations": [(0, 1, 1), (2, 0, 0)]}
    table = table_of(tmp_path, [image] * 3, predicates=("on", "under"), draw=False)
    graph = {
        "boxes": np.array([*(box for box, _ in objects), [0, 0, 5, 5]], np.float32),
        "labels": np.array([0, 1, 1, -1]),
        "scores": np.array([0.9, 0.8, 0.7, 0.1], np.float32),
        "pairs": np.array([[0, 1], [2, 0]]),
        "predicate_scores": np.array([[0.1, 0.9], [0.3, 0.6]], np.float32),
    }
    file = write_predictions(tmp_path / "g.json", dict.fromkeys(table.image_ids().tolist(), graph), table)
    read = read_predictions(file, table).predictions
    for key, value in graph.items():
        assert (read[10][key] == value).all()
    judged = judge("graphs", read, table, draws=10)
    assert judged.graphs.mode == "sgdet"
    assert judged.graphs.row["R@100"] == pytest.approx(0.5)
    assert judged.graphs.confusions.tolist() == [[0, 3, 0], [0, 3, 0]]  # "on" is taken for "under"
    assert judged.graphs.recall.tolist() == [0, 1]
    assert judged.graphs.whole == 0
    json.dumps(as_json(judged))


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return random_masks(tmp_path_factory.mktemp("masks"), 20, 2, seed=9)


def test_numbers_of_boxes_stay_beside_those_of_masks(masks):
    table, predictions = masks
    judged = judge("masks", predictions, table, draws=20)
    row = CocoEvaluator(table).evaluate(predictions)
    for name in COCO_METRICS:
        assert judged.numbers[name] == row[f"bbox_{name}"]
        assert judged.numbers[f"segm_{name}"] == row[f"segm_{name}"]
    low, high = judged.intervals["segm_AP"]
    assert low <= judged.numbers["segm_AP"] <= high
    content = as_json(judged)
    assert content["classes"]["class 0"]["segm_AP"] == pytest.approx(row["segm_AP/class 0"], nan_ok=True)
    assert content["threshold"] == judged.threshold
    assert len(content["segm_ap_by_iou"]) == 10


def test_mistakes_are_those_of_masks_where_there_are_masks(masks):
    table, predictions = masks
    boxes = {}
    for image_id, found in predictions.items():
        boxes[image_id] = {key: value for key, value in found.items() if key != "masks"}
    judged = judge("masks", predictions, table, draws=2)
    of_boxes = judge("boxes", boxes, table, draws=2)
    assert of_boxes.numbers["AP"] == judged.numbers["AP"]
    assert of_boxes.voc == judged.voc
    assert judged.overall.total == of_boxes.overall.total
    assert judged.errors.cost != of_boxes.errors.cost
    assert "segm_AP" not in of_boxes.numbers
