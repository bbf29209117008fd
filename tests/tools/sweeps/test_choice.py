"""The rounds of a choice: who trains for how long, who stops, and that a kill changes nothing."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
from launching import CPU, SCRIPTS, assert_same_checkpoint, small_settings
from places import SUPPORT
from pretended_training import PretendedRun, predictions_of_some
from report_data import table_of

from toolkit.base.errors import BadInput, Preempted
from toolkit.base.signals import StopSignals
from toolkit.tools.report.judgement import judge
from toolkit.tools.shapes import make_shapes
from toolkit.tools.sweeps import choice as choices
from toolkit.tools.sweeps.choice import Choice, open_choice, run_rounds, stopping
from toolkit.tools.watch import WatchedRun

SKILLS = {"poor": "0.2", "good": "-0.8", "best": "1", "broken": "fail"}


def words_of(skills: dict) -> dict:
    return {name: ["train.py", skill] for name, skill in skills.items()}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, train_images=1, val_images=20, image_size=64)
    return folder


@pytest.fixture
def begin(tmp_path, shapes, monkeypatch):
    """Return the choice in a folder, and run its rounds with pretended trainings; what it says is in `said`."""
    monkeypatch.setattr(PretendedRun, "data", shapes)
    monkeypatch.setattr(PretendedRun, "started", {})
    monkeypatch.setattr(choices, "WatchedRun", PretendedRun)
    monkeypatch.setattr(choices, "POLL_S", 0)

    def begin(skills=SKILLS, devices=("",), metric="AP", folder="out", minutes=2.0, said=None):
        asked = {"metric": metric, "minutes": minutes, "devices": len(devices)}
        choice = open_choice(tmp_path / folder, asked, lambda: words_of(skills))
        run_rounds(choice, devices, StopSignals(), [].append if said is None else said.append)
        return choice

    return begin


def test_the_worse_half_stops_and_the_others_go_on_with_more_minutes(begin):
    said = []
    choice = begin(said=said)
    first, last = choice.rounds
    assert first["minutes"] == 2.0 / 2 / 4
    assert list(first["values"]) == ["best", "good", "poor"]
    assert first["stays"] == ["best", "good"]
    assert last["minutes"] == 0.25 + 2.0 / 2 / 2
    assert list(last["values"]) == ["best", "good"]
    assert choice.failed == ["broken"]
    assert "broken has failed and is left out:\nerror: it cannot" in said
    assert sum(line.startswith("best: AP 0.") for line in said) == 2
    assert sum(line.startswith("best trains; its console is ") for line in said) == 2
    minutes = [float(given["run.max_minutes"]) for given, _ in PretendedRun.started["best"]]
    assert minutes == [first["minutes"], last["minutes"]]
    assert len(PretendedRun.started["poor"]) == 1
    for given, _ in PretendedRun.started["best"]:
        assert given["run.eval_every"] == "0"
        assert given["eval.early_stopping_patience"] == given["eval.test_split"] == given["run.max_steps"] == "null"


def test_two_trainings_at_a_time_are_on_two_devices(begin):
    choice = begin(devices=("4", "7"))
    assert choice.rounds[0]["minutes"] == 2.0 / 2 / 2
    devices = set()
    for started in PretendedRun.started.values():
        for _, environment in started:
            devices.add(environment["CUDA_VISIBLE_DEVICES"])
    assert devices == {"4", "7"}


@pytest.mark.parametrize(
    ("images", "found", "stop"),
    [
        (12, [11, 10, 2], ["c"]),
        (12, [11, 10], []),  # a difference of one image in twelve may be chance
        (80, [80, 80, 60], []),  # of twenty in eighty it is not, but another seed may bring a quarter
        (80, [80, 80, 50], ["c"]),
    ],
)
def test_who_may_be_as_good_as_the_best_does_not_stop(tmp_path, images, found, stop):
    table = table_of(tmp_path, [[([5, 5, 45, 45], 0)]] * images, draw=False)
    judged = []
    for name, count in zip("abc", found, strict=False):
        predictions = predictions_of_some(table, count)
        judged.append(judge(name, predictions, table, draws=200))
    assert list(stopping(judged, "AP")) == stop


@pytest.mark.parametrize("killed_at", range(1, 7))
def test_killed_at_any_training_it_decides_alike(begin, monkeypatch, killed_at):
    whole = begin(folder="whole")
    starts = []
    run = PretendedRun.__init__

    def killed(self, *given):
        starts.append(given)
        if len(starts) == killed_at:
            raise KeyboardInterrupt
        run(self, *given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PretendedRun, "__init__", killed)
        begin()
    again = begin()
    assert again.rounds == whole.rounds
    assert again.failed == whole.failed
    assert begin().rounds == whole.rounds, "what is over is not begun again"


def test_a_training_that_was_interrupted_is_started_again(begin, tmp_path):
    whole = begin()
    out = tmp_path / "out"
    content = json.loads((out / "choice.json").read_text())
    content["rounds"].pop()
    (out / "choice.json").write_text(json.dumps(content))
    (out / "best" / "status.json").write_text('{"state": "preempted"}')
    before = PretendedRun.started["best"][-1]
    assert begin().rounds == whole.rounds
    assert PretendedRun.started["best"][2:] == [before]
    assert len(PretendedRun.started["good"]) == 2, "it was through"


def test_a_signal_ends_it_in_words(begin, tmp_path, monkeypatch):
    signals = StopSignals()
    stopped = []

    def poll(run):
        signals.received = signal.SIGTERM

    monkeypatch.setattr(PretendedRun, "poll", poll)
    monkeypatch.setattr(PretendedRun, "stop", lambda run: stopped.append(run.folder.name))
    asked = {"metric": "AP", "minutes": 1.0, "devices": 1}
    choice = open_choice(tmp_path / "out", asked, lambda: words_of(SKILLS))
    with pytest.raises(Preempted, match="SIGTERM.*the same command goes on"):
        run_rounds(choice, [""], signals, print)
    assert stopped == list(PretendedRun.started) == ["poor"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"skills": {"a": "fail", "b": "fail"}}, "no candidate is left: all have failed"),
        ({"skills": {"a": "0", "b": "0"}}, r"after 0\.5 minutes each, no candidate has found anything"),
        ({"metric": "segm_AP"}, "no candidate is left"),
    ],
)
def test_what_cannot_be_chosen_is_a_sentence(begin, changes, said):
    with pytest.raises(BadInput, match=said):
        begin(**changes)


def test_a_folder_holds_one_choice(begin, tmp_path):
    begin()
    with pytest.raises(BadInput, match="begun with minutes 2.0; give that again, or another --out"):
        begin(minutes=3.0)
    (tmp_path / "out" / "choice.json").write_text('{"rounds": []}')
    with pytest.raises(BadInput, match="not as this program wrote it"):
        begin()


@pytest.mark.parametrize(("count", "rounds"), [(2, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_the_minutes_are_divided_evenly_among_rounds(tmp_path, count, rounds):
    choice = Choice(tmp_path, {"minutes": 60.0, "devices": 1}, dict.fromkeys(map(str, range(count)), []))
    assert choice.num_rounds == rounds
    assert choice.minutes_of_each == pytest.approx(60 / rounds / count)


def commands_of_two_seeds(data) -> dict:
    """Small trainings of SSD, by a clock of their own, so that their steps do not depend on the machine."""
    ssd = SCRIPTS[-1]
    commands = {}
    for seed in ("1", "2"):
        more = {"--run.seed": seed, "--run.save_every": 2, "--data.batch_size_per_device": 8}
        words = [SUPPORT / "with_clock.py", ssd.path, *small_settings(ssd, data, more)]
        commands[f"seed_{seed}"] = [str(word) for word in words]
    return commands


def kill_at(checkpoint: str):
    """Return a run and a clock that kill a training which has reached a checkpoint, and the program that watches it."""
    started = []

    class Remembered(WatchedRun):
        def __init__(self, *given):
            super().__init__(*given)
            started.append(self)

    def look(seconds):
        time.sleep(seconds)
        run = started[-1]
        if (run.folder / "checkpoints" / checkpoint).exists():
            os.killpg(run.process.pid, signal.SIGKILL)
            raise KeyboardInterrupt

    return Remembered, SimpleNamespace(sleep=look)


@pytest.mark.slow
def test_trainings_killed_in_each_round_go_on_to_the_same_bits(tmp_path, monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    make_shapes(tmp_path / "shapes", train_images=16, val_images=6, image_size=64)
    commands = commands_of_two_seeds(tmp_path / "shapes")

    def choose(name):
        asked = {"metric": "AR100", "minutes": 0.2, "devices": 1}
        choice = open_choice(tmp_path / name, asked, lambda: commands)
        run_rounds(choice, [""], StopSignals(), print)
        return choice

    whole = choose("whole")
    for checkpoint in ("step_000004", "step_000010"):  # of six steps in the first round, and of twelve
        watched, clock = kill_at(checkpoint)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(choices, "WatchedRun", watched)
            patched.setattr(choices, "time", clock)
            choose("killed")
    assert choose("killed").rounds == whole.rounds
    for name in whole.rounds[-1]["values"]:
        theirs = tmp_path / "whole" / name / "checkpoints" / "latest"
        assert theirs.resolve().name == "step_000012"
        assert_same_checkpoint(tmp_path / "killed" / name / "checkpoints" / "latest", theirs)
