"""Evaluating a run: what is saved before and after it, the best, pictures, and the weights at the end."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import run_on_ranks
from small_run import fill, make_training, newest, saved
from torch import nn

from toolkit.base.distributed import world
from toolkit.base.errors import Preempted, StoppedByGuard
from toolkit.run.best import no_such_metric
from toolkit.run.checkpoint import linked, load_checkpoint
from toolkit.run.saving import restore_checkpoint, save
from toolkit.run.validation import _forget_pictures, evaluate, finish, note_metric, save_and_evaluate
from toolkit.step.ema import Ema


def test_a_metric_that_is_nan_is_never_the_best():
    t = make_training(None, metric="loss")
    assert not note_metric(t, {"val/loss": float("nan")})
    assert note_metric(t, {"val/loss": 2.0})
    assert not note_metric(t, {"val/loss": float("nan")})
    assert t.validation.best.value == 2.0
    assert t.validation.best.without_better == 1


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("mAP50", "did you mean bbox_AP50?"),
        ("mAP50-95", "did you mean bbox_AP?"),
        ("AP/cta", "did you mean AP/cat?"),
        ("ema/mAP", "did you mean ema/bbox_AP?"),
        ("AP", "did you mean bbox_AP?"),
        ("nonsense", "there are bbox_AP, bbox_AP50, ema/NAME of averaged weights, AP/CLASS of a class"),
    ],
)
def test_an_unknown_metric_has_a_near_one_or_the_list(metric, expected):
    names = ["bbox_AP", "bbox_AP50", "AP/cat"]
    error = no_such_metric(metric, [*names, *(f"ema/{name}" for name in names)])
    assert str(error) == f"--eval.metric_for_best {metric}: no such metric; {expected}"


def test_the_state_is_saved_before_an_evaluation_that_fails(tmp_path):
    t = make_training(tmp_path, outcomes=[MemoryError("too many boxes")])
    t.step = 3
    with pytest.raises(MemoryError):
        save_and_evaluate(t)
    assert newest(t).step == 3
    assert newest(t).of_part("best")["evaluated_step"] == -1
    assert linked(tmp_path / "checkpoints", "best") is None


def test_an_evaluated_checkpoint_has_its_own_metric(tmp_path):
    """With the files that were written before."""
    folder = tmp_path / "checkpoints"
    third = folder / "step_000003"
    before = saved(tmp_path, steps=(3,), best=-1)
    weights = (third / "model.safetensors").stat().st_ino
    t = make_training(tmp_path, outcomes=[0.5, 0.25])
    restore_checkpoint(t, before)
    save_and_evaluate(t)
    best = {"metric": "bbox_AP", "value": 0.5, "step": 3, "evaluated_step": 3, "without_better": 0}
    assert newest(t).of_part("best") == best
    assert linked(folder, "best") == linked(folder, "latest") == third
    assert (third / "model.safetensors").stat().st_ino == weights, "not written twice"
    assert newest(t).tensors["model"] == before.tensors["model"]
    t.step = 4
    save_and_evaluate(t)
    assert linked(folder, "best") == third
    assert linked(folder, "latest").name == "step_000004"
    assert newest(t).of_part("best")["without_better"] == 1


def test_an_interrupted_evaluation_leaves_the_checkpoint_saved_before_it(tmp_path):
    saved(tmp_path, steps=(1, 2), best=1)
    t = make_training(tmp_path, signal=2)
    restore_checkpoint(t, load_checkpoint(tmp_path / "checkpoints" / "step_000001"))
    for t.step, step_of_newest in ((1, 2), (3, 3)):  # the one that was resumed stands already
        with pytest.raises(Preempted):
            save_and_evaluate(t)
        assert newest(t).step == step_of_newest
        assert newest(t).of_part("best")["evaluated_step"] != 3


@pytest.mark.parametrize("lost", ["model.safetensors", "MANIFEST.json", "."])
def test_a_checkpoint_damaged_while_it_is_evaluated_is_written_anew(tmp_path, lost):
    t = make_training(tmp_path)
    t.step = 3
    path = tmp_path / "checkpoints" / "step_000003"

    def lose(predictions):
        doomed = path / lost
        shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
        return {"bbox_AP": 0.5}

    t.validation.evaluator.evaluate = lose
    save_and_evaluate(t)
    assert load_checkpoint(path).of_part("best")["evaluated_step"] == 3
    assert linked(tmp_path / "checkpoints", "best") == path


@pytest.mark.parametrize(("newest_step", "expected"), [(8, [2, 4, 5, 6, 7, 8]), (1, [1, 2, 5, 6, 7, 8])])
def test_pictures_of_old_evaluations_go(tmp_path, newest_step, expected):
    """Also where the clock was put back: what has just been drawn stays."""
    for step in range(1, 9):
        path = tmp_path / f"step_{step:06d}.png"
        path.write_text("")
        os.utime(path, ns=(step, step))
    _forget_pictures(tmp_path / f"step_{newest_step:06d}.png", best="step_000002.png")
    assert sorted(int(path.stem[5:]) for path in tmp_path.iterdir()) == expected


@pytest.mark.parametrize(("metric", "weight"), [("bbox_AP", 2.0), ("ema/bbox_AP", 3.0)])
def test_a_best_checkpoint_that_was_damaged_costs_a_line(tmp_path, metric, weight, capsys):
    t = make_training(tmp_path, metric=metric)
    t.ema = Ema(t.detector, 0.9)
    t.validation.best.value = 0.5
    t.step = 1
    save(t, best=True)
    fill(t, 2.0)
    t.ema.module.weight.fill_(3.0)
    (tmp_path / "checkpoints" / "best" / "model.safetensors").write_bytes(b"torn")
    t.step = 2
    t.validation.best.evaluated_step = 2
    finish(t)
    said = capsys.readouterr().out
    assert "the best checkpoint cannot be used, final/ gets the weights of step 2: " in said
    assert "has 4 bytes" in said
    assert t.detector.weight.item() == weight
    assert linked(tmp_path / "checkpoints", "best").name == "step_000002"


def test_final_weights_are_looked_at(tmp_path):
    t = make_training(tmp_path)
    t.step = 1
    t.validation.best.evaluated_step = 1
    save(t, best=True)
    t.validation.best.value = 0.5
    finish(t)
    t.validation.best.value = None
    fill(t, float("nan"))
    with pytest.raises(StoppedByGuard):
        finish(t)


def last_weights(folder):
    """What the detector of this rank holds at the end of a run; only the main process sees the run folder."""
    t = make_training(Path(folder) if world()[0] == 0 else Path(folder) / "elsewhere")
    note_metric(t, {"val/bbox_AP": 0.5})
    save(t, best=True)
    t.step = 1
    fill(t, 7.0)
    note_metric(t, {"val/bbox_AP": 0.1})
    finish(t)
    return t.detector.weight.item()


def test_every_rank_ends_with_the_best_weights(tmp_path):
    assert run_on_ranks(last_weights, 2, str(tmp_path)) == [1.0, 1.0]


def buffers_after_evaluation(folder):
    """The buffers of raw and averaged weights that this rank has evaluated with."""
    t = make_training(Path(folder))
    t.detector.norm = nn.BatchNorm1d(2)
    t.detector.norm.running_mean.fill_(1.0 + world()[0])  # each rank gathered its own
    t.ema = Ema(t.detector, 0.9)
    t.log.writer = SimpleNamespace(log=lambda row: None, folder=t.folder)
    evaluate(t)
    return [module.norm.running_mean.tolist() for module in (t.detector, t.ema.module)]


def test_ranks_evaluate_with_the_buffers_of_the_main_one(tmp_path):
    assert run_on_ranks(buffers_after_evaluation, 2, str(tmp_path)) == [[[1.0, 1.0], [1.0, 1.0]]] * 2
