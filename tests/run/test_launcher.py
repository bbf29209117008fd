"""The settings of `accelerate launch` are used or refused as docs/scaling.md has it."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.run.launcher import Launch, _launch_arguments, find_launch, launcher_precision, refuse

CHILD = """
import json, os, sys
import torch
from toolkit.base.errors import BadInput
from toolkit.run.launcher import launcher_settings, find_launch, refuse
from toolkit.run.processes import set_threads
problems = ""
launch = find_launch()
try:
    refuse(launch, os.environ)
except BadInput as error:
    problems = str(error)
set_threads(None, torch.device("cpu"))
print("FOUND " + json.dumps({"problems": problems, "flags": sorted(launch.flags), "file": str(launch.file),
      "threads": torch.get_num_threads(), "asked": launcher_settings(os.environ), "argv": sys.argv[1:]}))
"""
SETTINGS = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 1
num_machines: 1
machine_rank: 0
use_cpu: false
downcast_bf16: 'no'
main_training_function: main
tpu_env: []
tpu_use_sudo: false
fsdp_config: {fsdp_version: 2}
dynamo_config: {dynamo_backend: INDUCTOR}
"""


def launched(folder: Path, *flags: str, **environment: str) -> dict:
    """What a script sees that the real launcher starts with these flags, and without settings of this machine."""
    (folder / "child.py").write_text(CHILD)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k != "OMP_NUM_THREADS"}
    env = kept | {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder)} | environment
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags, "child.py", "--cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return json.loads(re.search(r"^FOUND (.*)$", ended.stdout, re.MULTILINE)[1])


# Flags of the launcher, and what is said of each.
REFUSED = {
    "--use_megatron_lm": "--use_megatron_lm: asks for Megatron-LM",
    "--gradient_accumulation_steps 4": "--optim.accumulation_steps 4",
    "--gradient-clipping=0.5": "--optim.max_norm 0.5",
    "--fsdp_offload_params true": "--fsdp_offload_params: asks for FSDP",
    "--zero_stage 3": "--zero_stage: asks for DeepSpeed",
    "--parallelism_config_tp_size 2": "a parallelism config",
    "--fp8_margin 1": "--fp8_margin",
    "--tpu_use_sudo": "TPU",
    "--aws_access_key_id x": "SageMaker",
    "--dynamo_mode max-autotune": "--dynamo_mode",
}


def test_what_is_not_done_is_refused_all_at_once(tmp_path):
    """And one thread that is exported counts."""
    flags = " ".join(REFUSED).split()
    found = launched(tmp_path, "--cpu", *flags, "--mixed_precision", "no", OMP_NUM_THREADS="1")
    assert [words for words in REFUSED.values() if words not in found["problems"]] == []
    assert found["asked"] == {"precision": "no", "compile": None}
    assert "mixed_precision" in found["flags"]
    assert found["threads"] == 1
    assert found["argv"] == ["--cpu"], "the script's own flags are not the launcher's"


@pytest.mark.slow
def test_its_settings_file_is_read_and_its_own_one_thread_does_not_count(tmp_path):
    file = tmp_path / "accelerate" / "default_config.yaml"  # where `accelerate config` writes it
    file.parent.mkdir()
    file.write_text(SETTINGS)
    found = launched(tmp_path, ACCELERATE_USE_CPU="true")
    assert found["file"] == str(file)
    assert found["problems"].startswith(f"fsdp_config in {file}: asks for FSDP")
    assert "TPU" not in found["problems"]
    assert found["asked"] == {"precision": None, "compile": "inductor"}, "a file has to name a precision: no word on it"
    assert found["threads"] == os.cpu_count()


SAMPLES = {int: 7, float: 0.5, str: "x", None: "x", bool: True}
FILE = Path("f.yaml")


def is_refused(launch: Launch, environment: dict | None = None) -> bool:
    try:
        refuse(launch, environment or {})
    except BadInput:
        return True
    return False


def verdicts() -> dict[str, str]:
    """Name, or the beginning of names, of a flag or key -> its verdict, as docs/scaling.md has them."""
    page = (ROOT / "docs" / "scaling.md").read_text().partition("## Flags of `accelerate launch`")[2]
    rows = re.findall(r"^\| (`.*?) \| (used|refused) \|", page, re.MULTILINE)
    return {name: verdict for names, verdict in rows for name in re.findall(r"`([^`]+)`", names)}


def verdict_of(name: str) -> str:
    rows = verdicts()
    begun = [prefix for prefix in rows if prefix.endswith("*") and name.startswith(prefix[:-1])]
    assert name in rows or begun, f"{name} has no row in docs/scaling.md"
    return rows[name if name in rows else max(begun, key=len)]


def test_every_flag_of_the_launcher_has_its_verdict_in_the_docs():
    actions = launch_command_parser()._actions
    assert len(actions) > 100
    for action in actions:
        name = action.dest
        sample = True if action.nargs == 0 else SAMPLES.get(action.type, "x")
        by_variable = {f"ACCELERATE_{name.upper()}": str(sample)} if name.startswith("dynamo_") else {}
        assert is_refused(Launch({name: sample}), by_variable) == (verdict_of(name) == "refused"), name
    refuse(Launch({"gradient_accumulation_steps": 1}), {})


def test_every_key_of_its_settings_file_has_its_verdict_in_the_docs():
    for name in (field.name for field in dataclasses.fields(ClusterConfig)):
        launch = Launch({}, FILE, {name: {"a": 1} if name == "mpirun_config" else "x"})
        assert is_refused(launch) == (verdict_of(name) == "refused"), name
    refuse(Launch({}, FILE, {"distributed_type": "MULTI_GPU", "fsdp_config": {}, "tpu_env": []}), {})


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_a_distributed_type_that_shards_is_refused(kind):
    with pytest.raises(BadInput, match="distributed_type in f.yaml"):
        refuse(Launch({}, FILE, {"distributed_type": kind}), {})
    refuse(Launch({"cpu": True}, FILE, {"distributed_type": kind}), {})  # the flag wins


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("ACCELERATE_USE_FSDP", "true", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "True", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "1", "Megatron"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "parallelism"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "--optim.accumulation_steps 4"),
        ("PJRT_DEVICE", "TPU", "TPU"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "fp8"),
    ],
)
def test_variables_of_other_trainers_are_refused(name, value, word):
    with pytest.raises(BadInput, match=f"{name}.*{word}"):
        refuse(None, {name: value})


def test_variables_that_a_launcher_always_sets_are_fine():
    always = {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
    refuse(None, always | {"ACCELERATE_MIXED_PRECISION": "bf16", "PJRT_DEVICE": "CPU"})


@pytest.mark.parametrize(
    "words",
    [
        "python /env/bin/accelerate launch --cpu a.py",
        "/env/bin/accelerate-launch --cpu a.py",
        "python -m accelerate.commands.launch --cpu a.py",
        "python -u -m accelerate.commands.accelerate_cli launch --cpu a.py",
        "/env/python /env/lib/accelerate/commands/accelerate_cli.py launch --cpu a.py",
    ],
)
def test_the_launcher_is_known_however_it_was_called(words):
    assert _launch_arguments(words.split()) == ["--cpu", "a.py"]


def test_other_programs_are_not_the_launcher(monkeypatch):
    assert _launch_arguments(["python", "train.py", "--name", "accelerate"]) is None
    assert _launch_arguments(["/env/bin/accelerate", "config"]) is None
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert find_launch() is None
    assert launcher_precision(None, {"ACCELERATE_MIXED_PRECISION": "no"}) is None, "every launch says no"
    assert launcher_precision(None, {"ACCELERATE_MIXED_PRECISION": "bf16"}) == "bf16"
