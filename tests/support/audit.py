"""What a program does to files, told by Python's audit events, in whatever library it is: before the n-th such call."""

import os
import sys
from collections.abc import Callable
from fnmatch import fnmatch

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"}


def written(event: str, arguments: tuple) -> str | None:
    """The path that an event creates, opens for writing, renames or removes; None: it is no such event."""
    if event not in CHANGES and (event != "open" or not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        return None
    if not isinstance(arguments[0], str | bytes | os.PathLike):  # a file that is open already
        return None
    path = os.fsdecode(arguments[0])
    return None if path.startswith(("/dev/", "/proc/")) else path


def at_events(at: str, act: Callable[[str], None]) -> None:
    """Calls `act(path)` before each event of a kind, "event pattern", whose path matches; "write pattern": `written`.

    Audit hooks stay as long as the process.
    """
    kind, _, pattern = at.partition(" ")

    def hook(event: str, arguments: tuple) -> None:
        path = written(event, arguments) if kind == "write" else str(arguments[0]) if event == kind else None
        if path is not None and fnmatch(path, pattern):
            act(path)

    sys.addaudithook(hook)
