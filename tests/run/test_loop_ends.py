"""Rows of an epoch, and what is saved and said when a loop ends, whatever ends it."""

from types import SimpleNamespace

import pytest
import torch
from plain_training import CRITERION, END, TRAIN, UPDATE, evaluate_to, run_changed, toy_training

from toolkit.run.checkpoint import linked, newest_valid
from toolkit.run.loop import save_and_evaluate_when_due
from toolkit.run.metrics_log import read_metrics
from toolkit.run.validation import finish
from toolkit.step.schedules import PlateauSchedule, Schedule


def rows_with(folder, name: str) -> list[dict]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if name in row]


def test_every_row_of_training_has_the_norms_of_the_groups_and_no_average_has_them(tmp_path):
    """The first and the last row of an epoch too, whatever `log_every` is."""
    t = toy_training(tmp_path)
    t.log.log_every = 3
    run_changed(t)
    rows = rows_with(tmp_path, "train/loss")
    assert [row["step"] for row in rows] == [1, 3, 6, 8]
    assert all(row["train/grad_norm/main"] == row["train/grad_norm"] for row in rows)
    [averages] = rows_with(tmp_path, "epoch/loss")
    assert "epoch/grad_norm" in averages
    assert "epoch/grad_norm/main" not in averages


ADDS = " " * 12 + 'losses["loss_mine"] = losses["loss_ce"].new_ones(())\n'
WRITES = """        reduced["mine"] = 3.5
        t.log.note("noted", reduced["grad_norm"])
        t.log.write(t.step + 1, 0, {"written": reduced["grad_norm"]})
"""


def test_what_a_loop_adds_is_in_the_rows(tmp_path):
    """A loss of 1 stays 1 however many micro-batches make a step."""
    t = toy_training(tmp_path, accumulation_steps=3)
    t.announce("loss_mine", weight=0.5, divided_by="images")
    run_changed(t, (CRITERION, CRITERION + ADDS), (UPDATE, WRITES + UPDATE))
    for row in rows_with(tmp_path, "train/loss"):
        assert row["train/loss_mine_unscaled"] == pytest.approx(1.0)
        assert row["train/loss_mine"] == pytest.approx(0.5)
        assert row["train/mine"] == 3.5
        assert row["train/noted"] == row["train/grad_norm"]
    assert [row["step"] for row in rows_with(tmp_path, "written")] == [1, 2]


def test_accumulation_by_epoch_ends_with_the_epochs(tmp_path, capsys):
    t = toy_training(tmp_path)
    t.plan.total_steps = 24
    run_changed(t, (TRAIN, TRAIN + "    t.plan.accumulation_steps = 1 + t.sampler.epoch\n"), epochs=3)
    assert [row["epoch"] for row in rows_with(tmp_path, "train/loss")] == [0] * 8 + [1] * 4 + [2] * 3
    assert "the run ends after step 15" in capsys.readouterr().out


ENDINGS = {
    "early stopping": "",
    "max_decays": "",
    "an evaluation of the loop's own": "        t.validation.best.without_better = t.step - 3\n",
    "the script": "        if t.step == 5:\n            return {}\n",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_averages_of_an_epoch_are_a_row_whatever_ends_the_run_inside_it(tmp_path, ending):
    is_plateau = ending == "max_decays"
    eval_every = 1 if is_plateau or ending == "early stopping" else 0
    t = toy_training(tmp_path, PlateauSchedule if is_plateau else Schedule, eval_every=eval_every)
    evaluate_to(t, 0.5)
    if is_plateau:
        t.plan.schedule.options |= {"patience": 1, "max_decays": 4, "warmup_steps": 2}
    elif ending != "the script":
        t.validation.best.patience = 4 if eval_every else 2
    run_changed(t, (END, END + ENDINGS[ending]))
    assert t.step == 5
    assert not t.epoch_is_over
    finish(t)
    before = newest_valid(tmp_path / "checkpoints")[0].state
    finish(t)  # again
    assert newest_valid(tmp_path / "checkpoints")[0].state == before
    [averages] = rows_with(tmp_path, "epoch/loss")
    assert (averages["step"], averages["epoch"]) == (5, 0)


def test_an_evaluation_by_hand_is_saved_as_the_best(tmp_path):
    t = toy_training(tmp_path)
    for t.step in (1, 2):
        if t.step == 2:
            t.validation.best.value = 0.5
            t.validation.best.step = 2
        save_and_evaluate_when_due(t, SimpleNamespace(totals={"signal": 0.0}, best_step_before=-1))
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000002"]
    assert linked(tmp_path / "checkpoints", "best").name == "step_000002"


def test_weights_changed_after_training_are_said(tmp_path, capsys):
    t = toy_training(tmp_path)
    t.validation.best.evaluated_step = 8
    run_changed(t)
    finish(t)
    assert "were changed after the last update" not in capsys.readouterr().out
    t.detector.load_state_dict({"weight": torch.zeros(3)})
    t.validation.best.value = 0.5
    finish(t)
    said = capsys.readouterr().out
    assert "the weights were changed after the last update" in said
    assert "there is none in this run folder" in said
