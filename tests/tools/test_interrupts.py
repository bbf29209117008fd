"""Ctrl-C and stop signals in programs that do not train."""

import os
import signal
import subprocess
import sys

import pytest

from toolkit.tools.interrupts import stop_signals_raise

SWALLOWS = """
import signal
from toolkit.tools.interrupts import interrupt_ends_at_once
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupt_ends_at_once():
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
with interrupt_ends_at_once():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("swallowed")
"""


def test_ctrl_c_ends_a_process_that_would_swallow_it():
    ended = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_stopped_cleans_up(hangups, number):
    before = signal.getsignal(number)
    cleaned = []
    with pytest.raises(SystemExit) as end, stop_signals_raise():
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(number)
    assert end.value.code == 128 + number
    assert cleaned
    assert signal.getsignal(number) == before
