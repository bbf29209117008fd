"""The status of a run, `status.json`: the step it has reached, or how and why it ended.

Also the lock of the run folder, `.lock`, so that only one run at a time writes to the folder.
"""

import json
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from toolkit.base.errors import BadInput, Preempted, StoppedByGuard
from toolkit.base.files import read_json_object, replace_nonfinite, write_json_atomic

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".lock"
WITHOUT_A_MESSAGE = (
    "its process ended without a message (killed, out of memory, or a fault of the machine); --run.resume latest goes "
    "on from the last checkpoint"
)
# State of a run -> the error that ends a run on purpose with it; of any other one: "failed".
STATES = {"bad_input": BadInput, "stopped_by_guard": StoppedByGuard, "preempted": Preempted}
# State -> the exit code of its script (None: not ended).
EXIT_CODES = {"running": None, "done": 0, "failed": 1} | {state: kind.exit_code for state, kind in STATES.items()}
# The setting that ended a training, as `Training.ended_by` has it -> in words.
ENDINGS = {
    "run.epochs": "all epochs are over",
    "run.max_steps": "all steps are made",
    "run.max_minutes": "the minutes are used up",
    "eval.early_stopping_patience": "no improvement for that many evaluations in a row",
    "schedule.max_decays": "the learning rate has fallen that many times",
}


def describe_ending(ended_by: Sequence[str]) -> str:
    """Return text such as "training ended by run.max_minutes (the minutes are used up)".

    ended_by: keys of the settings that ended the training; without any, "" is returned.
    """
    named = [f"{key} ({ENDINGS[key]})" if key in ENDINGS else str(key) for key in ended_by]
    return f"training ended by {' and '.join(named)}" if named else ""


def state_after(error: BaseException) -> str:
    """Return the state, a key of `EXIT_CODES`, of a run that `error` has ended."""
    return next((state for state, kind in STATES.items() if isinstance(error, kind)), "failed")


def read_status(folder: Path) -> dict:
    """Return the content of `status.json` in a run folder, corrected by `true_status`.

    Returns an empty dict if the file does not exist or cannot be read.
    """
    return true_status(folder, read_json_object(Path(folder) / "status.json"))


def true_status(folder: Path, status: dict) -> dict:
    """Return `status`, the content of `status.json`, with the state `failed` if it says `running` and the process that
    wrote it is gone.

    A process that is killed (SIGKILL, SIGBUS, out of memory) cannot update the file, but the kernel releases its lock.
    If the lock cannot be checked (the run is on another machine, the disk has no locks, or `.lock` does not exist),
    `status` is returned unchanged.
    """
    if status.get("state") != "running" or not _is_holder_gone(Path(folder) / LOCK_FILE):
        return status
    return status | {"state": "failed", "exit_code": EXIT_CODES["failed"], "reason": WITHOUT_A_MESSAGE}


def _is_holder_gone(path: Path) -> bool:
    """Return whether nobody holds a lock file that a process of this machine has left behind."""
    if fcntl is None or read_json_object(path).get("host") != socket.gethostname():
        return False
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except OSError:  # held, or locks are not known here
        return False
    return True


def write_status(folder: Path, state: str, reason: str = "", **extra) -> None:
    """Write `status.json` with state, exit_code, reason and time; launchers often do not pass on the exit code itself.

    Args:
        folder: the run folder.
        state: a key of `EXIT_CODES`.
        reason: one sentence for a person.
        extra: further JSON values, such as `step`; NaN and infinity are written as null.

    Raises:
        ValueError: the state is unknown.
        OSError: the file cannot be written.
    """
    if state not in EXIT_CODES:
        raise ValueError(f"state {state!r} is none of {', '.join(EXIT_CODES)}")
    status = {"state": state, "exit_code": EXIT_CODES[state], "reason": reason, "time": now(), **extra}
    path = Path(folder) / "status.json"
    content = replace_nonfinite(status)
    try:
        write_json_atomic(path, content)
    except OSError:
        if not _write_over(path, json.dumps(content, indent=2)):
            raise


def _write_over(path: Path, text: str) -> bool:
    """Overwrite an existing file in place, which works on a full disk too, and return whether that succeeded."""
    try:
        with open(path, "r+b") as file:
            file.write(text.encode().ljust(path.stat().st_size))  # whole at once; blanks over what was longer
    except OSError:
        return False
    return True


def now() -> str:
    """Return the local time with its offset from UTC, such as "2025-01-31T12:00:00+0100"."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def holds_a_run(folder: Path) -> bool:
    """Return whether a run has begun in this folder.

    A run that ended as bad input before it logged anything or wrote a checkpoint does not count.
    """
    if not folder.is_dir():
        return folder.exists()
    entries = {path.name for path in folder.iterdir() if not path.name.startswith(".tmp-")} - {".lock"}
    if "checkpoints" in entries and not any((folder / "checkpoints").iterdir()):
        entries.discard("checkpoints")
    if "metrics.jsonl" in entries or "checkpoints" in entries:
        return True
    return bool(entries) and read_status(folder).get("state") != "bad_input"


class RunStatus:
    """Writes `status.json` of the current run; made by `run_status`.

    Attributes:
        details: further entries of the file, such as `step` and `ended_by`.
        begun: whether the file may be written: in a new run folder from the start, else once `begin` is called.
    """

    def __init__(self, folder: Path, is_main: bool):
        self.folder = folder
        self.is_main = is_main
        self.details = {}
        # A folder in which an earlier run left its word keeps it until this one has really begun.
        self.begun = not holds_a_run(folder)

    def begin(self, trains: bool = True) -> None:
        """Mark the run as running in `status.json`; call it when all checks at the start have passed.

        trains: False for a run that only evaluates; the entry `ended_by` of the earlier training is then kept.
        """
        self.begun = True
        if not trains:
            self.details["ended_by"] = read_status(self.folder).get("ended_by", [])
        self.write("running")

    def write(self, state: str, reason: str = "") -> None:
        """Write a state, its reason and `details`, see `write_status`; do nothing before `begin` in a run that resumes,
        or in another process than the main one."""
        if self.is_main and self.begun:
            reason = reason or describe_ending(self.details.get("ended_by", ()))
            write_status(self.folder, state, reason, **self.details)


@contextmanager
def run_status(folder: Path, is_main: bool) -> Iterator[RunStatus]:
    """Keep `status.json` up to date: "running" during a `with` block, then "done", or the state and the message of the
    exception that ended the block.

    Only the main process writes. If the folder holds an earlier run, its `status.json` is not changed before `begin` is
    called.
    """
    status = RunStatus(folder, is_main)
    status.write("running")
    try:
        yield status
    except BaseException as error:  # whatever ends the run is recorded, and goes on its way
        try:
            status.write(state_after(error), str(error) or type(error).__name__)
        except OSError as unwritable:  # a full disk must not hide the error that ended the run
            warnings.warn(f"status.json could not be written: {unwritable}", stacklevel=2)
        raise
    status.write("done")


class FolderLock:
    """Holds the lock file `<run folder>/.lock` while the main process runs, so that no other run uses the folder.

        with FolderLock() as lock:
            lock.take(folder)

    The file names the host, the number and the start of the process that holds it. If the process dies, the kernel
    releases the lock. Other machines that share the disk see the lock too, if the file system (NFS, Lustre, ...) is
    mounted with `flock`. Forked workers do not hold it.

    Attributes:
        note: a sentence if the file system has no locks and the folder is therefore not locked, else "".
        keep: set it to True when the run has begun: the file is then deleted at the end. Otherwise a file that was
            there before gets its old content back.
    """

    def __init__(self):
        self.note = ""
        self.keep = False
        self._path: Path | None = None
        self._found: bytes | None = None  # what another process left in the file
        self._lock: FileLock | None = None
        self._pid = 0

    def take(self, folder: Path) -> None:
        """Take the lock of a run folder.

        Raises:
            BadInput: another process holds the lock; the message names its host, its number and its start.
            OSError: the permission to write, or space, is missing.
        """
        path = Path(folder) / LOCK_FILE
        content = path.read_bytes() if path.exists() else None
        path.touch()  # raises where nothing can be written; what `acquire` raises after that is about locks
        # a moment for one that its holder removes just now; `note` says more than a lock of another kind would hold
        lock = FileLock(path, timeout=0.2, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            raise BadInput(_in_use(path)) from None
        except OSError as error:
            self.note = (
                f"{path} cannot be locked here ({error.strerror}): make sure that no other run writes to this "
                "folder."
            )
        self._path, self._found, self._lock, self._pid = path, content, lock, os.getpid()
        path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": now()}), "utf-8")

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *exception) -> None:
        if self._path is None or self._pid != os.getpid():  # a forked worker
            return
        try:
            if self.keep or self._found is None:
                self._path.unlink(missing_ok=True)
            else:
                self._path.write_bytes(self._found)
        except OSError:  # a full or vanished disk: an old note in a file that nobody holds does no harm
            pass
        finally:
            self._path = None
            self._lock.release()


def _in_use(path: Path) -> str:
    holder: dict = {}
    for _ in range(20):  # taken a moment ago, it may not be written in yet
        try:
            holder = json.loads(path.read_text(encoding="utf-8"))
            break
        except (OSError, ValueError):
            time.sleep(0.05)
    who = "another process"
    if isinstance(holder, dict) and holder.keys() >= {"host", "pid", "started"}:
        who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    return (
        f"The run folder {path.parent} is in use by {who}. Wait for its end, or end it with a signal (kill saves "
        "its state), or choose another --run.name."
    )
