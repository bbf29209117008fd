"""Score thresholds, confusions at them, and calibration."""

import numpy as np
import pytest
from pytest import approx
from report_data import matched_of, random_case, table_of

from toolkit.evaluation.matches import match_predictions
from toolkit.tools.report.thresholds import calibration, confusion_matrix, sweep, threshold_text

BOX = [0, 0, 20, 20]
FAR = [60, 60, 90, 90]


def f1_of(matched, kept) -> float:
    """F1 of the predictions that are kept, counted one by one."""
    right = (kept & matched.right).sum()
    counted = (kept & matched.counts).sum()
    return 2 * right / (counted + matched.num_truth.sum())


@pytest.fixture(params=range(4))
def matched(request, tmp_path):
    table, predictions = random_case(tmp_path, seed=request.param, scores=40)
    return match_predictions(predictions, table)


def test_the_best_threshold_gives_the_best_f1(matched):
    scores = matched.found.scores
    best = sweep(matched).best
    every = [f1_of(matched, scores >= score) for score in np.unique(scores)]
    assert best.f1 == approx(max(every), abs=1e-12)
    # A deployed threshold means either.
    for kept in (scores > best.threshold, scores >= best.threshold):
        assert f1_of(matched, kept) == approx(best.f1, abs=1e-6)


def test_every_box_has_one_fate(matched):
    matrix = confusion_matrix(matched, 0.4)
    boxes_of_classes = matrix[:-1].sum(axis=1)
    assert (boxes_of_classes == matched.num_truth).all()
    kept = matched.found.scores > 0.4
    assert matrix.trace() == (matched.right & kept).sum()


def one_box_each(folder, count: int):
    image = [(BOX, 0)]
    return table_of(folder, [image] * count, ("a",), draw=False)


def test_a_wanted_precision(tmp_path):
    table = one_box_each(tmp_path, 4)
    found = [
        [(BOX, 0, 0.9)],
        [(BOX, 0, 0.8)],
        [(FAR, 0, 0.7)],
        [(BOX, 0, 0.6)],
    ]
    swept = sweep(matched_of(table, found))
    high = swept.at_precision(0.9)
    assert high.recall == 0.5
    assert 0.7 < high.threshold < 0.8
    low = swept.at_precision(0.75)
    assert low.recall == 0.75
    assert low.threshold < 0.6
    all_wrong = matched_of(table, [[(FAR, 0, 0.5)]] * 4)
    assert sweep(all_wrong).best is None


TEXTS = [
    (0.26089, "0.261"),
    (0.5, "0.500"),
    (0.0004, "0.0004"),
    (0.99996, "0.99996"),
]


@pytest.mark.parametrize(("threshold", "text"), TEXTS)
def test_thresholds_have_three_digits_unless_nothing_were_left(threshold, text):
    assert threshold_text(threshold) == text


@pytest.mark.parametrize(("power", "low", "high"), [(1, 0, 0.03), (4, 0.2, 1)])
def test_calibration_tells_probabilities_from_other_scores(tmp_path, power, low, high):
    rng = np.random.default_rng(0)
    table = one_box_each(tmp_path, 2000)
    found = []
    for chance in rng.random(2000):
        box = BOX if rng.random() < chance else FAR
        found.append([(box, 0, chance**power)])
    error = calibration(matched_of(table, found)).error
    assert low < error < high
