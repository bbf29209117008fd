"""The lines that a training prints, and the warnings of a run that ends too soon."""

import math
import sys

import pytest

from toolkit.run.console import (
    Progress,
    averages_line,
    console_line,
    progress_bar,
    short_number,
    training_time_line,
)
from toolkit.run.plan import length_warnings
from toolkit.step.meters import Meters

ROW = {
    "step": 120,
    "epoch": 3,
    "train/loss": 2.34567,
    "train/loss_ce": 1.2,
    "train/loss_ce_unscaled": 0.6,
    "train/loss_ce_0": 9.0,
    "train/loss_ce_dn_0": 9.0,
    "train/loss_giou_enc": 9.0,
    "train/loss_bbox": 0.5,
    "train/class_error": 12.0,
    "train/lr/backbone": 1e-5,
    "train/lr/main": 1e-4,
    "train/grad_norm": 0.123,
    "time/data_s": 0.0123,
    "time/step_s": 0.4567,
    "time/eta_s": 3725.0,
    "mem/peak_mb": 1234.5,
}


def meters_of(row: dict) -> Meters:
    """Meters that have met this row, and one with twice its values."""
    meters = Meters()
    for factor in (1.0, 2.0):
        meters.update({key.removeprefix("train/"): factor * row[key] for key in row if "/lr/" not in key})
    return meters


def test_progress_counts_epochs_before_and_after_a_change_of_batches():
    """Five epochs of 40 steps, then batches twice as large: 20 steps an epoch, for 100 more."""
    assert Progress(201, 300, 5, 20, recut=-100).epochs == 10
    assert Progress(201, 300, 5, 20).epochs == 15
    assert str(Progress(201, 300, 5, 20, recut=-100)) == "epoch 6  step 201/300"
    assert str(Progress(2, 300, 0, 20, is_length_known=False)) == "epoch 1  step 2", "300 is the most it can be"


def test_the_lines_of_an_epoch_and_of_the_end():
    means = {
        "loss": 2.0,
        "loss_ce": 1.5,
        "loss_ce_0": 9.0,
        "loss_ce_unscaled": 9.0,
        "class_error": 50.0,
    }
    assert averages_line(1, means, 90.0) == "epoch 2 averages  loss 2.00  ce 1.50 class_error 50.0  in 0:01:30"
    assert training_time_line(3725.4, 100) == "Training time 1:02:05 (37.254 s / step)"


def test_the_line_of_a_step():
    line = console_line(ROW, meters_of(ROW), Progress(120, 4000, 3, 40))
    assert line == (
        "epoch 4  step 120/4000  eta 1:02:05  loss 2.35  ce 1.20 bbox 0.500 class_error 24.0  lr 0.0001  "
        "0.457 s/step  1.2 GiB"
    )


def test_the_largest_losses_come_first_and_one_that_is_not_a_number_before_them():
    means = {"loss_small": 0.1, "loss_large": 3.0, "class_error": 50.0, "loss_gain": -0.5, "loss_broken": math.nan}
    line = averages_line(0, means, 1.0)
    assert line == "epoch 1 averages  broken nan large 3.00 gain -0.500 small 0.100 class_error 50.0  in 0:00:01"
    row = {f"train/{name}": value for name, value in means.items()}
    assert "  broken nan large 3.00 gain -1.00 small 0.100 " in console_line(row, meters_of(row), Progress(1, 1, 0, 1))


def test_waiting_for_data_is_said():
    line = console_line(ROW | {"time/data_s": 0.2}, meters_of(ROW), Progress(120, 4000, 3, 40))
    assert line.endswith("  0.457 s/step (data 44%)  1.2 GiB")


def test_a_row_of_few_values_has_a_line():
    row = {
        "step": 1,
        "train/loss": math.nan,
        "train/loss_rpn_box_reg": 1.0,
        "time/eta_s": math.nan,
    }
    line = console_line(row, meters_of(row), Progress(1, 1, 0, 1))
    assert line == "epoch 1  step 1/1  loss nan  rpn_box_reg 1.00"


def test_a_console_line_never_wraps():
    """Whatever a detector calls its losses and however many it has; the smallest are left out, then the tail."""
    many = ROW | {f"train/loss_{letter * number}": 123.456 for number, letter in enumerate("abcdefghij", start=1)}
    meters = meters_of(many)
    progress = Progress(1234567, 7654321, 299, 25515)
    for width in range(10, 300):
        line = console_line(many, meters, progress, width)
        assert len(line) <= width
        assert ("..." in line) == (width < 231), line
    tail = "  a 123 bb 123 ccc 123 ...  lr 0.0001  0.457 s/step  1.2 GiB"
    assert console_line(many, meters, progress).endswith(tail)
    assert console_line(many, meters, progress, 60).endswith("eta 1:02:05  loss 2.35  ...")
    assert console_line(many, meters, progress, 20) == "epoch 300  step 1..."


NUMBERS = {
    0.0: "0",
    1e-4: "1.00e-04",
    0.001234: "0.00123",
    1.0: "1.00",
    99.96: "100",
    123.4: "123",
    9999.0: "9999",
    12345.0: "1.23e+04",
    -0.5: "-0.500",
    math.inf: "inf",
}


def test_numbers_have_three_digits():
    assert {value: short_number(value) for value in NUMBERS} == NUMBERS


@pytest.mark.parametrize(("terminal", "enabled"), [(False, True), (True, False), (True, True)])
def test_progress_shows_a_bar_with_the_time_left_on_a_terminal_alone(capsys, monkeypatch, terminal, enabled):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    bar = progress_bar(10, initial=3, enabled=enabled)
    bar.update(2)
    bar.refresh()
    bar.write("a line")
    bar.close()
    out, err = capsys.readouterr()
    assert out == "a line\n"
    assert bool(err) == (terminal and enabled)
    if err:
        assert "5/10" in err
        assert "<" in err


@pytest.mark.parametrize(
    ("steps", "warmup", "epoch", "kinds"),
    [
        (1000, 100, 500, []),
        (1, 0, 1, []),
        (100, 100, 50, ["warm-up"]),
        (30, 0, 50, ["epoch"]),
        (30, 100, 50, ["warm-up", "epoch"]),
    ],
)
def test_a_run_that_ends_too_soon_is_warned_of(steps, warmup, epoch, kinds):
    warnings = length_warnings(steps, warmup, epoch)
    assert sorted(warnings) == sorted(kinds)
    if "warm-up" in kinds:
        assert "steps are warm-up (schedule.warmup_steps is 100)" in warnings["warm-up"]
    if "epoch" in kinds:
        assert "after 30 of the 50 steps of an epoch" in warnings["epoch"]
