"""Memory: how much of it was in use, and the error that names a batch for which there was not enough."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput, is_out_of_memory

TRAINING_NEEDS_LESS = (
    "Lower --data.batch_size_per_device and raise --optim.accumulation_steps by the same factor: with "
    "`--loss.denominators global` the result stays the same. Or give --optim.checkpointing true, which takes more "
    "time. `--run.probe_memory` finds this out before step 0."
)
EVALUATION_NEEDS_LESS = "Lower --eval.batch_size_per_device: the numbers stay the same."


def peak_memory_mb() -> float:
    """Return the largest memory use so far, in MiB: allocated by torch on the CUDA device, else resident memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "linux":
        # `ru_maxrss` is that of the program that started this one, too, where that was larger.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**10
    try:
        import resource
    except ImportError:  # on Windows
        return getattr(psutil.Process().memory_info(), "peak_wset", 0) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def describe_batch(batch: Batch) -> str:
    """Describe the shapes, box counts and image ids of a batch, in one line. Long lists are cut."""
    boxes = [len(target["boxes"]) for target in batch.targets]
    ids = [target["image_id"] for target in batch.targets]
    shape = tuple(batch.images.shape)
    return f"images {shape} uint8, {sum(boxes)} boxes {_cut(boxes)}, image ids {_cut(ids)}"


def _cut(values: Sequence, shown: int = 16) -> str:
    if len(values) <= shown:
        return str(list(values))
    return f"{list(values[:shown])} and {len(values) - shown} more"


@contextmanager
def naming_the_batch(
    batches_under_way: Callable[[], Sequence[Batch]], advice: str = TRAINING_NEEDS_LESS
) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into one that names the batches.

    Args:
        batches_under_way: returns the current batches; an empty sequence outside a window, where the error stays
            unchanged.
        advice: ends the message: what to change.

    Raises:
        BadInput: memory ran out; the message says for which batch, how much was in use, and what to lower.
    """
    try:
        yield
    except RuntimeError as error:
        under_way = batches_under_way() if is_out_of_memory(error) else ()
        if not under_way:
            raise
        batches = "\n".join(f"  micro-batch {i}: {describe_batch(batch)}" for i, batch in enumerate(under_way))
        raise BadInput(
            f"out of memory: {str(error).splitlines()[0]}\n{batches}\n"
            f"  most memory in use so far: {peak_memory_mb():.0f} MiB\n{advice}"
        ) from error
