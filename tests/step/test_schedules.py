"""Learning rates as functions of the optimizer step, and of the validation results.

The curves are compared with those of four other programs in tests/golden.
"""

import json

import pytest
import torch

from toolkit.base.errors import BadInput
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

DECAYS = ["cosine", "poly", "linear"]


def sgd(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def factors(steps, name, **options):
    return [lr_factor(step, name, **options) for step in steps]


def rates_at(schedule, step) -> list[float]:
    schedule.set(step)
    return list(schedule.rates().values())


def load_through_json(into, schedule) -> None:
    into.load_state_dict(json.loads(json.dumps(schedule.state_dict(), allow_nan=False)))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "cyclic"])
def test_warm_up_meets_the_schedule_without_a_jump(name):
    options = {
        "total_steps": 100,
        "warmup_steps": 10,
        "warmup_factor": 0.1,
        "milestones": [30, 60],
        "step_size": 40,
    }
    found = factors(range(100), name, **options)
    assert found[:11] == pytest.approx([0.1 + 0.09 * step for step in range(11)])
    assert found[10:] == sorted(found[10:], reverse=True)


@pytest.mark.parametrize("name", [*DECAYS, "exponential"])
def test_the_end_value_comes_after_the_last_update(name):
    last, end, beyond = factors(
        [49, 50, 70],
        name,
        total_steps=50,
        final_factor=0.2,
    )
    assert last > 0.2001
    assert [end, beyond] == pytest.approx([0.2, 0.2])
    assert lr_factor(40, name, total_steps=None) == 1.0  # the length is not known yet


# Of an inner milestone twice, and of one inside the warm-up, which counts from its step on.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"milestones": [2, 2, 4]}, [1, 1, 0.25, 0.25, 0.125]),
        (
            {
                "milestones": [2],
                "warmup_steps": 4,
                "warmup_factor": 0.2,
            },
            [0.2, 0.4, 0.3, 0.4, 0.5],
        ),
        (
            {
                "milestones": [1],
                "warmup_steps": 4,
                "warmup_factor": 1.0,
                "every": 4,
            },
            [1, 0.5, 0.5, 0.5, 0.5],
        ),
    ],
)
def test_milestones(options, expected):
    assert factors(
        range(5),
        "multistep",
        gamma=0.5,
        **options,
    ) == pytest.approx(expected)


def test_milestones_after_the_cycles_do_not_count():
    options = {
        "stairs": 3,
        "cycles": 2,
        "step_size": 2,
        "gamma": 0.5,
        "milestones": [13],
    }
    plain = factors(
        range(20),
        "cyclic",
        total_steps=20,
        **options | {"milestones": []},
    )
    assert factors(range(20), "cyclic", total_steps=20, **options) == plain
    assert factors(range(12, 18), "cyclic", **options) == plain[:6]  # cycles go on until the length is known


@pytest.mark.parametrize(
    ("name", "fallen"),
    [
        ("constant", 1.0),
        ("multistep", 0.1),
        ("plateau", 1.0),
    ],
)
def test_a_schedule_of_settings(name, fallen):
    """The constant warm-up is that of Scene-Graph-Benchmark."""
    settings = ScheduleConfig(name=name, warmup_steps="0.6 epochs", warmup_factor=0.25, warmup_method="constant")
    settings.milestones = [2]
    schedule = schedule_of_settings(settings, sgd(1.0), 10, per_epoch=5)
    found = [rates_at(schedule, step)[0] for step in range(5)]
    assert found == pytest.approx([0.25, 0.25, 0.25 * fallen, fallen, fallen])


STRETCHED = {
    "linear": {},
    "multistep": {"milestones": [10, 60]},
    "cyclic": {"step_size": 10, "stairs": 2, "cycles": 2},
    "plateau": {},
}


@pytest.mark.parametrize("name", STRETCHED)
def test_a_stretched_schedule_is_the_same_at_the_same_place(name):
    """From step 20 of 100 on, 8 processes see in one step what one saw in eight: 80 steps become 10, and back."""

    def make():
        if name == "plateau":
            return PlateauSchedule(sgd(1.0), warmup_steps=30)
        return Schedule(sgd(1.0), name, 100, warmup_steps=30, **STRETCHED[name])

    plain = make()
    stretched = make()
    stretched.stretch(20, 8.0)
    back = make()
    load_through_json(back, stretched)
    back.stretch(25, 1 / 8)  # at 60
    for step, place in [(19, 19), (21, 28), (30, 100)]:
        assert stretched.at(step) == place
        assert rates_at(stretched, step) == rates_at(plain, place)
    for step, place in [(26, 61), (65, 100)]:
        assert rates_at(back, step) == rates_at(plain, place)


@pytest.mark.parametrize("name", DECAYS)
def test_a_corrected_length_goes_on_without_a_jump(name):
    plain = factors(range(101), name, total_steps=100, warmup_steps=10)
    schedule = Schedule(sgd(1.0), name, warmup_steps=10)
    schedule.set_total(50, step=5)  # in the warm-up: as if it had been known
    assert schedule.factors(30)[0] == lr_factor(
        30,
        name,
        total_steps=50,
        warmup_steps=10,
    )
    schedule.set_total(100, step=8)
    schedule.set_total(145, step=55)  # half of the decay is left, and twice as many steps for it
    resumed = Schedule(sgd(1.0), name, 7)
    load_through_json(resumed, schedule)
    for step in range(55, 101):
        assert resumed.factors(55 + 2 * (step - 55))[0] == pytest.approx(plain[step], abs=1e-12)


FAULTS = [
    (
        "cosin",
        {"milestones": [5, 3], "warmup_steps": -1},
        ["multistep", "increasing", "warmup_steps"],
    ),
    ("step", {}, ["step_size"]),
    ("multistep", {}, ["milestones"]),
    ("exponential", {}, ["above 0"]),
]


@pytest.mark.parametrize(("name", "options", "words"), FAULTS)
def test_all_faults_of_a_schedule_at_once(name, options, words):
    with pytest.raises(BadInput) as error:
        Schedule(sgd(1.0), name, 10, **options)
    for problem, word in zip(error.value.problems, words, strict=True):
        assert word in problem


@pytest.mark.parametrize(
    ("value", "steps"),
    [(500, 500), ("500", 500), ("1 step", 1), ("2 epochs", 14), ("0.5 epochs", 4)],
)
def test_times_in_steps_and_epochs(value, steps):
    assert steps_from(value, 7) == steps


@pytest.mark.parametrize("value", ["", "epoch", "-1", "1.5", "1 eposh", True])
def test_what_is_not_a_time_is_refused(value):
    with pytest.raises(BadInput, match="epochs|whole"):
        steps_from(value, 7)


@pytest.mark.parametrize(
    ("every", "last", "times"),
    [
        (4, 10, [4, 8, 10]),
        (0, 10, [10]),
        (5, None, [5, 10]),
    ],
)
def test_when_something_is_due(every, last, times):
    assert [step for step in range(11) if is_time(step, every, last)] == times


def plateau(**options) -> PlateauSchedule:
    return PlateauSchedule(sgd(0.5, 0.05), **{"warmup_steps": 0} | options)


def test_a_plateau_without_validations_is_the_warm_up_alone():
    schedule = plateau(warmup_steps=10)
    rate = torch.tensor(0.5)
    schedule.optimizer.param_groups[0]["lr"] = rate  # a tensor is written in place
    for step in (0, 5, 10, 10**6):
        warm = warm_up(step, 10)
        assert rates_at(schedule, step) == pytest.approx([0.5 * warm, 0.05 * warm])
        assert float(rate) == pytest.approx(0.5 * warm)
    assert not schedule.finished


def test_undefined_results_are_not_better():
    schedule = plateau(patience=2, max_decays=2)
    fell = [schedule.observe(value) for value in (0.2, float("nan"), None, 0.3, 0.3, None)]
    assert fell == [False, False, True, False, False, True]
    assert schedule.finished
    again = plateau(gamma=0.9, patience=7)
    schedule.scale = 0.5
    load_through_json(again, schedule)
    assert rates_at(again, 50) == rates_at(schedule, 50) == pytest.approx([0.0025, 0.00025])


def test_the_state_of_another_schedule_is_refused_with_a_way_out():
    schedule = plateau()
    cosine = Schedule(schedule.optimizer, "cosine", 100)
    with pytest.raises(BadInput, match="plateau.*checkpoint cosine.*resume_schedule new"):
        schedule.load_state_dict(cosine.state_dict())
    with pytest.raises(BadInput, match="cosine.*checkpoint plateau.*resume_schedule new"):
        cosine.load_state_dict(schedule.state_dict())
    schedule.set_total(7)  # a plateau does not depend on the length
    assert "total_steps" not in schedule.state_dict()


def test_all_faults_of_a_plateau_at_once():
    with pytest.raises(BadInput, match=r"patience(.|\n)*max_decays(.|\n)*cosine"):
        plateau(patience=0, max_decays=0, warmup_method="cosine")
