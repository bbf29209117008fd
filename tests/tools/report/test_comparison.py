"""Several detectors on the same data: their differences, and whether chance explains them."""

import json
import re

import numpy as np
import pytest
import torch
from report_data import ground_truth_as_predictions, random_case, table_of, three_corners

from toolkit.base.errors import BadInput
from toolkit.tools.report.comparison import compare, settings_without_seed
from toolkit.tools.report.judgement import judge
from toolkit.tools.report.write import write_comparison


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Two equal runs, and one that finds some more, in the same images."""
    table = table_of(tmp_path_factory.mktemp("compared"), three_corners(60), ("a", "b", "c"), draw=False)
    rng = np.random.default_rng(0)
    worse = {}
    better = {}
    for image_id, found in ground_truth_as_predictions(table).items():
        seen = rng.random(3) < 0.7
        found["scores"] = torch.from_numpy(rng.random(3))
        more = seen | (rng.random(3) < 0.25)
        worse[image_id] = {key: value[torch.from_numpy(seen)] for key, value in found.items()}
        better[image_id] = {key: value[torch.from_numpy(more)] for key, value in found.items()}
    runs = {"run_1": worse, "run_2": worse, "other": better}
    return [judge(name, predictions, table, draws=300) for name, predictions in runs.items()]


def test_a_paired_difference_sees_what_intervals_of_each_do_not(judged):
    compared = compare(judged)
    differences = {(each.other, each.metric): each for each in compared.differences}
    assert differences["run_2", "AP"].in_words() == "the same AP"
    gained = differences["other", "AP"]
    assert gained.low > 0
    assert re.fullmatch("better by .*; not explained by chance", gained.in_words())
    # Taken each alone, they overlap.
    assert judged[0].intervals["AP"][1] > judged[2].intervals["AP"][0]


def test_images_that_changed_most_come_first(judged):
    first = compare(judged).images[0]
    assert judged[2].image_f1[first] > judged[0].image_f1[first]


def test_runs_that_differ_in_their_seed_are_one_group(judged):
    groups = compare(judged).groups
    assert list(groups) == ["run_1, run_2"]
    assert groups["run_1, run_2"]["AP"][1] == 0


def test_settings_of_runs_are_equal_but_for_their_seed():
    first = settings_without_seed({"optim": {"lr": 0.1}, "run": {"seed": 1, "epochs": 5, "name": "a"}})
    assert settings_without_seed({"run": {"epochs": 5, "name": "b", "seed": 2}, "optim": {"lr": 0.1}}) == first
    assert settings_without_seed({"run": {"epochs": 6}, "optim": {"lr": 0.1}}) != first


def test_detectors_on_different_data_are_refused(judged, tmp_path):
    table, predictions = random_case(tmp_path)
    with pytest.raises(BadInput, match="same data"):
        compare([judged[0], judge("x", predictions, table, draws=5)])


WORDS = {"bf16": "bfloat16", "no": "float32", None: "?"}


@pytest.mark.parametrize("precisions", [("bf16", "no"), ("bf16", "bf16"), ("bf16", None)])
def test_a_comparison_says_the_precisions_of_the_trainings(tmp_path, precisions):
    table, predictions = random_case(tmp_path / "data", images=3)
    judged = []
    for name, precision in zip("ab", precisions, strict=True):
        about = {"precision": precision} if precision else {}
        judged.append(judge(name, predictions, table, about, draws=2))
    text = write_comparison(tmp_path, judged).read_text()
    cells = "".join(f"<td>{WORDS[precision]}</td>" for precision in precisions)
    assert cells in text.partition("trained in")[2]
    differ = "trained in different precisions (a in bfloat16, b in float32)" in text
    assert differ == (precisions == ("bf16", "no"))
    content = json.loads((tmp_path / "report.json").read_text())
    assert [detector["precision"] for detector in content["detectors"]] == list(precisions)
