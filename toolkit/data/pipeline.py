"""Data pipeline from the name of a split to its batches, as the `data` settings of every script describe it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from toolkit import index
from toolkit.base.batch import Batch
from toolkit.base.distributed import world
from toolkit.base.errors import BadInput
from toolkit.base.text import size_text
from toolkit.data.batches import collate, make_loader
from toolkit.data.dataset import DetectionDataset, MixedDataset
from toolkit.data.image_sources import ImageSources, Shards
from toolkit.data.least_size import LeastSize, least_size_of
from toolkit.data.sampling import EpochSampler, EvalSampler, SampleKey, VariableSizes
from toolkit.data.table import DetectionTable
from toolkit.data.tile_table import TileTable, tiles_of_table
from toolkit.data.tiling import Tiling, tile_hw
from toolkit.data.transforms.geometry import (
    Compose,
    RandomFlip,
    ResizeShorter,
    ThenResize,
    Transform,
    detr_train_transform,
    exact_transform,
    pair_hw,
)
from toolkit.data.transforms.zoom_crop_colour import PhotometricDistortion, SeenRegion

RECIPE_NAMES = ("detr", *index.RECIPES)
BLENDING = ("mixup", "batch_mixup", "copy_blend")
MIXING = ("mixup", "mosaic", "batch_mixup", "copy_blend")
TILE_SETTINGS = ("tile", "tile_overlap", "tile_visible")
ASPECTS_APART = 1.25  # between the sizes of one training at most; rounding to a stride moves the aspect of small images
ImageSize = int | Sequence[int]  # side of a square, or [height, width], in pixels


def check_one_size(stride: int, sizes: Sequence[ImageSize], scales: Sequence[int]) -> None:
    """Check the image sizes of a detector that ignores padding.

    Raises BadInput for `scales`, and for a size in pixels that is not a multiple of `stride`, whose images the loader
    would pad.
    """
    faults = []
    if scales:
        faults.append("the detector needs images of one size: leave data.scales empty, set data.image_size")
    for size in sizes:
        size_hw = pair_hw(size)
        if all(side % stride == 0 for side in size_hw):
            continue
        near = [max(1, round(side / stride)) * stride for side in size_hw]
        nearest = near[0] if isinstance(size, int) else near
        faults.append(
            f"images of {size_text(size_hw)} px (data.image_size, data.multi_scale) would be padded, which the "
            f"detector ignores: give multiples of {stride}, such as {nearest}"
        )
    if faults:
        raise BadInput(faults)


def train_transform(c: Any) -> Transform:
    """Make the training augmentation, `(image, target, generator[, size_hw]) -> (image, target)`; docs/augmentation.md.

    The recipe decides the definition and order of photometric, zoom_out and iou_crop, and the interpolation. detr:
    zoom out, crop, flip, resize, colours; ssd: the same in one resize, then flip and colours; yolov3: colours, zoom
    out, crop, resize, flip. The ssd and yolov3 recipes must be called with a size, as the keys of `training_sizes`
    carry it. Transforms of `augment` come before all of these.

    Args:
        c: settings with the names of `toolkit.run.settings.DataConfig`.

    Raises BadInput naming each setting of `data` that is invalid, or does not fit another.
    """
    _check_transform(c)
    if c.augment:
        from toolkit.data.transforms.policy import policy_of  # here, since few trainings have one

        return policy_of(c.augment, train_transform(replace(c, augment=None)))
    if c.recipe != "detr":
        make = index.load(index.RECIPES[c.recipe])
        return make(
            zoom_out=c.zoom_out,
            iou_crop=c.iou_crop,
            flip=c.flip,
            photometric=c.photometric,
        )
    probability = 0.5 if c.flip else 0.0
    first = (SeenRegion(c.zoom_out, c.iou_crop),) if c.zoom_out > 1 or c.iou_crop else ()
    colours = (PhotometricDistortion(),) if c.photometric else ()
    if not c.scales:
        flips = (RandomFlip(probability),) if c.flip else ()
        return ThenResize(
            before=Compose((*first, *flips)),
            after=Compose(colours),
            size_hw=pair_hw(c.image_size),
        )
    if c.random_crop:
        geometry = detr_train_transform(c.scales, c.max_size, flip_probability=probability)
    else:  # Faster R-CNN's, which crops nothing
        resize = ResizeShorter(tuple(c.scales), c.max_size)
        geometry = Compose((RandomFlip(probability), resize))
    return Compose((*first, geometry, *colours))


def training_sizes(c: Any) -> VariableSizes | None:
    """Return the sampler of the image sizes of training batches; None: only the transform decides the sizes.

    For the recipes ssd and yolov3, and for mosaics, it is never None.

    Args:
        c: settings with the names of `toolkit.run.settings.DataConfig`.

    Raises BadInput naming each setting of `data` that is invalid, or does not fit another.
    """
    faults = []
    sizes_hw = []
    for size in (c.image_size, *c.multi_scale):
        try:
            sizes_hw.append(pair_hw(size))
        except BadInput as error:
            faults += error.problems
    if not faults:
        faults += _aspects_apart(*sizes_hw)
    if c.multi_scale_every < 1:
        faults.append(f"data.multi_scale_every {c.multi_scale_every}: expected at least one batch")
    for name in ("multi_scale", "mosaic", "batch_mixup", "copy_blend"):
        if c.scales and getattr(c, name):
            off = "leave data.multi_scale empty" if name == "multi_scale" else f"set data.{name} to 0"
            faults.append(
                f"data.{name} makes all images of a batch one size, which data.scales does not: leave data.scales "
                f"empty and set data.image_size, or {off}"
            )
    if faults:
        raise BadInput(faults)
    if c.recipe == "detr" and not c.multi_scale and not c.mosaic:
        return None
    base_hw, *several_hw = sizes_hw
    base = base_hw if several_hw and c.multi_scale_pixels else None
    return VariableSizes(tuple(several_hw) or (base_hw,), c.multi_scale_every, base)


def _aspects_apart(base_hw: tuple[int, int], *several_hw: tuple[int, int]) -> list[str]:
    """Return a sentence if some sizes have another aspect than the first, to which validation images are resized."""
    height, width = base_hw
    apart = [(h * width) / (w * height) for h, w in several_hw]
    if not any(max(ratio, 1 / ratio) > ASPECTS_APART for ratio in apart):
        return []
    near = []  # of as many pixels, and the aspect of the first
    for h, w in several_hw:
        near_height = round((h * w * height / width) ** 0.5)
        near_width = round((h * w * width / height) ** 0.5)
        near.append([near_height, near_width])
    return [
        f"data.multi_scale {[list(hw) for hw in several_hw]} has other aspects than data.image_size {height} x {width} "
        f"px, at which the detector is evaluated: give [height, width] of about {near}"
    ]


def val_transform(image_size: ImageSize, scales: list[int], max_size: int) -> Transform:
    """Return the deterministic transform of validation images: a resize.

    With `scales` the shorter side becomes the last of them, and the longer side at most `max_size` pixels; without,
    images get the size `image_size`.
    """
    if scales:
        return ResizeShorter((scales[-1],), max_size)
    return exact_transform(image_size)


def processor_size(image_size: ImageSize, scales: list[int], max_size: int) -> dict[str, int]:
    """Return the size of validation images in pixels, in the format of transformers' image processors."""
    if scales:
        return {"shortest_edge": scales[-1], "longest_edge": max_size}
    height, width = pair_hw(image_size)
    return {"height": height, "width": width}


def loader_of_settings(
    table: DetectionTable,
    c: Any,
    *,
    seed: int,
    stride: int,
    augmented: bool = True,
    pin: bool = False,
    masks: bool = False,
) -> tuple[EpochSampler, torch.utils.data.DataLoader]:
    """Make this rank's sampler and loader of the training data.

    With `tile` the samples are the tiles of the pictures: `loader.dataset.dataset.table` is then a `TileTable`.
    If images are mixed, or differ in the last epochs, `loader.dataset.dataset` is a `MixedDataset`; call its `plan`
    before every epoch.

    Args:
        c: settings with the names of `toolkit.run.settings.DataConfig`.
        augmented: False: images as in validation, each once in an epoch.
        pin: as in `make_loader`.
        masks: targets have masks, see `DetectionDataset`. For them and for `boxes_from_masks` the table must have been
            read with masks.

    Raises BadInput: settings of `data` that are invalid, or do not fit each other, or masks.
    """
    if masks or c.boxes_from_masks:
        check_masks(c, "model.masks" if masks else "data.boxes_from_masks")
    if augmented:
        transform = train_transform(c)
        sizes = training_sizes(c)
        _check_last_epochs(c)
    else:
        transform = val_transform(c.image_size, c.scales, c.max_size)
        sizes = None
    blocks = blocks_of(table)
    if blocks is not None:
        _check_streamed(c, augmented)
    if c.tile is not None:
        table = tiles_of_table(table, tiling_of(c))
    sampler = _epoch_sampler(table, c, seed, sizes, blocks, augmented)
    if augmented:
        dataset = _augmented(table, transform, c, seed, masks)
    else:
        options = {"masks": masks, "boxes_from_masks": c.boxes_from_masks}
        dataset = DetectionDataset(table, transform, seed, c.cache_images, least_size=least_size_of(c), **options)
    return sampler, make_loader(dataset, sampler, c.workers, stride, pin)


def _epoch_sampler(
    table: DetectionTable,
    c: Any,
    seed: int,
    sizes: VariableSizes | None,
    blocks: np.ndarray | None,
    augmented: bool,
) -> EpochSampler:
    """Return this rank's sampler of the training data, in which images count as often as the settings say.

    sizes, blocks: see `EpochSampler`. augmented: False: every image once in an epoch.
    """
    repeats = None
    strata = None
    if augmented:
        repeats = _repeats(table, c.repeat_factor, c.predicate_repeat_factor)
        if c.tile is not None:
            repeats = _without_empty(table, c.tile_empty, repeats)
        if c.shares:
            strata = table.set_of_image()
            repeats = repeats_for_shares(strata, max(1, len(table.sets)), c.shares, repeats)
    rank, world_size = world()
    return EpochSampler(
        len(table),
        c.batch_size_per_device,
        rank,
        world_size,
        seed,
        groups=aspect_ratio_groups(table.sizes_hw()) if c.group_by_aspect_ratio else None,
        sizes=sizes,
        repeats=repeats,
        blocks=blocks,
        strata=strata,
        pictures=table.picture_of_tile if c.tile is not None else None,
    )


def tiling_of(c: Any) -> Tiling | None:
    """Return how settings with the names of `toolkit.run.settings.DataConfig` cut pictures; None: they cut none.

    Raises BadInput naming each setting that is invalid.
    """
    settings = {name: getattr(c, name) for name in TILE_SETTINGS}
    return tiling_of_run(settings, processor_size(c.image_size, c.scales, c.max_size))


def tiling_of_run(settings: Mapping[str, Any], size: Mapping[str, int]) -> Tiling | None:
    """Return how a run cuts pictures; None: it does not, or was made before there was this setting.

    Args:
        settings: the group `data` of its settings, of which `TILE_SETTINGS` are read.
        size: what its images are resized to, in the format of `processor_size`.

    Raises BadInput naming each setting that is invalid.
    """
    if settings.get("tile") is None:
        return None
    return Tiling(
        tile_hw(settings["tile"], size),
        settings.get("tile_overlap", Tiling.overlap),
        settings.get("tile_visible", Tiling.visible),
    )


def _without_empty(tiles: TileTable, share: float, repeats: np.ndarray | None) -> np.ndarray:
    """Return how often each tile is drawn in an epoch, if only a share of those without objects is.

    repeats: as often as it would be drawn otherwise; None: once. Raises BadInput if no tile is left.
    """
    drawn = np.ones(len(tiles)) if repeats is None else repeats
    drawn = np.where(tiles.has_objects(), drawn, drawn * share)
    if not drawn.any():
        raise BadInput(
            f"data.tile_empty is {share}, and no tile of {tiles.name} has an object: set it above 0, or look at "
            "the boxes with scripts/check_data.py"
        )
    return drawn


def _check_streamed(c: Any, augmented: bool) -> None:
    everywhere = {"group_by_aspect_ratio": c.group_by_aspect_ratio, "tile": c.tile is not None}
    if augmented:
        everywhere["mixup"] = c.mixup
        everywhere["mosaic"] = c.mosaic
        everywhere["multi_scale_pixels"] = c.multi_scale and c.multi_scale_pixels
    faults = []
    for name, given in everywhere.items():
        if given:
            faults.append(
                f"data.{name} takes images from anywhere in the data, which data.streaming reads by row groups; leave "
                "one of the two out"
            )
    if faults:
        raise BadInput(faults)


def _check_last_epochs(c: Any) -> None:
    kept = [name for name in MIXING if getattr(c, name) and name not in c.plain_without]
    if kept and c.plain_epochs:
        raise BadInput(
            f"data.plain_without: {', '.join(kept)} cannot go on in the plain epochs; name it, or set "
            "data.plain_epochs to 0"
        )
    if c.multi_scale and c.multi_scale_pixels and "multi_scale" in c.plain_without:
        raise BadInput(
            "data.plain_without: multi_scale cannot end where the number of images follows the size: set "
            "data.multi_scale_pixels to false"
        )


def check_masks(c: Any, asked_by: str) -> None:
    """Raise BadInput naming each setting of `data` that would leave a picture without the masks of its objects.

    asked_by: the setting that asks for masks, such as "model.masks".
    """
    faults = []
    for name in BLENDING:
        if getattr(c, name):
            faults.append(
                f"data.{name} {getattr(c, name)}: where pictures are blended, a pixel belongs to several of them, and "
                f"{asked_by} needs to know to which; leave one of the two out, or use data.mosaic"
            )
    if faults:
        raise BadInput(faults)


def _augmented(table: DetectionTable, transform: Transform, c: Any, seed: int, masks: bool) -> DetectionDataset:
    off = {
        "photometric": False,
        "zoom_out": 1.0,
        "iou_crop": False,
        "augment": None,
    }
    without = {}
    for name in c.plain_without:
        if name in off and getattr(c, name) != off[name]:
            without[name] = off[name]
    ends_multi_scale = c.multi_scale and "multi_scale" in c.plain_without
    plain_hw = pair_hw(c.image_size) if ends_multi_scale else None
    mixing = {name: getattr(c, name) for name in MIXING}
    options = {
        "seed": seed,
        "cache_images": c.cache_images,
        "mirrored": c.mirrored_predicates,
        "least_size": least_size_of(c),
        "masks": masks,
        "boxes_from_masks": c.boxes_from_masks,
    }
    # Samples of the recipe yolov3 draw whether they are mosaics, also where none is.
    is_mixed = any(mixing.values()) or c.recipe == "yolov3"
    if not (is_mixed or without or plain_hw):
        return DetectionDataset(table, transform, **options)
    plain = train_transform(replace(c, **without)) if without else None
    return MixedDataset(table, transform, **options, **mixing, plain=plain, plain_hw=plain_hw)


def _repeats(table: DetectionTable, of_classes: float, of_predicates: float) -> np.ndarray | None:
    factors = []
    if of_classes:
        boxes = table.boxes()
        plain = boxes[~boxes.iscrowd]
        labels = np.split(plain.labels, plain.offsets[1:-1])
        factors.append(repeat_factors(labels, len(table.categories), of_classes))
    if of_predicates:
        if not table.predicates:
            raise BadInput(f"data.predicate_repeat_factor: {table.name} has no relations; leave it out")
        relations = table.relations()
        predicates = np.split(relations.predicate, relations.offsets[1:-1])
        factors.append(repeat_factors(predicates, len(table.predicates), of_predicates, "predicate_repeat_factor"))
    return np.max(factors, axis=0) if factors else None


def repeat_factors(
    labels: Sequence[np.ndarray],
    num_classes: int,
    threshold: float,
    setting: str = "repeat_factor",
) -> np.ndarray:
    """Return (N,) float64, at least 1: repeats of each image in an epoch (Gupta et al., LVIS, 2019, section 4.1).

    Args:
        labels: classes of the boxes (or predicates of the relations) of each image, (n,) int64 each.
        threshold: a class that is in a share f of the images has the factor max(1, sqrt(threshold / f)); an image has
            the largest of its classes' factors.
        setting: name of the threshold, for messages.

    Raises BadInput: the threshold is not a share.
    """
    if not 0 <= threshold <= 1:
        raise BadInput(
            f"data.{setting} is {threshold}; expected the share of images from which a class is rare, 0 to 1"
        )
    images = np.zeros(num_classes)
    for of_image in labels:
        images[np.unique(of_image)] += 1
    share = np.maximum(images, 1) / max(1, len(labels))
    factors = np.maximum(1.0, np.sqrt(threshold / share))
    return np.array([factors[of_image].max(initial=1.0) for of_image in labels])


def repeats_for_shares(sets: np.ndarray, count: int, shares: Sequence[float], repeats: np.ndarray | None) -> np.ndarray:
    """Return (len,): how often each image is drawn in an epoch, so that each set has its share of the samples.

    An epoch keeps its length, so an image of a large set may be drawn less than once in it.

    Args:
        sets: (len,) the number of the set of each image, from 0 to count - 1.
        shares: one positive number for each set; only their ratios count.
        repeats: (len,) relative frequencies of the images within their sets, from other settings; None: all are equal.

    Raises BadInput: not a positive share for each set, or a set without images.
    """
    if len(shares) != count or not all(0 < share < float("inf") for share in shares):
        raise BadInput(f"data.shares is {list(shares)}; expected {count} numbers above 0, one for each training set")
    weights = np.ones(len(sets)) if repeats is None else np.asarray(repeats, np.float64)
    sums = np.bincount(sets, weights, minlength=count)
    if not sums.all():
        raise BadInput(f"data.shares: set {int(np.argmin(sums)) + 1} of {count} has no training images left")
    of_sets = np.asarray(shares) / np.sum(shares) * sums.sum() / sums
    return weights * of_sets[sets]


def aspect_ratio_groups(sizes_hw: np.ndarray) -> np.ndarray:
    """Return 0 for each portrait image and 1 for landscape and squares, (N,) int64, as in torchvision's references.

    sizes_hw: (N, 2) height and width.
    """
    return (sizes_hw[:, 1] >= sizes_hw[:, 0]).astype(np.int64)


def validation_loader_of_settings(
    table: DetectionTable,
    c: Any,
    *,
    batch_size: int,
    stride: int,
    pin: bool,
    tiling: Tiling | None,
    masks: bool,
) -> torch.utils.data.DataLoader:
    """Make this rank's loader of the validation data from `data` settings `c`; for the others see `validation_loader`.

    Boxes are those of masks (`c.boxes_from_masks`) if the table was read with masks.
    """
    return validation_loader(
        table,
        val_transform(c.image_size, c.scales, c.max_size),
        batch_size=batch_size,
        workers=c.workers,
        stride=stride,
        pin=pin,
        least_size=least_size_of(c),
        tiling=tiling,
        masks=masks,
        boxes_from_masks=c.boxes_from_masks and table.has_masks,
    )


def validation_loader(
    table: DetectionTable,
    transform: Transform,
    *,
    batch_size: int,
    workers: int,
    stride: int,
    pin: bool = False,
    least_size: LeastSize | None = None,
    tiling: Tiling | None = None,
    masks: bool = False,
    boxes_from_masks: bool = False,
) -> torch.utils.data.DataLoader:
    """Make this rank's loader of the validation data.

    Args:
        pin: see `make_loader`.
        least_size, masks, boxes_from_masks: see `DetectionDataset`; masks are for losses, not for the metrics.
        tiling: the way in which pictures are cut into tiles, which are then the images of the loader; its
            `dataset.dataset.table` is a `TileTable`. None: whole pictures.
    """
    if tiling is not None:
        table = tiles_of_table(table, tiling)
        table.decoded.limit = 0  # they come picture by picture, so the newest one is enough
    sampler = EvalSampler(len(table), batch_size, *world())
    options = {"masks": masks, "boxes_from_masks": boxes_from_masks}
    dataset = DetectionDataset(table, transform, least_size=least_size, **options)
    return make_loader(dataset, sampler, workers, stride, pin=pin)


def _check_transform(c: Any) -> None:
    faults = []
    if c.recipe not in RECIPE_NAMES:
        faults.append(f"data.recipe is {c.recipe!r}; expected one of {', '.join(RECIPE_NAMES)}")
    elif c.scales and c.recipe != "detr":
        faults.append(
            f"data.recipe {c.recipe} makes images of one size, which data.scales does not: set data.recipe to detr, "
            "whose colours, zoom_out and iou_crop are those of ssd, or leave data.scales empty and set data.image_size"
        )
    if c.scales and min(c.scales) < 1:
        faults.append(f"data.scales is {list(c.scales)}; expected lengths of at least one pixel")
    if c.random_crop and not c.scales:
        faults.append(
            "data.random_crop is DETR's crop between two resizes of the shorter side: give data.scales, or use "
            "data.iou_crop, which also makes squares"
        )
    if not 1 <= c.zoom_out < float("inf"):
        faults.append(f"data.zoom_out is {c.zoom_out}; expected the largest canvas in sides of the image, 1 for none")
    if faults:
        raise BadInput(faults)


def blocks_of(table: DetectionTable) -> np.ndarray | None:
    """Return (len,) int64: the number of each image's row group; None if images are not read by row groups."""
    root = table.image_root
    if not isinstance(root, ImageSources) or not isinstance(root.parts[0], Shards):
        return None
    groups = [name.rpartition("/")[0] for name in table.file_names()]  # <file>/<row group> of <file>/<row group>/<row>
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[group] for group in groups], np.int64)


def largest_batch(dataset: DetectionDataset, count: int, stride: int, sizes: VariableSizes | None = None) -> Batch:
    """Collate the `count` training images that need most memory, as epoch 0 augments them.

    Half of the images are those with the most boxes, the others those with the most pixels. Masks take the memory of an
    image for each box, so with masks the larger half has the most boxes.

    sizes: for batches of varying image size; the batch then has the size and the number of images of
    `VariableSizes.largest`.
    """
    size_hw = None
    if sizes is not None:
        size_hw, count = sizes.largest(count)
    pixels = dataset.table.sizes_hw().astype(np.int64).prod(1)
    crowded = (count + 1) // 2 if dataset.masks else count // 2
    by_boxes = np.argsort(-dataset.table.num_boxes(), kind="stable")[:crowded]
    by_pixels = np.argsort(-pixels, kind="stable")[:count]
    chosen = list(dict.fromkeys([*by_boxes.tolist(), *by_pixels.tolist()]))[:count]
    samples = [dataset[SampleKey(0, index, size_hw)] for index in chosen]
    return collate(samples, stride)
