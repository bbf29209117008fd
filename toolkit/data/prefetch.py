"""Copies the next batches to a GPU while it computes the current step."""

from collections.abc import Iterable, Iterator

import torch

from toolkit.batch import Batch


class Prefetcher:
    """Copies the next window on a stream of its own; on other devices than CUDA it leaves everything where it is."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._sent: dict[int, tuple[Batch, Batch, torch.cuda.Event]] = {}

    def through(self, windows: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """The same windows, each after the next one is on its way."""
        if self.stream is None:
            yield from windows
            return
        waiting, self._sent = None, {}
        for window in windows:
            with torch.cuda.stream(self.stream):
                moved = [batch.to(self.device, non_blocking=True) for batch in window]
                copied = self.stream.record_event()  # of this window: waiting for the stream is waiting for the next
            self._sent |= {id(b): (b, on_device, copied) for b, on_device in zip(window, moved, strict=True)}
            if waiting is not None:
                yield waiting
            waiting = window
        if waiting is not None:
            yield waiting

    def arrived(self, batch: Batch) -> Batch:
        """The batch on the device, ready for the stream that computes."""
        if id(batch) not in self._sent:
            return batch.to(self.device, non_blocking=True)
        _, moved, copied = self._sent.pop(id(batch))
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        for tensor in (moved.images, moved.sizes):  # the targets lie in the memory of the sizes
            tensor.record_stream(computing)
        return moved
