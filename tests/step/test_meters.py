"""Smoothed values for the console, the timing of a step, and figures of the machines.

The statistics are compared with DETR and seamseg in tests/golden.
"""

import json
import math
import platform

import pytest
from processes import run_on_ranks

from toolkit.base.distributed import world
from toolkit.base.errors import BadInput
from toolkit.step.meters import METER_KINDS, Meters, SmoothedValue, StepTimer, machine_figures, make_meters


@pytest.mark.parametrize("name", ["median", "avg", "global_avg", "max", "value"])
def test_an_empty_meter_is_nan(name):
    assert math.isnan(getattr(SmoothedValue(), name))


def test_meters_continue_from_json_as_if_never_stopped():
    def make():
        return Meters(lr=SmoothedValue(window_size=1, fmt="{value:.6f}"), smooth=SmoothedValue(momentum=0.98))

    whole = make()
    continued = make()
    for i in range(30):
        row = {"loss": 1 / (i + 3), "lr": 0.1**i}
        if i % 3:  # a name may be missing in a step
            row["smooth"] = i / 7
        if i == 13:
            state = json.loads(json.dumps(continued.state_dict()))
            continued = make()
            continued["stale"] = SmoothedValue()
            continued.load_state_dict(state)
        whole.add(row, n=i + 1)
        continued.add(row, n=i + 1)
    assert continued.state_dict() == whole.state_dict()
    assert str(continued) == str(whole)


def test_meters_of_older_checkpoints_are_read():
    """Averages of an epoch were pairs, and a mean with momentum was a class of its own."""
    meters = Meters()
    with_momentum = {"fmt": "{value:.4f} ({mean:.4f})", "momentum": 0.5, "value": 2.0, "sum": 6.0, "count": 1.75}
    plain = {
        "fmt": "{median:.4f} ({global_avg:.4f})",
        "window_size": 20,
        "window": [3.0],
        "total": 9.0,
        "count": 3,
    }
    meters.load_state_dict({"average": [10.0, 4], "momentum": with_momentum, "plain": plain})
    assert meters.means() == {"average": 2.5, "momentum": 6.0 / 1.75, "plain": 3.0}
    assert str(meters.momentum) == "2.0000 (3.4286)"
    meters.update({"momentum": 1.0, "average": 5.0})
    assert meters.means() == {"average": 3.0, "momentum": 4.0 / 1.875, "plain": 3.0}


MOMENTUM = (0.125 * 4 + 0.25 * 1 + 0.5 * 2 + 9) / 1.875  # 1 - 1 / steps of an epoch, as in seamseg
KINDS = {
    "epoch_median": (2.0, "2.0000 (4.0000)"),
    "run_median": (2.0, "2.0000 (4.0000)"),
    "epoch_mean": (4.0, "9.0000 (4.0000)"),
    "run_mean": (4.0, "9.0000 (4.0000)"),
    "momentum": (MOMENTUM, "9.0000 (5.7333)"),
}


@pytest.mark.parametrize("kind", METER_KINDS)
def test_each_kind_smooths_as_its_original(kind):
    meters = make_meters(kind, steps_per_epoch=2)
    for value in (4.0, 1.0, 2.0, 9.0):
        meters.update(loss=value, class_error=10 * value)
    assert (meters.smoothed("loss"), str(meters["loss"])) == KINDS[kind]
    assert meters.smoothed("class_error") == 90.0  # the last value, as DETR shows it
    assert str(meters["class_error"]) == "90.00"


def test_an_unknown_kind_is_refused():
    with pytest.raises(BadInput, match="run.meters is 'median'"):
        make_meters("median", 2)


def test_the_timer_splits_waiting_from_work_and_leaves_evaluation_out():
    now = 0.0
    timer = StepTimer(window_size=2, clock=lambda: now)
    assert timer.row(10) == {}
    for wait, work in ((5.0, 5.0), (1.0, 3.0), (1.0, 1.0)):
        now += 1000.0  # an evaluation
        timer.start()
        now += wait
        timer.data_ready()
        now += work
        assert timer.step_done(images=12) == wait + work
    row = timer.row(100)
    assert row.pop("mem/peak_mb") > 1.0
    assert list(row.values()) == [1.0, 3.0, 4.0, 300.0]  # data, step, images a second, time left
    assert timer.last_step_s == 2.0


def figures_on_two_machines() -> dict[str, float]:
    """Three ranks: the first two on one machine, the last one on another."""
    platform.node = lambda: "first" if world()[0] < 2 else "second"
    return machine_figures()


def test_figures_of_every_machine_are_on_every_rank():
    figures, *others = run_on_ranks(figures_on_two_machines, 3)
    assert others == [figures, figures]
    kinds = ("cpu_percent", "memory_percent", "peak_mb")
    assert figures.keys() == {f"machine/{name}/{kind}" for name in ("first", "second") for kind in kinds}
    assert figures["machine/first/peak_mb"] > 1.5 * figures["machine/second/peak_mb"]
    assert 10 < figures["machine/second/peak_mb"] < 1e5
    assert 0 < figures["machine/first/memory_percent"] < 100
