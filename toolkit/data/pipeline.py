"""From the name of a split to its batches: what every script does with its `data` settings."""

from collections.abc import Callable, Sequence

import torch
from torch.utils.data import Dataset

from toolkit.data.batches import make_loader
from toolkit.data.dataset import DetectionDataset
from toolkit.data.sampling import EpochSampler, EvalSampler, aspect_ratio_groups
from toolkit.data.table import DetectionTable
from toolkit.data.transforms.geometry import (
    Compose,
    RandomFlip,
    ResizeShorter,
    Transform,
    detr_train_transform,
    eval_transform,
    square_transform,
)
from toolkit.data.transforms.photometric import PhotometricDistortion
from toolkit.data.variable_sizes import VariableSizes
from toolkit.distributed import world
from toolkit.errors import BadInput


def check_one_size(stride: int, sides: Sequence[int], scales: Sequence[int]) -> None:
    """For detectors that ignore padding: raises BadInput for `scales`, or a side in pixels that is no multiple of
    `stride`, whose images the loader would pad."""
    faults = ["the detector needs images of one size: leave data.scales empty, set data.image_size"] if scales else []
    faults += [
        f"images of side {side} would be padded, which the detector ignores: give a multiple of {stride}, "
        f"such as {max(1, round(side / stride)) * stride}"
        for side in sides
        if side % stride
    ]
    if faults:
        raise BadInput(faults)


def train_transform(image_size: int, scales: list[int], max_size: int, flip: bool, photometric: bool) -> Transform:
    """Training augmentation: a square of `image_size`; one scale: the shorter side; several: DETR's recipe; pixels."""
    probability = 0.5 if flip else 0.0
    if not scales:
        geometry = square_transform(image_size, probability)
    elif len(scales) == 1:  # that of Faster R-CNN, which crops nothing
        geometry = Compose((RandomFlip(probability), ResizeShorter(tuple(scales), max_size)))
    else:
        geometry = detr_train_transform(scales, max_size, flip_probability=probability)
    return Compose((geometry, PhotometricDistortion())) if photometric else geometry


def val_transform(image_size: int, scales: list[int], max_size: int) -> Transform:
    """What validation images go through; nothing random."""
    return eval_transform(scales[-1], max_size) if scales else square_transform(image_size)


def processor_size(image_size: int, scales: list[int], max_size: int) -> dict[str, int]:
    """What validation images are resized to, as transformers' image processors spell it; pixels."""
    if scales:
        return {"shortest_edge": scales[-1], "longest_edge": max_size}
    return {"height": image_size, "width": image_size}


def training_loader(
    table: DetectionTable,
    transform: Transform,
    *,
    batch_size_per_device: int,
    workers: int,
    seed: int,
    stride: int,
    by_aspect_ratio: bool = False,
    cache_images: bool = False,
    shuffle: bool = True,
    sizes: VariableSizes | None = None,
    make_dataset: Callable[..., Dataset] = DetectionDataset,
) -> tuple[EpochSampler, torch.utils.data.DataLoader]:
    """This rank's sampler and loader of the training data; with `sizes` the transform is called with a size too."""
    rank, world_size = world()
    groups = aspect_ratio_groups(table.sizes_hw()) if by_aspect_ratio else None
    sampler = EpochSampler(len(table), batch_size_per_device, rank, world_size, seed, groups, shuffle, sizes)
    dataset = make_dataset(table, transform, seed, cache_images)
    return sampler, make_loader(dataset, sampler, workers, stride, pin=torch.cuda.is_available())


def validation_loader(
    table: DetectionTable, transform: Transform, *, batch_size_per_device: int, workers: int, stride: int
) -> torch.utils.data.DataLoader:
    """This rank's loader of the validation data."""
    sampler = EvalSampler(len(table), batch_size_per_device, *world())
    return make_loader(DetectionDataset(table, transform), sampler, workers, stride, pin=torch.cuda.is_available())
