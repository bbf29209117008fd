"""What ended a training, in words and as the flags that go on."""

from pathlib import Path

import pytest

from toolkit.evaluation.report.facts import command_that_goes_on, flags_that_go_on
from toolkit.runs.settings import EvalConfig, RunConfig, ScheduleConfig
from toolkit.runs.status import ENDINGS, in_words

CONFIG = {"run": {"epochs": 100, "max_steps": None, "max_minutes": 4.75}, "eval": {"early_stopping_patience": 3}}
NEW = "--run.resume latest --run.resume_schedule new"


def test_every_ending_is_a_setting():
    groups = {"run": RunConfig, "eval": EvalConfig, "schedule": ScheduleConfig}
    for setting in ENDINGS:
        group, _, key = setting.partition(".")
        assert hasattr(groups[group](), key), setting
    assert in_words([]) == ""
    assert in_words(["run.max_steps", "schedule.max_decays"]) == (
        "training ended by run.max_steps (all steps are made) and schedule.max_decays (the learning rate has fallen so "
        "many times)")  # fmt: skip


@pytest.mark.parametrize(("ended_by", "run", "step", "epochs", "flags"), [
    (["run.max_minutes"], {}, 1279, 20, f"{NEW} --run.max_minutes 9.5"),
    (["run.max_minutes"], {}, 1279, 71, f"{NEW} --run.epochs 142 --run.max_minutes 9.5"),  # its epochs were in the way
    (["run.epochs"], {"max_minutes": None}, 1800, 100, f"{NEW} --run.epochs 200"),
    (["run.max_steps"], {"max_steps": 40, "max_minutes": None}, 40, 2, f"{NEW} --run.max_steps 80"),
    ([], {"max_steps": 90, "max_minutes": None}, 50, 60, f"{NEW} --run.epochs 120 --run.max_steps 100"),  # not known
    (["eval.early_stopping_patience"], {}, 50, 60, "--run.resume latest --eval.early_stopping_patience 6"),
    (["schedule.max_decays"], {"max_minutes": None}, 50, 10, NEW),  # the rates begin anew
])  # fmt: skip
def test_flags_train_for_as_long_again(ended_by, run, step, epochs, flags):
    assert " ".join(flags_that_go_on(ended_by, CONFIG | {"run": CONFIG["run"] | run}, step, epochs)) == flags


def test_a_notebook_is_told_the_flags_alone():
    flags = ["--run.resume", "latest"]
    for began in ([], ["/somewhere/ipykernel_launcher.py", "-f", "x.json"], ["-c"]):
        assert command_that_goes_on(flags, began, Path("runs/a/config.yaml")) == "--run.resume latest"
    command = command_that_goes_on(flags, ["my scripts/train_x.py", "--seed"], Path("runs/a/config_2.yaml"))
    assert command == "accelerate launch 'my scripts/train_x.py' --config runs/a/config_2.yaml --run.resume latest"
