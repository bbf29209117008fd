"""`--help` of the training scripts: the first screen, every setting, a group, single settings."""

import importlib
import re
import sys
from dataclasses import fields

import pytest
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.models import options_class
from toolkit.run import help as help_module
from toolkit.run.command_line import parse_config, run_script

SCRIPTS = ["train_detr", "train_faster_rcnn", "train_ssd", "train_yolov3", "train_sgg"]
FIRST = {"data.path", "run.epochs", "run.max_minutes", "optim.lr", "run.name", "run.resume", "run.precision"}


@pytest.fixture
def help_of(capsys, monkeypatch):
    """A function that gives what a script prints for some arguments, called from the root of the checkout."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(ROOT / "scripts")

    def run(script: str, *arguments: str, called: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [called or f"scripts/{script}.py"])
        module = importlib.import_module(script)
        with pytest.raises(SystemExit) as stop:
            parse_config(module.Config, list(arguments), None if called == "mine.py" else module.DEFAULT_CONFIG)
        assert stop.value.code == 0
        return capsys.readouterr().out

    return run


def settings_in(text: str) -> dict[str, str]:
    """The default of each setting on the first screen."""
    return dict(re.findall(r"^  --(\w+\.\w+) +(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_first_screen(script, help_of):
    text = help_of(script, "--help")
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("Train ")
    assert lines[-1] == "--help all shows every setting."
    commands = re.findall(rf"^  python scripts/{script}.py ?(.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    assert "--run.resume latest" in commands[2]
    assert (ROOT / re.search(r"--config (configs/\S+)", text)[1]).is_file()
    shown = settings_in(text)
    assert FIRST <= shown.keys()
    assert len(shown) <= 20
    assert text == help_of(script, "-h"), "the short flag is the same"


def test_every_first_setting_is_one_of_a_script(help_of):
    shown = {name for script in SCRIPTS for name in settings_in(help_of(script, "--help"))}
    assert {name for texts in help_module.FIRST_SETTINGS.values() for name in texts} == shown


def test_defaults_are_those_of_the_default_configuration(help_of):
    bundled = settings_in(help_of("train_detr", "--help"))
    assert bundled["model.backbone"] == "resnet10t"
    assert bundled["data.batch_size_per_device"] == "8"


def test_defaults_are_those_of_another_architecture(help_of):
    text = help_of("train_detr", "--model.architecture", "conditional_detr", "--help")
    shown = settings_in(text)
    assert shown["model.architecture"] == "conditional_detr"
    assert shown["model.backbone"] == "resnet50"
    assert shown["run.max_minutes"] == "4.75"
    assert "configs/detr/shapes.yaml, which applies unless --config is given" in text
    assert "model.backbone" not in settings_in(help_of("train_detr", "--model.architecture", "rf_detr", "--help"))


def test_defaults_are_those_of_a_given_file(help_of, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("optim: {lr: 0.5}\nrun: {tags: [a, 'b: c']}\n")
    text = help_of("train_detr", "--config", str(file), "--help")
    assert settings_in(text)["optim.lr"] == "0.5"
    assert settings_in(text)["run.max_minutes"] == "null"
    assert f"The defaults are those of {file}." in " ".join(text.split()), "however long its path is"
    assert "default [a, 'b: c']\n" in help_of("train_detr", "--config", str(file), "--help", "run.tags")


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_has_every_setting_with_type_default_and_text(script, help_of):
    text = help_of(script, "--help", "all")
    assert max(map(len, text.splitlines())) <= 100
    config = importlib.import_module(script).Config()
    groups = {group.name: type(getattr(config, group.name)) for group in fields(config)}
    if script == "train_ssd":  # whose default configuration has another architecture than its dataclass
        groups["model"] = options_class("ssd")
    names = [f"{group}.{setting.name}" for group, kind in groups.items() for setting in fields(kind)]
    parts = dict(re.findall(r"^  --(\w+\.\w+)  (.+?)(?=^  --|^\w|\Z)", text, re.MULTILINE | re.DOTALL))
    assert sorted(parts) == sorted(names)
    for name, part in parts.items():
        assert re.search(r"; default \S|;\s+default\s+\S", part), name
        assert part.rstrip().endswith((".", ".)")), name
    for flag in ("--config FILE.yaml", "--print_config", "--help [all"):
        assert flag in text


def test_a_group_a_setting_and_a_beginning(help_of):
    of_group = help_of("train_detr", "--help", "data")
    assert "  --data.path  " in of_group
    assert "  --run.name  " not in of_group
    assert of_group.endswith("every setting.\n")
    assert of_group == help_of("train_detr", "--help=data")
    topics = {
        ("optim.lr",): ["optim.lr", "optim.lr_multipliers"],
        ("lr", "hub"): ["optim.lr", "hub.push", "hub.private"],
    }
    for words, names in topics.items():
        text = help_of("train_detr", "--help", *words)
        assert re.findall(r"^  --(\S+)", text, re.MULTILINE) == names


def test_a_mistyped_topic_lists_the_groups(help_of, capsys):
    module = importlib.import_module("train_detr")
    with pytest.raises(BadInput) as error:
        parse_config(module.Config, ["--help", "dta"], module.DEFAULT_CONFIG)
    assert error.value.problems[0] == "--help dta: no such group or setting; did you mean data?"
    assert error.value.problems[1].startswith("The groups are run, data, model, optim, schedule, loss, eval, hub.")
    assert run_script(lambda config: None, module.Config, module.DEFAULT_CONFIG, ["--help", "dta"]) == 2
    assert "error: --help dta" in capsys.readouterr().err


def test_examples_are_of_the_program_that_was_called(help_of, tmp_path, monkeypatch):
    """A copy of a script in a narrow terminal, and a script by its path, as the command `detect` does."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    text = help_of("train_faster_rcnn", "--help", called="mine.py")
    assert max(map(len, text.splitlines())) <= 80
    assert "  python mine.py --data.path DIR\n" in text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert "  accelerate launch mine.py --data.path DIR\n" in help_of("train_faster_rcnn", "--help", called="mine.py")
    text = help_of("train_faster_rcnn", "--help", called=str(ROOT / "scripts" / "train_faster_rcnn.py"))
    assert "  detect train faster_rcnn --run.resume latest\n" in text
