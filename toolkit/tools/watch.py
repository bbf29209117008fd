"""Runs a training script as a separate process, reads the rows that it writes, and finds its settings."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.text import shown
from toolkit.run.metrics_log import MetricsFollower
from toolkit.run.status import read_status

POLL_S = 0.5
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
STOP_S = 120  # a process that was asked to stop saves its state first
# Only steps: no evaluation, checkpoint or tracker, and no settings that depend on the length of the training.
STEPS_ALONE = (
    "run.max_minutes=null run.log_every=1 run.eval_every=0 run.save_every=0 run.tracker=none run.resume=never "
    "run.on_nonfinite=stop run.epochs=100000 data.plain_epochs=0 eval.before_training=false run.export=false"
)


class WatchedRun:
    """A training in a separate process.

    Args:
        command: the words of the command.
        folder: the run folder of the training.
        output: file to which the output of the process is appended.
        environment: environment variables in addition to those of this process.
        limit: function that is called in the new process before the command, for example to limit its memory.

    When the calling thread ends, for whatever reason, the training is ended too: on Linux, the system sends it SIGTERM,
    so that it saves its state.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        output: Path,
        environment: Mapping | None = None,
        limit: Callable[[], None] | None = None,
    ):
        self.folder = Path(folder)
        self.output = Path(output)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        system = ctypes.CDLL(None) if sys.platform == "linux" else None
        parent = os.getpid()
        group = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}  # Windows

        def begin() -> None:
            if system is not None:
                system.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != parent:  # the parent has ended already
                    os.kill(os.getpid(), signal.SIGTERM)
            if limit is not None:
                limit()

        with open(self.output, "ab") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}),
                **({"start_new_session": True, "preexec_fn": begin} if os.name == "posix" else group),
            )

    def rows(self, stop: Callable[[], object] = lambda: False) -> Iterator[dict]:
        """Yield each row of metrics.jsonl once, as it is written, until the process has ended or `stop` returns true.

        Rows of an earlier start of the run come first.
        """
        seen = set()
        with closing(MetricsFollower(self.folder / "metrics.jsonl")) as file:
            while True:
                over = self.process.poll() is not None  # checked first, so that rows written before the end are read
                for row in file.new_rows():
                    key = (row["step"], frozenset(row))  # a resumed run writes some again, with the same numbers
                    if key not in seen:
                        seen.add(key)
                        yield row
                if over or stop():
                    return
                time.sleep(POLL_S)

    def stop(self, saving: bool = True) -> int:
        """Stop the process and return its exit code.

        saving: True: ask the process to save its state and end, and kill it after `STOP_S` seconds; False: kill it.
        """
        posix = os.name == "posix"
        if saving and self.process.poll() is None:
            self._send(signal.SIGTERM if posix else signal.CTRL_BREAK_EVENT)
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(STOP_S)
        if self.process.poll() is None:
            self._send(signal.SIGKILL if posix else signal.SIGTERM)  # on Windows SIGTERM kills
        return self.process.wait()

    def _send(self, number: int) -> None:
        os.killpg(self.process.pid, number) if os.name == "posix" else self.process.send_signal(number)

    @property
    def state(self) -> str:
        """The state of the run in `status.json`; "failed" if that file is missing."""
        return read_status(self.folder).get("state", "failed")

    def last_words(self, lines: int = 5) -> str:
        """Return the last `lines` lines of the output."""
        return "\n".join(self.output.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def steps_alone(script: Path, arguments: Sequence[str], folder: Path, steps: int, settings: Mapping) -> list[str]:
    """Return the command that only trains for a number of steps, without evaluations, checkpoints and trackers.

    Args:
        script, arguments: the training script and its arguments.
        folder: the run folder.
        steps: number of optimizer steps.
        settings: values by key, such as "optim.lr", that override those in `arguments`.
    """
    required = {"run.output_dir": folder.parent, "run.name": folder.name, "run.max_steps": steps}
    alone = dict(word.split("=") for word in STEPS_ALONE.split())
    flags = [f"--{key}={value}" for key, value in {**alone, **required, **settings}.items()]
    return [sys.executable, str(script), *arguments, *flags]


def resolved_settings(script: Path, arguments: Sequence[str]) -> dict:
    """Return the settings of a training script with these arguments, as nested dicts.

    Raises BadInput if there is no such script or it prints no settings, and with the message of the script if the
    script refuses the arguments.
    """
    if not Path(script).is_file():
        raise BadInput(f"{shown(script)}: no such training script; expected a file such as scripts/train_detr.py")
    command = [sys.executable, str(script), *arguments, "--print_config"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BadInput((ended.stderr or ended.stdout).strip() or f"{script} ended with {ended.returncode}")
    try:
        settings = yaml.safe_load(ended.stdout)
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict) or not {"data", "optim"} <= settings.keys():
        raise BadInput(f"{script}: prints no settings for --print_config; expected a training script")
    return settings
