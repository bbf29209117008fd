"""Conditional DETR (Meng et al., ICCV 2021) on any timm backbone: transformers' model, our losses.

transformers' own auxiliary outputs have the defect of its DETR: the normalised state goes into the next decoder layer.
Here the model runs with `auxiliary_loss=False`, and the decoder's norm is applied to a copy of every layer's state.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import ConditionalDetrConfig, ConditionalDetrForObjectDetection

from toolkit.models.detr.base import FocalDetector, inverse_sigmoid
from toolkit.models.detr.detr import ENCODER_DECODER, decoder_states
from toolkit.models.detr.initialise import initialise_transformer_, start_heads_
from toolkit.models.detr.options import ConditionalDetrOptions


class ConditionalDetr(FocalDetector):
    """`transformers.ConditionalDetrForObjectDetection`. Settings: see `ConditionalDetrOptions`."""

    Options = ConditionalDetrOptions
    config_class, model_class = ConditionalDetrConfig, ConditionalDetrForObjectDetection
    entries = {**ENCODER_DECODER, "dilation": ["dilation"]}
    default_weights = {"loss_ce": 2.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_labels_classifier.*": (0, 1, 0)}

    def _initialise(self, options: ConditionalDetrOptions, source_config: Mapping | None) -> None:
        initialise_as_published_(
            self.model, self.model.model.query_position_embeddings, self.model.class_labels_classifier
        )

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """`logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` of every decoder layer; see `Detr.forward`."""
        states, outputs = decoder_states(self, images, sizes)
        with torch.autocast(images.device.type, enabled=False):
            centres = inverse_sigmoid(outputs.reference_points.to(states.dtype)).transpose(0, 1)  # (B, Q, 2)
            deltas = self.model.bbox_predictor(states)
            boxes = torch.cat([deltas[..., :2] + centres, deltas[..., 2:]], dim=-1).sigmoid()
            return {"logits": self.model.class_labels_classifier(states), "boxes": boxes}


def initialise_as_published_(model: nn.Module, queries: nn.Module, class_head: nn.Linear) -> None:
    """Random weights as Atten4Vis/ConditionalDETR and IDEA-Research/DAB-DETR draw them."""
    model.model.input_projection.reset_parameters()
    queries.reset_parameters()
    initialise_transformer_(model.model.encoder)
    initialise_transformer_(model.model.decoder, fused=())  # its projections are modules of their own
    start_heads_(class_head, model.bbox_predictor)
