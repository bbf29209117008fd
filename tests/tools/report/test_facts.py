"""What ended a run, how long it was, and the command that goes on."""

import json
from pathlib import Path

import pytest

from toolkit.run.settings import EvalConfig, RunConfig, ScheduleConfig
from toolkit.run.status import ENDINGS, describe_ending
from toolkit.tools.report.facts import command_that_goes_on, epochs_made, flags_that_go_on, run_facts

NEW = "--run.resume latest --run.resume_schedule new"
PATIENCE = "eval.early_stopping_patience"


def test_every_ending_is_a_setting_and_described():
    groups = {"run": RunConfig, "eval": EvalConfig, "schedule": ScheduleConfig}
    for setting in ENDINGS:
        group, _, key = setting.partition(".")
        assert hasattr(groups[group](), key), setting
    assert describe_ending([]) == ""
    said = describe_ending(["run.max_steps", "schedule.max_decays"])
    assert said == (
        "training ended by run.max_steps (all steps are made) and schedule.max_decays (the learning rate has fallen "
        "that many times)"
    )


@pytest.mark.parametrize(
    ("ended_by", "run", "step", "epochs", "flags"),
    [
        ("run.max_minutes", {}, 1279, 20, f"{NEW} --run.max_minutes 9.5"),
        # Its epochs were in the way.
        ("run.max_minutes", {}, 1279, 71, f"{NEW} --run.epochs 142 --run.max_minutes 9.5"),
        ("run.epochs", {"max_minutes": None}, 1800, 100, f"{NEW} --run.epochs 200"),
        (
            "run.max_steps",
            {"max_steps": 40, "max_minutes": None},
            40,
            2,
            f"{NEW} --run.max_steps 80",
        ),
        (
            "",
            {"max_steps": 90, "max_minutes": None},
            50,
            60,
            f"{NEW} --run.epochs 120 --run.max_steps 100",
        ),
        (PATIENCE, {}, 50, 60, f"--run.resume latest --{PATIENCE} 6"),
        ("schedule.max_decays", {"max_minutes": None}, 50, 10, NEW),  # the rates begin anew
    ],
)
def test_flags_train_for_as_long_again(ended_by, run, step, epochs, flags):
    settings = {"epochs": 100, "max_steps": None, "max_minutes": 4.75} | run
    config = {"run": settings, "eval": {"early_stopping_patience": 3}}
    found = flags_that_go_on([ended_by] if ended_by else [], config, step, epochs)
    assert " ".join(found) == flags


@pytest.mark.parametrize(
    ("began", "command"),
    [
        # A notebook is told the flags alone.
        ([], "--run.resume latest"),
        (["/somewhere/ipykernel_launcher.py", "-f", "x.json"], "--run.resume latest"),
        (["-c"], "--run.resume latest"),
        (
            ["my scripts/train_x.py", "--seed"],
            "accelerate launch 'my scripts/train_x.py' --config runs/a/config.yaml --run.resume latest",
        ),
    ],
)
def test_the_command_is_that_which_began_the_run(began, command):
    flags = ["--run.resume", "latest"]
    assert command_that_goes_on(flags, began, Path("runs/a/config.yaml")) == command


def test_a_command_names_files_from_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = command_that_goes_on([], [f"{tmp_path}/scripts/train_x.py"], tmp_path / "runs" / "config.yaml")
    assert command == "accelerate launch scripts/train_x.py --config runs/config.yaml"


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({"state": "done", "ended_by": ["run.epochs"], "reason": "x"}, "Finished after 4 steps (run.epochs)."),
        ({"state": "failed", "reason": "no disk."}, "Failed after 4 steps: no disk."),
        ({"state": "preempted"}, "Interrupted after 4 steps."),
        ({}, ""),
    ],
)
def test_a_sentence_says_how_a_run_stands(tmp_path, status, sentence):
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "epoch": 0}\n')
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert run_facts(tmp_path).state == sentence


@pytest.mark.parametrize("mode", ["predcls", "sgdet"])
def test_given_boxes_are_not_measured(tmp_path, mode):
    row = {"step": 4, "epoch": 0, "val/R@20": 0.5, "val/bbox_AP": 1.0, "val/ema/AP/cat": 1.0}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    (tmp_path / "config.yaml").write_text(f"run: {{}}\nmodel: {{mode: {mode}}}\n")
    (found,) = run_facts(tmp_path).rows
    assert found["val/R@20"] == 0.5
    assert ("val/bbox_AP" in found) == ("val/ema/AP/cat" in found) == (mode == "sgdet")


@pytest.mark.parametrize(
    ("step", "steps_per_epoch", "epochs"),
    [(4, 10, 0.4), (4, 0, 1), (10, 10, 1), (25, 0, 2.5)],
)
def test_epochs_are_counted_in_steps(step, steps_per_epoch, epochs):
    rows = [{"step": each, "epoch": (each - 1) // 10} for each in range(1, step + 1)]
    assert epochs_made(rows, steps_per_epoch) == pytest.approx(epochs)


def test_an_epoch_has_the_steps_that_images_processes_and_batches_give(tmp_path):
    rows = [{"step": step, "epoch": 0, "train/loss": 1.0} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = "run: {epochs: 9}\nmodel: {}\ndata: {batch_size_per_device: 2}\noptim: {accumulation_steps: 1}\n"
    (tmp_path / "config.yaml").write_text(settings)
    environment = {"processes": 2, "data": {"train": {"images": 40}}}
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    assert run_facts(tmp_path).epochs_made == pytest.approx(0.4)
