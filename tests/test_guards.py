"""pytest tests/test_guards.py"""

import json
import math
import os
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from faults import _NanBackward
from torch import nn

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.step.guard import Action, NanGuard
from toolkit.step.losses import LossWeights, window_denominators
from toolkit.step.optim import gradient_norm
from toolkit.step.window import Window
from toolkit.tools.replay import nan_report
from toolkit.tools.replay.diagnosis import diagnose, replay
from toolkit.tools.replay.nan_report import investigate, load_report, write_nan_report
from toolkit.tools.replay.replay_session import window_of_report

NAN, INF = math.nan, math.inf


class Poison(nn.Module):
    """Passes x on; with `kind` set it breaks one thing."""

    kind = None

    def forward(self, x):
        if self.kind == "activation":
            return x / 0.0
        return _NanBackward.apply(x) if self.kind == "gradient" else x


@dataclass
class Outputs:
    logits: list[torch.Tensor]


class Detector(nn.Module):
    """The duck type of a detector, with what NaNs spoil: batch norm statistics, several losses, targets."""

    loss_names, default_weights = ("loss_ce", "loss_bbox"), {"loss_ce": 1.0, "loss_bbox": 5.0}

    def __init__(self):
        super().__init__()
        self.stem, self.poison, self.norm = nn.Conv2d(3, 4, 3), Poison(), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, images, sizes, targets=None):
        x = self.poison(self.stem(images.float() / 255))
        if self.poison.kind == "buffer":  # the statistics take in what the rest of the network never sees
            self.norm(x * INF)
        return Outputs([self.head(self.norm(x).mean((2, 3)))])

    def denominators(self, targets):
        return {"boxes": float(sum(len(t["boxes"]) for t in targets))}

    def criterion(self, outputs, targets, denominators):
        logits = outputs.logits[0]
        boxes = torch.stack([t["boxes"].mean(0) if len(t["boxes"]) else t["boxes"].new_zeros(4) for t in targets])
        losses = {
            "loss_ce": logits.square().sum() / denominators["boxes"],
            "loss_bbox": (logits - boxes).abs().sum() / denominators["boxes"],
        }
        if self.poison.kind == "loss":
            losses["loss_bbox"] = losses["loss_bbox"] * INF
        return losses, {}


KINDS = ("input", "activation", "loss", "gradient", "buffer")


def window_of(broken_input=False):
    generator = torch.Generator().manual_seed(0)
    batches = []
    for micro in range(2):
        boxes = [torch.rand(i + micro, 4, generator=generator) for i in range(2)]
        targets = [{"image_id": f"m{micro}i{i}", "boxes": boxes[i]} for i in range(2)]
        images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=generator)
        batches.append(Batch(images, torch.full((2, 2), 8), targets))
    if broken_input:
        batches[1].targets[1]["boxes"][0, 2] = NAN
    return batches


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_window_leaves_nothing_but_a_report_that_runs_again(tmp_path, kind):
    """The loops of the scripts, under every policy and on two ranks: tests/scripts/test_nan.py."""
    torch.manual_seed(0)
    detector, guard = Detector(), NanGuard("skip")
    weights = LossWeights(Detector.loss_names, {}, Detector.default_weights)
    guard.snapshot(detector)
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    batches = window_of(broken_input=kind == "input")
    detector.poison.kind = None if kind == "input" else kind
    given = window_denominators([detector.denominators(b.targets) for b in batches], "cpu")
    where = {"step": 3, "seed": 5, "rank": 0}
    run_again = partial(Window(batches, given, **where).run_again, detector, weights)
    losses = {name: float(sum(losses[name] for losses in run_again())) for name in detector.loss_names}
    norm, finite = float(gradient_norm(detector.parameters())), float(guard.buffers_finite())
    assert guard.decide(3, losses, norm, buffers_finite=finite) is Action.SKIP
    context = {**where, "losses": losses, "denominators": given, "lr": {"main": 0.01}, "epoch": 0}
    message = investigate(guard, detector, run_again, tmp_path, batches, context)
    assert all(torch.equal(value, before[name]) for name, value in detector.state_dict().items())
    assert all(p.grad is None for p in detector.parameters())
    said = {"activation": "poison (Poison), from finite inputs", "buffer": "norm (BatchNorm2d), handed to it"}
    assert said.get(kind, "") in message

    folder = tmp_path / "nan" / "step_000003" / "rank0"
    report, batches, state, _ = load_report(folder)
    assert report["image_ids"] == [["m0i0", "m0i1"], ["m1i0", "m1i1"]]
    assert (report["step"], report["policy"]) == (3, "skip")
    assert report["first_nonfinite_module"] == {"activation": "poison", "buffer": "norm"}.get(kind)
    assert report["where"] == {"input": "batch", "activation": "module", "buffer": "module"}.get(kind, kind)
    assert all(torch.isfinite(v).all() for v in state.values() if v.is_floating_point())
    if kind == "gradient":
        assert report["nonfinite_gradients"] == ["stem.weight", "stem.bias"] and "_NanBackward" in report["backward"]
    text = (folder / "report.txt").read_text()
    assert f"python scripts/replay.py {folder}" in text and "m1i0" in text and "--trust" in text

    again = window_of_report(detector, weights, report, batches)
    for poison in (None if kind == "input" else kind, None):
        detector.load_state_dict(state)
        detector.poison.kind = poison
        assert replay(detector, report, batches, again)["reproduced"] == (kind == "input" or poison is not None)


def decide(guard, losses=1.0, norm=1.0, scale=None, buffers=1.0):
    return guard.decide(7, {"loss": losses}, norm, scale, buffers)


@pytest.mark.parametrize("broken", [{"losses": NAN}, {"losses": -INF}, {"norm": INF}, {"norm": NAN}, {"buffers": 0.5}])
def test_each_kind_of_broken_value_is_seen_and_named(broken):
    guard = NanGuard("stop")
    assert decide(guard) is Action.STEP
    assert decide(guard, **broken) is Action.STOP
    (kind,) = broken
    assert {"losses": "step 7 loss is", "norm": "gradient norm is", "buffers": "a buffer"}[kind] in guard.reason


def test_skips_are_counted_in_succession():
    guard = NanGuard("skip", max_skips=2)
    losses = [NAN, NAN, 1.0, NAN, NAN, NAN]
    assert [decide(guard, loss).value for loss in losses] == ["skip", "skip", "step", "skip", "skip", "stop"]
    with pytest.raises(BadInput, match="stop, skip, rollback"):
        NanGuard("ignore")


def test_rollbacks_are_counted_in_all_and_lower_the_rate():
    guard = NanGuard("rollback", max_rollbacks=2, lr_factor=0.5)
    assert guard.lr_scale == 1.0 and decide(guard, NAN) is Action.ROLLBACK and guard.lr_scale == 0.5
    decide(guard)
    assert decide(guard, norm=INF) is Action.ROLLBACK and guard.lr_scale == 0.25
    decide(guard)
    resumed = NanGuard("rollback", max_rollbacks=2, lr_factor=0.5)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert decide(resumed, NAN) is Action.STOP and resumed.lr_scale == 0.25


def test_the_search_for_a_loss_scale_is_no_divergence():
    guard = NanGuard("stop", max_calibrations=3)
    assert decide(guard, norm=INF, scale=65536.0) is Action.CALIBRATE
    assert decide(guard, norm=NAN, scale=1.0) is Action.STOP  # nothing left to lower
    assert decide(guard, losses=NAN, norm=NAN, scale=65536.0) is Action.STOP  # the losses do not carry the scale
    assert decide(guard, norm=NAN, scale=65536.0, buffers=0.0) is Action.STOP
    assert [decide(guard, norm=INF, scale=2.0**i).value for i in (9, 8, 7, 6)] == ["calibrate"] * 3 + ["stop"]
    in_succession = [decide(guard, norm=norm, scale=64.0).value for norm in (INF, INF, INF, 1.0, INF)]
    assert in_succession == ["calibrate"] * 3 + ["step", "calibrate"]


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("hidden", torch.zeros(2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))


def test_all_buffers_come_back_and_a_mask_of_infinities_is_no_alarm():
    model, guard = Buffers(), NanGuard()
    for model.table[0] in (1.0, 2.0):  # the second snapshot takes the place of the first
        guard.snapshot(model)
    assert guard.buffers_finite().item() == 1.0
    hidden = model.hidden
    model.count += 5
    hidden[1] = INF
    model.table = torch.full((7,), NAN)  # replaced, in another size
    assert guard.buffers_finite().item() == 0.0
    guard.restore(model)
    assert guard.buffers_finite().item() == 1.0
    assert model.count == 0 and model.hidden is hidden and model.table.tolist() == [2.0, 1.0, 1.0]
    assert model.mask[1] == -INF
    with pytest.raises(ValueError, match="no snapshot"):
        guard.restore(Buffers())
    guard.snapshot(nn.Linear(2, 2))  # has none
    assert guard.buffers_finite().item() == 1.0
    guard.watch(model)
    model.table[0] = INF  # as a doctored checkpoint would: no mask
    guard.snapshot(model)
    assert guard.buffers_finite().item() == 0.0


def losses_of(model, x):
    def run():
        loss = model(x).square().sum()
        loss.backward()
        return [{"loss": loss.detach()}]

    return run


def test_innermost_module_and_what_it_was_handed():
    class Block(nn.Module):
        def __init__(self, poison):
            super().__init__()
            self.first, self.second, self.poison = nn.Linear(2, 2), nn.Linear(2, 2), poison

        def forward(self, x):
            return self.second(torch.sqrt(self.first(x) - 1e9) if self.poison else self.first(x))

    model = nn.Sequential(Block(False), Block(True))
    finding = diagnose(model, losses_of(model, torch.ones(1, 2)))
    assert (finding["first_nonfinite_module"], finding["kind"]) == ("1.second", "input")
    assert math.isnan(finding["window_losses"][0]["loss"])
    assert all(p.grad is None for p in model.parameters())

    with torch.no_grad():
        model[1].poison = False
        model[0].second.bias[0] = NAN
    finding = diagnose(model, losses_of(model, torch.ones(1, 2)))
    assert (finding["first_nonfinite_module"], finding["kind"]) == ("0.second", "parameters")
    assert finding["where"] == "parameters"


def test_a_criterion_inside_the_model_is_told_from_its_layers_compiled_or_not():
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "set_loss": Poison()})
    model.forward = lambda x: model["layer"](x)
    model["set_loss"].kind = "activation"

    def run():
        outputs = model(torch.ones(1, 2))
        return [{"loss": model["set_loss"](outputs).sum().detach()}]

    finding = diagnose(model, run)
    assert (finding["where"], finding["kind"], finding["first_nonfinite_module"]) == ("loss", "criterion", "set_loss")

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(9)
        model[1].weight.fill_(9)

    def run_after_a_look():  # as SSD's backbone is asked for the shapes of its maps
        model[0](torch.full((1, 2), 1e38))
        return losses_of(model, torch.full((1, 2), 1e37))()

    finding = diagnose(model, run_after_a_look)
    assert (finding["first_nonfinite_module"], finding["kind"]) == ("1", "output")

    model, x = nn.Sequential(nn.Linear(2, 2), Poison()), torch.ones(1, 2)
    model.compile(backend="eager")
    model(x)
    model[1].kind = "activation"
    assert diagnose(model, losses_of(model, x))["first_nonfinite_module"] == "1"


def test_a_run_that_raises_and_a_fault_that_does_not_come_back():
    def run():
        raise ValueError("matrix contains invalid numeric entries")

    model = nn.Linear(2, 2)
    finding = diagnose(model, run)
    assert finding["where"] == "loss" and "invalid numeric entries" in finding["error"]
    finding = diagnose(model, losses_of(model, torch.ones(1, 2)))
    assert finding["where"] == "unknown" and finding["nonfinite_gradients"] == []
    assert not model._forward_hooks


def report_of(**given):
    finding = diagnose(nn.Linear(1, 1), lambda: [{"loss": NAN}])
    report = {"step": 3, "rank": 0, "reason": "loss is nan", "policy": "stop", "image_ids": [[1, "b.png"]]}
    return {**report, **finding, "batch": [], "losses": {"loss": NAN}, "lr": {"main": 0.1}, **given}


def test_a_window_returns_as_it_was(tmp_path):
    image = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    batches = [
        Batch(image.expand(2, -1, -1, -1), torch.ones(2, 2, dtype=torch.int64), [
            {"image_id": 1, "boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
            {"image_id": "b.png", "boxes": torch.tensor([[0.0, NAN, 1.0, 2.0]]), "size": torch.tensor([4, 4])},
        ]),
        *(Batch(image, torch.zeros(1, 2, dtype=torch.int64), [{"image_id": i}]) for i in range(11)),
    ]  # fmt: skip
    tied = torch.ones(3)
    folder = write_nan_report(tmp_path, report_of(), batches, {"a": tied, "b": tied}, {"critic": {"weight": tied}})
    report, again, state, extra = load_report(folder)
    assert math.isnan(float(report["losses"]["loss"])) and "NaN" not in (folder / "report.json").read_text()
    assert [b.targets[0]["image_id"] for b in again] == [1, *range(11)]
    for old, new in zip(batches, again, strict=True):
        assert torch.equal(old.images, new.images) and torch.equal(old.sizes, new.sizes)
        for a, b in zip(old.targets, new.targets, strict=True):
            assert set(a) == set(b)
            for key in set(a) - {"image_id"}:
                torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, equal_nan=True)
    assert set(state) == {"a", "b"} and torch.equal(extra["critic"]["weight"], tied)


def test_only_the_first_and_the_newest_reports_are_kept(tmp_path, monkeypatch):
    """A policy that skips makes one for each window, for as long as the run lasts."""
    monkeypatch.setattr(nan_report, "FIRST_REPORTS", 2)
    monkeypatch.setattr(nan_report, "NEWEST_REPORTS", 2)
    monkeypatch.setattr(nan_report, "MAX_FULL_REPORTS", 2)
    lines = []
    for number, step in enumerate((30, 10, 20, 10, 20, 40)):  # a rollback makes steps again
        for rank in (1, 10):
            path = write_nan_report(tmp_path, report_of(step=step, rank=rank), window_of(), {"a": torch.ones(1)})
            os.utime(path / "report.json", ns=(number, number))
        lines.append(nan_report._forget_reports(path.with_name(path.name.replace("rank10", "rank1"))))
    kept = sorted(str(path.relative_to(tmp_path / "nan")) for path in tmp_path.glob("nan/*/rank1*"))
    assert [name for name in kept if "rank10" not in name] == [
        "step_000010/rank1", "step_000020/rank1_2", "step_000030/rank1", "step_000040/rank1"]  # fmt: skip
    assert len([name for name in kept if "rank10" in name]) == 6, "another process minds its own"
    assert lines[:4] == [""] * 4 and "(removed: step_000020/rank1; the first 2 and the newest 2 are kept)" in lines[4]
    assert "step_000010/rank1_2" in lines[5]


def test_later_reports_overwrite_nothing_and_do_not_fill_the_disk_with_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(nan_report, "MAX_FULL_REPORTS", 2)
    folders = [write_nan_report(tmp_path, report_of(), [window_of()[0]], {"a": torch.ones(1)}) for _ in range(3)]
    assert [f.name for f in folders] == ["rank0", "rank0_2", "rank0_3"]
    assert [(f / "model.safetensors").exists() for f in folders] == [True, True, False]
    with pytest.raises(BadInput, match="model.safetensors"):
        load_report(folders[2])
    with pytest.raises(BadInput, match="report.json, batch_0.safetensors, model.safetensors"):
        load_report(tmp_path)
    unwritable = tmp_path / "file"
    unwritable.mkdir()
    (unwritable / "nan").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="could not be written"):  # and training goes on
        assert write_nan_report(unwritable, report_of(), window_of(), {}) is None
