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
    folder = tmp_path_factory.mktemp("compared")
    table = table_of(folder, three_corners(60), ("a", "b", "c"), draw=False)
    rng = np.random.default_rng(0)
    worse = {}
    better = {}
    for image_id, found in ground_truth_as_predictions(table).items():
        seen = rng.random(3) < 0.7
        found["scores"] = torch.from_numpy(rng.random(3))
        more = rng.random(3) < 0.25
        worse[image_id] = chosen(found, seen)
        better[image_id] = chosen(found, seen | more)
    return [
        judge("run_1", worse, table, draws=300),
        judge("run_2", worse, table, draws=300),
        judge("other", better, table, draws=300),
    ]


def chosen(found: dict, is_chosen: np.ndarray) -> dict:
    rows = torch.from_numpy(is_chosen)
    return {key: value[rows] for key, value in found.items()}


def test_a_paired_difference_sees_what_intervals_of_each_do_not(judged):
    compared = compare(judged)
    differences = {each.other: each for each in compared.differences if each.metric == "AP"}
    assert differences["run_2"].in_words() == "the same AP"
    gained = differences["other"]
    assert gained.low > 0
    assert re.fullmatch("better by .*; not explained by chance", gained.in_words())
    # Taken each alone, they overlap.
    first, _, other = judged
    _, high_of_first = first.intervals["AP"]
    low_of_other, _ = other.intervals["AP"]
    assert high_of_first > low_of_other


def test_images_that_changed_most_come_first(judged):
    first, _, other = judged
    image = compare(judged).images[0]
    assert other.image_f1[image] > first.image_f1[image]


def test_runs_that_differ_in_their_seed_are_one_group(judged):
    groups = compare(judged).groups
    assert list(groups) == ["run_1, run_2"]
    _, deviation = groups["run_1, run_2"]["AP"]
    assert deviation == 0


def test_settings_of_runs_are_equal_but_for_their_seed():
    optim = {"lr": 0.1}
    first = {"optim": optim, "run": {"seed": 1, "epochs": 5, "name": "a"}}
    same = {"run": {"epochs": 5, "name": "b", "seed": 2}, "optim": optim}
    other = {"run": {"epochs": 6}, "optim": optim}
    kept = settings_without_seed(first)
    assert settings_without_seed(same) == kept
    assert settings_without_seed(other) != kept


def test_detectors_on_different_data_are_refused(judged, tmp_path):
    table, predictions = random_case(tmp_path)
    other = judge("x", predictions, table, draws=5)
    with pytest.raises(BadInput, match="same data"):
        compare([judged[0], other])


WORDS = {"bf16": "bfloat16", "no": "float32", None: "?"}


PRECISIONS = [
    ("bf16", "no"),
    ("bf16", "bf16"),
    ("bf16", None),
]


@pytest.mark.parametrize("precisions", PRECISIONS)
def test_a_comparison_says_the_precisions_of_the_trainings(tmp_path, precisions):
    table, predictions = random_case(tmp_path / "data", images=3)
    judged = []
    for name, precision in zip("ab", precisions, strict=True):
        about = {"precision": precision} if precision else {}
        judged.append(judge(name, predictions, table, about, draws=2))
    text = write_comparison(tmp_path, judged).read_text()
    cells = "".join(f"<td>{WORDS[precision]}</td>" for precision in precisions)
    row = text.partition("trained in")[2]
    assert cells in row
    differ = "trained in different precisions (a in bfloat16, b in float32)" in text
    assert differ == (precisions == ("bf16", "no"))
    content = json.loads((tmp_path / "report.json").read_text())
    written = [detector["precision"] for detector in content["detectors"]]
    assert written == list(precisions)
