"""From the name of a split to its batches, as the `data` settings of every script describe them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from toolkit.data.batches import make_loader
from toolkit.data.dataset import DetectionDataset
from toolkit.data.image_sources import ImageSources, Shards
from toolkit.data.mixed_dataset import MixedDataset
from toolkit.data.sampling import EpochSampler, EvalSampler, aspect_ratio_groups, repeat_factors
from toolkit.data.table import DetectionTable
from toolkit.data.transforms.geometry import (
    Compose,
    RandomFlip,
    ResizeShorter,
    ThenResize,
    Transform,
    detr_train_transform,
    eval_transform,
    square_transform,
)
from toolkit.data.transforms.photometric import PhotometricDistortion
from toolkit.data.transforms.policy import Before, policy_of
from toolkit.data.transforms.ssd import SeenRegion, SsdTransform
from toolkit.data.transforms.yolov3 import yolov3_transform
from toolkit.data.variable_sizes import VariableSizes
from toolkit.distributed import world
from toolkit.errors import BadInput

RECIPES = ("detr", "ssd", "yolov3")


def check_one_size(stride: int, sides: Sequence[int], scales: Sequence[int]) -> None:
    """For detectors that ignore padding: raises BadInput for `scales`, or a side in pixels that is no multiple of
    `stride`, whose images the loader would pad."""
    faults = ["the detector needs images of one size: leave data.scales empty, set data.image_size"] if scales else []
    faults += [
        f"images of side {side} (data.image_size, data.multi_scale) would be padded, which the detector ignores: give "
        f"a multiple of {stride}, such as {max(1, round(side / stride)) * stride}"
        for side in sides
        if side % stride
    ]
    if faults:
        raise BadInput(faults)


def train_transform(
    *,
    recipe: str,
    image_size: int,
    scales: Sequence[int] = (),
    max_size: int = 1333,
    random_crop: bool = False,
    flip: bool = True,
    photometric: bool = False,
    zoom_out: float = 1.0,
    iou_crop: bool = False,
    augment: str | Sequence[Any] | None = None,
) -> Transform:
    """Training augmentation, `(image, target, generator[, size_hw]) -> (image, target)`; see docs/data.md.

    Args:
        recipe: one of `RECIPES`: whose definition and order of photometric, zoom_out and iou_crop, and whose
            interpolation. detr: zoom out, crop, flip, resize, colours; ssd: the same in one resize, then flip and
            colours; yolov3: colours, zoom out, crop, resize, flip.
        image_size: side in pixels of the square that images become, where `scales` is empty and the batch has no size
            of its own.
        scales, max_size: lengths in pixels of the shorter side, one drawn for each image, and the longest side.
        random_crop: with probability 1/2 DETR's crop of 384 to 600 px between two resizes; needs `scales`.
        flip: half of the images are mirrored left to right.
        photometric: colours are varied.
        zoom_out: half of the images lie on a canvas of up to so many times their sides; 1: none.
        iou_crop: a region that overlaps the boxes by an IoU that is drawn.
        augment: transforms that come before all of these, see `toolkit.data.transforms.policy`.

    The ssd and yolov3 recipes must be called with a size, as the keys of `training_sizes` carry it.

    Raises BadInput naming each setting of `data` that cannot be, or cannot go with another.
    """
    _check_transform(recipe, scales, random_crop, zoom_out)
    if augment:
        own = {"scales": scales, "max_size": max_size, "random_crop": random_crop, "flip": flip,
               "photometric": photometric, "zoom_out": zoom_out, "iou_crop": iou_crop}  # fmt: skip
        return Before(policy_of(augment), train_transform(recipe=recipe, image_size=image_size, **own))
    if recipe == "ssd":
        return SsdTransform(zoom_out=zoom_out, iou_crop=iou_crop, flip=flip, photometric=photometric)
    if recipe == "yolov3":
        return yolov3_transform(photometric=photometric, zoom_out=zoom_out, iou_crop=iou_crop, flip=flip)
    probability = 0.5 if flip else 0.0
    first = (SeenRegion(zoom_out, iou_crop),) if zoom_out > 1 or iou_crop else ()
    colours = (PhotometricDistortion(),) if photometric else ()
    if not scales:
        before = Compose((*first, *((RandomFlip(probability),) if flip else ())))
        return ThenResize(before, Compose(colours), (image_size, image_size))
    if random_crop:
        geometry = detr_train_transform(scales, max_size, flip_probability=probability)
    else:  # Faster R-CNN's, which crops nothing
        geometry = Compose((RandomFlip(probability), ResizeShorter(tuple(scales), max_size)))
    return Compose((*first, geometry, *colours))


def training_sizes(
    *,
    recipe: str,
    image_size: int,
    scales: Sequence[int] = (),
    multi_scale: Sequence[int] = (),
    multi_scale_every: int = 1,
    multi_scale_pixels: bool = False,
    mosaic: float = 0.0,
    batch_mixup: float = 0.0,
    copy_blend: float = 0.0,
) -> VariableSizes | None:
    """The squares that training images become, batch by batch; None: every image as the transform alone decides.

    Args:
        recipe, image_size, scales: as `train_transform`; the recipes ssd and yolov3, and mosaics, always have a size.
        multi_scale: sides in pixels, one drawn for every `multi_scale_every` micro-batches; empty: `image_size`.
        multi_scale_pixels: a batch has so many images that its pixels are those of `batch_size_per_device` images of
            `image_size` (CVNets); else the batch size is that of every side (YOLO).
        mosaic, batch_mixup, copy_blend: probabilities that a sample, or a batch, is put together of others.

    Raises BadInput naming each setting of `data` that cannot be, or cannot go with another.
    """
    faults = []
    if min([image_size, *multi_scale, multi_scale_every]) < 1:
        faults.append(f"data.image_size is {image_size}, data.multi_scale {list(multi_scale)}, data.multi_scale_every "
                      f"{multi_scale_every}: expected sides of at least one pixel and at least one batch")  # fmt: skip
    faults += [
        f"data.{name} makes all images of a batch one size, which data.scales does not: leave data.scales empty and "
        f"set data.image_size, or {off}"
        for name, given, off in (
            ("multi_scale", multi_scale, "leave data.multi_scale empty"), ("mosaic", mosaic, "set data.mosaic to 0"),
            ("batch_mixup", batch_mixup, "set data.batch_mixup to 0"),
            ("copy_blend", copy_blend, "set data.copy_blend to 0"),
        )
        if given and scales
    ]  # fmt: skip
    if faults:
        raise BadInput(faults)
    if recipe == "detr" and not multi_scale and not mosaic:
        return None
    sides = tuple((side, side) for side in multi_scale or (image_size,))
    base_hw = (image_size, image_size) if multi_scale and multi_scale_pixels else None
    return VariableSizes(sides, multi_scale_every, base_hw)


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
    recipe: str = "detr",
    mixup: bool = False,
    mosaic: float = 0.0,
    batch_mixup: float = 0.0,
    copy_blend: float = 0.0,
    plain: Transform | None = None,
    plain_hw: tuple[int, int] | None = None,
    repeat_factor: float = 0.0,
    predicate_repeat_factor: float = 0.0,
    mirrored: Mapping[str, str] | None = None,
    pin: bool = False,
) -> tuple[EpochSampler, torch.utils.data.DataLoader]:
    """This rank's sampler and loader of the training data.

    Args:
        sizes: as `training_sizes` says; the transform is then called with a size too.
        recipe: yolov3: a `MixedDataset` also without mixup and mosaic, as its samples draw whether they are mosaics.
        mixup, mosaic, batch_mixup, copy_blend, plain, plain_hw: as `MixedDataset`, which is then
            `loader.dataset.dataset`; tell its `plan` of every epoch.
        repeat_factor: threshold of `repeat_factors`; 0: every image once. predicate_repeat_factor: the same of
            predicates; an image has the larger of both factors.
        mirrored: as `mirrored_predicates`, for transforms that mirror. pin: as in `make_loader`.

    Raises BadInput: a mosaic without `sizes`, or groups of aspect ratios with a number of images that follows the size.
    """
    if mosaic and sizes is None:
        raise BadInput("data.mosaic needs images of one size: set data.image_size, leave data.scales empty")
    rank, world_size = world()
    groups, blocks = aspect_ratio_groups(table.sizes_hw()) if by_aspect_ratio else None, blocks_of(table)
    if blocks is not None:
        _check_streamed({"group_by_aspect_ratio": by_aspect_ratio, "mixup": mixup, "mosaic": mosaic,
                         "multi_scale_pixels": sizes is not None and sizes.base_hw is not None})  # fmt: skip
    sampler = EpochSampler(len(table), batch_size_per_device, rank, world_size, seed, groups, shuffle, sizes,
                           _repeats(table, repeat_factor, predicate_repeat_factor), blocks)  # fmt: skip
    mixes = mixup or mosaic or batch_mixup or copy_blend
    if mixes or plain is not None or plain_hw is not None or recipe == "yolov3":
        dataset = MixedDataset(table, transform, seed, cache_images, mixup=mixup, mosaic=mosaic, plain=plain,
                               batch_mixup=batch_mixup, copy_blend=copy_blend, plain_hw=plain_hw,
                               mirrored=mirrored)  # fmt: skip
    else:
        dataset = DetectionDataset(table, transform, seed, cache_images, mirrored)
    return sampler, make_loader(dataset, sampler, workers, stride, pin=pin)


def loader_of_settings(
    table: DetectionTable, c: Any, *, seed: int, stride: int, pin: bool = False
) -> tuple[EpochSampler, torch.utils.data.DataLoader]:
    """`training_loader` by settings with the names of `toolkit.runs.settings.DataConfig`; `pin` as in `make_loader`."""
    sizes = {"recipe": c.recipe, "image_size": c.image_size, "scales": c.scales}
    parts = ("max_size", "random_crop", "flip", "photometric", "zoom_out", "iou_crop", "augment")
    options = {**sizes, **{name: getattr(c, name) for name in parts}}
    transform = train_transform(**options)
    off = {"photometric": False, "zoom_out": 1.0, "iou_crop": False, "augment": None}
    without = {name: off[name] for name in c.plain_without if name in off and options[name] != off[name]}
    if kept := [
        name
        for name in ("mixup", "mosaic", "batch_mixup", "copy_blend")
        if getattr(c, name) and c.plain_epochs and name not in c.plain_without
    ]:
        raise BadInput(f"data.plain_without: {', '.join(kept)} cannot go on in the plain epochs; name it, or set "
                       "data.plain_epochs to 0")  # fmt: skip
    plain_hw = (c.image_size, c.image_size) if c.multi_scale and "multi_scale" in c.plain_without else None
    if plain_hw and c.multi_scale_pixels:
        raise BadInput("data.plain_without: multi_scale cannot end where the number of images follows the size: set "
                       "data.multi_scale_pixels to false")  # fmt: skip
    varied = training_sizes(**sizes, multi_scale=c.multi_scale, multi_scale_every=c.multi_scale_every, mosaic=c.mosaic,
                            multi_scale_pixels=c.multi_scale_pixels, batch_mixup=c.batch_mixup,
                            copy_blend=c.copy_blend)  # fmt: skip
    return training_loader(
        table, transform, batch_size_per_device=c.batch_size_per_device, workers=c.workers, seed=seed, stride=stride,
        by_aspect_ratio=c.group_by_aspect_ratio, cache_images=c.cache_images, sizes=varied, recipe=c.recipe,
        mixup=c.mixup, mosaic=c.mosaic, batch_mixup=c.batch_mixup, copy_blend=c.copy_blend,
        plain=train_transform(**{**options, **without}) if without else None,
        plain_hw=plain_hw, repeat_factor=c.repeat_factor, predicate_repeat_factor=c.predicate_repeat_factor,
        mirrored=c.mirrored_predicates, pin=pin,
    )  # fmt: skip


def _check_streamed(chosen: Mapping[str, object]) -> None:
    if given := [name for name, value in chosen.items() if value]:
        raise BadInput([f"data.{name} takes images from anywhere in the data, which data.streaming reads by row "
                        "groups; leave one of the two out" for name in given])  # fmt: skip


def evaluation_loader_of_settings(
    table: DetectionTable, c: Any, batch_size_per_device: int, stride: int, pin: bool = False
) -> torch.utils.data.DataLoader:
    """`validation_loader` by settings with the names of `toolkit.runs.settings.DataConfig`."""
    transform = val_transform(c.image_size, c.scales, c.max_size)
    return validation_loader(
        table, transform, batch_size_per_device=batch_size_per_device, workers=c.workers, stride=stride, pin=pin
    )


def _repeats(table: DetectionTable, of_classes: float, of_predicates: float) -> np.ndarray | None:
    factors, rows = [], [table.row(index) for index in range(len(table))] if of_classes or of_predicates else []
    if of_classes:
        labels = [row["objects"]["category"][row["objects"]["iscrowd"] == 0] for row in rows]
        factors.append(repeat_factors(labels, len(table.categories), of_classes))
    if of_predicates:
        if not table.predicates:
            raise BadInput(f"data.predicate_repeat_factor: {table.name} has no relations; leave it out")
        predicates = [row["relations"]["predicate"] for row in rows]
        factors.append(repeat_factors(predicates, len(table.predicates), of_predicates, "predicate_repeat_factor"))
    return np.max(factors, axis=0) if factors else None


def validation_loader(
    table: DetectionTable, transform: Transform, *, batch_size_per_device: int, workers: int, stride: int,
    pin: bool = False,
) -> torch.utils.data.DataLoader:
    """This rank's loader of the validation data; `pin` as in `make_loader`."""
    sampler = EvalSampler(len(table), batch_size_per_device, *world())
    return make_loader(DetectionDataset(table, transform), sampler, workers, stride, pin=pin)


def _check_transform(recipe: str, scales: Sequence[int], random_crop: bool, zoom_out: float) -> None:
    faults = []
    if recipe not in RECIPES:
        faults.append(f"data.recipe is {recipe!r}; expected one of {', '.join(RECIPES)}")
    elif scales and recipe != "detr":
        faults.append(
            f"data.recipe {recipe} makes squares, which data.scales are not: set data.recipe to detr, whose colours, "
            "zoom_out and iou_crop are those of ssd, or leave data.scales empty and set data.image_size"
        )
    if scales and min(scales) < 1:
        faults.append(f"data.scales is {list(scales)}; expected lengths of at least one pixel")
    if random_crop and not scales:
        faults.append(
            "data.random_crop is DETR's crop between two resizes of the shorter side: give data.scales, or use "
            "data.iou_crop, which also makes squares"
        )
    if not 1 <= zoom_out < float("inf"):
        faults.append(f"data.zoom_out is {zoom_out}; expected the largest canvas in sides of the image, 1 for none")
    if faults:
        raise BadInput(faults)


def blocks_of(table: DetectionTable) -> np.ndarray | None:
    """(len,) int64: number of the row group of each image; None where images are not read by row groups."""
    root = table.image_root
    if not isinstance(root, ImageSources) or not isinstance(root.parts[0], Shards):
        return None
    groups = pc.replace_substring_regex(table.rows["file_name"], "/[0-9]+$", "").combine_chunks().dictionary_encode()
    return groups.indices.to_numpy(zero_copy_only=False).astype(np.int64)
