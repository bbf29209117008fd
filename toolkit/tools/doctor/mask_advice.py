"""Whether all objects of a data set have masks, so that a training can use them."""

from collections.abc import Sequence

import numpy as np

from toolkit.base.masks import areas
from toolkit.data.check_files import FULL_CHECK_LIMIT
from toolkit.data.table import DetectionTable

SAMPLED_IMAGES = 200  # whose masks are compared with their boxes
BOX_SHARE = 0.97  # of its box that a mask of a box alone fills


def all_have_masks(masked: Sequence[DetectionTable], plain: Sequence[DetectionTable]) -> bool:
    """Return whether every object has a mask, and not all of these are the boxes themselves, as some tools write them.

    Args:
        masked: the splits, read with masks.
        plain: the same splits, read without.
    """
    for with_masks, without in zip(masked, plain, strict=True):
        if len(with_masks) != len(without) or None in with_masks.boxes(masks=True).extra["masks"].tolist():
            return False
    return any(map(_differ_from_boxes, masked))


def few_enough(tables: Sequence[DetectionTable]) -> bool:
    """Return whether the splits are small enough to be read once more, with masks."""
    return all(len(table) <= FULL_CHECK_LIMIT for table in tables)


def _differ_from_boxes(table: DetectionTable) -> bool:
    """Return whether masks of a table fill less than their boxes, in a sample of its images."""
    boxes = table.boxes()
    sizes_hw = table.sizes_hw()
    for index in np.linspace(0, len(table) - 1, min(len(table), SAMPLED_IMAGES)).astype(int).tolist():
        part = boxes.of_image(index)
        sides = boxes.xyxy[part, 2:] - boxes.xyxy[part, :2]
        shapes = table.masks_of(index)
        of_masks = areas(shapes, tuple(sizes_hw[index].tolist()))
        if (of_masks < BOX_SHARE * sides.prod(axis=1))[~boxes.iscrowd[part]].any():
            return True
    return False
