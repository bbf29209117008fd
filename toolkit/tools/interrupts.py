"""Handles signals in the programs other than training, which save nothing before they end."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once in a `with` block, instead of raising KeyboardInterrupt.

    A KeyboardInterrupt would be delayed by long calls of compiled code. This has an effect in the main thread only, and
    only if the signal has no other handler.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit with 128 + their number in a `with` block, so that the program cleans up.

    This is for programs that start trainings, which must end with the program. It has an effect in the main thread
    only.
    """

    def leave(number: int, frame) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    in_main_thread = threading.current_thread() is threading.main_thread()
    unhandled = [number for number in numbers if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, leave) for number in unhandled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
