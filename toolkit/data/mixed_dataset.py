"""Mixup and mosaic, samples made of several images, up to a given epoch; a function of (seed, epoch, index)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.batch import Target
from toolkit.data.dataset import DetectionDataset, sample_generator
from toolkit.data.sampling import SampleKey
from toolkit.data.table import DetectionTable
from toolkit.data.transforms.geometry import Sample, recheck_boxes
from toolkit.data.transforms.mixing import draw_mixup_lambda, draw_point, mix_batch, mixup, mosaic
from toolkit.errors import BadInput

ALL_EPOCHS = 2**62


class MixedDataset(DetectionDataset):
    """A `DetectionDataset` whose samples are mosaics of four images, two images mixed, or both, before the transform.

    Args:
        table, transform, seed, cache_images, mirrored: as `DetectionDataset`.
        mixup: every sample is mixed with another image, by a share from Beta(1.5, 1.5); boxes carry theirs (`mixup`).
        mosaic: probability that a sample is a mosaic of its image and three others, on a canvas of the size that its
            key carries.
        batch_mixup, copy_blend: probabilities of `mix_batch`, which `finish` gives whole batches to.
        plain: what the last epochs go through instead of `transform`; None: that too.
        plain_hw: size of the images of the last epochs, where keys carry one; None: as the key says.

    The last epochs, as `plan` says, are plain: not mixed, their samples exactly those of `DetectionDataset`. In a mixed
    epoch each sample draws whether it is a mosaic, also where that is never so: the transform's draws then follow.

    Raises BadInput: `mosaic` is no probability.
    """

    def __init__(
        self, table: DetectionTable, transform, seed: int = 0, cache_images: bool = False, *,
        mixup: bool = False, mosaic: float = 0.0, batch_mixup: float = 0.0, copy_blend: float = 0.0, plain=None,
        plain_hw: tuple[int, int] | None = None, mirrored: Mapping[str, str] | None = None,
    ):  # fmt: skip
        if not 0 <= mosaic <= 1:
            raise BadInput(f"data.mosaic is {mosaic}; expected a probability from 0 to 1")
        super().__init__(table, transform, seed, cache_images, mirrored)
        self.mixup, self.mosaic, self.plain, self.plain_hw = mixup, mosaic, plain, plain_hw
        self.batch_mixup, self.copy_blend = batch_mixup, copy_blend
        self._mixed_epochs = torch.tensor(ALL_EPOCHS).share_memory_()

    @property
    def has_plain_epochs(self) -> bool:
        """Whether the last epochs differ from the others, so that `plan` must be told of them."""
        mixes = self.mixup or self.mosaic or self.batch_mixup or self.copy_blend
        return bool(mixes or self.plain is not None or self.plain_hw is not None)

    def plan(self, plain_epochs: float, total_steps: int, steps_per_epoch: int, fixed_at_step: int | None = 0) -> None:
        """Takes the number of mixed epochs; arguments and rule as `mixed_epochs`.

        Workers may be running, if none was asked yet for an epoch that this decides: the number is in shared memory.
        """
        self._mixed_epochs.fill_(mixed_epochs(plain_epochs, total_steps, steps_per_epoch, fixed_at_step))

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, Target]:
        generator = sample_generator(self.seed, key.epoch, key.index, key.turn)
        image, target = self._checked(key.index)
        if key.epoch < int(self._mixed_epochs):
            return self._augmented(*self._mixed(image, target, key, generator), key, generator)
        if self.plain_hw is not None and key.size_hw is not None:
            key = key._replace(size_hw=self.plain_hw)
        return self._augmented(image, target, key, generator, self.plain)

    def finish(self, samples: list[Sample], keys: Sequence[SampleKey]) -> list[Sample]:
        """The samples of a batch mixed with each other, in mixed epochs: a function of the seed and the first key."""
        first = keys[0] if keys else None
        if first is None or not (self.batch_mixup or self.copy_blend) or first.epoch >= int(self._mixed_epochs):
            return samples
        generator = sample_generator(self.seed, first.epoch, first.index, -1 - first.turn)  # none of a sample's own
        return mix_batch(samples, self.batch_mixup, self.copy_blend, generator)

    def _mixed(self, image: Tensor, target: Target, key: SampleKey, generator: torch.Generator):
        if float(torch.rand((), generator=generator)) < self.mosaic:
            others = [self._checked(self._other(key.index, generator)) for _ in range(3)]
            samples = [(image, target), *others]
            places = torch.randperm(4, generator=generator).tolist()
            image, mixed = mosaic([samples[i] for i in places], key.size_hw, draw_point(key.size_hw, generator))
            target = {**mixed, "image_id": target["image_id"]}
        if self.mixup:
            other = self._checked(self._other(key.index, generator))
            image, target = mixup((image, target), other, draw_mixup_lambda(generator))
        return image, target

    def _other(self, index: int, generator: torch.Generator) -> int:
        """Another image, each as likely; the same where there is only one."""
        step = int(torch.randint(1, max(2, len(self)), (), generator=generator))
        return (index + step) % len(self)

    def _checked(self, index: int) -> tuple[Tensor, Target]:
        image, target = self._read(index)
        return image, recheck_boxes(image, target)


def mixed_epochs(plain_epochs: float, total_steps: int, steps_per_epoch: int, fixed_at_step: int | None = 0) -> int:
    """How many epochs, from the first, are mixed.

    Args:
        plain_epochs: last epochs that are not; below 1: that share of the run's epochs.
        total_steps, steps_per_epoch: length of the run in optimizer steps.
        fixed_at_step: optimizer steps after which the length became known. 0: from the start; None: it is not known
            yet, so all epochs are mixed. The epoch in which it becomes known is still mixed, so that a resumed run,
            which knows the length earlier, decides the same.

    Raises BadInput: `plain_epochs` is negative.
    """
    if plain_epochs < 0:
        raise BadInput(f"data.plain_epochs is {plain_epochs}; expected the last epochs without mixing, 0 or more")
    if fixed_at_step is None:
        return ALL_EPOCHS
    epochs = -(-total_steps // steps_per_epoch)
    begun = -(-fixed_at_step // steps_per_epoch)
    return max(begun, epochs - (int(plain_epochs) if plain_epochs >= 1 else round(plain_epochs * epochs)))
