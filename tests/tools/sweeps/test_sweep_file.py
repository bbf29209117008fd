"""Sweeps: their file, a study over kills, several workers and pruning; what looks for a rate and a batch size."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml
from launching import CPU, SCRIPTS, all_rows, checkpoint_tensors, small_settings
from places import ROOT, SUPPORT

from scripts import find_batch_size, find_rate, sweep
from toolkit.base.errors import BadInput
from toolkit.tools.shapes import make_shapes
from toolkit.tools.sweeps.sweep_file import Parameter, read_sweep

pytest.importorskip("fcntl", reason="a program with POSIX locks and signals: not on Windows")

SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
RATES = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0}
SWEEP = {
    "program": str(SUPPORT / "stub_training.py"),
    "method": "bayes",
    "metric": {"name": "val/score", "goal": "maximize"},
    "parameters": {"optim.lr": RATES, "bonus": {"values": [0, 1]}},
}
TRAIN = ROOT / "scripts" / "train_detr.py"


def written(folder: Path, **changes) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    return path


def trials(out: Path) -> list[dict]:
    """The rows of trials.csv."""
    with open(out / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(out: Path, name: str) -> list[str]:
    return [row[name] for row in trials(out)]


def swept(path: Path, out: Path, count: int) -> int:
    return sweep.main([str(path), "--out", str(out), "--trials", str(count)])


def command(path: Path, out: Path, *more) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "scripts" / "sweep.py"),
        str(path),
        "--out",
        str(out),
        *map(str, more),
    ]


def killed_in_third_trial(path: Path, out: Path, environment: dict) -> None:
    """Starts a worker and kills it once this trial has a row; its training, in a session of its own, lives on."""
    words = command(path, out, "--trials", 4)
    worker = subprocess.Popen(words, env=os.environ | environment, start_new_session=True)
    while not (out / "trial_00002" / "metrics.jsonl").exists():
        time.sleep(0.02)
        assert worker.poll() is None
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_every_sweep_here_can_be_read(path):
    found = read_sweep(path)
    assert (ROOT / found.program).exists()
    assert found.metric.startswith("val/")
    assert found.maximize
    words = found.command_of({"optim.lr": 1e-5, "data.scales": [1, 2]}, ["--last"])
    assert words[:2] == [sys.executable, found.program]
    assert {"--optim.lr=1.0e-05", "--data.scales=[1, 2]"} <= set(words)
    assert words[-1] == "--last"


def test_a_sweep_says_all_that_is_wrong_with_it(tmp_path):
    wrong = {"optim.lr": RATES | {"min": 0}, "a": 3, "b": {"min": 1}}
    path = written(
        tmp_path,
        method="best",
        metric="AP",
        parameters=wrong,
        typo=1,
        early_terminate={"min_iter": "2"},
    )
    said = "(?s)no such key typo.*min_iter is '2'.*method is 'best'.*metric is 'AP'.*lr: from 0.*a: 3.*b: 'max'"
    with pytest.raises(BadInput, match=said):
        read_sweep(path)


def test_parameters_are_whole_numbers_numbers_or_values(tmp_path):
    path = written(
        tmp_path,
        parameters={
            "a": {"min": 1, "max": 9},
            "b": {"min": 0.5, "max": 1},
            "c": {"value": 7},
        },
    )
    assert read_sweep(path).parameters == {
        "a": Parameter(low=1, high=9, is_int=True),
        "b": Parameter(low=0.5, high=1),
        "c": Parameter([7]),
    }


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_study(tmp_path):
    path = written(tmp_path)
    assert swept(path, tmp_path / "whole", 4) == 0
    whole = trials(tmp_path / "whole")
    assert [row["trial"] for row in whole] == list("0123")
    assert {row["state"] for row in whole} == {"COMPLETE"}
    assert len({row["optim.lr"] for row in whole}) == 4
    out = tmp_path / "killed"
    killed_in_third_trial(path, out, {"SLOW": "0.15"})
    for _ in range(2):
        assert swept(path, out, 4) == 0
        assert trials(out) == whole
    other = written(tmp_path, parameters={"optim.lr": {"value": 1}})
    assert swept(other, out, 4) == 2


def test_workers_share_a_grid_and_a_failed_trial_is_said(tmp_path):
    values = {"optim.lr": {"values": [0.1, 0.01]}, "bonus": {"values": [0, 1, 9]}}
    path = written(tmp_path, method="grid", parameters=values)
    out = tmp_path / "out"
    workers = [subprocess.Popen(command(path, out), env=os.environ | {"SLOW": "0.05"}) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    pairs = sorted((row["optim.lr"], row["bonus"]) for row in trials(out))
    assert pairs == [(rate, bonus) for rate in ("0.01", "0.1") for bonus in "019"]
    for row in trials(out):
        assert (row["state"] == "FAIL") == (row["bonus"] == "9")
    best = yaml.safe_load((out / "best.json").read_text())
    assert best["settings"] == {"optim.lr": 0.01, "bonus": 1}


def test_a_trial_that_ends_while_another_worker_looks_is_not_begun_again(tmp_path, monkeypatch):
    out = tmp_path / "out"
    study = sweep.open_study(optuna, read_sweep(written(tmp_path)), out, 0)
    with sweep.next_trial(optuna, study, out, 6, []) as trial:
        assert trial.number == 0
    locked = sweep.locked

    def ended_just_now(path, wait=True):
        if path.name == "00000":
            study.tell(0, 1.0)
        return locked(path, wait)

    with monkeypatch.context() as patched, pytest.raises(FileNotFoundError):
        patched.setattr(sweep, "locked", ended_just_now)
        with sweep.next_trial(optuna, study, out, 6, []) as trial:
            assert trial.number == 1
            raise FileNotFoundError  # this worker is killed
    with sweep.next_trial(optuna, study, out, 6, []) as trial:
        assert trial.number == 1


@pytest.mark.parametrize("precisions", [("bf16", "no"), ("bf16", "bf16"), ("bf16", "")])
def test_the_table_says_the_precision_of_each_trial_and_where_they_differ(tmp_path, capsys, precisions):
    study = optuna.create_study()
    for number, precision in enumerate(precisions):
        study.tell(study.ask(), 0.5)
        if precision:
            folder = tmp_path / f"trial_{number:05d}"
            folder.mkdir()
            (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"precision": precision}}))
    (tmp_path / "locks").mkdir()
    sweep.write_trials(study, tmp_path, [])
    assert column(tmp_path, "precision") == list(precisions)
    said = capsys.readouterr().out
    assert ("trials differ in precision (bf16, no)" in said) == (precisions == ("bf16", "no"))


def test_values_in_the_table_are_no_formulas(tmp_path):
    study = optuna.create_study()
    trial = study.ask()
    trial.suggest_categorical("run.tags", ["=1+1"])
    study.tell(trial, 0.5)
    (tmp_path / "locks").mkdir()
    sweep.write_trials(study, tmp_path, ["run.tags"])
    assert column(tmp_path, "run.tags") == ["'=1+1"]


def test_a_sweep_whose_trials_all_fail_ends(tmp_path, capsys):
    path = written(tmp_path, parameters={"optim.lr": {"value": 1}, "bonus": {"value": 9}})
    assert swept(path, tmp_path / "out", 9) == 2
    assert "3 trials have failed and none has" in capsys.readouterr().err
    assert len(trials(tmp_path / "out")) == 3


def test_a_trial_worse_than_the_others_is_pruned(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW", "0.1")
    monkeypatch.setattr("toolkit.tools.watch.POLL_S", 0.02)
    path = written(tmp_path, early_terminate={"type": "hyperband", "min_iter": 2}, method="random")
    assert swept(path, tmp_path / "out", 8) == 0
    pruned = [row for row in trials(tmp_path / "out") if row["state"] == "PRUNED"]
    assert pruned
    for row in pruned:
        assert 2 <= int(row["evaluations"]) < 4


def test_the_curve_of_a_rate_stops_where_it_diverges_and_proposes_a_tenth_of_the_best(
    tmp_path,
):
    rates = [10 ** (i / 10) for i in range(-60, 1)]
    losses = [(rate, 2.0 - min(1.0, rate * 100) if rate < 0.02 else (rate / 0.02) ** 2) for rate in rates]
    curve = find_rate.smooth_losses(losses)
    proposal = find_rate.proposal(curve)
    assert len(curve) < len(losses)
    assert 1e-3 < proposal < 4e-3
    picture = tmp_path / "new" / "rate.png"
    find_rate.draw(curve, proposal, picture)
    assert picture.stat().st_size > 5000
    assert len(find_rate.smooth_losses([(0.1, 1.0), (0.2, float("nan")), (0.3, 1.0)])) == 1
    with pytest.raises(BadInput, match="does not fall"):
        find_rate.proposal(find_rate.smooth_losses([(rate, 1.0 + rate) for rate in rates]))


@pytest.fixture
def tiny(tmp_path) -> list[str]:
    make_shapes(tmp_path / "shapes", train_images=16, val_images=6, image_size=64)
    return small_settings(SCRIPTS[0], tmp_path / "shapes", ["--data.batch_size_per_device", 8])


@pytest.mark.slow
def test_a_sweep_of_trainings_is_killed_resumed_and_one_is_trained_again(tmp_path, tiny):
    words = ["${interpreter}", "${program}", *tiny, "${args}"]
    content = {
        "program": str(TRAIN),
        "command": words,
        "metric": {"name": "val/loss", "goal": "minimize"},
    }
    path = written(tmp_path, **content, parameters={"optim.lr": RATES | {"max": 1e-2}})
    out = tmp_path / "out"
    killed_in_third_trial(path, out, CPU)
    subprocess.run(command(path, out, "--trials", 4), env=os.environ | CPU, check=True)
    assert column(out, "trial") == list("0123")
    assert set(column(out, "state")) == {"COMPLETE"}
    config = out / "trial_00002" / "config.yaml"
    again = [
        sys.executable,
        TRAIN,
        "--config",
        config,
        "--run.output_dir",
        tmp_path,
        "--run.name",
        "again",
    ]
    subprocess.run(list(map(str, again)), env=os.environ | CPU, check=True)
    ours = checkpoint_tensors(tmp_path / "again" / "checkpoints" / "latest")
    theirs = checkpoint_tensors(out / "trial_00002" / "checkpoints" / "latest")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)
    assert all_rows(tmp_path / "again") == all_rows(out / "trial_00002")


@pytest.mark.slow
def test_a_rate_and_a_batch_size_are_found_and_can_be_used(tmp_path, tiny, monkeypatch, capsys):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    rate = tmp_path / "rate.yaml"
    assert find_rate.main([str(TRAIN), *tiny, "--out", str(rate), "--steps", "150"]) == 0
    found = yaml.safe_load(rate.read_text())["optim"]
    assert 1e-6 < found["lr"] < 0.1
    assert (tmp_path / "rate.png").stat().st_size > 5000
    batch = tmp_path / "batch.yaml"
    more = ["--memory-gib", "8", "--most", "32", "--out", str(batch)]
    assert find_batch_size.main([str(TRAIN), *tiny, *more]) == 0
    assert "32 images: more than the data has\n16 images: fits" in capsys.readouterr().out
    assert yaml.safe_load(batch.read_text())["data"]["batch_size_per_device"] == 16
    used = [sys.executable, str(TRAIN), *tiny, "--config", str(rate), "--print_config"]
    printed = subprocess.run(used, capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(printed)["optim"]["lr"] == found["lr"]
