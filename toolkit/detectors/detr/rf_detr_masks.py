"""The masks of RF-DETR: transformers' segmentation head.

A mask is the product of a query's vector with a map of pixel vectors, at a quarter of the image's size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RfDetrConfig
from transformers.models.rf_detr.modeling_rf_detr import RfDetrSegmentationBlock, RfDetrSegmentationMLPBlock

from toolkit.detectors.detr.mask_terms import PredictedMasks


class MaskHead(nn.Module):
    """The segmentation head of transformers' `RfDetrForInstanceSegmentation`, under its names."""

    def __init__(self, config: RfDetrConfig):
        super().__init__()
        width = config.d_model
        self.downsampling = config.mask_downsample_ratio
        blocks = [RfDetrSegmentationBlock(config) for _ in range(config.decoder_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.spatial_features_proj = nn.Conv2d(width, width, kernel_size=1)
        self.query_features_block = RfDetrSegmentationMLPBlock(config)
        self.query_features_proj = nn.Linear(width, width)
        self.segmentation_bias = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor, states: Tensor, proposals: Tensor, image_hw: tuple[int, int]) -> PredictedMasks:
        """Return the masks of all decoder layers, followed by those of the encoder's proposals.

        Args:
            features: (B, D, rows, columns) map of the backbone.
            states: (L, B, Q, D) queries after each of the last L decoder layers.
            proposals: (B, Q, D) queries that the encoder proposes.
            image_hw: height and width of the images in pixels.
        """
        height, width = (side // self.downsampling for side in image_hw)
        first = F.interpolate(features, size=(height, width), mode="bilinear", align_corners=False)
        maps = []
        current = first
        for block in self.blocks:
            current = block(current)
            maps.append(self.spatial_features_proj(current))
        maps = torch.stack([*maps[-len(states) :], first])
        queries = torch.cat([states, proposals[None]])
        queries = self.query_features_proj(self.query_features_block(queries))
        return PredictedMasks(maps, queries.to(maps.dtype), self.segmentation_bias)
