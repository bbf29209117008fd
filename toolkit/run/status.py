"""The status of a run: how far it is, or how and why it ended (`status.json`).

Also the lock of its folder, which only one process may write to (`.lock`).
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
WITHOUT_A_WORD = (
    "its process ended without a word: killed, out of memory, or by a fault of the machine; --run.resume latest goes "
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
    "eval.early_stopping_patience": "so many evaluations in a row were not better than the best one",
    "schedule.max_decays": "the learning rate has fallen so many times",
}


def in_words(ended_by: Sequence[str]) -> str:
    """Such as "training ended by run.max_minutes (the minutes are used up)"; empty when nothing has ended it."""
    named = [f"{key} ({ENDINGS[key]})" if key in ENDINGS else str(key) for key in ended_by]
    return f"training ended by {' and '.join(named)}" if named else ""


def state_of(error: BaseException) -> str:
    """Return the state of a run that this error ends."""
    return next((state for state, kind in STATES.items() if isinstance(error, kind)), "failed")


def read_status(folder: Path) -> dict:
    """Return the content of `status.json`, see `true_status`; empty when there is none or it is not readable."""
    return true_status(folder, read_json_object(Path(folder) / "status.json"))


def true_status(folder: Path, status: dict) -> dict:
    """Return the content of `status.json`, but `failed` where it says `running` and the process that wrote it is gone.

    A process that is killed (SIGKILL, SIGBUS, out of memory) writes no last word, and the kernel releases its lock.
    Where that cannot be known, on another machine, on a disk without locks or without `.lock`, the file is believed.
    """
    if status.get("state") != "running" or not _is_holder_gone(Path(folder) / LOCK_FILE):
        return status
    return status | {"state": "failed", "exit_code": EXIT_CODES["failed"], "reason": WITHOUT_A_WORD}


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
    status = {"state": state, "exit_code": EXIT_CODES[state], "reason": reason, "time": now(), **extra}
    path = Path(folder) / "status.json"
    content = replace_nonfinite(status)
    try:
        write_json_atomic(path, content)
    except OSError:
        if not _write_over(path, json.dumps(content, indent=2)):
            raise


def _write_over(path: Path, text: str) -> bool:
    """Overwrite the existing file in place, which needs no room on a full disk; whether that worked."""
    try:
        with open(path, "r+b") as file:
            file.write(text.encode().ljust(path.stat().st_size))  # whole at once; blanks over what was longer
    except OSError:
        return False
    return True


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def holds_a_run(folder: Path) -> bool:
    """Return whether a run has begun in this folder; one that ended as bad input before it logged anything has not."""
    if not folder.is_dir():
        return folder.exists()
    entries = {path.name for path in folder.iterdir() if not path.name.startswith(".tmp-")} - {".lock"}
    if "checkpoints" in entries and not any((folder / "checkpoints").iterdir()):
        entries.discard("checkpoints")
    if "metrics.jsonl" in entries or "checkpoints" in entries:
        return True
    return bool(entries) and read_status(folder).get("state") != "bad_input"


class RunStatus:
    """`status.json` of a run that is going on; see `run_status`.

    details: stands in the file at its end, as `step` and `ended_by`.
    """

    def __init__(self, folder: Path, is_main: bool):
        self.folder = folder
        self.is_main = is_main
        self.details = {}
        # A folder in which an earlier run left its word keeps it until this one has really begun.
        self.begun = not holds_a_run(folder)

    def begin(self, trains: bool = True) -> None:
        """Mark the run as begun: all checks have passed.

        trains: False: an evaluation alone; what ended the training of before stays in the file.
        """
        self.begun = True
        if not trains:
            self.details["ended_by"] = read_status(self.folder).get("ended_by", [])
        self.write("running")

    def write(self, state: str, reason: str = "") -> None:
        if self.is_main and self.begun:
            reason = reason or in_words(self.details.get("ended_by", ()))
            write_status(self.folder, state, reason, **self.details)


@contextmanager
def run_status(folder: Path, is_main: bool) -> Iterator[RunStatus]:
    """Keep `status.json` true: running while the block runs, then done or why not; the main process writes.

    A start that is refused before `begin` leaves the `status.json` of an earlier run in the folder as it is.
    """
    status = RunStatus(folder, is_main)
    status.write("running")
    try:
        yield status
    except BaseException as error:  # whatever ends the run is recorded, and goes on its way
        try:
            status.write(state_of(error), str(error) or type(error).__name__)
        except OSError as unwritable:  # a full disk must not hide the error that ended the run
            warnings.warn(f"status.json could not be written: {unwritable}", stacklevel=2)
        raise
    status.write("done")


class FolderLock:
    """Holds `<run folder>/.lock`, in which its process stands by host, number and start, as long as the main process
    runs; when that dies, the kernel releases it.

        with FolderLock() as lock:
            lock.take(folder)

    `flock` is known on every machine that shares the disk (NFS, Lustre and others do it where they are mounted so).
    Forked workers do not hold it.

    Attributes:
        note: one sentence where the file system has no locks, else "". The run goes on then.
        keep: whether the run has begun; else the file is left as it was found.
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
            BadInput: another process holds it; names its host, number and start. OSError: no right to write, no space.
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
                f"{path} cannot be locked here ({error.strerror}): see to it yourself that no other run writes to this "
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
