"""DAB-DETR (Liu et al., ICLR 2022) on any timm backbone: transformers' model, our losses.

Queries are anchor boxes that every decoder layer updates. transformers' auxiliary outputs are those of the original, so
they are used.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import DabDetrConfig, DabDetrForObjectDetection

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
from toolkit.models.detr.detr import ENCODER_DECODER, initialise_transformer_, precision
from toolkit.models.detr.focal_criterion import FocalCriterion
from toolkit.models.detr.focal_detector import FocalDetector, inverse_sigmoid, start_heads_
from toolkit.models.detr.options import DabDetrOptions


class DabDetr(FocalDetector):
    """`transformers.DabDetrForObjectDetection`. Settings: see `DabDetrOptions`.

    Raises:
        BadInput: unknown backbone or `freeze`, weights that cannot be had, a source of another architecture.
    """

    Options = DabDetrOptions
    config_class = DabDetrConfig
    entries = {**ENCODER_DECODER, "d_model": ["hidden_size"], "dilation": ["dilation"]}
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_embed.*": (0, 1, 0)}

    def __init__(self, class_names: Sequence[str], options: DabDetrOptions, *, source_config: Mapping | None = None):
        super().__init__()
        backbone = backbone_entry(options, source_config)
        entries = to_entries(handed_over(options, source_config), self.entries)
        config = detector_config(DabDetrConfig, class_names, source_config, backbone_config=backbone, **entries)
        self.model = build_model(DabDetrForObjectDetection, config)
        initialise_as_published_(self.model)
        used = prepare_backbone(self._extractor(), config, options, source_config)
        costs = matching_costs(options, source_config)
        self.aux_loss = options.aux_loss
        set_loss = FocalCriterion(len(class_names), config.decoder_layers if self.aux_loss else 1, costs)
        self._take(set_loss, pixel_statistics(config, options), used | costs._asdict())

    def _extractor(self) -> nn.Module:
        extractor = self.model.model.backbone.conv_encoder.model  # transformers' wrapper, where it is timm's
        return getattr(extractor, "_backbone", extractor)

    def map_taps(self) -> list[MapTap]:
        of_timm = getattr(self._extractor(), "feature_info", None)
        stride = of_timm.reduction()[-1] if of_timm else 32
        return [projection_tap(self.model.model.input_projection, stride, self.model.config.hidden_size)]

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


@torch.no_grad()
def initialise_as_published_(model: DabDetrForObjectDetection) -> None:
    """Random weights as IDEA-Research/DAB-DETR draws them (transformers: N(0, 0.02), prior 1 / (classes + 1))."""
    model.model.input_projection.reset_parameters()
    model.model.query_refpoint_embeddings.reset_parameters()
    initialise_transformer_(model.model.encoder)
    initialise_transformer_(model.model.decoder, fused=())  # its projections are modules of their own
    start_heads_(model.class_embed, model.bbox_predictor)  # the decoder's box head is the same one
