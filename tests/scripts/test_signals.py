"""Signals end a run with a checkpoint, on all ranks though one got it; resumed it equals the uninterrupted run."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import REPORT, assert_same_run, finish, rows, start

MICRO_BATCH, EVALUATION = "toolkit.training:Training.seed_micro_batch", "toolkit.evaluation.predict_dataset:agree_max"
STOP = "toolkit.session:stop_if_asked"
TORCHRUN = Path(__file__).with_name("torchrun_forked.py")
SENT = (  # one run after the other, each going on where the one before stopped: step it stops at
    ("SIGTERM", MICRO_BATCH, 2, 1),
    ("SIGUSR1", EVALUATION, 3, 2),
    ("SIGTERM", EVALUATION, 10, 4),  # the evaluation at step 2 is done again first
    ("SIGINT", MICRO_BATCH, 2, 5),
    ("SIGTERM", STOP, 3, 6),  # the last evaluation is over, and is not done again
    ("SIGTERM", STOP, 5, 6),  # final/ and the report are written
)


@pytest.mark.slow  # seven runs; those below are always run
@pytest.mark.parametrize("processes", [1, 2])
def test_signal_on_one_rank_saves_and_the_run_goes_on_to_the_bit(server, script, resumable, processes):
    args, reference = resumable(processes)
    args = [*args, "--run.name", "signalled"]
    for name, at, call, step in SENT:
        fault = {"signal": name, "at": at, "call": call, "rank": processes - 1}
        stopped = server.run(script, args, processes, [fault])
        assert f"fault: {name}" in stopped.text, stopped.text
        assert stopped.code == 85, stopped.text
        assert (stopped.status["state"], stopped.status["step"]) == ("preempted", step), stopped.text
        assert (stopped.folder / "checkpoints" / "latest").resolve().name == f"step_{step:06d}"
        assert "Traceback" not in stopped.text
    assert_same_run(server.run(script, args, processes).ok().folder, reference)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_during_the_imports_is_the_default_death(script, settings, tmp_path, name):
    """Nothing has begun, so nothing is written, and what an earlier run says of itself stays."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "status.json").write_text('{"state": "preempted"}')
    args = settings("--run.output_dir", tmp_path, "--run.resume", "latest")
    process = start([sys.executable, "-X", "importtime", script.path, *args])
    assert any("torch." in line for line in process.stdout), "torch, of which a part is imported now, takes a second"
    os.kill(process.pid, getattr(signal, name))
    code, text = finish(process)
    assert code in (-getattr(signal, name), 130), text
    assert [path.name for path in folder.iterdir()] == ["status.json"]
    assert (folder / "status.json").read_text() == '{"state": "preempted"}'


def test_second_interrupt_stops_at_once(server, script, settings, tmp_path):
    faults = [
        {"signal": "SIGINT", "at": MICRO_BATCH, "call": 3},
        {"signal": "SIGINT", "at": "toolkit.training:Training.decide", "call": 3, "wait_s": 0.3},
    ]
    ended = server.run(script, settings("--run.output_dir", tmp_path), 1, faults)
    assert ended.code == 130
    assert ended.status["state"] == "failed"
    assert [row["step"] for row in rows(ended.folder)] == [1, 2]
    assert not (ended.folder / "checkpoints" / "latest").exists()


def test_a_signal_to_one_rank_under_a_launcher_is_told_in_status(server, script, settings, tmp_path):
    """torchrun flattens the exit code."""
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 1000, "--run.eval_every", 0)
    written = tmp_path / "run" / "metrics.jsonl"

    def signal_a_rank(pids: list[int]) -> None:
        agent = psutil.Process(pids[0])
        while agent.status() != psutil.STATUS_ZOMBIE and not (written.exists() and "\n" in written.read_text()):
            time.sleep(0.02)
        os.kill(agent.children()[-1].pid, signal.SIGUSR1)

    ended = server.run(TORCHRUN, ["2,0", script.path, *args], faults=[{"skip": REPORT}], meanwhile=signal_a_rank)
    assert ended.code == 1 and (ended.status["state"], ended.status["exit_code"]) == ("preempted", 85), ended.text
    latest = (ended.folder / "checkpoints" / "latest").resolve().name
    assert latest == f"step_{ended.status['step']:06d}" == f"step_{rows(ended.folder)[-1]['step']:06d}"


def test_a_closed_terminal_ends_a_run_with_85(script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 1000, "--run.eval_every", 0)
    process = start([sys.executable, script.path, *args], {"PYTHONUNBUFFERED": "1"})
    assert any("step 2/" in line for line in process.stdout)
    process.stdout.close()
    os.kill(process.pid, signal.SIGHUP)
    assert finish(process)[0] == 85
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 85)
