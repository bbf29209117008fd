"""Stop signals are noted, a second Ctrl-C is not, and DataLoader workers outlive both."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
from places import SUPPORT

from toolkit.base import signals
from toolkit.base.signals import StopSignals, signal_name

pytest.importorskip("fcntl", reason="POSIX signals: not on Windows")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_noted_and_handlers_come_back(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with pytest.raises(ZeroDivisionError), StopSignals() as stop:
        assert (stop.received, stop.name) == (0, "")
        signal.raise_signal(number)
        assert (stop.received, stop.name) == (number, name)
        signal.raise_signal(signal.SIGTERM)
        assert stop.name == name  # the first one is the reason
        raise ZeroDivisionError
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, ""),
        (15, "SIGTERM"),
        (10_000, "signal 10000"),
    ],
)
def test_names_of_signals(number, name):
    assert signal_name(number) == name


@pytest.mark.parametrize(
    ("first", "apart_s", "raises"),
    [("SIGINT", 0.0, True), ("SIGINT", 3600.0, False), ("SIGTERM", 0.0, False)],
)
def test_a_second_interrupt_stops_at_once(monkeypatch, first, apart_s, raises):
    """One that is delivered twice is one, and launchers send SIGTERM and SIGINT on one Ctrl-C."""
    monkeypatch.setattr(signals, "SAME_INTERRUPT_S", apart_s)
    with StopSignals() as stop:
        signal.raise_signal(getattr(signal, first))
        with pytest.raises(KeyboardInterrupt) if raises else nullcontext():
            signal.raise_signal(signal.SIGINT)
        assert stop.name == first


def test_outside_the_main_thread_nothing_is_caught():
    before = signal.getsignal(signal.SIGTERM)
    inside = []

    def run():
        with StopSignals() as stop:
            inside.append((signal.getsignal(signal.SIGTERM), stop.received))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [(before, 0)]


def test_workers_outlive_signals_to_the_group_but_not_their_trainer():
    command = [sys.executable, SUPPORT / "signalled_loader.py"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as trainer:
        assert trainer.stdout.readline() == "signal me\n", trainer.stderr.read()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.killpg(trainer.pid, number)
        out, err = trainer.communicate("go on\n")
    assert out == "read all\nworker ended with 0\n", err
    assert "Traceback" not in err
