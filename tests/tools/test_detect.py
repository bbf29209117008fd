"""The command `detect` finds scripts and files, copies a script, and explains itself."""

import importlib
from dataclasses import asdict

import pytest
from places import ROOT

from toolkit.run.command_line import parse_config
from toolkit.tools import detect

SCRIPT = ROOT / "scripts" / "train_detr.py"


def test_help_lists_every_script_with_what_it_does(capsys):
    assert detect.main([]) == 0
    text = capsys.readouterr().out
    for path in ROOT.glob("scripts/*.py"):
        assert path.stem == "benchmark" or detect.first_line(path) in text
    for command in ("train detr ", "check ", "predict "):
        assert f"detect {command}" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [("--version", f"detection-toolkit {detect.version()}"), ("where scripts/train_detr.py", str(SCRIPT))],
)
def test_words_are_answered(words, expected, capsys):
    assert detect.main(words.split()) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trian", "did you mean train?"),
        ("train detrr", "did you mean detr?"),
        ("train", "needs one of detr, faster_rcnn"),
        ("where configs/detr/bcd.yaml", "mean configs/detr/bccd.yaml?"),
        ("copy train_dter mine.py", "did you mean train_detr?"),
        ("copy train_detr", "the path of the copy, such as mine.py"),
        ("copy train_detr mine.txt", "a name that ends in .py"),
        ("copy train_detr json.py", "would hide the module json"),
        ("copy train_detr nowhere/mine.py", "nowhere is not a folder"),
        (f"copy train_detr {SCRIPT}", "exists already"),
    ],
)
def test_words_that_lead_nowhere_are_refused(words, expected, capsys):
    assert detect.main(words.split()) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "copy", "where"])
def test_every_command_explains_itself(name, capsys):
    assert detect.main([name, "--help"]) == detect.main([name, "-h"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count(f"usage: detect {name} ") == 2
    assert not shown.err


@pytest.mark.parametrize("name", detect.detectors())
def test_a_copy_has_the_settings_of_its_script_and_a_run_of_its_own(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert detect.main(["copy", f"train_{name}", f"my_{name}.py"]) == 0
    copy = importlib.import_module(f"my_{name}")
    original = importlib.import_module(f"scripts.train_{name}")
    config, expected = (parse_config(script.Config, [], script.DEFAULT_CONFIG) for script in (copy, original))
    assert config.run.name == f"my_{name}"
    assert copy.DEFAULT_CONFIG == tmp_path / f"my_{name}.yaml"
    config.run.name = expected.run.name
    assert asdict(config) == asdict(expected)
    assert f"accelerate launch my_{name}.py" in copy.__doc__
    assert "scripts/train" not in copy.__doc__
