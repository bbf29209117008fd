"""What an update leaves is looked at, what is not finite is never saved, and the report says what tripped the guard."""

import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import run_on_ranks
from test_training import NOTHING, accepts, make_training
from torch import nn

from toolkit.base.batch import Batch
from toolkit.base.distributed import world
from toolkit.base.errors import BadInput, Preempted, StoppedByGuard
from toolkit.run.checkpoint import load_checkpoint, newest_valid
from toolkit.run.loop import save_and_evaluate_when_due
from toolkit.run.recovery import keep_start
from toolkit.run.saving import save
from toolkit.run.training_window import TrainingWindow
from toolkit.run.validation import evaluate, finish
from toolkit.step.ema import Ema
from toolkit.step.guard import STATE_PARTS, Action, NanGuard, looks_finite, named_state, nonfinite, unusable_rate
from toolkit.step.losses import LossWeights
from toolkit.tools.replay.diagnosis import diagnose, replay
from toolkit.tools.replay.nan_report import STATE_TENSORS_FILE, load_named_state, load_report
from toolkit.tools.replay.replay_session import window_of_report

NAN, INF = math.nan, math.inf
WINDOW = [Batch(torch.ones(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[2, 2]]), [{"image_id": 1}])]
QUIET = SimpleNamespace(received=0, name="")


def after_a_step(t, signal: int = 0) -> None:
    """Save and evaluate what is due after a step."""
    save_and_evaluate_when_due(t, SimpleNamespace(totals={"signal": signal}, best_step_before=-1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))


def trained():
    """A net with everything that has a state: (named state as a function, its parts by name)."""
    torch.manual_seed(0)
    model = Net()
    guard, ema = NanGuard(), Ema(model, 0.9)
    guard.watch(model)
    weights = LossWeights(["a"], {"a": "learned"}, {"a": 1.0})
    optimizer = torch.optim.Adam([*model.parameters(), *weights.parameters()], lr=0.1)
    (model.norm(model.layer(torch.rand(3, 2))).sum() + weights({"a": torch.ones(())}, 0).total).backward()
    optimizer.step()
    parts = {
        "weight layer.weight": model.layer.weight, "loss weight log_variances.a": weights.log_variances["a"],
        "buffer norm.running_var": model.norm.running_var, "moving average of norm.weight": ema.module.norm.weight,
        "moving average of norm.running_mean": ema.module.norm.running_mean,
        "exp_avg of layer.bias": optimizer.state[model.layer.bias]["exp_avg"],
        "exp_avg_sq of norm.bias": optimizer.state[model.norm.bias]["exp_avg_sq"],
    }  # fmt: skip
    return lambda: [*named_state(model, guard.watched(), optimizer, weights), *ema.tensors()], parts


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("name", list(trained()[1]))
def test_every_part_of_the_state_is_seen_and_named(name, value):
    state, parts = trained()
    assert nonfinite(state()) == []  # and a mask of infinities is none of it
    assert all(looks_finite(state(), part) for part in range(STATE_PARTS))
    with torch.no_grad():
        parts[name].view(-1)[0] = value
    assert nonfinite(state()) == ([] if math.isfinite(value) else [name])
    looked = [bool(looks_finite(state(), part)) for part in range(STATE_PARTS)]
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


def test_what_another_window_cannot_mend_is_not_skipped():
    for policy, action in (("stop", Action.STOP), ("skip", Action.STOP), ("rollback", Action.ROLLBACK)):
        guard = NanGuard(policy)
        assert guard.decide(3, {"loss": 1.0}, 1.0, 8.0, faults=["a weight is broken"]) is action
        assert guard.reason == "at step 3 a weight is broken"


def judged(t, loss=1.0, norm=1.0, **flags) -> bool:
    """Whether the guard accepts a window with these reduced values."""
    return accepts(t, WINDOW, {"loss": loss, "loss_ce": loss, "grad_norm": norm}, **flags)


@pytest.mark.parametrize(("entry", "action"), [(3e38, Action.STOP), (INF, Action.CALIBRATE)])
def test_under_a_scaler_training_tells_them_apart(tmp_path, entry, action):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    t = make_training(tmp_path, "stop", scaler)
    t.guard.snapshot(t.detector)
    t.detector.weight.grad = torch.tensor(entry)
    scaler.scale(torch.ones(()))  # as a backward pass does
    updates = []
    t.optimizer.step = lambda: updates.append(t.detector.weight.grad.item())
    if action is Action.STOP:
        with pytest.raises(StoppedByGuard, match="the gradient norm of finite gradients is inf"):
            judged(t, norm=INF)
        assert updates == []
    else:  # the scaler skips this update, whose gradients are forgotten
        assert not judged(t, norm=INF) and "of finite gradients" not in t.guard.reason
        assert updates == [INF] and t.detector.weight.grad is None


def ready(folder, policy="stop", **options):
    t = make_training(folder, policy, signals=QUIET, **options)
    t.guard.snapshot(t.detector)
    return t


def fill(t, value):
    with torch.no_grad():
        t.detector.weight.fill_(value)


def sums_of(t):
    """What all ranks know of a step."""
    window = TrainingWindow(t, WINDOW)
    window.sums = {"loss": torch.ones(()), "loss_ce": torch.ones(()), "loss_ce_unscaled": torch.ones(())}
    window.reduce()
    return window.totals


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_window_with_a_box_that_is_not_finite_is_refused_whatever_its_losses_are(tmp_path, value):
    t = ready(tmp_path, "skip")
    t.detector.denominators = lambda targets: {"images": len(targets)}
    targets = [{"image_id": 7, "boxes": torch.tensor([[0.0, 0.0, value, 1.0]]), "labels": torch.tensor([0])}]
    batches = [Batch(torch.ones(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[2, 2]]), targets)]
    window = t.window = TrainingWindow(t, batches)
    t.check.begin(t.step, len(window))
    for batch in window:
        assert batch.targets[0]["boxes"].isfinite().all()
        outputs = t.detector(batch.images, batch.sizes)
        losses, metrics = t.detector.criterion(outputs, batch.targets, window.denominators)
        window.add(t.loss_weights(losses), metrics)
    reduced = window.reduce()
    assert math.isfinite(reduced["loss"]) and window.totals["boxes_finite"] == 0.0
    assert not t.guard.accepts(window, reduced)
    assert "a box of the batch is not finite" in t.guard.reason
    (folder,) = tmp_path.glob("nan/*/rank0")
    report, again, *_ = load_report(folder)
    assert report["where"] == "batch" and report["batch"] == ["micro-batch 0: targets of image 7: boxes"]
    assert not again[0].targets[0]["boxes"].isfinite().all(), "the report has the box as it was"


def test_the_last_update_is_looked_at_with_the_next_step(tmp_path):
    t = ready(tmp_path)
    save(t)
    t.step = 2
    assert [sums_of(t)["state_finite"] for _ in range(STATE_PARTS)] == [1.0] * STATE_PARTS
    fill(t, INF)
    assert [sums_of(t)["state_finite"] for _ in range(STATE_PARTS)].count(0.0) == 1
    with pytest.raises(StoppedByGuard, match="left what is not finite: weight weight"):
        judged(t, state_finite=0.0)
    assert newest_valid(tmp_path / "checkpoints")[0].step == 0  # nothing newer was written
    (report,) = tmp_path.glob("nan/*/rank0")
    assert load_report(report)[0]["where"] == "state"


def with_all_state(t):
    """A training of which everything that can break is there; the tensors by the names that reports have for them."""
    t.detector.norm = nn.BatchNorm1d(2)
    t.guard.watch(t.detector)
    t.guard.snapshot(t.detector)
    t.ema = Ema(t.detector, 0.9)
    t.loss_weights = LossWeights(["loss_ce"], {"loss_ce": "learned"}, {"loss_ce": 1.0})
    t.optimizer = torch.optim.Adam([{"params": [*t.detector.norm.parameters()], "name": "main"}], lr=0.1)
    t.detector.norm(torch.rand(3, 2)).sum().backward()
    t.optimizer.step()
    critic = t.extra["critic"] = nn.Linear(1, 1)
    return {
        "weight norm.weight": t.detector.norm.weight, "buffer norm.running_var": t.detector.norm.running_var,
        "moving average of norm.bias": t.ema.module.norm.bias,
        "exp_avg_sq of norm.bias": t.optimizer.state[t.detector.norm.bias]["exp_avg_sq"],
        "loss weight log_variances.loss_ce": t.loss_weights.log_variances["loss_ce"],
        "t.extra critic.weight": critic.weight,
    }  # fmt: skip


@pytest.mark.parametrize("found", ["in a window", "where a save is due"])
@pytest.mark.parametrize("name", list(with_all_state(make_training(None))))
def test_a_report_holds_the_state_that_broke_and_is_replayed(tmp_path, name, found):
    """Only weights are part of the model's state in every report: the rest said 'something else happened this time'."""
    t = ready(tmp_path)
    broken = with_all_state(t)[name]
    if found == "in a window":
        with torch.no_grad():
            broken.view(-1)[0] = NAN
        t.guard.snapshot(t.detector)
        with pytest.raises(StoppedByGuard, match=name):
            judged(t, state_finite=0.0)
    else:
        t.checkpoints.save_every = 1
        assert judged(t)
        t.step += 1
        with torch.no_grad():
            broken.view(-1)[0] = NAN
        with pytest.raises(StoppedByGuard, match=name):
            after_a_step(t)
    (folder,) = tmp_path.glob("nan/*/rank0")
    report, window, state, _ = load_report(folder)
    assert (report["where"], report["nonfinite_state"]) == ("state", [name])
    t.detector.load_state_dict(state)
    again = replay(t.detector, report, window, list, load_named_state(folder))
    assert (again["reproduced"], again["nonfinite_state"], again["lacking"]) == (True, [name], [])

    (folder / STATE_TENSORS_FILE).unlink()  # as older versions left them
    with torch.no_grad():
        t.detector.norm.running_var.fill_(1.0)
    older = replay(t.detector, report, window, list, load_named_state(folder))
    is_weight = name.startswith("weight")
    assert (older["reproduced"], older["lacking"]) == (is_weight, [] if is_weight else [name])


@pytest.mark.parametrize("due", ["save", "signal", "evaluation", "end"])
@pytest.mark.parametrize("in_window", [False, True])
def test_what_is_not_finite_is_never_saved(tmp_path, due, in_window):
    t = ready(tmp_path)
    t.checkpoints.save_every = int(due == "save")
    t.validation.every = int(due == "evaluation")
    t.step = 9 if due == "end" else 0
    if in_window:
        assert judged(t)
    t.step += 1
    fill(t, NAN)
    with pytest.raises(StoppedByGuard, match="weight weight(.|\n)*No state is saved"):
        after_a_step(t, signal=15 if due == "signal" else 0)
    assert newest_valid(tmp_path / "checkpoints")[0] is None
    reports = [load_report(folder) for folder in tmp_path.glob("nan/*/rank0")]
    assert [(report["where"], len(window)) for report, window, *_ in reports] == [("state", 1)] * in_window


def test_the_state_at_the_start_is_saved_when_the_first_update_overflows(tmp_path):
    t = ready(tmp_path)
    t.ema = Ema(t.detector, 0.9)
    keep_start(t)
    t.step = 1
    fill(t, INF)
    t.ema.module.weight.fill_(NAN)
    with pytest.raises(StoppedByGuard, match="the state of step 0, with which the run began, is saved"):
        after_a_step(t, signal=15)
    saved, _ = newest_valid(tmp_path / "checkpoints")
    assert saved.step == 0 and saved.tensors["model"]["weight"] == saved.tensors["ema"]["weight"] == 1.0
    assert t.checkpoints.saved_step == 0
    keep_start(t)
    assert t.guard.start is None, "a checkpoint stands"


def test_a_rollback_goes_to_the_last_good_checkpoint_with_lower_rates(tmp_path):
    t = ready(tmp_path, "rollback")
    t.guard.lr_factor, t.checkpoints.save_every, t.step = 0.5, 1, 3
    save(t)
    t.step = 4
    fill(t, INF)
    after_a_step(t)
    assert (t.step, t.detector.weight.item()) == (3, 1.0)
    assert t.optimizer.param_groups[0]["lr"] == pytest.approx(0.05) and t.plan.schedule.rates() != {}
    assert newest_valid(tmp_path / "checkpoints")[0].step == 3
    fill(t, INF)
    t.step = 4
    with pytest.raises(Preempted):
        after_a_step(t, signal=15)
    assert t.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_rate_too_large_stops_before_anything_moves(tmp_path):
    t = ready(tmp_path, "skip")
    t.optimizer.param_groups[0]["lr"] = 3e39
    with pytest.raises(StoppedByGuard, match="the learning rate of main is 3e\\+39, too large for float32"):
        judged(t)
    assert load_checkpoint(tmp_path / "checkpoints" / "step_000000").tensors["model"]["weight"] == 1.0
    (report,) = tmp_path.glob("nan/*/rank0")
    assert load_report(report)[0]["where"] == "rate"


def test_final_weights_are_looked_at(tmp_path):
    t = ready(tmp_path)
    t.validation.best.evaluated_step = t.step = 1
    save(t, best=True)
    t.validation.best.value = 0.5
    finish(t)
    t.validation.best.value = None
    fill(t, NAN)
    with pytest.raises(StoppedByGuard):
        finish(t)


@pytest.mark.parametrize("metric", ["bbox_AP", "ema/bbox_AP"])
def test_a_best_checkpoint_that_was_damaged_costs_a_line(tmp_path, metric, capsys):
    t = ready(tmp_path)
    t.ema, t.validation.best.metric, t.validation.best.value = Ema(t.detector, 0.9), metric, 0.5
    t.step = 1
    save(t, best=True)
    fill(t, 2.0)
    t.ema.module.weight.fill_(3.0)
    (tmp_path / "checkpoints" / "best" / "model.safetensors").write_bytes(b"torn")
    t.validation.best.evaluated_step = t.step = 2
    finish(t)
    said = capsys.readouterr().out
    assert "the best checkpoint cannot be used, final/ gets the weights of step 2: " in said and "has 4 bytes" in said
    assert t.detector.weight.item() == (2.0 if metric == "bbox_AP" else 3.0)
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_000002"


def test_a_row_that_cannot_be_written_ends_the_run_after_a_save(tmp_path):
    t = ready(tmp_path)

    def refuse(row):
        raise BadInput("metrics.jsonl cannot be written")

    t.log.writer.log = refuse
    t.log.write(1, 0, {})
    t.step, reduced = 1, sums_of(t)
    assert reduced["signal"] > 0
    with pytest.raises(BadInput, match="cannot be written"):
        after_a_step(t, signal=reduced["signal"])
    assert newest_valid(tmp_path / "checkpoints")[0].step == 1


def test_a_norm_over_finite_gradients_is_named_and_replayed_as_one():
    model = nn.Linear(2, 1, bias=False)

    def run():
        loss = (model(torch.ones(1, 2)) * 2e38).sum()
        loss.backward()
        return [{"loss": torch.ones(())}]

    finding = diagnose(model, run)
    assert (finding["where"], finding["largest_gradient"][0]) == ("norm", "weight")
    assert finding["largest_gradient"][1] == pytest.approx(2e38, rel=1e-5)
    assert diagnose(model, run, scale=1e20)["where"] == "unknown"  # without the loss scale that they carry


def test_a_fault_that_does_not_come_back_is_not_called_reproduced():
    report = {"where": "unknown", "first_nonfinite_module": None, "kind": None, "nonfinite_gradients": []}
    detector = make_training(None).detector
    weights = LossWeights(("loss_ce",), {}, {"loss_ce": 1.0})
    report |= {"denominators": [{"images": 1.0}], "step": 0, "seed": 0, "rank": 0}
    again = window_of_report(detector, weights, report, WINDOW)
    assert not replay(detector, report, WINDOW, again)["reproduced"]
    report |= {"where": "state", "nonfinite_state": ["weight weight"]}
    assert not replay(detector, report, WINDOW, again)["reproduced"]
    with torch.no_grad():
        detector.weight.fill_(NAN)
    assert replay(detector, report, WINDOW, again)["reproduced"]


def between_ranks():
    """Gradients of learned weights, and the buffers of raw and averaged weights that a rank evaluates with."""
    rank = world()[0]
    t = make_training(Path(tempfile.mkdtemp()), signals=QUIET)
    t.loss_weights = LossWeights(["a"], {"a": "learned"}, {"a": 1.0})
    t.loss_weights.log_variances["a"].grad = torch.tensor(float(rank))
    TrainingWindow(t, []).reduce()
    t.detector.norm = nn.BatchNorm1d(2)
    t.detector.norm.running_mean.fill_(1.0 + rank)  # each rank gathered its own
    t.ema = Ema(t.detector, 0.9)
    t.validation.loader, t.validation.pictures = [NOTHING], 0
    t.validation.evaluator = SimpleNamespace(evaluate=lambda found: {"bbox_AP": 0.5}, describe=lambda *_: "")
    t.log.writer = SimpleNamespace(log=lambda row: None, folder=t.folder)
    evaluate(t)
    means = [module.norm.running_mean.tolist() for module in (t.detector, t.ema.module)]
    return t.loss_weights.log_variances["a"].grad.item(), *means


def test_ranks_average_learned_weights_and_evaluate_with_the_buffers_of_the_main_one():
    assert run_on_ranks(between_ranks, 2) == [(0.5, [1.0, 1.0], [1.0, 1.0])] * 2
