"""Locks of programs that start trainings, so that several of them, or one after a kill, do not disturb each other."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from toolkit.base.signals import StopSignals
from toolkit.run.status import LOCK_FILE
from toolkit.tools.watch import POLL_S


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Return a context in which this process holds the lock of the file `path`, and whose value is True. If another
    process holds the lock, wait for it; without `wait`, run the block without the lock, with the value False.

    The kernel releases the lock when the process dies.
    """
    with ExitStack() as held:
        try:
            held.enter_context(FileLock(path, timeout=-1 if wait else 0, thread_local=False, fallback_to_soft=False))
        except Timeout:
            yield False
            return
        yield True


def wait_until_free(folder: Path, signals: StopSignals) -> None:
    """Wait until no process trains in the run folder any more. A training can outlive the killed program that watched
    it; it ends by itself, and what it saves is used. Stop waiting when a signal arrives."""
    announced = False
    while (folder / LOCK_FILE).exists() and not signals.received:
        with locked(folder / LOCK_FILE, wait=False) as free:
            if free:
                return
        if not announced:
            print(f"{folder.name} is still being trained by a process that was left behind; waiting", flush=True)
        announced = True
        time.sleep(POLL_S)
