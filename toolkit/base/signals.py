"""Signals that ask a run to stop: recorded here, agreed on between the ranks, answered by a checkpoint."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK", "SIGINT")  # caught if the platform has them
# Some launchers forward one Ctrl-C although the terminal has sent it to the whole group already.
SAME_INTERRUPT_S = 0.25


class StopSignals:
    """A context that records SIGTERM, SIGUSR1 (Slurm's `--signal`), SIGHUP (a closed terminal) and SIGINT.

    The earlier handlers are restored on exit. A SIGHUP that is ignored already stays ignored: that is `nohup`.

        with StopSignals() as stop:
            for batch in loader:
                ...
                if agree_max(stop.received): ...   # goes into the step's one collective; save and leave

    `received` is the number of the first signal, 0 before there is one. A second SIGINT raises KeyboardInterrupt at
    once, wherever the program is. Outside the main thread, where Python allows no handlers, nothing is caught and
    `received` stays 0.
    """

    def __init__(self):
        self.received = 0
        self._interrupted_at: float | None = None
        self._previous: dict[int, object] = {}

    @property
    def name(self) -> str:
        """The name of the signal received, such as "SIGTERM"; "" if there was none."""
        return signal_name(self.received)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
            for number in numbers:
                under_nohup = signal_name(number) == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN
                if not under_nohup:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not set from Python, and cannot be restored from it either.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, number: int, frame) -> None:
        # Only assignments: a handler runs between any two bytecodes, also in the middle of a print.
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at >= SAME_INTERRUPT_S:
                raise KeyboardInterrupt
            self._interrupted_at = self._interrupted_at or now
        self.received = self.received or number


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM for 15; empty for 0; "signal N" for one without a name."""
    if not number:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Block SIGTERM in this thread, and in the threads and processes that it starts inside; deliver it here afterwards.

    Start DataLoader workers inside the block: before a worker calls `ignore_in_worker` it has started threads, such as
    those of OpenMP, and one of these would otherwise receive the signal and end the whole worker.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_in_worker(worker_id: int = 0) -> None:
    """Let a DataLoader worker outlive the signals that ask its trainer to stop; for `worker_init_fn`.

    Terminals and launchers signal the whole process group. If a worker ended then, the trainer would raise an error
    before it has written its checkpoint. SIGINT, SIGHUP and SIGUSR1 are ignored; SIGTERM ends the worker only if its
    own trainer has sent it, as DataLoader does to a worker that hangs. A worker whose trainer is gone is ended by
    DataLoader's watchdog.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where SIGTERM keeps torch's handler
        # Blocked in every thread, so that the thread that waits for it, and can see the sender, receives it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_trainer_asks, name="sigterm", daemon=True).start()


def _end_when_trainer_asks() -> None:
    trainer = multiprocessing.parent_process().pid  # not getppid(): under forkserver that is the server
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
