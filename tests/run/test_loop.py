"""Around the body of the loop: lines and rows of steps and epochs, the length, and what is due after a step."""

import re

import pytest
import torch
from processes import run_on_ranks
from small_run import NOTHING, ONE_IMAGE, STEP, accepts, make_training, newest, window_with

from toolkit.base.distributed import world
from toolkit.base.errors import BadInput
from toolkit.data.sampling import EpochSampler
from toolkit.run.log import Log
from toolkit.run.loop import note_step, save_and_evaluate_when_due
from toolkit.run.plan import Plan, StepBudget
from toolkit.run.training_window import TrainingWindow
from toolkit.run.validation import save_and_evaluate
from toolkit.step.losses import LossWeights


def make_step(t) -> None:
    """Note the next step, as at the end of a window."""
    t.step += 1
    t.sampler.advance_batches(1)
    t.meters.update(STEP)
    t.plan.note_update()
    note_step(t, window_with(t, [NOTHING], STEP))


def test_the_time_left_is_no_longer_than_the_minutes_left(tmp_path):
    """Until the length is planned from the speed, the steps that are left are those of all epochs."""
    t = make_training(tmp_path)
    rows = t.log.writer
    t.log.start(rows, {}, 0, t.plan.total_steps)
    t.log.log_every = 1
    t.plan.budget = StepBudget(max_minutes=1e-9)
    t.log.timer.start()
    make_step(t)
    assert rows[0]["time/eta_s"] == pytest.approx(6e-8)
    assert rows[0]["time/step_s"] > 6e-8


def test_the_first_and_the_last_step_of_an_epoch_have_a_line(tmp_path, capsys):
    """As in DETR, and each line is a row too. Fifteen images for two ranks."""
    t = make_training(tmp_path)
    rows = t.log.writer
    images = []
    t.plan = Plan(EpochSampler(15, 2, world_size=2), t.plan.schedule, 11, steps_per_epoch=4)
    t.log = Log(True, steps_per_epoch=4, log_every=5)
    t.log.start(rows, {}, 0, t.plan.total_steps)
    t.log.averages.add = lambda values, n: images.append(n)
    for _ in range(11):
        make_step(t)
        if t.epoch_is_over:
            t.end_epoch()
    lines = re.findall(r"step (\d+)/11", capsys.readouterr().out)
    assert lines == ["1", "4", "5", "8", "9", "10", "11"]
    assert [row["step"] for row in rows if "train/loss" in row] == [int(step) for step in lines]
    assert images[:5] == [4, 4, 4, 3, 4]


def test_a_length_planned_anew_is_said_and_warned_of_once(tmp_path, capsys):
    t = make_training(tmp_path)
    t.plan = Plan(t.sampler, t.plan.schedule, 60, steps_per_epoch=4, warmup_steps=50)
    for steps in (40, 20, 2):  # `run.max_minutes` plans the length several times
        t.log.set_total_steps(steps, t.plan.set_length(steps, t.step))
    said = capsys.readouterr().out
    assert said.count("planned length: ") == 3
    assert said.count("steps are warm-up") == 1
    assert said.count("steps of an epoch") == 1


@pytest.mark.parametrize(("every", "expected"), [(0, []), (4, [5, 8]), (1, [5, 6, 7, 8])])
def test_the_table_of_gradients_comes_with_the_first_step_too(tmp_path, capsys, every, expected):
    """As Scene-Graph-Benchmark prints it (`print_first_grad`)."""
    t = make_training(tmp_path)
    t.guard.gradient_table_every = every
    t.detector.weight.grad = torch.ones(())
    printed = []
    for t.step in range(4, 8):  # resumed at step 4
        assert accepts(t)
        printed += [t.step + 1] * capsys.readouterr().out.count("---Total norm")
    assert printed == expected


def test_averages_of_an_epoch_are_logged_where_early_stopping_ends_inside_it(tmp_path, capsys):
    t = make_training(tmp_path, outcomes=[0.5, 0.25])
    rows = t.log.writer
    t.validation.best.patience = 1
    for _ in range(2):
        make_step(t)
        save_and_evaluate(t)
    assert t.finished
    assert not t.epoch_is_over
    assert [row["step"] for row in rows if "epoch/loss" in row] == [2]
    assert "epoch 1 averages" in capsys.readouterr().out
    # Given more patience and steps, the epoch goes on, and its averages come at its end too.
    t.log.log_epoch(2, 0)
    make_step(t)
    t.log.log_epoch(3, 0)
    assert [row["step"] for row in rows if "epoch/loss" in row] == [2, 3]


def test_a_row_that_cannot_be_written_ends_the_run_after_a_save(tmp_path):
    t = make_training(tmp_path)

    def refuse(row):
        raise BadInput("metrics.jsonl cannot be written")

    t.log.writer.log = refuse
    t.log.write(1, 0, {})
    t.step = 1
    window = TrainingWindow(t, [])
    window.sums = {"loss": torch.ones(()), "loss_ce": torch.ones(())}
    window.reduce()
    assert window.totals["signal"] > 0
    with pytest.raises(BadInput, match="cannot be written"):
        save_and_evaluate_when_due(t, window)
    assert newest(t).step == 1


@pytest.mark.parametrize(("batch_size", "searches"), [(1, True), (2, False)])
def test_convolutions_are_not_searched_for_the_last_batch_of_an_epoch(tmp_path, monkeypatch, batch_size, searches):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    t = make_training(tmp_path)
    t.plan = Plan(EpochSampler(3, batch_size), t.plan.schedule, total_steps=10)
    with TrainingWindow(t, [ONE_IMAGE])._watched(ONE_IMAGE):
        assert torch.backends.cudnn.benchmark == searches
    assert torch.backends.cudnn.benchmark


def gradient_of_learned_weight():
    t = make_training(None)
    t.loss_weights = LossWeights(["a"], {"a": "learned"}, {"a": 1.0})
    t.loss_weights.log_variances["a"].grad = torch.tensor(float(world()[0]))
    TrainingWindow(t, []).reduce()
    return t.loss_weights.log_variances["a"].grad.item()


def test_ranks_average_the_gradients_of_learned_weights():
    assert run_on_ranks(gradient_of_learned_weight, 2) == [0.5, 0.5]
