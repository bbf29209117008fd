"""Score thresholds, confusions at them, and calibration."""

import numpy as np
import pytest
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


@pytest.mark.parametrize("seed", range(4))
def test_the_best_threshold_gives_the_best_f1(tmp_path, seed):
    table, predictions = random_case(tmp_path, seed=seed, scores=40)
    matched = match_predictions(predictions, table)
    scores = matched.found.scores
    best = sweep(matched).best
    every = [f1_of(matched, scores >= score) for score in np.unique(scores)]
    assert best.f1 == pytest.approx(max(every), abs=1e-12)
    # A deployed threshold means either.
    assert f1_of(matched, scores > best.threshold) == pytest.approx(best.f1, abs=1e-6)
    assert f1_of(matched, scores >= best.threshold) == pytest.approx(best.f1, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_every_box_has_one_fate(tmp_path, seed):
    table, predictions = random_case(tmp_path, seed=seed, scores=40)
    matched = match_predictions(predictions, table)
    matrix = confusion_matrix(matched, 0.4)
    assert (matrix[:-1].sum(axis=1) == matched.num_truth).all()
    assert matrix.trace() == (matched.right & (matched.found.scores > 0.4)).sum()


def test_a_wanted_precision(tmp_path):
    table = table_of(tmp_path, [[(BOX, 0)]] * 4, ("a",), draw=False)
    found = [[(BOX, 0, 0.9)], [(BOX, 0, 0.8)], [(FAR, 0, 0.7)], [(BOX, 0, 0.6)]]
    swept = sweep(matched_of(table, found))
    assert swept.at_precision(0.9).recall == 0.5
    assert 0.7 < swept.at_precision(0.9).threshold < 0.8
    assert swept.at_precision(0.75).recall == 0.75
    assert swept.at_precision(0.75).threshold < 0.6
    assert sweep(matched_of(table, [[(FAR, 0, 0.5)]] * 4)).best is None


@pytest.mark.parametrize(
    ("threshold", "text"), [(0.26089, "0.261"), (0.5, "0.500"), (0.0004, "0.0004"), (0.99996, "0.99996")]
)
def test_thresholds_have_three_digits_unless_nothing_were_left(threshold, text):
    assert threshold_text(threshold) == text


@pytest.mark.parametrize(("power", "low", "high"), [(1, 0, 0.03), (4, 0.2, 1)])
def test_calibration_tells_probabilities_from_other_scores(tmp_path, power, low, high):
    rng = np.random.default_rng(0)
    table = table_of(tmp_path, [[(BOX, 0)]] * 2000, ("a",), draw=False)
    found = []
    for chance in rng.random(2000):
        box = BOX if rng.random() < chance else FAR
        found.append([(box, 0, chance**power)])
    error = calibration(matched_of(table, found)).error
    assert low < error < high
