"""DAB-DETR (Liu et al., ICLR 2022) on any timm backbone: transformers' model, our losses.

Queries are anchor boxes that every decoder layer updates. transformers' auxiliary outputs are those of the original, so
they are used.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import DabDetrConfig, DabDetrForObjectDetection

from toolkit.batch import normalize_images, pixel_mask
from toolkit.models.detr.base import FocalDetector, inverse_sigmoid, precision
from toolkit.models.detr.conditional_detr import initialise_as_published_
from toolkit.models.detr.detr import ENCODER_DECODER
from toolkit.models.detr.options import DabDetrOptions


class DabDetr(FocalDetector):
    """`transformers.DabDetrForObjectDetection`. Settings: see `DabDetrOptions`."""

    Options = DabDetrOptions
    config_class, model_class = DabDetrConfig, DabDetrForObjectDetection
    entries = {**ENCODER_DECODER, "d_model": ["hidden_size"], "dilation": ["dilation"]}
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_embed.*": (0, 1, 0)}

    def _initialise(self, options: DabDetrOptions, source_config: Mapping | None) -> None:
        initialise_as_published_(self.model, self.model.model.query_refpoint_embeddings, self.model.class_embed)

    def _extractor(self) -> nn.Module:
        extractor = self.model.model.backbone.conv_encoder.model  # transformers' wrapper, where it is timm's
        return getattr(extractor, "_backbone", extractor)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """`logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` of every decoder layer; see `Detr.forward`."""
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        with precision(self.training, images.device):
            outputs = self.model.model(pixels, pixel_mask=pixel_mask(sizes, images.shape[-2:]))
        with torch.autocast(images.device.type, enabled=False):
            first = 0 if self.aux_loss else -1
            states = outputs.intermediate_hidden_states[first:].to(self.model.dtype)
            references = outputs.reference_points[first:].to(self.model.dtype)
            boxes = (self.model.bbox_predictor(states) + inverse_sigmoid(references)).sigmoid()
            return {"logits": self.model.class_embed(states), "boxes": boxes}
