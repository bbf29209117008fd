"""What a step of each script launches on a GPU, counted without one: the figures of docs/scaling.md.

The scripts run with their default configurations in bfloat16, on a device that only pretends to be a GPU
(tests/scripts/pretended_run.py). The counts do not depend on the machine or on other programs.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .measuring import row

COUNTER = Path(__file__).resolve().parents[2] / "tests" / "scripts" / "pretended_run.py"
SCRIPTS = ("train_detr", "train_faster_rcnn", "train_ssd", "train_yolov3", "train_sgg")
SHORT = """--run.name counted --run.max_steps 9 --run.max_minutes null --run.eval_every 0 --run.save_every 0
--run.precision bf16 --run.tf32 true --data.workers 0""".split()


def bench_launches(
    scripts: Sequence[str] = SCRIPTS, processes: Sequence[int] = (1, 2), settings: Sequence[str] = ()
) -> Iterator[dict]:
    """Count the launches and the waits of a step in one process, and in each of two.

    settings: further arguments of the scripts.
    """
    for script in scripts:
        for count in processes:
            step = _counted(script, count, settings)["step"]
            title = f"{script}, a step in {count} process{'es' if count > 1 else ''}"
            phases = ", ".join(f"{launches} {phase}" for phase, launches in step["phases"].items())
            yield row(f"{title}, launches", step["launches"], f"launches: {phases}")
            yield row(f"{title}, waits", step["waits"], "waits") | {"places": step["places"]}


def _counted(script: str, count: int, settings: Sequence[str]) -> dict:
    """Return what pretended_run.py finds in the first of `count` processes."""
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        cases.write_text(json.dumps([[script, [*SHORT, "--run.output_dir", folder, *settings]]]))
        started = []
        for rank, environment in enumerate(_environments(count)):
            with (Path(folder) / f"{rank}.txt").open("w") as said:
                command = [sys.executable, COUNTER, cases, "--step"]
                started.append(subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT))
        for process in started:
            process.wait()
        said = (Path(folder) / "0.txt").read_text()
    found = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("FOUND ")]
    if not found or found[0]["code"]:
        raise RuntimeError(f"{script} in {count} processes failed: {said[-3000:]}")
    return found[0]


def _environments(count: int) -> Iterator[dict[str, str]]:
    """Yield the variables of each process. Each is the only one of a machine, whose only device it has."""
    env = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    env["OMP_NUM_THREADS"] = "1"
    if count == 1:
        yield env
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    for rank in range(count):
        yield env | meeting | {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
