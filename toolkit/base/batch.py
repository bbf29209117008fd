"""One micro-batch of images and targets, and the normalisation of its pixels on the device."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
        """Return a copy of the batch on `device`, sent in two transfers: the images, and all small tensors together.

        On a device other than the CPU, each copied target has one more entry `on_host`: the original target on the CPU,
        see the function `on_host`.
        """
        device = torch.device(device)
        if device.type == "cpu":
            return Batch(self.images.to(device), self.sizes.to(device), self.targets)
        small = self._small()
        packed = self.packed
        if packed is None:
            packed = pack(small)
        sent = send(packed, device, non_blocking)
        sizes, *of_targets = unpack(sent, small)
        targets = _with_tensors(self.targets, of_targets)
        for target, original in zip(targets, self.targets, strict=True):
            target["on_host"] = HostTarget(on_host(original))
        images = self.images.to(device, non_blocking=non_blocking)
        return Batch(images, sizes, targets)

    def pin_memory(self) -> "Batch":
        """Return a copy of the batch with everything that is sent to a GPU in page-locked memory.

        A DataLoader with `pin_memory=True` calls this.
        """
        packed = pack(self._small())
        return Batch(self.images.pin_memory(), self.sizes, self.targets, packed.pin_memory())

    def _small(self) -> list[Tensor]:
        """Return the sizes and the tensors in the targets, in order."""
        return [self.sizes, *_tensors_in(self.targets)]

    def __getstate__(self) -> dict:
        # A worker sends each tensor as a shared-memory file of its own: hundreds per batch with targets, which is slow
        # and runs into the limit of open files. As NumPy arrays the small ones travel inside the message itself. Masks
        # are as large as images, and travel as one tensor.
        targets = []
        masks = []
        for target in self.targets:
            arrays = {name: _as_array(value) for name, value in target.items()}
            if "masks" in target:
                masks.append(target["masks"].flatten())
                arrays["masks"] = tuple(target["masks"].shape)
            targets.append(arrays)
        return {
            "images": self.images,
            "sizes": _as_array(self.sizes),
            "targets": targets,
            "masks": torch.cat(masks) if masks else None,
        }

    def __setstate__(self, state: dict) -> None:
        self.images = state["images"]
        self.sizes = _as_tensor(state["sizes"])
        self.targets = []
        begin = 0  # of the masks of a target
        for arrays in state["targets"]:
            target = {name: _as_tensor(value) for name, value in arrays.items()}
            if "masks" in target:
                shape = target["masks"]
                end = begin + math.prod(shape)
                target["masks"] = state["masks"][begin:end].view(shape)
                begin = end
            self.targets.append(target)


class HostTarget(Mapping):
    """The original of a target on the CPU, kept with its copy on the device.

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
    """Return a bool mask (B, H, W) of a padded batch: True for the pixels of an image, False for its padding.

    sizes: (B, 2) height and width of each image without padding; the mask is on the same device. hw: height and width
    of the batch.
    """
    height, width = hw
    rows = torch.arange(height, device=sizes.device)
    columns = torch.arange(width, device=sizes.device)
    above_bottom = rows[:, None] < sizes[:, 0, None, None]  # (B, H, 1)
    left_of_right = columns < sizes[:, 1, None, None]  # (B, 1, W)
    return above_bottom & left_of_right


def normalize_images(
    images: Tensor,
    sizes: Tensor | None,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute (uint8 / 255 - mean) / std in float32, then set the padding outside `sizes` to zero, the mean.

    images (B, 3, H, W) uint8 and sizes (B, 2) on one device -> (B, 3, H, W) contiguous, in `dtype`. Float images with
    values from 0 to 255, such as images that a loop has mixed, are accepted too and give the same results; gradients
    flow through them. The images are not modified. sizes: None: there is no padding.
    """
    of_channels = _of_channels.__wrapped__ if torch.compiler.is_compiling() else _of_channels
    means, deviations = of_channels(tuple(mean), tuple(std), images.device)
    # The planes are made contiguous as bytes, before float32 makes them four times as large.
    normalized = images.contiguous().to(torch.float32)
    normalized = normalized / 255 if images.is_floating_point() else normalized.div_(255)
    normalized.sub_(means)
    normalized.div_(deviations)
    if sizes is not None:
        padding = ~pixel_mask(sizes, images.shape[-2:])[:, None]  # (B, 1, H, W)
        normalized.masked_fill_(padding, 0)
    return normalized.to(dtype)


@functools.lru_cache(maxsize=16)
def _of_channels(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the channels, float32 (3, 1, 1), kept on the device.

    Tensors: a GPU multiplies by the reciprocal of a plain number, and the last bits would not be those of a CPU.
    """
    with torch.inference_mode(False):  # whose tensors could not be used in training
        means = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        deviations = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)
        return send(means, device), send(deviations, device)


def _as_array(value: object) -> object:
    if isinstance(value, Tensor) and value.device.type == "cpu":
        return value.numpy()
    return value


def _as_tensor(value: object) -> object:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value


def on_host(target: Mapping[str, object]) -> Mapping[str, object]:
    """Return the original of a target on the CPU, whose values can be read without waiting for the device.

    A target without an original (see `Batch.to`) is returned itself.
    """
    return target.get("on_host", target)


def is_waited_for(device: torch.device | str) -> bool:
    """Return whether reading a value from `device` waits for the work that is queued there: true of all but a CPU."""
    return torch.device(device).type != "cpu"


def send(values: Tensor, device: torch.device | str, non_blocking: bool = True) -> Tensor:
    """Copy CPU values to `device`, without waiting for the work that is queued there."""
    to_gpu = torch.device(device).type == "cuda" and values.device.type == "cpu"
    if to_gpu and not values.is_pinned():
        values = values.pin_memory()
    return values.to(device, non_blocking=non_blocking)


def send_dicts(dicts: Sequence[Mapping[str, object]], device: torch.device | str) -> list[dict[str, object]]:
    """Return copies of the dicts with their tensors on `device`; CPU tensors are sent in one asynchronous copy."""
    tensors = _tensors_in(dicts)
    from_cpu = all(value.device.type == "cpu" for value in tensors)
    to_cpu = torch.device(device).type == "cpu"
    if tensors and from_cpu and not to_cpu:
        sent = send(pack(tensors), device)
        moved = unpack(sent, tensors)
    else:
        moved = [value.to(device) for value in tensors]
    return _with_tensors(dicts, moved)


def _tensors_in(dicts: Iterable[Mapping[str, object]]) -> list[Tensor]:
    """Return the tensors in the dicts, in order."""
    tensors = []
    for entry in dicts:
        tensors += [value for value in entry.values() if isinstance(value, Tensor)]
    return tensors


def _with_tensors(dicts: Iterable[Mapping[str, object]], tensors: Iterable[Tensor]) -> list[dict[str, object]]:
    """Return copies of the dicts with `tensors` in place of their own, in the order of `_tensors_in`."""
    following = iter(tensors)
    copies = []
    for entry in dicts:
        copy = dict(entry)
        for name, value in entry.items():
            if isinstance(value, Tensor):
                copy[name] = next(following)
        copies.append(copy)
    return copies


def sizes_on_host(sizes: Tensor, targets: Sequence[Mapping] | None) -> list[tuple[int, int]]:
    """Return (h, w) of each image without padding, as Python numbers.

    They are the entries `size` of the targets on the CPU. Only if there are no targets, or one lacks its `size`, the
    tensor `sizes` (B, 2) is read from its device.
    """
    if targets and all("size" in target for target in targets):
        known = [on_host(target)["size"] for target in targets]
        return [tuple(size_hw.tolist()) for size_hw in known]
    return [(height, width) for height, width in sizes.tolist()]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors of one device as consecutive bytes, (N,) uint8: one copy to another device instead of many."""
    spans = _byte_spans(tensors)
    size = spans[-1].stop if spans else 0
    packed = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device)
    for span, tensor in zip(spans, tensors, strict=True):
        # A tensor with strides of 0 counts as contiguous if it has one element, but `view` of bytes refuses it.
        flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
        content = flat.view(torch.uint8)
        packed[span.start : span.start + len(content)] = content
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `pack` packed, as views of `packed`; `like` gives their dtypes and shapes."""
    tensors = []
    for span, original in zip(_byte_spans(like), like, strict=True):
        end = span.start + original.numel() * original.element_size()
        content = packed[span.start : end]
        flat = content.view(original.dtype)
        tensors.append(flat.view(original.shape))
    return tensors


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, in order.

    If one of them is on another device, all are sent in one copy, so that the host waits only once.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    return unpack(pack(tensors).cpu(), tensors)


def dicts_to_host(dicts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return copies of the dicts with their tensors (N, ...) on the CPU, see `to_host`.

    All dicts must have the same keys; N may differ from dict to dict.
    """
    names = list(dicts[0])
    columns = []  # of each name, the tensors of all dicts
    for name in names:
        columns.append([entry[name] for entry in dicts])
    joined = to_host([torch.cat(column) for column in columns])
    copies = [{} for _ in dicts]
    for name, column, on_cpu in zip(names, columns, joined, strict=True):
        parts = on_cpu.split([len(part) for part in column])
        for copy, part in zip(copies, parts, strict=True):
            copy[name] = part
    return copies


def image_of_each(counts: Sequence[int], device: torch.device | str) -> Tensor:
    """Return the image index of each element, (sum(counts),) int64, where image i has counts[i] elements."""
    repeats = torch.tensor(counts, dtype=torch.int64)
    indices = torch.arange(len(counts)).repeat_interleave(repeats)
    return send(indices, device)


def pad_rows(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Split the rows `values` (N, ...) by image, and pad them with zeros to (B, M, ...), faster than `pad_sequence`.

    Image i has the next counts[i] rows; M is the largest count.
    """
    most = max(counts, default=0)
    shape = (len(counts), most, *values.shape[1:])
    flat = values.new_zeros(shape).flatten(0, 1)  # (B * M, ...)
    flat[_padded_positions(counts, values.device)] = values
    return flat.view(shape)


def unpad_rows(padded: Tensor, counts: Sequence[int]) -> Tensor:
    """Undo `pad_rows` for the same counts: (B, M, ...) to (N, ...)."""
    return padded.flatten(0, 1)[_padded_positions(counts, padded.device)]


def _padded_positions(counts: Sequence[int], device: torch.device | str) -> Tensor:
    """Return the row of each of N values in the flat padded rows, (N,) int64.

    Counts of 2, 0 and 3 make rows 3 wide: image 0 has the rows 0 and 1, image 2 the rows 6, 7 and 8.
    """
    most = max(counts, default=0)
    positions = [torch.zeros(0, dtype=torch.int64)]  # for no images
    for i, count in enumerate(counts):
        first = i * most
        positions.append(torch.arange(first, first + count))
    return send(torch.cat(positions), device)


def rows_of(column: Tensor, rows: Tensor) -> Tensor:
    """Return the entries of `column` (B, N, ...) at the row indices `rows` (B, M) of each image: (B, M, ...)."""
    images = torch.arange(rows.shape[0], device=rows.device)
    return column[images[:, None], rows]


def first_rows(counts: Sequence[int], columns: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return one dict per image with the first counts[i] rows of image i from each column (B, K, ...)."""
    of_images = []
    for i, count in enumerate(counts):
        first = {name: column[i, :count] for name, column in columns.items()}
        of_images.append(first)
    return of_images


def kept_first(keep: Tensor, *columns: Tensor) -> list[Tensor]:
    """Move the rows of each image that the bool mask `keep` (B, K) selects to the front, in their order.

    Returns [the number of selected rows of each image, (B,)], followed by each column (B, K, ...) so rearranged.
    """
    ordered = keep.to(torch.uint8).sort(dim=1, descending=True, stable=True)  # stable: the kept rows in their order
    counts = keep.sum(dim=1)
    return [counts, *(rows_of(column, ordered.indices) for column in columns)]


def _byte_spans(tensors: Sequence[Tensor]) -> list[slice]:
    """Return the byte ranges of the tensors; each starts at a multiple of 8 bytes, the widest alignment.

    Tensors of 5, 16 and 3 bytes lie at 0:8, 8:24 and 24:32.
    """
    spans = []
    begin = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        end = begin + (size + 7) // 8 * 8
        spans.append(slice(begin, end))
        begin = end
    return spans
