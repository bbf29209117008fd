"""What a diagnosis of a refused window finds, and whether a replay finds it again."""

import pytest
import torch
from small_run import NAN, ONE_IMAGE, fill, make_training
from torch import nn

from toolkit.tools.replay.diagnosis import diagnose, replay
from toolkit.tools.replay.replay_session import window_of_report


def test_a_norm_over_finite_gradients_is_named():
    model = nn.Linear(2, 1, bias=False)

    def run_again():
        loss = (model(torch.ones(1, 2)) * 2e38).sum()
        loss.backward()
        return [{"loss": torch.ones(())}]

    finding = diagnose(model, run_again)
    name, size = finding["largest_gradient"]
    assert finding["where"] == "norm"
    assert name == "weight"
    assert size == pytest.approx(2e38, rel=1e-5)
    assert diagnose(model, run_again, scale=1e20)["where"] == "unknown"  # without the loss scale that they carry


def test_a_fault_that_does_not_come_back_is_not_reproduced():
    t = make_training(None)
    report = {"where": "unknown", "first_nonfinite_module": None, "kind": None, "nonfinite_gradients": []}
    report |= {"denominators": [{"images": 1.0}], "step": 0, "seed": 0, "rank": 0}
    again = window_of_report(t.detector, t.loss_weights, report, [ONE_IMAGE])
    assert not replay(t.detector, report, [ONE_IMAGE], again)["reproduced"]
    report |= {"where": "state", "nonfinite_state": ["weight weight"]}
    assert not replay(t.detector, report, [ONE_IMAGE], again)["reproduced"]
    fill(t, NAN)
    assert replay(t.detector, report, [ONE_IMAGE], again)["reproduced"]
