"""Seconds from `python scripts/train_detr.py` to the first optimizer step, on the bundled data with the defaults."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from toolkit.tools.shapes import ensure_shapes

from .measuring import medians

SCRIPT = Path(__file__).resolve().parents[1] / "train_detr.py"


def bench_startup(repeats: int = 3, options: Sequence[str] = ()) -> list[dict]:
    """Measure the seconds until the first step: medians over `repeats` starts, after one that is not counted, which
    fills the caches of disk and data.

    options: further arguments of the script.

    Rows: until the run folder is made (imports and settings), from there to the first row of metrics.jsonl (data,
    model, loader processes, the step itself), and both together.
    """
    ensure_shapes()
    starts = [_first_step(options) for _ in range(repeats + 1)][1:]
    measured = {
        "until the run folder is made": ("s", [made for made, _ in starts]),
        "from there to the first step": ("s", [stepped - made for made, stepped in starts]),
        "launch to first step": ("s", [stepped for _, stepped in starts]),
    }
    return medians("start, ", measured)


def _first_step(options: Sequence[str]) -> tuple[float, float]:
    """Measure the seconds from the launch until status.json and until the first row of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as output_dir, tempfile.TemporaryFile("w+") as printed:
        folder = Path(output_dir) / "start"
        settings = "--run.name start --run.max_steps 1 --run.log_every 1".split()
        command = [sys.executable, str(SCRIPT), "--run.output_dir", output_dir, *settings, *options]
        environment = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment)
        try:
            times = [_when(folder / name, process, began) for name in ("status.json", "metrics.jsonl")]
        finally:
            process.terminate()  # nothing after the first step is measured
            process.wait()
        if None in times:
            printed.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended before its first step:\n{printed.read()}")
    return times[0], times[1]


def _when(path: Path, process: subprocess.Popen, began: float) -> float | None:
    """Return the seconds from `began` until the file has content; None if the process ends before that."""
    while True:
        ended = process.poll() is not None
        if path.exists() and path.stat().st_size:
            return time.perf_counter() - began
        if ended:
            return None
        time.sleep(0.005)
