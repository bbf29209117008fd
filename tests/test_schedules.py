"""Learning rate schedules and the length of a run."""

import json
import math

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR, StepLR

from toolkit.base.errors import BadInput
from toolkit.data.sampling import accumulation_at
from toolkit.run.plan import StepBudget
from toolkit.run.settings import ScheduleConfig
from toolkit.step.schedules import (
    SCHEDULES,
    PlateauSchedule,
    Schedule,
    is_time,
    lr_factor,
    schedule_of_settings,
    steps_from,
    warm_up,
)

OPTIONS = {"multistep": {"milestones": [30, 60]}, "step": {"step_size": 40}}


def optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "cyclic"])
def test_warm_up_rises_to_the_schedule_without_a_jump(name):
    options = {"total_steps": 100, "warmup_steps": 10, "warmup_factor": 0.1, **OPTIONS.get(name, {})}
    factors = [lr_factor(step, name, **options) for step in range(100)]
    assert factors[:11] == pytest.approx([0.1 + 0.09 * step for step in range(11)])
    assert all(b <= a for a, b in zip(factors[10:], factors[11:], strict=False))


def test_shapes_by_hand():
    assert lr_factor(25, "cosine", total_steps=100) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert lr_factor(25, "poly", total_steps=100, power=0.9) == pytest.approx(0.75**0.9)
    assert lr_factor(25, "linear", total_steps=100, final_factor=0.2) == pytest.approx(0.8)
    assert lr_factor(25, "exponential", total_steps=100, final_factor=1e4) == pytest.approx(10)
    assert [lr_factor(s, "multistep", milestones=[3, 5]) for s in (2, 3, 4, 5)] == pytest.approx([1, 0.1, 0.1, 0.01])
    for name in ("cosine", "poly", "linear"):  # the end value comes after the last update, which is not wasted
        ends = [lr_factor(step, name, total_steps=50, final_factor=0.2) for step in (49, 50, 70)]
        assert ends[0] > 0.2001 and ends[1:] == pytest.approx([0.2, 0.2])
        assert lr_factor(40, name, total_steps=None) == 1.0


def test_cycles_by_hand():
    """Two cycles of three stairs, two steps each, the rate halved in the second; warm-up to the lowest stair."""
    options = {"stairs": 3, "cycles": 2, "step_size": 2, "milestones": [6], "gamma": 0.5, "total_steps": 16}
    factors = [lr_factor(step, "cyclic", warmup_steps=2, warmup_factor=0.5, **options) for step in range(17)]
    assert factors[:6] == pytest.approx([1 / 6, 1 / 4, 1, 1, 2 / 3, 2 / 3])
    assert factors[6:12] == pytest.approx([1 / 6, 1 / 6, 1 / 2, 1 / 2, 1 / 3, 1 / 3])
    assert factors[12:] == pytest.approx([1 / 6, 1 / 8, 1 / 12, 1 / 24, 0])
    cosine = [lr_factor(step, "cyclic", last_cycle="cosine", final_factor=0.1, **options) for step in (12, 14, 16)]
    assert cosine == pytest.approx([1 / 6, (1 / 6 + 0.1) / 2, 0.1])


def test_milestones_of_cycles_count_up_to_the_end_of_the_last_cycle():
    options = {"stairs": 3, "cycles": 2, "step_size": 2, "gamma": 0.5, "total_steps": 20}
    plain, inside, at_the_end, after = (
        [lr_factor(step, "cyclic", milestones=milestones, **options) for step in range(21)]
        for milestones in ([], [6], [12], [13, 15])
    )
    assert after == plain, "no jump in the last decay"
    assert inside[:6] == plain[:6] and inside[6:] == pytest.approx([factor / 2 for factor in plain[6:]])
    assert at_the_end[:12] == plain[:12] and at_the_end[12:] == pytest.approx([factor / 2 for factor in plain[12:]])
    never_fixed = [lr_factor(step, "cyclic", milestones=[13], **options | {"total_steps": None}) for step in range(24)]
    assert never_fixed[18:24] == never_fixed[:6], "cycles go on until the length is known"


@pytest.mark.parametrize(("name", "in_torch", "options"), [
    *[("multistep", MultiStepLR, {"milestones": given}) for given in ([5, 5, 9], [5, 5, 5], [0, 3])],  # twice counts
    ("step", StepLR, {"step_size": 4}),
])  # fmt: skip
def test_drops_are_torchs(name, in_torch, options):
    reference, scheduled = optimizer(1e-4, 1e-5), optimizer(1e-4, 1e-5)
    torch_schedule = in_torch(reference, gamma=0.5, **options)
    schedule = Schedule(scheduled, name, gamma=0.5, **options)
    for step in range(12):
        schedule.set(step)
        rates = [group["lr"] for group in reference.param_groups]
        assert list(schedule.rates().values()) == pytest.approx(rates, rel=1e-12), step
        reference.step()
        torch_schedule.step()


def test_a_milestone_inside_the_warm_up_counts_from_there_on():
    options = {"warmup_steps": 4, "warmup_factor": 0.2, "gamma": 0.5}
    factors = [lr_factor(step, "multistep", milestones=[2, 6], **options) for step in range(8)]
    assert factors == pytest.approx([0.2, 0.4, 0.3, 0.4, 0.5, 0.5, 0.25, 0.25])
    cycle = {"stairs": 2, "cycles": 3, "step_size": 4, **options}
    assert lr_factor(3, "cyclic", milestones=[2], **cycle) == pytest.approx(0.8 * 0.5 / 2)
    assert lr_factor(4, "cyclic", milestones=[2], **cycle) == pytest.approx(0.5)


@pytest.mark.parametrize(("name", "fallen"), [("constant", 1.0), ("multistep", 0.1), ("plateau", 1.0)])
def test_constant_warm_up_by_its_setting(name, fallen):
    """WARMUP_METHOD constant of Scene-Graph-Benchmark: the first factor all through the warm-up, then the schedule."""
    settings = ScheduleConfig(name=name, warmup_steps=3, warmup_factor=0.25, warmup_method="constant", milestones=[2])
    schedule, rates = schedule_of_settings(settings, optimizer(1.0), 10, per_epoch=5), []
    for step in range(5):
        schedule.set(step)
        rates += schedule.rates().values()
    assert rates == pytest.approx([0.25, 0.25, 0.25 * fallen, fallen, fallen])


@pytest.mark.parametrize("name", ["linear", "multistep", "step", "cyclic", "plateau"])
def test_a_stretched_schedule_is_the_same_at_the_same_place(name):
    """From step 20 of 100 on, 8 processes see in one step what one saw in eight: 80 steps become 10, and back."""
    options = {"milestones": [10, 60], "step_size": 10, "stairs": 2, "cycles": 2} if name != "plateau" else {}

    def make():
        if name == "plateau":
            return PlateauSchedule(optimizer(1.0), warmup_steps=30)
        return Schedule(optimizer(1.0), name, 100, warmup_steps=30, **options)

    plain, stretched, again = make(), make(), make()
    stretched.stretch(20, 8.0)
    again.load_state_dict(json.loads(json.dumps(stretched.state_dict())))
    again.stretch(25, 1 / 8)  # at 60
    for step, now in [(19, 19), (20, 20), (21, 28), (25, 60), (30, 100)]:
        plain.set(now), stretched.set(step)
        assert stretched.rates() == plain.rates() and stretched.at(step) == now
    for step, now in [(25, 60), (26, 61), (65, 100)]:
        plain.set(now), again.set(step)
        assert again.rates() == plain.rates()
    if name == "linear":
        stretched.set_total(25)
        assert stretched.total_steps == 60


def test_a_length_fixed_later_and_rates_kept_in_a_tensor():
    rate = torch.tensor(2.0)
    schedule = Schedule(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate, foreach=False), "linear")
    schedule.set(1)
    assert rate.item() == 2.0
    schedule.set_total(4)
    schedule.set(1)
    assert rate.item() == 1.5


def test_all_faults_of_a_schedule_at_once():
    with pytest.raises(BadInput) as error:
        Schedule(optimizer(1.0), "cosin", milestones=[5, 3], warmup_steps=-1)
    assert len(error.value.problems) == 3 and "multistep" in str(error.value)
    for name, fault in (("step", "step_size"), ("multistep", "milestones"), ("exponential", "above 0")):
        with pytest.raises(BadInput, match=fault):
            Schedule(optimizer(1.0), name, 10)


def test_times():
    times = {500: 500, "500": 500, "1 step": 1, "1 epoch": 7, "2 epochs": 14, "0.5 epochs": 4}
    assert {value: steps_from(value, 7) for value in times} == times
    for value in ("", "epoch", "-1", "1.5", "1 eposh", "3 days", True, None):
        with pytest.raises(BadInput, match="epochs|whole"):
            steps_from(value, 7)
    assert [s for s in range(11) if is_time(s, 4, last=10)] == [4, 8, 10]
    assert [s for s in range(11) if is_time(s, 0, last=10)] == [10]
    assert [s for s in range(11) if is_time(s, 5)] == [5, 10]
    assert [accumulation_at(epoch, 4, after_epoch=2) for epoch in range(4)] == [1, 1, 4, 4]
    assert accumulation_at(0, 4, after_epoch=0) == 4, "from the start on"


def followed(budget: StepBudget, seconds: float) -> list[tuple[int, int]]:
    """Adds steps of so many seconds to the end of the plan; the plans as (steps made, steps planned)."""
    plans = []
    while budget.total_steps is None or budget.steps < budget.total_steps:
        budget.add(seconds)
        if (planned := budget.propose()) is not None:
            budget.fix(planned)
            plans.append((budget.steps, planned))
    return plans


def again(budget: StepBudget) -> StepBudget:
    """The budget of a run that was killed and resumed."""
    resumed = StepBudget(budget.max_minutes)
    resumed.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    return resumed


def train(budget: StepBudget, speed, restart_every: int = 10**9) -> float:
    """Steps of `speed(step)` seconds, to the end of the plan; killed and resumed in between. The seconds it took."""
    seconds = 0.0
    while budget.total_steps is None or budget.steps_made < budget.total_steps:
        budget.steps_made += 1
        seconds += speed(budget.steps_made)
        if not budget.settled:
            budget.add(speed(budget.steps_made))
            if (planned := budget.propose()) is not None:
                budget.fix(planned)
        if budget.steps_made % restart_every == 0:
            made, budget = budget.steps_made, again(budget)
            budget.steps_made = made
    return seconds


@pytest.mark.parametrize("restart_every", [7, 10**9])
@pytest.mark.parametrize(("speed", "least_s"), [
    (lambda step: 0.5, 599),
    (lambda step: 2.0 if step < 40 else 0.5, 560),  # slow at the start alone: once planned, it would end after 202 s
    (lambda step: 0.5 if step < 40 else 2.0, 560),  # a neighbour came: it would take 2,302 s
    (lambda step: 0.5 * (1 + step % 3), 560),
])  # fmt: skip
def test_minutes_are_kept_when_the_speed_changes(speed, least_s, restart_every):
    budget = StepBudget(max_minutes=10.0)
    budget.steps_made = 0
    assert least_s <= train(budget, speed, restart_every) <= 640


def test_the_plan_of_half_of_the_minutes_stands():
    budget = StepBudget(max_minutes=1.0)
    followed(budget, 0.5)
    assert budget.settled and budget.planned_steps == 60 and budget.total_steps == 120
    assert again(budget).settled and again(budget).total_steps == 120 and again(budget).propose() is None


def test_minutes_of_a_run_that_is_extended_are_those_of_the_whole_run():
    budget = StepBudget(max_minutes=1.0)
    followed(budget, 0.5)
    assert budget.elapsed_s == 60 and budget.is_used_up, "those after the last plan count too"
    longer = StepBudget(max_minutes=3.0)
    longer.count_on(120, budget.state_dict())
    assert followed(longer, 2.0) == [(120 + 12, 180), (120 + 24, 180), (120 + 30, 180)], "by the speed of now"
    assert not longer.propose() and longer.elapsed_s == 180
    anew = StepBudget(max_minutes=0.5)
    anew.count_on(120, None)  # of a run that had no limit of minutes
    assert not anew.is_used_up
    anew.count_on(120, budget.state_dict())
    assert anew.is_used_up


@pytest.mark.parametrize("name", ["cosine", "poly", "linear"])
def test_a_corrected_length_lets_the_rate_go_on_without_a_jump(name):
    schedule = Schedule(optimizer(1.0), name, 100, warmup_steps=10)
    plain = [lr_factor(step, name, total_steps=100, warmup_steps=10) for step in range(101)]
    schedule.set_total(50, step=5)  # in the warm-up: as if it had been known
    assert [schedule.factors(step)[0] for step in (9, 30)] == [
        lr_factor(step, name, total_steps=50, warmup_steps=10) for step in (9, 30)]  # fmt: skip
    schedule.set_total(100, step=8)
    schedule.set_total(145, step=55)  # half of the decay is left, and twice as many steps for it
    schedule, state = Schedule(optimizer(1.0), name, 7), json.loads(json.dumps(schedule.state_dict()))
    schedule.load_state_dict(state)
    for step in range(55, 101):
        assert schedule.factors(55 + 2 * (step - 55))[0] == pytest.approx(plain[step], abs=1e-12)
    assert schedule.factors(145)[0] == pytest.approx(0.0, abs=1e-12)


def test_the_first_plan_leaves_out_what_starting_costs():
    budget = StepBudget(max_minutes=1.0, skip_steps=2, measure_steps=4)
    for seconds in (5.0, 1.0, 0.5, 0.5, 0.5):
        budget.add(seconds)
        assert budget.propose() is None
    budget.add(0.5)
    assert budget.propose() == 6 + (60 - 8) / 0.5
    uneven = StepBudget(max_minutes=10.0)
    for step in range(23):
        uneven.add(20.0 if step == 12 else 0.5)  # one slow step does not count as the speed
        uneven = again(uneven) if step == 15 else uneven
    assert uneven.propose() == 1200 - 39
    for minutes, steps, total in ((1.0, 4, 4 + 2), (0.1, 1, 1)):  # used up by the first steps
        slow = StepBudget(max_minutes=minutes, skip_steps=3, measure_steps=20)
        for _ in range(steps):
            slow.add(10.0)
        assert slow.propose() == total


@pytest.mark.parametrize("name", ["cosine", "poly", "linear", "multistep"])
def test_a_rate_that_changes_once_an_epoch_is_that_of_the_epochs_first_step(name):
    options = {"total_steps": 20, "warmup_steps": 3, "warmup_factor": 0.1, "milestones": [10]}
    rates = [lr_factor(step, name, every=5, **options) for step in range(20)]
    assert rates[:3] == [lr_factor(step, name, **options) for step in range(3)]
    for step in range(5, 20):
        assert rates[step] == lr_factor(step - step % 5, name, **options)
    assert rates[3:5] == [1.0, 1.0]
    options = {"warmup_steps": 8, "milestones": [5], "warmup_factor": 1.0}  # one in the warm-up does not wait
    assert [lr_factor(step, "multistep", every=4, **options) for step in (4, 5, 7)] == [1.0, 0.1, 0.1]


def test_a_warm_up_in_epochs():
    """GluonCV's --warmup-epochs 2, with 30 steps an epoch."""
    rates = []
    for warm in ("2 epochs", 60):
        settings = ScheduleConfig(name="cosine", warmup_steps=warm, warmup_factor=0.0)
        rates.append([schedule_of_settings(settings, optimizer(1.0), 300, 30).factors(s) for s in (0, 30, 60, 100)])
    assert rates[0] == rates[1] and rates[0][1:3] == [(0.5,), (1.0,)]
    with pytest.raises(BadInput, match="'-5' is not a time"):
        schedule_of_settings(ScheduleConfig(warmup_steps="-5"), optimizer(1.0), 300, 30)


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
