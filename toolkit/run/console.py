"""The lines that a run prints while it trains and when it ends, and its progress bar.

A line is at most as wide as the terminal, or `DEFAULT_COLUMNS` where there is none. Values that do not fit into a line
are only in metrics.jsonl.
"""

import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from tqdm import tqdm

from toolkit.base.text import columns
from toolkit.step.meters import Meters

DEFAULT_COLUMNS = 120  # columns of a line where the output is not a terminal
WAIT_SHARE = 0.1  # of a step's time, from which on the line has the time of waiting for data
# Names of losses that the console leaves to metrics.jsonl: those of auxiliary layers, and unweighted ones.
_OTHER_LOSSES = re.compile(r"_(enc|dn|aux|interm)?_?\d+$|_enc$|_unscaled$")


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step, total_steps: optimizer steps done, and those of the whole run.
        epoch: the current epoch, counted from 0.
        steps_per_epoch: optimizer steps of an epoch with the current batch size.
        recut: number to add to a step to get the step that the run would have reached if the batch size had always
            been the current one; 0 if it was.
        is_length_known: whether `total_steps` is the length of the run, and not just its upper limit.
    """

    step: int
    total_steps: int
    epoch: int
    steps_per_epoch: int
    recut: int = 0
    is_length_known: bool = True

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole run, including an unfinished last one."""
        return max(-(-(self.total_steps + self.recut) // self.steps_per_epoch), self.epoch + 1)

    def __str__(self) -> str:
        """Return "epoch K  step I/N", with the epoch counted from 1 and N the steps of the whole run if it is known."""
        total = f"/{self.total_steps}" if self.is_length_known else ""
        return f"epoch {self.epoch + 1}  step {self.step}{total}"


def console_line(row: Mapping, meters: Meters, progress: Progress, width: int = DEFAULT_COLUMNS) -> str:
    """Format a training row as one console line of at most `width` columns.

    The line has the smoothed, weighted losses except those of auxiliary layers, the largest first; the smoothed errors
    in percent; the learning rate of the group `main` (else of the first group); the time of a step and the peak memory.
    Losses and errors that do not fit are left out, the last ones first.

    Args:
        row: see `RunWriter.log`; the line leaves out values that the row does not have.
        meters: smoothed values of the losses and errors.
    """
    trained = [key.removeprefix("train/") for key in row if key.startswith("train/")]
    shown = [name for name in trained if name in meters]
    values = {name: meters.smoothed(name) for name in shown}
    losses = [name for name in shown if name.startswith("loss_") and not _OTHER_LOSSES.search(name)]
    losses.sort(key=lambda name: _size(values[name]), reverse=True)
    errors = [name for name in shown if name.endswith("_error")]
    terms = [_term(name, values[name]) for name in losses + errors]
    eta_s = row.get("time/eta_s")
    head = [
        str(progress),
        f"eta {timedelta(seconds=round(eta_s))}" if eta_s is not None and math.isfinite(eta_s) else "",
        f"loss {short_number(meters.smoothed('loss'))}" if "loss" in meters else "",
    ]
    rates = {name.removeprefix("lr/"): row[f"train/{name}"] for name in trained if name.startswith("lr/")}
    main_rate = rates.get("main", next(iter(rates.values()), None))
    tail = [
        f"lr {main_rate:.3g}" if main_rate is not None else "",
        step_time(row["time/step_s"], row["time/data_s"]) if "time/step_s" in row else "",
        f"{row['mem/peak_mb'] / 1024:.1f} GiB" if "mem/peak_mb" in row else "",
    ]
    return fit_line(head, terms, tail, width)


def averages_line(epoch: int, means: Mapping[str, float], epoch_s: float, width: int = DEFAULT_COLUMNS) -> str:
    """Format the mean losses and metrics of an epoch, and its time in seconds, as one line of at most `width` columns.

    As in DETR; losses of auxiliary layers are left out, the others come first, by their size. epoch: counted from 0,
    printed from 1.
    """
    names = [name for name in means if name != "loss" and not _OTHER_LOSSES.search(name)]
    losses = [name for name in names if name.startswith("loss_")]
    losses.sort(key=lambda name: _size(means[name]), reverse=True)
    metrics = [name for name in names if name not in losses]
    terms = [_term(name, means[name]) for name in losses + metrics]
    loss = f"loss {short_number(means['loss'])}" if "loss" in means else ""
    return fit_line([f"epoch {epoch + 1} averages", loss], terms, [f"in {timedelta(seconds=round(epoch_s))}"], width)


def _size(value: float) -> float:
    """Return the absolute value of a loss, by which losses are sorted; a loss that is not a number is the largest."""
    return math.inf if math.isnan(value) else abs(value)


def _term(name: str, value: float) -> str:
    """Format a loss or metric without the prefix `loss_`, such as "giou 0.123"."""
    return f"{name.removeprefix('loss_')} {short_number(value)}"


def fit_line(head: Sequence[str], terms: Sequence[str], tail: Sequence[str], width: int) -> str:
    """Join head, terms and tail to a line of at most `width` columns.

    If they do not fit, terms are left out, the last ones first, with "..." in their place; then parts of the tail, the
    last ones first; finally the head is cut off.
    """
    head, terms, tail = [part for part in head if part], list(terms), [part for part in tail if part]
    dots = ""
    while True:
        middle = " ".join(filter(None, [*terms, dots]))
        line = "  ".join(filter(None, [*head, middle, *tail]))
        if columns(line) <= width:
            return line
        dots = "..."
        if not terms and not tail:
            return line[: max(0, width - len(dots))] + dots
        (terms or tail).pop()


def short_number(value: float) -> str:
    """Format a number with three significant digits, such as 0.0123, 1.23, 123 or 1.23e+04; 1000 to 9999 have four."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 1e4:
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def step_time(step_s: float, data_s: float) -> str:
    """Format the seconds of a step, such as "0.868 s/step (data 23%)".

    data_s: seconds of it spent on waiting for data; their share is left out if it is below `WAIT_SHARE`.
    """
    share = data_s / step_s if step_s else 0.0
    return f"{short_number(step_s)} s/step{f' (data {share:.0%})' if share >= WAIT_SHARE else ''}"


def console_width() -> int:
    """Return the width of the terminal in columns; `DEFAULT_COLUMNS` if the output is not a terminal."""
    return shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns


def training_time_line(elapsed_s: float, steps: int) -> str:
    """Format the time of a whole run of `steps` steps as one line, as DETR and Scene-Graph-Benchmark print it.

    elapsed_s: seconds, including evaluations and saving.
    """
    return f"Training time {timedelta(seconds=round(elapsed_s))} ({elapsed_s / max(steps, 1):.3f} s / step)"


def progress_bar(total: int, initial: int = 0, enabled: bool = True) -> tqdm:
    """Return a progress bar over optimizer steps with the time left, which shows nothing if stderr is not a terminal.

    Call `bar.update()` at each step; `bar.write(line)` prints a line above the bar, also if the bar is not shown.

    Args:
        total: optimizer steps of the run.
        initial: optimizer steps that were made before.
        enabled: False on all processes but the main one, so that only it shows the bar.
    """
    visible = enabled and sys.stderr is not None and sys.stderr.isatty()
    return tqdm(total=total, initial=initial, disable=not visible, unit="step", dynamic_ncols=True, smoothing=0.1)
