"""Precision and compilation: decided once, by the settings, the launcher or `run.precision: auto`, written down, and
kept by whoever goes on.
"""

import json

import pytest
import timm
import torch
import yaml
from launching import ROOT, SCRIPTS, checkpoint_tensors, rows, training_rows
from places import SMALL_CONFIGS

from toolkit.run.launcher import resolve_execution
from toolkit.step.execution import (
    cpu_computes_in_bf16,
    has_mobile_blocks,
    precision_of_device,
    precision_of_gpu,
)

PUBLISHED = SMALL_CONFIGS / "detr_published.yaml"  # which torch.compile captures in less time

SHOWN = {"no": "float32", "bf16": "bf16"}  # what the console calls a precision


def losses(run) -> list[dict]:
    return [{key: row[key] for key in row if key.startswith("train/loss")} for row in training_rows(run.folder)]


def test_the_choice_is_a_rule_recorded_and_kept(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.resume", "latest", "--run.eval_every", 0)
    first = server.run(script, [*args, "--run.precision", "auto", "--run.name", "auto"]).ok()
    chosen = "bf16" if cpu_computes_in_bf16() else "no"
    has = "has" if cpu_computes_in_bf16() else "has no"
    assert f"precision: {SHOWN[chosen]} (run.precision auto: this CPU {has} instructions for bfloat16)" in first.text
    config = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert config["run"]["precision"] == chosen

    told = server.run(script, [*args, "--run.precision", chosen, "--run.name", "told"]).ok()
    assert losses(told) == losses(first)

    # As if it had begun on a machine that chose otherwise.
    config["run"]["precision"] = other = {"no": "bf16", "bf16": "no"}[chosen]
    (first.folder / "config.yaml").write_text(yaml.safe_dump(config))
    more = ["--run.precision", "auto", "--run.name", "auto", "--run.max_steps", 3, "--run.resume_schedule", "new"]
    resumed = server.run(script, [*args, *map(str, more)]).ok()
    assert f"precision: {SHOWN[other]} (the run so far)" in resumed.text and "run.precision auto" not in resumed.text
    assert yaml.safe_load((first.folder / "config_2.yaml").read_text())["run"]["precision"] == other


@pytest.mark.parametrize(("backbone", "is_mobile"), [
    ("mobilenetv3_small_050", True), ("mobilenetv4_conv_small_035", True), ("tf_efficientnet_lite0", True),
    ("ghostnet_050", True), ("test_byobnet", False), ("resnet10t", False), ("hgnetv2_b0", False),
    ("convnext_atto", False),
])  # fmt: skip
def test_the_kind_of_backbone_decides_on_a_cpu(backbone, is_mobile, monkeypatch):
    detector = timm.create_model(backbone)
    assert has_mobile_blocks(detector) == is_mobile
    for capable in (True, False):
        monkeypatch.setattr("toolkit.step.execution.cpu_computes_in_bf16", lambda capable=capable: capable)
        precision, tf32, _ = precision_of_device(torch.device("cpu"), detector)
        assert (precision, tf32) == ("bf16" if capable and not is_mobile else "no", None)


@pytest.mark.parametrize(("variable", "value", "computes"), [
    ("", "", True), ("ATEN_CPU_CAPABILITY", "avx2", False), ("ONEDNN_MAX_CPU_ISA", "AVX2", False),
    ("DNNL_MAX_CPU_ISA", "avx512_core", False), ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", True),
    ("ONEDNN_MAX_CPU_ISA", "avx10_1_512", True),
])  # fmt: skip
@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16", "avx512_vnni"])
def test_what_the_environment_takes_from_a_cpu_is_not_there(variable, value, computes, instructions, monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    level = "AVX2" if variable == "ATEN_CPU_CAPABILITY" else "AVX512"  # which torch reads once, when it starts
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True})
    assert cpu_computes_in_bf16() == (computes and instructions != "avx512_vnni")


@pytest.mark.every_script("slow")
def test_rows_of_a_training_in_bfloat16_are_those_of_evaluate_py(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.precision", "bf16")
    trained = server.run(script, args).ok()
    row = next(row for row in reversed(rows(trained.folder)) if "val/loss" in row)
    best = trained.folder / "checkpoints" / "latest"
    numbers = server.run(ROOT / "scripts" / "evaluate.py", [best, "--weights", "model"]).ok().numbers
    known = {name: value for name, value in numbers.items() if f"val/{name}" in row}
    assert {"loss"} < known.keys()
    assert known == {name: row[f"val/{name}"] for name in known}


NOTHING = dict.fromkeys(("precision", "tf32", "compile"))


def settled(auto=None, launched=NOTHING, began=NOTHING, **given) -> tuple:
    """auto: not called where somebody else has decided."""
    choice = resolve_execution(NOTHING | given, NOTHING | launched, NOTHING | began, auto)
    return choice.precision, choice.precision_by, choice.tf32, choice.compile, choice.compile_by


def test_the_first_that_has_a_word_decides():
    assert settled() == ("no", "default", None, False, "default")
    began = {"precision": "bf16", "tf32": True, "compile": "eager"}
    launched = {"precision": "fp16", "compile": "inductor"}
    for given in ({}, {"precision": "auto"}):
        assert settled(**given, began=began) == ("bf16", "the run so far", True, "eager", "the run so far")
        asked = ("fp16", "accelerate launch", None, "inductor", "accelerate launch")
        assert settled(**given, launched=launched, began=began) == asked
    assert settled(precision="no", compile=True, launched=launched, began=began) == (
        "no", "run.precision, not accelerate launch, which says fp16", None, True,
        "optim.compile, not accelerate launch, which says inductor")  # fmt: skip
    assert settled(precision="no", compile=False, began=began)[:4] == ("no", "run.precision", None, False)


def test_auto_is_what_a_gpu_has():
    """On a GPU by the capability alone."""
    assert precision_of_gpu((8, 0), None) == precision_of_gpu((12, 0), None) == ("bf16", True)
    assert precision_of_gpu((7, 5), None) == ("no", None)
    assert precision_of_gpu((9, 4), "6.4") == ("bf16", None)

    def a100():
        return *precision_of_gpu((8, 0), None), "this GPU"

    assert settled(a100, precision="auto")[:3] == ("bf16", "run.precision auto: this GPU", True)
    assert settled(a100, precision="auto", tf32=False)[2] is False


def test_recipes_of_papers_say_their_precision():
    recipes = sorted((ROOT / "configs").glob("*/*coco*.yaml"))
    runs = {path.name: yaml.safe_load(path.read_text())["run"] for path in recipes}
    assert len(runs) > 10 and {run.get("precision") for run in runs.values()} == {"no", "bf16", "fp16"}
    assert {run.get("tf32") for run in runs.values()} == {True}


@pytest.mark.slow
def test_what_the_launcher_decided_is_recorded_and_kept(server, script, settings, tmp_path):
    """By the variables that `accelerate launch --mixed_precision bf16 --dynamo_backend eager` sets."""
    asked = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "EAGER"}
    args = settings("--config", PUBLISHED, "--run.output_dir", tmp_path, "--run.resume", "latest",
                    "--run.eval_every", 0, "--run.resume_schedule", "new", "--optim.ema_decay", 0,
                    "--eval.batch_size_per_device", 10)  # fmt: skip

    def start(steps, *more, env=None):
        run = server.run(script, [*args, "--run.max_steps", steps, *more], env=env).ok()
        config = yaml.safe_load(sorted(run.folder.glob("config*.yaml"))[-1].read_text())
        environment = json.loads((run.folder / "environment.json").read_text())["settled"]
        assert config["run"]["precision"] == environment["precision"]
        return run, (config["run"]["precision"], config["optim"]["compile"]), environment

    first, used, environment = start(1, env=asked)
    assert used == ("bf16", "eager") and "precision: bf16 (accelerate launch)" in first.text
    assert environment["precision_by"] == environment["compile_by"] == "accelerate launch"

    kept, used, environment = start(2, env={"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"})
    assert used == ("bf16", "eager") and environment["precision_by"] == "the run so far"
    assert "run.precision bf16" not in kept.text and "torch.compile: eager (the run so far)" in kept.text

    changed, used, _ = start(3, "--run.precision", "no", "--optim.compile", "false", env=asked)
    assert used == ("no", False)
    assert "precision: float32 (run.precision, not accelerate launch, which says bf16)" in changed.text
    assert "run.precision bf16 -> no: used" in changed.text and "optim.compile eager -> false: used" in changed.text


@pytest.mark.slow
@pytest.mark.every_script
def test_compiled_losses_and_checkpoints_are_those_of_the_eager_model(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 3, "--run.eval_every", 0,
                    "--eval.batch_size_per_device", 10, *script.one_size)  # fmt: skip
    backend = "true" if script == SCRIPTS[0] else "aot_eager"
    eager = server.run(script, [*args, "--run.name", "eager"]).ok()
    compiled = server.run(script, [*args, "--run.name", "compiled", "--optim.compile", backend], within_s=1200).ok()
    assert "torch.compile: " not in eager.text
    assert "torch.compile: " in compiled.text and (backend != "true" or "graph breaks" in compiled.text)
    for row, expected in zip(losses(compiled), losses(eager), strict=True):
        assert row == pytest.approx(expected, rel=1e-3)
    names = [checkpoint_tensors(run.folder / "checkpoints" / "latest").keys() for run in (compiled, eager)]
    assert names[0] == names[1]
