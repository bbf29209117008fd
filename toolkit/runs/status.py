"""`status.json`: what a run is doing, or how and why it ended."""

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import BadInput, Preempted, StoppedByGuard
from toolkit.files import read_json_object, replace_nonfinite, write_json_atomic
from toolkit.runs.ending import in_words

# State of a run -> the exit code its script ends with (None: not ended).
EXIT_CODES = {
    "running": None,
    "done": 0,
    "failed": 1,
    "bad_input": BadInput.exit_code,
    "stopped_by_guard": StoppedByGuard.exit_code,
    "preempted": Preempted.exit_code,
}


def read_status(folder: Path) -> dict:
    """What `status.json` says; empty when there is none or it is not readable."""
    return read_json_object(Path(folder) / "status.json")


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
    path, content = Path(folder) / "status.json", replace_nonfinite(status)
    try:
        write_json_atomic(path, content)
    except OSError:
        if not _write_over(path, json.dumps(content, indent=2)):
            raise


def _write_over(path: Path, text: str) -> bool:
    """Whether a full disk took it in the place of the file that is there, which needs no room."""
    try:
        with open(path, "r+b") as file:
            file.write(text.encode().ljust(path.stat().st_size))  # whole at once; blanks over what was longer
    except OSError:
        return False
    return True


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def holds_a_run(folder: Path) -> bool:
    """Whether a run has begun in this folder: one that ended as bad input before it logged anything does not count."""
    if not folder.is_dir():
        return folder.exists()
    entries = {path.name for path in folder.iterdir() if not path.name.startswith(".tmp-")} - {".lock"}
    if "checkpoints" in entries and not any((folder / "checkpoints").iterdir()):
        entries.discard("checkpoints")
    if "metrics.jsonl" in entries or "checkpoints" in entries:
        return True
    return bool(entries) and read_status(folder).get("state") != "bad_input"


STATES = {BadInput: "bad_input", StoppedByGuard: "stopped_by_guard", Preempted: "preempted"}


class RunStatus:
    """`status.json` of a run that is going on; see `run_status`.

    details: stands in the file at its end, as `step` and `ended_by`, see `toolkit.runs.ending`.
    """

    def __init__(self, folder: Path, is_main: bool):
        self.folder, self.is_main, self.details = folder, is_main, {}
        # A folder in which an earlier run left its word keeps it until this one has really begun.
        self.begun = not holds_a_run(folder)

    def begin(self, trains: bool = True) -> None:
        """Everything is there, and nothing was refused: the run goes on from here.

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
    """Keeps `status.json` true: running while the block runs, then done or why not; the main process writes.

    A start that is refused before `begin` leaves the `status.json` of an earlier run in the folder as it is.
    """
    status = RunStatus(folder, is_main)
    status.write("running")
    try:
        yield status
    except BaseException as error:  # whatever ends the run is recorded, and goes on its way
        state = next((state for kind, state in STATES.items() if isinstance(error, kind)), "failed")
        try:
            status.write(state, str(error) or type(error).__name__)
        except OSError as unwritable:  # a full disk must not hide the error that ended the run
            warnings.warn(f"status.json could not be written: {unwritable}", stacklevel=2)
        raise
    status.write("done")
