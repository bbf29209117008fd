"""Mosaic (Bochkovskiy et al., YOLOv4, 2020): four images around one point, each at about its own scale."""

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.batch import Target
from toolkit.data.transforms.geometry import crop, keep_boxes, resize
from toolkit.data.transforms.mixup import join_targets
from toolkit.data.transforms.yolov3 import centres_inside, filled_canvas


def mosaic(
    samples: Sequence[tuple[Tensor, Target]], size_hw: tuple[int, int], point_yx: tuple[int, int]
) -> tuple[Tensor, Target]:
    """Four samples, in reading order, each with one corner at `point_yx`, cut off at the border of a canvas.

    Args:
        samples: uint8 images (3, h, w) of any size, and their targets. Each image is resized, its aspect kept, to the
            largest that fits `size_hw`.
        size_hw: of the canvas, pixels; what no image covers is FILL_RGB.
        point_yx: row and column where the four meet, inside the canvas.

    Returns an image of `size_hw` and one target; boxes with their centre cut off go, the others are clipped. image_id
    is the first's.
    """
    canvas, parts = filled_canvas(size_hw), []
    for place, (image, target) in enumerate(samples):
        fitted = _fitted_size(tuple(image.shape[-2:]), size_hw)
        image, target = resize(image, target, fitted)
        below, right = divmod(place, 2)
        # Rows and columns of the image that its quadrant has room for: the last ones above and left of the point.
        height, top = _span(fitted[0], point_yx[0], size_hw[0], bool(below))
        width, left = _span(fitted[1], point_yx[1], size_hw[1], bool(right))
        region = (top, left, height, width)
        image, target = crop(image, keep_boxes(target, centres_inside(target["boxes"], region)), region)
        y, x = point_yx[0] - (0 if below else height), point_yx[1] - (0 if right else width)
        canvas[:, y : y + height, x : x + width] = image
        parts.append({**target, "boxes": target["boxes"] + torch.tensor([x, y, x, y], dtype=torch.float32)})
    size = torch.tensor(size_hw)
    return canvas, join_targets(parts) | {"orig_size": size, "size": size.clone()}


def draw_point(size_hw: tuple[int, int], generator: torch.Generator) -> tuple[int, int]:
    """Row and column in the middle half of each side."""
    down, right = (0.25 + 0.5 * torch.rand(2, generator=generator)).tolist()
    return int(size_hw[0] * down), int(size_hw[1] * right)


def _fitted_size(image_hw: tuple[int, int], into_hw: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same aspect that fits."""
    scale = min(into_hw[0] / image_hw[0], into_hw[1] / image_hw[1])
    return tuple(max(1, min(into_hw[i], round(image_hw[i] * scale))) for i in range(2))


def _span(length: int, point: int, side: int, after: bool) -> tuple[int, int]:
    """(length, start) of the part of an image's rows that fits after the point, or, its last ones, before it."""
    room = min(length, side - point if after else point)
    return room, 0 if after else length - room
