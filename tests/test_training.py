"""What a run does apart from its loop: recovering, judging an evaluation, taking up a checkpoint."""

import math
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import run_on_ranks
from torch import nn

from toolkit.base.batch import Batch
from toolkit.base.distributed import world
from toolkit.base.errors import BadInput, Preempted
from toolkit.data.sampling import EpochSampler
from toolkit.data.table import Category
from toolkit.models import detector as base
from toolkit.run import loop
from toolkit.run.best import Best
from toolkit.run.checkpoint import CheckpointError, linked, load_checkpoint, newest_valid
from toolkit.run.log import Log
from toolkit.run.parts import TrainingData, WeightFacts
from toolkit.run.plan import Plan, StepBudget
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints, restore_checkpoint, roll_back, save
from toolkit.run.settings_file import Change
from toolkit.run.training import Training
from toolkit.run.training_window import TrainingWindow
from toolkit.run.validation import Validation, _forget_pictures, finish, note_metric, save_and_evaluate
from toolkit.step.ema import Ema
from toolkit.step.losses import LossWeights
from toolkit.step.schedules import Schedule

NO_ROWS = {"rows": 0}
NOTHING = Batch(torch.zeros(0, 3, 2, 2, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int64), [])


class Detector(base.Detector):
    """One weight; its loss is the mean of the images times it."""

    loss_names, divided_by = ("loss_ce",), "images"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images, sizes, targets=None):
        return images.float().mean() * self.weight

    def criterion(self, outputs, targets, denominators):
        return {"loss_ce": outputs / denominators["images"]}, {}


def make_training(folder, policy="stop", scaler=None, metric="bbox_AP", evaluator=None, val_loader=None, keep=2,
                  **options) -> Training:  # fmt: skip
    """On one process, with what Accelerate makes (a scaler, that is) given plainly: it has none on a CPU."""
    detector = Detector()
    optimizer = torch.optim.SGD([{"params": [*detector.parameters()], "name": "main"}], lr=0.1)
    accelerator = SimpleNamespace(scaler=scaler, process_index=0, mixed_precision="no", is_main_process=True,
                                  device="cpu", autocast=nullcontext, num_processes=1,
                                  unscale_gradients=lambda: None)  # fmt: skip
    table = SimpleNamespace(categories=(Category(1, "a"),), class_names=["a"], predicates=(), attributes=(),
                            identity={}, changed_since=lambda before: "")  # fmt: skip
    log = Log(True)
    log.writer = SimpleNamespace(state_dict=lambda: NO_ROWS, folder=folder)
    return Training(
        accelerator=accelerator, model=detector, detector=detector, optimizer=optimizer,
        loss_weights=LossWeights(Detector.loss_names, {}, {"loss_ce": 1.0}),
        plan=Plan(EpochSampler(4, 1), Schedule(optimizer), total_steps=10),
        guard=RunGuard(policy), data=TrainingData(None, {"validation": table}), folder=folder, log=log,
        validation=Validation(table, val_loader, evaluator, best=Best(metric)),
        checkpoints=Checkpoints(folder and folder / "checkpoints", WeightFacts(detector), keep=keep),
        **({"signals": None} | options),
    )  # fmt: skip


FLAGS = {"buffers_finite": 1.0, "boxes_finite": 1.0, "state_finite": 1.0, "signal": 0.0, "time_s": 0.0, "notes": 0.0}


def window_with(t, batches, reduced, **flags) -> TrainingWindow:
    """The window under way, whose losses are reduced already."""
    t.window = TrainingWindow(t, batches)
    t.window.all_denominators = [{"images": 1.0} for _ in batches]
    t.window.reduced = dict(reduced)
    t.window.totals = {**reduced, **FLAGS, **flags}
    return t.window


def accepts(t, batches, reduced, **flags) -> bool:
    return t.guard.accepts(window_with(t, batches, reduced, **flags), reduced)


@pytest.mark.parametrize(("policy", "updates_left"), [("skip", 2), ("rollback", 1)])
def test_a_refused_window_leaves_a_scaler_that_goes_on(policy, updates_left, tmp_path):
    """The scaler has unscaled the gradients and takes no second unscaling before an update of its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    t = make_training(tmp_path, policy, scaler)
    t.loss_weights = LossWeights(Detector.loss_names, {"loss_ce": "learned"}, {"loss_ce": 1.0})
    window = [Batch(torch.ones(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[2, 2]]), [{"image_id": 1}])]
    for value in (1.0, math.nan, 1.0):
        t.guard.snapshot(t.detector)
        if t.step == 0 and policy == "rollback":
            save(t)
        scaler.scale(t.detector.weight * value).backward()
        scaler.unscale_(t.optimizer)
        if math.isfinite(value):
            scaler.step(t.optimizer)
            scaler.update()
            t.optimizer.zero_grad()
            t.step += 1
        else:
            t.loss_weights.log_variances["loss_ce"].grad = torch.ones(())  # of the same window
            assert not accepts(t, window, {"loss": value, "loss_ce": value, "grad_norm": value})
            assert t.loss_weights.log_variances["loss_ce"].grad is None
    assert scaler.get_scale() == 8.0
    assert t.detector.weight.item() == pytest.approx(1 - 0.1 * updates_left)


STEP = {"loss": 1.0, "loss_ce": 1.0, "loss_ce_unscaled": 1.0, "grad_norm": 1.0}


def note_step(t) -> None:
    t.meters.update(STEP)
    t.plan.note_update()
    loop.note_step(t, window_with(t, [NOTHING], STEP))


def test_the_time_that_is_left_is_no_longer_than_the_minutes_that_are_left(tmp_path):
    """Until the length is planned from the speed, the steps that are left are those of all epochs."""
    t = make_training(tmp_path)
    rows = []
    t.log.start(SimpleNamespace(log=rows.append), {}, 0, t.plan.total_steps)
    t.log.log_every = 1
    t.plan.budget = StepBudget(max_minutes=1e-9)
    t.log.timer.start()
    t.sampler.advance_batches(1)
    t.step = 1
    note_step(t)
    assert rows[0]["time/eta_s"] == pytest.approx(6e-8) and rows[0]["time/step_s"] > 6e-8


def test_the_first_and_the_last_step_of_an_epoch_have_a_line(tmp_path, capsys):
    """As in DETR, and each line is a row too. Fifteen images for two ranks."""
    t, rows, images = make_training(tmp_path), [], []
    sampler = EpochSampler(15, 2, world_size=2)
    t.plan = Plan(sampler, t.plan.schedule, 11, steps_per_epoch=4, warmup_steps=50)
    t.log = Log(True, steps_per_epoch=4, log_every=5)
    t.log.start(SimpleNamespace(log=rows.append), {}, 0, t.plan.total_steps)
    t.log.averages.add = lambda values, n: images.append(n)
    for t.step in range(1, 12):
        t.sampler.advance_batches(1)
        note_step(t)
        if t.epoch_is_over:
            t.end_epoch()
    lines = re.findall(r"step (\d+)/11", capsys.readouterr().out)
    assert lines == ["1", "4", "5", "8", "9", "10", "11"]
    assert [row["step"] for row in rows if "train/loss" in row] == list(map(int, lines))
    assert images[:5] == [4, 4, 4, 3, 4]
    for steps in (40, 20, 2):  # `run.max_minutes` plans the length several times: said once
        t.log.set_total_steps(steps, t.plan.set_length(steps, t.step))
    said = capsys.readouterr().out
    assert said.count("training takes") == 3
    assert said.count("warning: training ends inside the warm-up") == 1 == said.count("steps of an epoch")


@pytest.mark.parametrize(("every", "expected"), [(0, []), (4, [5, 8]), (1, [5, 6, 7, 8])])
def test_the_table_of_gradients_comes_with_the_first_step_of_a_start_too(tmp_path, capsys, every, expected):
    """As Scene-Graph-Benchmark prints it (`print_first_grad`)."""
    t = make_training(tmp_path)
    t.guard.gradient_table_every = every
    t.guard.snapshot(t.detector)
    t.detector.weight.grad = torch.ones(())
    printed = []
    for t.step in range(4, 8):  # resumed at step 4
        assert accepts(t, [NOTHING], STEP)
        printed += [t.step + 1] * capsys.readouterr().out.count("---Total norm")
    assert printed == expected


def test_a_metric_that_is_nan_is_never_the_best(tmp_path):
    t = make_training(tmp_path, metric="loss")
    assert not note_metric(t, {"val/loss": math.nan})
    assert note_metric(t, {"val/loss": 2.0})
    assert not note_metric(t, {"val/loss": math.nan})
    assert (t.validation.best.value, t.validation.best.without_better) == (2.0, 1)


def saved(folder, steps=(1,), best=1, **options):
    """Checkpoints of a run at `steps`, the best at `best`; the last one, read back."""
    t = make_training(folder, keep=5, **options)
    for t.step in steps:
        note_metric(t, {"val/bbox_AP": 0.5 if t.step == best else 0.1})
        save(t, best=t.step == best)
    return newest_valid(folder / "checkpoints")[0]


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    (tmp_path / "metrics.jsonl").write_text("{}")

    def note(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(make_training(tmp_path))
    assert synced.index("metrics.jsonl") < synced.index("MANIFEST.json")


def test_a_best_of_another_metric_or_one_that_is_gone_starts_anew(tmp_path):
    checkpoint = saved(tmp_path / "first", steps=(1, 2), best=1)
    t = make_training(tmp_path / "first", metric="bbox_AP50")
    (note,) = restore_checkpoint(t, checkpoint)
    assert "best metric starts anew" in note
    assert (t.validation.best.value, t.validation.best.evaluated_step) == (None, -1)
    shutil.rmtree(tmp_path / "first" / "checkpoints" / "step_000001")
    for name in ("first", "second"):
        t = make_training(tmp_path / name)
        (note,) = restore_checkpoint(t, checkpoint)
        assert "step 1" in note and t.validation.best.value is None
        assert t.validation.best.without_better == 1


def test_masks_learned_weights_and_the_counts_of_guard_and_averages_outlive_a_resume(tmp_path):
    t, again = make_training(tmp_path), make_training(tmp_path)
    for training in (t, again):
        training.loss_weights = LossWeights(Detector.loss_names, {"loss_ce": "learned"}, {"loss_ce": 1.0})
    t.loss_weights.load_state_dict({"log_variances.loss_ce": torch.tensor(0.25)})
    t.detector.register_buffer("mask", torch.tensor([-math.inf]))
    t.checkpoints.weight_facts = WeightFacts(t.detector)
    t.ema, t.guard.rollbacks, t.guard.skips, t.step = Ema(t.detector, 0.9), 2, 1, 1
    t.ema.update(t.detector)
    save(t)
    again.detector.register_buffer("mask", torch.zeros(1))
    again.ema = Ema(again.detector, 0.9)
    restore_checkpoint(again, newest_valid(tmp_path / "checkpoints")[0])
    assert (again.guard.rollbacks, again.guard.skips, again.ema.updates) == (2, 1, 1)
    assert again.detector.mask.tolist() == [-math.inf]
    assert again.loss_weights.log_variances["loss_ce"].item() == 0.25


def test_another_run_goes_on_with_a_copy_of_the_best(tmp_path):
    checkpoint = saved(tmp_path / "first", steps=(1, 2, 3), best=2)
    t = make_training(tmp_path / "second")
    assert restore_checkpoint(t, checkpoint) == []
    best = linked(tmp_path / "second" / "checkpoints", "best")
    assert best.name == "step_000002"
    assert load_checkpoint(best).state["step"] == t.validation.best.step == 2
    assert t.checkpoints.saved_step == -1  # nothing of step 3 is in this folder yet
    assert t.validation.best.value == 0.5


def test_an_earlier_checkpoint_has_its_own_best_again(tmp_path):
    saved(tmp_path, steps=(1, 2, 3), best=1)
    t = make_training(tmp_path, keep=5)
    restore_checkpoint(t, newest_valid(tmp_path / "checkpoints")[0])
    t.step = 4
    assert note_metric(t, {"val/bbox_AP": 0.9})
    save(t, best=True)
    t, second = make_training(tmp_path, keep=5), load_checkpoint(tmp_path / "checkpoints" / "step_000002")
    t.plan.eval_only = True
    restore_checkpoint(t, second)
    t.plan.eval_only = False
    assert linked(tmp_path / "checkpoints", "best").name == "step_000004"
    assert restore_checkpoint(t, second) == []
    assert linked(tmp_path / "checkpoints", "best").name == "step_000001"


def test_a_checkpoint_of_other_classes_or_another_model_is_refused(tmp_path):
    checkpoint = saved(tmp_path)
    checkpoint.tensors["model"] = {"weight": torch.ones(2)}
    changed = [Change(key, 1, 2, "used") for key in ("run.keep", "loss.weights", "optim.momentum", "model.d_model")]
    with pytest.raises(BadInput, match="size mismatch") as caught:
        restore_checkpoint(make_training(tmp_path), checkpoint, changed=changed)
    said = "settings make: model.d_model 1 -> 2; loss.weights 1 -> 2; optim.momentum 1 -> 2."
    assert said in str(caught.value)
    checkpoint.of_part("data")["categories"] = [{"id": 1, "name": "b"}]
    with pytest.raises(BadInput, match="b.*a"):
        restore_checkpoint(make_training(tmp_path), checkpoint)


EDITED_PARTS = {
    "data": {},
    "optimizer": {"param_groups": [7]},
    "sampler": {"num_samples": 4, "offset": 0},
    "weight_facts": {"frozen": ["gone"]},
    "plan": {"schedule": 7},
    "guard": {"skips": 1},
    "log": {"meters": {"loss": 7}},
    "best": {},
}


@pytest.mark.parametrize("name", EDITED_PARTS)
def test_a_state_that_a_part_did_not_write_is_one_sentence(tmp_path, name):
    checkpoint = saved(tmp_path)
    if name == "optimizer":
        checkpoint.optimizer = EDITED_PARTS[name]
    else:
        checkpoint.state["parts"][name] = EDITED_PARTS[name]
    (tmp_path / "checkpoints" / "latest").unlink()
    with pytest.raises(CheckpointError, match=f"step_000001: the state of its part {name} cannot be used") as caught:
        restore_checkpoint(make_training(tmp_path), checkpoint)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "checkpoints" / "latest").exists(), "the run folder is not changed"


def test_minutes_asked_for_later_do_not_end_a_run_of_a_saved_length(tmp_path):
    checkpoint = saved(tmp_path, steps=(9,), best=9)
    for follows_checkpoint in (True, False):
        t = make_training(tmp_path)
        t.plan.budget = StepBudget(1.0)
        t.plan.follows_checkpoint = follows_checkpoint
        restore_checkpoint(t, checkpoint)
        assert (t.plan.budget is None) == follows_checkpoint


def test_a_rollback_keeps_the_rates_of_a_command_that_does_not_follow_the_checkpoint(tmp_path):
    for follows_checkpoint, rate in ((True, 0.1), (False, 0.2)):
        t = make_training(tmp_path / str(follows_checkpoint))
        save(t)
        t.plan.follows_checkpoint = follows_checkpoint
        t.optimizer.param_groups[0]["initial_lr"] = 0.2
        roll_back(t, newest_valid(t.checkpoints.folder)[0])
        assert t.optimizer.param_groups[0]["initial_lr"] == rate


def test_an_interrupted_evaluation_leaves_the_checkpoint_that_was_saved_before_it(tmp_path):
    saved(tmp_path, steps=(1, 2), best=1)
    t = make_training(tmp_path, keep=5, signals=SimpleNamespace(received=2), val_loader=[NOTHING])
    restore_checkpoint(t, load_checkpoint(tmp_path / "checkpoints" / "step_000001"))
    for t.step, newest in ((1, 2), (3, 3)):  # the one that was resumed stands already
        with pytest.raises(Preempted):
            save_and_evaluate(t)
        checkpoint, _ = newest_valid(tmp_path / "checkpoints")
        assert checkpoint.step == newest and checkpoint.of_part("best")["evaluated_step"] != 3


class Evaluator:
    """Metrics that are given, in turn; an exception among them is raised."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def evaluate(self, predictions):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return {"bbox_AP": outcome}

    def describe(self, *_):
        return ""


def test_whatever_an_evaluation_does_the_state_is_saved_before_it(tmp_path):
    """And afterwards the checkpoint has its own metric, with the files that were written before."""
    evaluator = Evaluator(MemoryError("too many boxes"), 0.5, 0.25)
    t = make_training(tmp_path, evaluator=evaluator, val_loader=[NOTHING], signals=SimpleNamespace(received=0))
    t.log.writer = SimpleNamespace(state_dict=lambda: NO_ROWS, folder=tmp_path, log=lambda row: None, shows=False)
    t.validation.pictures = 0
    folder = tmp_path / "checkpoints"
    t.step = 3
    with pytest.raises(MemoryError):
        save_and_evaluate(t)
    before, _ = newest_valid(folder)
    assert before.step == 3 and before.of_part("best")["evaluated_step"] == -1 and linked(folder, "best") is None
    weights = (folder / "step_000003" / "model.safetensors").stat().st_ino

    again = make_training(tmp_path, evaluator=evaluator, val_loader=[NOTHING], signals=SimpleNamespace(received=0))
    again.log.writer, again.validation.pictures = t.log.writer, 0
    restore_checkpoint(again, before)
    save_and_evaluate(again)
    after, _ = newest_valid(folder)
    best = {"metric": "bbox_AP", "value": 0.5, "step": 3, "evaluated_step": 3, "without_better": 0}
    assert (after.step, after.of_part("best")) == (3, best)
    assert linked(folder, "best") == linked(folder, "latest") == folder / "step_000003"
    assert (folder / "step_000003" / "model.safetensors").stat().st_ino == weights, "not written twice"
    assert all(torch.equal(after.tensors["model"][k], before.tensors["model"][k]) for k in before.tensors["model"])

    again.step = 4
    save_and_evaluate(again)
    assert linked(folder, "best").name == "step_000003" and linked(folder, "latest").name == "step_000004"
    assert newest_valid(folder)[0].of_part("best")["without_better"] == 1


@pytest.mark.parametrize("lost", ["model.safetensors", "MANIFEST.json", "."])
def test_a_checkpoint_that_is_damaged_while_it_is_evaluated_is_written_anew(tmp_path, lost):
    t = make_training(tmp_path, val_loader=[NOTHING], signals=SimpleNamespace(received=0))
    t.log.writer = SimpleNamespace(state_dict=lambda: NO_ROWS, folder=tmp_path, log=lambda row: None, shows=False)
    t.validation.pictures, t.step = 0, 3
    path = tmp_path / "checkpoints" / "step_000003"

    def lose(predictions):
        doomed = path / lost
        shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
        return {"bbox_AP": 0.5}

    t.validation.evaluator = SimpleNamespace(evaluate=lose, describe=lambda *_: "")
    save_and_evaluate(t)
    assert load_checkpoint(path).of_part("best")["evaluated_step"] == 3
    assert linked(tmp_path / "checkpoints", "best") == path


def test_averages_of_an_epoch_are_logged_where_early_stopping_ends_inside_it(tmp_path, capsys):
    rows = []
    t = make_training(tmp_path, evaluator=Evaluator(0.5, 0.25), val_loader=[NOTHING],
                      signals=SimpleNamespace(received=0))  # fmt: skip
    t.validation.best.patience, t.validation.pictures = 1, 0
    t.log.writer = SimpleNamespace(state_dict=lambda: NO_ROWS, folder=tmp_path, log=rows.append, shows=False)
    for t.step in (1, 2):
        t.sampler.advance_batches(1)
        note_step(t)
        save_and_evaluate(t)
    assert t.finished and not t.epoch_is_over
    (averages,) = [row for row in rows if "epoch/loss" in row]
    assert averages["step"] == 2 and "epoch 1 averages" in capsys.readouterr().out
    # Given more patience and steps, the epoch goes on, and its averages come at its end too.
    t.log.log_epoch(2, 0)
    t.sampler.advance_batches(1)
    t.step = 3
    note_step(t)
    t.log.log_epoch(3, 0)
    assert [row["step"] for row in rows if "epoch/loss" in row] == [2, 3]


@pytest.mark.parametrize("newest", [8, 1])
def test_pictures_of_old_evaluations_go(tmp_path, newest):
    """Also where the clock was put back: what has just been drawn stays."""
    for step in range(1, 9):
        (tmp_path / f"step_{step:06d}.png").write_text("")
        os.utime(tmp_path / f"step_{step:06d}.png", ns=(step, step))
    _forget_pictures(tmp_path / f"step_{newest:06d}.png", best="step_000002.png")
    kept = sorted(int(path.stem[5:]) for path in tmp_path.iterdir())
    assert kept == ([2, 4, 5, 6, 7, 8] if newest == 8 else [1, 2, 5, 6, 7, 8])


def last_weights(folder):
    """What the detector of this rank holds at the end of a run; only the main process sees the run folder."""
    t = make_training(Path(folder) if world()[0] == 0 else Path(folder) / "elsewhere")
    note_metric(t, {"val/bbox_AP": 0.5})
    save(t, best=True)
    t.step = 1
    with torch.no_grad():
        t.detector.weight.fill_(7.0)
    note_metric(t, {"val/bbox_AP": 0.1})
    finish(t)
    return t.detector.weight.item()


def test_every_rank_ends_with_the_best_weights_wherever_the_run_folder_is(tmp_path):
    assert run_on_ranks(last_weights, 2, str(tmp_path)) == [1.0, 1.0]


@pytest.mark.parametrize("batches", [2, 4], ids=["inside an epoch", "at its end"])
def test_killed_before_its_last_evaluation_it_ends_with_the_same_state(tmp_path, batches):
    """What is saved when that is the best so far has the averages of the epoch, or has begun the next one."""
    states = []
    for name in ("uninterrupted", "killed"):
        t = make_training(tmp_path / name, keep=5, signals=SimpleNamespace(received=0))
        t.validation.loader, t.validation.pictures = [NOTHING], 0
        t.validation.evaluator = SimpleNamespace(evaluate=lambda found: {"bbox_AP": 0.5}, describe=lambda *_: "")
        t.log.writer = SimpleNamespace(log=lambda row: None, folder=t.folder, state_dict=lambda: NO_ROWS)
        t.log.averages.add({"loss": 4.0})
        t.log.epoch_steps, t.step = batches, 10
        t.sampler.advance_batches(batches)
        save(t)
        if name == "uninterrupted":
            t.end_epoch()
        else:
            restore_checkpoint(t, newest_valid(t.folder / "checkpoints")[0])
        finish(t)
        state = newest_valid(t.folder / "checkpoints")[0].state
        del state["parts"]["log"]["elapsed_s"]
        states.append(state)
    assert states[0] == states[1] and states[0]["parts"]["best"]["step"] == 10
    parts = states[0]["parts"]
    assert (parts["log"]["averages"] == {}) == (batches == 4) == (parts["sampler"]["epoch"] == 1)
