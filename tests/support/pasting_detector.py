"""A detector of masks without a network."""

from dataclasses import dataclass

import torch
from torch import nn

from toolkit.models import DetectorOptions
from toolkit.models.detector import Detector


@dataclass
class PastingOptions(DetectorOptions):
    masks: bool = False
    """Predict masks."""


class PastingDetector(Detector):
    """Finds 0, 3, 6, ... boxes in the images of a batch, each with a mask of 2 x 2 probabilities.

    found: what it has found in each image so far. pasted: the masks of each call of `paste_masks`.
    """

    Options = PastingOptions
    predicts_masks = True
    loss_names = ("loss",)
    divided_by = "images"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.found = []
        self.pasted = []

    def forward(self, images, sizes, targets=None):
        return {}

    def postprocess(self, outputs, sizes, orig_sizes, score_threshold=0.0, top_k=100):
        found = []
        for number in range(len(orig_sizes)):
            count = 3 * number
            labels = torch.zeros(count, dtype=torch.int64)
            columns = {
                "boxes": torch.rand(count, 4),
                "scores": torch.rand(count),
                "labels": labels,
            }
            found.append(columns | {"masks": torch.rand(count, 2, 2)})
        self.found += found
        return [dict(each) for each in found]

    def paste_masks(self, masks, boxes_xyxy, size_hw):
        self.pasted.append(len(masks))
        pixels = torch.zeros(len(masks), *size_hw, dtype=torch.bool)
        pixels[:, :2, :2] = masks > 0.5
        return pixels
