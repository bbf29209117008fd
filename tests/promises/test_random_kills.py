"""Killed at random moments and resumed until done, a run equals the uninterrupted one to the bit.

KILL_SEED=7 python -m pytest tests/promises/test_random_kills.py -m slow -s
"""

import os
import random
import signal
import time

import psutil
import pytest
from launching import REPORT, SCRIPTS, TORCHRUN, all_rows, assert_same_run
from safetensors.torch import load_file

from toolkit.run.checkpoint import linked
from toolkit.run.status import read_status

KILLS = 6  # under each of the two launchers
KILLS_OF_ONE_RUN = 3  # then it may end
STEPS = 10
SEED = os.environ.get("KILL_SEED", "0")
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
        return f"{self.signal.name} to {self.whom} after {self.delay_s:.2f} s, KILL_SEED={SEED}"


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize(("script", "ranks"), [
    (SCRIPTS[0], 1), *((script, 2) for script in SCRIPTS if script.name in ("train_detr", "train_sgg", "train_ssd")),
], indirect=["script"], ids=lambda value: getattr(value, "name", value))  # fmt: skip
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
        return server.run(program, [*first, *args, "--run.name", name], faults=[{"skip": REPORT}], meanwhile=killer)

    began = time.monotonic()
    reference = run("reference").ok().folder
    longest_s = time.monotonic() - began
    assert max(row["step"] for row in all_rows(reference)) == STEPS
    kills = 0
    for number in range(KILLS):
        name, kills_before = f"killed_{number}", kills
        while True:
            newest = linked(tmp_path / name / "checkpoints", "latest")
            left = 1.0 - (int(newest.name.removeprefix("step_")) if newest else 0) / (STEPS + 5)
            killer = Killer(draw, left * longest_s, ranks) if kills - kills_before < KILLS_OF_ONE_RUN else None
            before = read_status(tmp_path / name)
            ended = run(name, killer)
            after = read_status(tmp_path / name)
            if ended.code == 0 or after != before and after["state"] == "done":  # a launcher dies of a signal after it
                break
            assert killer is not None and killer.sent, ended.text
            assert ended.code in ENDED_BY[killer.signal] or ranks > 1, f"{killer}: {ended.code}\n{ended.text}"
            if killer.signal != signal.SIGKILL:
                assert after == before or after["state"] in ("preempted", "failed"), f"{killer}: {ended.text}"
            kills += 1
            print(f"{script.name} {ranks} {name}: {killer}, ended with {ended.code}", flush=True)
        assert ended.status["state"] == "done"
        assert_same_run(ended.folder, reference)
        final, expected = (load_file(folder / "final" / "model.safetensors") for folder in (ended.folder, reference))
        assert final.keys() == expected.keys() and all(final[key].equal(expected[key]) for key in final)
        if kills >= KILLS:
            break
    assert kills
