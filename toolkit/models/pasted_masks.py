"""The pixels that predicted masks have in a picture: of masks in the box of a detection, and of masks over the whole
image."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

INSIDE = 0.5  # probability above which a pixel belongs to a mask in a box, as in torchvision's reference programs
LOGIT_EPS = 2.0**-24  # the smallest distance of a float32 probability from 1


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

    masks: (K, h, w) probabilities on the CPU.
    """
    pixels = torch.zeros(len(masks), *size_hw, dtype=torch.bool)
    for row, mask in enumerate(masks.logit(eps=LOGIT_EPS)):  # one by one, for less memory
        resized = interpolate(mask[None, None], size=size_hw, mode="bilinear", align_corners=False)
        pixels[row] = resized[0, 0] > 0
    return pixels
