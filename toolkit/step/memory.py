"""Out of memory: say which batch did it, and find out before step 0."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from toolkit.batch import Batch
from toolkit.errors import BadInput


def describe_batch(batch: Batch) -> str:
    """Shapes, box counts and image ids of a batch, in one line."""
    boxes = [len(target["boxes"]) for target in batch.targets]
    ids = [target["image_id"] for target in batch.targets]
    return f"images {tuple(batch.images.shape)} uint8, {sum(boxes)} boxes {boxes}, image ids {ids}"


@contextmanager
def naming_the_batch(window: Sequence[Batch]) -> Iterator[None]:
    """Turns an out-of-memory error inside the block into one that names the batches.

    Raises:
        BadInput: memory ran out; the message says for which batch and what to lower.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the plain kind
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        batches = "\n".join(f"  micro-batch {i}: {describe_batch(batch)}" for i, batch in enumerate(window))
        raise BadInput(
            f"out of memory: {str(error).splitlines()[0]}\n{batches}\nLower --data.batch_size_per_device and raise "
            "--optim.accumulation_steps by the same factor: with `--loss.denominators global` the result stays the "
            "same. `--run.probe_memory` finds this out before step 0."
        ) from error


