"""Failures around a training: optional parts cost one line when they fail, errors of the system become sentences."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.base.errors import BadInput, sentence

ERRORS = "errors.log"
GO_ON = "Then go on with --run.resume latest; earlier checkpoints are untouched."


@contextmanager
def as_sentences(then: str = GO_ON) -> Iterator[None]:
    """Turn errors of the file system inside the block, and memory that runs out, into sentences.

    Args:
        then: sentence that ends each of them: what a person does once the cause is gone.

    Raises:
        BadInput: one of these errors.
    """
    try:
        yield
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        problem = sentence(error)
        if problem is None:
            raise
        raise BadInput(f"{problem} {then}".rstrip()) from error


def attempt(what: str, function: Callable[[], Any], folder: Path, say: Callable[[str], None]) -> Any:
    """Call `function` and return its result; an exception costs one line, and its traceback goes to `errors.log`."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  pictures, reports and trackers never end a training
        note_traceback(folder, what)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        say(f"warning: {what} failed, and the run goes on without ({reason}). {folder / ERRORS} has the traceback.")
        return None


def note_traceback(folder: Path, what: str) -> None:
    """Add the exception under way to `errors.log`, if that can be written."""
    try:
        with open(folder / ERRORS, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {what}\n{traceback.format_exc()}\n")
    except OSError:
        return
