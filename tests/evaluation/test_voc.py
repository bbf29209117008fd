"""Pascal VOC's mAP of 2007 and 2012."""

import json

import pytest
from places import TESTS
from report_data import ground_truth_as_predictions, matched_of, random_case, table_of

from toolkit.evaluation import matches
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.matches import match_predictions
from toolkit.evaluation.voc import voc_metrics

GLUONCV = json.loads(
    (TESTS / "golden" / "data" / "gluoncv_voc.json").read_text()
)  # of its VOC07MApMetric, VOCMApMetric
BOX = [0, 0, 40, 40]
FAR = [60, 60, 100, 100]


def metrics_of(table, found) -> dict:
    return voc_metrics(matched_of(table, found))


@pytest.mark.parametrize("case", GLUONCV)
def test_numbers_are_those_of_gluoncv(tmp_path, case):
    """Crowds stand for GluonCV's difficult boxes; several predictions of a box, boxes without predictions."""
    truth = []
    found = []
    for image in case["images"]:
        truth.append(list(zip(image["gt"], image["labels"], image["difficult"], strict=True)))
        found.append(list(zip(image["boxes"], image["found"], image["scores"], strict=True)))
    result = metrics_of(table_of(tmp_path, truth, case["classes"], draw=False), found)
    for year, expected in case["expected"].items():
        named = {f"{year}_mAP" if name == "mAP" else f"{year}/{name}": value for name, value in expected.items()}
        assert {name: result[name] for name in named} == pytest.approx(named, abs=1e-12)


def test_a_second_prediction_of_a_box_is_wrong(tmp_path):
    table = table_of(tmp_path, [[(BOX, 0), (FAR, 0)], [(BOX, 0, True)]], draw=False)
    found = [[(BOX, 0, 0.9), (BOX, 0, 0.8), (FAR, 0, 0.7)], [(BOX, 0, 0.95)]]  # right, again, right; difficult
    result = metrics_of(table, found)
    assert result["voc12/cat"] == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert result["voc07/cat"] == pytest.approx((6 + 5 * 2 / 3) / 11)
    assert result["voc12/dog"] is None
    assert result["voc12_mAP"] == result["voc12/cat"]


def test_nothing_found_is_0_and_nothing_to_find_is_none(tmp_path):
    table = table_of(tmp_path / "boxes", [[(BOX, 0)], []], draw=False)
    nothing = metrics_of(table, [[], []])
    assert nothing["voc07_mAP"] == nothing["voc12_mAP"] == 0
    empty = table_of(tmp_path / "empty", [[]], draw=False)
    assert metrics_of(empty, [[(BOX, 0, 0.5)]])["voc12_mAP"] is None


def test_an_evaluation_in_training_has_the_same_numbers(tmp_path, monkeypatch):
    """`eval.metric_for_best voc07_mAP` is GluonCV's best by `mean_ap[-1]`."""
    table, predictions = random_case(tmp_path, crowd=0)
    matched = match_predictions(predictions, table)
    expected = voc_metrics(matched)
    row = CocoEvaluator(table).evaluate(predictions)
    assert row["voc07_mAP"] == expected["voc07_mAP"]
    assert row["voc12_mAP"] == expected["voc12_mAP"]
    perfect = match_predictions(ground_truth_as_predictions(table), table)
    assert voc_metrics(perfect)["voc12_mAP"] == 1
    monkeypatch.setattr(matches, "PAIRS_PER_CHUNK", 7)
    assert voc_metrics(match_predictions(predictions, table)) == expected
