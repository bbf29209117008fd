"""The reports of a run while it trains: metric rows, console lines, progress bar, status, meters and epoch averages."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from toolkit.base.distributed import broadcast_object, gather_objects
from toolkit.base.errors import BadInput
from toolkit.base.files import warn_if_stalled
from toolkit.run.console import (
    Progress,
    averages_line,
    console_line,
    console_width,
    progress_bar,
    short_number,
    step_time,
    training_time_line,
)
from toolkit.run.folder import attempt
from toolkit.run.writer import RunWriter
from toolkit.step.execution import GraphCount
from toolkit.step.meters import Meters, StepTimer, make_meters
from toolkit.step.schedules import is_time


class Log:
    """Writes metric rows, prints console lines, shows the progress bar, and keeps the meters that smooth their values.

    Args:
        is_main: this is the main process; the other processes keep the same meters and print nothing.
        meters: kind of smoothing in console lines, see `make_meters`.
        steps_per_epoch: optimizer steps of an epoch.
        log_every: optimizer steps between two rows.
    """

    kept_in_rollback = True

    def __init__(self, is_main: bool, meters: str = "epoch_median", steps_per_epoch: int = 1, log_every: int = 10):
        self.is_main = is_main
        self.meter_kind = meters
        self.steps_per_epoch = steps_per_epoch
        self.log_every = log_every
        self.meters = make_meters(meters, steps_per_epoch)
        self.averages = Meters()  # of the epoch
        self.timer, self.graphs = StepTimer(), GraphCount()
        self.epoch_s = 0.0
        self.epoch_steps = 0
        self.logged_epoch = -1  # of the last averages that were logged
        self.logged_steps = -1  # how many steps of that epoch they had
        self.writer: RunWriter | None = None
        self.status: dict = {}
        self.recut = 0
        self.notes: dict[str, tuple[float, int]] = {}  # of the window under way: sum and count by name
        self.has_notes = False  # whether this process has ever noted anything
        self.noted_names: list[str] = []  # of the last window, on the bar
        self.write_error = ""  # why rows cannot be written any more
        self._bar, self._elapsed_before, self._began = None, 0.0, time.monotonic()

    def start(self, writer: RunWriter, status: dict, step: int, total_steps: int, recut: int = 0) -> None:
        """Set the writer once the first step of this start is known, and show the progress bar.

        Args:
            writer: writes the rows.
            status: a dict whose entry `step` is kept up to date, such as `RunStatus.details`.
            step, total_steps: optimizer steps done, and those of the whole run.
            recut: see `toolkit.run.console.Progress`.
        """
        self.writer = writer
        self.status = status
        self.recut = recut
        status["step"] = step
        self._bar = progress_bar(total_steps, step, self.is_main)

    def note(self, name: str, value: Tensor | float) -> None:
        """Note a value of the script's own metric `name`, of one micro-batch or window.

        The mean of all values that any rank noted in the window goes into the rows, the averages of the epoch, the
        trackers and the progress bar. A tensor is read from its device, which waits for the device.
        """
        total, count = self.notes.get(name, (0.0, 0))
        self.notes[name] = (total + float(value), count + 1)
        self.has_notes = True

    def reduce_notes(self) -> dict[str, float]:
        """Return the mean of each metric that any rank noted by `note` in the window, and forget the values; a
        collective.
        """
        totals: dict[str, tuple[float, int]] = {}
        for name, (total, count) in (item for notes in gather_objects(dict(self.notes)) for item in notes.items()):
            before, number = totals.get(name, (0.0, 0))
            totals[name] = before + total, number + count
        self.notes.clear()
        self.noted_names = list(totals)
        return {name: total / count for name, (total, count) in totals.items()}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, those before a resume included."""
        return self._elapsed_before + time.monotonic() - self._began

    def log_step(
        self,
        step: int,
        total_steps: int,
        epoch: int,
        row: Mapping[str, float],
        images: int,
        noted: Mapping[str, float] = MappingProxyType({}),
        ends_epoch: bool = False,
        seconds_left: float = math.inf,
        is_length_known: bool = True,
    ) -> None:
        """Log an update: add it to the averages and the progress bar, and write a row and a line if they are due.

        They are due every `log_every` steps, at the last step, and at the first and the last step of an epoch, as in
        DETR.

        Args:
            step, total_steps: optimizer steps done, this one included, and those of the whole run.
            epoch: counted from 0.
            row: result of `training_row`.
            images: number of images of the update, over all ranks.
            noted: result of `reduce_notes`, which is added to the meters here.
            ends_epoch: this is the last step of the epoch.
            seconds_left: upper limit of the time left for training.
            is_length_known: see `toolkit.run.console.Progress`.
        """
        has_row = self.has_row(step, total_steps, ends_epoch)
        self.epoch_s += self.timer.step_done(images)
        self.epoch_steps += 1
        values = {name.removeprefix("train/"): value for name, value in row.items() if "/lr/" not in name}
        # Norms of groups are measured for rows alone: a mean of theirs would be one of other steps than the total's.
        of_every_step = {name: value for name, value in values.items() if not name.startswith("grad_norm/")}
        self.meters.add(noted)
        self.averages.add(of_every_step, images)
        self.status["step"] = step
        progress = Progress(step, total_steps, epoch, self.steps_per_epoch, self.recut, is_length_known)
        self._show_on_bar(progress)
        if has_row:
            means = {}
            if self.meter_kind == "momentum":
                for name, mean in self.meters.means().items():
                    if name.startswith("loss") and not name.endswith("_unscaled"):
                        means[f"train/mean/{name}"] = mean
            times = self.timer.row(total_steps - step)
            if times:
                times["time/eta_s"] = min(times["time/eta_s"], seconds_left)
            full = {**row, **means, **times}
            self.write(step, epoch, full)
            self.say(console_line(full, self.meters, progress, console_width()))
            news = self.graphs.news(step)
            if news:
                self.say(news)

    def has_row(self, step: int, total_steps: int, ends_epoch: bool) -> bool:
        """Return whether the step `step`, which has not been logged yet, gets a row and a line, see `log_step`."""
        begins_epoch = self.epoch_steps == 0
        return is_time(step, self.log_every, last=total_steps) or begins_epoch or ends_epoch

    def log_epoch(self, step: int, epoch: int) -> None:
        """Log the averages of the epoch's losses and metrics as a row and a line; call it when epoch or run ends.

        Averages that were logged before are not logged again, unless the epoch has had more steps since, as in a run
        that was resumed in the middle of an epoch with `--run.resume_schedule new`.
        """
        is_logged = (self.logged_epoch, self.logged_steps) == (epoch, self.epoch_steps)
        if is_logged or not self.epoch_steps:
            return
        self.logged_epoch = epoch
        self.logged_steps = self.epoch_steps
        means = self.averages.means()
        seconds = {"time/epoch_s": self.epoch_s, "time/epoch_step_s": self.epoch_s / self.epoch_steps}
        self.write(step, epoch, {f"epoch/{name}": mean for name, mean in means.items()} | seconds)
        self.say(averages_line(epoch, means, self.epoch_s, console_width()))

    def say_training_time(self, step: int) -> None:
        """Print the time of the whole training, which has ended after `step` steps, as the original programs do."""
        self.say(training_time_line(self.elapsed_s, step))

    def end_epoch(self) -> dict[str, float]:
        """Return the averages of the epoch that is over and clear them, with the meters that begin anew each epoch."""
        means = self.averages.means()
        self.averages.clear()
        self.epoch_s = 0.0
        self.epoch_steps = 0
        if self.meter_kind.startswith("epoch_"):
            self.meters.clear()
        return means

    def write(self, step: int, epoch: int, values: Mapping[str, float | None]) -> None:
        """Write a row to metrics.jsonl and to the trackers.

        If that fails, nothing is raised, because only the main process would raise it. The reason is kept in
        `write_error`; all processes learn of it in the next step's reduction, save the state and end together.
        """
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        try:
            with warn_if_stalled(f"the row of step {step} in metrics.jsonl", self.say):
                self.writer.log({"step": step, "epoch": epoch, "time_s": round(self.elapsed_s, 3), **values})
        except BadInput as error:
            self.write_error = self.write_error or str(error)

    def attempt(self, what: str, function: Callable[[], Any]) -> Any:
        """Call `function`, which may fail without ending the run, see `toolkit.run.folder.attempt`."""
        return attempt(what, function, self.writer.folder, self.say)

    def say(self, text: str) -> None:
        """Print a text on the main process, above the progress bar if it is shown; other processes print nothing."""
        if self.is_main:
            self._bar.write(text, file=sys.stdout) if self._bar is not None else print(text, flush=True)

    def set_total_steps(self, total_steps: int, notes: Iterable[str] = ()) -> None:
        """Set the number of steps that the progress bar ends at, and print the `notes` on a change of the plan."""
        if self._bar is not None:
            self._bar.total = total_steps
        for note in notes:
            self.say(note)

    def _show_on_bar(self, progress: Progress) -> None:
        if self._bar is None or self._bar.disable:
            return
        self._bar.set_description(f"epoch {progress.epoch + 1}/{progress.epochs}", refresh=False)
        shown = [name for name in ("loss", *self.noted_names) if name in self.meters]
        parts = [f"{name} {short_number(self.meters.smoothed(name))}" for name in shown]
        parts.append(step_time(self.timer.step_s, self.timer.data_s))
        self._bar.set_postfix_str("  ".join(parts), refresh=False)
        self._bar.update(progress.step - self._bar.n)

    def raise_write_error(self) -> None:
        """Raise BadInput on every rank if the main process could not write a row, see `write`; a collective."""
        write_error = broadcast_object(self.write_error)
        if write_error:
            raise BadInput(write_error)

    def close(self, state: str = "done") -> None:
        """Close the progress bar, metrics.jsonl and the trackers.

        state: how the run ended, for the trackers: "done", "preempted" or "failed".
        """
        if self._bar is not None:
            self._bar.close()
        if self.writer is not None:
            self.writer.close(state)

    def state_dict(self) -> dict:
        """Return JSON values for the checkpoint, with the same keys on every process."""
        return {
            "meters": self.meters.state_dict(),
            "averages": self.averages.state_dict(),
            "elapsed_s": self.elapsed_s,
            "epoch_s": self.epoch_s,
            "epoch_steps": self.epoch_steps,
            "logged_epoch": self.logged_epoch,
            "logged_steps": self.logged_steps,
            "has_notes": self.has_notes,
            "writer": self.writer.state_dict(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the state of a checkpoint."""
        self.meters.load_state_dict(state["meters"])
        self.averages.load_state_dict(state["averages"])
        self._elapsed_before, self._began = state["elapsed_s"], time.monotonic()
        self.epoch_s = state["epoch_s"]
        self.epoch_steps = state["epoch_steps"]
        self.logged_epoch = state["logged_epoch"]
        self.logged_steps = state["logged_steps"]
        self.has_notes = state["has_notes"]


def training_row(
    reduced: Mapping[str, float],
    totals: Mapping[str, float],
    param_groups: Iterable[Mapping[str, Any]],
    noted: Mapping[str, float],
) -> dict[str, float]:
    """Return the row of a step: weighted and unweighted losses, metrics, learning rates, gradient norms and notes.

    Args:
        reduced, totals: attributes of the step's `toolkit.run.training_window.TrainingWindow`.
        param_groups: those of the optimizer, each with `name` and `lr`.
        noted: result of `Log.reduce_notes`.
    """
    row = {f"train/{name}": float(value) for name, value in reduced.items()}
    for group in param_groups:
        row[f"train/lr/{group['name']}"] = group["lr"]
    for name, value in totals.items():
        if name.startswith("grad_norm"):
            row[f"train/{name}"] = value
    for name, value in noted.items():
        row[f"train/{name}"] = value
    return row
