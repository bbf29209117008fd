"""From the name of a split to its batches: what every script does with its `data` settings."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

from toolkit.data import open_dataset
from toolkit.data.dataset import DetectionDataset
from toolkit.data.loaders import make_loader
from toolkit.data.photometric import PhotometricDistortion
from toolkit.data.samplers import EpochSampler, EvalSampler, aspect_ratio_groups
from toolkit.data.table import DetectionTable
from toolkit.data.transforms import (
    Compose,
    RandomFlip,
    ResizeShorter,
    Transform,
    detr_train_transform,
    eval_transform,
    square_transform,
)
from toolkit.data.variable_batches import VariableSizes
from toolkit.distributed import run_on_main, world
from toolkit.errors import BadInput
from toolkit.evaluation.coco import check_ground_truth


def open_split(source: str, listing: Path | None = None, **options) -> DetectionTable:
    """`open_dataset` on every rank, the main process first, so that one validates and the others open the cache.

    listing: file that what was left out or repaired is written to, one problem a line.
    """
    run_on_main(lambda: open_dataset(source, **options) and None)
    table = open_dataset(source, **options)
    if world()[0] == 0:
        boxes = table.num_boxes()
        print(f"{source}: {len(table)} images ({(boxes == 0).sum()} without objects), {boxes.sum()} boxes, "
              f"{len(table.categories)} classes", flush=True)  # fmt: skip
    if world()[0] == 0 and table.problems and listing is not None:
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{problem}\n" for problem in table.problems), encoding="utf-8")
        errors = sum(problem.severity == "error" for problem in table.problems)
        print(f"{source}: {errors} records left out, {len(table.problems) - errors} repaired or noted; see {listing}")
    return table


def open_splits(
    train: str,
    val: str,
    folder: Path,
    *,
    max_train_images: int | None = None,
    overfit_images: int = 0,
    **options,
) -> tuple[DetectionTable, DetectionTable]:
    """Training and validation data with the same classes; what was wrong with them is listed in `folder`.

    Args:
        max_train_images: use the first so many images of the training data.
        overfit_images: train on the first so many, and evaluate on them; 0: all, and `val`.
        options: those of `open_dataset`.
    """
    table = open_split(train, listing=folder / "data_problems_train.txt", **options)
    val_table = open_split(val, listing=folder / "data_problems_val.txt", **options)
    check_same_classes(table, val_table)
    table = table.head(max_train_images or len(table))
    if overfit_images:
        table = val_table = table.head(overfit_images)
    for note in check_ground_truth(val_table):
        if world()[0] == 0:
            print(note, flush=True)
    return table, val_table


def check_same_classes(train: DetectionTable, val: DetectionTable) -> None:
    """Raises BadInput when training and validation data do not have the same classes in the same order."""
    ours, theirs = [c.name for c in train.categories], [c.name for c in val.categories]
    if ours != theirs:
        raise BadInput(
            f"training data has {len(ours)} classes {ours}, validation data {len(theirs)} {theirs}: give both files "
            "the same categories in the same order"
        )


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
