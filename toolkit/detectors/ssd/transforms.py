"""Training augmentation of SSD (Liu et al., ECCV 2016, section 2.2), which resizes the pixels only once.

Zoom-out, IoU crop and flip only determine the visible region; it is rendered in one resize to the size of the batch,
followed by the photometric distortion.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.base.batch import Target
from toolkit.data.transforms.geometry import Sample, Size, flip
from toolkit.data.transforms.zoom_crop_colour import PhotometricDistortion, draw_seen, render_region


@dataclass(frozen=True)
class SsdTransform:
    """`(image, target, generator, size_hw) -> (image, target)` for `toolkit.data.sampling.VariableSizes`.

    Args:
        zoom_out: half of the images are placed on a canvas of up to this many times their sides; 1: none.
        iou_crop: crop images as `draw_iou_crop` does.
        flip: mirror half of the images left to right.
        photometric: apply `PhotometricDistortion`.
    """

    zoom_out: float = 4.0
    iou_crop: bool = True
    flip: bool = True
    photometric: bool = True

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator, size_hw: Size) -> Sample:
        region, target = draw_seen(image, target, self.zoom_out, self.iou_crop, generator)
        image, target = render_region(image, target, region, size_hw)
        if self.flip and float(torch.rand((), generator=generator)) < 0.5:
            image, target = flip(image, target)
        if self.photometric:
            image, target = PhotometricDistortion()(image, target, generator)
        return image, target
