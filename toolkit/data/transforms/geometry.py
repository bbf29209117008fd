"""Resizing, flipping and cropping of an image together with its target, as in DETR's training recipe; uint8 in and out.

A transform is any callable `(image, target, generator) -> (image, target)`:

- image: uint8 (3, H, W), any strides; channels-last in memory (as the JPEG decoder leaves it) is the fast case.
- target: the dict of `toolkit.data.dataset`; a transform returns a new one and leaves the given one alone.
- generator: the only source of random numbers, so that an augmentation can be repeated anywhere.

Geometry follows facebookresearch/detr `datasets/transforms.py`. Boxes are xyxy pixels.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from toolkit.base.batch import Target
from toolkit.base.errors import BadInput
from toolkit.base.masks import boxes_around

Sample = tuple[Tensor, Target]
Transform = Callable[[Tensor, Target, torch.Generator], Sample]
Size = tuple[int, int]  # height, width in pixels
Region = tuple[int, int, int, int]  # top, left, height, width in pixels

PER_BOX_FIELDS = ("boxes", "labels", "area", "iscrowd", "attributes", "masks", "has_mask", "mixup")  # mixup: of it only
DETR_SCALES = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
OTHER_SIDE = {"left": "right", "right": "left", "leftmost": "rightmost", "rightmost": "leftmost"}
GLUONCV_FILL_RGB = (124, 116, 104)  # of an empty canvas: ImageNet's mean, rounded as GluonCV does
UNKNOWN_PREDICATE = -1  # predicate that has no name in a mirrored picture


def pair_hw(size: int | Sequence[int]) -> Size:
    """Return (h, w) of a size in pixels: the side of a square, or [h, w]. Raises BadInput for anything else."""
    size_hw = (size, size) if isinstance(size, int) else tuple(size)
    if len(size_hw) != 2 or min(size_hw) < 1:
        raise BadInput(
            f"{size} is not a size of images (data.image_size, data.multi_scale, --image-size): expected a side or "
            "[height, width], in pixels of at least 1"
        )
    return size_hw


def shorter_side_size(size_hw: Size, shorter: int, max_longer: int | None = None) -> Size:
    """Return the size (h, w) with the shorter side `shorter`, or less if the longer would pass `max_longer`.

    DETR's `get_size_with_aspect_ratio` to the letter (rounding of the limited side, truncation of the other), except
    that no side becomes 0 on extremely long images.
    """
    height, width = size_hw
    if max_longer is not None:
        low = float(min(height, width))
        high = float(max(height, width))
        if high / low * shorter > max_longer:
            shorter = max(1, round(max_longer * low / high))
    if min(height, width) == shorter:
        return height, width
    if width < height:
        return int(shorter * height / width), shorter
    return shorter, int(shorter * width / height)


def input_hw(size_hw: Size, size: Mapping[str, int] | None) -> Size:
    """Return the (height, width) in pixels to which an image of the size `size_hw` is resized.

    size: see `toolkit.data.pipeline.processor_size`; None: images keep their size.
    """
    if size is None:
        return size_hw
    if "shortest_edge" in size:
        return shorter_side_size(size_hw, size["shortest_edge"], size.get("longest_edge"))
    return size["height"], size["width"]


# ---- targets: pure geometry, no pixels -------------------------------------------------------------------------------


def keep_boxes(target: Target, keep: Tensor) -> Target:
    """Return the target with only the boxes that a bool mask `keep` (N,) selects.

    Relations whose subject or object is dropped are dropped too; the others are re-indexed.
    """
    if bool(keep.all()):
        return target
    target = dict(target)
    for name in PER_BOX_FIELDS:
        if name in target:
            target[name] = target[name][keep]
    if "relations" in target:
        # Where the boxes 0 and 2 of three stay, new_index is [0, 0, 1] and the relation (2, 0) becomes (1, 0).
        new_index = keep.cumsum(0) - 1
        relations = target["relations"]
        both_ends_kept = keep[relations[:, :2]].all(1)
        relations = relations[both_ends_kept]
        ends = new_index[relations[:, :2]]
        target["relations"] = torch.cat([ends, relations[:, 2:]], dim=1)
    return target


def resize_target(target: Target, old_hw: Size, new_hw: Size) -> Target:
    """Return the target with boxes, masks and areas scaled from an image of `old_hw` to one of `new_hw`, and with its
    size."""
    y = new_hw[0] / old_hw[0]
    x = new_hw[1] / old_hw[1]
    resized = {
        **target,
        "boxes": target["boxes"] * torch.tensor([x, y, x, y]),
        "area": target["area"] * (x * y),
        "size": torch.tensor(new_hw),
    }
    if "masks" in target:
        resized["masks"] = target["masks"].resized(x, y)
    return resized


def move_target(target: Target, x: int, y: int, size_hw: Size) -> Target:
    """Return the target with boxes and masks moved by (x, y) pixels, and with the size `size_hw`; nothing is
    clipped."""
    shift = torch.tensor([x, y, x, y], dtype=torch.float32)
    moved = {**target, "boxes": target["boxes"] + shift, "size": torch.tensor(size_hw)}
    if "masks" in target:
        moved["masks"] = target["masks"].moved(x, y)
    return moved


def clip_to_size(boxes: Tensor, height: int, width: int) -> Tensor:
    """Clip (N, 4) float32 xyxy boxes to an image of this size."""
    largest = torch.tensor([width, height, width, height], dtype=torch.float32)
    return boxes.clamp(min=0).minimum(largest)


def recheck_boxes(image: Tensor, target: Target) -> Target:
    """Return the target after augmentation with its boxes checked and clipped, whatever the transform was.

    Boxes are clipped to the image (rounding may leave them slightly outside) and dropped if no width or height is left.

    Raises ValueError, naming the image, for faults of a transform: non-finite boxes, per-box fields of different
    lengths, or a `size` that is not that of the image.
    """
    size_hw = tuple(image.shape[-2:])
    target_hw = tuple(target["size"].tolist())
    boxes = target["boxes"]
    lengths = {name: len(target[name]) for name in PER_BOX_FIELDS if name in target}
    if target_hw != size_hw or len(set(lengths.values())) > 1:
        raise ValueError(
            f"image id {target['image_id']}: the transform returned an image of {size_hw} with a target of size "
            f"{target_hw} and {lengths}; it must keep them in step"
        )
    if not bool(boxes.isfinite().all()):
        raise ValueError(f"image id {target['image_id']}: the transform returned non-finite boxes {boxes.tolist()}")
    boxes = clip_to_size(boxes, *size_hw)
    has_sides = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return keep_boxes({**target, "boxes": boxes}, has_sides)


def draw_masks(target: Target, boxes_from_masks: bool = False) -> Target:
    """Return the target after all transforms with its masks drawn: (N, H, W) uint8 of the size of the image.

    Objects of which no pixel is left are dropped, except crowd regions, and objects that have a box alone: of these the
    mask is 0, and the target then has `has_mask` (N,) bool.

    boxes_from_masks: every box becomes the tight box of its mask; without a pixel it stays.
    """
    size_hw = tuple(target["size"].tolist())
    has_mask = torch.tensor([shape is not None for shape in target["masks"].shapes], dtype=torch.bool)
    target = {**target, "masks": target["masks"].drawn(size_hw)}
    if not bool(has_mask.all()):
        target["has_mask"] = has_mask
    is_drawn = target["masks"].flatten(1).any(1).bool()
    is_crowd = target["iscrowd"] != 0
    target = keep_boxes(target, is_drawn | is_crowd | ~has_mask)
    if not boxes_from_masks:
        return target
    tight = boxes_around(target["masks"])
    is_drawn = (tight[:, 2:] > tight[:, :2]).all(1)
    return {**target, "boxes": torch.where(is_drawn[:, None], tight, target["boxes"])}


def mirrored_predicates(names: Sequence[str], pairs: Mapping[str, str] | None = None) -> Tensor:
    """Return the label that each of P predicates has in a mirrored picture, (P,) int64.

    A name with the word left or right becomes the name with the other side; all other names stay. The label is
    `UNKNOWN_PREDICATE` if no predicate has the mirrored name.

    Args:
        names: of the predicates, in the order of their labels.
        pairs: further names with their mirrored names, such as {"west of": "east of"}; each pair counts in both
            directions.

    Raises:
        BadInput: pairs of names that are not predicates.
    """
    pairs = dict(pairs or {})
    strange = sorted({*pairs, *pairs.values()} - set(names))
    if strange:
        words = f"{', '.join(strange)}: not predicates of the data, which has {', '.join(names)}"
        raise BadInput(f"data.mirrored_predicates: {words}")
    both_ways = {**pairs, **{other: name for name, other in pairs.items()}}
    label_of = {name: label for label, name in enumerate(names)}
    labels = []
    for name in names:
        mirrored = both_ways.get(name) or re.sub(r"[A-Za-z]+", _other_side, name)
        labels.append(label_of.get(mirrored, UNKNOWN_PREDICATE))
    return torch.tensor(labels, dtype=torch.int64)


def _other_side(word: re.Match) -> str:
    return OTHER_SIDE.get(word[0], word[0])


# ---- images with their targets ---------------------------------------------------------------------------------------


def resize(image: Tensor, target: Target, size_hw: Size) -> Sample:
    """Resize to exactly `size_hw`, bilinear with antialiasing."""
    target = resize_target(target, tuple(image.shape[-2:]), size_hw)
    # The uint8 kernel is three times faster on channels-last memory; a crop or an odd decoder may have lost that.
    image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return F.resize(image, list(size_hw), antialias=True), target


def flip(image: Tensor, target: Target) -> Sample:
    """Mirror left to right.

    If the target has the entry `mirrored_predicates` (see the function of this name), the predicates of its relations
    are mirrored too; if one of them has no name in a mirrored picture, the sample is returned unchanged.
    """
    mirrored = target.get("mirrored_predicates")
    if mirrored is not None:
        relations = target["relations"]
        predicates = mirrored[relations[:, 2]]
        if (predicates == UNKNOWN_PREDICATE).any():
            return image, target
        relations = torch.cat([relations[:, :2], predicates[:, None]], dim=1)
        target = {**target, "relations": relations}
    width = image.shape[-1]
    x_min, y_min, x_max, y_max = target["boxes"].unbind(1)
    boxes = torch.stack([width - x_max, y_min, width - x_min, y_max], dim=1)
    target = {**target, "boxes": boxes}
    if "masks" in target:
        target["masks"] = target["masks"].mirrored(width)
    return F.horizontal_flip(image), target


def crop(image: Tensor, target: Target, region: Region) -> Sample:
    """Crop to a region, as a view of the image's memory.

    Boxes and masks are moved and clipped to the region, and dropped if no width or height of the box is left. As in
    DETR, the area of every object becomes that of its clipped box, even if the crop does not cut the box.
    """
    top, left, height, width = region
    target = move_target(target, -left, -top, (height, width))
    boxes = clip_to_size(target["boxes"], height, width)
    sides = boxes[:, 2:] - boxes[:, :2]
    has_sides = (sides > 0).all(1)
    target = {**target, "boxes": boxes, "area": sides.prod(1)}
    if "masks" in target:
        target["masks"] = target["masks"].cut(0, 0, width, height)
    cropped = image[:, top : top + height, left : left + width]
    return cropped, keep_boxes(target, has_sides)


# ---- transforms ------------------------------------------------------------------------------------------------------


def draw_int(low: int, high: int, generator: torch.Generator) -> int:
    """Draw a whole number from [low, high], both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


@dataclass(frozen=True)
class Compose:
    """Sequence of transforms, applied one after the other."""

    transforms: Sequence[Transform]

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        for transform in self.transforms:
            image, target = transform(image, target, generator)
        return image, target


@dataclass(frozen=True)
class RandomChoice:
    """Random choice of one of the branches with equal probability (DETR's `RandomSelect` for two)."""

    branches: Sequence[Transform]

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        chosen = draw_int(0, len(self.branches) - 1, generator)
        return self.branches[chosen](image, target, generator)


@dataclass(frozen=True)
class RandomFlip:
    """Mirroring left to right with the given probability."""

    probability: float = 0.5

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        if float(torch.rand((), generator=generator)) < self.probability:
            return flip(image, target)
        return image, target


@dataclass(frozen=True)
class ResizeShorter:
    """Resize of the shorter side to one of `scales` (pixels), the longer side at most `max_longer`, aspect ratio kept.
    """

    scales: Sequence[int]
    max_longer: int | None = None

    def draw(self, size_hw: Size, generator: torch.Generator) -> Size:
        """Draw the (h, w) to resize to."""
        scale = self.scales[draw_int(0, len(self.scales) - 1, generator)]
        return shorter_side_size(size_hw, scale, self.max_longer)

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        size_hw = self.draw(tuple(image.shape[-2:]), generator)
        return resize(image, target, size_hw)


@dataclass(frozen=True)
class ThenResize:
    """The transform `before`, then a resize to exactly the size that the call gives, then the transform `after`.

    It is for batches of varying size. size_hw: the size if the call gives none.
    """

    before: Transform = Compose(())
    after: Transform = Compose(())
    size_hw: Size | None = None

    def __call__(
        self,
        image: Tensor,
        target: Target,
        generator: torch.Generator,
        size_hw: Size | None = None,
    ) -> Sample:
        image, target = self.before(image, target, generator)
        image, target = resize(image, target, size_hw or self.size_hw)
        return self.after(image, target, generator)


@dataclass(frozen=True)
class RandomSizeCrop:
    """Crop with sides drawn from [min_size, max_size] pixels, or the image's side if that is smaller."""

    min_size: int
    max_size: int

    def draw(self, size_hw: Size, generator: torch.Generator) -> Region:
        """Draw the region to cut from an image of `size_hw`; in DETR's order: width, height, top, left."""
        height, width = size_hw
        crop_width = draw_int(min(self.min_size, width), min(self.max_size, width), generator)
        crop_height = draw_int(min(self.min_size, height), min(self.max_size, height), generator)
        top = draw_int(0, height - crop_height, generator)
        left = draw_int(0, width - crop_width, generator)
        return top, left, crop_height, crop_width

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        region = self.draw(tuple(image.shape[-2:]), generator)
        return crop(image, target, region)


@dataclass(frozen=True)
class ResizeCropResize:
    """`Compose([first, size_crop, last])` with the pixels resized once, directly from the source image.

    The same numbers are drawn and the output has the same size. The region is rounded to whole source pixels, and the
    boxes follow the rounded region, so they fit the pixels exactly. Compared with the three separate steps, boxes move
    by less than one source pixel, and pixels are slightly sharper because they are interpolated only once.
    """

    first: ResizeShorter
    size_crop: RandomSizeCrop
    last: ResizeShorter

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        source_hw = tuple(image.shape[-2:])
        middle_hw = self.first.draw(source_hw, generator)
        top, left, height, width = self.size_crop.draw(middle_hw, generator)
        out_hw = self.last.draw((height, width), generator)
        top, height = _source_span(top, height, middle_hw[0], source_hw[0])
        left, width = _source_span(left, width, middle_hw[1], source_hw[1])
        image, target = crop(image, target, (top, left, height, width))
        return resize(image, target, out_hw)


def _source_span(start: int, length: int, middle: int, source: int) -> tuple[int, int]:
    """Map a span of a side `middle` pixels long to whole pixels of the `source` side; return (start, length).

    The length is at least one. The pixels 50 to 80 of a side of 100 are the pixels 25 to 40 of one of 50: (25, 15).
    """
    first = round(start * source / middle)
    first = min(first, source - 1)
    last = round((start + length) * source / middle)
    return first, max(last - first, 1)


# ---- recipes ---------------------------------------------------------------------------------------------------------


def detr_train_transform(
    scales: Sequence[int] = DETR_SCALES,
    max_longer: int = 1333,
    first_scales: Sequence[int] = (400, 500, 600),
    crop_sizes: tuple[int, int] = (384, 600),
    flip_probability: float = 0.5,
) -> Transform:
    """Return the transform of DETR's training recipe (`make_coco_transforms`).

    It flips, and then with equal probability either resizes, or resizes, crops and resizes again.

    scales, max_longer: see `ResizeShorter`, of the last resize. first_scales: scales of the resize before a crop.
    crop_sizes: smallest and largest side of a crop in pixels.
    """
    multi_scale = ResizeShorter(tuple(scales), max_longer)
    cropped = ResizeCropResize(
        first=ResizeShorter(tuple(first_scales)),
        size_crop=RandomSizeCrop(*crop_sizes),
        last=multi_scale,
    )
    resized = RandomChoice((multi_scale, cropped))
    return Compose((RandomFlip(flip_probability), resized))


def exact_transform(size: int | Sequence[int]) -> Transform:
    """Return a transform that resizes every image to exactly this size, see `pair_hw`.

    It is for models that ignore a pixel mask.
    """
    return ThenResize(size_hw=pair_hw(size))


def centres_in_region(boxes: Tensor, region: tuple[int, int, int, int]) -> Tensor:
    """Return (N,) bool: whether the centre of each box (N, 4) xyxy lies in the region, borders included, as in GluonCV.

    region: top, left, height and width in pixels.
    """
    top, left, height, width = region
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    x, y = centres.unbind(1)
    in_columns = (x >= left) & (x <= left + width)
    in_rows = (y >= top) & (y <= top + height)
    return in_columns & in_rows


def filled_canvas(size_hw: tuple[int, int]) -> Tensor:
    """Return a uint8 image (3, H, W) of `GLUONCV_FILL_RGB`, channels-last in memory like a decoded image."""
    colour = torch.tensor(GLUONCV_FILL_RGB, dtype=torch.uint8)
    canvas = colour.repeat(*size_hw, 1)  # (H, W, 3)
    return canvas.permute(2, 0, 1)
