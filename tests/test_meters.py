"""Meters of losses and times."""

import json
import math
import platform
from types import SimpleNamespace

import pytest
from processes import run_on_ranks

from toolkit.base.distributed import world
from toolkit.base.errors import BadInput
from toolkit.run.log import Log
from toolkit.step.meters import (
    METER_KINDS,
    Meters,
    SmoothedValue,
    StepTimer,
    machine_figures,
    make_meters,
)


def test_an_empty_meter_is_nan_and_can_be_shown():
    # timm met the division by zero in the same class; DETR's original still has it
    for meter in (SmoothedValue(), SmoothedValue(momentum=0.9)):
        assert "nan" in str(meter)
    assert all(math.isnan(getattr(SmoothedValue(), name)) for name in ("median", "avg", "global_avg", "max", "value"))
    assert StepTimer().row(10) == {}


def test_each_meter_by_hand():
    meter = SmoothedValue(window_size=4, fmt="{median} {avg} {max} {value} {global_avg}")
    for value in (100.0, 1.0, 4.0, 2.0, 3.0):
        meter.update(value)
    assert str(meter) == "2.0 2.5 4.0 3.0 22.0"  # of 1 2 3 4 the lower middle is 2
    meter = SmoothedValue()
    meter.update(1.0, n=3)  # weighs in the global average only
    meter.update(5.0, n=1)
    assert (meter.global_avg, meter.avg, meter.count) == (2.0, 3.0, 4)
    meter = SmoothedValue(momentum=0.5)
    for value in (8.0, 4.0, 2.0):
        meter.update(value)
    assert meter.global_avg == pytest.approx((0.25 * 8 + 0.5 * 4 + 2) / 1.75)


def test_meters_continue_from_json_as_if_never_stopped():
    def make():
        return Meters(lr=SmoothedValue(window_size=1, fmt="{value:.6f}"), smooth=SmoothedValue(momentum=0.98))

    whole = make()
    first = make()
    second = make()
    second["stale"] = SmoothedValue()
    kept = []
    for i in range(30):
        row = {"loss": 1 / (i + 3), "lr": 0.1**i}
        if i % 3:  # a name may be missing in a step
            row["smooth"] = i / 7
            kept.append(i / 7)
        whole.add(row, n=i + 1)
        if i == 13:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        continued = first if i < 13 else second
        continued.add(row, n=i + 1)
    assert second.state_dict() == whole.state_dict()
    assert str(second) == str(whole)
    weights = [0.98 ** (len(kept) - 1 - place) * (i + 1) for place, i in enumerate(i for i in range(30) if i % 3)]
    expected = sum(weight * value for weight, value in zip(weights, kept, strict=True)) / sum(weights)
    assert second.means()["smooth"] == pytest.approx(expected)


def test_meters_of_older_checkpoints_are_read():
    """Averages of an epoch were pairs, and a mean with momentum was a class of its own."""
    meters = Meters()
    of_before = {"fmt": "{value:.4f} ({mean:.4f})", "momentum": 0.5, "value": 2.0, "sum": 6.0, "count": 1.75}
    plain = {"fmt": "{median:.4f} ({global_avg:.4f})", "window_size": 20, "window": [3.0], "total": 9.0, "count": 3}
    meters.load_state_dict({"average": [10.0, 4], "momentum": of_before, "plain": plain})
    assert meters.means() == {"average": 2.5, "momentum": 6.0 / 1.75, "plain": 3.0}
    assert str(meters.momentum) == "2.0000 (3.4286)"
    meters.update({"momentum": 1.0, "average": 5.0})
    assert meters.means() == {"average": 3.0, "momentum": 4.0 / 1.875, "plain": 3.0}


def test_each_kind_smooths_as_its_original():
    values = [4.0, 1.0, 2.0, 9.0]
    shown, smoothed = {}, {}
    for kind in METER_KINDS:
        meters = make_meters(kind, steps_per_epoch=2)
        for value in values:
            meters.update(loss=value)
        shown[kind] = str(meters["loss"])
        smoothed[kind] = meters.smoothed("loss")
    assert smoothed == {
        "epoch_median": 2.0,
        "run_median": 2.0,
        "epoch_mean": 4.0,
        "run_mean": 4.0,
        "momentum": meters["loss"].global_avg,
    }
    assert shown["epoch_median"] == shown["run_median"] == "2.0000 (4.0000)"
    assert shown["epoch_mean"] == shown["run_mean"] == "9.0000 (4.0000)"
    assert meters["loss"].momentum == 0.5  # 1 - 1 / steps of an epoch, as in seamseg
    with pytest.raises(BadInput, match="run.meters is 'median'"):
        make_meters("median", 2)
    for kind in ("epoch_median", "epoch_mean", "momentum"):  # as DETR does, whose averages of the epoch have its mean
        meters = make_meters(kind, 10)
        for value in (50.0, 20.0, 40.0):
            meters.update(class_error=value)
        assert str(meters) == "class_error: 40.00" and meters.smoothed("class_error") == 40.0


@pytest.mark.parametrize(("kind", "kept"), [("epoch_median", False), ("run_median", True), ("momentum", True)])
def test_meters_of_an_epoch_begin_anew_those_of_a_run_do_not(kind, kept, capsys):
    log, rows = Log(True, kind, steps_per_epoch=2, log_every=1), []
    log.start(SimpleNamespace(log=rows.append), {}, 0, 4)
    for step, images in ((1, 48), (2, 16)):  # as where images are larger, and fewer in a batch
        log.meters.update({"loss": 4.0 * step})
        log.log_step(step, 4, 0, {"train/loss": 4.0 * step, "train/lr/main": 0.1}, images)
    log.log_epoch(2, 0)
    log.log_epoch(2, 0)  # once
    assert log.end_epoch() == {"loss": 5.0}
    assert bool(log.meters) is kept
    assert [row for row in rows if "epoch/loss" in row] == [rows[-1]]
    assert (rows[-1]["step"], rows[-1]["epoch"], rows[-1]["epoch/loss"]) == (2, 0, 5.0)
    assert capsys.readouterr().out.count("epoch 1 averages  loss 5.00") == 1


def test_timer_splits_waiting_from_work_and_leaves_evaluation_out():
    now = 0.0
    timer = StepTimer(window_size=2, clock=lambda: now)
    for wait, work in ((5.0, 5.0), (1.0, 3.0), (1.0, 1.0)):
        now += 1000.0  # an evaluation
        timer.start()
        now += wait
        timer.data_ready()
        now += work
        assert timer.step_done(images=12) == wait + work
    assert (timer.data_s, timer.step_s) == (1.0, 3.0)
    row = timer.row(100)
    assert (row["time/step_s"], row["time/images_per_s"], row["time/eta_s"]) == (3.0, 4.0, 300.0)
    assert row["mem/peak_mb"] > 1.0


def figures_on_two_machines() -> dict[str, float]:
    """Three ranks: the first two on one machine, the last one on another."""
    platform.node = lambda: "first" if world()[0] < 2 else "second"
    return machine_figures()


def test_figures_of_every_machine_are_on_every_rank():
    figures, *others = run_on_ranks(figures_on_two_machines, 3)
    kinds = ("cpu_percent", "memory_percent", "peak_mb")
    assert others == [figures, figures]
    assert figures.keys() == {f"machine/{name}/{kind}" for name in ("first", "second") for kind in kinds}
    assert figures["machine/first/peak_mb"] > 1.5 * figures["machine/second/peak_mb"] > 0
    assert 0 < figures["machine/first/memory_percent"] < 100
    assert 10 < figures["machine/second/peak_mb"] < 1e5, "MiB"
