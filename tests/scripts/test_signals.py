"""Signals end a run with a checkpoint, on all ranks though one got it; resumed it equals the uninterrupted run."""

import json
import os
import signal
import socket
import sys
import time

import psutil
import pytest
from launching import EVALUATION, MICRO_BATCH, REPORT, TORCHRUN, assert_same_run, finish, rows, run_folder, start
from places import SUPPORT
from signalled import MOMENTS

from toolkit.run.folder import prepare_run_folder
from toolkit.run.status import FolderLock, read_status

STOP = "toolkit.run.session:Session.stop_if_asked"
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
        assert f"fault: {name}" in stopped.text and "Traceback" not in stopped.text, stopped.text
        assert stopped.code == 85, stopped.text
        assert (stopped.status["state"], stopped.status["step"]) == ("preempted", step), stopped.text
        assert (stopped.folder / "checkpoints" / "latest").resolve().name == f"step_{step:06d}"
    assert_same_run(server.run(script, args, processes).ok().folder, reference)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_during_the_imports_is_the_default_death(script, settings, tmp_path, name):
    """Nothing has begun, so nothing is written, and what an earlier run says of itself stays."""
    status = tmp_path / "run" / "status.json"
    status.parent.mkdir()
    status.write_text('{"state": "preempted"}')
    args = settings("--run.output_dir", tmp_path, "--run.resume", "latest")
    process = start([sys.executable, "-X", "importtime", script.path, *args])
    assert any("torch." in line for line in process.stdout), "torch, of which a part is imported now, takes a second"
    os.kill(process.pid, getattr(signal, name))
    code, text = finish(process)
    assert code in (-getattr(signal, name), 130), text
    assert list(status.parent.iterdir()) == [status] and status.read_text() == '{"state": "preempted"}'


LAUNCHERS = {"accelerate launch": ["accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1",
                                   "--mixed_precision", "no", "--dynamo_backend", "no"],
             "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"]}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("whom", "signals"), [("launcher", "SIGTERM"), ("group", "SIGTERM"), ("rank", "SIGTERM"),
                                               ("group", "SIGINT SIGINT")])  # fmt: skip
def test_a_signal_in_the_first_seconds(script, settings, tmp_path, launcher, moment, whom, signals):
    """Through the real launchers: no process is left, what an earlier run says of itself stays, and the folder can be
    used at once. Accelerate's launcher hands no signal on."""
    status = tmp_path / "run" / "status.json"
    status.parent.mkdir()
    status.write_text('{"state": "preempted"}')
    args = settings("--run.output_dir", tmp_path, "--run.resume", "latest", "--run.max_steps", 1, "--run.eval_every", 0)
    wrapper = [SUPPORT / "signalled.py", moment, whom, signals, script.path]
    code, text = finish(start([sys.executable, "-m", *LAUNCHERS[launcher], *wrapper, *args]))  # all of its processes
    goes_on = (launcher, whom) == ("accelerate launch", "launcher")
    assert f"to {whom}" in text and code != 0, text
    assert read_status(status.parent)["state"] == ("done" if goes_on else "preempted"), text
    with FolderLock() as lock:
        prepare_run_folder(tmp_path, "run", "latest", lock)


@pytest.mark.slow
def test_of_two_real_launches_in_one_folder_one_trains(script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.resume", "latest", "--run.epochs", 1000, "--run.eval_every", 0)
    command = [sys.executable, "-m", *LAUNCHERS["accelerate launch"], script.path, *args]
    both = [start(command) for _ in range(2)]
    while all(launch.poll() is None for launch in both):
        time.sleep(0.05)
    refused, trains = sorted(both, key=lambda launch: launch.poll() is None)
    code, text = finish(refused)
    assert code == 1 and "in use by process" in text, text
    os.killpg(trains.pid, signal.SIGTERM)
    code, text = finish(trains)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 85), text


def test_second_interrupt_stops_at_once(server, script, settings, tmp_path):
    faults = [
        {"signal": "SIGINT", "at": MICRO_BATCH, "call": 3},
        {"signal": "SIGINT", "at": "toolkit.run.recovery:RunGuard.accepts", "call": 3, "wait_s": 0.3},
    ]
    ended = server.run(script, settings("--run.output_dir", tmp_path), 1, faults)
    assert (ended.code, ended.status["state"]) == (130, "failed")
    assert [row["step"] for row in rows(ended.folder)] == [1, 2]
    assert not (ended.folder / "checkpoints" / "latest").exists()


def to_a_rank(sent: signal.Signals, file):
    """What sends a signal to the last rank below a launcher, once the run has written a file."""

    def send(pids: list[int]) -> None:
        agent = psutil.Process(pids[0])
        while agent.status() != psutil.STATUS_ZOMBIE and not (file.exists() and file.stat().st_size):
            time.sleep(0.02)
        os.kill(agent.children()[-1].pid, sent)

    return send


def test_a_signal_to_one_rank_under_a_launcher_is_told_in_status(server, script, settings, tmp_path):
    """torchrun flattens the exit code."""
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 1000, "--run.eval_every", 0)
    meanwhile = to_a_rank(signal.SIGUSR1, tmp_path / "run" / "metrics.jsonl")
    ended = server.run(TORCHRUN, ["2,0", script.path, *args], faults=[{"skip": REPORT}], meanwhile=meanwhile)
    assert ended.code == 1 and (ended.status["state"], ended.status["exit_code"]) == ("preempted", 85), ended.text
    latest = (ended.folder / "checkpoints" / "latest").resolve().name
    assert latest == f"step_{ended.status['step']:06d}" == f"step_{rows(ended.folder)[-1]['step']:06d}"


@pytest.mark.slow
def test_a_killed_rank_restarts_the_job_from_the_newest_checkpoint(server, script, resumable):
    """`torchrun --max-restarts`: it costs the steps since then, and nothing else."""
    args, reference = resumable(2)
    args = [*args, "--run.name", "elastic"]
    meanwhile = to_a_rank(signal.SIGKILL, run_folder(args) / "checkpoints" / "latest")
    ended = server.run(TORCHRUN, ["2,2", script.path, *args], meanwhile=meanwhile).ok()
    assert ended.text.count("Resuming from") == 1, ended.text
    assert ended.status["state"] == "done"
    assert_same_run(ended.folder, reference)


def test_a_closed_terminal_ends_a_run_with_85(hangups, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 1000, "--run.eval_every", 0)
    process = start([sys.executable, script.path, *args], {"PYTHONUNBUFFERED": "1"})
    assert any("step 2/" in line for line in process.stdout)
    process.stdout.close()
    os.kill(process.pid, signal.SIGHUP)
    assert finish(process)[0] == 85
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 85)


def test_a_second_run_is_refused_until_the_first_one_is_gone(server, script, settings, tmp_path):
    """A run has its folder to itself, as long as it lives and no longer."""
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 1000, "--run.eval_every", 0, "--run.save_every", 1,
                    "--data.workers", 2)  # fmt: skip
    first = start([sys.executable, script.path, *args], {"PYTHONUNBUFFERED": "1"})
    try:
        assert any("step 2/" in line for line in first.stdout)
        for more in (["--run.resume", "never"], ["--run.resume", "latest", "--run.eval_only", "true"]):
            refused = server.run(script, [*args, *more])
            assert refused.code == 2
            (error,) = (line for line in refused.text.splitlines() if "error:" in line)
            assert f"in use by process {first.pid} on {socket.gethostname()}, since 20" in error
            assert refused.status["state"] == "running" and first.poll() is None
        first.kill()  # its workers outlive it for seconds, and must not hold the folder
        first.wait()
        short = ("--run.resume_schedule", "new", "--run.max_steps", "1")  # the saved length is 1000 epochs
        resumed = server.run(script, [*args, "--run.resume", "latest", *short]).ok()
        assert "Resuming from" in resumed.text and "in use" not in resumed.text
    finally:
        if first.poll() is None:
            finish(first, 1)
