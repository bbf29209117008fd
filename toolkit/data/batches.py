"""Collates samples into padded uint8 batches in worker processes; normalisation happens on the device.

Workers run ahead of training (prefetching), so `iter(loader)` asks the sampler for keys that training has not seen yet.
The sampler's `offset`, which a checkpoint stores, therefore moves only when the training loop calls
`sampler.advance...()` after a window is consumed. Keys carry the epoch, so persistent workers need not be told of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from toolkit.batch import Batch, Target
from toolkit.data.mixed_dataset import MixedDataset
from toolkit.data.sampling import EpochSampler, EvalSampler, SampleKey
from toolkit.errors import BadInput
from toolkit.signals import ignore_in_worker


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


class _Batches(Dataset):
    """Whole batches by their keys. BadInput becomes the item: raised in a worker it would arrive as a traceback."""

    def __init__(self, dataset: Dataset, stride: int, fixed_hw: tuple[int, int] | None):
        self.dataset, self.stride, self.fixed_hw = dataset, stride, fixed_hw

    def __getitem__(self, keys: list[SampleKey]) -> "Batch | _Failure":
        try:
            samples = [self.dataset[key] for key in keys]
        except BadInput as error:
            return _Failure(error.problems)
        if isinstance(self.dataset, MixedDataset):
            samples = self.dataset.finish(samples, keys)
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


