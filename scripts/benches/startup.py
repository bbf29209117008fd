"""Seconds from `python scripts/train_*.py` to the first optimizer step, on the bundled data with the defaults."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from toolkit.tools.shapes import ensure_shapes

from .measuring import medians

SCRIPTS = Path(__file__).resolve().parents[1]
NAMES = ("train_faster_rcnn", "train_detr")  # that of `make train`, and one that imports transformers


class Moment(NamedTuple):
    """A moment of a start: seconds since the launch, and the processor's seconds of all its processes until then."""

    wall_s: float
    processor_s: float


def bench_startup(repeats: int = 3, names: Sequence[str] = NAMES, options: Sequence[str] = ()) -> list[dict]:
    """Measure the seconds until the first step: medians over `repeats` starts of each script, in turn, after one that
    is not counted, which fills the caches of disk, data and Python.

    names: scripts, without ".py". options: further arguments of the scripts.

    Rows of each script: until the run folder is made (imports and settings), from there to the first row of
    metrics.jsonl (data, model, loader processes, the step itself), both together, and the processor's seconds of both.
    The last of these says more where other programs run on the machine.
    """
    ensure_shapes()
    starts = {name: [] for name in names}
    for _ in range(repeats + 1):
        for name in names:
            starts[name].append(_first_step(SCRIPTS / f"{name}.py", options))
    rows = []
    for name, (_, *counted) in starts.items():
        measured = {
            "until the run folder is made": ("s", [made.wall_s for made, _ in counted]),
            "from there to the first step": ("s", [stepped.wall_s - made.wall_s for made, stepped in counted]),
            "launch to first step": ("s", [stepped.wall_s for _, stepped in counted]),
            "until the run folder is made, processor": ("s", [made.processor_s for made, _ in counted]),
            "launch to first step, processor": ("s", [stepped.processor_s for _, stepped in counted]),
        }
        rows += medians(f"start, {name}, ", measured)
    return rows


def _first_step(script: Path, options: Sequence[str]) -> tuple[Moment, Moment]:
    """Measure the moments when status.json and the first row of metrics.jsonl are there."""
    with tempfile.TemporaryDirectory() as output_dir, tempfile.TemporaryFile("w+") as printed:
        folder = Path(output_dir) / "start"
        settings = "--run.name start --run.max_steps 1 --run.log_every 1".split()
        command = [sys.executable, str(script), "--run.output_dir", output_dir, *settings, *options]
        without = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PYTHONDONTWRITEBYTECODE")  # bytecode is there, as for a user
        environment = {name: v for name, v in os.environ.items() if name not in without}
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment)
        try:
            moments = [_when(folder / name, process, began) for name in ("status.json", "metrics.jsonl")]
        finally:
            process.terminate()  # nothing after the first step is measured
            process.wait()
        if None in moments:
            printed.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended before its first step:\n{printed.read()}")
    return moments[0], moments[1]


def _when(path: Path, process: subprocess.Popen, began: float) -> Moment | None:
    """Return the moment when the file has content; None if the process ends before that."""
    while True:
        ended = process.poll() is not None
        if path.exists() and path.stat().st_size:
            return Moment(time.perf_counter() - began, _processor_seconds(process.pid))
        if ended:
            return None
        time.sleep(0.005)


def _processor_seconds(pid: int) -> float:
    """Return the processor's seconds of a process and of its children, so far; NaN if it has ended."""
    total = 0.0
    try:
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    except psutil.NoSuchProcess:
        return float("nan")
    return total
