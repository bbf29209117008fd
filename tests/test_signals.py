"""Stop signals are noted, a second Ctrl-C is not, and DataLoader workers outlive both."""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch

from toolkit.base import signals
from toolkit.base.signals import StopSignals, ignore_in_worker, signal_name, sigterm_held_back
from toolkit.tools.interrupts import stop_signals_raise

pytest.importorskip("fcntl", reason="POSIX signals: not on Windows")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_noted_and_handlers_come_back(name):
    before = signal.getsignal(getattr(signal, name))
    with pytest.raises(ZeroDivisionError), StopSignals() as stop:
        assert stop.received == 0 and stop.name == ""
        signal.raise_signal(getattr(signal, name))
        assert stop.received == getattr(signal, name) and stop.name == name
        signal.raise_signal(signal.SIGTERM)
        assert stop.name == name  # the first one is the reason
        raise ZeroDivisionError
    assert signal.getsignal(getattr(signal, name)) is before
    assert [signal_name(n) for n in (0, 15, 10_000)] == ["", "SIGTERM", "signal 10000"]


@pytest.mark.parametrize(("first", "apart", "raises"), [("SIGINT", True, True), ("SIGINT", False, False),
                                                        ("SIGTERM", True, False)])  # fmt: skip
def test_a_second_interrupt_stops_at_once(monkeypatch, first, apart, raises):
    """One that is delivered twice is one, and launchers send SIGTERM and SIGINT on one Ctrl-C."""
    monkeypatch.setattr(signals, "SAME_INTERRUPT_S", 0.0 if apart else 3600.0)
    with StopSignals() as stop:
        signal.raise_signal(getattr(signal, first))
        with pytest.raises(KeyboardInterrupt) if raises else nullcontext():
            signal.raise_signal(signal.SIGINT)
        assert stop.name == first


def test_outside_the_main_thread_nothing_is_caught():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def run():
        with StopSignals() as stop:
            inside.append((signal.getsignal(signal.SIGTERM), stop.received))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [(before, 0)] and signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_ends_a_process_that_would_swallow_it():
    code = """
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
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


PARENT = """
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
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path, tmp_path / "output"], stdout=subprocess.PIPE)
    with parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
    select.select([child], [], [])  # until it has ended
    os.close(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_stopped_cleans_up(hangups, number):
    before, cleaned = signal.getsignal(number), []
    with pytest.raises(SystemExit) as end, stop_signals_raise():
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(number)
    assert end.value.code == 128 + number and cleaned and signal.getsignal(number) == before


def read_all_despite_signals() -> None:
    """Be signalled as a group, as terminals and torchrun do it, in the middle of an epoch; then read on to its end."""
    torch.set_num_threads(2)
    torch.ones(100_000).mul(2)  # starts the threads of OpenMP, which a worker then has too
    loader = torch.utils.data.DataLoader(range(40), batch_size=2, num_workers=2, worker_init_fn=ignore_in_worker)
    read = []
    with StopSignals() as stop:
        with sigterm_held_back():
            batches = iter(loader)
        for number, batch in enumerate(batches):
            read += batch.tolist()
            if number == 3:
                print("signal me", flush=True)
                sys.stdin.readline()
    assert stop.name in ("SIGTERM", "SIGUSR1", "SIGINT") and read == list(range(40))
    print("read all", flush=True)

    # A worker that hangs is still ended by its own trainer's SIGTERM.
    with sigterm_held_back():
        iterator = iter(loader)
    next(iterator)
    worker = iterator._workers[0]
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0, worker.exitcode
    print("worker ended", flush=True)


def test_workers_outlive_signals_to_the_group_but_not_their_trainer():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, __file__], **pipes, text=True, start_new_session=True) as trainer:
        assert trainer.stdout.readline() == "signal me\n", trainer.stderr.read()
        for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
            os.killpg(trainer.pid, getattr(signal, name))
        out, err = trainer.communicate("go on\n")
    assert out.split() == ["read", "all", "worker", "ended"], err
    assert "Traceback" not in err


if __name__ == "__main__":
    read_all_despite_signals()
