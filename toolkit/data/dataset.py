"""Data sets that turn rows of the table into augmented samples, a deterministic function of (seed, epoch, index).

Samples may be made of several images, by mixup and mosaic, up to a given epoch.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.base.batch import Target
from toolkit.base.errors import BadInput
from toolkit.base.masks import Masks
from toolkit.data.decoding import ImageError
from toolkit.data.sampling import SampleKey
from toolkit.data.table import DetectionTable
from toolkit.data.transforms.geometry import (
    Sample,
    Size,
    Transform,
    draw_masks,
    mirrored_predicates,
    recheck_boxes,
    resize_target,
)
from toolkit.data.transforms.mixing import draw_mixup_lambda, draw_point, mix_batch, mixup, mosaic

ALL_EPOCHS = 2**62


def sample_generator(seed: int, epoch: int, index: int, turn: int = 0) -> torch.Generator:
    """Return a generator seeded by 64 bits of the hash of these numbers, so that neighbouring samples are independent.

    index: of the sample in its data set. turn: how often the image came before in this epoch; 0 at first.
    """
    text = f"{seed} {epoch} {index} {turn}" if turn else f"{seed} {epoch} {index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    hashed = int.from_bytes(digest, "little")
    return torch.Generator().manual_seed(hashed)


def row_target(row: dict, size_hw: tuple[int, int], masks: bool = False) -> Target:
    """Return the target of a table row, for its image of `size_hw` as the file has it.

    For N boxes and R relations a target has image_id; boxes (N, 4) float32 xyxy; labels (N,) int64; area (N,) float32;
    iscrowd (N,) int64; relations (R, 3) int64 subject, object, predicate; orig_size and size (2,) int64 (h, w). For
    tables with attributes also attributes (N, A) int64: up to A ids from 1 for each box, padded with 0.

    masks: the target also has `masks`, the `toolkit.base.masks.Masks` of the N objects; the table must have been read
        with masks.
    """
    objects = {name: torch.from_numpy(values) for name, values in row["objects"].items()}
    ends = [row["relations"][name] for name in ("subject", "object", "predicate")]
    target = {
        "image_id": row["image_id"],
        "boxes": objects["bbox"],
        "labels": objects["category"],
        "area": objects["area"],
        "iscrowd": objects["iscrowd"],
        "relations": torch.from_numpy(np.stack(ends, axis=1)),
        "orig_size": torch.tensor(size_hw),
        "size": torch.tensor(size_hw),
    }
    if "attributes" in objects:
        target["attributes"] = objects["attributes"]
    if masks:
        height, width = size_hw
        whole = Masks.of(row["masks"])
        target["masks"] = whole.cut(0, 0, width, height)  # what lies outside must not show on a larger canvas
    return target


class DetectionDataset(torch.utils.data.Dataset):
    """Samples of a table: `dataset[SampleKey(epoch, index)]` is (image uint8 (3, H, W), target).

    Args:
        table: the images and their boxes. If its sets do not label all classes, targets have `labelled` (classes,)
            bool.
        transform: `(image, target, generator) -> (image, target)`, see `toolkit.data.transforms.geometry`. If a key
            carries a size (`toolkit.data.sampling.VariableSizes`), the transform gets this size (h, w) as one more
            argument.
        seed: the augmentation depends only on the seed and the key of the sample, not on workers or resuming.
        cache_images: decode every image now and keep it as uint8; for sets of a few thousand small images. Workers
            that are forked share the memory.
        mirrored: pairs of predicates that change places in a mirrored picture, see `mirrored_predicates`.
        least_size: function from the size (h, w) of an image to the size below which it is not decoded, such as
            `toolkit.data.least_size.LeastSize`; large JPEGs are then decoded at a reduced scale. None: all images are
            decoded whole.
        masks: targets have `masks` (N, H, W) uint8, drawn after all transforms in the size of the image, see
            `draw_masks`; the table must have been read with masks.
        boxes_from_masks: boxes are the tight boxes of these masks, also where targets have no `masks`.

    Raises BadInput naming file and image id when an image cannot be decoded.
    """

    def __init__(
        self,
        table: DetectionTable,
        transform: Transform,
        seed: int = 0,
        cache_images: bool = False,
        mirrored: Mapping[str, str] | None = None,
        least_size: Callable[[Size], Size] | None = None,
        masks: bool = False,
        boxes_from_masks: bool = False,
    ):
        self._mirrored = None
        if table.predicates or mirrored:
            self._mirrored = mirrored_predicates(table.predicates, mirrored)
        self.table = table
        self.transform = transform
        self.seed = seed
        self.least_size = least_size
        self.masks = masks
        self.boxes_from_masks = boxes_from_masks
        self._cache = None
        if cache_images:
            self._cache = [self._decode(table.row(i)) for i in range(len(table))]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, Target]:
        generator = sample_generator(self.seed, key.epoch, key.index, key.turn)
        image, target = self._read(key.index)
        return self._augmented(image, target, key.size_hw, generator, self.transform)

    def _read(self, index: int) -> tuple[Tensor, Target]:
        row = self.table.row(index)
        image = self._decode(row) if self._cache is None else self._cache[index]
        file_hw = (row["height"], row["width"])
        decoded_hw = tuple(image.shape[-2:])
        target = row_target(row, file_hw, self.masks or self.boxes_from_masks)
        if decoded_hw != file_hw:
            target = resize_target(target, file_hw, decoded_hw)
        if self.table.labelled_classes is not None:
            labelled = self.table.labelled_classes[row["set"]]
            target["labelled"] = torch.from_numpy(labelled.copy())
        return image, target

    def _augmented(self, image: Tensor, target: Target, size_hw, generator, transform) -> tuple[Tensor, Target]:
        if self._mirrored is not None:
            target = {**target, "mirrored_predicates": self._mirrored}
        size = () if size_hw is None else (size_hw,)
        image, target = transform(image, target, generator, *size)
        target.pop("mirrored_predicates", None)
        target = recheck_boxes(image, target)
        if "masks" in target:
            target = draw_masks(target, self.boxes_from_masks)
            if not self.masks:
                del target["masks"]
                target.pop("has_mask", None)
        return image, target

    def _decode(self, row: dict) -> Tensor:
        least_hw = self.least_size and self.least_size((row["height"], row["width"]))
        try:
            return self.table.decode_image(row, least_hw)
        except ImageError as error:
            raise BadInput(f"{row['file_name']}: image id {row['image_id']} cannot be read: {error}") from error


class MixedDataset(DetectionDataset):
    """A `DetectionDataset` whose samples are mosaics of four images, two images mixed, or both, before the transform.

    Args:
        table, transform, seed, cache_images, mirrored, least_size, masks, boxes_from_masks: as `DetectionDataset`.
        mixup: whether every sample is mixed with another image, by a share from Beta(1.5, 1.5); the entry `mixup` of
            the target then has the share of the image of each box.
        mosaic: probability that a sample is a mosaic of its image and three others, on a canvas of the size that its
            key carries.
        batch_mixup, copy_blend: probabilities of `mix_batch`, which `finish` applies to whole batches.
        plain: the transform of the last epochs; None: `transform` is used there too.
        plain_hw: the size (h, w) of the images of the last epochs, in place of the size that keys carry; None: the size
            in the key.

    The last epochs, whose number `plan` sets, are plain: images are not mixed, and the samples are exactly those of
    `DetectionDataset`. In a mixed epoch the first random number of each sample decides whether it is a mosaic, even if
    `mosaic` is 0.

    Raises BadInput: `mosaic` is not a probability.
    """

    def __init__(
        self,
        *args,
        mixup=False,
        mosaic=0.0,
        batch_mixup=0.0,
        copy_blend=0.0,
        plain=None,
        plain_hw=None,
        **options,
    ):
        if not 0 <= mosaic <= 1:
            raise BadInput(f"data.mosaic is {mosaic}; expected a probability from 0 to 1")
        super().__init__(*args, **options)
        self.mixup = mixup
        self.mosaic = mosaic
        self.plain = plain
        self.plain_hw = plain_hw
        self.batch_mixup = batch_mixup
        self.copy_blend = copy_blend
        self._mixed_epochs = torch.tensor(ALL_EPOCHS).share_memory_()

    @property
    def has_plain_epochs(self) -> bool:
        """Whether the last epochs differ from the others, so that `plan` must be called."""
        mixes = (self.mixup, self.mosaic, self.batch_mixup, self.copy_blend)
        return any((*mixes, self.plain, self.plain_hw))

    def plan(self, plain_epochs: float, total_steps: int, steps_per_epoch: int, fixed_at_step: int | None = 0) -> None:
        """Set the number of mixed epochs; arguments and rule as in `mixed_epochs`.

        The number is in shared memory, so workers may be running, but none may have begun an epoch that it affects.
        """
        count = mixed_epochs(plain_epochs, total_steps, steps_per_epoch, fixed_at_step)
        self._mixed_epochs.fill_(count)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, Target]:
        generator = sample_generator(self.seed, key.epoch, key.index, key.turn)
        image, target = self._checked(key.index)
        if key.epoch < int(self._mixed_epochs):
            image, target = self._mixed(image, target, key, generator)
            return self._augmented(image, target, key.size_hw, generator, self.transform)
        size_hw = self.plain_hw if self.plain_hw and key.size_hw else key.size_hw
        return self._augmented(image, target, size_hw, generator, self.plain or self.transform)

    def finish(self, samples: list[Sample], keys: Sequence[SampleKey]) -> list[Sample]:
        """Return the samples of a batch mixed with each other by `mix_batch`; in plain epochs return them unchanged.

        The random draws are a function of the seed and the first key.
        """
        if not keys or not (self.batch_mixup or self.copy_blend):
            return samples
        first = keys[0]
        if first.epoch >= int(self._mixed_epochs):
            return samples
        generator = sample_generator(self.seed, first.epoch, first.index, -1 - first.turn)  # none of a sample's own
        return mix_batch(samples, self.batch_mixup, self.copy_blend, generator)

    def _mixed(self, image: Tensor, target: Target, key: SampleKey, generator: torch.Generator):
        if float(torch.rand((), generator=generator)) < self.mosaic:
            samples = [(image, target)]
            for _ in range(3):
                samples.append(self._checked(self._other(key.index, generator)))
            places = torch.randperm(4, generator=generator).tolist()
            point_yx = draw_point(key.size_hw, generator)
            image, mixed = mosaic([samples[i] for i in places], key.size_hw, point_yx)
            target = {**mixed, "image_id": target["image_id"]}
        if self.mixup:
            other = self._checked(self._other(key.index, generator))
            image, target = mixup((image, target), other, draw_mixup_lambda(generator))
        return image, target

    def _other(self, index: int, generator: torch.Generator) -> int:
        """Draw the index of another image uniformly; `index` itself if there is only one."""
        step = int(torch.randint(1, max(2, len(self)), (), generator=generator))
        return (index + step) % len(self)

    def _checked(self, index: int) -> tuple[Tensor, Target]:
        image, target = self._read(index)
        return image, recheck_boxes(image, target)


def mixed_epochs(plain_epochs: float, total_steps: int, steps_per_epoch: int, fixed_at_step: int | None = 0) -> int:
    """Return how many epochs, counted from the first, are mixed.

    Args:
        plain_epochs: number of last epochs that are not mixed; below 1: a share of the run's epochs.
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
    plain = int(plain_epochs) if plain_epochs >= 1 else round(plain_epochs * epochs)
    return max(begun, epochs - plain)
