"""A run with low-rank adapters: resumed to the bit on two processes, and used by all that follows without `peft`."""

import sys

import pytest
import torch
import yaml
from launching import SCRIPTS, assert_same_run, checkpoint_tensors, kill
from PIL import Image
from safetensors.torch import load_file

from toolkit.data.shapes import CLASSES
from toolkit.data.table import Category
from toolkit.models import build_detector
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.step.adapters import base_name
from toolkit.use.open import open_predictor

SSD = [script for script in SCRIPTS if script.name == "train_ssd"]
pytestmark = [pytest.mark.every_script, pytest.mark.parametrize("script", SSD, indirect=True)]


def test_a_run_with_adapters_resumes_to_the_bit_and_leaves_plain_weights(
    server, script, settings, tmp_path, monkeypatch
):
    model = {**yaml.safe_load(script.config.read_text())["model"], "backbone": "test_vit"}
    start = build_detector("ssdlite", class_names=CLASSES, **model)
    start.save_final(tmp_path / "start", [Category(*pair) for pair in enumerate(CLASSES, 1)])
    args = settings("--run.output_dir", tmp_path, "--model.backbone", "test_vit", "--data.multi_scale", "[]",
                    "--model.pretrained", tmp_path / "start", "--model.lora_rank", 2, "--optim.layer_decay", 0.8,
                    "--optim.checkpointing", "true", "--data.batch_size_per_device", 2, "--run.epochs", 1,
                    "--run.save_every", 2, "--run.resume", "latest")  # fmt: skip
    whole = server.run(script, [*args, "--run.name", "whole"], 2).ok().folder
    assert server.run(script, [*args, "--run.name", "killed"], 2, [kill(4)]).code == -9
    assert_same_run(server.run(script, [*args, "--run.name", "killed"], 2).ok().folder, whole)

    before, after = start.state_dict(), checkpoint_tensors(whole / "checkpoints" / "latest")
    inside = {name: base_name(name.removeprefix("model/")) for name in after if name.startswith("model/backbone.vit.")}
    assert all(after[name].equal(before[plain]) for name, plain in inside.items() if ".lora_" not in name)
    assert any(after[name].any() for name in inside if ".lora_B." in name), "they learn"

    monkeypatch.setitem(sys.modules, "peft", None)
    final, image = load_file(whole / "final" / "model.safetensors"), Image.new("RGB", (64, 64))
    assert final.keys() == before.keys() == open_pretrained(str(whole)).tensors.keys()
    used = [open_predictor(source)(image, score_threshold=0.0)["scores"] for source in (whole, whole / "final")]
    assert len(used[0]) and torch.equal(*used)
