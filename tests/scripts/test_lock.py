"""A run has its folder to itself, as long as it lives and no longer."""

import os
import signal
import socket
import sys

from launching import finish, start


def test_a_second_run_is_refused_until_the_first_one_is_gone(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 1000, "--run.eval_every", 0, "--run.save_every", 1,
                    "--data.workers", 2)  # fmt: skip
    first = start([sys.executable, script.path, *args], {"PYTHONUNBUFFERED": "1"})
    try:
        for line in first.stdout:
            if "step 2/" in line:
                break
        for resume in ("never", "latest"):
            for alone in ("false", "true"):
                refused = server.run(script, [*args, "--run.resume", resume, "--run.eval_only", alone])
                assert refused.code == 2
                (said,) = (line for line in refused.text.splitlines() if "error:" in line)
                assert f"in use by process {first.pid} on {socket.gethostname()}, since 20" in said
                assert refused.status["state"] == "running" and first.poll() is None
        os.kill(first.pid, signal.SIGKILL)  # its workers outlive it for seconds, and must not hold the folder
        first.wait()
        short = ("--run.resume_schedule", "new", "--run.max_steps", "1")  # the saved length is 1000 epochs
        resumed = server.run(script, [*args, "--run.resume", "latest", *short]).ok()
        assert "Resuming from" in resumed.text and "in use" not in resumed.text
    finally:
        if first.poll() is None:
            finish(first, 1)
