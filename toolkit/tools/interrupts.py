"""Signals in the programs beside training, which write no checkpoint before they end."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """Let Ctrl-C inside the block end the process as the system does it, not by a KeyboardInterrupt.

    Long calls of compiled code delay a KeyboardInterrupt. This applies in the main thread, if the signal has no other
    handler.
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
    """Let SIGTERM and SIGHUP inside the block raise SystemExit with 128 + their number, so that the program cleans up.

    For programs whose trainings end with them. In the main thread; elsewhere nothing changes.
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
