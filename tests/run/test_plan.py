"""The length of a run: a number of steps that fits into minutes, whatever the machine does."""

import json
import random

import pytest
import torch

from toolkit.data.dataset import mixed_epochs
from toolkit.data.sampling import EpochSampler
from toolkit.run.plan import Plan, StepBudget
from toolkit.step.schedules import Schedule

MINUTES = 4.75
SECONDS = 285


def again(budget: StepBudget) -> StepBudget:
    """Return the budget of a run that was killed and resumed."""
    resumed = StepBudget(budget.max_minutes)
    resumed.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    return resumed


def followed(budget: StepBudget, seconds, resume_every: int = 0) -> list[tuple[int, int]]:
    """Add steps of `seconds(step, elapsed_s)` to the end of the plan; return (steps made, steps planned) of each plan.

    The run is killed and resumed after every so many steps.
    """
    plans = []
    while budget.total_steps is None or budget.steps < budget.total_steps:
        budget.add(seconds(budget.steps, budget.elapsed_s))
        planned = budget.propose()
        if planned is not None:
            budget.fix(planned)
            plans.append((budget.steps, planned))
        if resume_every and budget.steps % resume_every == 0:
            budget.load_state_dict(again(budget).state_dict())
    return plans


def every_step(step_s: float):
    return lambda step, elapsed_s: step_s


def slower(times: float, begin: float, end: float = 9.9):
    """Steps of 0.2 s, so many times slower between these shares of the time."""
    return lambda step, elapsed_s: 0.2 * (times if begin < elapsed_s / SECONDS < end else 1)


def stalls(stall_s: float, *shares: float):
    """Steps of 0.2 s, and single ones of `stall_s` at these shares of the time."""
    return lambda step, elapsed_s: stall_s if any(0 <= elapsed_s - SECONDS * at < 0.2 for at in shares) else 0.2


def noise(step: int, elapsed_s: float) -> float:
    return 0.2 * random.Random(step).uniform(0.5, 1.5)


def heavy_tail(step: int, elapsed_s: float) -> float:
    return 0.1 * random.Random(step).paretovariate(1.3)


# The seconds of a step, and as many steps as fit at least.
MACHINES = [
    (every_step(0.2), 1424),
    (every_step(40.0), 7),
    (every_step(500.0), 1),
    (slower(5, 0.501), 855),
    (slower(0.2, 0.501), 1424),  # faster: the ceiling stands
    (slower(3, 0, 0.2), 1233),
    (slower(5, 0.55, 0.99), 915),
    (slower(100, 0.99), 1411),
    (stalls(20, 0.6, 0.75, 0.9), 1124),
    (stalls(12, 0.95), 1360),
    (noise, 1424),
    (heavy_tail, 815),
]


@pytest.mark.parametrize(("seconds", "least_steps"), MACHINES)
def test_minutes_are_kept_whatever_the_machine_does(seconds, least_steps):
    budget = StepBudget(MINUTES)
    plans = followed(budget, seconds)
    longest_step_s = seconds(budget.steps - 1, budget.elapsed_s - 1e-6)
    assert budget.elapsed_s <= 1.02 * SECONDS + longest_step_s
    assert budget.steps >= least_steps
    settled = [planned for step, planned in plans if step >= budget.settled_steps]
    assert settled[0] == budget.ceiling_steps
    assert max(settled) == budget.ceiling_steps
    for resume_every in (1, 7):
        resumed = StepBudget(MINUTES)
        assert followed(resumed, seconds, resume_every) == plans
        assert resumed.state_dict() == budget.state_dict()


def test_a_state_without_a_ceiling_goes_on_with_its_final_plan():
    """Of a checkpoint from before there was one."""
    budget = StepBudget(1.0)
    saved = {
        "total_steps": 120,
        "steps": 70,
        "elapsed_s": 35.0,
        "planned_steps": 60,
        "planned_s": 30.0,
        "settled": True,
    }
    budget.load_state_dict(saved)
    assert (budget.ceiling_steps, budget.settled_steps) == (120, 60)
    followed(budget, every_step(1.0))
    assert budget.steps == 95
    assert budget.elapsed_s == 60.0


def test_other_minutes_count_until_the_ceiling_is_known():
    budget = StepBudget(1.0)
    for step in range(70):
        budget.add(0.5)
        planned = budget.propose()
        if planned is not None:
            budget.fix(planned)
        resumed = StepBudget(9.0)
        resumed.load_state_dict(budget.state_dict())
        assert resumed.max_minutes == (1.0 if step >= 59 else 9.0)


def test_a_run_that_is_extended_counts_the_minutes_of_before():
    first = StepBudget(1.0)
    followed(first, every_step(0.5))
    assert first.elapsed_s == 60
    assert first.is_used_up
    longer = StepBudget(3.0)
    longer.elapsed_s = first.elapsed_s
    longer.count_on(120)
    plans = followed(longer, every_step(2.0))
    assert plans[:3] == [(132, 180), (144, 180), (150, 180)]  # by the speed of now
    assert longer.elapsed_s == 180


def test_the_first_plan_leaves_out_what_starting_costs():
    budget = StepBudget(1.0, skip_steps=2, measure_steps=4)
    for seconds in (5.0, 1.0, 0.5, 0.5, 0.5):
        budget.add(seconds)
        assert budget.propose() is None
    budget.add(0.5)
    assert budget.propose() == 6 + (60 - 8) / 0.5


def test_the_first_plan_leaves_out_a_slow_step():
    budget = StepBudget(10.0)
    for step in range(23):
        budget.add(20.0 if step == 12 else 0.5)
        if step == 15:
            budget = again(budget)
    assert budget.propose() == 1200 - 39


# ---- the plan ----


def plan_of(total_steps: int, batch_size: int = 2, minutes: float | None = MINUTES) -> Plan:
    """Return the plan of a run on 100 images."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return Plan(
        EpochSampler(100, batch_size),
        Schedule(optimizer, "cosine", total_steps),
        total_steps,
        budget=None if minutes is None else StepBudget(minutes),
        steps_per_epoch=100 // batch_size,
    )


@pytest.mark.parametrize(
    "seconds",
    [
        slower(5, 0.6, 0.65),
        stalls(20, 0.6, 0.9),
        noise,
    ],
)
def test_whether_an_epoch_is_mixed_is_decided_once(seconds):
    """A run that is resumed inside of it, and looks at the plan again, decides the same."""
    plan = plan_of(5000)
    plan.plain_epochs = 0.3
    decisions = {}
    step = 0
    while step < plan.total_steps:
        mixed = mixed_epochs(plan.plain_epochs, plan.ceiling_steps, 50, plan.epochs_are_fixed_at)
        epoch = step // 50
        decisions.setdefault(epoch, set()).add(epoch < mixed)
        step += 1
        plan.note_step(step, seconds(step, plan.budget.elapsed_s))
    assert {len(decided) for decided in decisions.values()} == {1}
    assert decisions[0] == {True}
    assert decisions[max(decisions)] == {False}
    assert plan.limit == "run.max_minutes"
    assert plan.budget.elapsed_s < 290


@pytest.mark.parametrize(
    ("batch_size", "minutes"),
    [
        (2, 4.75),
        (2, None),
        (2, 99.0),
        (1, 4.75),
        (4, None),
    ],
)
def test_a_run_resumed_with_other_batches_or_minutes_ends_in_time(batch_size, minutes):
    """After two thirds of the minutes; steps then take twice as long for each image."""
    before = plan_of(5000)
    for step in range(1, 951):
        before.note_step(step, 0.2)
    before.sampler.set_epoch(19)
    plan = plan_of(10000 // batch_size, batch_size, minutes)
    plan.sampler.set_epoch(19)
    plan.load_state_dict(json.loads(json.dumps(before.state_dict())))
    plan.go_on(950, before.sampler.state_dict())
    step = 950
    while step < plan.total_steps:
        step += 1
        plan.note_step(step, 0.2 * batch_size)
    assert plan.budget.elapsed_s == pytest.approx(285, abs=0.8)
    assert plan.limit == "run.max_minutes"
