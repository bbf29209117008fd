"""Runs a script that is signalled at a moment of its start: `signalled.py MOMENT WHOM SIGNALS SCRIPT ARGS`.

WHOM: launcher, group (of the launcher) or rank (the last one). SIGNALS: names, sent 0.3 s apart.
"""

import os
import runpy
import signal
import sys
import time
from itertools import count
from pathlib import Path

from audit import at_events

# The lock is touched, opened, and written to once it is held.
MOMENTS = {
    "imports": ("import torch.nn", 1),
    "before the lock": ("write */.lock", 1),
    "with the lock": ("write */.lock", 3),
}


def send(whom: str, signals: list[str]) -> None:
    import psutil

    launcher = os.getppid()
    ranks = [rank.pid for rank in psutil.Process(launcher).children()]
    target = {"launcher": launcher, "group": -os.getpgid(launcher), "rank": ranks[-1]}[whom]
    print(f"signalled: {signals} to {whom}", flush=True)
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()  # out of the group
    for name in signals:
        os.kill(target, getattr(signal, name))
        time.sleep(0.3)
    os._exit(0)


if __name__ == "__main__":
    moment, whom, signals, script, *arguments = sys.argv[1:]
    at, call = MOMENTS[moment]
    if os.environ.get("RANK", "0") == "0":
        calls = count(1)
        at_events(at, lambda path: next(calls) == call and send(whom, signals.split()))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
