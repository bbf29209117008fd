"""How a script starts and ends: settings, one message instead of a traceback, exit code, status.json."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, KwargsHandler

from toolkit.config import parse_config, save_config
from toolkit.errors import BadInput, Preempted, StoppedByGuard
from toolkit.runfolder import write_environment, write_status

STATES = {BadInput: "bad_input", StoppedByGuard: "stopped_by_guard", Preempted: "preempted"}


def run_script(main: Callable, cls: type, default_config: Path | None = None, argv: list[str] | None = None) -> int:
    """Parses the settings, runs `main(config)` and returns the exit code of docs/design.md.

    A mistake of the user, a stop by the guard and a preemption end with one message; anything else is a defect of
    the program and keeps its traceback.
    """
    try:
        main(parse_config(cls, argv, default_config))
    except tuple(STATES) as error:
        rank = os.environ.get("RANK", "0")
        word = "error" if isinstance(error, BadInput) else "stopped"
        print(f"{word}{'' if rank == '0' else f' on rank {rank}'}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


@contextmanager
def run_status(folder: Path, is_main: bool) -> Iterator[dict]:
    """Keeps `status.json` true: running while the block runs, then done or why not; the main process writes.

    Yields:
        A dict; what the script puts in (its step) stands in the file at the end.
    """
    details: dict = {}

    def write(state: str, reason: str = "") -> None:
        if is_main:
            write_status(folder, state, reason, **details)

    write("running")
    try:
        yield details
    except BaseException as error:  # whatever ends the run is recorded, and goes on its way
        state = next((state for kind, state in STATES.items() if isinstance(error, kind)), "failed")
        try:
            write(state, str(error) or type(error).__name__)
        except OSError as unwritable:  # a full disk must not hide the error that ended the run
            warnings.warn(f"status.json could not be written: {unwritable}", stacklevel=2)
        raise
    write("done")


def record_run(config: object, folder: Path, seed: int, processes: int, is_main: bool) -> None:
    """Writes `config.yaml` and `environment.json` on the main process."""
    if is_main:
        save_config(config, folder / "config.yaml")
        write_environment(folder, seed, processes)


def distributed_kwargs() -> list[KwargsHandler]:
    """How Accelerate is to set up several processes.

    A parameter may go unused in a step (no boxes, a frozen part). The others wait for the main process while it reads
    and checks all images of a data set for the first time, which takes longer than NCCL's ten minutes for large ones.
    """
    waiting = InitProcessGroupKwargs(timeout=timedelta(hours=2))
    return [DistributedDataParallelKwargs(find_unused_parameters=True), waiting]


def set_threads(threads: int | None, device: torch.device) -> None:
    """CPU threads of this process: as told, or all cores where the launcher, not the user, allowed only one."""
    if threads is None:
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ  # `accelerate launch` sets it, and OMP_NUM_THREADS to 1
        if device.type != "cpu" or not launched or os.environ.get("OMP_NUM_THREADS") != "1":
            return
        threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)


def announce(world_size: int, is_main: bool, folder: Path, messages: Iterable[str]) -> None:
    """First lines of a run: how many processes there really are, where it writes, where it goes on from."""
    if not is_main:
        return
    print(f"processes: {world_size}, CPU threads of each: {torch.get_num_threads()}", flush=True)
    print(f"run folder: {folder}", *messages, sep="\n", flush=True)
    if world_size == 1 and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        warnings.warn(  # `accelerate launch --cpu --num_processes 2` does this
            "the launcher was asked for several processes and started one. On CPU start them with "
            "`ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/...`.",
            stacklevel=2,
        )
