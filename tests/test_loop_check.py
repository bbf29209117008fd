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
from toolkit.base.errors import BadInput
from toolkit.models import detector as base
from toolkit.run.checkpoint import linked
from toolkit.run.recovery import ranks_apart
from toolkit.run.validation import finish
from toolkit.step.extra import Extra
from toolkit.step.length import Pace
from toolkit.step.loop_check import LoopCheck
from toolkit.step.schedules import Schedule


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
    check.begin(2)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(1)
    counts["snapshot"] += 1
    check.done.update({"add": 2, "norm": 1, "accepts": 1})
    for _ in range(updates):
        optimizer.step()
    counts["step"] += 1
    check.done.update({"note_step": 1, "evaluate_and_save": 1})


def checked(kind: type[torch.optim.Optimizer]) -> tuple[LoopCheck, dict[str, int], torch.optim.Optimizer]:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on PyTorch's class calls the hooks itself
    optimizer, counts = kind([nn.Parameter(torch.zeros(1))], lr=0.1), {"snapshot": 0, "step": 0}
    check = LoopCheck(lambda: dict(counts))
    check.watch(optimizer)
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
    check.begin(2)
    for _ in range(2):
        with pytest.raises(BadInput, match="comes too early"):
            optimizer.step()
        check.begin(2)
    check.refused()
    assert check.end()
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
    names = [name for name, _ in first.tensors()]
    assert {"critic.weight", "best.boxes.0"} <= set(names) and any("exp_avg" in name for name in names)


def test_what_cannot_be_saved_or_does_not_fit_is_refused():
    extra = filled()
    with pytest.raises(BadInput, match=r't.extra\["names"\]: a set cannot be saved'):
        extra["names"] = {"a"}
    other = Extra(extra._accelerator)
    other.load_state_dict(extra.state_dict())
    with pytest.raises(BadInput, match="does not fit what the checkpoint holds"):
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
SNAPSHOT = "        t.guard.snapshot(t.detector)\n"
MICRO = "            for batch, denominators in t.micro_batches(window):\n"
UPDATE = "        t.optimizer.step()\n"
SAVE = '        t.evaluate_and_save(reduced["signal"])\n'


def training(folder, **pace):
    folder.mkdir(exist_ok=True)
    batches = [Batch(torch.full((1, 3, 4, 4), 10 * i, dtype=torch.uint8), torch.tensor([[4, 4]]),
                     [{"image_id": i, "labels": torch.zeros(2, dtype=torch.int64)}]) for i in range(1, 9)]  # fmt: skip
    toy = Toy()
    optimizer = torch.optim.SGD([{"params": [toy.weight], "name": "main"}], lr=1e-3)
    steps = len(batches) // pace.get("accumulation_steps", 1)
    return plain_training(toy, batches, optimizer, Schedule, folder, total_steps=steps, pace=Pace(**pace))


def run_changed(t, *hunks: tuple[str, str]):
    """One epoch of the loop of train_detr with lines of it replaced."""
    source = inspect.getsource(train_detr.train_one_epoch)
    for old, new in hunks:
        assert source.count(old) == 1
        source = source.replace(old, new)
    names = {"torch": torch, "drawn": []}
    exec(compile(source, "changed", "exec"), names)
    names["train_one_epoch"](t)
    return names["drawn"]


FIRST_STEP = {
    "another optimizer": ((TRAIN, TRAIN + "    t.optimizer = torch.optim.SGD(t.trained_parameters, lr=1.0)\n"),
                          "t.optimizer is a SGD, not the optimizer that session.training made"),
    "a group more": ((SNAPSHOT, SNAPSHOT + "        t.optimizer.param_groups.append(t.optimizer.param_groups[0])\n"),
                     "t.optimizer has 2 groups, session.training made 1"),
    "a closure": ((UPDATE, "        t.optimizer.step(lambda: None)\n"), "gradients that come after the guard"),
    "no gradients": ((UPDATE, "        t.optimizer.zero_grad()\n" + UPDATE), "the update has no gradients"),
    "gradients lost": ((MICRO, MICRO + " " * 16 + "t.optimizer.zero_grad()\n"),
                       "gradients of earlier micro-batches are gone"),
    "boxes dropped": ((MICRO, MICRO + " " * 16 + 'batch.targets[0]["labels"] = torch.zeros(0)\n'),
                      "boxes were changed inside of t.micro_batches"),
    "evaluation mode": ((TRAIN, "    t.model.eval()\n"), "the detector is in evaluation mode; call t.model.train()"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_STEP)
def test_what_would_train_wrongly_is_refused(name, tmp_path):
    t, (hunk, words) = training(tmp_path, accumulation_steps=2), FIRST_STEP[name]
    with pytest.raises(BadInput, match=re.escape(words)):
        run_changed(t, hunk)


def test_a_part_of_a_window_is_trained_on_as_a_window_in_evaluation_mode_on_purpose(tmp_path):
    t, half = training(tmp_path / "half", accumulation_steps=2), (MICRO, "            window = window[:1]\n" + MICRO)
    t.without("train")
    run_changed(t, half, (TRAIN, "    t.model.eval()\n"))
    assert t.step == 4
    weight = 1 - 1e-3 * sum(10 * i for i in (1, 3, 5, 7))  # the mean of one image in each window
    torch.testing.assert_close(t.detector.weight.data, torch.full((3,), weight))


def test_draws_before_the_micro_batches_are_functions_of_the_step(tmp_path):
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draws = (MICRO, "            drawn.append(torch.rand(()).item())\n" + MICRO)
        drawn.append(run_changed(training(tmp_path / str(seed)), draws))
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 8


@pytest.mark.parametrize(("condition", "said"), [("t.step == 4", True), ("True", False), ("False", False)])
def test_rates_that_last_for_one_update_are_said(tmp_path, capsys, condition, said):
    by_hand = f"        if {condition}:\n            t.optimizer.param_groups[0]['lr'] *= 0.1\n"
    run_changed(training(tmp_path), (SAVE, by_hand + SAVE))
    assert ("step 6: warning: the learning rates that the loop set" in capsys.readouterr().out) == said


def test_a_window_passed_over_late_leaves_a_scaler_that_goes_on(tmp_path):
    t = training(tmp_path)
    t.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in t.windows():
        scaler.scale(t.detector.weight.sum()).backward()
        t.unscaled_gradient_norm()
        scaler.unscale_(t.optimizer.optimizer)  # which Accelerate does in fp16; twice without an update it cannot
    assert t.sampler.next_batch == 8 and scaler.get_scale() == 8.0


def test_an_evaluation_by_hand_is_saved_as_the_best(tmp_path):
    t = training(tmp_path)
    for t.step in (1, 2):
        if t.step == 2:
            t.best.value, t.best.step = 0.5, 2
        t.evaluate_and_save(0.0)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000002"]
    assert linked(tmp_path / "checkpoints", "best").name == "step_000002"


def test_weights_changed_after_training_are_said(tmp_path, capsys):
    t = training(tmp_path)
    t.best.evaluated_step = 8
    run_changed(t)
    finish(t)
    assert "were changed after the last update" not in capsys.readouterr().out
    t.detector.load_state_dict({"weight": torch.zeros(3)})
    t.best.value = 0.5
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
