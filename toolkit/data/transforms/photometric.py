"""Photometric distortion of training images, on uint8."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from toolkit.batch import Target


@dataclass(frozen=True)
class PhotometricDistortion:
    """Brightness, contrast, saturation and hue, each on half of the images (SSD, Liu et al. 2016, section 2.2).

    The ranges are torchvision's; contrast comes first or last, as likely. uint8 saturates at 0 and 255.
    hue is in turns.
    """

    brightness: tuple[float, float] = (0.875, 1.125)
    contrast: tuple[float, float] = (0.5, 1.5)
    saturation: tuple[float, float] = (0.5, 1.5)
    hue: tuple[float, float] = (-0.05, 0.05)
    probability: float = 0.5

    def __call__(self, image: Tensor, target: Target, generator: torch.Generator) -> tuple[Tensor, Target]:
        contrast_first, *chances = torch.rand(5, generator=generator).tolist()
        factors = torch.rand(4, generator=generator).tolist()
        steps = [(F.adjust_brightness, self.brightness), (F.adjust_saturation, self.saturation)]
        steps.append((F.adjust_hue, self.hue))
        steps.insert(1 if contrast_first < 0.5 else 3, (F.adjust_contrast, self.contrast))
        for (adjust, (low, high)), chance, factor in zip(steps, chances, factors, strict=True):
            if chance < self.probability:
                image = adjust(image, low + (high - low) * factor)
        return image, target
