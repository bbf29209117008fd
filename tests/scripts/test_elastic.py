"""`torchrun --max-restarts`: a rank that is killed costs the steps since the newest checkpoint, and nothing else."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from launching import assert_same_run, run_folder

TORCHRUN = Path(__file__).with_name("torchrun_forked.py")


@pytest.mark.slow
def test_a_killed_rank_restarts_the_job_from_the_newest_checkpoint(server, script, resumable):
    args, reference = resumable(2)
    args = [*args, "--run.name", "elastic"]
    checkpoints = run_folder(args) / "checkpoints"

    def kill_a_rank(pids: list[int]) -> None:
        until = time.monotonic() + 120
        while not (checkpoints / "latest").exists() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(psutil.Process(pids[0]).children()[-1].pid, signal.SIGKILL)

    ended = server.run(TORCHRUN, ["2,2", script.path, *args], meanwhile=kill_a_rank).ok()
    assert ended.text.count("Resuming from") == 1, ended.text
    assert ended.status["state"] == "done"
    assert_same_run(ended.folder, reference)
