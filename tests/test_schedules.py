"""Learning rate schedules and the length of a run."""

import json
import math
import random

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR, StepLR

from toolkit.base.errors import BadInput
from toolkit.data.dataset import mixed_epochs
from toolkit.data.sampling import EpochSampler, accumulation_at
from toolkit.run.plan import Plan, StepBudget
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


def followed(budget: StepBudget, seconds, resume_at=lambda step: False) -> list[tuple[int, int]]:
    """Adds steps of `seconds(step, elapsed_s)` to the end of the plan; the plans as (steps made, steps planned).

    Where `resume_at` says so, the run is killed and resumed.
    """
    plans = []
    while budget.total_steps is None or budget.steps < budget.total_steps:
        budget.add(seconds(budget.steps, budget.elapsed_s))
        planned = budget.propose()
        if planned is not None:
            budget.fix(planned)
            plans.append((budget.steps, planned))
        if resume_at(budget.steps):
            budget.load_state_dict(again(budget).state_dict())
    return plans


def again(budget: StepBudget) -> StepBudget:
    """The budget of a run that was killed and resumed."""
    resumed = StepBudget(budget.max_minutes)
    resumed.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    return resumed


def slower(times: float, begin: float, end: float = math.inf):
    """Steps of 0.2 s, so many times slower between these shares of 285 s."""
    return lambda step, elapsed_s: 0.2 * (times if 285 * begin < elapsed_s < 285 * end else 1)


def stalls(stall_s: float, *shares: float):
    """Steps of 0.2 s, and single ones of `stall_s` at these shares of 285 s."""
    return lambda step, elapsed_s: stall_s if any(0 <= elapsed_s - 285 * at < 0.2 for at in shares) else 0.2


def noise(step: int, elapsed_s: float) -> float:
    return 0.2 * random.Random(step).uniform(0.5, 1.5)


def heavy_tail(step: int, elapsed_s: float) -> float:
    return 0.1 * random.Random(step).paretovariate(1.3)


@pytest.mark.parametrize(("seconds", "least_steps"), [
    (lambda step, elapsed_s: 0.2, 1424),
    (noise, 1424),
    (slower(5, 0.501), 855),  # as many as fit: 714 in the first half, 142 in the other
    (slower(5, 0.75), 1139),
    (slower(2, 0.501), 1068),
    (slower(10, 0.501), 784),
    (slower(2, 0.25), 889),
    (slower(5, 0.25), 569),
    (slower(0.2, 0.501), 1424),  # faster: the ceiling stands
    (slower(3, 0, 0.2), 1233),
    (slower(5, 0.48, 0.5), 1351),
    (slower(5, 0.6, 0.65), 1364),
    (slower(5, 0.55, 0.99), 915),
    (slower(20, 0.95), 1356),
    (slower(100, 0.99), 1411),
    (stalls(60, 0.7), 1124),
    (stalls(60, 0.3), 1124),
    (stalls(20, 0.6, 0.75, 0.9), 1124),
    (stalls(12, 0.95), 1360),
    (lambda step, elapsed_s: 2.0 if step % 10 == 9 else 0.2, 749),
    (lambda step, elapsed_s: 0.2 * (4 if elapsed_s % 60 > 30 else 1), 912),
    (lambda step, elapsed_s: 0.1 + elapsed_s / 285, 680),
    (heavy_tail, 815),
    (lambda step, elapsed_s: 40.0, 7),
    (lambda step, elapsed_s: 500.0, 1),
])  # fmt: skip
def test_minutes_are_kept_whatever_the_machine_does(seconds, least_steps):
    budget = StepBudget(max_minutes=4.75)
    plans = followed(budget, seconds)
    longest_step_s = seconds(budget.steps - 1, budget.elapsed_s - 1e-6)
    assert budget.elapsed_s <= 1.02 * 285 + longest_step_s
    assert budget.steps >= least_steps
    ceiling = next(planned for step, planned in plans if step == budget.settled_steps)
    assert max(planned for step, planned in plans if step >= budget.settled_steps) == ceiling == budget.ceiling_steps
    for resume_at in (lambda step: True, lambda step: step % 7 == 0):
        resumed = StepBudget(max_minutes=4.75)
        assert followed(resumed, seconds, resume_at) == plans
        assert resumed.state_dict() == budget.state_dict()


def test_a_budget_of_before_there_was_a_ceiling_goes_on_with_its_final_plan():
    saved = {"total_steps": 120, "steps": 70, "elapsed_s": 35.0, "measured_s": [], "planned_steps": 60,
             "planned_s": 30.0, "begun_steps": 0, "begun_s": 0.0, "settled": True}  # fmt: skip
    resumed = StepBudget(max_minutes=1.0)
    resumed.load_state_dict(saved)
    assert (resumed.ceiling_steps, resumed.settled_steps) == (120, 60)
    followed(resumed, lambda step, elapsed_s: 1.0)
    assert resumed.steps == 95 and resumed.elapsed_s == 60.0


def test_other_minutes_count_until_the_ceiling_rests_on_those_of_before():
    budget = StepBudget(max_minutes=1.0)
    for step in range(70):
        budget.add(0.5)
        planned = budget.propose()
        if planned is not None:
            budget.fix(planned)
        resumed = StepBudget(max_minutes=9.0)
        resumed.load_state_dict(budget.state_dict())
        assert resumed.max_minutes == (1.0 if step >= 59 else 9.0)


@pytest.mark.parametrize("seconds", [slower(2, 0.9), slower(5, 0.6, 0.65), stalls(20, 0.6, 0.9), noise])
def test_whether_an_epoch_is_mixed_does_not_change_inside_of_it(seconds):
    """So that a run that is resumed there, and looks at the plan again, decides the same."""
    schedule = Schedule(optimizer(1.0), "cosine", 5000)
    plan = Plan(EpochSampler(100, 2), schedule, 5000, steps_per_epoch=50, plain_epochs=0.3)
    plan.budget = StepBudget(max_minutes=4.75)
    step = 0
    decisions = {}
    while step < plan.total_steps:
        mixed = mixed_epochs(plan.plain_epochs, plan.ceiling_steps, 50, plan.epochs_are_fixed_at)
        epoch = step // 50
        decisions.setdefault(epoch, set()).add(epoch < mixed)
        elapsed_s = plan.budget.elapsed_s
        step += 1
        plan.note_step(step, seconds(step, elapsed_s))
    assert set(map(len, decisions.values())) == {1}
    assert decisions[0] == {True} and decisions[max(decisions)] == {False}
    assert plan.limit == "run.max_minutes" and plan.budget.elapsed_s < 290


@pytest.mark.parametrize(("batch_size", "minutes"), [(2, 4.75), (2, None), (2, 99.0), (1, 4.75), (4, None)])
def test_a_resumed_run_of_other_batches_or_minutes_ends_in_time(batch_size, minutes):
    """It is resumed after two thirds of the minutes; steps then take twice as long for each image."""
    plans = []
    for size, max_minutes in ((2, 4.75), (batch_size, minutes)):
        budget = None if max_minutes is None else StepBudget(max_minutes)
        schedule = Schedule(optimizer(1.0), "cosine", 10000 // size)
        plans.append(Plan(EpochSampler(100, size), schedule, 10000 // size, budget=budget, steps_per_epoch=100 // size))
    before, plan = plans
    for step in range(1, 951):
        before.note_step(step, 0.2)
    before.sampler.set_epoch(19)
    plan.sampler.set_epoch(19)
    plan.load_state_dict(json.loads(json.dumps(before.state_dict())))
    plan.go_on(950, before.sampler.state_dict())
    step = 950
    while step < plan.total_steps:
        step += 1
        plan.note_step(step, 0.2 * batch_size)
    assert plan.budget.elapsed_s == pytest.approx(285, abs=0.8)
    assert plan.limit == "run.max_minutes"


def test_minutes_of_a_run_that_is_extended_are_those_of_the_whole_run():
    budget = StepBudget(max_minutes=1.0)
    followed(budget, lambda step, elapsed_s: 0.5)
    assert budget.elapsed_s == 60 and budget.is_used_up, "those after the last plan count too"
    longer = StepBudget(max_minutes=3.0)
    longer.elapsed_s = budget.elapsed_s
    longer.count_on(120)
    plans = followed(longer, lambda step, elapsed_s: 2.0)
    assert plans[:3] == [(120 + 12, 180), (120 + 24, 180), (120 + 30, 180)], "by the speed of now"
    assert longer.steps == 180 and longer.elapsed_s == 180
    anew = StepBudget(max_minutes=0.5)
    anew.count_on(120)  # of a run that had no limit of minutes
    assert not anew.is_used_up
    anew.elapsed_s = budget.elapsed_s
    anew.count_on(120)
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
