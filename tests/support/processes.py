"""Functions on several gloo processes of this machine, for tests of what happens between ranks."""

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator

# Ranks are forked from a server that has imported what the modules of the tests import: each rank imports the module
# of its function, and would take seconds for that. Of several such lists the last one would hold for all tests.
PRELOADED = [
    "torch",
    "accelerate",
    "pytest",
    "hypothesis",
    "transformers.pipelines",
    "transformers.models.detr.modeling_detr",
    "transformers.models.rt_detr_v2.modeling_rt_detr_v2",
    "toolkit.run.session",
    "toolkit.run.watchdog",
    "toolkit.tools.replay.nan_report",
    "toolkit.evaluation.coco",
    "toolkit.detectors.detr.detr",
    "toolkit.detectors.detr.d_fine",
    "toolkit.detectors.faster_rcnn.model",
    "toolkit.detectors.ssd.model",
    "toolkit.detectors.yolov3.model",
    "toolkit.detectors.scene_graphs.start",
]
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(PRELOADED)


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Calls `function(*args)`, of a module's top level, on `world_size` new ranks; returns what each rank returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world_size, folder, function, args), world_size, start_method="forkserver")
        return [torch.load(Path(folder, f"result_{rank}"), weights_only=False) for rank in range(world_size)]


def as_launched(precision: str = "no") -> Accelerator:
    """Returns the Accelerator of a rank of `run_on_ranks`, as if a launcher had started it on the CPU."""
    from toolkit.base.distributed import world
    from toolkit.run.processes import start_accelerator

    rank, ranks = world()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"}
    return start_accelerator(precision)


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    gc.freeze()  # what was imported before stays, and need not be walked through at the end
    torch.set_num_threads(1)
    # a rank that waits for a message that never comes fails the test instead of hanging it
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    torch.save(function(*args), Path(folder, f"result_{rank}"))
    gc.collect()  # DDP models hold the group in cycles
    dist.barrier()
    dist.destroy_process_group()
