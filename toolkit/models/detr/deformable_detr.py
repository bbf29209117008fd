"""Deformable DETR (Zhu et al., ICLR 2021) on any timm backbone, plain, with box refinement, or two-stage.

transformers' model, our losses. transformers gives the proposals of the two-stage variant no loss, so they would never
learn; here they have one, as in the original.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, DeformableDetrImageProcessor

from toolkit.batch import normalize_images, pixel_mask
from toolkit.errors import BadInput
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

VARIANTS = ("none", "iterative", "two_stage")


class DeformableDetr(FocalDetector):
    """A detector (see docs/design.md) around `transformers.DeformableDetrForObjectDetection`.

    Args: those of `ConditionalDetr` (no `dilation`; the backbone needs maps of stride 8, 16 and 32; `d_model` is a
        multiple of 32) and
        box_refine: "none"; "iterative": every decoder layer refines the boxes of the one before; "two_stage": the
            encoder also proposes the boxes to start from. None: the source's, or "none".

    Raises:
        BadInput: unknown backbone or `freeze`, weights that cannot be had, a source of another architecture.
    """

    default_weights = {"loss_ce": 2.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_embed.*": (0, 1, 0), "model.model.decoder.class_embed.*": (0, 1, 0)}
    processor_class = DeformableDetrImageProcessor

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        source_config: Mapping | None = None,
        backbone: str | None = None,
        pretrained_backbone: bool | str = False,
        freeze: str | None = None,
        d_model: int | None = None,
        heads: int | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        ffn_dim: int | None = None,
        num_queries: int | None = None,
        dropout: float | None = None,
        aux_loss: bool = True,
        box_refine: str | None = None,
        class_cost: float | None = None,
        bbox_cost: float | None = None,
        giou_cost: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ):
        super().__init__()
        if box_refine is not None and box_refine not in VARIANTS:
            raise BadInput(f"model.box_refine: {box_refine!r} is not one of {', '.join(VARIANTS)}.")
        if d_model is not None and d_model % 32:
            raise BadInput(f"model.d_model: {d_model} is no multiple of 32, which deformable_detr's group norms need.")
        config = detector_config(
            DeformableDetrConfig,
            class_names,
            source_config,
            backbone_config=backbone_entry(source_config, backbone, (8, 16, 32), None),
            d_model=d_model,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            encoder_ffn_dim=ffn_dim,
            decoder_ffn_dim=ffn_dim,
            num_queries=num_queries,
            two_stage_num_proposals=num_queries,
            dropout=dropout,
            with_box_refine=None if box_refine is None else box_refine != "none",
            two_stage=None if box_refine is None else box_refine == "two_stage",
        )
        if config.decoder_layers == 1 and not config.two_stage:
            raise BadInput(
                "model.decoder_layers: 1 is too few, transformers shares heads between two and more; use 2, or "
                "model.box_refine two_stage."
            )
        self.model = build_model(DeformableDetrForObjectDetection, config)
        if config.with_box_refine and not config.two_stage:
            # transformers shares the class head between layers; the original has one per layer, like the box heads
            self.model.class_embed = nn.ModuleList(copy.deepcopy(head) for head in self.model.class_embed)
        initialise_as_published_(self.model)
        prepare_backbone(self.model.model.backbone.model, config, pretrained_backbone, freeze, timm_freeze="paper")
        self.aux_loss = aux_loss
        costs = matching_costs(source_config, class_cost, bbox_cost, giou_cost, published_class_cost=2)
        proposals = "foreground" if config.two_stage else None
        layers = config.decoder_layers if aux_loss else 1
        self.set_loss = FocalCriterion(len(class_names), layers, costs, proposals)
        self.loss_names, self.metric_names = self.set_loss.loss_names, self.set_loss.metric_names
        self.mean, self.std = pixel_statistics(config, mean, std)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """`logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` of every decoder layer; see `Detr.forward`.

        Two-stage also `encoder_logits (B, P, C)` and `encoder_boxes (B, P, 4)` of all P positions of the encoder.

        Raises:
            BadInput: two-stage: images with fewer positions than queries.
        """
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        if self.model.config.two_stage:
            self._check_positions(*images.shape[-2:])
        with precision(self.training, images.device):
            outputs = self.model.model(pixels, pixel_mask=pixel_mask(sizes, images.shape[-2:]))
        with torch.autocast(images.device.type, enabled=False):
            dtype = self.model.dtype
            states = outputs.intermediate_hidden_states.to(dtype).unbind(1)  # per layer (B, Q, d_model)
            moved = outputs.intermediate_reference_points.unbind(1)[:-1]
            references = [inverse_sigmoid(r.to(dtype)) for r in (outputs.init_reference_points, *moved)]
            layers = list(zip(self.model.class_embed, self.model.bbox_embed, states, references, strict=False))
            layers = layers if self.aux_loss else layers[-1:]
            logits = torch.stack([class_head(state) for class_head, _, state, _ in layers])
            boxes = torch.stack([_box(box_head(state), reference) for _, box_head, state, reference in layers])
            predictions = {"logits": logits, "boxes": boxes}
            if self.model.config.two_stage:
                proposed = outputs.enc_outputs_coord_logits.to(dtype).sigmoid()
                predictions |= {"encoder_logits": outputs.enc_outputs_class.to(dtype), "encoder_boxes": proposed}
            return predictions

    def _check_positions(self, height: int, width: int) -> None:
        config = self.model.config
        strides = [8 * 2**level for level in range(config.num_feature_levels)]
        positions = sum(-(-height // stride) * -(-width // stride) for stride in strides)
        if positions < config.two_stage_num_proposals:
            raise BadInput(
                f"model.num_queries {config.two_stage_num_proposals}: images of {height}x{width} px have only "
                f"{positions} positions; use larger images or fewer queries."
            )


def _box(deltas: Tensor, reference: Tensor) -> Tensor:
    """A box around a point `(B, Q, 2)`, or a box refined `(B, Q, 4)`; both are logits."""
    moved = torch.cat([deltas[..., : reference.shape[-1]] + reference, deltas[..., reference.shape[-1] :]], dim=-1)
    return moved.sigmoid()


@torch.no_grad()
def initialise_as_published_(model: DeformableDetrForObjectDetection) -> None:
    """Random weights as fundamentalvision/Deformable-DETR draws them; transformers draws N(0, 0.02), without prior.

    Sampling offsets of the attention start as a star around the reference point, which transformers has right.
    """
    core, config = model.model, model.config
    for projection, norm in core.input_proj:
        nn.init.xavier_uniform_(projection.weight)
        nn.init.zeros_(projection.bias)
        norm.reset_parameters()
    for transformer in (core.encoder, core.decoder):
        initialise_transformer_(transformer)
        for module in transformer.modules():
            if hasattr(module, "sampling_offsets"):
                model._init_weights(module)
    nn.init.normal_(core.level_embed)
    if config.two_stage:
        for layer in (core.enc_output, core.pos_trans):
            layer.reset_parameters()
            nn.init.xavier_uniform_(layer.weight)
    else:
        core.query_position_embeddings.reset_parameters()
        nn.init.xavier_uniform_(core.reference_points.weight)
        nn.init.zeros_(core.reference_points.bias)
    # All heads start alike: copies of one.
    start_heads_(model.class_embed[0], model.bbox_embed[0])
    for class_head, box_head in zip(model.class_embed[1:], model.bbox_embed[1:], strict=True):
        class_head.load_state_dict(model.class_embed[0].state_dict())
        box_head.load_state_dict(model.bbox_embed[0].state_dict())
    if not config.two_stage:
        model.bbox_embed[0].layers[-1].bias[2:] = -2.0  # boxes of an eighth of the image
