"""Failures around a training: optional parts cost one line when they fail, errors of the system become sentences."""

import errno
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.errors import BadInput

ERRORS = "errors.log"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on that disk (space, or inodes: `df -h` and `df -i`)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it readable and writable, or give another place"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (`ulimit -n`), or lower data.workers"),
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EFBIG: "that file system or `ulimit -f` takes no larger files; give another place",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV), "the disk or its server fails; look at it"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), "it was removed or replaced; put it back"),
}


def sentence(error: OSError) -> BadInput | None:
    """An error of the file system in one sentence with what to do; None for other errors of the system."""
    if error.errno not in _ADVICE:
        return None
    place = f"{error.filename}: " if error.filename else ""
    shown = place if len(place) < 200 else f"{place[:80]}… ({len(place)} characters): "
    return BadInput(
        f"{shown}{os.strerror(error.errno)}. What is to be done: {_ADVICE[error.errno]}, then go on with "
        "--run.resume latest; earlier checkpoints are untouched."
    )


@contextmanager
def as_sentences() -> Iterator[None]:
    """Turns errors of the file system inside the block into sentences. Raises BadInput."""
    try:
        yield
    except OSError as error:
        told = sentence(error)
        if told is None:
            raise
        raise told from error


def attempt(what: str, function: Callable[[], Any], folder: Path, say: Callable[[str], None]) -> Any:
    """What `function` returns; whatever it raises costs one line, and its traceback goes to `errors.log`."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  pictures, reports and trackers never end a training
        note_traceback(folder, what)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        say(f"warning: {what} failed, and the run goes on without ({reason}). {folder / ERRORS} has the traceback.")
        return None


def note_traceback(folder: Path, what: str) -> None:
    """Adds the exception under way to `errors.log`, if that can be written."""
    try:
        with open(folder / ERRORS, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {what}\n{traceback.format_exc()}\n")
    except OSError:
        return
