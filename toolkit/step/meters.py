"""Meters for the console: smoothed values, the timing of a step, the load of the machines.

Update meters with the values that `reduce_dict` returned: those are equal on every rank, so the meters are too and need
no synchronisation.
"""

import math
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import timedelta
from functools import partial
from typing import TypeVar

import psutil
import torch

from toolkit.base.distributed import gather_objects, world
from toolkit.base.errors import BadInput
from toolkit.base.memory import peak_memory_mb

Item = TypeVar("Item")


class SmoothedValue:
    """A series of numbers with statistics of its last `window_size` values and of all values.

    It is the class of this name in facebookresearch/detr, `util/misc.py`. With a momentum below 1, `global_avg` is the
    mean of seamseg's `AverageMeter`: sum_i momentum^(n-i) value_i / sum_i momentum^(n-i).

    Every statistic of an empty series is NaN.

    Args:
        window_size: number of values that `median`, `avg` and `max` use.
        fmt: the format of `str`, with the fields median, avg, global_avg, max and value.
        momentum: each value counts this many times as much as the next one in `global_avg`; 1: all count alike.
    """

    def __init__(
        self, window_size: int = 20, fmt: str = "{median:.4f} ({global_avg:.4f})", momentum: float = 1.0
    ):
        self.fmt = fmt
        self.window: deque[float] = deque(maxlen=window_size)
        self.momentum = momentum
        self.total = 0.0
        self.count = 0.0

    def update(self, value: float, n: int = 1) -> None:
        """Add a value, such as the mean of `n` items; `n` is its weight in `global_avg`, and is not used elsewhere."""
        value = float(value)
        self.window.append(value)
        self.count = self.count * self.momentum + n
        self.total = self.total * self.momentum + value * n

    @property
    def median(self) -> float:
        """The median of the window; the lower one of the two middle values, as in torch.median."""
        return self._window().median().item() if self.window else math.nan

    @property
    def avg(self) -> float:
        """The mean of the window."""
        return self._window().mean().item() if self.window else math.nan

    def _window(self) -> torch.Tensor:
        return torch.tensor(self.window, dtype=torch.float32)  # rounded as in DETR, so that the texts are the same

    @property
    def global_avg(self) -> float:
        """The mean of all values, weighted by `momentum`."""
        return self.total / self.count if self.count else math.nan

    @property
    def max(self) -> float:
        """The largest value of the window."""
        return max(self.window, default=math.nan)

    @property
    def value(self) -> float:
        """The last value."""
        return self.window[-1] if self.window else math.nan

    def __str__(self) -> str:
        statistics = ("median", "avg", "global_avg", "max", "value")
        return self.fmt.format_map({name: getattr(self, name) for name in statistics})

    def state_dict(self) -> dict:
        """Return a JSON-able and exact state: a Python float survives JSON to the last bit."""
        return {
            "fmt": self.fmt,
            "window_size": self.window.maxlen,
            "window": list(self.window),
            "momentum": self.momentum,
            "total": self.total,
            "count": self.count,
        }

    def load_state_dict(self, state: Mapping) -> None:
        self.window = deque(state["window"], maxlen=state["window_size"])
        self.fmt = state["fmt"]
        self.momentum = state["momentum"]
        self.total = state["total"]
        self.count = state["count"]


class Meters(dict[str, SmoothedValue]):
    """Meters by name, made on first use; `str` joins them as DETR's `MetricLogger` does.

        meters = Meters(delimiter="  ")
        for images, targets in meters.log_every(loader, 10, "epoch 1"):
            ...
            meters.update(reduced)
        print(meters.loss_ce.global_avg)

    `class_error` is shown as its last value, as in DETR.

    Args:
        delimiter: between the meters in a line.
        meters: by name, as for a dict.

    new: attribute, the function that makes a meter for a new name; see `make_meters`.
    statistic: attribute, the name of the property of the meters that `smoothed` returns.
    """

    new: Callable[[], SmoothedValue] = SmoothedValue
    statistic: str = "median"

    def __init__(self, *meters, delimiter: str = "  ", **more: SmoothedValue):
        super().__init__(*meters, **more)
        self.delimiter = delimiter
        self.updates = 0

    def __getattr__(self, name: str) -> SmoothedValue:
        if name.startswith("__") or name not in self:
            raise AttributeError(f"the meter {name!r} does not exist; there are {', '.join(self) or 'none yet'}")
        return self[name]

    def add_meter(self, name: str, meter: SmoothedValue) -> None:
        """Set the meter of a name, to give it another window or format than a meter made on first use."""
        self[name] = meter

    def log_every(self, batches: Iterable[Item], every: int, header: str = "") -> Iterator[Item]:
        """Yield the batches; print a line on the main process after each `every` of them and after the last.

        A line has the number of the batch, the time left, the meters, the seconds per batch, and the seconds of waiting
        for data per batch.

        header: the beginning of each line.
        """
        total = len(batches) if isinstance(batches, Sized) else None
        timer = StepTimer()
        for number, batch in enumerate(batches, start=1):
            timer.data_ready()
            yield batch
            timer.step_done(images=1)
            if number % every == 0 or number == total:
                self._print_line(header, number, total, timer)

    def _print_line(self, header: str, number: int, total: int | None, timer: "StepTimer") -> None:
        rank, _ = world()
        if rank:
            return
        if total is None:
            parts = [f"{header} [{number}]".strip()]
        else:
            digits = len(str(total))
            place = f"[{number:{digits}}/{total}]"
            left = timedelta(seconds=round(timer.eta_s(total - number)))
            parts = [f"{header} {place}".strip(), f"eta: {left}"]
        parts += [str(self), f"time: {timer.step_s:.4f}", f"data: {timer.data_s:.4f}"]
        print(self.delimiter.join(filter(None, parts)), flush=True)

    def update(self, values: Mapping[str, float] | None = None, **more: float) -> None:
        """Add one value to the meter of each name, and count the update."""
        self.updates += 1
        self.add({**(values or {}), **more})

    def add(self, values: Mapping[str, float], n: int = 1) -> None:
        """Add one value with the weight `n`, see `SmoothedValue.update`, to the meter of each name, without counting an
        update."""
        for name, value in values.items():
            if name not in self:
                is_last_value = name == "class_error"  # as in DETR
                self[name] = SmoothedValue(1, "{value:.2f}") if is_last_value else self.new()
            self[name].update(value, n)

    def means(self) -> dict[str, float]:
        """Return the mean of all values of each meter, by its name."""
        return {name: meter.global_avg for name, meter in self.items()}

    def smoothed(self, name: str) -> float:
        """Return one value for the meter of a name: its `statistic`, or with a window of 1 its last value."""
        meter = self[name]
        if meter.window.maxlen == 1:
            return meter.value
        return getattr(meter, self.statistic)

    def __str__(self) -> str:
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.items())

    def state_dict(self) -> dict:
        return {name: meter.state_dict() for name, meter in self.items()}

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the meters of `state` in their order, and remove all others."""
        self.clear()
        for name, meter_state in state.items():
            self[name] = SmoothedValue()
            self[name].load_state_dict(_as_now(meter_state))


def _as_now(state: Mapping | Sequence) -> Mapping:
    """Return the state of a meter as `SmoothedValue` has it, also of a checkpoint from before it had a momentum.

    Then the averages of an epoch were (total, count), and a mean with momentum had `sum` and its last value.
    """
    if not isinstance(state, Mapping):
        total, count = state
        state = {"total": total, "count": count, "value": total / count}
    if "sum" in state:
        state = {**state, "total": state["sum"]}
    last = [state["value"]] if "value" in state else []
    of_class = SmoothedValue().state_dict()
    now = {**of_class, "window": last, **{key: state[key] for key in of_class if key in state}}
    return {**now, "fmt": now["fmt"].replace("{mean", "{global_avg")}


LAST_AND_MEAN = "{value:.4f} ({global_avg:.4f})"  # a format of meters
METER_KINDS = ("epoch_median", "run_median", "epoch_mean", "run_mean", "momentum")


def make_meters(kind: str, steps_per_epoch: int) -> Meters:
    """Return empty meters with the smoothing of one of the original programs.

    kind: epoch_median (DETR) and run_median (Scene-Graph-Benchmark): median of the last 20 steps. epoch_mean (CVNets)
        and run_mean (GluonCV): mean of all steps. momentum (seamseg): mean with momentum 1 - 1 / steps_per_epoch. The
        caller clears the meters of the kinds epoch_median and epoch_mean after each epoch.

    Raises BadInput: an unknown kind.
    """
    if kind not in METER_KINDS:
        raise BadInput(f"run.meters is {kind!r}; expected one of {', '.join(METER_KINDS)}")
    meters = Meters()
    if kind == "momentum":
        momentum = 1.0 - 1.0 / max(steps_per_epoch, 1)
        meters.new = partial(SmoothedValue, fmt=LAST_AND_MEAN, momentum=momentum)
        meters.statistic = "global_avg"
    elif kind.endswith("mean"):
        meters.new = partial(SmoothedValue, fmt=LAST_AND_MEAN)
        meters.statistic = "global_avg"
    return meters


class StepTimer:
    """The times of the parts of an optimizer step; the clock runs from one `step_done` to the next.

        timer.start()                  # again after an evaluation or a save, which then do not count
        for window in windows:
            timer.data_ready()         # the wait for data ends here
            ...
            timer.step_done(images)

    The wall clock is right on a GPU too if each step reads a number from the device, which waits for its work.
    """

    def __init__(self, window_size: int = 50, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._data = SmoothedValue(window_size)
        self._step = SmoothedValue(window_size)
        self._images = SmoothedValue(window_size)
        self.start()

    def start(self) -> None:
        """Start the clock anew; the time since the last step is not counted."""
        self._begin = self._clock()
        self._ready = self._begin

    def data_ready(self) -> None:
        """Record that the window of micro-batches has arrived."""
        self._ready = self._clock()

    def step_done(self, images: int) -> float:
        """Record the end of a step over `images` images (of all ranks); return its seconds, data included."""
        now = self._clock()
        self._data.update(self._ready - self._begin)
        self._step.update(now - self._begin)
        self._images.update(images)
        self._begin = now
        self._ready = now
        return self._step.value

    @property
    def data_s(self) -> float:
        """Seconds that a step waits for data; mean of the last steps."""
        return self._data.avg

    @property
    def step_s(self) -> float:
        """Seconds of a step, waiting for data included; mean of the last steps."""
        return self._step.avg

    @property
    def last_step_s(self) -> float:
        """Seconds of the last step; 0 before the first."""
        return self._step.value if self._step.count else 0.0

    def eta_s(self, steps_left: int) -> float:
        """Return the seconds of training left, evaluation and saving not counted; NaN before the first step."""
        return self.step_s * steps_left

    def row(self, steps_left: int) -> dict[str, float]:
        """Return times, images per second and peak memory as columns of metrics.jsonl; {} before the first step."""
        step_s = self.step_s
        if math.isnan(step_s):
            return {}
        return {
            "time/data_s": self.data_s,
            "time/step_s": step_s,
            "time/images_per_s": self._images.avg / step_s if step_s else math.nan,
            "time/eta_s": self.eta_s(steps_left),
            "mem/peak_mb": peak_memory_mb(),
        }


def machine_figures() -> dict[str, float]:
    """Return figures of every machine of the run, the same on all ranks; a collective.

    `machine/<name>/cpu_percent`: the use of all cores of the machine since the last call; `.../memory_percent`: the
    share of its memory that any process uses; `.../peak_mb`: the sum of `peak_memory_mb` over the run's processes on
    this machine.
    """
    usage = {
        "cpu_percent": psutil.cpu_percent(),
        "memory_percent": psutil.virtual_memory().percent,
    }
    own = (platform.node() or "unnamed", usage, peak_memory_mb())
    figures: dict[str, float] = {}
    for name, of_machine, peak_mb in gather_objects(own):
        machine = f"machine/{name}"
        for key, value in of_machine.items():
            figures.setdefault(f"{machine}/{key}", value)  # that of its first rank
        peak_key = f"{machine}/peak_mb"
        figures[peak_key] = figures.get(peak_key, 0.0) + peak_mb
    return figures
