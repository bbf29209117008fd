"""Conditional DETR (Meng et al., ICCV 2021) and DAB-DETR (Liu et al., ICLR 2022) on any timm backbone: transformers'
models with the losses of this toolkit.

transformers' own auxiliary outputs have the same defect as those of its DETR: the normalised state goes into the next
decoder layer. Here Conditional DETR runs with `auxiliary_loss=False`, and the decoder's norm is applied to a copy of
every layer's state. The queries of DAB-DETR are anchor boxes that every decoder layer updates; its auxiliary outputs
are the original's.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import (
    ConditionalDetrConfig,
    ConditionalDetrForObjectDetection,
    DabDetrConfig,
    DabDetrForObjectDetection,
)

from toolkit.base.batch import normalize_images, pixel_mask
from toolkit.detectors.detr.base import MatchedDetector, inverse_sigmoid, precision
from toolkit.detectors.detr.configuration import ENCODER_DECODER
from toolkit.detectors.detr.detr import decoder_states
from toolkit.detectors.detr.initialise import initialise_transformer_, start_heads_
from toolkit.detectors.detr.options import ConditionalDetrOptions, DabDetrOptions


class ConditionalDetr(MatchedDetector):
    """`transformers.ConditionalDetrForObjectDetection`. Settings: see `ConditionalDetrOptions`."""

    Options = ConditionalDetrOptions
    config_class = ConditionalDetrConfig
    model_class = ConditionalDetrForObjectDetection
    entries = {**ENCODER_DECODER, "dilation": ["dilation"]}
    default_weights = {"loss_ce": 2.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    max_detections = 100  # of its 300 queries, in the original's evaluation
    class_tensors = {"model.class_labels_classifier.*": (0, 1, 0)}

    def _initialise(self, options: ConditionalDetrOptions, source_config: Mapping | None) -> None:
        model = self.model
        _initialise(model, model.model.query_position_embeddings, model.class_labels_classifier)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return `logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` of the Q queries after each of the L decoder layers;
        see `Detr.forward`."""
        states, outputs = decoder_states(self, images, sizes)
        with torch.autocast(images.device.type, enabled=False):
            references = outputs.reference_points.to(states.dtype)  # (Q, B, 2) fractions of the image
            centres = inverse_sigmoid(references).transpose(0, 1)
            deltas = self.model.bbox_predictor(states)  # (L, B, Q, 4)
            centred = torch.cat([deltas[..., :2] + centres, deltas[..., 2:]], dim=-1)
            return {
                "logits": self.model.class_labels_classifier(states),
                "boxes": centred.sigmoid(),
            }


class DabDetr(MatchedDetector):
    """`transformers.DabDetrForObjectDetection`. Settings: see `DabDetrOptions`."""

    Options = DabDetrOptions
    config_class = DabDetrConfig
    model_class = DabDetrForObjectDetection
    entries = {**ENCODER_DECODER, "d_model": ["hidden_size"], "dilation": ["dilation"]}
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_embed.*": (0, 1, 0)}

    def _initialise(self, options: DabDetrOptions, source_config: Mapping | None) -> None:
        _initialise(self.model, self.model.model.query_refpoint_embeddings, self.model.class_embed)

    def _extractor(self) -> nn.Module:
        extractor = self.model.model.backbone.conv_encoder.model  # transformers' wrapper, where it is timm's
        return getattr(extractor, "_backbone", extractor)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return `logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` of the Q queries after each of the L decoder layers;
        see `Detr.forward`."""
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        mask = pixel_mask(sizes, images.shape[-2:])
        with precision(self.training, images.device):
            outputs = self.model.model(pixels, pixel_mask=mask)
        with torch.autocast(images.device.type, enabled=False):
            first = 0 if self.aux_loss else -1
            states = outputs.intermediate_hidden_states[first:].to(self.model.dtype)
            references = outputs.reference_points[first:].to(self.model.dtype)
            moved = self.model.bbox_predictor(states) + inverse_sigmoid(references)
            return {
                "logits": self.model.class_embed(states),
                "boxes": moved.sigmoid(),
            }


def _initialise(model: nn.Module, queries: nn.Module, class_head: nn.Linear) -> None:
    """Draw random weights as Atten4Vis/ConditionalDETR and IDEA-Research/DAB-DETR do."""
    model.model.input_projection.reset_parameters()
    queries.reset_parameters()
    initialise_transformer_(model.model.encoder)
    initialise_transformer_(model.model.decoder, fused=())  # its projections are modules of their own
    start_heads_(class_head, model.bbox_predictor)
