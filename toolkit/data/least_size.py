"""The size below which no image is decoded for training and evaluation (`data.decode`).

It follows from the settings of the augmentation: an image that is resized to 640 pixels need not be decoded at 4000,
but a crop of a tenth of it that is enlarged to 640 pixels needs them all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.data.transforms.geometry import Size, pair_hw, shorter_side_size

MARGIN = 1.5  # sides of a decoded image, at least, in sides of what is asked for
# Smallest side of an `iou_crop` in sides of the image. YOLOv3's has the aspect 1 : 2 at 0.3 of both sides.
SMALLEST_IOU_CROPS = {"detr": 0.3, "ssd": 0.3, "yolov3": 0.3 / 2**0.5}
# `detr_train_transform` cuts 384 pixels or more from an image whose shorter side has 600 pixels or fewer.
SMALLEST_RANDOM_CROP = 384 / 600


@dataclass(frozen=True)
class LeastSize:
    """Function from the size (h, w) of an image to the size below which it is not decoded.

    size_hw: the largest size that images are resized to; None: `shorter` and `max_longer` decide, as in
        `shorter_side_size`.
    smallest_crop: smallest side of a crop that is resized to it, in sides of the image; 1: nothing is cut.
    """

    size_hw: Size | None
    shorter: int = 1
    max_longer: int | None = None
    smallest_crop: float = 1.0

    def __call__(self, image_hw: Size) -> Size:
        asked_hw = self.size_hw or shorter_side_size(image_hw, self.shorter, self.max_longer)
        factor = MARGIN / self.smallest_crop
        return math.ceil(asked_hw[0] * factor), math.ceil(asked_hw[1] * factor)


def least_size_of(c: Any) -> LeastSize | None:
    """Return the rule by which the images of a training and of its evaluations are decoded; None: all are whole.

    They are whole with `decode` full; with `tile`, whose tiles lie in pixels of the whole picture; with `mixup`,
    which places two images on one canvas in the sizes that they have; and with `augment`, whose transforms may cut any
    part of an image, or one of a number of pixels.

    Args:
        c: settings with the names of `toolkit.run.settings.DataConfig`.
    """
    if c.decode == "full" or c.tile is not None or c.mixup or c.augment:
        return None
    smallest_crop = SMALLEST_IOU_CROPS[c.recipe] if c.iou_crop else 1.0
    if not c.scales:
        return LeastSize(_largest_sides((c.image_size, *c.multi_scale)), smallest_crop=smallest_crop)
    if c.random_crop:
        smallest_crop *= SMALLEST_RANDOM_CROP
    # The limit of the longer side is one of the crop, of which the image may be many times as long.
    max_longer = c.max_size if smallest_crop == 1 else None
    return LeastSize(None, max(c.scales), max_longer, smallest_crop)


def _largest_sides(sizes: Sequence[int | Sequence[int]]) -> Size:
    sizes_hw = [pair_hw(size) for size in sizes]
    heights, widths = zip(*sizes_hw, strict=True)
    return max(heights), max(widths)
