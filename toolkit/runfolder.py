"""The run folder: made, described (`environment.json`), kept informed (`status.json`); every JSON written atomically.

    runs/<name>/  config.yaml  environment.json  status.json  metrics.jsonl  checkpoints/  nan/  report/  final/
"""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import torch

from toolkit.errors import BadInput, Preempted, StoppedByGuard

# State of a run -> the exit code its script ends with (None: not ended).
EXIT_CODES = {
    "running": None,
    "done": 0,
    "failed": 1,
    "bad_input": BadInput.exit_code,
    "stopped_by_guard": StoppedByGuard.exit_code,
    "preempted": Preempted.exit_code,
}
_NONFINITE = "__nonfinite__"  # key of the encoded form of a float that strict JSON lacks
PACKAGES = ("torch", "torchvision", "accelerate", "transformers", "timm", "datasets", "wandb", "pycocotools",
            "faster-coco-eval", "jsonargparse", "safetensors", "scipy", "numpy", "tensorboard")  # fmt: skip


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename survives a power cut only after this). A no-op on Windows."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) so that a reader, or a crash at any moment, finds the whole old or the whole new file.

    Raises:
        OSError: nothing was changed (no space, no right to write, ...).
    """
    path = Path(path)
    descriptor, temp = tempfile.mkstemp(dir=path.parent, prefix=f".tmp-{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temp, 0o644)  # mkstemp makes 0600; a run folder is to be read by colleagues
        os.replace(temp, path)
    except BaseException:
        Path(temp).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json_atomic(path: Path, obj) -> None:
    """`write_text_atomic` of `obj` as indented strict JSON.

    Raises:
        ValueError, TypeError: NaN, infinity or something JSON has no form for; see `replace_nonfinite`.
    """
    write_text_atomic(path, json.dumps(obj, indent=2, allow_nan=False) + "\n")


def replace_nonfinite(obj):
    """`obj` with every NaN or infinite float inside replaced by None, which is what strict JSON can say."""
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, dict):
        return {key: replace_nonfinite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [replace_nonfinite(value) for value in obj]
    return obj


def encode_json(value, where: str = "value"):
    """Strict JSON form of `value` from which `decode_json` gives it back: floats to the last bit, NaN and infinities.

    Tuples come back as lists, NumPy scalars as Python's.

    Raises:
        TypeError: something JSON has no form for (tensors, keys other than strings); says where, starting from `where`.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NONFINITE: repr(value)}
    if isinstance(value, list | tuple):
        return [encode_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and _NONFINITE not in value:
        return {key: encode_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Mapping):
        raise TypeError(f"{where} has keys other than strings ({list(value)[:5]}), which JSON cannot keep")
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot keep")


def decode_json(value):
    """Inverse of `encode_json`."""
    if isinstance(value, dict):
        if value.keys() == {_NONFINITE}:
            return float(value[_NONFINITE])
        return {key: decode_json(item) for key, item in value.items()}
    return [decode_json(item) for item in value] if isinstance(value, list) else value


def prepare_run_folder(output_dir: Path | str, name: str, resume: str = "never") -> Path:
    """Make `output_dir/name` with its `checkpoints` folder and make sure that it can be written.

    Args:
        output_dir: folder of all runs, made when missing.
        name: the run's own folder, one plain name.
        resume: `--run.resume`. "never" refuses a folder in which a run has begun; a run that ended as bad input before
            it logged anything does not count, so that a corrected command needs no clearing up.

    Returns:
        The absolute run folder.

    Raises:
        BadInput: no plain name, not writable, or an earlier run's folder under "never".
    """
    if name in ("", ".", "..") or Path(name).name != name:
        raise BadInput(f"--run.name {name!r} is not a plain folder name; give one without separators.")
    folder = Path(output_dir).expanduser().absolute() / name
    if resume == "never" and _holds_a_run(folder):
        raise BadInput(
            f"The run folder {folder} exists already and --run.resume is never. Continue it with --run.resume latest, "
            "choose another --run.name, or remove the folder."
        )
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"The run folder {folder} cannot be written ({error.strerror}). Give a folder you may write to, "
            "with space left on it, as --run.output_dir."
        ) from error
    return folder


def _holds_a_run(folder: Path) -> bool:
    if not folder.exists():
        return False
    if not folder.is_dir():
        return True
    entries = {path.name for path in folder.iterdir() if not path.name.startswith(".tmp-")}
    if "checkpoints" in entries and not any((folder / "checkpoints").iterdir()):
        entries.discard("checkpoints")
    if "metrics.jsonl" in entries or "checkpoints" in entries:
        return True
    return bool(entries) and read_status(folder).get("state") != "bad_input"


def read_status(folder: Path) -> dict:
    """What `status.json` says; empty when there is none or it is not readable."""
    try:
        status = json.loads((Path(folder) / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def write_status(folder: Path, state: str, reason: str = "", **extra) -> None:
    """Write `status.json`, which launchers cannot flatten as they do exit codes: state, exit_code, reason, time.

    Args:
        state: a key of `EXIT_CODES`.
        reason: one sentence in words, for a person.
        extra: further JSON values, such as `step` and `checkpoint`; NaN and infinity are written as null.

    Raises:
        ValueError: an unknown state. OSError: the folder cannot be written.
    """
    if state not in EXIT_CODES:
        raise ValueError(f"state {state!r} is none of {', '.join(EXIT_CODES)}")
    status = {"state": state, "exit_code": EXIT_CODES[state], "reason": reason, "time": _now(), **extra}
    write_json_atomic(Path(folder) / "status.json", replace_nonfinite(status))


def write_environment(folder: Path, seed: int, world_size: int, extra: dict | None = None) -> dict:
    """Write `environment.json`: what one must know to explain, or repeat, a number of this run.

    Args:
        seed: of the run. world_size: processes.
        extra: further JSON values, laid over the keys below.

    Returns:
        What was written: versions, git, hardware, command line, seed, processes, time.
    """
    environment = {
        "time": _now(),
        "command_line": list(sys.argv),
        "working_directory": os.getcwd(),
        "seed": seed,
        "processes": world_size,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {n: v for n in PACKAGES if (v := _package_version(n))} | {"torch": torch.__version__},  # +cu132
        "git": git_state(Path(__file__).resolve().parent.parent),
        "hardware": hardware(),
        **(extra or {}),
    }
    write_json_atomic(Path(folder) / "environment.json", replace_nonfinite(environment))
    return environment


def usable_cores() -> int:
    """Logical cores that this process may use; all there are where the system does not tell (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> dict:
    """CPU model, logical and usable cores, memory in bytes, accelerators by name, CUDA and cuDNN as torch sees them."""
    return {
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch_threads": torch.get_num_threads(),
    }


def git_state(root: Path) -> dict | None:
    """`{"commit", "dirty"}` of the checkout whose top folder is `root`; None without git or outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        # Installed into some other project's checkout, that project's commit would say nothing about this code.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != Path(root).resolve():
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
