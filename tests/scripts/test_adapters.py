"""A run with low-rank adapters: resumed to the bit on two processes, and used by all that follows without `peft`."""

import sys

import pytest
import torch
from launching import ROOT, SCRIPTS, assert_same_run, checkpoint_tensors, kill, rows
from PIL import Image
from safetensors.torch import load_file

from toolkit.step.adapters import base_name
from toolkit.use.open import open_predictor

SSD = [script for script in SCRIPTS if script.name == "train_ssd"]
pytestmark = [pytest.mark.every_script, pytest.mark.parametrize("script", SSD, indirect=True)]


def test_a_run_with_adapters_resumes_to_the_bit_and_leaves_plain_weights(
    server, script, settings, tmp_path, monkeypatch
):
    common = ["--run.output_dir", tmp_path, "--model.backbone", "test_vit", "--data.multi_scale", "[]",
              "--run.epochs", 1, "--run.save_every", 2]  # fmt: skip
    adapted = ["--model.pretrained", tmp_path / "start" / "final", "--model.lora_rank", 2, "--optim.layer_decay", 0.8,
               "--data.batch_size_per_device", 2, "--run.resume", "latest"]  # fmt: skip
    start = server.run(script, settings(*common, "--run.name", "start")).ok().folder
    whole = server.run(script, settings(*common, *adapted, "--run.name", "whole"), 2).ok().folder
    again = settings(*common, *adapted, "--run.name", "killed")
    assert server.run(script, again, 2, [kill(4)]).code == -9
    assert_same_run(server.run(script, again, 2).ok().folder, whole)
    refused = server.run(script, settings(*common, *adapted, "--run.name", "whole", "--model.lora_alpha", 4))
    assert refused.code == 2 and "model.lora_alpha 16.0 -> 4.0: refused" in refused.text

    latest, weights = whole / "checkpoints" / "latest", "final/model.safetensors"
    before, after = load_file(start / weights), checkpoint_tensors(latest)
    inside = {name: base_name(name.removeprefix("model/")) for name in after if name.startswith("model/backbone.vit.")}
    assert all(after[name].equal(before[plain]) for name, plain in inside.items() if ".lora_" not in name)
    assert any(after[name].any() for name in inside if ".lora_B." in name), "they learn"

    evaluated = server.run(ROOT / "scripts" / "evaluate.py", [latest, "--weights", "ema"]).ok()
    assert evaluated.numbers["bbox_AP"] == pytest.approx(rows(whole)[-1]["val/ema/bbox_AP"], abs=1e-3)
    ended = server.run(script, settings(*common, "--model.pretrained", whole, "--run.name", "next")).ok().folder
    monkeypatch.setitem(sys.modules, "peft", None)
    image = Image.new("RGB", (64, 64))
    used = [open_predictor(source)(image, score_threshold=0.0)["scores"] for source in (whole, whole / "final")]
    assert len(used[0]) and torch.equal(*used)
    assert load_file(whole / weights).keys() == load_file(ended / weights).keys() == before.keys()
