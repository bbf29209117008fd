"""Where the first number of a window comes from that is not finite.

The windows of runs are reported and replayed in tests/promises/test_nan.py.
"""

import copy
import math

import pytest
import torch
from faults import _NanBackward
from torch import nn

from toolkit.base.batch import Batch
from toolkit.step.guard import NanGuard
from toolkit.tools.replay.diagnosis import diagnose, replay
from toolkit.tools.replay.nan_report import ADVICE, investigate, load_report


class Poison(nn.Module):
    """Passes x on; with a `kind` it breaks one thing."""

    kind = None

    def forward(self, x):
        if self.kind == "activation":
            return torch.sqrt(x.square() - 1e9)
        return _NanBackward.apply(x) if self.kind == "gradient" else x


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.poison = Poison()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        x = self.poison(self.stem(x))
        if self.poison.kind == "buffer":  # the statistics take in what the rest of the network never sees
            self.norm(x.abs() * math.inf)
        return self.norm(x)


X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])


def losses_of(model, x=X):
    def run():
        loss = model(x).square().sum()
        if getattr(getattr(model, "poison", None), "kind", None) == "loss":
            loss = loss * math.inf
        loss.backward()
        return [{"loss": loss.detach()}]

    return run


def found(finding: dict) -> tuple:
    return finding["where"], finding["kind"], finding["first_nonfinite_module"]


# What is broken -> what is found, and words of the message.
KINDS = {
    "activation": (("module", "output", "poison"), "poison (Poison), from finite inputs"),
    "loss": (("loss", None, None), "the losses are not"),
    "gradient": (("gradient", None, None), "the gradients of 2 parameters are not"),
    "buffer": (("module", "input", "norm"), "norm (BatchNorm1d), handed to it"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_window_leaves_nothing_but_a_report_that_runs_again(tmp_path, kind):
    expected, words = KINDS[kind]
    model = Network()
    guard = NanGuard("skip")
    guard.snapshot(model)
    before = copy.deepcopy(model.state_dict())
    model.poison.kind = kind
    run = losses_of(model)
    run()
    batch = Batch(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.tensor([[8, 8]]), [{"image_id": "m1"}])
    message = investigate(
        guard,
        model,
        run,
        tmp_path,
        [batch],
        {"step": 3, "lr": {"main": 0.01}, "action": "stop"},
    )
    assert words in message
    assert message.splitlines()[-1] == f"What to do: {ADVICE[expected[0]]}"
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.stem.weight.grad is None
    folder = tmp_path / "nan" / "step_000003" / "rank0"
    report, batches, _, _ = load_report(folder)
    assert found(report) == expected
    assert report["image_ids"] == [["m1"]]
    if kind == "gradient":
        assert report["nonfinite_gradients"] == ["stem.weight", "stem.bias"]
        assert "_NanBackward" in report["backward"]
    text = (folder / "report.txt").read_text()
    assert f"python scripts/replay.py {folder}\n  (with --trust" in text
    assert replay(model, report, batches, run)["reproduced"]
    model.load_state_dict(before)
    model.poison.kind = None
    assert not replay(model, report, batches, run)["reproduced"]


def test_parameters_that_are_not_finite():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    with torch.no_grad():
        model[1][0].bias[0] = math.nan
    finding = diagnose(model, losses_of(model))
    assert found(finding) == ("parameters", "parameters", "1.0")
    assert math.isnan(finding["window_losses"][0]["loss"])
    assert not model._forward_hooks


def test_a_criterion_inside_the_model_is_told_from_its_layers():
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "set_loss": Poison()})
    model.forward = lambda x: model["layer"](x)
    model["set_loss"].kind = "activation"
    finding = diagnose(model, lambda: [{"loss": model["set_loss"](model(X)).sum().detach()}])
    assert found(finding) == ("loss", "criterion", "set_loss")


def test_a_look_at_a_part_before_the_forward_pass_does_not_count():
    """SSD's backbone is asked for the shapes of its maps."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model:
        nn.init.constant_(layer.weight, 9)

    def run():
        model[0](X * 1e38)
        return losses_of(model, X * 1e36)()

    assert found(diagnose(model, run)) == ("module", "output", "1")


def test_modules_of_a_compiled_model_are_found():
    model = Network()
    model.compile(backend="eager")
    model(X)
    model.poison.kind = "activation"
    assert found(diagnose(model, losses_of(model))) == ("module", "output", "poison")


def test_a_run_that_raises():
    def run():
        raise ValueError("matrix contains invalid numeric entries")

    finding = diagnose(Network(), run)
    assert finding["where"] == "loss"
    assert "invalid numeric entries" in finding["error"]
