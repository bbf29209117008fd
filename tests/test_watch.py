"""A training that a program starts and watches: it ends with that program, however that one ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

from toolkit.signals import stop_signals_raise

pytest.importorskip("fcntl", reason="POSIX signals: not on Windows")

PARENT = """
import sys
from pathlib import Path
from toolkit.runs.watch import WatchedRun
run = WatchedRun([sys.executable, "-c", "import signal; signal.pause()"], *map(Path, sys.argv[1:]))
print(run.process.pid, flush=True)
run.process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells a child of its parent's end on Linux only")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_training_ends_with_the_program_that_watches_it(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path, tmp_path / "output"], stdout=subprocess.PIPE)
    with parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
    select.select([child], [], [])  # until it has ended
    os.close(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_stopped_cleans_up(number):
    before, cleaned = signal.getsignal(number), []
    with pytest.raises(SystemExit) as end, stop_signals_raise():
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(number)
    assert end.value.code == 128 + number and cleaned and signal.getsignal(number) == before
