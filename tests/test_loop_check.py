"""What the loop is asked about its windows, and state of one's own, without a run around them."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from plain_training import plain_training
from processes import run_on_ranks
from torch import nn

from scripts import train_detr
from toolkit.base.batch import Batch
from toolkit.base.distributed import world
from toolkit.base.errors import BadInput, StoppedByGuard
from toolkit.models import detector as base
from toolkit.run.checkpoint import linked, load_checkpoint, newest_valid
from toolkit.run.loop import save_and_evaluate_when_due
from toolkit.run.metrics_log import read_metrics
from toolkit.run.parts import Extra
from toolkit.run.recovery import ranks_apart
from toolkit.run.saving import restore_checkpoint
from toolkit.run.validation import finish
from toolkit.step.ema import Ema
from toolkit.step.guard import POLICIES
from toolkit.step.loop_check import LoopCheck
from toolkit.step.schedules import PlateauSchedule, Schedule

NOTHING = Batch(torch.zeros(0, 3, 2, 2, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int64), [])


class InTurn(torch.optim.SGD):
    """A step that does something and then calls that of its class."""

    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_that_nobody_registered_is_noted_once():
    registered, other = (torch.optim.SGD([nn.Parameter(torch.ones(2)) for _ in range(n)], lr=0.1) for n in (1, 2))
    check = LoopCheck(dict)
    with check.noting_others(lambda: [SimpleNamespace(optimizer=registered)]):  # as Accelerate wraps it
        for optimizer in (registered, other, other):
            optimizer.step()
    assert check.new_others() == ["SGD of 2 parameters"] and check.new_others() == []


def whole_window(check: LoopCheck, counts: dict[str, int], optimizer: torch.optim.Optimizer, updates: int = 1) -> None:
    check.begin(0, 2)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(1)
    check.done.update({"backward": 2, "reduce": 1, "accepts": 1})
    for _ in range(updates):
        optimizer.step()
    counts["meters"] += 1


def checked(kind: type[torch.optim.Optimizer]) -> tuple[LoopCheck, dict[str, int], torch.optim.Optimizer]:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on PyTorch's class calls the hooks itself
    optimizer, counts = kind([nn.Parameter(torch.zeros(1))], lr=0.1), {"meters": 0}
    check = LoopCheck(lambda: dict(counts))
    check.watch(optimizer, lambda: None)
    return check, counts, optimizer


@pytest.mark.parametrize("kind", [torch.optim.SGD, InTurn])
def test_an_update_counts_once_whatever_it_calls(kind):
    check, counts, optimizer = checked(kind)
    for _ in range(3):
        whole_window(check, counts, optimizer)
        assert check.end()
    whole_window(check, counts, optimizer, updates=2)
    with pytest.raises(BadInput, match="was done 2 times"):
        check.end()
    with pytest.raises(BadInput, match="there is no 'emma'"):
        check.leave_out(["emma"])


def test_an_update_that_failed_is_forgotten():
    check, counts, optimizer = checked(torch.optim.SGD)
    check.begin(0, 2)
    for _ in range(2):
        with pytest.raises(BadInput, match="comes too early"):
            optimizer.step()
        check.begin(0, 2)
    assert not check.was_refused
    check.refused()
    assert check.was_refused
    whole_window(check, counts, optimizer)
    assert check.end()


def filled() -> Extra:
    extra = Extra(Accelerator(cpu=True))
    extra["critic"] = nn.Linear(2, 1)
    extra["optimizer"] = torch.optim.Adam(extra["critic"].parameters(), lr=0.5)
    extra["seen"], extra["best"] = 0, {"value": 0.5, "boxes": [torch.ones(2)]}
    return extra


def test_state_of_ones_own_is_restored_to_the_bit():
    first = filled()
    for _ in range(2):
        first.zero_grad()
        first["critic"](torch.ones(3, 2)).sum().backward()
        first["optimizer"].step()
    first["seen"] = 2
    second = Extra(first._accelerator)
    second.load_state_dict(first.state_dict())
    assert second.not_taken_up == ["best", "critic", "optimizer", "seen"]
    second["critic"] = nn.Linear(2, 1)
    second["optimizer"] = torch.optim.Adam(second["critic"].parameters())
    second["seen"] = second["best"] = 0
    assert not second.not_taken_up and second["seen"] == 2 and second["best"]["value"] == 0.5
    for (name, one), (other, two) in zip(first.tensors(), second.tensors(), strict=True):
        assert name == other and torch.equal(one, two)
    assert second["optimizer"].param_groups[0]["lr"] == 0.5
    names = [name for (_, name), _ in first.tensors()]
    assert {"critic.weight", "best.boxes.0"} <= set(names) and any("exp_avg" in name for name in names)


def test_what_cannot_be_saved_or_does_not_fit_is_refused():
    extra = filled()
    with pytest.raises(BadInput, match=r't.extra\["names"\]: a set cannot be saved'):
        extra["names"] = {"a"}
    other = Extra(extra._accelerator)
    other.load_state_dict(extra.state_dict())
    with pytest.raises(BadInput, match="does not fit the state in the checkpoint"):
        other["critic"] = nn.Linear(3, 1)


class Toy(base.Detector):
    loss_names, divided_by, default_weights = ("loss_ce",), "images", {"loss_ce": 1.0}

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, images, sizes, targets=None):
        return images.float().mean((2, 3)) @ self.weight

    def denominators(self, targets):
        return {"images": float(len(targets))}

    def criterion(self, outputs, targets, denominators):
        return {"loss_ce": outputs.sum() / denominators["images"]}, {}


TRAIN = "    t.model.train()\n"
MICRO = "        for batch in window:  # on the device, its random numbers seeded\n"
UPDATE = "        t.optimizer.step()\n"
END = "        t.meters.update(reduced)\n"


def training(folder, scaler=None, make_schedule=Schedule, accumulation_steps=1, **pace):
    folder.mkdir(exist_ok=True)
    batches = [Batch(torch.full((1, 3, 4, 4), 10 * i, dtype=torch.uint8), torch.tensor([[4, 4]]),
                     [{"image_id": i, "labels": torch.zeros(2, dtype=torch.int64)}]) for i in range(1, 9)]  # fmt: skip
    toy = Toy()
    optimizer = torch.optim.SGD([{"params": [toy.weight], "name": "main"}], lr=1e-3)
    steps = len(batches) // accumulation_steps
    return plain_training(toy, batches, optimizer, make_schedule, folder, total_steps=steps, scaler=scaler,
                          accumulation_steps=accumulation_steps, **pace)  # fmt: skip


def evaluate_to(t, value: float) -> None:
    """Make every evaluation have this metric, and leave no files."""
    t.validation.loader, t.validation.pictures = [NOTHING], 0
    t.validation.evaluator = SimpleNamespace(evaluate=lambda found: {"bbox_AP": value}, describe=lambda *_: "")
    t.log.attempt = lambda what, function: None


def run_changed(t, *hunks: tuple[str, str], epochs: int = 1):
    """Epochs of the loop of train_detr with lines of it replaced."""
    source = inspect.getsource(train_detr.train_one_epoch)
    for old, new in hunks:
        assert source.count(old) == 1
        source = source.replace(old, new)
    names = {"torch": torch, "drawn": []}
    exec(compile(source, "changed", "exec"), names)
    for _ in range(epochs):
        if not t.finished:
            names["train_one_epoch"](t)
    return names["drawn"]


FIRST_STEP = {
    "another optimizer": ((TRAIN, TRAIN + "    t.optimizer = torch.optim.SGD(t.trained_parameters, lr=1.0)\n"),
                          "t.optimizer is a SGD, not the optimizer that s.training made"),
    "a group more": ((MICRO, "        t.optimizer.param_groups.append(t.optimizer.param_groups[0])\n" + MICRO),
                     "t.optimizer has 2 groups, s.training made 1"),
    "a closure": ((UPDATE, "        t.optimizer.step(lambda: None)\n"), "gradients that come after the guard"),
    "no gradients": ((UPDATE, "        t.optimizer.zero_grad()\n" + UPDATE), "the update has no gradients"),
    "gradients lost": ((MICRO, MICRO + " " * 12 + "t.optimizer.zero_grad()\n"),
                       "gradients of earlier micro-batches are gone"),
    "boxes dropped": ((MICRO, MICRO + " " * 12 + 'batch.targets[0]["labels"] = torch.zeros(0)\n'),
                      "boxes were changed inside of `for batch in window`"),
    "evaluation mode": ((TRAIN, "    t.model.eval()\n"), "the detector is in evaluation mode; call t.model.train()"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_STEP)
def test_what_would_train_wrongly_is_refused(name, tmp_path):
    t, (hunk, words) = training(tmp_path, accumulation_steps=2), FIRST_STEP[name]
    with pytest.raises(BadInput, match=re.escape(words)):
        run_changed(t, hunk)


CLIP = "        window.clip(t.max_norm)\n"
CLIPS_NOT = {
    "gone": ((CLIP, ""),),
    "after the update": ((CLIP, ""), (UPDATE, UPDATE + CLIP)),
    "now and then": ((CLIP, "        if t.step % 2 == 0:\n    " + CLIP),),
    "asked for from the second step on": ((CLIP, "        t.max_norm = 0.1 * t.step\n"),),
}


@pytest.mark.parametrize("name", CLIPS_NOT)
def test_a_window_that_is_not_clipped_is_refused_where_the_settings_clip(name, tmp_path):
    t = training(tmp_path, max_norm=0.1)
    with pytest.raises(BadInput, match=r"`window.clip\(t.max_norm\)` was not done; .*t.without\(\"clip\"\)"):
        run_changed(t, *CLIPS_NOT[name])
    assert t.step < 2
    with pytest.raises(BadInput, match="was done 2 times"):
        run_changed(training(tmp_path / "twice", max_norm=0.1), (CLIP, 2 * CLIP))


def test_a_loop_may_clip_by_itself_or_not_at_all(tmp_path):
    by_itself = "        torch.nn.utils.clip_grad_norm_(t.trained_parameters, 0.1)\n"
    weights = []
    for name, line in (("ours", CLIP), ("its own", by_itself)):
        t = training(tmp_path / name, max_norm=0.1)
        if line != CLIP:
            t.without("clip")
        run_changed(t, (CLIP, line))
        weights.append(t.detector.weight.detach())
    torch.testing.assert_close(*weights)
    never = training(tmp_path / "never")  # max_norm is 0
    run_changed(never, (CLIP, ""))
    assert never.step == t.step == 8


def test_a_part_of_a_window_is_trained_on_as_a_window_in_evaluation_mode_on_purpose(tmp_path):
    t = training(tmp_path / "half", accumulation_steps=2)
    half = (MICRO, "        window.batches = window.batches[:1]\n" + MICRO)
    t.without("train")
    run_changed(t, half, (TRAIN, "    t.model.eval()\n"))
    assert t.step == 4
    weight = 1 - 1e-3 * sum(10 * i for i in (1, 3, 5, 7))  # the mean of one image in each window
    torch.testing.assert_close(t.detector.weight.data, torch.full((3,), weight))


def test_draws_before_the_micro_batches_are_functions_of_the_step(tmp_path):
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draws = (MICRO, "        drawn.append(torch.rand(()).item())\n" + MICRO)
        drawn.append(run_changed(training(tmp_path / str(seed)), draws))
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 8


BY_HAND = "        if {condition}:\n            t.optimizer.param_groups[0]['lr'] *= 0.1\n"
RATES_ARE_GONE = "warning: the learning rates that the loop set"


@pytest.mark.parametrize(
    ("condition", "said"), [("t.step == 4", True), ("True", False), ("t.step != 4", False), ("False", False)]
)
def test_rates_that_last_for_one_update_are_said(tmp_path, capsys, condition, said):
    """A schedule of the loop's own may meet ours at a step: it is not gone."""
    run_changed(training(tmp_path), (UPDATE, BY_HAND.format(condition=condition) + UPDATE))
    assert (f"step 7: {RATES_ARE_GONE}" in capsys.readouterr().out) == said


def test_rates_that_last_for_one_update_are_said_after_a_resume_too(tmp_path, capsys):
    once = (UPDATE, BY_HAND.format(condition="t.step == 4") + UPDATE)
    run_changed(training(tmp_path / "first", save_every=1, keep=9), once)
    assert f"step 7: {RATES_ARE_GONE}" in capsys.readouterr().out
    for step, is_said in ((3, 7), (4, 7), (5, 7), (6, 7), (7, None)):
        again = training(tmp_path / str(step))
        restore_checkpoint(again, load_checkpoint(tmp_path / "first" / "checkpoints" / f"step_{step:06d}"))
        again.data.loader = again.data.loader[again.sampler.next_batch :]
        run_changed(again, once)
        said = capsys.readouterr().out
        assert RATES_ARE_GONE in said if is_said else RATES_ARE_GONE not in said
        assert is_said is None or f"step {is_said}: {RATES_ARE_GONE}" in said


def test_rates_that_are_set_after_an_update_are_said(tmp_path, capsys):
    """As the scheduler's step of a plain loop: nothing would be left of them at the next update."""
    run_changed(training(tmp_path), (UPDATE, UPDATE + BY_HAND.format(condition="True")))
    said = capsys.readouterr().out
    assert said.count("step 1: warning: the learning rates that the loop set after an update are gone") == 1
    assert RATES_ARE_GONE + " for an" not in said


def schedules(name: str):
    """What makes a schedule of this kind; each one has changed its rates after a few steps."""
    kinds = {
        "warm-up": lambda optimizer: Schedule(optimizer, "constant", 8, warmup_steps=6),
        "cosine": lambda optimizer: Schedule(optimizer, "cosine", 8, warmup_steps=2),
        "multistep": lambda optimizer: Schedule(optimizer, "multistep", 8, milestones=[3, 5]),
        "plateau": lambda optimizer: PlateauSchedule(optimizer, patience=1, max_decays=20, warmup_steps=2),
    }
    return kinds[name]


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("follows_checkpoint", [True, False])
@pytest.mark.parametrize("name", ["warm-up", "cosine", "multistep", "plateau"])
def test_a_loop_that_sets_no_rates_is_not_said_to_set_some(
    tmp_path, capsys, name, follows_checkpoint, accumulation_steps
):
    """After a resume from every step, with this schedule or that of the checkpoint, and with other batches."""
    t = training(tmp_path, make_schedule=schedules(name), eval_every=1, save_every=1, keep=9)
    evaluate_to(t, 0.5)
    run_changed(t)
    checkpoints = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert len(checkpoints) == 8
    for path in checkpoints:
        pace = {"accumulation_steps": accumulation_steps, "eval_every": 1}
        again = training(tmp_path / f"from_{path.name}", make_schedule=schedules(name), **pace)
        evaluate_to(again, 0.5)
        again.plan.follows_checkpoint = follows_checkpoint
        restore_checkpoint(again, load_checkpoint(path))
        again.plan.total_steps = again.step + 2
        again.data.loader = again.data.loader[again.sampler.next_batch :]
        run_changed(again)
    assert RATES_ARE_GONE not in capsys.readouterr().out


def test_every_row_of_training_has_the_norms_of_the_groups_and_no_average_has_them(tmp_path):
    """The first and the last row of an epoch too, whatever `log_every` is."""
    t = training(tmp_path)
    t.log.log_every = 3
    run_changed(t)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    of_steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in of_steps] == [1, 3, 6, 8]
    assert all(row["train/grad_norm/main"] == row["train/grad_norm"] for row in of_steps)
    (averages,) = [row for row in rows if "epoch/loss" in row]
    assert "epoch/grad_norm" in averages and "epoch/grad_norm/main" not in averages


ENDINGS = {
    "early stopping": END,
    "max_decays": END,
    "an evaluation of the loop's own": END + "        t.validation.best.without_better = t.step - 3\n",
    "the script": END + "        if t.step == 5:\n            return {}\n",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_averages_of_an_epoch_are_a_row_whatever_ends_the_run_inside_it(tmp_path, ending):
    kind = schedules("plateau") if ending == "max_decays" else Schedule
    t = training(tmp_path, make_schedule=kind, eval_every=1 if ending in ("early stopping", "max_decays") else 0)
    evaluate_to(t, 0.5)
    if ending == "max_decays":
        t.plan.schedule.options["max_decays"] = 4  # the first evaluation is better, the four after it are not
    elif ending != "the script":
        t.validation.best.patience = 4 if ending == "early stopping" else 2
    run_changed(t, (END, ENDINGS[ending]))
    assert t.step == 5 and not t.epoch_is_over
    finish(t)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "epoch/loss" in row]
    assert [(row["step"], row["epoch"]) for row in rows] == [(5, 0)]
    before = newest_valid(tmp_path / "checkpoints")[0].state
    finish(t)
    assert newest_valid(tmp_path / "checkpoints")[0].state == before
    assert len([row for row in read_metrics(tmp_path / "metrics.jsonl") if "epoch/loss" in row]) == 1


REDUCE = "        reduced = window.reduce()  # `reduce_dict`: one collective and one host read for the whole step\n"
AS_BEST = "t.validation.best.value = t.validation.best.step = 2"
BREAKS = """        if t.{counter} == {at} and not t.log.status.get("broke"):
            t.log.status["broke"] = True
            {how}
"""
SPOIL = "t.detector.weight.data.fill_(float('inf'))"
# Where a fault is found -> the pace of the run, and the lines that make it.
PLACES = {
    "before an update": (
        {}, (REDUCE, BREAKS.format(counter="step", at=1, how="window.sums['loss'] *= float('nan')") + REDUCE)
    ),
    "in the next window": ({}, (MICRO, BREAKS.format(counter="step", at=2, how=SPOIL) + MICRO)),
    "where a save is due": ({"save_every": 1}, (END, END + BREAKS.format(counter="step", at=2, how=SPOIL))),
    "where an evaluation is due": ({"eval_every": 1}, (END, END + BREAKS.format(counter="step", at=2, how=SPOIL))),
    "in the last evaluation": ({"save_every": 2}, (END, END + BREAKS.format(counter="step", at=4, how=SPOIL))),
    "in an evaluation of the loop's own": (
        {}, (END, END + BREAKS.format(counter="step", at=2, how=f"{SPOIL}; {AS_BEST}"))
    ),
}  # fmt: skip


def breaking(folder, policy: str, place: str, with_ema: bool, scaler, accumulation_steps: int):
    """A training of four updates on accumulated windows, one of which breaks, and the hunk that breaks it."""
    pace, hunk = PLACES[place]
    t = training(folder, scaler, accumulation_steps=accumulation_steps, **pace)
    t.guard.policy, t.plan.total_steps = policy, 4
    t.guard.lr_factor = 0.5
    if with_ema:
        t.ema = Ema(t.detector, 0.9)
    evaluate_to(t, 0.5)
    return t, hunk


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("fp16", [False, True], ids=["float32", "fp16"])
@pytest.mark.parametrize("with_ema", [False, True], ids=["raw", "ema"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_is_followed_wherever_a_fault_is_found(
    tmp_path, capsys, policy, place, with_ema, fp16, accumulation_steps
):
    """Never by blaming a line of the loop, which does nothing wrong, and never by a warning about its rates."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if fp16 else None
    t, hunk = breaking(tmp_path, policy, place, with_ema, scaler, accumulation_steps)
    goes_on = policy == "rollback" or (policy, place) == ("skip", "before an update")
    if goes_on:
        run_changed(t, hunk, epochs=3)
        finish(t)
        assert (t.step, t.ended_by) == (4, ["run.epochs"])
        assert (t.validation.best.evaluated_step, t.checkpoints.saved_step) == (4, 4)
    else:
        with pytest.raises(StoppedByGuard):
            run_changed(t, hunk)
    said = capsys.readouterr().out
    assert said.count("goes on from step") == goes_on and "warning" not in said
    assert (t.guard.rollbacks, t.guard.skips) == ((1, 0) if policy == "rollback" else (0, 0))
    saved, passed_over = newest_valid(tmp_path / "checkpoints")
    assert passed_over == [] and (saved is None or saved.tensors["model"]["weight"].isfinite().all())
    if goes_on:
        best = load_checkpoint(tmp_path / "checkpoints" / "best")
        assert best.of_part("best")["step"] == best.step, "the best one contains its own metric"


def test_a_fault_found_when_training_is_over_does_not_pass_for_its_result(tmp_path):
    """There is no loop that could go on from the checkpoint: the run ends, to be resumed."""
    t, _ = breaking(tmp_path, "rollback", "before an update", False, None, 2)
    t.plan.total_steps = 3
    run_changed(t)
    t.detector.weight.data.fill_(float("inf"))
    assert t.finished and t.step == 3
    with pytest.raises(StoppedByGuard, match="found when training was over: the run is at step 0 again, and `--run.r"):
        finish(t)
    assert newest_valid(tmp_path / "checkpoints")[0].step == t.log.status["step"] == 0


def test_a_window_passed_over_late_leaves_a_scaler_that_goes_on(tmp_path):
    t = training(tmp_path)
    t.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for window in t.windows():
        scaler.scale(t.detector.weight.sum()).backward()
        window.reduce()
        scaler.unscale_(t.optimizer.optimizer)  # which Accelerate does in fp16; twice without an update it cannot
    assert t.sampler.next_batch == 8 and scaler.get_scale() == 8.0


def test_an_evaluation_by_hand_is_saved_as_the_best(tmp_path):
    t = training(tmp_path)
    for t.step in (1, 2):
        if t.step == 2:
            t.validation.best.value, t.validation.best.step = 0.5, 2
        save_and_evaluate_when_due(t, SimpleNamespace(totals={"signal": 0.0}, best_step_before=-1))
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000002"]
    assert linked(tmp_path / "checkpoints", "best").name == "step_000002"


def test_weights_changed_after_training_are_said(tmp_path, capsys):
    t = training(tmp_path)
    t.validation.best.evaluated_step = 8
    run_changed(t)
    finish(t)
    assert "were changed after the last update" not in capsys.readouterr().out
    t.detector.load_state_dict({"weight": torch.zeros(3)})
    t.validation.best.value = 0.5
    finish(t)
    told = capsys.readouterr().out
    assert "the weights were changed after the last update" in told and "there is none in this run folder" in told


def weights_of_the_rank_differ(folder):
    t = training(folder / str(world()[0]))
    assert ranks_apart(t) == ""
    with torch.no_grad():
        t.detector.weight[0] += world()[0]
    assert "different weights (weight; 1 of 1)" in ranks_apart(t)


def test_ranks_that_went_apart_are_noticed(tmp_path):
    run_on_ranks(weights_of_the_rank_differ, 2, tmp_path)
