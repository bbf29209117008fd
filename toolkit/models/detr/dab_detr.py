"""DAB-DETR (Liu et al., ICLR 2022) on any timm backbone: transformers' model, our losses.

Queries are anchor boxes that every decoder layer moves; its auxiliary outputs are the original's, so they are used.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DabDetrConfig, DabDetrForObjectDetection

from toolkit.batch import normalize_images, pixel_mask
from toolkit.models.detr.configuration import (
    backbone_entry,
    build_model,
    detector_config,
    matching_costs,
    pixel_statistics,
    prepare_backbone,
)
from toolkit.models.detr.detr import initialise_transformer_, precision
from toolkit.models.detr.focal_criterion import FocalCriterion
from toolkit.models.detr.focal_detector import FocalDetector, inverse_sigmoid, start_heads_


class DabDetr(FocalDetector):
    """A detector (see docs/design.md) around `transformers.DabDetrForObjectDetection`.

    Args: those of `ConditionalDetr`. Published: no dropout, 300 queries.

    Raises:
        BadInput: unknown backbone or `freeze`, weights that cannot be had, a source of another architecture.
    """

    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_embed.*": (0, 1, 0)}

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        source_config: Mapping | None = None,
        backbone: str | None = None,
        pretrained_backbone: bool | str = False,
        freeze: str | None = None,
        dilation: bool | None = None,
        d_model: int | None = None,
        heads: int | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        ffn_dim: int | None = None,
        num_queries: int | None = None,
        dropout: float | None = None,
        aux_loss: bool = True,
        class_cost: float | None = None,
        bbox_cost: float | None = None,
        giou_cost: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ):
        super().__init__()
        if dropout is None and source_config is None:
            dropout = 0.0  # transformers: 0.1
        config = detector_config(
            DabDetrConfig,
            class_names,
            source_config,
            backbone_config=backbone_entry(source_config, backbone, None, dilation),
            dilation=dilation,
            hidden_size=d_model,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            encoder_ffn_dim=ffn_dim,
            decoder_ffn_dim=ffn_dim,
            num_queries=num_queries,
            dropout=dropout,
        )
        self.model = build_model(DabDetrForObjectDetection, config)
        initialise_as_published_(self.model)
        extractor = self.model.model.backbone.conv_encoder.model  # transformers' wrapper, where it is timm's
        extractor = getattr(extractor, "_backbone", extractor)
        prepare_backbone(extractor, config, pretrained_backbone, freeze, timm_freeze="paper")
        self.aux_loss = aux_loss
        costs = matching_costs(source_config, class_cost, bbox_cost, giou_cost, published_class_cost=2)
        self.set_loss = FocalCriterion(len(class_names), config.decoder_layers if aux_loss else 1, costs)
        self.loss_names, self.metric_names = self.set_loss.loss_names, self.set_loss.metric_names
        self.mean, self.std = pixel_statistics(config, mean, std)

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
