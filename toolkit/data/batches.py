"""Collation of samples into padded uint8 batches in worker processes, and their copies to a GPU ahead of the step.

Normalisation happens on the device.

Workers run ahead of training (prefetching), so `iter(loader)` asks the sampler for keys that training has not seen yet.
The sampler's `offset`, which a checkpoint stores, therefore moves only when the training loop calls
`sampler.advance...()` after a window is consumed. Keys carry the epoch, so persistent workers need no update.
"""

import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from toolkit.base.batch import Batch, Target
from toolkit.base.errors import BadInput
from toolkit.base.files import with_stall_warnings
from toolkit.base.signals import ignore_in_worker, sigterm_held_back
from toolkit.data.dataset import MixedDataset
from toolkit.data.sampling import EpochSampler, EvalSampler, SampleKey

MAX_NAMED_IMAGES = 8  # of the batch of a worker that was killed
_open: "weakref.WeakSet[_Batches]" = weakref.WeakSet()  # batches with workers in this process
_running: weakref.WeakSet = weakref.WeakSet()  # torch's iterators over them


def collate(samples: Sequence[tuple[Tensor, Target]], stride: int = 1) -> Batch:
    """Pad images (uint8 (3, h, w)) on the right and below with zeros to the largest height and width among them.

    stride: height and width of the batch are rounded up to a multiple of this number. Without samples the batch has B =
    0 images, and is one stride high and wide.
    """
    images = [image for image, _ in samples]
    targets = [target for _, target in samples]
    sizes = torch.tensor([image.shape[-2:] for image in images], dtype=torch.int64)
    sizes = sizes.reshape(-1, 2)
    largest = sizes.amax(0).tolist() if images else (1, 1)
    height, width = (-(-side // stride) * stride for side in largest)
    # (B, H, W, 3) in memory, like the images: each row is then copied in one piece.
    padded = torch.zeros((len(images), height, width, 3), dtype=torch.uint8)
    padded = padded.permute(0, 3, 1, 2)
    for into, image in zip(padded, images, strict=True):
        _, image_height, image_width = image.shape
        into[:, :image_height, :image_width] = image
    return Batch(padded, sizes, targets)


def make_loader(
    dataset: Dataset,
    sampler: EpochSampler | EvalSampler,
    workers: int = 0,
    stride: int = 1,
    pin: bool = False,
) -> DataLoader:
    """Make a loader of the sampler's batches, in the sampler's order.

    workers: processes (0: load in this one); they stay alive between epochs and use one thread each.
    pin: batches arrive in page-locked memory, for asynchronous copies to a GPU.

    A sample that raises BadInput in a worker raises the same BadInput here, naming file and image id; a worker that is
    killed raises BadInput, see `naming_killed_workers`.
    """
    return _Loader(
        _Batches(dataset, stride, workers),
        sampler=sampler,  # yields the keys of a whole batch
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
        worker_init_fn=ignore_in_worker,
        generator=torch.Generator(),  # of its own: starting an epoch must not draw from the global one
    )


def windows(loader: Iterable[Batch], accumulation_steps: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each optimizer step as a list; the last list of an epoch may be shorter."""
    batches = iter(loader)
    window = list(islice(batches, accumulation_steps))
    while window:
        yield window
        window = list(islice(batches, accumulation_steps))


class _Batches(Dataset):
    """Whole batches by their keys. A BadInput is returned as the item; raised in a worker it would be a traceback."""

    def __init__(self, dataset: Dataset, stride: int, workers: int):
        self.dataset = dataset
        self.stride = stride
        # of each worker: its process, and the first images of its last batch, -1 after them
        self.at_work = torch.full((workers, 1 + MAX_NAMED_IMAGES), -1).share_memory_()
        if workers:
            _open.add(self)

    def __getitem__(self, keys: list[SampleKey]) -> Batch | BadInput:
        worker = get_worker_info()
        if worker is not None:
            images = [key.index for key in keys[:MAX_NAMED_IMAGES]]
            unused = [-1] * (MAX_NAMED_IMAGES - len(images))
            self.at_work[worker.id] = torch.tensor([os.getpid(), *images, *unused])
        try:
            samples = [self.dataset[key] for key in keys]
        except BadInput as error:
            return error
        if isinstance(self.dataset, MixedDataset):
            samples = self.dataset.finish(samples, keys)
        return collate(samples, self.stride)


class _Loader(DataLoader):
    """DataLoader that raises the failures its workers report."""

    def __iter__(self) -> Iterator[Batch]:
        with naming_killed_workers(), sigterm_held_back():
            items = super().__iter__()  # the sampler is asked where it stands when iter() is called
            if self.num_workers:
                _running.add(items)
            table = self.dataset.dataset.table
            return _raised(items, str(table.image_root or table.name))


def _raised(items: Iterator[Batch | BadInput], place: str) -> Iterator[Batch]:
    with naming_killed_workers():
        for item in with_stall_warnings(items, f"the next images, from {place}"):
            if isinstance(item, BadInput):
                raise item
            yield item


@contextmanager
def naming_killed_workers() -> Iterator[None]:
    """Replace torch's error about a killed DataLoader worker inside the block by a BadInput.

    torch may raise this error anywhere in the main thread. The BadInput names the worker, the images of its last batch,
    and what to lower. The other workers are shut down, because torch would raise once more for each of them that is
    killed, at any later moment.
    """
    try:
        yield
    except RuntimeError as error:
        killed = error.__cause__ if "exited unexpectedly" in str(error) and error.__cause__ else error
        match = re.match(r"DataLoader worker \(pid(?:\(s\))? (\d+)", str(killed))
        if not match:
            raise
        for iterator in _running:
            with suppress(RuntimeError):
                iterator._shutdown_workers()
        at = [_last_batch(batches, int(match[1])) for batches in _open]
        raise BadInput(
            f"{str(killed).strip().rstrip('.')}{''.join(at)}. Most often the system ran out of memory: lower "
            "data.workers, data.batch_size_per_device or the size of the images, or allow the job more memory (shared "
            "memory too), then go on with --run.resume latest."
        ) from error


def _last_batch(batches: _Batches, process: int) -> str:
    """Describe the last batch of a worker process; an empty string if it is not a worker of this loader."""
    for worker, (pid, *images) in enumerate(batches.at_work.tolist()):
        if pid == process:
            names = ", ".join(batches.dataset.table.image_name(index) for index in images if index >= 0)
            return f"; it was worker {worker}, its last batch began with {names}"
    return ""


class Prefetcher:
    """Prefetcher that copies the next window (list of batches) to a CUDA device, on a stream of its own.

    For other devices nothing is copied ahead.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._sent: dict[int, tuple[Batch, Batch, torch.cuda.Event]] = {}

    def through(self, windows: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield the same windows, each after the copy of the next one has started."""
        if self.stream is None:
            yield from windows
            return
        waiting = None
        self._sent = {}
        for window in windows:
            with torch.cuda.stream(self.stream):
                moved = [batch.to(self.device, non_blocking=True) for batch in window]
                copied = self.stream.record_event()  # of this window: waiting for the stream is waiting for the next
            for batch, on_device in zip(window, moved, strict=True):
                self._sent[id(batch)] = (batch, on_device, copied)
            if waiting is not None:
                yield waiting
                self._forget(waiting)
            waiting = window
        if waiting is not None:
            yield waiting
            self._forget(waiting)

    def _forget(self, window: Sequence[Batch]) -> None:
        """Let go of copies that were not asked for, because the script trained on other batches."""
        for batch in window:
            self._sent.pop(id(batch), None)

    def arrived(self, batch: Batch) -> Batch:
        """Return the copy of a batch on the device; the computing stream waits until the copy is complete.

        A batch that did not come through `through` is copied now.
        """
        if id(batch) not in self._sent:
            return batch.to(self.device, non_blocking=True)
        _, moved, copied = self._sent.pop(id(batch))
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        for tensor in (moved.images, moved.sizes):  # the targets lie in the memory of the sizes
            tensor.record_stream(computing)
        return moved
