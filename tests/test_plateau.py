"""The plateau schedule at its edges."""

import json

import pytest
import torch

from toolkit.errors import BadInput
from toolkit.step.schedules import PlateauSchedule, Schedule, warm_up


def schedule(**options) -> PlateauSchedule:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.05)]
    return PlateauSchedule(torch.optim.SGD(groups), **{"warmup_steps": 0} | options)


def test_no_validation_changes_nothing():
    plan = schedule(warmup_steps=10, warmup_start=0.1)
    rate = plan.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)  # written in place
    for step in (0, 5, 10, 10**6):
        plan.set(step)
        assert float(rate) == pytest.approx(0.5 * warm_up(step, 10))
        assert list(plan.rates().values()) == pytest.approx([lr * warm_up(step, 10) for lr in (0.5, 0.05)])
    assert plan.best is None and not plan.finished


def test_falls_then_finishes():
    plan = schedule(patience=2, max_decays=2)
    fell = [plan.observe(value) for value in (0.2, 0.2, 0.2009, 0.3, float("nan"), None)]
    assert fell == [False, False, True, False, False, True], "0.2009 does not exceed 0.2 by the threshold"
    plan.set(100)
    assert plan.finished and list(plan.rates().values()) == pytest.approx([0.005, 0.0005])


def test_cooldown_forgives():
    plan = schedule(patience=1, cooldown=2, max_decays=9)
    assert [plan.observe(0.0) for _ in range(7)] == [False, False, True, False, False, True, False]


def test_the_rate_is_a_function_of_step_and_state():
    plan = schedule(patience=1, warmup_steps=8)
    plan.observe(0.4), plan.observe(0.1)
    plan.scale = 0.5
    again = schedule(gamma=0.9, patience=7)
    again.load_state_dict(json.loads(json.dumps(plan.state_dict(), allow_nan=False)))
    for step in (3, 0, 50):
        plan.set(step), again.set(step)
        assert plan.rates() == again.rates()
    assert again.observe(0.1) and plan.observe(0.1)


def test_a_checkpoint_of_another_schedule_is_refused_with_a_way_out():
    plan = schedule()
    other = Schedule(plan.optimizer, "cosine", 100)
    with pytest.raises(BadInput, match="plateau.*checkpoint cosine.*resume_schedule new"):
        plan.load_state_dict(other.state_dict())
    with pytest.raises(BadInput, match="cosine.*checkpoint plateau.*resume_schedule new"):
        other.load_state_dict(plan.state_dict())
    plan.set_total(7)  # no matter to it; the other one goes by it
    other.set_total(7)
    assert other.total_steps == 7 and "total_steps" not in plan.state_dict()


def test_nonsense_is_refused():
    with pytest.raises(BadInput) as caught:
        schedule(patience=0, max_decays=0, warmup_method="cosine")
    assert all(word in str(caught.value) for word in ("patience", "max_decays", "cosine"))
