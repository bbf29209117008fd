"""Creates the run folder and writes `environment.json`, which describes the run, into it, with atomic writes.

    runs/<name>/  config.yaml  environment.json  status.json  metrics.jsonl  checkpoints/  nan/  report/  final/
"""

import errno
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from toolkit.base.errors import BadInput
from toolkit.base.files import replace_nonfinite, usable_cores, write_json_atomic, write_text_atomic
from toolkit.run.status import FolderLock, holds_a_run, now

STAGING = ".tmp-start"
ERRORS_FILE = "errors.log"
PACKAGES = (
    "torch torchvision accelerate transformers timm datasets wandb pycocotools safetensors scipy numpy "
    "tensorboard"
).split()


def prepare_run_folder(
    output_dir: Path | str, name: str, resume: str = "never", lock: FolderLock | None = None
) -> Path:
    """Create the run folder `output_dir/name` with its folder `checkpoints`, lock it and check that it is writable.

    Args:
        output_dir: folder of all runs, created if it is missing.
        name: name of the run folder, without separators.
        resume: `--run.resume`. "never" refuses a folder in which a run has begun, see `holds_a_run`. A run that ended
            as bad input before it logged anything does not count, so a corrected command can use its folder.
        lock: lock to take on the folder, so that no other process writes to it; None: the folder is not locked.

    Returns:
        The absolute path of the run folder.

    Raises:
        BadInput: `name` has separators; or the folder is not writable, is in use by another process, or holds a run
            and `resume` is "never".
    """
    if name in ("", ".", "..") or Path(name).name != name:
        raise BadInput(f"--run.name {name!r} is not a plain folder name; give one without separators.")
    folder = Path(output_dir).expanduser().absolute() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock is not None:
            lock.take(folder)
        if resume == "never" and holds_a_run(folder):
            raise BadInput(
                f"The run folder {folder} exists already and --run.resume is never. Continue it with --run.resume "
                "latest, choose another --run.name, or remove the folder."
            )
        (folder / "checkpoints").mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = "Give a folder you may write to, with space left on it, as --run.output_dir."
        if error.errno == errno.ENAMETOOLONG:
            advice = "Give a shorter --run.name."
        raise BadInput(f"The run folder {folder} cannot be written ({error.strerror}). {advice}") from error
    return folder


@contextmanager
def staging(folder: Path, is_new: bool, is_main: bool) -> Iterator[Path]:
    """Yield the folder to write to until all checks at the start of a run have passed.

    For a new run it is the run folder. Otherwise it is a temporary folder inside, which is deleted at the end, so that
    a start that is refused changes nothing of the earlier run. See `keep_staged`.

    Args:
        folder: the run folder.
        is_new: no run has begun in the run folder.
        is_main: this is the main process; only it creates and deletes the temporary folder.
    """
    path = folder if is_new else folder / STAGING
    if is_main and path != folder:
        shutil.rmtree(path, ignore_errors=True)  # left by a start that was killed
        path.mkdir()
    try:
        yield path
    finally:
        if is_main and path != folder:
            shutil.rmtree(path, ignore_errors=True)


def keep_staged(staged: Path, folder: Path) -> None:
    """Move the files in the folder of `staging` into the run folder; they replace files of the same names."""
    for path in sorted(staged.iterdir()) if staged != folder else ():
        os.replace(path, folder / path.name)


def write_environment(folder: Path, seed: int, world_size: int, extra: dict | None = None) -> None:
    """Write `environment.json`: command line, seed, versions, commit and hardware, for explaining or repeating results.

    If the code differs from the commit, the difference is written to `code.diff`.

    Args:
        folder: the run folder.
        seed: seed of the run.
        world_size: number of processes.
        extra: further JSON values by key, which override the function's own.
    """
    root = Path(__file__).resolve().parent.parent.parent
    git = git_state(root)
    if git and git["dirty"]:
        write_text_atomic(Path(folder) / "code.diff", _git(root, "diff", "HEAD"))
    environment = {
        "time": now(),
        "command_line": list(sys.argv),
        "working_directory": os.getcwd(),
        "seed": seed,
        "processes": world_size,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {n: v for n in PACKAGES if (v := _package_version(n))} | {"torch": torch.__version__},  # +cu132
        "git": git,
        "hardware": hardware(),
        **(extra or {}),
    }
    write_json_atomic(Path(folder) / "environment.json", replace_nonfinite(environment))


def hardware() -> dict:
    """Return the CPU model, logical and usable cores, memory in bytes, names of the GPUs, versions of CUDA and cuDNN,
    and CPU threads of torch, as JSON values.
    """
    return {
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [_gpu_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch_threads": torch.get_num_threads(),
    }


def _gpu_name(index: int) -> str:
    """Return the name of a GPU. Another program may hold it for itself, which is not an error of this run."""
    try:
        return torch.cuda.get_device_name(index)
    except RuntimeError as error:
        return f"GPU {index}, which cannot be opened: {str(error).partition(chr(10))[0]}"


def git_state(root: Path) -> dict | None:
    """Return `{"commit": hash, "dirty": bool}` of the git checkout whose top folder is `root`.

    dirty: whether files differ from the commit. None: git is not installed, or `root` is not the top of a checkout.
    """
    try:
        # Installed into some other project's checkout, that project's commit would say nothing about this code.
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve() != Path(root).resolve():
            return None
        return {"commit": _git(root, "rev-parse", "HEAD").strip(), "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=30)
    return ended.stdout


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


def attempt(what: str, function: Callable[[], Any], folder: Path, say: Callable[[str], None]) -> Any:
    """Call `function` and return its result; if it raises, print one line, write the traceback to `errors.log` and
    return None.

    Args:
        what: name of the action for the message.
        folder: the run folder.
        say: prints a line.
    """
    try:
        return function()
    except Exception as error:  # noqa: BLE001  pictures, reports and trackers never end a training
        note_traceback(folder, what)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        where = folder / ERRORS_FILE
        say(f"warning: {what} failed ({reason}); the run goes on without it. The traceback is in {where}.")
        return None


def note_traceback(folder: Path, what: str) -> None:
    """Append the traceback of the exception that is being handled to `errors.log` in the run folder.

    what: name of the failed action. If the file cannot be written, nothing is raised.
    """
    try:
        with open(folder / ERRORS_FILE, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {what}\n{traceback.format_exc()}\n")
    except OSError:
        return
