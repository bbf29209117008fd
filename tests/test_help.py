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

SCRIPTS = [f"train_{name}" for name in ("detr", "faster_rcnn", "ssd", "yolov3", "sgg")]


@pytest.fixture
def help_of(capsys, monkeypatch):
    """A function that gives what a script prints for some arguments, called from the root of the checkout."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")

    def run(script: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(ROOT / "scripts")
        monkeypatch.setattr(sys, "argv", [f"scripts/{script}.py"])
        module = importlib.import_module(script)
        with pytest.raises(SystemExit) as stop:
            parse_config(module.Config, list(arguments), module.DEFAULT_CONFIG)
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
    assert len(lines) <= 60 and max(map(len, lines)) <= 100
    assert lines[0].startswith("Train ") and lines[-1] == "--help all shows every setting."
    commands = re.findall(rf"^  accelerate launch scripts/{script}.py ?(.*)$", text, re.MULTILINE)
    assert len(commands) == 3 and "DIR" in text and "--run.resume latest" in commands[2]
    assert (ROOT / re.search(r"--config (configs/\S+)", text)[1]).is_file()
    shown = settings_in(text)
    always = {"data.path", "run.epochs", "run.max_minutes", "optim.lr", "run.name", "run.resume", "run.precision"}
    assert always <= shown.keys() and len(shown) <= 20
    assert text.endswith(help_of(script, "-h")[-200:]), "the short flag is the same"


def test_every_first_setting_is_one_of_a_script(help_of):
    shown = {name for script in SCRIPTS for name in settings_in(help_of(script, "--help"))}
    assert {name for texts in help_module.FIRST_SETTINGS.values() for name in texts} == shown


def test_defaults_are_those_that_apply(help_of, tmp_path):
    """The defaults of the default configuration, of files given instead, and of another architecture."""
    bundled = settings_in(help_of("train_detr", "--help"))
    assert (bundled["model.backbone"], bundled["data.batch_size_per_device"]) == ("resnet10t", "8")
    other = help_of("train_detr", "--model.architecture", "conditional_detr", "--help")
    assert settings_in(other)["model.architecture"] == "conditional_detr"
    assert (settings_in(other)["model.backbone"], settings_in(other)["run.max_minutes"]) == ("resnet50", "4.75")
    assert "configs/detr/shapes.yaml, which applies unless --config is given" in other
    assert "model.backbone" not in settings_in(help_of("train_detr", "--model.architecture", "rf_detr", "--help"))
    file = tmp_path / "mine.yaml"
    file.write_text("optim: {lr: 0.5}\nrun: {tags: [a, 'b: c']}\n")
    given = help_of("train_detr", "--config", str(file), "--help")
    assert settings_in(given)["optim.lr"] == "0.5" and settings_in(given)["run.max_minutes"] == "null"
    assert f"The defaults are those of {file}." in " ".join(given.split()), "however long its path is"
    assert "default [a, 'b: c']\n" in help_of("train_detr", "--config", str(file), "--help", "run.tags")


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_has_every_setting_with_type_default_and_text(script, help_of):
    text = help_of(script, "--help", "all")
    assert max(map(len, text.splitlines())) <= 100
    config = importlib.import_module(script).Config()
    names = [f"{group.name}.{setting.name}" for group in fields(config)
             for setting in fields(getattr(config, group.name))]  # fmt: skip
    if script == "train_ssd":  # whose default configuration has another architecture than its dataclass
        names = [name for name in names if not name.startswith("model.")]
        names += [f"model.{setting.name}" for setting in fields(options_class("ssd"))]
    parts = dict(re.findall(r"^  --(\w+\.\w+)  (.+?)(?=^  --|^\w|\Z)", text, re.MULTILINE | re.DOTALL))
    assert sorted(parts) == sorted(names)
    for name, part in parts.items():
        assert re.search(r"; default \S|;\s+default\s+\S", part), name
        assert part.rstrip().endswith((".", ".)")), name
    assert all(flag in text for flag in ("--config FILE.yaml", "--print_config", "--help [all"))


def test_a_group_a_setting_and_a_beginning(help_of):
    of_group = help_of("train_detr", "--help", "data")
    assert "  --data.path  " in of_group and "--run.name  " not in of_group and of_group.endswith("every setting.\n")
    assert of_group == help_of("train_detr", "--help=data")
    flags = re.findall(r"^  --(\S+)", help_of("train_detr", "--help", "optim.lr"), re.MULTILINE)
    assert flags == ["optim.lr", "optim.lr_multipliers"]
    assert re.findall(r"^  --(\S+)", help_of("train_detr", "--help", "lr", "hub"), re.MULTILINE) == [
        "optim.lr", "hub.push", "hub.private",
    ]  # fmt: skip


def test_a_mistyped_topic_lists_the_groups(help_of, capsys):
    module = importlib.import_module("train_detr")
    with pytest.raises(BadInput) as error:
        parse_config(module.Config, ["--help", "dta"], module.DEFAULT_CONFIG)
    assert error.value.problems[0] == "--help dta: no such group or setting; did you mean data?"
    assert error.value.problems[1].startswith("The groups are run, data, model, optim, schedule, loss, eval, hub.")
    assert run_script(lambda config: None, module.Config, module.DEFAULT_CONFIG, ["--help", "dta"]) == 2
    assert "error: --help dta" in capsys.readouterr().err


def test_a_narrow_terminal_and_a_copy_elsewhere(help_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    module = importlib.import_module("train_faster_rcnn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    with pytest.raises(SystemExit):
        parse_config(module.Config, ["--help"], None)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "accelerate launch mine.py --data.path DIR\n" in text
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "train_faster_rcnn.py")])  # as the command `detect` does
    with pytest.raises(SystemExit):
        parse_config(module.Config, ["--help"], module.DEFAULT_CONFIG)
    assert "  detect train faster_rcnn --run.resume latest\n" in capsys.readouterr().out
