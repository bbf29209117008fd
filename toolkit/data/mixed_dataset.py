"""Samples made of several images, mixup and mosaic, up to a certain epoch: a function of (seed, epoch, index)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from toolkit.batch import Target
from toolkit.data.dataset import DetectionDataset, sample_generator
from toolkit.data.sampling import SampleKey
from toolkit.data.table import DetectionTable
from toolkit.data.transforms.geometry import recheck_boxes
from toolkit.data.transforms.mixup import draw_mixup_lambda, mixup
from toolkit.data.transforms.mosaic import draw_point, mosaic
from toolkit.errors import BadInput
from toolkit.step.length import StepBudget

ALL_EPOCHS = 2**62


class MixedDataset(torch.utils.data.Dataset):
    """A `DetectionDataset` whose samples are mosaics of four images, two images mixed, or both, before the transform.

    Args:
        table, transform, seed, cache_images: as `DetectionDataset`; the keys must carry a size.
        mixup: every sample is mixed with another image, by a share from Beta(1.5, 1.5); boxes carry theirs (`mixup`).
        mosaic: probability that a sample is a mosaic of its image and three others.

    The last epochs, as `plan` says, are not mixed: their samples are exactly those of `DetectionDataset`.
    """

    def __init__(
        self, table: DetectionTable, transform, seed: int = 0, cache_images: bool = False, *,
        mixup: bool = False, mosaic: float = 0.0,
    ):  # fmt: skip
        self._plain = DetectionDataset(table, _unchanged, seed, cache_images)
        self.table, self.transform, self.seed = table, transform, seed
        self.mixup, self.mosaic = mixup, mosaic
        self._mixed_epochs = torch.tensor(ALL_EPOCHS).share_memory_()

    def __len__(self) -> int:
        return len(self.table)

    def plan(self, plain: float, total_steps: int, steps_per_epoch: int, budget: StepBudget | None = None) -> None:
        """Takes the number of mixed epochs; arguments and rule as `mixed_epochs`.

        Workers may be running, if none was asked yet for an epoch that this decides: the number is in shared memory.
        """
        self._mixed_epochs.fill_(mixed_epochs(plain, total_steps, steps_per_epoch, budget))

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, Target]:
        generator = sample_generator(self.seed, key.epoch, key.index)
        image, target = self._image(key.index)
        if key.epoch < int(self._mixed_epochs):
            image, target = self._mixed(image, target, key, generator)
        image, target = self.transform(image, target, generator, key.size_hw)
        return image, recheck_boxes(image, target)

    def _mixed(self, image: Tensor, target: Target, key: SampleKey, generator: torch.Generator):
        if float(torch.rand((), generator=generator)) < self.mosaic:
            others = [self._image(self._other(key.index, generator)) for _ in range(3)]
            samples = [(image, target), *others]
            places = torch.randperm(4, generator=generator).tolist()
            image, mixed = mosaic([samples[i] for i in places], key.size_hw, draw_point(key.size_hw, generator))
            target = {**mixed, "image_id": target["image_id"]}
        if self.mixup:
            other = self._image(self._other(key.index, generator))
            image, target = mixup((image, target), other, draw_mixup_lambda(generator))
        return image, target

    def _other(self, index: int, generator: torch.Generator) -> int:
        """Another image, each as likely; the same where there is only one."""
        step = int(torch.randint(1, max(2, len(self)), (), generator=generator))
        return (index + step) % len(self)

    def _image(self, index: int) -> tuple[Tensor, Target]:
        return self._plain[SampleKey(0, index)]


def mixed_epochs(plain: float, total_steps: int, steps_per_epoch: int, budget: StepBudget | None = None) -> int:
    """How many epochs, from the first, are mixed.

    Args:
        plain: last epochs that are not; below 1: that share of the run's epochs.
        total_steps, steps_per_epoch: length of the run in optimizer steps.
        budget: the length follows from minutes; until it is known, and in the epoch in which it becomes known, there
            is mixing. That epoch is found again from the budget's state, so a resumed run decides the same.

    Raises BadInput: `plain` is negative.
    """
    if plain < 0:
        raise BadInput(f"data.plain_epochs is {plain}; expected the last epochs without mixing, 0 or more")
    if budget is not None and budget.total_steps is None:
        return ALL_EPOCHS
    epochs = -(-total_steps // steps_per_epoch)
    begun = 0 if budget is None else -(-budget.steps // steps_per_epoch)
    return max(begun, epochs - (int(plain) if plain >= 1 else round(plain * epochs)))


def mixed_dataset(*, mixup: bool = False, mosaic: float = 0.0) -> Callable[..., MixedDataset]:
    """What makes a `MixedDataset` of the arguments of a `DetectionDataset`.

    Raises BadInput: `mosaic` is no probability.
    """
    if not 0 <= mosaic <= 1:
        raise BadInput(f"data.mosaic is {mosaic}; expected a probability from 0 to 1")
    return partial(MixedDataset, mixup=mixup, mosaic=mosaic)


def _unchanged(image: Tensor, target: Target, generator: torch.Generator) -> tuple[Tensor, Target]:
    return image, target
