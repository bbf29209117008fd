"""What to try next: each suggestion has its evidence, and none is made without."""

from dataclasses import fields

import numpy as np
import pytest
from report_data import ground_truth_as_predictions, predictions_of, random_case, table_of

from toolkit.index import DETECTORS
from toolkit.models import options_class
from toolkit.tools.report import sections
from toolkit.tools.report.advice import MORE_BOXES, advise
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.judgement import judge

BOX = [10, 10, 60, 70]


def advice_on(judged, **facts) -> dict:
    """The suggestions by topic. facts: of the run."""
    return {advice.topic: advice for advice in advise(judged, RunFacts(**facts))}


def judged_on(folder, truth, found):
    table = table_of(folder, truth, draw=False)
    return judge("x", predictions_of(table, found), table, draws=2)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    table, predictions = random_case(tmp_path_factory.mktemp("noisy"), crowd=0)
    return judge("x", predictions, table, draws=2)


@pytest.fixture(scope="module")
def confusing(tmp_path_factory):
    """A detector that finds boxes and takes most cats for dogs: one advice about data, whatever its run."""
    truth = [[(BOX, i % 2)] for i in range(30)]
    found = [[(BOX, int(i % 5 > 0), 0.9 - i / 100)] for i in range(30)]
    return judged_on(tmp_path_factory.mktemp("confusing"), truth, found)


def test_a_perfect_detector_needs_no_advice(tmp_path):
    table, _ = random_case(tmp_path, crowd=0)
    judged = judge("x", ground_truth_as_predictions(table), table, draws=2)
    assert advice_on(judged).keys() <= {"Threshold"}


@pytest.mark.parametrize(
    ("ap", "told"),
    [
        ([0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16], True),
        ([0.02, 0.16], True),  # two evaluations are enough
        ([0.02], False),
        ([0.1] * 8, False),
    ],
)
def test_ap_that_still_rises_is_trained_too_short(noisy, ap, told):
    rows = [{"step": 1 + i, "val/bbox_AP": value} for i, value in enumerate(ap)]
    assert ("Trained too short" in advice_on(noisy, rows=rows)) == told


def test_a_validation_loss_that_rises_is_over_fitting(noisy):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 60)]
    for number in range(1, 7):
        away = abs(number - 2)
        rows.append({"step": 10 * number, "val/loss": 1 + away, "val/bbox_AP": 0.3 - 0.02 * away})
    assert "Over-fitting" in advice_on(noisy, rows=rows)
    rising = [{"step": step, "val/bbox_AP": 0.02 * step, "val/loss": 1.0} for step in range(1, 9)]
    assert "Over-fitting" not in advice_on(noisy, rows=rising)


@pytest.mark.parametrize(("factor", "told"), [(1, True), (10, False)])
def test_as_many_queries_as_boxes_are_too_few(noisy, factor, told):
    most = int(np.bincount(noisy.matches.truth.image_index).max())
    found = advice_on(noisy, config={"model": {"num_queries": factor * most}})
    assert ("Too few queries" in found) == told


@pytest.mark.parametrize(
    ("tile", "pixels", "words"),
    [
        (None, "smaller than 12 pixels", "--data.tile."),
        ([80, 80], "smaller than 20 pixels", "(now [80, 80])"),
        ([40, 40], "", ""),  # they are seen at 40 pixels
    ],
)
def test_small_objects_have_the_size_that_tiles_show_them_at(tmp_path, tile, pixels, words):
    """Half of the objects are small and not found; in tiles of pictures of 160 px they are seen larger."""
    small = [10, 10, 30, 30]
    large = [40, 40, 110, 110]
    found = [[([60, 60, 70, 70], 0, 0.5), (large, 1, 0.9)]] * 10
    judged = judged_on(tmp_path, [[(small, 0), (large, 1)]] * 10, found)
    data = {"image_size": 80, "tile": tile, "tile_overlap": 0.2, "tile_visible": 0.25}
    advice = advice_on(judged, config={"data": data}).get("Small objects")
    assert (advice is None) == (not pixels)
    if advice is not None:
        assert pixels in advice.evidence
        assert words in advice.advice


STEPS_PER_EPOCH = 10


def run_ended(share, metric_of, ended_by, epochs=100, evaluations=8) -> dict:
    """Facts of a run that ended after this share of its planned epochs; metric_of: its AP by the share of its steps."""
    last = round(share * epochs * STEPS_PER_EPOCH)
    rows = []
    for number in range(1, evaluations + 1):
        step = round(last * number / evaluations)
        rows.append({"step": step, "val/bbox_AP": metric_of(step / last)})
    config = {"run": {"epochs": epochs}}
    return {
        "rows": rows,
        "config": config,
        "ended_by": [ended_by],
        "epochs_made": last / STEPS_PER_EPOCH,
    }


def rising(made: float) -> float:
    return 0.5 * made


def level(made: float) -> float:
    return 0.4 + 0.003 * (made > 0.8)


STOPPED = "eval.early_stopping_patience"


@pytest.mark.parametrize(
    ("share", "ended_by", "begun_in"),
    [
        (0.016, "run.epochs", "epoch 2 of 100"),
        (0.099, "run.max_minutes", "epoch 10 of 100"),
        (0.016, STOPPED, None),
        (0.1, "run.max_steps", None),
        (0.5, "run.epochs", None),
        (1.0, STOPPED, None),
    ],
)
def test_a_run_that_has_barely_begun_is_only_told_to_train_longer(confusing, share, ended_by, begun_in):
    found = advice_on(confusing, **run_ended(share, rising, ended_by))
    first = next(iter(found.values()))
    assert first.topic == "Trained too short"
    assert "AP was still rising" in first.evidence
    assert ("Confused classes" in found) == (begun_in is None)
    assert begun_in is None or begun_in in first.evidence
    # Of a run that does not rise any more the length is not what it lacks.
    found = advice_on(confusing, **run_ended(share, level, ended_by))
    assert "Trained too short" not in found
    assert "Confused classes" in found


def test_a_detector_that_has_learned_is_judged_after_few_epochs(noisy, tmp_path):
    """The limit that was meant may be one of minutes, with epochs that are never reached."""
    found = [[(BOX, i % 2, 0.9), (BOX, i % 2, 0.8), (BOX, i % 2, 0.7)] for i in range(30)]
    duplicates = judged_on(tmp_path, [[(BOX, i % 2)] for i in range(30)], found)
    duplicates.errors.cost["duplicate"] = 0.1
    facts = run_ended(0.016, rising, "run.max_minutes")
    assert list(advice_on(duplicates, **facts))[:2] == ["Trained too short", "Duplicates"]


def test_a_run_without_evaluations_enough_has_barely_begun(confusing):
    """Whether AP still rises is not known then."""
    facts = run_ended(0.016, level, "run.max_minutes", evaluations=1)
    assert list(advice_on(confusing, **facts)) == ["Trained too short"]


def test_duplicates_are_named_with_their_flag(tmp_path):
    boxes = [np.array([10 + i % 5, 10, 60, 70]) for i in range(30)]
    scores = np.random.default_rng(0).random(30)
    found = []
    for i, box in enumerate(boxes):
        found.append([(box + k, i % 2, scores[i] * (1 - k / 100)) for k in range(3)])
    judged = judged_on(tmp_path, [[(box, i % 2)] for i, box in enumerate(boxes)], found)
    advice = advice_on(judged, config={"model": {"nms_threshold": 0.9}})
    assert "<code>--model.nms_threshold</code> (now 0.9)" in sections.advice([advice["Duplicates"]])
    assert "60" in advice["Duplicates"].evidence
    assert "Confused classes" not in advice


def test_confusions_are_counted(confusing):
    advice = advice_on(confusing)
    assert "cat is taken for dog: 12 of 15" in advice["Confused classes"].evidence
    assert "Duplicates" not in advice


def test_a_detector_that_finds_nothing_is_told_why(tmp_path):
    normalised = ([10 / 160, 10 / 120, 60 / 160, 70 / 120], 0, 0.9)
    (advice,) = advice_on(judged_on(tmp_path, [[(BOX, 0)]] * 20, [[normalised]] * 20)).values()
    assert advice.topic == "Hardly anything is found"
    assert "normalised" in advice.evidence


def test_settings_for_crowded_images_exist():
    known = {each.name for architecture in DETECTORS for each in fields(options_class(architecture))}
    assert set(MORE_BOXES) <= known
