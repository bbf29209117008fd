"""Measures the time and memory of a step, and the load of the machines."""

import math
import platform
import resource
import sys
import time
from collections.abc import Callable

import psutil
import torch

from toolkit.distributed import gather_objects
from toolkit.step.meters import SmoothedValue


class StepTimer:
    """Where the time of an optimizer step goes; the clock runs from one `step_done` to the next.

        timer.start()                  # again after an evaluation or a save, which then do not count
        for window in windows:
            timer.data_ready()         # the wait for data ends here
            ...
            timer.step_done(images)

    Each step reads one number from the device, so the wall clock is right on a GPU too.
    """

    def __init__(self, window_size: int = 50, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._data, self._step, self._images = (SmoothedValue(window_size) for _ in range(3))
        self.start()

    def start(self) -> None:
        """Starts the clock; what passed since the last step is not counted."""
        self._begin = self._ready = self._clock()

    def data_ready(self) -> None:
        """The window of micro-batches is here."""
        self._ready = self._clock()

    def step_done(self, images: int) -> float:
        """The step over `images` images (of all ranks) is done; returns its seconds, data included."""
        now = self._clock()
        self._data.update(self._ready - self._begin)
        self._step.update(now - self._begin)
        self._images.update(images)
        self._begin = self._ready = now
        return self._step.value

    @property
    def data_s(self) -> float:
        """Seconds a step waits for data; mean of the last steps."""
        return self._data.avg

    @property
    def step_s(self) -> float:
        """Seconds of a step, waiting for data included; mean of the last steps."""
        return self._step.avg

    @property
    def last_step_s(self) -> float:
        """Seconds of the last step alone; 0 before the first."""
        return self._step.value if self._step.count else 0.0

    def eta_s(self, steps_left: int) -> float:
        """Seconds of training left, evaluation and saving not counted; NaN before the first step."""
        return self.step_s * steps_left

    def row(self, steps_left: int) -> dict[str, float]:
        """The numbers as columns of metrics.jsonl; empty before the first step."""
        if math.isnan(self.step_s):
            return {}
        return {
            "time/data_s": self.data_s,
            "time/step_s": self.step_s,
            "time/images_per_s": self._images.avg / self.step_s if self.step_s else math.nan,
            "time/eta_s": self.eta_s(steps_left),
            "mem/peak_mb": peak_memory_mb(),
        }


def peak_memory_mb() -> float:
    """Most memory in use so far, in MiB: allocated by torch on the CUDA device, else resident memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB on Linux


def machine_figures() -> dict[str, float]:
    """Figures of every machine of the run, the same on all ranks; a collective.

    `machine/<name>/cpu_percent`: of all its cores since the last call; `.../memory_percent`: of its memory, in use by
    anyone; `.../peak_mb`: the sum of `peak_memory_mb` over the run's processes there.
    """
    own = {"cpu_percent": psutil.cpu_percent(), "memory_percent": psutil.virtual_memory().percent}
    figures: dict[str, float] = {}
    for name, busy, peak_mb in gather_objects((platform.node() or "unnamed", own, peak_memory_mb())):
        figures = {f"machine/{name}/{key}": value for key, value in busy.items()} | figures  # those of its first rank
        figures[f"machine/{name}/peak_mb"] = figures.get(f"machine/{name}/peak_mb", 0.0) + peak_mb
    return figures
