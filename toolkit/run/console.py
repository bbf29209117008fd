"""The lines that a run prints while it trains, and its progress bar.

A line has at most as many columns as the terminal, or `DEFAULT_COLUMNS`: what has no room is left to metrics.jsonl.
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
WAIT_SHARE = 0.1  # of a step's time, from which on waiting for data is told
# Names of losses that the console leaves to metrics.jsonl: those of auxiliary layers, and unweighted ones.
_OTHER_LOSSES = re.compile(r"_(enc|dn|aux|interm)?_?\d+$|_enc$|_unscaled$")


@dataclass
class Progress:
    """The progress of a run: steps done, and of how many.

    steps_per_epoch: of an epoch with batches of now. recut: steps more that the run would have made with these always.
    """

    step: int
    total_steps: int
    epoch: int
    steps_per_epoch: int
    recut: int = 0

    @property
    def epochs(self) -> int:
        """Epochs of the whole run, an unfinished last one included."""
        return max(-(-(self.total_steps + self.recut) // self.steps_per_epoch), self.epoch + 1)

    def __str__(self) -> str:
        """epoch k  step i/I of the run"""
        return f"epoch {self.epoch + 1}  step {self.step}/{self.total_steps}"


def console_line(row: Mapping, meters: Meters, progress: Progress, width: int = DEFAULT_COLUMNS) -> str:
    """Format a training row as one line for people, which has at most `width` columns; metrics.jsonl has all of the
    row.

    It has the smoothed losses, without those of auxiliary layers, the smoothed errors in percent, the first learning
    rate, the time of a step and the peak of memory. Losses that have no room are left out from the last one on.

    row: as for `RunWriter.log`; what it lacks is left out.
    """
    trained = [key.removeprefix("train/") for key in row if key.startswith("train/")]
    shown = [name for name in trained if name in meters]
    losses = [name for name in shown if name.startswith("loss_") and not _OTHER_LOSSES.search(name)]
    errors = [name for name in shown if name.endswith("_error")]
    terms = [f"{name.removeprefix('loss_')} {short_number(meters.smoothed(name))}" for name in losses + errors]
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
    """Format the averages of an epoch as one line, as DETR prints them, with its time; auxiliary layers are left out.
    """
    names = [name for name in means if name != "loss" and not _OTHER_LOSSES.search(name)]
    terms = [f"{name.removeprefix('loss_')} {short_number(means[name])}" for name in names]
    loss = f"loss {short_number(means['loss'])}" if "loss" in means else ""
    return fit_line([f"epoch {epoch + 1} averages", loss], terms, [f"in {timedelta(seconds=round(epoch_s))}"], width)


def fit_line(head: Sequence[str], terms: Sequence[str], tail: Sequence[str], width: int) -> str:
    """Join the parts of a line to at most `width` columns.

    Terms are left out from the last one on, with "..." in their place; if all are, parts of the tail from its end.
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
    """Format a number with three digits: 0.0123, 1.23, 123, 1.23e+04."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 1e4:
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def step_time(step_s: float, data_s: float) -> str:
    """Format the time of a step, and the share of waiting for data if that is notable: "0.868 s/step (data 23%)"."""
    share = data_s / step_s if step_s else 0.0
    return f"{short_number(step_s)} s/step{f' (data {share:.0%})' if share >= WAIT_SHARE else ''}"


def console_width() -> int:
    """Return the columns of the terminal, or of a line in a file."""
    return shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns


def training_time_line(elapsed_s: float, steps: int) -> str:
    """Format the time of a whole run as one line, evaluations and checkpoints included, as DETR and
    Scene-Graph-Benchmark.
    """
    return f"Training time {timedelta(seconds=round(elapsed_s))} ({elapsed_s / max(steps, 1):.3f} s / step)"


def progress_bar(total: int, initial: int = 0, enabled: bool = True) -> tqdm:
    """Make a bar over optimizer steps with the time left, on a terminal; elsewhere it stays silent.

    `bar.update()` at each step; `bar.write(line)` prints a line above the bar, or plainly where there is none.

    `total`: steps of the run; `initial`: steps done before; `enabled`: this is the main process.
    """
    visible = enabled and sys.stderr is not None and sys.stderr.isatty()
    return tqdm(total=total, initial=initial, disable=not visible, unit="step", dynamic_ncols=True, smoothing=0.1)
