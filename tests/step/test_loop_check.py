"""The body of a training loop is checked: a call that is missing or made twice is told, and so are rates that go."""

import re
from types import SimpleNamespace

import pytest
import torch
from plain_training import (
    ACCEPTS,
    BACKWARD,
    CLIP,
    CRITERION,
    END,
    MICRO,
    REDUCE,
    TRAIN,
    UPDATE,
    evaluate_to,
    run_changed,
    toy_training,
)
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.run.checkpoint import load_checkpoint
from toolkit.run.saving import restore_checkpoint
from toolkit.step.loop_check import LoopCheck
from toolkit.step.schedules import PlateauSchedule, Schedule


class InTurn(torch.optim.SGD):
    """A step that does something and then calls that of its class."""

    def step(self, closure=None):
        return super().step(closure)


def sgd(parameters: int = 1, kind=torch.optim.SGD) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(1)) for _ in range(parameters)], lr=0.1)


def test_an_optimizer_that_nobody_registered_is_noted_once():
    registered = sgd()
    other = sgd(2)
    check = LoopCheck(dict)
    with check.noting_others(lambda: [SimpleNamespace(optimizer=registered)]):  # as Accelerate wraps it
        for optimizer in (registered, other, other):
            optimizer.step()
    assert check.new_others() == ["SGD of 2 parameters"]
    assert check.new_others() == []


def whole_window(check: LoopCheck, optimizer: torch.optim.Optimizer, updates: int = 1) -> None:
    check.begin(0, 2)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    check.done.update({"backward": 2, "reduce": 1, "accepts": 1})
    for _ in range(updates):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, InTurn])
def test_an_update_counts_once_whatever_it_calls(kind):
    sgd()  # from here on PyTorch's class calls the hooks itself
    optimizer = sgd(kind=kind)
    check = LoopCheck(dict)
    check.watch(optimizer, lambda: None)
    for _ in range(2):
        with pytest.raises(BadInput, match="comes too early"):
            check.begin(0, 2)
            optimizer.step()
    for _ in range(3):  # the updates that failed are forgotten
        whole_window(check, optimizer)
        assert check.end()
    whole_window(check, optimizer, updates=2)
    with pytest.raises(BadInput, match="was done 2 times"):
        check.end()
    with pytest.raises(BadInput, match="there is no 'emma'"):
        check.leave_out(["emma"])


IN_MICRO = MICRO + " " * 12
# A change of the loop -> what is said of it in the first step.
REFUSED = {
    "another optimizer": (
        (TRAIN, TRAIN + "    t.optimizer = torch.optim.SGD(t.trained_parameters, lr=1.0)\n"),
        "t.optimizer is a SGD, not the optimizer that s.training made",
    ),
    "a group more": (
        (MICRO, "        t.optimizer.param_groups.append(t.optimizer.param_groups[0])\n" + MICRO),
        "t.optimizer has 2 groups, s.training made 1",
    ),
    "a closure": ((UPDATE, "        t.optimizer.step(lambda: None)\n"), "gradients that come after the guard"),
    "no gradients": ((UPDATE, "        t.optimizer.zero_grad()\n" + UPDATE), "the update has no gradients"),
    "gradients lost": ((MICRO, IN_MICRO + "t.optimizer.zero_grad()\n"), "gradients of earlier micro-batches are gone"),
    "boxes dropped": (
        (MICRO, IN_MICRO + 'batch.targets[0]["labels"] = torch.zeros(0)\n'),
        "boxes were changed inside of `for batch in window`",
    ),
    "evaluation mode": (
        (TRAIN, "    t.model.eval()\n"),
        "the detector is in evaluation mode; call t.model.train()",
    ),
    "backward left out": (
        (BACKWARD, "            t.accelerator.backward(weighted.total)\n"),
        "`window.backward(weighted, metrics)` was not done for 2 of 2 micro-batches; without it rows, averages",
    ),
    "nothing is reduced": (
        (REDUCE + ACCEPTS, "        reduced = {}\n"),
        "`reduced = window.reduce()` was not done; without it a NaN in a gradient would reach",
    ),
    "the guard left out": (
        (ACCEPTS, ""),
        'a NaN would reach the weights. Put it back, or say t.without("accepts") in train',
    ),
    "meters left out": ((END, ""), "the window is over, and `t.meters.update(reduced)` was not done"),
    "a loss that was not announced": (
        (CRITERION, CRITERION + " " * 12 + 'losses["loss_mine"] = losses["loss_ce"]\n'),
        "by t.announce('loss_mine', weight=1.0, divided_by=\"images\") after t = s.training(...)",
    ),
    "clipping gone": ((CLIP, ""), "`window.clip(t.max_norm)` was not done; without it"),
    "clipping after the update": ((CLIP + UPDATE, UPDATE + CLIP), "`window.clip(t.max_norm)` was not done; without it"),
    "clipping twice": ((CLIP, 2 * CLIP), "was done 2 times"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrongly_is_refused(name, tmp_path):
    t = toy_training(tmp_path, accumulation_steps=2, max_norm=0.1)
    hunk, words = REFUSED[name]
    with pytest.raises(BadInput, match=re.escape(words)):
        run_changed(t, hunk)


PASSES_OVER = """        if t.step == 1 and not t.extra.get("passed"):
            t.extra["passed"] = True
            continue
"""
OWN_OPTIMIZER = """        own = torch.nn.Linear(3, 1)
        own(window.batches[0].images.float().mean((2, 3))).mean().backward()
        torch.optim.Adam(own.parameters()).step()
"""
SAID = {
    "step 1: the loop made no update in a window": (ACCEPTS, PASSES_OVER + ACCEPTS),
    "in no checkpoint, so that a resumed run differs: Adam of 2 parameters": (END, OWN_OPTIMIZER + END),
}


@pytest.mark.parametrize("words", SAID)
def test_what_may_be_meant_is_said(words, tmp_path, capsys):
    run_changed(toy_training(tmp_path, save_every=1), SAID[words])
    assert words in capsys.readouterr().out


def test_calls_may_be_left_out_on_purpose(tmp_path):
    t = toy_training(tmp_path)
    t.without("ema", "meters", "clip")
    run_changed(t, ("        t.ema.update()\n" + END, ""), (CLIP, ""))
    assert t.step == 8


# Clipping that is left out, or asked for, from the second step on.
@pytest.mark.parametrize(
    ("max_norm", "changed"),
    [(0.1, "        if t.step % 2 == 0:\n    " + CLIP), (0.0, "        t.max_norm = 0.1 * t.step\n")],
)
def test_every_window_is_clipped_where_one_is(max_norm, changed, tmp_path):
    t = toy_training(tmp_path, max_norm=max_norm)
    with pytest.raises(BadInput, match=r'`window.clip\(t.max_norm\)` was not done; .*t.without\("clip"\)'):
        run_changed(t, (CLIP, changed))
    assert t.step == 1


def test_a_loop_may_clip_by_itself(tmp_path):
    clipped = toy_training(tmp_path / "ours", max_norm=0.1)
    run_changed(clipped)
    by_itself = toy_training(tmp_path / "its own", max_norm=0.1)
    by_itself.without("clip")
    run_changed(by_itself, (CLIP, "        torch.nn.utils.clip_grad_norm_(t.trained_parameters, 0.1)\n"))
    torch.testing.assert_close(by_itself.detector.weight, clipped.detector.weight)
    assert by_itself.step == 8


def test_without_a_largest_norm_a_loop_need_not_clip(tmp_path):
    never = toy_training(tmp_path)
    run_changed(never, (CLIP, ""))
    assert never.step == 8


def test_a_part_of_a_window_may_be_trained_on_in_evaluation_mode_on_purpose(tmp_path):
    t = toy_training(tmp_path, accumulation_steps=2)
    t.without("train")
    half = (MICRO, "        window.batches = window.batches[:1]\n" + MICRO)
    run_changed(t, half, (TRAIN, "    t.model.eval()\n"))
    assert t.step == 4
    weight = 1 - 1e-3 * (10 + 30 + 50 + 70)  # the mean of one image in each window
    torch.testing.assert_close(t.detector.weight.data, torch.full((3,), weight))


def test_draws_before_the_micro_batches_are_functions_of_the_step(tmp_path):
    draws = (MICRO, "        drawn.append(torch.rand(()).item())\n" + MICRO)
    torch.manual_seed(1)
    first = run_changed(toy_training(tmp_path / "1"), draws)
    torch.manual_seed(2)
    assert run_changed(toy_training(tmp_path / "2"), draws) == first
    assert len(set(first)) == 8


# ---- learning rates that the loop sets ----

BY_HAND = "        if {condition}:\n            t.optimizer.param_groups[0]['lr'] *= 0.1\n"
ONCE = (UPDATE, BY_HAND.format(condition="t.step == 4") + UPDATE)
RATES_ARE_GONE = "warning: the learning rates that the loop set"


@pytest.mark.parametrize("condition", ["True", "t.step != 4", "False"])
def test_rates_that_the_loop_sets_before_every_update_are_its_own_matter(tmp_path, capsys, condition):
    """A schedule of the loop's own may meet ours at a step: it is not gone."""
    run_changed(toy_training(tmp_path), (UPDATE, BY_HAND.format(condition=condition) + UPDATE))
    assert RATES_ARE_GONE not in capsys.readouterr().out


def go_on(t, checkpoint) -> None:
    restore_checkpoint(t, load_checkpoint(checkpoint))
    t.data.loader = t.data.loader[t.sampler.next_batch :]


def test_rates_that_last_for_one_update_are_said_after_a_resume_too(tmp_path, capsys):
    run_changed(toy_training(tmp_path / "first", save_every=1, keep=9), ONCE)
    assert f"step 7: {RATES_ARE_GONE}" in capsys.readouterr().out
    for step in (4, 6, 7):
        again = toy_training(tmp_path / str(step))
        go_on(again, tmp_path / "first" / "checkpoints" / f"step_{step:06d}")
        run_changed(again, ONCE)
        said = capsys.readouterr().out
        assert (f"step 7: {RATES_ARE_GONE}" in said) == (step < 7)
        assert said.count(RATES_ARE_GONE) == (step < 7)


def test_rates_that_are_set_after_an_update_are_said(tmp_path, capsys):
    """As the scheduler's step of a plain loop: nothing would be left of them at the next update."""
    run_changed(toy_training(tmp_path), (UPDATE, UPDATE + BY_HAND.format(condition="True")))
    said = capsys.readouterr().out
    assert said.count(f"step 1: {RATES_ARE_GONE} after an update are gone at the next one") == 1
    assert f"{RATES_ARE_GONE} for an" not in said


# Schedules that have changed their rates after a few steps.
SCHEDULES = {
    "warm-up": (Schedule, {"name": "constant", "warmup_steps": 6}),
    "cosine": (Schedule, {"name": "cosine", "total_steps": 8, "warmup_steps": 2}),
    "multistep": (Schedule, {"name": "multistep", "milestones": [3, 5]}),
    "plateau": (PlateauSchedule, {"patience": 1, "max_decays": 20, "warmup_steps": 2}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_of_a_schedule_are_not_those_of_the_loop(tmp_path, capsys, name):
    """Also after a resume, with this schedule or that of the checkpoint, and with other batches."""
    kind, options = SCHEDULES[name]

    def make_schedule(optimizer):
        return kind(optimizer, **options)

    t = toy_training(tmp_path, make_schedule, eval_every=1, save_every=1, keep=9)
    evaluate_to(t, 0.5)
    run_changed(t)
    for step in (1, 3, 6):
        again = toy_training(tmp_path / str(step), make_schedule, 1 + step % 2, eval_every=1)
        evaluate_to(again, 0.5)
        again.plan.follows_checkpoint = step != 3
        go_on(again, tmp_path / "checkpoints" / f"step_{step:06d}")
        again.plan.total_steps = again.step + 2
        run_changed(again)
    assert RATES_ARE_GONE not in capsys.readouterr().out
