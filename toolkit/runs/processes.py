"""The processes of a run: how Accelerate sets them up, their threads, and their first lines."""

import os
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, KwargsHandler


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


def announce(world_size: int, folder: Path, messages: Iterable[str]) -> None:
    """First lines of a run: how many processes there really are, where it writes, where it goes on from."""
    print(f"processes: {world_size}, CPU threads of each: {torch.get_num_threads()}", flush=True)
    print(f"run folder: {folder}", *messages, sep="\n", flush=True)
    if world_size == 1 and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        warnings.warn(  # `accelerate launch --cpu --num_processes 2` does this
            "the launcher was asked for several processes and started one. On CPU start them with "
            "`ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/...`.",
            stacklevel=2,
        )
