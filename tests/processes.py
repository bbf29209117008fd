"""Functions on several gloo processes of this machine, for tests of what happens between ranks."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Calls `function(*args)`, a module-level function, on `world_size` new ranks; returns what each of them returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, folder, function, args), nprocs=world_size)
        return [torch.load(Path(folder, f"result_{rank}"), weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    # a rank that waits for a message that never comes fails the test instead of hanging it
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    torch.save(function(*args), Path(folder, f"result_{rank}"))
    dist.destroy_process_group()
