"""Which detectors are candidates, and the commands that train them."""

import argparse
from pathlib import Path

import pytest
import torch
import yaml
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.tools.arguments import add_reading_flags
from toolkit.tools.doctor import training_command
from toolkit.tools.shapes import make_shapes
from toolkit.tools.sweeps import candidates
from toolkit.tools.sweeps.candidates import find_candidates


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, train_images=4, val_images=4, image_size=64)
    return folder


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    """The settings file itself in place of what a script makes of it, and a machine without a GPU."""

    def settings(script: Path, arguments):
        groups = yaml.safe_load(Path(arguments[1]).read_text())
        return {"model": {"architecture": script.stem} | groups["model"], "eval": groups["eval"]}

    monkeypatch.setattr(candidates, "resolved_settings", settings)
    monkeypatch.setattr(training_command, "default_device", lambda: torch.device("cpu"))


def found(folder: Path, *words: str, files=None, metric=None, more=()) -> dict:
    parser = argparse.ArgumentParser()
    add_reading_flags(parser)
    options = parser.parse_args([str(folder), *words])
    options.candidates = files
    options.metric = metric
    return find_candidates(options, more)


def setting(words: list[str], key: str) -> str:
    """The last value of a flag, which wins."""
    return [after for word, after in zip(words, words[1:], strict=False) if word == f"--{key}"][-1]


def test_without_a_gpu_the_small_detectors_are_compared(shapes):
    commands = found(shapes, more=["--data.workers=0"])
    assert list(commands) == ["faster_rcnn", "rt_detr_v2", "ssd", "train_yolov3"]
    for words in commands.values():
        assert (ROOT / words[0]).is_file()
        assert setting(words, "config").endswith("own_data_cpu.yaml")
        assert setting(words, "data.path") == str(shapes)
        assert "--data.workers=0" in words


def test_with_a_gpu_and_a_network_all_begin_with_trained_weights(shapes, monkeypatch):
    monkeypatch.setattr(training_command, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("toolkit.models.weights.pretrained.hub_answers", lambda: True)
    for words in found(shapes).values():
        assert setting(words, "config").endswith("own_data.yaml")


def test_given_files_are_compared_by_the_metric_asked_for(shapes, tmp_path):
    other = tmp_path / "mine.yaml"
    other.write_text("# python scripts/train_ssd.py\nmodel: {architecture: ssd}\neval: {metric_for_best: bbox_AP}\n")
    files = [ROOT / "configs" / "ssd" / "own_data_cpu.yaml", other]
    commands = found(shapes, files=files, metric="APs")
    assert list(commands) == ["ssd_own_data_cpu", "ssd_mine"]
    assert setting(commands["ssd_own_data_cpu"], "eval.metric_for_best") == "ema/bbox_APs"
    assert setting(commands["ssd_mine"], "eval.metric_for_best") == "bbox_APs"
    assert setting(commands["ssd_mine"], "config") == str(other)


def test_with_masks_one_is_left_without_weights_of_a_publisher(shapes):
    with pytest.raises(
        BadInput, match="(?s)there is one candidate that learns masks.*train_faster_rcnn.py.*model.masks"
    ):
        found(shapes, "--masks")


def test_what_has_no_candidates_is_said(shapes, tmp_path):
    unnamed = tmp_path / "unnamed.yaml"
    unnamed.write_text("model: {architecture: ssd}\n")
    with pytest.raises(BadInput, match="its comments name no training script"):
        found(shapes, files=[unnamed])
    with pytest.raises(BadInput, match="no such file"):
        found(shapes, files=[tmp_path / "missing.yaml"])
    with pytest.raises(BadInput, match="train_sgg.*needs relations|one candidate"):
        found(shapes, files=[ROOT / "configs" / "ssd" / "own_data_cpu.yaml"])
