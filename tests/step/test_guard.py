"""The decision about the gradients of a window, and the buffers that come back.

The check of a plain loop is tested with docs/parts.md, that of the state of a run in tests/promises/test_nan.py.
"""

import json
import math

import pytest
import torch
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.step.guard import NanGuard

NAN = math.nan
INF = math.inf
HIGH = 65536.0  # a loss scale


def decide(guard: NanGuard, loss=1.0, norm=1.0, scale=None, buffers=1.0) -> str:
    return guard.decide(7, {"loss": loss}, norm, scale, buffers).value


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"loss": NAN}, "after step 7: loss is nan"),
        ({"loss": -INF}, "after step 7: loss is -inf"),
        ({"norm": INF}, "gradient norm is inf"),
        ({"norm": NAN}, "gradient norm is nan"),
        ({"buffers": 0.5}, "a buffer"),
    ],
)
def test_each_kind_of_broken_value_is_seen_and_named(broken, reason):
    guard = NanGuard("stop")
    assert decide(guard) == "step"
    assert decide(guard, **broken) == "stop"
    assert reason in guard.reason


# Windows by their loss, gradient norm and loss scale, and what becomes of each.
SEQUENCES = {
    "skips in succession": (
        NanGuard("skip", max_skips=2),
        [
            (NAN, 1, None),
            (NAN, 1, None),
            (1, 1, None),
            (NAN, 1, None),
            (NAN, 1, None),
            (NAN, 1, None),
        ],
        ["skip", "skip", "step", "skip", "skip", "stop"],
    ),
    "rollbacks in all": (
        NanGuard("rollback", max_rollbacks=2),
        [
            (NAN, 1, None),
            (1, 1, None),
            (1, INF, None),
            (1, 1, None),
            (NAN, 1, None),
        ],
        ["rollback", "step", "rollback", "step", "stop"],
    ),
    # The search for a loss scale is not a divergence. The losses do not carry the scale.
    "calibrations in succession": (
        NanGuard("stop", max_calibrations=2),
        [
            (1, INF, HIGH),
            (1, NAN, HIGH),
            (1, 1, HIGH),
            (1, INF, HIGH),
            (1, INF, HIGH),
            (1, INF, HIGH),
            (1, INF, HIGH),
        ],
        ["calibrate", "calibrate", "step", "calibrate", "calibrate", "stop", "calibrate"],
    ),
    "a scale that cannot be lowered": (NanGuard("stop"), [(1, NAN, 1.0)], ["stop"]),
    "a loss under a scale": (NanGuard("stop"), [(NAN, NAN, HIGH)], ["stop"]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_policies(name):
    guard, windows, expected = SEQUENCES[name]
    assert [decide(guard, *window) for window in windows] == expected


def test_a_broken_buffer_is_not_a_matter_of_the_scale():
    assert decide(NanGuard("stop"), norm=NAN, scale=HIGH, buffers=0.0) == "stop"


def test_rollbacks_lower_the_rate_and_are_counted_on_after_a_resume():
    guard = NanGuard("rollback", max_rollbacks=2, lr_factor=0.5)
    scales = [guard.lr_scale]
    for _ in range(2):
        decide(guard, NAN)
        scales.append(guard.lr_scale)
    assert scales == [1.0, 0.5, 0.25]
    resumed = NanGuard("rollback", max_rollbacks=2, lr_factor=0.5)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert decide(resumed, NAN) == "stop"
    assert resumed.lr_scale == 0.25


def test_an_unknown_policy_is_refused():
    with pytest.raises(BadInput, match="stop, skip, rollback"):
        NanGuard("ignore")


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("hidden", torch.zeros(2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))


def test_all_buffers_come_back():
    model = Buffers()
    guard = NanGuard()
    for first in (1.0, 2.0):  # the second snapshot takes the place of the first
        model.table[0] = first
        guard.snapshot(model)
    assert guard.buffers_finite() == 1.0  # a mask of infinities is not an alarm
    hidden = model.hidden
    model.count += 5
    hidden[1] = INF
    model.table = torch.full((7,), NAN)  # replaced, in another size
    assert guard.buffers_finite() == 0.0
    guard.restore(model)
    assert guard.buffers_finite() == 1.0
    assert model.count == 0
    assert model.hidden is hidden
    assert model.table.tolist() == [2.0, 1.0, 1.0]
    assert model.mask[1] == -INF


def test_what_was_finite_when_it_was_watched_is_not_a_mask():
    """As in a checkpoint that somebody has changed, which is loaded after that."""
    model = Buffers()
    guard = NanGuard()
    guard.watch(model)
    model.table[0] = INF
    guard.snapshot(model)
    assert guard.buffers_finite() == 0.0
    with pytest.raises(ValueError, match="no snapshot"):
        guard.restore(Buffers())
    guard.snapshot(nn.Linear(2, 2))  # has none
    assert guard.buffers_finite() == 1.0
