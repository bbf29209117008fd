"""Killed at random moments and resumed until done, a run equals the uninterrupted one to the bit.

    KILL_SEED=7 python -m pytest tests/scripts/test_random_kills.py -m slow -s
"""

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from launching import REPORT, all_rows, assert_same_run

from toolkit.runs.checkpoint import linked
from toolkit.runs.status import read_status

KILLS = 6  # of each script, under each of the two launchers
KILLS_OF_ONE_RUN = 3  # then it may end
STEPS = 10
SEED = int(os.environ.get("KILL_SEED", time.time_ns() % 1_000_000))
TORCHRUN = Path(__file__).with_name("torchrun_forked.py")
ENDED_BY = {signal.SIGKILL: (-9,), signal.SIGTERM: (85, -15), signal.SIGINT: (85, 130)}


class Killer:
    """Sends a signal after a random time, to the process that was started or to one process of the run."""

    def __init__(self, draw: random.Random, longest_s: float, ranks: int):
        self.delay_s = draw.uniform(0.0, longest_s)  # of what is left of the run
        self.signal = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        # a machine that goes down; what was started; a rank of torchrun (its main process is not told apart)
        self.whom = draw.choice(["all", "first", *(["rank"] if ranks > 1 else [])])
        self.draw, self.sent = draw, False

    def __call__(self, pids: list[int]) -> None:
        time.sleep(self.delay_s)
        try:
            ranks = psutil.Process(pids[0]).children() if self.whom == "rank" else []
            if self.whom == "all":
                os.killpg(pids[0], self.signal)
            else:
                os.kill(self.draw.choice(ranks).pid if ranks else pids[0], self.signal)
            self.sent = True
        except (ProcessLookupError, psutil.NoSuchProcess):
            return  # it was done before

    def __str__(self) -> str:
        return f"{self.signal.name} to {self.whom} after {self.delay_s:.2f} s"


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def step_of(folder: Path) -> int:
    """That a run would go on from, or nearly: the link may be one behind."""
    newest = linked(folder / "checkpoints", "latest")
    return int(newest.name.removeprefix("step_")) if newest else 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_moments_it_ends_with_the_same_bits(server, script, settings, tmp_path, ranks):
    """Ten steps with all that has a state; saved at every second one, evaluated at every third."""
    draw = random.Random(f"{SEED} {script.name} {ranks}")
    args = settings(
        "--run.output_dir", tmp_path, "--data.workers", 1, "--data.batch_size_per_device", 4 // ranks,
        "--eval.batch_size_per_device", 3, "--optim.accumulation_steps", 2, "--run.max_steps", STEPS, "--run.epochs", 4,
        "--run.save_every", 2, "--run.eval_every", 3, "--run.keep", 1, "--run.resume", "latest",
    )  # fmt: skip

    def run(name: str, killer: Killer | None = None):
        program, first = (script, []) if ranks == 1 else (TORCHRUN, [f"{ranks},0", script.path])
        given = [*first, *args, "--run.name", name]
        return server.run(program, given, faults=[{"skip": REPORT}], meanwhile=killer)

    began = time.monotonic()
    reference = run("reference").ok().folder
    longest_s = time.monotonic() - began
    assert max(row["step"] for row in all_rows(reference)) == STEPS
    kills, done = [], 0
    while len(kills) < KILLS:
        name, of_this_run = f"killed_{done}", 0
        while True:
            left = 1.0 - step_of(tmp_path / name) / (STEPS + 5)
            killer = Killer(draw, left * longest_s, ranks) if of_this_run < KILLS_OF_ONE_RUN else None
            before = read_status(tmp_path / name)
            ended = run(name, killer)
            after = read_status(tmp_path / name)
            if ended.code == 0 or after != before and after["state"] == "done":  # a launcher dies of a signal after it
                break
            assert killer is not None and killer.sent, ended.text
            assert ended.code in ENDED_BY[killer.signal] or ranks > 1, f"{killer}: {ended.code}\n{ended.text}"
            if killer.signal != signal.SIGKILL:
                assert after == before or after["state"] in ("preempted", "failed"), f"{killer}: {ended.text}"
            kills.append(f"{killer} (step {step_of(tmp_path / name)})")
            print(f"{script.name} {ranks} KILL_SEED={SEED} {name}: {kills[-1]}, ended with {ended.code}", flush=True)
            of_this_run += 1
        assert ended.status["state"] == "done"
        assert_same_run(ended.folder, reference)
        assert hashes(ended.folder / "final") == hashes(reference / "final") != {}
        done += 1
    print(f"\n{script.name}, {ranks} rank(s), KILL_SEED={SEED}: {len(kills)} kills in {done} runs, all identical; "
          f"an uninterrupted run takes {longest_s:.1f} s", flush=True)  # fmt: skip
