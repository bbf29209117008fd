"""The command that check_data.py prints: `assets/dirty_sets/training_commands.txt`."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dirty_sets import check_set, sets_in

from toolkit.tools.doctor import training_command
from toolkit.tools.doctor.inspection import Inspection
from toolkit.tools.shapes import make_shapes


@pytest.mark.parametrize("one", sets_in("training_commands"))
def test_commands(one, tmp_path):
    check_set(one, tmp_path)


@pytest.mark.parametrize(
    ("device", "offline", "script", "recipe", "reason"),
    [
        (
            "cuda",
            False,
            "train_detr",
            "detr/own_data.yaml",
            "trained weights are downloaded once",
        ),
        (
            "cuda",
            True,
            "train_faster_rcnn",
            "faster_rcnn/own_data_cpu.yaml",
            "no network for trained weights",
        ),
        ("cpu", False, "train_faster_rcnn", "faster_rcnn/own_data_cpu.yaml", "no GPU"),
    ],
)
def test_the_recipe_suits_the_machine(monkeypatch, device, offline, script, recipe, reason):
    monkeypatch.setattr(training_command, "default_device", lambda: torch.device(device))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("toolkit.models.weights.pretrained.hub_answers", lambda: True)
    program, config, why = training_command.recipe_for(None)
    assert Path(program).stem == script
    assert config.endswith(recipe)
    assert why.startswith(reason)


def test_the_size_of_a_recipe_is_that_of_its_evaluation():
    folder = training_command.ROOT / "configs" / "faster_rcnn"
    assert training_command.size_of_recipe(folder / "own_data.yaml") == {"shortest_edge": 640, "longest_edge": 1066}
    assert training_command.size_of_recipe(folder / "own_data_cpu.yaml") == {"height": 256, "width": 256}


def test_a_size_that_is_given_replaces_the_scales_of_a_recipe(monkeypatch):
    monkeypatch.setattr(training_command, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("toolkit.models.weights.pretrained.hub_answers", lambda: True)
    sources = [training_command.Source("mine.json")]
    plain = training_command.command_for(sources, Inspection(), {}, "train_faster_rcnn")
    assert "faster_rcnn/own_data.yaml" in plain
    assert "--data.scales" not in plain
    sized = training_command.command_for(sources, Inspection(), {"image_size": 320}, "train_faster_rcnn")
    assert "--data.image_size 320 --data.scales '[]'" in sized


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("coco/annotations/instances_train2017.json", "coco"),
        ("cups/train/_annotations.coco.json", "cups"),
        ("birds v2/labels/Train_1.csv", "birds_v2"),
        ("vögel/train", "vögel"),
        ("coins/data/annotations.xml", "coins"),
        ("my_train.json", "my_train"),
    ],
)
def test_a_run_is_named_after_its_data(monkeypatch, given, name):
    monkeypatch.setattr(training_command, "default_device", lambda: torch.device("cpu"))
    command = training_command.command_for([training_command.Source(given)], Inspection(), {}, "train_ssd")
    assert shlex.split(command.splitlines()[-1])[-1] == name


def test_a_run_on_the_bundled_shapes_is_called_so(monkeypatch):
    monkeypatch.setattr(training_command, "default_device", lambda: torch.device("cpu"))
    sources = [training_command.Source("train")]
    command = training_command.command_for(sources, Inspection(), {"format": "shapes"}, "train_ssd")
    assert command.endswith("--run.name shapes")


def test_a_recipe_for_scene_graphs_downloads_nothing_without_a_gpu(monkeypatch):
    monkeypatch.setattr(training_command, "default_device", lambda: torch.device("cpu"))
    _, config, _ = training_command.recipe_for("train_sgg")
    assert config.endswith("sgg/own_data_cpu.yaml")


@pytest.mark.slow
def test_the_printed_command_trains(tmp_path):
    make_shapes(tmp_path / "my data", 12, 4, 64)
    cache = {
        "DETECTION_TOOLKIT_CACHE": str(tmp_path / "cache"),
        "ACCELERATE_USE_CPU": "true",
    }
    environment = os.environ | cache
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = {
        "env": environment,
        "cwd": tmp_path,
        "capture_output": True,
        "text": True,
        "check": True,
    }
    script = training_command.ROOT / "scripts" / "check_data.py"
    checked = subprocess.run([sys.executable, script, "my data", "--image-size", "96"], **options)
    command = checked.stdout.strip().splitlines()[-1]
    subprocess.run(f"{command} --run.max_steps 2", shell=True, **options)
    status = json.loads(next((tmp_path / "runs").glob("*/status.json")).read_text())
    assert (status["state"], status["step"]) == ("done", 2)
