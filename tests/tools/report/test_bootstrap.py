"""Intervals of a report: metrics of images that are drawn with replacement."""

import numpy as np
import pytest
from report_data import predictions_of, random_case, table_of

from toolkit.evaluation.coco_numbers import exact_numbers
from toolkit.evaluation.matches import match_predictions
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.tools.report.bootstrap import interval, resample, weighted_numbers


def test_a_draw_counts_an_image_as_often_as_it_was_drawn(tmp_path):
    """Against a data set in which the images really stand several times."""
    table, predictions = random_case(tmp_path / "a", images=12, classes=2, crowd=0)
    times = np.random.default_rng(3).multinomial(12, np.full(12, 1 / 12))
    truth = []
    found = []
    for i, p in enumerate(predictions.values()):
        objects = table.row(i)["objects"]
        truth += [list(zip(objects["bbox"], objects["category"].tolist(), strict=True))] * times[i]
        found += [list(zip(p["boxes"], p["labels"], p["scores"], strict=True))] * times[i]
    again = table_of(tmp_path / "b", truth, table.class_names, draw=False)
    expected = exact_numbers(match_predictions(predictions_of(again, found), again))
    drawn = weighted_numbers(match_predictions(predictions, table), times[:, None].astype(np.float32))
    for name in COCO_METRICS:  # AR: no interpolation at recalls that rounding moves, no order among equals
        tolerance = 1e-6 if name in ("AR1", "AR10", "AR100") else 2e-2
        wanted = pytest.approx(expected.numbers[name][0], abs=tolerance, nan_ok=True)
        assert drawn.numbers[name][0] == wanted, name


def test_intervals_lie_around_the_number_and_shrink_with_data(tmp_path):
    widths = []
    for images in (20, 200):
        table, predictions = random_case(tmp_path / str(images), images=images)
        matched = match_predictions(predictions, table)
        value = float(exact_numbers(matched).numbers["AP50"][0])
        low, high = interval(resample(matched, 200).numbers["AP50"], value)
        assert low < value < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_an_undefined_number_has_no_interval():
    assert interval(np.full(5, np.nan), 0.5) is None
