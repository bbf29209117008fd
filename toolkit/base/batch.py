"""One micro-batch of images and targets, and the normalisation of its pixels on the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

Target = dict[str, object]  # of one image, see `toolkit.data.dataset.row_target`


@dataclass
class Batch:
    """The images and targets of one micro-batch on one rank.

    images: uint8 (B, 3, H, W), channels-last in memory, 0 beyond each image's size (padding is right and below).
    sizes: (B, 2) int64 (h, w) of each image without its padding.
    targets: one dict per image, see `toolkit.data.dataset.row_target`. B = 0 happens in evaluation on several ranks.
    """

    images: Tensor
    sizes: Tensor
    targets: list[Target]
    packed: Tensor | None = None  # sizes and targets in one piece of page-locked memory, see `pack`

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Copy the batch to `device` in two transfers: the images, and all small tensors together.

        On a device other than the CPU, each target keeps its original as `on_host`, see the function of this name.
        """
        device = torch.device(device)
        if device.type == "cpu":
            return Batch(self.images.to(device), self.sizes.to(device), self.targets)
        small = self._small()
        packed = send(pack(small) if self.packed is None else self.packed, device, non_blocking)
        sizes, *rest = unpack(packed, small)
        parts = iter(rest)
        targets = []
        for target in self.targets:
            moved = {k: next(parts) if isinstance(v, Tensor) else v for k, v in target.items()}
            targets.append(moved | {"on_host": HostTarget(on_host(target))})
        return Batch(self.images.to(device, non_blocking=non_blocking), sizes, targets)

    def pin_memory(self) -> "Batch":
        """Copy everything that goes to a GPU into page-locked memory. The DataLoader calls this."""
        return Batch(self.images.pin_memory(), self.sizes, self.targets, pack(self._small()).pin_memory())

    def _small(self) -> list[Tensor]:
        of_targets = (v for target in self.targets for v in target.values() if isinstance(v, Tensor))
        return [self.sizes, *of_targets]

    def __getstate__(self) -> dict:
        # A worker sends each tensor as a shared-memory file of its own: hundreds per batch with targets, which is slow
        # and runs into the limit of open files. As NumPy arrays the small ones travel inside the message itself.
        targets = [{name: _as_array(value) for name, value in target.items()} for target in self.targets]
        return {"images": self.images, "sizes": _as_array(self.sizes), "targets": targets}

    def __setstate__(self, state: dict) -> None:
        self.images = state["images"]
        self.sizes = _as_tensor(state["sizes"])
        self.targets = [{name: _as_tensor(value) for name, value in target.items()} for target in state["targets"]]


class HostTarget(Mapping):
    """The original of a target on the CPU, kept beside its copy on the device.

    It is not a dict: DistributedDataParallel copies each tensor in dicts, lists and tuples to its GPU, one by one.
    """

    def __init__(self, target: Mapping[str, object]):
        self._target = dict(target)

    def __getitem__(self, name: str) -> object:
        return self._target[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._target)

    def __len__(self) -> int:
        return len(self._target)


def pixel_mask(sizes: Tensor, hw: tuple[int, int]) -> Tensor:
    """Return a bool mask (B, H, W), True inside each image's `sizes` (B, 2) h, w; on the device of `sizes`."""
    rows, columns = (torch.arange(side, device=sizes.device) for side in hw)
    return (rows[:, None] < sizes[:, 0, None, None]) & (columns < sizes[:, 1, None, None])


def normalize_images(
    images: Tensor, sizes: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute (uint8 / 255 - mean) / std in float32, then set the padding outside `sizes` to zero, the mean.

    images (B, 3, H, W) uint8 and sizes (B, 2) on one device -> (B, 3, H, W) contiguous, in `dtype`. Float images of the
    same range, which a loop may have mixed or moved, give the same numbers, are not modified, and may require
    gradients.
    """
    if images.is_floating_point():
        planes = zip((images.to(torch.float32) / 255).unbind(1), mean, std, strict=True)
        normalized = torch.stack([(plane - each_mean) / each_std for plane, each_mean, each_std in planes], 1)
        return normalized.masked_fill(~pixel_mask(sizes, images.shape[-2:])[:, None], 0).to(dtype)
    # The planes are made contiguous as bytes, before float32 makes them four times as large.
    normalized = images.contiguous().to(torch.float32).div_(255)
    for plane, channel_mean, channel_std in zip(normalized.unbind(1), mean, std, strict=True):
        plane.sub_(channel_mean).div_(channel_std)  # plain numbers: a tensor of them would make the host wait for a GPU
    return normalized.masked_fill_(~pixel_mask(sizes, images.shape[-2:])[:, None], 0).to(dtype)


def _as_array(value: object) -> object:
    return value.numpy() if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _as_tensor(value: object) -> object:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def on_host(target: Mapping[str, object]) -> Mapping[str, object]:
    """Return the target's original on the CPU, from which decisions need no device synchronisation."""
    return target.get("on_host", target)


def send(values: Tensor, device: torch.device | str, non_blocking: bool = True) -> Tensor:
    """Copy CPU values to `device`, without waiting for the work that is queued there."""
    if torch.device(device).type == "cuda" and values.device.type == "cpu" and not values.is_pinned():
        values = values.pin_memory()
    return values.to(device, non_blocking=non_blocking)


def send_dicts(dicts: Sequence[Mapping[str, object]], device: torch.device | str) -> list[dict[str, object]]:
    """Copy the tensors in the dicts to `device`; CPU tensors go in one asynchronous copy."""
    tensors = [value for entry in dicts for value in entry.values() if isinstance(value, Tensor)]
    if torch.device(device).type == "cpu" or not tensors or any(value.device.type != "cpu" for value in tensors):
        moved = iter([value.to(device) for value in tensors])
    else:
        moved = iter(unpack(send(pack(tensors), device), tensors))
    return [{k: next(moved) if isinstance(v, Tensor) else v for k, v in entry.items()} for entry in dicts]


def sizes_on_host(sizes: Tensor, targets: Sequence[Mapping] | None) -> list[tuple[int, int]]:
    """Return (h, w) of each image without padding; read `sizes` (B, 2) from its device only if targets lack them."""
    if targets and all("size" in target for target in targets):
        return [tuple(on_host(target)["size"].tolist()) for target in targets]
    return [(height, width) for height, width in sizes.tolist()]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors of one device as consecutive bytes, (N,) uint8: one copy to another device instead of many."""
    spans = _byte_spans(tensors)
    packed = torch.zeros(spans[-1].stop if spans else 0, dtype=torch.uint8, device=tensors[0].device)
    for span, tensor in zip(spans, tensors, strict=True):
        bytes_of = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # also for strides of 0
        packed[span.start : span.start + len(bytes_of)] = bytes_of
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `pack` packed, as views of `packed`; `like` gives their dtypes and shapes."""
    return [
        packed[span.start : span.start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for span, tensor in zip(_byte_spans(like), like, strict=True)
    ]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors to the CPU; those of a device in one copy, for which the host waits once."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    return unpack(pack(tensors).cpu(), tensors)


def dicts_to_host(dicts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copy the tensors (N, ...) in the dicts, which share their keys, to the CPU; see `to_host`."""
    joined = to_host([torch.cat([entry[name] for entry in dicts]) for name in dicts[0]])
    counts = {name: [len(entry[name]) for entry in dicts] for name in dicts[0]}
    columns = {name: column.split(counts[name]) for name, column in zip(dicts[0], joined, strict=True)}
    return [{name: parts[i] for name, parts in columns.items()} for i in range(len(dicts))]


def image_of_each(counts: Sequence[int], device: torch.device | str) -> Tensor:
    """Return the image index of each element, (sum(counts),) int64, where image i has counts[i] elements."""
    return send(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64)), device)


def pad_rows(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Pad the rows (N, ...) of B images, counts[i] each, to (B, M, ...) with zeros, faster than `pad_sequence`."""
    shape = len(counts), max(counts, default=0), *values.shape[1:]
    padded = values.new_zeros(shape).flatten(0, 1)
    padded[_padded_positions(counts, values.device)] = values
    return padded.view(shape)


def unpad_rows(padded: Tensor, counts: Sequence[int]) -> Tensor:
    """Undo `pad_rows`: (B, M, ...) to (N, ...)."""
    return padded.flatten(0, 1)[_padded_positions(counts, padded.device)]


def _padded_positions(counts: Sequence[int], device: torch.device | str) -> Tensor:
    width = max(counts, default=0)
    positions = [torch.arange(i * width, i * width + count) for i, count in enumerate(counts)]
    return send(torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64), device)


def rows_of(column: Tensor, rows: Tensor) -> Tensor:
    """Gather the rows (B, M) of each image from a column (B, N, ...): (B, M, ...)."""
    return column[torch.arange(rows.shape[0], device=rows.device)[:, None], rows]


def first_rows(counts: Sequence[int], columns: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the first `counts` rows of each column (B, K, ...), one dict per image."""
    return [{name: column[i, :count] for name, column in columns.items()} for i, count in enumerate(counts)]


def kept_first(keep: Tensor, *columns: Tensor) -> list[Tensor]:
    """Return the counts (B,) of rows that `keep` (B, K) selects, and each column (B, K, ...) with these rows first."""
    first = keep.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices  # in their order
    return [keep.sum(dim=1), *(rows_of(column, first) for column in columns)]


def _byte_spans(tensors: Sequence[Tensor]) -> list[slice]:
    """Return the byte ranges of the tensors; each starts at a multiple of 8 bytes, the widest alignment."""
    ends = list(accumulate(-(-tensor.numel() * tensor.element_size() // 8) * 8 for tensor in tensors))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
