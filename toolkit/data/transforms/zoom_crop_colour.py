"""Zoom-out, IoU crop and photometric distortion (SSD, Liu et al., ECCV 2016, section 2.2) by torchvision's definitions.

The recipes detr and ssd use them. Zoom-out and crop only set the visible region, which is rendered in one resize.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from toolkit.base.batch import Target
from toolkit.base.box_ops import pairwise_iou
from toolkit.data.transforms.geometry import Region, Sample, Size, crop, draw_int, keep_boxes, move_target, resize

SSD_FILL_RGB = (123, 117, 104)  # ImageNet's mean
MIN_IOUS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # a crop draws one of them; 1: no crop
CROP_CANDIDATES = 40  # crops drawn for one minimum IoU; the first good one is taken
MAX_CANVAS_PIXELS = 4096 * 4096  # of `SeenRegion`: 48 MiB, where 4 times the sides of 12 megapixels would take 550


@dataclass(frozen=True)
class PhotometricDistortion:
    """Distortion of brightness, contrast, saturation and hue, each on half of the images (Liu et al. 2016, section
    2.2).

    The ranges are torchvision's; contrast comes first or last, with equal probability. Values are clipped to 0 and 255.
    `hue` is a fraction of a full turn of the colour circle.
    """

    brightness: tuple[float, float] = (0.875, 1.125)
    contrast: tuple[float, float] = (0.5, 1.5)
    saturation: tuple[float, float] = (0.5, 1.5)
    hue: tuple[float, float] = (-0.05, 0.05)
    probability: float = 0.5

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        contrast_first, *chances = torch.rand(5, generator=generator).tolist()
        draws = torch.rand(4, generator=generator).tolist()
        steps = [
            (F.adjust_brightness, self.brightness),
            (F.adjust_saturation, self.saturation),
            (F.adjust_hue, self.hue),
        ]
        position = 1 if contrast_first < 0.5 else 3
        steps.insert(position, (F.adjust_contrast, self.contrast))
        for (adjust, (low, high)), chance, drawn in zip(steps, chances, draws, strict=True):
            if chance < self.probability:
                factor = low + (high - low) * drawn
                image = adjust(image, factor)
        return image, target


@dataclass(frozen=True)
class SeenRegion:
    """Zoom-out and IoU crop that keep the scale of the image, so that other geometric transforms can follow.

    zoom_out: sides of the largest canvas, in sides of the image; 1: no zoom-out. iou_crop: whether to crop. A result of
    more than `MAX_CANVAS_PIXELS` is shrunk to that number of pixels.
    """

    zoom_out: float = 4.0
    iou_crop: bool = True

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> Sample:
        region, seen = draw_seen(image, target, self.zoom_out, self.iou_crop, generator)
        if region == (0, 0, *image.shape[-2:]):
            return image, seen
        _, _, height, width = region
        shrink = max(1.0, (height * width / MAX_CANVAS_PIXELS) ** 0.5)
        size_hw = (max(1, int(height / shrink)), max(1, int(width / shrink)))
        return render_region(image, seen, region, size_hw)


def draw_seen(
    image: Tensor,
    target: Target,
    zoom_out: float,
    iou_crop: bool,
    generator: torch.Generator,
) -> tuple[Region, Target]:
    """Draw the region that is visible after the zoom-out and the crop; return it and the target.

    zoom_out: see `SeenRegion`. The region is in pixels of the image and may extend beyond it. If `iou_crop`, boxes
    outside of the region are dropped from the target.
    """
    region = (0, 0, *image.shape[-2:])
    if zoom_out > 1:
        region = draw_zoom_out(region[2:], zoom_out, generator)
    if iou_crop:
        boxes = target["boxes"][target["iscrowd"] == 0]
        region = draw_iou_crop(region, boxes, generator)
        target = keep_seen(target, region)
    return region, target


def draw_zoom_out(size_hw: Size, max_side: float, generator: torch.Generator) -> Region:
    """Draw a canvas of the image's shape around the image, or, as likely, only the image (`RandomZoomOut`).

    max_side: sides of the largest canvas, in sides of the image. Returns the canvas as a region in pixels of the image.
    """
    chance, drawn, down, right = torch.rand(4, generator=generator).tolist()
    if chance >= 0.5:
        return 0, 0, *size_hw
    image_height, image_width = size_hw
    scale = 1.0 + (max_side - 1.0) * drawn
    height = int(image_height * scale)
    width = int(image_width * scale)
    top = -int((height - image_height) * down)
    left = -int((width - image_width) * right)
    return top, left, height, width


def draw_iou_crop(region: Region, boxes: Tensor, generator: torch.Generator) -> Region:
    """Draw a part of the region that has the centre of a box and overlaps such a box enough (`RandomIoUCrop`).

    Enough is an IoU drawn from `MIN_IOUS`; the sides are at least 0.3 of the region's, their ratio 1 : 2 to 2 : 1.
    After 40 trials without success another IoU is drawn. Without boxes nothing is cut.

    Args:
        boxes: (N, 4) xyxy in pixels of the image.
    """
    top, left, height, width = region
    while len(boxes):
        min_iou = MIN_IOUS[draw_int(0, len(MIN_IOUS) - 1, generator)]
        if min_iou >= 1:
            break
        draws = torch.rand(2, CROP_CANDIDATES, 2, generator=generator, dtype=torch.float64)
        scales, places = draws.unbind(0)
        whole = torch.tensor([width, height])
        sides = (whole * (0.3 + 0.7 * scales)).long()  # (CROP_CANDIDATES, 2) width, height
        starts = ((whole - sides) * places).long()  # (CROP_CANDIDATES, 2) x, y in the region
        corners = torch.cat([starts, starts + sides], dim=1).float()
        corners = corners + torch.tensor([left, top, left, top])  # in the image
        inside = centres_strictly_inside(boxes, corners)  # (CROP_CANDIDATES, N)
        ious = pairwise_iou(corners, boxes).masked_fill(~inside, -1.0)
        ratio = sides[:, 0] / sides[:, 1]
        has_sides = (sides > 0).all(dim=1)
        has_shape = (ratio >= 0.5) & (ratio <= 2.0)
        has_box = inside.any(dim=1)
        overlaps = ious.amax(dim=1) >= min_iou
        good = has_sides & has_shape & has_box & overlaps
        if bool(good.any()):
            chosen = int(good.int().argmax())  # the first
            x, y = starts[chosen].tolist()
            crop_width, crop_height = sides[chosen].tolist()
            return top + y, left + x, crop_height, crop_width
    return region


def centres_strictly_inside(boxes: Tensor, regions_xyxy: Tensor) -> Tensor:
    """Return (M, N) bool: whether the centre of each of N boxes lies inside each of M regions, borders left out.

    The same as in torchvision's `RandomIoUCrop`; GluonCV counts borders, see `centres_in_region`.
    """
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2  # (N, 2)
    after_start = centres > regions_xyxy[:, None, :2]  # (M, N, 2)
    before_end = centres < regions_xyxy[:, None, 2:]
    return (after_start & before_end).all(dim=-1)


def keep_seen(target: Target, region: Region) -> Target:
    """Return the target without the boxes whose centre lies outside the region; crowd boxes are never dropped."""
    top, left, height, width = region
    corners = torch.tensor([[left, top, left + width, top + height]], dtype=torch.float32)
    inside = centres_strictly_inside(target["boxes"], corners)[0]
    is_crowd = target["iscrowd"] != 0
    return keep_boxes(target, inside | is_crowd)


def render_region(image: Tensor, target: Target, region: Region, size_hw: Size) -> Sample:
    """Render a region of an image as a new image of `size_hw`, and clip the boxes to it.

    Where the region extends beyond the image, the new image has the colour `SSD_FILL_RGB`. The old image begins and
    ends at whole pixels of the new one, and the boxes follow this rounding.
    """
    top, left, height, width = region
    out_height, out_width = size_hw
    rows, y, out_rows = _span(top, height, image.shape[-2], out_height)
    columns, x, out_columns = _span(left, width, image.shape[-1], out_width)
    seen = (rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start)
    picture, target = crop(image, target, seen)
    picture, target = resize(picture, target, (out_rows, out_columns))
    if (out_rows, out_columns) == size_hw:
        return picture, target
    colour = torch.tensor(SSD_FILL_RGB, dtype=torch.uint8)
    canvas = colour.expand(out_height, out_width, 3).clone()
    canvas = canvas.permute(2, 0, 1)  # channels-last in memory
    canvas[:, y : y + out_rows, x : x + out_columns] = picture
    return canvas, move_target(target, x, y, size_hw)


def _span(start: int, length: int, side: int, out_side: int) -> tuple[slice, int, int]:
    """Cut [start, start + length) to [0, side); return it as a slice, and its start and length in the output.

    The output has `out_side` pixels; the length is at least one. Of a side of 100, the rows -50 to 150 shown on 40
    pixels are the slice 0:100 on the pixels 10 to 30: (slice(0, 100), 10, 20).
    """
    first = max(start, 0)
    last = min(start + length, side)
    out_first = round((first - start) * out_side / length)
    out_first = min(out_first, out_side - 1)
    out_last = round((last - start) * out_side / length)
    out_last = max(out_last, out_first + 1)
    return slice(first, last), out_first, out_last - out_first
