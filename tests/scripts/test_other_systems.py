"""What other systems lack or do otherwise: modules and signals, workers that are not forked, devices."""

import os
import subprocess
import sys

import pytest
import torch
from launching import CPU, SCRIPTS, checkpoint_tensors, rows, small_settings
from places import ROOT

from toolkit.base.distributed import default_device

# What neither Windows' Python nor its signals have is taken away before anything of this project is imported; what is
# not this project's is imported before.
WITHOUT = """
import os, runpy, signal, sys
import accelerate.tracking, datasets, filelock, multiprocessing.popen_fork, timm, torch, torchvision, transformers
import torch.distributed.run, torch.utils.data, yaml, psutil, torch._dynamo, scipy.optimize
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "sigwaitinfo", "setitimer"):
    delattr(signal, name)
for name in ("fork", "killpg", "getpgid", "setsid", "getuid", "geteuid", "sched_getaffinity", "uname", "mkfifo"):
    delattr(os, name)
"""
IMPORT_ALL = """
import importlib, pathlib
sys.path.insert(0, "scripts")
files = [*pathlib.Path("toolkit").rglob("*.py"), *pathlib.Path("scripts").glob("*.py")]
failed = []
for file in sorted(files):
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__").removeprefix("scripts.")
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        failed.append(f"{name}: {error!r}")
assert not failed, failed
"""
TRAIN = """
import multiprocessing
multiprocessing.set_start_method(sys.argv.pop(1))
sys.argv[0] = "scripts/train_ssd.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_python(code: str, *arguments) -> None:
    """Run a Python of its own, which ends well."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | CPU, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


@pytest.mark.slow
def test_every_module_is_imported_without_what_windows_lacks():
    run_python(WITHOUT + IMPORT_ALL)


@pytest.mark.slow
def test_spawned_workers_train_the_same_without_what_windows_lacks(data, tmp_path):
    """Rows and weights equal those of a usual run, whose workers are forked."""
    for before, method in (("import runpy, sys\n", "fork"), (WITHOUT, "spawn")):
        given = f"--run.output_dir {tmp_path} --run.name {method} --run.max_steps 3 --run.eval_every 0 --data.workers 2"
        run_python(before + TRAIN, method, *small_settings(SCRIPTS[-1], data, given))
    fork = tmp_path / "fork"
    spawn = tmp_path / "spawn"
    assert len(rows(fork)) >= 3
    assert rows(fork) == rows(spawn)
    forked = checkpoint_tensors(fork / "checkpoints" / "latest")
    spawned = checkpoint_tensors(spawn / "checkpoints" / "latest")
    assert forked.keys() == spawned.keys()
    assert all(torch.equal(forked[name], spawned[name]) for name in forked)


@pytest.mark.parametrize(
    ("found", "asked", "device"),
    [(None, "false", "cpu"), ("mps", "false", "mps"), ("mps", "true", "cpu"), ("cuda", "0", "cuda")],
)
def test_every_program_takes_the_accelerator_that_torch_finds(found, asked, device, monkeypatch):
    accelerator = found and torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    assert default_device() == torch.device(device)
