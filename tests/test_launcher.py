"""The settings of `accelerate launch`, through the real one, are used or refused as docs/scaling.md has it."""

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


def launched(tmp_path: Path, *flags: str, **environment: str) -> dict:
    """What a script sees that the real launcher starts with these flags, and without settings of this machine."""
    (tmp_path / "child.py").write_text(CHILD)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k != "OMP_NUM_THREADS"}
    env = kept | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)} | environment
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags, "child.py", "--cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return json.loads(re.search(r"^FOUND (.*)$", ended.stdout, re.MULTILINE)[1])


def test_what_is_not_done_is_refused_all_at_once_and_an_exported_one_thread_counts(tmp_path):
    found = launched(
        tmp_path, "--cpu", "--use_megatron_lm", "--gradient_accumulation_steps", "4", "--gradient-clipping=0.5",
        "--fsdp_offload_params", "true", "--zero_stage", "3", "--parallelism_config_tp_size", "2", "--fp8_margin", "1",
        "--tpu_use_sudo", "--aws_access_key_id", "x", "--dynamo_mode", "max-autotune", "--mixed_precision", "no",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    expected = ["--use_megatron_lm: asks for Megatron-LM", "--optim.accumulation_steps 4", "--optim.max_norm 0.5",
                "--fsdp_offload_params: asks for FSDP", "--zero_stage: asks for DeepSpeed", "a parallelism config",
                "--fp8_margin", "TPU", "SageMaker", "--dynamo_mode"]  # fmt: skip
    assert [words for words in expected if words not in found["problems"]] == []
    assert found["asked"] == {"precision": "no", "compile": None} and "mixed_precision" in found["flags"]
    assert found["threads"] == 1 and found["argv"] == ["--cpu"], "the script's own flags are not the launcher's"


@pytest.mark.slow
def test_its_settings_file_is_read_and_its_own_one_thread_does_not_count(tmp_path):
    (tmp_path / "accelerate").mkdir()
    file = tmp_path / "accelerate" / "default_config.yaml"  # where `accelerate config` writes it
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\n"
                    "num_processes: 1\nnum_machines: 1\nmachine_rank: 0\nuse_cpu: false\ndowncast_bf16: 'no'\n"
                    "main_training_function: main\ntpu_env: []\ntpu_use_sudo: false\nfsdp_config: {fsdp_version: 2}\n"
                    "dynamo_config: {dynamo_backend: INDUCTOR}\n")  # fmt: skip
    found = launched(tmp_path, ACCELERATE_USE_CPU="true")
    assert found["file"] == str(file)
    assert found["problems"].startswith(f"fsdp_config in {file}: asks for FSDP") and "TPU" not in found["problems"]
    assert found["asked"] == {"precision": None, "compile": "inductor"}, "a file has to name a precision: no word on it"
    assert found["threads"] == os.cpu_count()


SAMPLES = {int: 7, float: 0.5, str: "x", None: "x", bool: True}


def refused(launch: Launch, environment: dict | None = None) -> bool:
    try:
        refuse(launch, environment or {})
    except BadInput:
        return True
    return False


def table() -> dict[str, str]:
    """Name, or the beginning of names, of a flag or key -> its verdict, as docs/scaling.md has them."""
    page = (ROOT / "docs" / "scaling.md").read_text().partition("## What `accelerate launch` is told")[2]
    rows = re.findall(r"^\| (`.*?) \| (used|refused) \|", page, re.MULTILINE)
    return {name: verdict for names, verdict in rows for name in re.findall(r"`([^`]+)`", names)}


def verdict_of(name: str) -> str | None:
    rows = table()
    begun = [prefix for prefix in rows if prefix.endswith("*") and name.startswith(prefix[:-1])]
    return rows.get(name) or (rows[max(begun, key=len)] if begun else None)


def test_every_flag_of_the_launcher_has_its_verdict_in_the_docs():
    actions = {action.dest: action for action in launch_command_parser()._actions}
    assert len(actions) > 100
    said = {name: verdict_of(name) for name in actions}
    assert not [name for name, verdict in said.items() if verdict is None], "flags without a row in docs/scaling.md"
    for name, action in actions.items():
        sample = True if action.nargs == 0 else SAMPLES.get(action.type, "x")
        by_variable = {f"ACCELERATE_{name.upper()}": str(sample)} if name.startswith("dynamo_") else {}
        assert refused(Launch({name: sample}), by_variable) == (said[name] == "refused"), name
    refuse(Launch({"gradient_accumulation_steps": 1}), {})


def test_every_key_of_its_settings_file_has_its_verdict_in_the_docs():
    keys = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert not [name for name in keys if verdict_of(name) is None], "keys without a row in docs/scaling.md"
    for name in keys:
        launch = Launch({}, Path("f.yaml"), {name: {"a": 1} if name == "mpirun_config" else "x"})
        assert refused(launch) == (verdict_of(name) == "refused"), name
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
        with pytest.raises(BadInput, match="distributed_type in f.yaml"):
            refuse(Launch({}, Path("f.yaml"), {"distributed_type": name}), {})
        refuse(Launch({"cpu": True}, Path("f.yaml"), {"distributed_type": name}), {})  # the flag wins
    refuse(Launch({}, Path("f.yaml"), {"distributed_type": "MULTI_GPU", "fsdp_config": {}, "tpu_env": []}), {})


def test_the_launcher_is_known_however_it_was_called():
    for words in (
        "python /env/bin/accelerate launch --cpu a.py",
        "/env/bin/accelerate-launch --cpu a.py",
        "python -m accelerate.commands.launch --cpu a.py",
        "python -u -m accelerate.commands.accelerate_cli launch --cpu a.py",
        "/env/python /env/lib/accelerate/commands/accelerate_cli.py launch --cpu a.py",
    ):
        assert _launch_arguments(words.split()) == ["--cpu", "a.py"]


def test_other_programs_are_no_launcher(monkeypatch):
    assert _launch_arguments(["python", "train.py", "--name", "accelerate"]) is None
    assert _launch_arguments(["/env/bin/accelerate", "config"]) is None
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert find_launch() is None
    assert launcher_precision(None, {"ACCELERATE_MIXED_PRECISION": "no"}) is None, "every launch says no"
    assert launcher_precision(None, {"ACCELERATE_MIXED_PRECISION": "bf16"}) == "bf16"
