"""Training augmentation of YOLOv3 as GluonCV orders it: colour, expand, constrained crop, resize, flip; all in uint8.

The transforms have the interface of `toolkit.data.transforms.geometry`; the whole recipe has the size of the batch as
one more argument. Ranges are those of gluoncv `YOLO3DefaultTrainTransform` and SSD (Liu et al. 2016, section 2.2);
docs/differences.md lists the differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from toolkit.base.batch import Target
from toolkit.base.box_ops import pairwise_iou
from toolkit.data.transforms.geometry import (
    RandomFlip,
    Sample,
    ThenResize,
    Transform,
    centres_in_region,
    crop,
    filled_canvas,
    keep_boxes,
    move_target,
    resize_target,
)

INTERPOLATIONS = [Image.Resampling[name] for name in ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "LANCZOS")]


@dataclass(frozen=True)
class ColourDistortion:
    """A random change of brightness, and then of saturation, hue and contrast, each with `probability`; contrast comes
    before or after the other two, with equal probability.

    brightness: largest number of grey levels added or subtracted. contrast: range of the factor on all values.
    saturation: range of the factor on the distance from grey. hue: largest change in turns. Values are clipped to 0 and
    255.
    """

    brightness: float = 32.0
    contrast: tuple[float, float] = (0.5, 1.5)
    saturation: tuple[float, float] = (0.5, 1.5)
    hue: float = 18 / 255
    probability: float = 0.5

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        contrast_first, *chances = torch.rand(5, generator=generator).tolist()
        u = torch.rand(4, generator=generator).tolist()
        if chances[0] < self.probability:
            added = _between(-self.brightness, self.brightness, u[0])
            brighter = image.to(torch.float32).add_(added)
            image = brighter.clamp_(0, 255).to(torch.uint8)
        saturation = (F.adjust_saturation, _between(*self.saturation, u[1]), chances[1])
        hue = (F.adjust_hue, _between(-self.hue, self.hue, u[2]), chances[2])
        # torchvision's brightness is a plain factor
        contrast = (F.adjust_brightness, _between(*self.contrast, u[3]), chances[3])
        steps = [contrast, saturation, hue] if contrast_first < 0.5 else [saturation, hue, contrast]
        for adjust, amount, chance in steps:
            if chance < self.probability:
                image = adjust(image, amount)
        return image, target


@dataclass(frozen=True)
class RandomExpand:
    """An expansion, with `probability`: the image is placed at random on a canvas of up to `max_ratio` times its sides,
    which is filled with FILL_RGB."""

    max_ratio: float = 4.0
    probability: float = 0.5

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        chance, larger, down, right = torch.rand(4, generator=generator).tolist()
        if chance >= self.probability:
            return image, target
        height, width = image.shape[-2:]
        ratio = _between(1.0, self.max_ratio, larger)
        canvas_height = int(height * ratio)
        canvas_width = int(width * ratio)
        top = int(down * (canvas_height - height + 1))
        left = int(right * (canvas_width - width + 1))
        size_hw = (canvas_height, canvas_width)
        canvas = filled_canvas(size_hw)
        canvas[:, top : top + height, left : left + width] = image
        return canvas, move_target(target, left, top, size_hw)


@dataclass(frozen=True)
class ConstrainedCrop:
    """A random crop to a region that overlaps all boxes by one of several IoUs, or the whole image (SSD's sampling).

    For each entry of `constraints`, the smallest and largest IoU allowed between any box and the region, up to `trials`
    random regions are drawn, and the first that meets it is a candidate. The whole image is a candidate too. One
    candidate is chosen at random among those that contain the centre of a box. Boxes with their centre in the region
    are kept, clipped to it. Without boxes, a random region is cut.

    min_scale: smallest side of a region relative to the image, at equal aspect. max_aspect: largest ratio of the sides
    of a region, relative to those of the image.
    """

    min_scale: float = 0.3
    max_aspect: float = 2.0
    constraints: tuple[tuple[float, float], ...] = ((0.1, 1), (0.3, 1), (0.5, 1), (0.7, 1), (0.9, 1), (0, 1))
    trials: int = 50

    def draw(self, boxes: Tensor, size_hw: tuple[int, int], generator: torch.Generator) -> tuple[int, int, int, int]:
        """Draw the region (top, left, height, width) to cut from an image of `size_hw` pixels with boxes (N, 4)
        xyxy."""
        regions = self._random_regions(size_hw, generator)
        if not len(boxes):
            return tuple(regions[0, 0].tolist())
        top, left, height, width = regions.unbind(-1)
        corners = torch.stack((left, top, left + width, top + height), dim=-1)
        xyxy = corners.to(torch.float32)  # (constraints, trials, 4)
        iou = pairwise_iou(xyxy.flatten(0, 1), boxes)
        iou = iou.view(*xyxy.shape[:2], -1)  # (constraints, trials, N)
        least, largest = torch.tensor(self.constraints).unbind(1)
        meets = (iou.amin(-1) >= least[:, None]) & (iou.amax(-1) <= largest[:, None])
        first_trial = meets.int().argmax(1)
        first = regions[torch.arange(len(meets)), first_trial]
        first = first[meets.any(1)]
        candidates = [(0, 0, *size_hw), *map(tuple, first.tolist())]
        for i in torch.randperm(len(candidates), generator=generator).tolist():
            if bool(centres_in_region(boxes, candidates[i]).any()):
                return candidates[i]
        return candidates[0]

    def _random_regions(self, size_hw: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Return (constraints, trials, 4) int64 top, left, height, width."""
        u = torch.rand(4, len(self.constraints), self.trials, generator=generator)
        scale = _between(self.min_scale, 1.0, u[0])
        lowest = scale.square().clamp(min=1 / self.max_aspect)
        highest = scale.square().reciprocal()
        highest = highest.clamp(max=self.max_aspect)
        root = _between(lowest, highest, u[1]).sqrt()  # of the aspect, width to height
        image_height, image_width = size_hw
        height = (image_height * scale / root).long().clamp(1, image_height)
        width = (image_width * scale * root).long().clamp(1, image_width)
        top = (u[2] * (image_height - height)).long()
        left = (u[3] * (image_width - width)).long()
        return torch.stack((top, left, height, width), dim=-1)

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        region = self.draw(target["boxes"], tuple(image.shape[-2:]), generator)
        inside = centres_in_region(target["boxes"], region)
        return crop(image, keep_boxes(target, inside), region)


@dataclass(frozen=True)
class Yolov3Transform:
    """A transform of `steps`, a resize to exactly the batch's size by one of five interpolations drawn at random, and a
    horizontal flip with `flip_probability`."""

    steps: Sequence[Transform]
    flip_probability: float = 0.5

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator, size_hw: tuple[int, int]) -> Sample:
        for step in self.steps:
            image, target = step(image, target, generator)
        drawn = torch.randint(len(INTERPOLATIONS), (), generator=generator)
        method = INTERPOLATIONS[int(drawn)]
        image, target = resize_by(image, target, size_hw, method)
        return RandomFlip(self.flip_probability)(image, target, generator)


def yolov3_transform(
    *,
    photometric: bool = False,
    zoom_out: float = 1.0,
    iou_crop: bool = False,
    flip: bool = False,
) -> Transform:
    """Build GluonCV's recipe, or parts of it: each argument adds a step. With the defaults, it is a plain resize.

    photometric: `ColourDistortion`. zoom_out: `RandomExpand` by up to this ratio, if above 1 (4 in GluonCV). iou_crop:
    `ConstrainedCrop`. flip: a horizontal flip of half of the images.
    """
    if not (photometric or zoom_out > 1 or iou_crop or flip):
        return ThenResize()
    steps = []
    if photometric:
        steps.append(ColourDistortion())
    if zoom_out > 1:
        steps.append(RandomExpand(zoom_out))
    if iou_crop:
        steps.append(ConstrainedCrop())
    return Yolov3Transform(tuple(steps), 0.5 if flip else 0.0)


def resize_by(image: Tensor, target: Target, size_hw: tuple[int, int], method: Image.Resampling) -> Sample:
    """Resize an image and its target to exactly `size_hw` by one of Pillow's filters, which average over more pixels
    when they shrink an image."""
    target = resize_target(target, tuple(image.shape[-2:]), size_hw)
    if tuple(image.shape[-2:]) == tuple(size_hw):
        return image, target
    height, width = size_hw
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    resized = picture.resize((width, height), method)
    return F.pil_to_tensor(resized), target


def _between(low, high, u):
    return low + (high - low) * u
