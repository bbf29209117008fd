"""scripts/runs/until_done.sh starts a run again while that helps, and ends when it is told to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fcntl", reason="a shell script: not on Windows")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "runs" / "until_done.sh"

# A run that notes each of its starts and does what its plan says of it: "state code [checkpoint]", or waits.
RUN = """
import json, os, signal, sys, time
from pathlib import Path
folder, plan = Path(sys.argv[1]), sys.argv[2].split(",")
assert sys.argv[3:] == ["--run.resume", "latest"]
starts = folder / "starts"
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))

def status(state):
    (folder / ".tmp").write_text(json.dumps({"state": state, "time": time.time()}, indent=2))
    os.replace(folder / ".tmp", folder / "status.json")

words = plan[min(number, len(plan) - 1)].split()
if words[0] == "wait":
    def stop(number, frame):
        print("saving", flush=True)
        (folder / "saved").read_bytes()  # a pipe: until the test has looked
        status("preempted")
        (folder / f"stopped_by_{number}").write_text("")
        os._exit(85)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    status("running")
    print("waiting", flush=True)
    signal.pause()
state, code, *checkpoint = words
if state != "-":
    status(state)
if checkpoint:
    link = folder / "checkpoints" / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint[0])
sys.exit(int(code))
"""


def command(folder: Path, plan: str, *launcher) -> list[str]:
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "run.py").write_text(RUN)
    return [str(part) for part in (SCRIPT, folder, *launcher, sys.executable, folder / "run.py", folder, plan)]


def until_done(folder: Path, plan: str) -> tuple[int, int]:
    """(exit code, starts)"""
    done = subprocess.run(command(folder, plan), capture_output=True)
    return done.returncode, len((folder / "starts").read_text())


@pytest.mark.parametrize(
    ("plan", "code", "starts"),
    [
        ("done 0", 0, 1),
        ("preempted 85 step_1,failed 1 step_2,done 0", 0, 3),
        ("failed 1,failed 1,failed 1 step_1,failed 1,preempted 85,done 0 step_2", 0, 6),
        ("preempted 1 step_1,failed 1,failed 1,failed 1", 1, 4),
        ("bad_input 1", 2, 1),
        ("stopped_by_guard 1", 3, 1),
        ("preempted 85 step_1,- 2", 2, 2),
    ],
)
def test_it_starts_again_while_there_is_progress(tmp_path, plan, code, starts):
    assert until_done(tmp_path, plan) == (code, starts)


@pytest.mark.parametrize("earlier", ["preempted", "done", "running"])
def test_a_start_that_dies_before_training_does_not_loop(tmp_path, earlier):
    """What the status of an earlier start says is nothing about this one."""
    (tmp_path / "status.json").write_text(f'{{\n  "state": "{earlier}"\n}}')
    assert until_done(tmp_path, "- 1") == (1, 3)


# Hands no signal on, as the one of accelerate for one process.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.Popen(sys.argv[1:]).wait())"


@pytest.mark.parametrize(("name", "launcher"), [
    *[(name, ()) for name in ("SIGTERM", "SIGINT", "SIGUSR1")], ("SIGTERM", (sys.executable, "-c", LAUNCHER)),
])  # fmt: skip
def test_a_signal_reaches_the_run_which_saves_and_ends_both(tmp_path, name, launcher):
    os.mkfifo(tmp_path / "saved")
    number = getattr(signal, name)
    words, pipes = command(tmp_path, "wait", *launcher), {"stdout": subprocess.PIPE, "text": True}
    heeded = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL)}  # also where the tests run in the background
    with subprocess.Popen(words, start_new_session=True, **pipes, **heeded) as process:
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, number)  # to the script alone, as a batch system does
        assert process.stdout.readline() == "saving\n"
        assert process.poll() is None, "it waits for the run that saves"
        (tmp_path / "saved").write_text("go on")
        assert process.wait() == 85
    assert (tmp_path / f"stopped_by_{number.value}").exists()
    assert (tmp_path / "starts").read_text() == "x", "not started again"
