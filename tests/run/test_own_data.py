"""Settings of a training on data of one's own: the file that applies, what flags change, what recipes need."""

import importlib
import shutil
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from dirty_sets import check_set, sets_in
from places import ROOT

from scripts import train_detr
from scripts.train_detr import DEFAULT_CONFIG, Config
from toolkit.models import build_detector
from toolkit.run.command_line import parse_config, resolve, run_script, sources_of
from toolkit.run.synonyms import ELSEWHERE, SYNONYMS

DETECTORS = ("detr", "faster_rcnn", "ssd", "yolov3")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def resolved(words: str, default_config=DEFAULT_CONFIG):
    """Return the settings, and the texts that name their sources."""
    config, stack = resolve(Config, words.split(), default_config)
    return config, sources_of(stack)


@pytest.mark.parametrize("one", sets_in("own_data"))
def test_settings(one, tmp_path):
    check_set(one, tmp_path)


# ---- which file applies ----------------------------------------------------------------------------------------------


def test_on_a_gpu_the_recipe_starts_from_trained_weights(monkeypatch):
    monkeypatch.setattr("toolkit.base.distributed.default_device", partial(torch.device, "cuda"))
    config, sources = resolved("--data.path other")
    large = str(DEFAULT_CONFIG.with_name("own_data.yaml"))
    expected = parse_config(Config, ["--config", large, "--data.path", "other"])
    assert config == expected
    assert config.model.given == expected.model.given
    assert config.model.pretrained
    assert "/own_data.yaml (your own data, a GPU; --config " in sources[0]
    assert "own_data_cpu.yaml" in sources[0]


def test_a_copied_script_says_that_its_settings_are_of_the_bundled_shapes(tmp_path):
    copy = shutil.copy(DEFAULT_CONFIG, tmp_path / "mine.yaml")
    config, sources = resolved("--data.path other", copy)
    assert sources[0].startswith(f"{copy} (made for the bundled shapes, not for your data; --config")
    assert config.data.format == "auto"


def test_the_first_line_names_the_settings_and_errors_are_printed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.run.command_line.find_launch", lambda: None)
    words = [
        "--data.path",
        "nothere",
        "--model.pretrained_backbone",
        "none.pth",
        "--run.threads",
        "1",
    ]
    assert run_script(train_detr.main, Config, DEFAULT_CONFIG, words) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("settings: ")
    assert "own_data_cpu.yaml" in printed.out.splitlines()[0]
    for told in ("nothere: no such file or folder", "pretrained_backbone: the file"):
        assert (printed.out + printed.err).count(told) == 1
        assert told in printed.err


def test_every_synonym_leads_to_one_setting_that_exists():
    config = Config()
    settings = set()
    for group in fields(config):
        settings |= {f"{group.name}.{key.name}" for key in fields(getattr(config, group.name))}
    assert set(SYNONYMS) <= settings
    words = [word for words in SYNONYMS.values() for word in words.split()]
    assert len(words) == len(set(words))
    assert not set(words) & set(ELSEWHERE)


# ---- recipes ---------------------------------------------------------------------------------------------------------


def recipe(name: str, file: str):
    config = importlib.import_module(f"scripts.train_{name}").Config
    return parse_config(config, ["--config", str(ROOT / "configs" / name / f"{file}.yaml")])


@pytest.mark.parametrize("name", DETECTORS)
def test_the_recipe_without_gpu_and_network_needs_neither(name):
    config = recipe(name, "own_data_cpu")
    assert config.data.augment is None
    assert not config.model.pretrained
    assert not config.model.pretrained_backbone
    assert config.data.format == "auto"
    assert config.data.image_dir is None
    build_detector(
        **config.model.given | {"architecture": config.model.architecture},
        class_names=["a", "b"],
    )


@pytest.mark.parametrize("name", DETECTORS)
def test_that_recipe_learns_as_the_one_that_was_measured_on_photographs(name):
    """A line of the optimizer that one of them lacks fails here: without a name, Faster R-CNN's default was SGD."""
    own = recipe(name, "own_data_cpu")
    measured = recipe(name, "bccd")
    faster = 2 if name == "faster_rcnn" else 1  # its rate was chosen for five minutes, on held-out training pictures
    assert own.optim == replace(measured.optim, lr=faster * measured.optim.lr)
    assert own.schedule == measured.schedule
