"""What a checkpoint of a run holds, what a resumed run takes up from it, and what it refuses."""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from small_run import Detector, make_training, newest, saved

from toolkit.base.errors import BadInput
from toolkit.run.best import Best
from toolkit.run.checkpoint import CheckpointError, linked, load_checkpoint
from toolkit.run.parts import WeightFacts
from toolkit.run.plan import StepBudget
from toolkit.run.saving import restore_checkpoint, roll_back, save
from toolkit.run.settings_file import Change
from toolkit.run.validation import finish, note_metric
from toolkit.step.ema import Ema
from toolkit.step.losses import LossWeights


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    (tmp_path / "metrics.jsonl").write_text("{}")

    def note(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(make_training(tmp_path))
    assert synced.index("metrics.jsonl") < synced.index("MANIFEST.json")


def test_masks_learned_weights_and_counts_outlive_a_resume(tmp_path):
    t = make_training(tmp_path)
    again = make_training(tmp_path)
    for training, mask in ((t, -math.inf), (again, 0.0)):
        training.loss_weights = LossWeights(Detector.loss_names, {"loss_ce": "learned"}, {"loss_ce": 1.0})
        training.detector.register_buffer("mask", torch.tensor([mask]))
        training.ema = Ema(training.detector, 0.9)
    t.loss_weights.load_state_dict({"log_variances.loss_ce": torch.tensor(0.25)})
    t.checkpoints.weight_facts = WeightFacts(t.detector)
    t.guard.rollbacks = 2
    t.guard.skips = 1
    t.step = 1
    t.ema.update(t.detector)
    save(t)
    restore_checkpoint(again, newest(t))
    assert (again.guard.rollbacks, again.guard.skips, again.ema.updates) == (2, 1, 1)
    assert again.detector.mask.tolist() == [-math.inf]
    assert again.loss_weights.log_variances["loss_ce"].item() == 0.25


def test_a_best_of_another_metric_starts_anew(tmp_path):
    checkpoint = saved(tmp_path, steps=(1, 2), best=1)
    t = make_training(tmp_path, metric="bbox_AP50")
    (note,) = restore_checkpoint(t, checkpoint)
    assert "best metric starts anew" in note
    assert t.validation.best.state_dict() == Best("bbox_AP50").state_dict()


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_best_that_is_gone_starts_anew(tmp_path, name):
    checkpoint = saved(tmp_path / "first", steps=(1, 2), best=1)
    shutil.rmtree(tmp_path / "first" / "checkpoints" / "step_000001")
    t = make_training(tmp_path / name)
    (note,) = restore_checkpoint(t, checkpoint)
    assert "step 1" in note
    assert t.validation.best.value is None
    assert t.validation.best.without_better == 1


def test_another_run_goes_on_with_a_copy_of_the_best(tmp_path):
    checkpoint = saved(tmp_path / "first", steps=(1, 2, 3), best=2)
    t = make_training(tmp_path / "second")
    assert restore_checkpoint(t, checkpoint) == []
    best = linked(tmp_path / "second" / "checkpoints", "best")
    assert best.name == "step_000002"
    assert load_checkpoint(best).state["step"] == t.validation.best.step == 2
    assert t.checkpoints.saved_step == -1, "nothing of step 3 is in this folder yet"
    assert t.validation.best.value == 0.5


def test_an_earlier_checkpoint_has_its_own_best_again(tmp_path):
    folder = tmp_path / "checkpoints"
    t = make_training(tmp_path)
    restore_checkpoint(t, saved(tmp_path, steps=(1, 2, 3), best=1))
    t.step = 4
    assert note_metric(t, {"val/bbox_AP": 0.9})
    save(t, best=True)
    second = load_checkpoint(folder / "step_000002")
    t = make_training(tmp_path)
    t.plan.eval_only = True
    restore_checkpoint(t, second)
    assert linked(folder, "best").name == "step_000004", "an evaluation changes nothing"
    t.plan.eval_only = False
    assert restore_checkpoint(t, second) == []
    assert linked(folder, "best").name == "step_000001"


def test_a_checkpoint_of_another_model_names_the_settings_that_differ(tmp_path):
    checkpoint = saved(tmp_path)
    checkpoint.tensors["model"] = {"weight": torch.ones(2)}
    changed = [Change(key, 1, 2, "used") for key in ("run.keep", "loss.weights", "optim.momentum", "model.d_model")]
    with pytest.raises(BadInput, match="size mismatch") as caught:
        restore_checkpoint(make_training(tmp_path), checkpoint, changed=changed)
    said = "of these settings: model.d_model 1 -> 2; loss.weights 1 -> 2; optim.momentum 1 -> 2."
    assert said in str(caught.value)


def test_a_checkpoint_of_other_classes_is_refused(tmp_path):
    checkpoint = saved(tmp_path)
    checkpoint.of_part("data")["categories"] = [{"id": 1, "name": "b"}]
    with pytest.raises(BadInput, match="b.*a"):
        restore_checkpoint(make_training(tmp_path), checkpoint)


# What each part did not write itself.
EDITED_PARTS = {
    "data": {},
    "sampler": {"num_samples": 4, "offset": 0},
    "weight_facts": {"frozen": ["gone"]},
    "plan": {"schedule": 7},
    "guard": {"skips": 1},
    "log": {"meters": {"loss": 7}},
    "best": {},
}


def test_an_edited_state_of_the_optimizer_is_one_sentence(tmp_path):
    checkpoint = saved(tmp_path)
    checkpoint.optimizer = {"param_groups": [7]}
    assert_refused(tmp_path, checkpoint, "optimizer")


@pytest.mark.parametrize("name", EDITED_PARTS)
def test_an_edited_state_of_a_part_is_one_sentence(tmp_path, name):
    checkpoint = saved(tmp_path)
    checkpoint.state["parts"][name] = EDITED_PARTS[name]
    assert_refused(tmp_path, checkpoint, name)


def assert_refused(folder: Path, checkpoint, name: str) -> None:
    (folder / "checkpoints" / "latest").unlink()
    with pytest.raises(CheckpointError, match=f"step_000001: the state of its part {name} cannot be used") as caught:
        restore_checkpoint(make_training(folder), checkpoint)
    assert len(caught.value.problems) == 1
    assert not (folder / "checkpoints" / "latest").exists(), "the run folder is not changed"


@pytest.mark.parametrize("follows_checkpoint", [True, False])
def test_minutes_asked_for_later_do_not_end_a_run_of_a_saved_length(tmp_path, follows_checkpoint):
    checkpoint = saved(tmp_path, steps=(9,), best=9)
    t = make_training(tmp_path)
    t.plan.budget = StepBudget(1.0)
    t.plan.follows_checkpoint = follows_checkpoint
    restore_checkpoint(t, checkpoint)
    assert (t.plan.budget is None) == follows_checkpoint


@pytest.mark.parametrize(("follows_checkpoint", "rate"), [(True, 0.1), (False, 0.2)])
def test_a_rollback_keeps_the_rates_of_a_new_schedule(tmp_path, follows_checkpoint, rate):
    t = make_training(tmp_path)
    save(t)
    t.plan.follows_checkpoint = follows_checkpoint
    t.optimizer.param_groups[0]["initial_lr"] = 0.2
    roll_back(t, newest(t))
    assert t.optimizer.param_groups[0]["initial_lr"] == rate


@pytest.mark.parametrize("batches", [2, 4], ids=["inside an epoch", "at its end"])
def test_killed_before_its_last_evaluation_a_run_ends_with_the_same_state(tmp_path, batches):
    """What is saved when that is the best so far has the averages of the epoch, or has begun the next one."""
    states = []
    for name in ("uninterrupted", "killed"):
        t = make_training(tmp_path / name)
        t.log.averages.add({"loss": 4.0})
        t.log.epoch_steps = batches
        t.step = 10
        t.sampler.advance_batches(batches)
        save(t)
        if name == "uninterrupted":
            t.end_epoch()
        else:
            restore_checkpoint(t, newest(t))
        finish(t)
        state = newest(t).state
        del state["parts"]["log"]["elapsed_s"]
        states.append(state)
    assert states[0] == states[1]
    parts = states[0]["parts"]
    assert parts["best"]["step"] == 10
    is_over = batches == 4
    assert (parts["log"]["averages"] == {}) == is_over
    assert (parts["sampler"]["epoch"] == 1) == is_over
