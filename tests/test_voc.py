"""Pascal VOC's mean AP, against numbers of GluonCV's metric and cases worked by hand."""

import json
from pathlib import Path

import pytest
from report_data import ground_truth_as_predictions, predictions_of, random_case, table_of

from toolkit.evaluation import matches
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.matches import match
from toolkit.evaluation.voc import voc_metrics

GOLDEN = Path(__file__).parent / "golden" / "data" / "gluoncv_voc.json"  # by VOC07MApMetric and VOCMApMetric


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()))
def test_the_numbers_are_those_of_gluoncv(tmp_path, case):
    """Crowds stand for GluonCV's difficult boxes; several predictions of a box, boxes without predictions."""
    images = case["images"]
    truth = [list(zip(i["gt"], i["labels"], i["difficult"], strict=True)) for i in images]
    table = table_of(tmp_path, truth, case["classes"], draw=False)
    found = [list(zip(i["boxes"], i["found"], i["scores"], strict=True)) for i in images]
    result = voc_metrics(match(predictions_of(table, found), table))
    for year, expected in case["expected"].items():
        assert result[f"{year}_mAP"] == pytest.approx(expected.pop("mAP"), abs=1e-12)
        assert {name: result[f"{year}/{name}"] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_an_evaluation_in_training_has_the_means(tmp_path):
    """So that `eval.metric_for_best voc07_mAP` is GluonCV's best by `mean_ap[-1]`."""
    table, predictions = random_case(tmp_path)
    row, expected = CocoEvaluator(table).evaluate(predictions), voc_metrics(match(predictions, table))
    assert {name: row[name] for name in ("voc07_mAP", "voc12_mAP")} == {
        name: value for name, value in expected.items() if name.endswith("_mAP")
    }


def test_by_hand(tmp_path):
    box, far = [0, 0, 40, 40], [60, 60, 100, 100]
    table = table_of(tmp_path, [[(box, 0), (far, 0)], [(box, 0, True)]], draw=False)
    found = [[(box, 0, 0.9), (box, 0, 0.8), (far, 0, 0.7)], [(box, 0, 0.95)]]  # right, again, right; difficult
    result = voc_metrics(match(predictions_of(table, found), table))
    assert result["voc12/cat"] == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert result["voc07/cat"] == pytest.approx((6 + 5 * 2 / 3) / 11)
    assert result["voc12/dog"] is None and result["voc12_mAP"] == result["voc12/cat"]
    nothing = voc_metrics(match(predictions_of(table, [[], []]), table))
    assert nothing["voc07_mAP"] == nothing["voc12_mAP"] == 0
    empty = table_of(tmp_path / "empty", [[]], draw=False)
    assert voc_metrics(match(predictions_of(empty, [[(box, 0, 0.5)]]), empty))["voc12_mAP"] is None


def test_a_perfect_detector_and_small_blocks(tmp_path, monkeypatch):
    table, predictions = random_case(tmp_path, crowd=0)
    assert voc_metrics(match(ground_truth_as_predictions(table), table))["voc12_mAP"] == 1
    expected = voc_metrics(match(predictions, table))
    monkeypatch.setattr(matches, "PAIRS_AT_ONCE", 7)
    assert voc_metrics(match(predictions, table)) == expected
