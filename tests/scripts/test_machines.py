"""What other systems lack or do otherwise: Windows' missing modules and signals, and workers that are not forked."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from launching import CPU, ROOT, SCRIPTS, checkpoint_tensors, rows, small_settings

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


def python(code: str, *arguments) -> str:
    """What a Python of its own prints; it ends well."""
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, env=os.environ | CPU, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.slow
def test_every_module_is_imported_without_what_windows_lacks():
    python(WITHOUT + IMPORT_ALL)


@pytest.mark.slow
def test_without_what_windows_lacks_spawned_workers_train_the_same(data, tmp_path):
    """Three steps of SSD with two workers: rows and weights equal those of a usual run, whose workers are forked."""
    folders = []
    for before, method in (("import runpy, sys\n", "fork"), (WITHOUT, "spawn")):
        settings = {"--run.output_dir": tmp_path, "--run.name": method, "--run.max_steps": 3, "--data.workers": 2}
        settings |= {"--run.eval_every": 0}
        given = small_settings(SCRIPTS[-1], data, [part for pair in settings.items() for part in pair])
        python(before + TRAIN, method, *given)
        folders.append(tmp_path / method)
    fork, spawn = folders
    assert rows(fork) == rows(spawn) and len(rows(fork)) >= 3
    weights, others = (checkpoint_tensors(folder / "checkpoints" / "latest") for folder in folders)
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize(("moved_px", "code"), [(0, 0), (3, 2)])
def test_two_machines_have_the_same_data_in_folders_of_their_own_or_end_before_the_first_step(
    moved_px, code, data, tmp_path
):
    folders = [data, tmp_path / "copy"]
    shutil.copytree(data, folders[1])
    annotations = folders[1] / "annotations" / "train.json"
    document = json.loads(annotations.read_text())
    document["annotations"][0]["bbox"][0] += moved_px
    annotations.write_text(json.dumps(document))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    together = os.environ | CPU | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = []
    for rank, folder in enumerate(folders):
        args = ["--run.output_dir", tmp_path, "--run.max_steps", 1, "--run.eval_every", 0]
        command = [sys.executable, SCRIPTS[-1].path, *small_settings(SCRIPTS[-1], folder, args)]
        of_rank = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*map(str, command)], env=together | of_rank, cwd=ROOT, **pipes))
    texts = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [code, code], "\n".join(texts)
    assert all(("rank 1 on the machine" in text) == bool(code) for text in texts)
    assert any((tmp_path / "run" / "checkpoints").glob("step_*")) != bool(code)


@pytest.mark.parametrize(("found", "asked", "device"), [
    (None, "false", "cpu"), ("mps", "false", "mps"), ("mps", "true", "cpu"), ("cuda", "0", "cuda"),
])  # fmt: skip
def test_every_program_takes_the_accelerator_that_torch_finds(found, asked, device, monkeypatch):
    accelerator = found and torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    assert default_device() == torch.device(device)
