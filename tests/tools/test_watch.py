"""A training that another program watches."""

import os
import select
import signal
import subprocess
import sys

import pytest

WATCHES = """
import sys
from pathlib import Path
from toolkit.tools.watch import WatchedRun
run = WatchedRun([sys.executable, "-c", "import signal; signal.pause()"], *map(Path, sys.argv[1:]))
print(run.process.pid, flush=True)
run.process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells a child of its parent's end on Linux only")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_training_ends_with_the_program_that_watches_it(tmp_path, number):
    command = [sys.executable, "-c", WATCHES, tmp_path, tmp_path / "output"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
    select.select([child], [], [])  # until it has ended
    os.close(child)
