"""Where the first number of a window comes from that is not finite: module, loss, gradient, parameters or batch."""

import copy
import math

import pytest
import torch
from faults import _NanBackward
from torch import nn

from toolkit.base.batch import Batch
from toolkit.models.detector import Detector
from toolkit.step.guard import Action, NanGuard
from toolkit.step.losses import LossWeights, window_denominators
from toolkit.step.optim import gradient_norm
from toolkit.step.window import Window
from toolkit.tools.replay.diagnosis import diagnose, replay
from toolkit.tools.replay.nan_report import investigate, load_report
from toolkit.tools.replay.replay_session import window_of_report


class Poison(nn.Module):
    """Passes x on; with a `kind` it breaks one thing."""

    kind = None

    def forward(self, x):
        if self.kind == "activation":
            return x / 0.0
        return _NanBackward.apply(x) if self.kind == "gradient" else x


class Poisoned(Detector):
    loss_names = ("loss_ce", "loss_bbox")
    divided_by = "boxes"
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0}

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.poison = Poison()
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, images, sizes, targets=None):
        x = self.poison(self.stem(images.float() / 255))
        if self.poison.kind == "buffer":  # the statistics take in what the rest of the network never sees
            self.norm(x * math.inf)
        return {"logits": self.head(self.norm(x).mean((2, 3)))}

    def denominators(self, targets):
        return {"boxes": float(sum(len(target["boxes"]) for target in targets))}

    def criterion(self, outputs, targets, denominators):
        logits = outputs["logits"]
        boxes = torch.cat([target["boxes"] for target in targets])
        distance = (logits.sum(0) - boxes).abs().sum()
        if self.poison.kind == "loss":
            distance = distance * math.inf
        losses = {"loss_ce": logits.square().sum(), "loss_bbox": distance}
        return {name: loss / denominators["boxes"] for name, loss in losses.items()}, {}


def window_of_two() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for micro in range(2):
        boxes = [torch.rand(image + micro, 4, generator=generator) for image in range(2)]
        targets = [{"image_id": f"m{micro}i{image}", "boxes": boxes[image]} for image in range(2)]
        images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=generator)
        batches.append(Batch(images, torch.full((2, 2), 8), targets))
    return batches


# What is broken -> where it is found, the module, and words of the message.
KINDS = {
    "input": ("batch", None, "targets of image m1i1: boxes"),
    "activation": ("module", "poison", "poison (Poison), from finite inputs"),
    "loss": ("loss", None, "the losses are not"),
    "gradient": ("gradient", None, "the gradients of 2 parameters are not"),
    "buffer": ("module", "norm", "norm (BatchNorm2d), handed to it"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_window_leaves_nothing_but_a_report_that_runs_again(tmp_path, kind):
    where, module, words = KINDS[kind]
    torch.manual_seed(0)
    detector = Poisoned()
    guard = NanGuard("skip")
    guard.snapshot(detector)
    weights = LossWeights(detector.loss_names, {}, detector.default_weights)
    before = copy.deepcopy(detector.state_dict())
    batches = window_of_two()
    if kind == "input":
        batches[1].targets[1]["boxes"][0, 2] = math.nan
    else:
        detector.poison.kind = kind
    given = window_denominators([detector.denominators(batch.targets) for batch in batches], "cpu")
    place = {"step": 3, "seed": 5, "rank": 0}
    window = Window(batches, given, **place)

    def run_again():
        return window.run_again(detector, weights)

    losses = {"loss_bbox": float(sum(losses["loss_bbox"] for losses in run_again()))}
    norm = float(gradient_norm(detector.parameters()))
    assert guard.decide(3, losses, norm, buffers_finite=float(guard.buffers_finite())) is Action.SKIP
    context = {**place, "losses": losses, "denominators": given, "lr": {"main": 0.01}, "epoch": 0}
    assert words in investigate(guard, detector, run_again, tmp_path, batches, context)
    torch.testing.assert_close(detector.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in detector.parameters())

    folder = tmp_path / "nan" / "step_000003" / "rank0"
    report, batches, state, _ = load_report(folder)
    assert (report["where"], report["first_nonfinite_module"]) == (where, module)
    assert report["image_ids"] == [["m0i0", "m0i1"], ["m1i0", "m1i1"]]
    if kind == "gradient":
        assert report["nonfinite_gradients"] == ["stem.weight", "stem.bias"]
        assert "_NanBackward" in report["backward"]
    text = (folder / "report.txt").read_text()
    for line in (f"python scripts/replay.py {folder}", "m1i0", "--trust"):
        assert line in text

    again = window_of_report(detector, weights, report, batches)
    assert replay(detector, report, batches, again)["reproduced"]
    detector.load_state_dict(state)
    detector.poison.kind = None
    assert replay(detector, report, batches, again)["reproduced"] == (kind == "input")


def losses_of(model, x):
    def run():
        loss = model(x).square().sum()
        loss.backward()
        return [{"loss": loss.detach()}]

    return run


def found(finding: dict) -> tuple:
    return finding["where"], finding["kind"], finding["first_nonfinite_module"]


class Block(nn.Module):
    def __init__(self, lowered: float):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.lowered = lowered

    def forward(self, x):
        return self.second(torch.sqrt(self.first(x).square() - self.lowered))


def test_the_innermost_module_and_what_it_was_handed():
    model = nn.Sequential(Block(0.0), Block(1e9))
    run = losses_of(model, torch.ones(1, 2))
    finding = diagnose(model, run)
    assert found(finding) == ("module", "input", "1.second")
    assert math.isnan(finding["window_losses"][0]["loss"])
    with torch.no_grad():
        model[0].second.bias[0] = math.nan
    assert found(diagnose(model, run)) == ("parameters", "parameters", "0.second")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model._forward_hooks


def test_a_criterion_inside_the_model_is_told_from_its_layers():
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "set_loss": Poison()})
    model.forward = lambda x: model["layer"](x)
    model["set_loss"].kind = "activation"

    def run():
        outputs = model(torch.ones(1, 2))
        return [{"loss": model["set_loss"](outputs).sum().detach()}]

    assert found(diagnose(model, run)) == ("loss", "criterion", "set_loss")


def test_a_look_at_a_part_before_the_forward_pass_does_not_count():
    """SSD's backbone is asked for the shapes of its maps."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model:
        nn.init.constant_(layer.weight, 9)

    def run():
        model[0](torch.full((1, 2), 1e38))
        return losses_of(model, torch.full((1, 2), 1e37))()

    assert found(diagnose(model, run)) == ("module", "output", "1")


def test_modules_of_a_compiled_model_are_found():
    model = nn.Sequential(nn.Linear(2, 2), Poison())
    x = torch.ones(1, 2)
    model.compile(backend="eager")
    model(x)
    model[1].kind = "activation"
    assert found(diagnose(model, losses_of(model, x))) == ("module", "output", "1")


def test_a_run_that_raises():
    def run():
        raise ValueError("matrix contains invalid numeric entries")

    finding = diagnose(nn.Linear(2, 2), run)
    assert finding["where"] == "loss"
    assert "invalid numeric entries" in finding["error"]


def test_a_fault_that_does_not_come_back():
    model = nn.Linear(2, 2)
    assert found(diagnose(model, losses_of(model, torch.ones(1, 2)))) == ("unknown", None, None)
