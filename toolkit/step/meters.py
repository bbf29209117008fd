"""Smoothed numbers for people: windows, running averages, and where the time of a step goes.

Feed them the values that `reduce_dict` returned: those are equal on every rank, so the meters are too, and need no
synchronising of their own.
"""

import math
from collections import deque
from collections.abc import Mapping

import torch


class SmoothedValue:
    """A series of numbers, by its last `window_size` and by all of them. As in facebookresearch/detr `util/misc.py`.

    Every statistic of an empty series is NaN.

    Args:
        window_size: values that `median`, `avg` and `max` look at.
        fmt: how `str` shows it, from the fields median, avg, global_avg, max and value.
    """

    def __init__(self, window_size: int = 20, fmt: str = "{median:.4f} ({global_avg:.4f})"):
        self.fmt = fmt
        self.window: deque[float] = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0

    def update(self, value: float, n: int = 1) -> None:
        """Adds a value that stands for `n` items; `n` weighs in `global_avg` only."""
        value = float(value)
        self.window.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self) -> float:
        """Middle of the window; the lower one of the two middle values, as torch.median has it."""
        return self._window().median().item() if self.window else math.nan

    @property
    def avg(self) -> float:
        """Mean of the window."""
        return self._window().mean().item() if self.window else math.nan

    def _window(self) -> torch.Tensor:
        return torch.tensor(self.window, dtype=torch.float32)  # rounded as in DETR, so that the texts are the same

    @property
    def global_avg(self) -> float:
        """Mean of all values."""
        return self.total / self.count if self.count else math.nan

    @property
    def max(self) -> float:
        """Largest of the window."""
        return max(self.window, default=math.nan)

    @property
    def value(self) -> float:
        """The last one."""
        return self.window[-1] if self.window else math.nan

    def __str__(self) -> str:
        return self.fmt.format(
            median=self.median, avg=self.avg, global_avg=self.global_avg, max=self.max, value=self.value
        )

    def state_dict(self) -> dict:
        """JSON-able and exact: a Python float survives JSON to the last bit."""
        window = {"window_size": self.window.maxlen, "window": list(self.window)}
        return {"fmt": self.fmt, **window, "total": self.total, "count": self.count}

    def load_state_dict(self, state: Mapping) -> None:
        self.window = deque(state["window"], maxlen=state["window_size"])
        self.fmt, self.total, self.count = state["fmt"], state["total"], state["count"]


class MomentumMeter:
    """Average in which each value counts `momentum` times as much as the next. As seamseg's `AverageMeter`.

    mean = sum_i momentum^(n-i) value_i / sum_i momentum^(n-i); momentum 1 is the plain average. NaN when empty.
    """

    _STATE = ("fmt", "momentum", "value", "sum", "count")

    def __init__(self, momentum: float = 1.0, fmt: str = "{value:.4f} ({mean:.4f})"):
        self.momentum, self.fmt = momentum, fmt
        self.value, self.sum, self.count = math.nan, 0.0, 0.0

    def update(self, value: float) -> None:
        self.value = float(value)
        self.sum = self.sum * self.momentum + self.value
        self.count = self.count * self.momentum + 1.0

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def __str__(self) -> str:
        return self.fmt.format(value=self.value, mean=self.mean)

    def state_dict(self) -> dict:
        return {key: getattr(self, key) for key in self._STATE}

    def load_state_dict(self, state: Mapping) -> None:
        for key in self._STATE:
            setattr(self, key, state[key])


class Meters(dict[str, SmoothedValue | MomentumMeter]):
    """Meters by name, made on first use; `str` joins them as DETR's `MetricLogger` does."""

    def update(self, values: Mapping[str, float] | None = None, **more: float) -> None:
        """Adds one value to the meter of each name."""
        for name, value in {**(values or {}), **more}.items():
            self.setdefault(name, SmoothedValue()).update(value)

    def averages(self) -> dict[str, float]:
        """Mean of all values by name: what DETR logs at the end of an epoch."""
        return {name: m.global_avg if isinstance(m, SmoothedValue) else m.mean for name, m in self.items()}

    def __str__(self) -> str:
        return "  ".join(f"{name}: {meter}" for name, meter in self.items())

    def state_dict(self) -> dict:
        return {name: meter.state_dict() for name, meter in self.items()}

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the meters of `state`, and nothing but those, in their order."""
        self.clear()
        for name, meter_state in state.items():
            self[name] = SmoothedValue() if "window" in meter_state else MomentumMeter()
            self[name].load_state_dict(meter_state)


