"""Trainings as forks of this process, and what happens inside them: a clock, a kill, a NaN, or another loop."""

import importlib
import math
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit import session
from toolkit.run.command_line import run_script
from toolkit.tools.watch import steps_alone

from ..measuring import row

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
WAIT = "called a synchronizing CUDA operation"  # as torch.cuda.set_sync_debug_mode says it
NO_KERNELS = ("Mem", "Optimizer", "Profiler")  # beginnings of the profiler's names of copies, fills and annotations


class Measured(Exception):
    """Raised inside a training when everything was measured."""


@dataclass(frozen=True)
class Plan:
    """What happens inside a training.

    Attributes:
        warm_up, steps, waited, profiled: steps that are not measured, that are timed, whose waits are counted, and
            whose kernels are; the training then ends. steps = 0: nothing is measured.
        until: steps after which the training is left.
        kill: the step, from 1, in which the process of rank `killed_rank` ends as by `kill -9`.
        nan: the step, from 1, in which every loss is NaN.
        kernels_tried: how many kernels cuDNN tries for each convolution; 0: as the run has set.
        loop: trains in place of the script's loop, called with the `Training` and the `Driven`.
        tell: is called with each row as soon as it is measured, in the first process of the training.
    """

    warm_up: int = 0
    steps: int = 0
    waited: int = 0
    profiled: int = 0
    until: int | None = None
    kill: int | None = None
    killed_rank: int = 0
    nan: int | None = None
    kernels_tried: int = 0
    loop: "Callable[[Any, Driven], None] | None" = None
    tell: Callable[[dict], object] = print


class Trainings:
    """Trainings, each a fork of this process; their files are in `scratch`.

    This process must not have started CUDA or OpenMP threads, neither of which survives a fork.
    """

    def __init__(self, scratch: Path):
        self.scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)

    def train(
        self,
        script: str,
        arguments: Sequence[str],
        settings: Mapping,
        plan: Plan,
        folder: Path | None = None,
        expected: int = 0,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Path:
        """Train steps alone under a plan, and return the folder that contains its `run/`; an existing `folder`
        continues.

        Raises RuntimeError with the end of the output if the first process does not end with the code `expected`.
        """
        folder = folder or Path(tempfile.mkdtemp(dir=self.scratch))
        words = steps_alone(SCRIPTS / f"{script}.py", arguments, folder / "run", 1000, settings)[2:]
        self.run(script, words, plan, folder, expected, processes, environment)
        return folder

    def run(
        self,
        script: str,
        words: Sequence[str],
        plan: Plan,
        folder: Path,
        expected: int = 0,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run a script with the arguments `words` under a plan, and return the output of its first process."""
        started = []
        for rank, of_rank in enumerate(_environments(processes)):
            output = folder / f"output_{rank}_{time.time_ns()}.txt"
            pid = _fork(script, words, plan, folder, output, of_rank | dict(environment or {}))
            started.append((pid, output))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in started]
        said = [output.read_text(errors="replace") for _, output in started]
        if codes[0] != expected:
            ends = "\n".join(text[-3000:] for text in said)
            raise RuntimeError(f"{script} ended with {codes}, not {expected}: {ends}")
        return said[0]


def _environments(processes: int) -> list[dict[str, str]]:
    """Return the variables of each process. No launcher is used, which would stop the other processes itself."""
    if processes == 1:
        return [{"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _fork(
    script: str, words: Sequence[str], plan: Plan, folder: Path, output: Path, environment: Mapping[str, str]
) -> int:
    """Start a training in a fork and return its process id."""

    def train() -> int:
        file = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        return drive(folder, script, list(words), plan)

    return fork(train)


def fork(work: Callable[[], int]) -> int:
    """Call `work` in a fork of this process, which ends with the code that it returns, and return its process id.

    If `work` raises, the fork prints the error and ends with the exit code of a SystemExit, else with 1.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = work()
    except BaseException as error:  # noqa: BLE001  SystemExit too: nothing of the parent's may run in the fork
        traceback.print_exc()
        code = getattr(error, "code", 1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


# ---- inside the training ---------------------------------------------------------------------------------------------


def drive(folder: Path, script: str, arguments: list[str], plan: Plan) -> int:
    """Run a script in this process under a plan. Returns its exit code, 0 once everything is measured."""
    sys.path.insert(0, str(SCRIPTS))
    module = importlib.import_module(script)
    driven = Driven(folder, plan)

    def main(config: Any) -> dict[str, float]:
        with session(config) as s:
            s.training = partial(driven.training, s.training)
            return module.train(s)

    try:
        return run_script(main, module.Config, module.DEFAULT_CONFIG, arguments)
    except Measured:
        return 0


class Driven:
    """The plan at work in one training, with its clock and counters."""

    def __init__(self, folder: Path, plan: Plan):
        self.folder = folder
        self.plan = plan
        self.ticks = 0
        self.images = 0
        self.made = time.perf_counter()
        self.first_step = 0.0
        self.began = 0.0
        self.between_s = 0.0
        self.step_s = 0.0
        self.warned: list = []
        self.rank = int(os.environ.get("RANK", "0"))

    def training(self, make: Callable, *objects: Any) -> Any:
        """Build the `Training`, and put the plan into it."""
        t = make(*objects)
        if self.plan.nan is not None:
            t.detector.criterion = partial(self._criterion, t.detector.criterion)
        if self.plan.kernels_tried:
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.benchmark_limit = self.plan.kernels_tried
        if self.plan.loop is not None:
            self.plan.loop(t, self)
        t.windows = partial(self._windows, t, t.windows)
        return t

    def _windows(self, t: Any, plain: Callable[[], Iterator]) -> Iterator:
        """Yield the windows of the training, with a tick before each step."""
        began = time.perf_counter()
        for window in plain():
            images = sum(map(len, window.batches))
            self.tick(t.step, images, time.perf_counter() - began, t.log.timer.data_s)
            yield window
            began = time.perf_counter()

    def _criterion(self, plain: Callable, *given: Any) -> tuple[dict, dict]:
        losses, metrics = plain(*given)
        if self.ticks == self.plan.nan:
            losses = {name: loss * float("nan") for name, loss in losses.items()}
        return losses, metrics

    def tick(self, done: int, images: int, between_s: float = 0.0, data_s: float = 0.0) -> None:
        """Count a step before it begins.

        done: steps of the run so far. between_s: seconds since the end of the step before. data_s: those in which a
        step waits for its batch, a mean of the last steps.
        """
        plan = self.plan
        self.ticks += 1
        if done + 1 == plan.kill and self.rank == plan.killed_rank:
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.until is not None and done >= plan.until:
            raise Measured
        if plan.steps:
            self._measure(images, between_s, data_s)

    def _measure(self, images: int, between_s: float, data_s: float) -> None:
        plan = self.plan
        timed = self.ticks - plan.warm_up - 1
        if self.ticks == 1:
            self.first_step = time.perf_counter()
            self._tell("until step 1", self.first_step - self.made, "s")
        if timed == 0:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
            self._tell(f"steps 1 to {plan.warm_up}", self.began - self.first_step, "s, with the choice of kernels")
        if timed == plan.steps:
            torch.cuda.synchronize()
            self._tell_speed(data_s)
            warnings.simplefilter("always")
            warnings.showwarning = lambda *warning, **_: self.warned.append(warning)  # message, class, file, line
            torch.cuda.set_sync_debug_mode("warn")
        if timed == plan.steps + plan.waited:
            torch.cuda.set_sync_debug_mode("default")
            waits = [f"{file}:{line}" for message, _, file, line, *_ in self.warned if WAIT in str(message)]
            places = Counter(place.removeprefix(f"{ROOT}/").split("site-packages/")[-1] for place in waits)
            self._tell("waits", len(waits) / plan.waited, "waits/step", places=places)
            self._begin_profile()
        if timed == plan.steps + plan.waited + plan.profiled:
            self._tell_kernels()
            raise Measured
        if timed >= 0:
            self.images += images
            self.between_s += between_s

    def _tell(self, name: str, value: float, unit: str, **more: Any) -> None:
        if self.rank == 0:
            self.plan.tell(row(name, value, unit) | more)

    def _tell_speed(self, data_s: float) -> None:
        seconds = time.perf_counter() - self.began
        self.step_s = seconds / self.plan.steps
        images_per_s = self.images * int(os.environ.get("WORLD_SIZE", "1")) / seconds
        if self.plan.loop is None:
            data = 100 * data_s / self.step_s
            between = 100 * self.between_s / seconds
            self._tell("batch", self.images / self.plan.steps, "images")
            self._tell("waiting for data", data, "% of a step")
            self._tell("rest of the time between two steps", between - data, "% of a step")
        self._tell("speed", images_per_s, "images/s")
        self._tell("memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        (self.folder / "images_per_s.txt").write_text(str(images_per_s))

    def _begin_profile(self) -> None:
        activity = torch.profiler.ProfilerActivity
        has_cuda = activity.CUDA in torch.profiler.supported_activities()  # not where the device is pretended
        self.profile = torch.profiler.profile(activities=[activity.CUDA if has_cuda else activity.CPU])
        torch.cuda.synchronize()
        self.profile.start()

    def _tell_kernels(self) -> None:
        torch.cuda.synchronize()
        self.profile.stop()
        steps = self.plan.profiled
        count, busy_s, longest_s = kernels_in(self.profile.events())
        longest_ms = {name: 1000 * seconds / steps for name, seconds in longest_s}
        self._tell("GPU busy", 100 * busy_s / steps / self.step_s, "% of a step")
        self._tell("kernels", count / steps, "kernels/step; rows.json names the longest", longest_ms=longest_ms)


def kernels_in(events: Iterable) -> tuple[int, float, list[tuple[str, float]]]:
    """Return the number of kernels in the events of a `torch.profiler.profile`, the seconds in which one of them or
    more ran, and the names and seconds of the ten that took longest, all calls of one together."""
    kernels = []
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(NO_KERNELS):
            kernels.append((event.time_range.start, event.time_range.end, event.name))
    busy_us = 0.0
    busy_until = -math.inf
    took_s: Counter = Counter()
    for start, end, name in sorted(kernels):
        busy_us += max(0.0, end - max(start, busy_until))  # several streams may run kernels at once
        busy_until = max(busy_until, end)
        took_s[name[:160]] += (end - start) / 1e6  # names of templates fill pages
    return len(kernels), busy_us / 1e6, took_s.most_common(10)
