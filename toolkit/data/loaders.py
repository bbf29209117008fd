"""Samples to padded uint8 batches, through worker processes; normalised on the device the batch arrives on.

Workers run ahead of training (prefetching), so `iter(loader)` asks the sampler for keys that training has not seen yet.
The sampler's `offset`, which a checkpoint stores, therefore moves only when the training loop calls
`sampler.advance...()` after a window is consumed. Keys carry the epoch, so persistent workers need not be told of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from toolkit.data.samplers import EpochSampler, EvalSampler, SampleKey
from toolkit.data.transforms import Target
from toolkit.errors import BadInput
from toolkit.signals import ignore_in_worker


@dataclass
class Batch:
    """Images of one micro-batch on one rank.

    images: uint8 (B, 3, H, W), channels-last in memory, 0 beyond each image's size (padding is right and below).
    sizes: (B, 2) int64 (h, w) of each image without its padding.
    targets: one dict per image, see `toolkit.data.dataset.row_target`. B = 0 happens in evaluation on several ranks.
    """

    images: Tensor
    sizes: Tensor
    targets: list[Target]

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The batch on `device`; the targets' small tensors travel together, one copy per dtype."""
        return Batch(
            self.images.to(device, non_blocking=non_blocking),
            self.sizes.to(device, non_blocking=non_blocking),
            _move_targets(self.targets, torch.device(device), non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """Images and sizes in page-locked memory; called by the DataLoader."""
        return Batch(self.images.pin_memory(), self.sizes.pin_memory(), self.targets)

    def __getstate__(self) -> dict:
        # A worker sends each tensor as a shared-memory file of its own: hundreds per batch with targets, which is slow
        # and runs into the limit of open files. As NumPy arrays the small ones travel inside the message itself.
        targets = [{name: _as_array(value) for name, value in target.items()} for target in self.targets]
        return {"images": self.images, "sizes": _as_array(self.sizes), "targets": targets}

    def __setstate__(self, state: dict) -> None:
        self.images, self.sizes = state["images"], _as_tensor(state["sizes"])
        self.targets = [{name: _as_tensor(value) for name, value in target.items()} for target in state["targets"]]


def collate(
    samples: Sequence[tuple[Tensor, Target]], stride: int = 1, fixed_hw: tuple[int, int] | None = None
) -> Batch:
    """Pads images (uint8 (3, h, w)) on the right and below with zeros to the largest height and width among them.

    stride: height and width of the batch are rounded up to a multiple of it.
    fixed_hw: every image must have this size already; ValueError naming those that have not. For models that ignore a
        pixel mask.

    No samples make a batch of B = 0, one stride (or `fixed_hw`) high and wide.
    """
    images, targets = [image for image, _ in samples], [target for _, target in samples]
    sizes = torch.tensor([image.shape[-2:] for image in images], dtype=torch.int64).reshape(-1, 2)
    if fixed_hw is not None:
        _check_fixed(images, targets, tuple(fixed_hw))
        height, width = fixed_hw
    else:
        largest = sizes.amax(0).tolist() if images else (1, 1)
        height, width = (-(-side // stride) * stride for side in largest)
    # (B, H, W, 3) in memory, like the images: each row is then copied in one piece
    padded = torch.zeros((len(images), height, width, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    for into, image in zip(padded, images, strict=True):
        into[:, : image.shape[1], : image.shape[2]] = image
    return Batch(padded, sizes, targets)


def make_loader(
    dataset: Dataset,
    sampler: EpochSampler | EvalSampler,
    workers: int = 0,
    stride: int = 1,
    fixed_hw: tuple[int, int] | None = None,
    pin: bool = False,
) -> DataLoader:
    """Loader over the sampler's batches, in the sampler's order.

    workers: processes (0: load in this one); they stay alive between epochs and use one thread each.
    pin: batches arrive in page-locked memory, for asynchronous copies to a GPU.

    A sample that raises BadInput in a worker raises the same BadInput here, naming file and image id.
    """
    return _Loader(
        _Batches(dataset, stride, fixed_hw),
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
    """The micro-batches of one optimizer step at a time; the epoch's last window may be shorter."""
    batches = iter(loader)
    while window := list(islice(batches, accumulation_steps)):
        yield window


def pixel_mask(sizes: Tensor, hw: tuple[int, int]) -> Tensor:
    """bool (B, H, W): True inside each image's `sizes` (B, 2) h, w; on the device of `sizes`."""
    rows, columns = (torch.arange(side, device=sizes.device) for side in hw)
    return (rows[:, None] < sizes[:, 0, None, None]) & (columns < sizes[:, 1, None, None])


def normalize_images(
    images: Tensor, sizes: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """(uint8 / 255 - mean) / std in float32, then zero outside `sizes`: the padding of DETR, where zero is the mean.

    images (B, 3, H, W) uint8 and sizes (B, 2) on one device -> (B, 3, H, W) contiguous, in `dtype`.
    """
    # Planes are made of the bytes, before they are four times as many.
    normalized = images.contiguous().to(torch.float32).div_(255)
    for plane, channel_mean, channel_std in zip(normalized.unbind(1), mean, std, strict=True):
        plane.sub_(channel_mean).div_(channel_std)  # plain numbers: a tensor of them would make the host wait for a GPU
    return normalized.masked_fill_(~pixel_mask(sizes, images.shape[-2:])[:, None], 0).to(dtype)


class _Batches(Dataset):
    """Whole batches by their keys. BadInput becomes the item: raised in a worker it would arrive as a traceback."""

    def __init__(self, dataset: Dataset, stride: int, fixed_hw: tuple[int, int] | None):
        self.dataset, self.stride, self.fixed_hw = dataset, stride, fixed_hw

    def __getitem__(self, keys: list[SampleKey]) -> "Batch | _Failure":
        try:
            samples = [self.dataset[key] for key in keys]
        except BadInput as error:
            return _Failure(error.problems)
        return collate(samples, self.stride, self.fixed_hw)


@dataclass(frozen=True)
class _Failure:
    problems: list[str]

    def raised(self) -> None:
        raise BadInput(self.problems)


class _Loader(DataLoader):
    """DataLoader that raises the failures its workers report."""

    def __iter__(self) -> Iterator[Batch]:
        items = super().__iter__()  # now, so that the sampler is asked where it stands when iter() is called
        return (item.raised() if isinstance(item, _Failure) else item for item in items)


def _as_array(value: object) -> object:
    return value.numpy() if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _as_tensor(value: object) -> object:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _check_fixed(images: list[Tensor], targets: list[Target], fixed_hw: tuple[int, int]) -> None:
    others = [
        f"{target['image_id']} is {tuple(image.shape[-2:])}"
        for image, target in zip(images, targets, strict=True)
        if tuple(image.shape[-2:]) != fixed_hw
    ]
    if others:
        raise ValueError(
            f"this model needs unpadded images of (h, w) = {fixed_hw}, but image id {', image id '.join(others)}: "
            "use a transform that gives every image this size, such as square_transform"
        )


def _move_targets(targets: list[Target], device: torch.device, non_blocking: bool) -> list[Target]:
    """Targets with their tensors on `device`: all tensors of a dtype go there as one, and are cut apart there."""
    flat = [(i, name, value) for i, target in enumerate(targets) for name, value in target.items()
            if isinstance(value, Tensor)]  # fmt: skip
    moved = [dict(target) for target in targets]
    for dtype in dict.fromkeys(value.dtype for _, _, value in flat):
        of_dtype = [entry for entry in flat if entry[2].dtype == dtype]
        joined = torch.cat([value.reshape(-1) for _, _, value in of_dtype])
        if device.type == "cuda" and joined.device.type == "cpu":
            joined = joined.pin_memory()  # or the copy would wait for everything queued on the GPU
        parts = joined.to(device, non_blocking=non_blocking).split([value.numel() for _, _, value in of_dtype])
        for (i, name, value), part in zip(of_dtype, parts, strict=True):
            moved[i][name] = part.view(value.shape)
    return moved
