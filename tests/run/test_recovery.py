"""The guard of a run: what updates leave is looked at, and what is not finite is reported, undone and never saved."""

import math

import pytest
import torch
from small_run import INF, NAN, ONE_IMAGE, Detector, accepts, fill, make_training, newest
from torch import nn

from toolkit.base.batch import Batch
from toolkit.base.errors import Preempted, StoppedByGuard
from toolkit.run.checkpoint import load_checkpoint
from toolkit.run.loop import save_and_evaluate_when_due
from toolkit.run.recovery import keep_start, tensors_to_check
from toolkit.run.saving import save
from toolkit.run.training_window import TrainingWindow
from toolkit.step.ema import Ema
from toolkit.step.guard import STATE_PARTS, Action, NanGuard, looks_finite, nonfinite, unusable_rate
from toolkit.step.losses import LossWeights
from toolkit.tools.replay.diagnosis import replay
from toolkit.tools.replay.nan_report import STATE_TENSORS_FILE, load_named_state, load_report


def after_a_step(t, signal: float = 0.0) -> None:
    """Save and evaluate what is due after the step under way."""
    window = TrainingWindow(t, [])
    window.totals = {"signal": signal}
    save_and_evaluate_when_due(t, window)


def reports(t) -> list:
    """(report, micro-batches, state of the model, folder) of each report."""
    return [(*load_report(folder)[:3], folder) for folder in t.folder.glob("nan/*/rank0")]


def with_all_state(folder):
    """A training with everything that can break, and the tensors by the names that reports have for them."""
    t = make_training(folder)
    t.detector.norm = nn.BatchNorm1d(2)
    t.detector.register_buffer("mask", torch.tensor([0.0, -INF]))
    t.guard.watch(t.detector)
    t.guard.snapshot(t.detector)
    t.ema = Ema(t.detector, 0.9)
    t.loss_weights = LossWeights(["loss_ce"], {"loss_ce": "learned"}, {"loss_ce": 1.0})
    t.optimizer = torch.optim.Adam([{"params": [*t.detector.norm.parameters()], "name": "main"}], lr=0.1)
    t.detector.norm(torch.rand(3, 2)).sum().backward()
    t.optimizer.step()
    critic = nn.Linear(1, 1)
    t.extra["critic"] = critic
    moments = t.optimizer.state[t.detector.norm.bias]
    tensors = {
        "weight norm.weight": t.detector.norm.weight,
        "buffer norm.running_var": t.detector.norm.running_var,
        "moving average of norm.bias": t.ema.module.norm.bias,
        "moving average of norm.running_mean": t.ema.module.norm.running_mean,
        "exp_avg of norm.bias": moments["exp_avg"],
        "exp_avg_sq of norm.bias": moments["exp_avg_sq"],
        "loss weight log_variances.loss_ce": t.loss_weights.log_variances["loss_ce"],
        "t.extra critic.weight": critic.weight,
    }
    return t, tensors


NAMES = list(with_all_state(None)[1])


def spoil(tensor, value=NAN) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = value


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_the_state_is_seen_and_named(name, value):
    t, tensors = with_all_state(None)
    assert nonfinite(tensors_to_check(t)) == [], "a mask of infinities is meant"
    spoil(tensors[name], value)
    assert nonfinite(tensors_to_check(t)) == ([] if math.isfinite(value) else [name])
    looked = [bool(looks_finite(tensors_to_check(t), part)) for part in range(STATE_PARTS)]
    assert looked.count(False) == 1 or value == 3e38  # that one is told from an infinity by `nonfinite`


@pytest.mark.parametrize(("kind", "fits", "overflows"), [(torch.optim.SGD, 3e38, 3e39), (torch.optim.Adam, 3e37, 3e38)])
def test_a_rate_that_float32_cannot_hold(kind, fits, overflows):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = kind([{"params": [parameter], "name": "main"}], lr=fits)
    assert unusable_rate(optimizer.param_groups) == ""
    optimizer.step()
    optimizer.param_groups[0]["lr"] = overflows
    assert unusable_rate(optimizer.param_groups)
    with pytest.raises(RuntimeError, match="overflow"):
        optimizer.step()
    optimizer.param_groups[0] |= {"lr": fits, "weight_decay": 1e38}
    assert unusable_rate(optimizer.param_groups), "their product overflows"


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_what_another_window_cannot_mend_is_not_skipped(policy):
    guard = NanGuard(policy)
    action = guard.decide(3, {"loss": 1.0}, 1.0, 8.0, faults=["a weight is broken"])
    assert action is (Action.ROLLBACK if policy == "rollback" else Action.STOP)
    assert guard.reason == "after step 3: a weight is broken"


# ---- windows that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "updates_left"), [("skip", 2), ("rollback", 1)])
def test_a_refused_window_leaves_a_scaler_that_goes_on(policy, updates_left, tmp_path):
    """The scaler has unscaled the gradients and takes no second unscaling before an update of its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    t = make_training(tmp_path, policy, scaler)
    t.loss_weights = LossWeights(Detector.loss_names, {"loss_ce": "learned"}, {"loss_ce": 1.0})
    if policy == "rollback":
        save(t)
    for value in (1.0, NAN, 1.0):
        scaler.scale(t.detector.weight * value).backward()
        scaler.unscale_(t.optimizer)
        if math.isfinite(value):
            scaler.step(t.optimizer)
            scaler.update()
            t.optimizer.zero_grad()
            t.step += 1
        else:
            t.loss_weights.log_variances["loss_ce"].grad = torch.ones(())  # of the same window
            assert not accepts(t, value, value)
            assert t.loss_weights.log_variances["loss_ce"].grad is None
    assert scaler.get_scale() == 8.0
    assert t.detector.weight.item() == pytest.approx(1 - 0.1 * updates_left)


def with_gradient(folder, entry):
    """A training under a scaler after a backward pass; its optimizer notes the gradient that it steps with."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    t = make_training(folder, "stop", scaler)
    t.detector.weight.grad = torch.tensor(entry)
    scaler.scale(torch.ones(()))
    updates = []
    t.optimizer.step = lambda: updates.append(t.detector.weight.grad.item())
    return t, updates


def test_a_norm_that_overflows_over_finite_gradients_stops(tmp_path):
    t, updates = with_gradient(tmp_path, 3e38)
    with pytest.raises(StoppedByGuard, match="the gradient norm of finite gradients is inf"):
        accepts(t, norm=INF)
    assert updates == []


def test_infinite_gradients_are_left_to_the_scaler(tmp_path):
    """It skips this update, whose gradients are forgotten."""
    t, updates = with_gradient(tmp_path, INF)
    assert not accepts(t, norm=INF)
    assert "of finite gradients" not in t.guard.reason
    assert updates == [INF]
    assert t.detector.weight.grad is None


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_box_that_is_not_finite_is_refused_whatever_its_losses_are(tmp_path, value):
    t = make_training(tmp_path, "skip")
    t.detector.denominators = lambda targets: {"images": len(targets)}
    targets = [{"image_id": 7, "boxes": torch.tensor([[0.0, 0.0, value, 1.0]]), "labels": torch.tensor([0])}]
    window = TrainingWindow(t, [Batch(ONE_IMAGE.images, ONE_IMAGE.sizes, targets)])
    t.window = window
    t.check.begin(t.step, len(window))
    for batch in window:
        assert batch.targets[0]["boxes"].isfinite().all()
        outputs = t.detector(batch.images, batch.sizes)
        losses, metrics = t.detector.criterion(outputs, batch.targets, window.denominators)
        window.add(t.loss_weights(losses), metrics)
    reduced = window.reduce()
    assert math.isfinite(reduced["loss"])
    assert window.totals["boxes_finite"] == 0.0
    assert not t.guard.accepts(window, reduced)
    assert "a box of the batch is not finite" in t.guard.reason
    ((report, again, *_),) = reports(t)
    assert report["where"] == "batch"
    assert report["batch"] == ["micro-batch 0: targets of image 7: boxes"]
    assert not again[0].targets[0]["boxes"].isfinite().all(), "the report has the box as it was"


def test_a_rate_too_large_stops_before_anything_moves(tmp_path):
    t = make_training(tmp_path, "skip")
    t.optimizer.param_groups[0]["lr"] = 3e39
    with pytest.raises(StoppedByGuard, match="the learning rate of main is 3e\\+39, too large for float32"):
        accepts(t)
    assert load_checkpoint(tmp_path / "checkpoints" / "step_000000").tensors["model"]["weight"] == 1.0
    ((report, *_),) = reports(t)
    assert report["where"] == "rate"


# ---- state that broke ------------------------------------------------------------------------------------------------


def test_the_last_update_is_looked_at_with_the_next_steps(tmp_path):
    t = make_training(tmp_path)
    save(t)
    t.step = 2
    assert [t.guard.next_part_looks_finite() for _ in range(STATE_PARTS)] == [1.0] * STATE_PARTS
    fill(t, INF)
    assert [t.guard.next_part_looks_finite() for _ in range(STATE_PARTS)].count(0.0) == 1
    with pytest.raises(StoppedByGuard, match="left tensors that are not finite: weight weight"):
        accepts(t, state_finite=0.0)
    assert newest(t).step == 0, "nothing newer was written"
    ((report, *_),) = reports(t)
    assert report["where"] == "state"


@pytest.mark.parametrize("is_in_window", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_report_holds_the_state_that_broke_and_is_replayed(tmp_path, name, is_in_window):
    """In a window, or where a save is due. Only weights are part of the model's state in every report."""
    t, tensors = with_all_state(tmp_path)
    if not is_in_window:
        t.checkpoints.save_every = 1
        assert accepts(t)
        t.step += 1
    spoil(tensors[name])
    if is_in_window:
        t.guard.snapshot(t.detector)
    with pytest.raises(StoppedByGuard, match=name):
        accepts(t, state_finite=0.0) if is_in_window else after_a_step(t)
    ((report, window, state, folder),) = reports(t)
    assert (report["where"], report["nonfinite_state"]) == ("state", [name])
    t.detector.load_state_dict(state)
    again = replay(t.detector, report, window, list, load_named_state(folder))
    assert (again["reproduced"], again["nonfinite_state"], again["lacking"]) == (True, [name], [])

    (folder / STATE_TENSORS_FILE).unlink()  # as older versions left them
    with torch.no_grad():
        t.detector.norm.running_var.fill_(1.0)
    older = replay(t.detector, report, window, list, load_named_state(folder))
    is_weight = name.startswith("weight")
    assert older["reproduced"] == is_weight
    assert older["lacking"] == ([] if is_weight else [name])


@pytest.mark.parametrize("due", ["save", "signal", "evaluation", "end"])
@pytest.mark.parametrize("is_in_window", [False, True])
def test_what_is_not_finite_is_never_saved(tmp_path, due, is_in_window):
    t = make_training(tmp_path)
    t.checkpoints.save_every = int(due == "save")
    t.validation.every = int(due == "evaluation")
    t.step = 9 if due == "end" else 0
    if is_in_window:
        assert accepts(t)
    t.step += 1
    fill(t, NAN)
    with pytest.raises(StoppedByGuard, match="weight weight(.|\n)*No state is saved"):
        after_a_step(t, signal=15 if due == "signal" else 0)
    assert newest(t) is None
    assert [(report["where"], len(window)) for report, window, *_ in reports(t)] == [("state", 1)] * is_in_window


def test_the_state_at_the_start_is_saved_when_the_first_update_overflows(tmp_path):
    t = make_training(tmp_path)
    t.ema = Ema(t.detector, 0.9)
    keep_start(t)
    t.step = 1
    fill(t, INF)
    t.ema.module.weight.fill_(NAN)
    with pytest.raises(StoppedByGuard, match="the state of step 0, with which the run began, is saved"):
        after_a_step(t, signal=15)
    assert newest(t).step == t.checkpoints.saved_step == 0
    assert newest(t).tensors["model"]["weight"] == newest(t).tensors["ema"]["weight"] == 1.0
    keep_start(t)
    assert t.guard.start is None, "a checkpoint stands"


def test_a_rollback_goes_to_the_last_good_checkpoint_with_lower_rates(tmp_path):
    t = make_training(tmp_path, "rollback")
    t.guard.lr_factor = 0.5
    t.checkpoints.save_every = 1
    t.step = 3
    save(t)
    t.step = 4
    fill(t, INF)
    after_a_step(t)
    assert (t.step, t.detector.weight.item()) == (3, 1.0)
    assert t.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert newest(t).step == 3
    fill(t, INF)
    t.step = 4
    with pytest.raises(Preempted):
        after_a_step(t, signal=15)
    assert t.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
