"""What a run does about a number that is not finite, wherever its loop comes upon it."""

from contextlib import nullcontext

import pytest
import torch
from plain_training import END, MICRO, REDUCE, evaluate_to, run_changed, toy_training
from processes import run_on_ranks

from toolkit.base.distributed import world
from toolkit.base.errors import StoppedByGuard
from toolkit.run.checkpoint import load_checkpoint, newest_valid
from toolkit.run.recovery import ranks_apart
from toolkit.run.validation import finish
from toolkit.step.ema import Ema


def breaking(counter: str, how: str) -> str:
    """Return lines of the loop that break something once."""
    once = 'not t.log.status.get("broke")'
    return f'        if t.{counter} and {once}:\n            t.log.status["broke"] = True\n            {how}\n'


SPOILT = "t.detector.weight.data.fill_(float('inf'))"
EVALUATED = "t.validation.best.value = t.validation.best.step = 2"
# Where a fault is found -> the pace of the run, and the change of the loop that makes it.
PLACES = {
    "before an update": ({}, (REDUCE, breaking("step == 1", "window.sums['loss'] *= float('nan')") + REDUCE)),
    "in the next window": ({}, (MICRO, breaking("step == 2", SPOILT) + MICRO)),
    "where a save is due": ({"save_every": 1}, (END, END + breaking("step == 2", SPOILT))),
    "where an evaluation is due": ({"eval_every": 1}, (END, END + breaking("step == 2", SPOILT))),
    "in the last evaluation": ({"save_every": 2}, (END, END + breaking("step == 4", SPOILT))),
    "in an evaluation of the loop's own": ({}, (END, END + breaking("step == 2", f"{SPOILT}; {EVALUATED}"))),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("with_all", [False, True], ids=["plain", "averages, fp16 and accumulation"])
def test_a_run_is_rolled_back_wherever_a_fault_is_found(tmp_path, capsys, place, with_all):
    """Never by blaming a line of the loop, which does nothing wrong, and never by a warning about its rates."""
    pace, hunk = PLACES[place]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if with_all else None
    t = toy_training(tmp_path, accumulation_steps=2 if with_all else 1, scaler=scaler, **pace)
    t.guard.policy = "rollback"
    t.guard.lr_factor = 0.5
    t.plan.total_steps = 4
    if with_all:
        t.ema = Ema(t.detector, 0.9)
    evaluate_to(t, 0.5)
    run_changed(t, hunk, epochs=3)
    finish(t)
    assert (
        t.step,
        t.validation.best.evaluated_step,
        t.checkpoints.saved_step,
    ) == (4, 4, 4)
    assert t.guard.rollbacks == 1
    best = load_checkpoint(tmp_path / "checkpoints" / "best")
    assert best.of_part("best")["step"] == best.step  # it contains its own metric
    assert best.tensors["model"]["weight"].isfinite().all()
    said = capsys.readouterr().out
    assert said.count("goes on from step") == 1
    assert "warning" not in said


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_only_a_window_can_be_skipped(tmp_path, policy, place):
    pace, hunk = PLACES[place]
    t = toy_training(tmp_path, **pace)
    t.guard.policy = policy
    t.plan.total_steps = 4
    evaluate_to(t, 0.5)
    can_skip = (policy, place) == ("skip", "before an update")
    with nullcontext() if can_skip else pytest.raises(StoppedByGuard):
        run_changed(t, hunk, epochs=2)
    assert t.finished or not can_skip
    saved, passed_over = newest_valid(tmp_path / "checkpoints")
    assert passed_over == []
    assert saved is None or saved.tensors["model"]["weight"].isfinite().all()


def test_a_fault_found_when_training_is_over_does_not_pass_for_its_result(tmp_path):
    """There is no loop that could go on from the checkpoint: the run ends, to be resumed."""
    t = toy_training(tmp_path)
    t.guard.policy = "rollback"
    run_changed(t)
    t.detector.weight.data.fill_(float("inf"))
    assert t.finished
    with pytest.raises(StoppedByGuard, match="found at the end of training: the run is at step 0 again, and `--run.r"):
        finish(t)
    assert newest_valid(tmp_path / "checkpoints")[0].step == 0
    assert t.log.status["step"] == 0


def test_a_window_passed_over_late_leaves_a_scaler_that_goes_on(tmp_path):
    t = toy_training(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    t.accelerator.scaler = scaler
    for window in t.windows():
        scaler.scale(t.detector.weight.sum()).backward()
        window.reduce()
        scaler.unscale_(t.optimizer.optimizer)  # which Accelerate does in fp16; twice without an update it cannot
    assert t.sampler.next_batch == 8
    assert scaler.get_scale() == 8.0


def weights_of_the_rank_differ(folder) -> None:
    t = toy_training(folder / str(world()[0]))
    assert ranks_apart(t) == ""
    with torch.no_grad():
        t.detector.weight[0] += world()[0]
    assert "different weights (weight; 1 of 1)" in ranks_apart(t)


def test_ranks_that_went_apart_are_noticed(tmp_path):
    run_on_ranks(weights_of_the_rank_differ, 2, tmp_path)
