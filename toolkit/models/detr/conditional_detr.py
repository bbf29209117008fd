"""Conditional DETR (Meng et al., ICCV 2021) on any timm backbone: transformers' model, our losses.

transformers' own auxiliary outputs have the defect of its DETR: the normalised state goes into the next decoder layer.
Here the model runs with `auxiliary_loss=False`, and the decoder's norm is applied to a copy of every layer's state.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import ConditionalDetrConfig, ConditionalDetrForObjectDetection

from toolkit.batch import normalize_images, pixel_mask
from toolkit.models.detector import MapTap
from toolkit.models.detr.base import projection_tap
from toolkit.models.detr.configuration import (
    backbone_entry,
    build_model,
    detector_config,
    handed_over,
    matching_costs,
    pixel_statistics,
    prepare_backbone,
    to_entries,
)
from toolkit.models.detr.detr import (
    ENCODER_DECODER,
    initialise_transformer_,
    last_stride,
    normed_states,
    precision,
)
from toolkit.models.detr.focal_criterion import FocalCriterion
from toolkit.models.detr.focal_detector import FocalDetector, inverse_sigmoid, start_heads_
from toolkit.models.detr.options import ConditionalDetrOptions


class ConditionalDetr(FocalDetector):
    """`transformers.ConditionalDetrForObjectDetection`. Settings: see `ConditionalDetrOptions`.

    Raises:
        BadInput: unknown backbone or `freeze`, weights that cannot be had, a source of another architecture.
    """

    Options = ConditionalDetrOptions
    config_class = ConditionalDetrConfig
    entries = {**ENCODER_DECODER, "dilation": ["dilation"]}
    default_weights = {"loss_ce": 2.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_labels_classifier.*": (0, 1, 0)}

    def __init__(
        self, class_names: Sequence[str], options: ConditionalDetrOptions, *, source_config: Mapping | None = None
    ):
        super().__init__()
        backbone = backbone_entry(options, source_config)
        entries = to_entries(handed_over(options, source_config), self.entries)
        config = detector_config(ConditionalDetrConfig, class_names, source_config, backbone_config=backbone, **entries)
        self.model = build_model(ConditionalDetrForObjectDetection, config)
        initialise_as_published_(self.model)
        used = prepare_backbone(self.model.model.backbone.model, config, options, source_config)
        costs = matching_costs(options, source_config)
        self.aux_loss = options.aux_loss
        set_loss = FocalCriterion(len(class_names), config.decoder_layers if self.aux_loss else 1, costs)
        self._take(set_loss, pixel_statistics(config, options), used | costs._asdict())

    def map_taps(self) -> list[MapTap]:
        return [projection_tap(self.model.model.input_projection, last_stride(self.model), self.model.config.d_model)]

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """`logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` of every decoder layer; see `Detr.forward`."""
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        mask = pixel_mask(sizes, images.shape[-2:])
        with precision(self.training, images.device):
            outputs = self.model.model(pixels, pixel_mask=mask, output_hidden_states=self.aux_loss)
            states = normed_states(self.model.model.decoder.layernorm, outputs)
        with torch.autocast(images.device.type, enabled=False):
            states = states.to(self.model.dtype)
            centres = inverse_sigmoid(outputs.reference_points.to(states.dtype)).transpose(0, 1)  # (B, Q, 2)
            deltas = self.model.bbox_predictor(states)
            boxes = torch.cat([deltas[..., :2] + centres, deltas[..., 2:]], dim=-1).sigmoid()
            return {"logits": self.model.class_labels_classifier(states), "boxes": boxes}


@torch.no_grad()
def initialise_as_published_(model: ConditionalDetrForObjectDetection) -> None:
    """Random weights as Atten4Vis/ConditionalDETR draws them (transformers: N(0, 0.02), no prior)."""
    model.model.input_projection.reset_parameters()
    model.model.query_position_embeddings.reset_parameters()
    initialise_transformer_(model.model.encoder)
    initialise_transformer_(model.model.decoder, fused=())  # its projections are modules of their own
    start_heads_(model.class_labels_classifier, model.bbox_predictor)
