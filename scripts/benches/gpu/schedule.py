"""The schedule of the bench: its items in groups, one group after another, and the rows as they come."""

import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.base.errors import BadInput
from toolkit.base.files import usable_cores
from toolkit.tools.shapes import ensure_shapes

from ..measuring import row
from .items import MODES, RECIPES, Items
from .trainings import Trainings, fork

LIMIT_S = 420
# Of each script's speed in bf16, most valuable first; the first three train in another loop too
SECONDS_OF_SPEED = {"train_faster_rcnn": 60, "train_detr": 80, "train_ssd": 60, "train_yolov3": 45, "train_sgg": 45}
# Those that resume in less than 130 s: the others first compile a deterministic RoIAlign
SOON = ("train_detr", "train_ssd", "train_yolov3")
GRAPHED = ("train_yolov3", "train_detr", "train_ssd")  # those with parts for CUDA graphs
QUICK_FACTOR = 20  # seconds of an item at the sizes of a rehearsal, which has no GPU
POLL_S = 0.05
# No CUDA before a fork: whether there is a GPU is asked of the driver's library. Resumed runs are compared to the bit.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Item:
    """A measurement, a method of `Items` with the arguments `of`, and the seconds after which it is ended."""

    title: str
    seconds: float
    measure: Callable[..., Iterator[dict]]
    of: tuple[str, ...] = ()


def bench_gpu(
    long: bool = False, quick: bool = False, words: Sequence[str] = (), folder: Path | None = None
) -> Iterator[dict]:
    """Measure the scripts on a GPU. Yields rows with `name`, `value`, `unit`, and some with `required`, as they are
    measured.

    Args:
        long: also every mode and the largest batch, and as long as it takes; else `LIMIT_S` seconds, most valuable
            first.
        quick: tiny sizes, to see that everything runs.
        words: only the items whose title has one of them; none: all.
        folder: `log.txt` there keeps what the programs print.

    Raises BadInput without a GPU that CUDA supports, or where the system does not fork processes.
    """
    os.environ.update(ENVIRONMENT)
    if not hasattr(os, "fork"):
        raise BadInput("this bench forks its trainings, which Windows cannot do: run it under Linux or WSL")
    if not torch.cuda.is_available():
        raise BadInput("no GPU: torch.cuda.is_available() is False. Run it where there is one, with a torch for it.")
    began = time.time()
    limit = math.inf if long or quick else began + LIMIT_S
    left_out = []
    with tempfile.TemporaryDirectory() as scratch:
        _prepare_in_a_fork()
        log = Path(folder or scratch) / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        for group in groups(torch.cuda.device_count(), long, quick):
            group = [item for item in group if not words or any(word in item.title for word in words)]
            if not group:
                continue
            if time.time() > limit - 8:
                left_out += [item.title for item in group]
                continue
            yield from _Group(group, Path(scratch), log, limit, long, quick).rows()
    if left_out:
        yield row("gpu, left out for lack of time", len(left_out), f"items, which --long runs: {'; '.join(left_out)}")


def groups(gpus: int, long: bool, quick: bool) -> Iterator[list[Item]]:
    """Yield the groups, most valuable first. The items of one run side by side; a speed is measured alone."""
    for script, seconds in SECONDS_OF_SPEED.items():
        yield [_speed(script, "bf16", seconds)]
    if not quick:  # compilers need a device that is there
        for script in RECIPES if long else ("train_faster_rcnn",):
            yield [_speed(script, "bf16, compiled", 75)]
        for script in GRAPHED if long else GRAPHED[:1]:
            yield [_speed(script, "bf16, graphs", 75)]
    exact = [Item(f"{script}, parity", 130, Items.parity, (script,)) for script in RECIPES]
    exact += [Item(f"{script}, resumed", 130, Items.resumed, (script,)) for script in RECIPES if long or script in SOON]
    yield [*exact, Item("moves", 130, Items.moves)]
    if gpus > 1:
        yield [Item("two GPUs", 70, Items.two_processes)]
        for script in RECIPES:
            yield [_speed(script, "bf16, two GPUs", 45)]
    yield [_speed("train_ssd", "bf16, two kernels tried", 40)]
    whole = [
        Item(f"{script}, whole, {precision}", 90, Items.whole, (script, precision))
        for script, precision in (
            ("train_faster_rcnn", "fp16"), ("train_detr", "bf16"), ("train_yolov3", "no"), ("train_ssd", "fp16"),
        )
    ]  # fmt: skip
    # The memory that is exhausted is the machine's own where the device is pretended.
    yield whole if quick else [*whole, Item("out of memory", 90, Items.out_of_memory)]
    for mode in ("TF32", "fp16", "float32", "bf16, largest batch") if long else ("TF32", "fp16"):
        for script in SECONDS_OF_SPEED:
            yield [_speed(script, mode, 30)]


def _speed(script: str, mode: str, seconds: float) -> Item:
    assert mode in MODES
    return Item(f"{script}, {mode}", seconds, Items.speed, (script, mode))


def _prepare_in_a_fork() -> None:
    """Draw the bundled pictures, and see that CUDA starts in a fork; this process must start neither CUDA nor OpenMP.

    Raises BadInput: CUDA does not start there.
    """

    def prepare() -> int:
        ensure_shapes()
        torch.zeros(1, device="cuda")
        return 0

    pid = fork(prepare)
    if os.waitpid(pid, 0)[1]:
        raise BadInput("CUDA does not start in a fork of this process; the lines above say why")


@dataclass
class _UnderWay:
    """An item at work. folder: of its trainings; file: where it writes its rows; read: how many were yielded."""

    item: Item
    began: float
    ends_at: float
    folder: Path
    file: Path
    read: int = 0


class _Group:
    """The items of a group at work, each in a process, as many at once as the cores allow."""

    def __init__(self, items: list[Item], scratch: Path, log: Path, limit: float, long: bool, quick: bool):
        self.waiting = list(items)
        self.scratch = scratch
        self.log = log
        self.limit = limit
        self.factor = QUICK_FACTOR if quick else 10 if long else 1
        self.quick = quick
        self.at_once = max(2, usable_cores() // 2)
        side_by_side = min(self.at_once, len(items))
        self.threads = max(1, usable_cores() // side_by_side)
        self.under_way: dict[int, _UnderWay] = {}

    def rows(self) -> Iterator[dict]:
        """Yield the rows of all items as they come."""
        try:
            while self.waiting or self.under_way:
                while self.waiting and len(self.under_way) < self.at_once:
                    self._start(self.waiting.pop(0))
                for pid in list(self.under_way):
                    yield from self._new_rows(pid)
                time.sleep(POLL_S)
        finally:
            for pid in self.under_way:
                _kill(pid)

    def _start(self, item: Item) -> None:
        folder = self.scratch / re.sub(r"\W+", "_", item.title)
        file = self.scratch / f"{folder.name}.jsonl"
        file.touch()
        ends_at = min(time.time() + item.seconds * self.factor, self.limit)

        def work() -> int:
            os.setsid()  # so that it is ended with the programs that it starts
            os.environ["OMP_NUM_THREADS"] = str(self.threads)  # of those programs
            torch.set_num_threads(self.threads)
            with self.log.open("a") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            self._measure(item, folder, file)
            return 0

        pid = fork(work)
        self.under_way[pid] = _UnderWay(item, time.time(), ends_at, folder, file)

    def _new_rows(self, pid: int) -> Iterator[dict]:
        """Yield what an item has written since the last call; end it if its time is over."""
        work = self.under_way[pid]
        is_over = os.waitpid(pid, os.WNOHANG)[0] == pid
        is_late = not is_over and time.time() > work.ends_at
        if is_late:
            _kill(pid)
        if is_over or is_late:
            del self.under_way[pid]
        lines = [line for line in work.file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        new = lines[work.read :]
        work.read = len(lines)
        yield from map(json.loads, new)
        if is_late:
            said = self._kept_output(work)
            ended = row("not finished", math.nan, f"was ended after {time.time() - work.began:.0f} s: {said}")
            yield json.loads(_line(work.item, ended))

    def _kept_output(self, work: _UnderWay) -> str:
        """Add to the log what the item's last training printed, and return the last line of it."""
        outputs = sorted(work.folder.rglob("output_*.txt"), key=lambda path: path.stat().st_mtime_ns)
        if not outputs:
            return "no training had begun"
        said = outputs[-1].read_text(errors="replace")
        with self.log.open("a") as log:
            log.write(f"---- {work.item.title}, when it was ended, {len(outputs)} trainings\n{said[-4000:]}\n")
        last = said.strip().rpartition("\n")[2][-120:].replace("|", "/")
        return f"training {len(outputs)} of it had printed last: {last}"

    def _measure(self, item: Item, folder: Path, file: Path) -> None:
        with file.open("a", buffering=1) as rows:

            def tell(each: dict) -> None:
                rows.write(_line(item, each))

            try:
                for each in item.measure(Items(Trainings(folder), self.quick, tell), *item.of):
                    tell(each)
            except BaseException as error:  # noqa: BLE001  of whatever kind: it costs this item, and a row says so
                traceback.print_exc()
                sys.stderr.flush()
                last = " ".join(str(error).split())[-300:].replace("|", "/")
                tell(row("failed", math.nan, last))


def _kill(pid: int) -> None:
    """End an item and everything that it has started."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _line(item: Item, each: dict) -> str:
    return json.dumps(each | {"name": f"gpu, {item.title}, {each['name']}"}, default=str) + "\n"
