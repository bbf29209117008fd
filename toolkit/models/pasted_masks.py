"""The pixels that predicted masks have in a picture: of masks in the box of a detection, and of masks over the whole
image."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

INSIDE = 0.5  # probability above which a pixel belongs to a mask in a box, as in torchvision's reference programs
LOGIT_EPS = 2.0**-24  # the smallest distance of a float32 probability from 1
MAX_PART = 0.3  # of a picture: a larger part takes longer as products of matrices than all of it by `interpolate`


def masks_in_boxes(masks: Tensor, boxes_xyxy: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return the pixels (K, H, W) bool of masks in a picture of this height and width; torchvision's
    `paste_masks_in_image`, cut at a probability of one half.

    masks: (K, m, m) probabilities on the CPU. boxes_xyxy: (K, 4) in pixels of the picture.
    """
    height, width = size_hw
    pixels = torch.zeros(len(masks), height, width, dtype=torch.bool)
    side = masks.shape[-1]
    framed = pad(masks, (1, 1, 1, 1))  # a border of zeros, so that a mask fades out at the edge of its box
    grown = _grown(boxes_xyxy, (side + 2) / side).to(torch.int64)
    for row, (left, top, right, bottom) in enumerate(grown.tolist()):
        columns = max(right - left + 1, 1)
        rows = max(bottom - top + 1, 1)
        resized = interpolate(framed[row, None, None], size=(rows, columns), mode="bilinear", align_corners=False)[0, 0]
        x0, x1 = max(left, 0), min(right + 1, width)
        y0, y1 = max(top, 0), min(bottom + 1, height)
        if x0 < x1 and y0 < y1:
            pixels[row, y0:y1, x0:x1] = resized[y0 - top : y1 - top, x0 - left : x1 - left] > INSIDE
    return pixels


def _grown(boxes_xyxy: Tensor, factor: float) -> Tensor:
    """Return boxes (K, 4) `factor` times as wide and high around the same centres, rounded as torchvision's."""
    left, top, right, bottom = boxes_xyxy.unbind(1)
    half_width = (right - left) * 0.5 * factor
    half_height = (bottom - top) * 0.5 * factor
    x = (right + left) * 0.5
    y = (bottom + top) * 0.5
    return torch.stack([x - half_width, y - half_height, x + half_width, y + half_height], dim=1)


def masks_over_image(masks: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return the pixels (K, H, W) bool of masks in a picture of this height and width, as transformers'
    `post_process_instance_segmentation`: logits are interpolated and cut at 0.

    Only the pixels around cells above one half are interpolated, since no others can be inside. A pixel whose logit is
    0 but for rounding may be inside here and outside there.

    masks: (K, h, w) probabilities on the CPU.
    """
    pixels = torch.zeros(len(masks), *size_hw, dtype=torch.bool)
    row_weights = _weights(masks.shape[1], size_hw[0])
    column_weights = _weights(masks.shape[2], size_hw[1])
    for row, logits in enumerate(masks.logit(eps=LOGIT_EPS)):  # one by one, for less memory
        is_inside = logits > 0
        if not is_inside.any():
            continue
        cell_rows, pixel_rows = _around(is_inside.any(1), row_weights)
        cell_columns, pixel_columns = _around(is_inside.any(0), column_weights)
        part = pixels[row, pixel_rows, pixel_columns]
        if part.numel() > MAX_PART * pixels[row].numel():
            resized = interpolate(logits[None, None], size=size_hw, mode="bilinear", align_corners=False)[0, 0]
            part[:] = resized[pixel_rows, pixel_columns] > 0
        else:
            down = row_weights[pixel_rows, cell_rows]
            across = column_weights[pixel_columns, cell_columns]
            part[:] = down @ logits[cell_rows, cell_columns].double() @ across.T > 0
    return pixels


def _weights(cells: int, length: int) -> Tensor:
    """Return the weights (length, cells) float64 of cells in pixels along an axis, those of `interpolate`."""
    each = torch.eye(cells)[None]
    return interpolate(each, size=length, mode="linear", align_corners=False)[0].T.double()


def _around(is_inside: Tensor, weights: Tensor) -> tuple[slice, slice]:
    """Return the cells from the first to the last that are inside, and one more on each side, along an axis; and the
    pixels on which those inside have a weight.

    is_inside: (cells,) bool, at least one is true. weights: (length, cells).
    """
    places = is_inside.nonzero()[:, 0].tolist()
    first, last = places[0], places[-1]
    touched = (weights[:, first : last + 1] > 0).any(1).nonzero()[:, 0].tolist()
    cells = slice(max(first - 1, 0), last + 2)
    pixels = slice(touched[0], touched[-1] + 1) if touched else slice(0, 0)
    return cells, pixels
