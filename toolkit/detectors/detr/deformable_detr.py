"""Deformable DETR (Zhu et al., ICLR 2021) on any timm backbone, plain, with box refinement, or two-stage.

It is transformers' model with the losses of this toolkit. transformers computes no loss for the proposals of the
two-stage variant, so they would never learn; here they have one, as in the original.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, DeformableDetrImageProcessor

from toolkit.base.batch import normalize_images, pixel_mask
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import MatchedDetector, check_positions, inverse_sigmoid, precision, projection_tap
from toolkit.detectors.detr.configuration import ENCODER_DECODER, handed_over
from toolkit.detectors.detr.detr_criterion import MatchingCosts
from toolkit.detectors.detr.focal_criterion import FocalCriterion
from toolkit.detectors.detr.initialise import initialise_sampling_, initialise_transformer_, start_heads_
from toolkit.detectors.detr.options import DeformableDetrOptions
from toolkit.models.detector import MapTap

BOX_REFINE_CHOICES = ("none", "iterative", "two_stage")


class DeformableDetr(MatchedDetector):
    """`transformers.DeformableDetrForObjectDetection`. Settings: see `DeformableDetrOptions`.

    Raises:
        BadInput: see `MatchedDetector`; also if the backbone does not have maps of strides 8, 16 and 32, `box_refine`
            is unknown, or `d_model` is not a multiple of 32.
    """

    Options = DeformableDetrOptions
    config_class = DeformableDetrConfig
    model_class = DeformableDetrForObjectDetection
    processor_class = DeformableDetrImageProcessor
    entries = {**ENCODER_DECODER, "num_queries": ["num_queries", "two_stage_num_proposals"]}
    map_strides = (8, 16, 32)
    exported_sides = "fixed"  # its maps are cut by their sizes
    max_detections = 100  # of its 300 queries, in the original's evaluation
    default_weights = {"loss_ce": 2.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {
        "model.class_embed.*": (0, 1, 0),
        "model.model.decoder.class_embed.*": (0, 1, 0),
    }

    def _entries(self, options: DeformableDetrOptions, source_config: Mapping | None) -> dict[str, Any]:
        values = handed_over(options, source_config)
        box_refine = values.get("box_refine")
        d_model = values.get("d_model", 32)
        if box_refine not in (None, *BOX_REFINE_CHOICES):
            raise BadInput(f"model.box_refine: {box_refine!r} is not one of {', '.join(BOX_REFINE_CHOICES)}.")
        if d_model % 32:
            raise BadInput(
                f"model.d_model: {d_model} is not a multiple of 32, which deformable_detr's group norms need."
            )
        entries = super()._entries(options, source_config)
        if box_refine:
            entries["with_box_refine"] = box_refine != "none"
            entries["two_stage"] = box_refine == "two_stage"
        config = {**(source_config or {}), **entries}
        if config.get("decoder_layers") == 1 and not config.get("two_stage"):
            raise BadInput(
                "model.decoder_layers: 1 is too few, transformers shares heads between two and more; use 2, or "
                "model.box_refine two_stage."
            )
        return entries

    def _initialise(self, options: DeformableDetrOptions, source_config: Mapping | None) -> None:
        model = self.model
        core = self.model.model
        config = self.model.config
        if config.with_box_refine and not config.two_stage:
            # transformers shares the class head between layers; the original has one per layer, like the box heads
            model.class_embed = nn.ModuleList(copy.deepcopy(head) for head in model.class_embed)
        for projection, norm in core.input_proj:
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)
            norm.reset_parameters()
        for transformer in (core.encoder, core.decoder):
            initialise_transformer_(transformer)
            initialise_sampling_(model, transformer)
        nn.init.normal_(core.level_embed)
        if config.two_stage:
            for layer in (core.enc_output, core.pos_trans):
                layer.reset_parameters()
                nn.init.xavier_uniform_(layer.weight)
        else:
            core.query_position_embeddings.reset_parameters()
            nn.init.xavier_uniform_(core.reference_points.weight)
            nn.init.zeros_(core.reference_points.bias)
        start_heads_(model.class_embed[0], model.bbox_embed[0])
        for heads in (model.class_embed, model.bbox_embed):  # all of them start alike: copies of one
            for head in heads[1:]:
                head.load_state_dict(heads[0].state_dict())
        if not config.two_stage:
            model.bbox_embed[0].layers[-1].bias[2:] = -2.0  # boxes of an eighth of the image

    def _prepare_backbone(self, options: DeformableDetrOptions, source_config: Mapping | None) -> dict[str, Any]:
        """Prepare the backbone; the options also have `box_refine`, and `num_queries` from that variant's own entry."""
        config = self.model.config
        used = super()._prepare_backbone(options, source_config)
        if config.two_stage:
            return used | {"box_refine": "two_stage", "num_queries": config.two_stage_num_proposals}
        variant = "iterative" if config.with_box_refine else "none"
        return used | {"box_refine": variant, "num_queries": config.num_queries}

    def _criterion(self, num_classes: int, num_layers: int, costs: MatchingCosts) -> nn.Module:
        return FocalCriterion(
            num_layers,
            costs,
            "foreground" if self.model.config.two_stage else None,
        )

    def _may_leave_unused(self) -> bool:
        # With the losses of the last layer alone, the earlier heads only move reference points, which are detached.
        heads_without_loss = self.model.config.with_box_refine and not self.aux_loss
        return heads_without_loss or super()._may_leave_unused()

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return `logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` of the Q queries after each of the L decoder layers;
        see `Detr.forward`.

        The two-stage variant also returns `encoder_logits (B, P, C)` and `encoder_boxes (B, P, 4)` of all P positions
        of the encoder.

        Raises:
            BadInput: in the two-stage variant, the images have fewer positions than there are queries.
        """
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        config = self.model.config
        height, width = images.shape[-2:]
        if config.two_stage:
            strides = [8 * 2**level for level in range(config.num_feature_levels)]
            # -(-a // b) rounds up
            positions = sum(-(-height // stride) * -(-width // stride) for stride in strides)
            check_positions(height, width, positions, config.two_stage_num_proposals)
        mask = pixel_mask(sizes, images.shape[-2:])
        with precision(self.training, images.device):
            outputs = self.model.model(pixels, pixel_mask=mask)
        with torch.autocast(images.device.type, enabled=False):
            dtype = self.model.dtype
            predictions = self._predictions(outputs, dtype)
            if config.two_stage:
                predictions["encoder_logits"] = outputs.enc_outputs_class.to(dtype)
                predictions["encoder_boxes"] = outputs.enc_outputs_coord_logits.to(dtype).sigmoid()
            return predictions

    def _predictions(self, outputs: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return logits and boxes of the layers that get a loss, from the outputs of transformers' model."""
        states = outputs.intermediate_hidden_states.to(dtype).unbind(1)  # per layer (B, Q, d_model)
        # A layer's boxes are relative to those of the layer before it, the first one's to the initial points.
        moved = outputs.intermediate_reference_points.unbind(1)[:-1]
        starts = (outputs.init_reference_points, *moved)
        references = [inverse_sigmoid(start.to(dtype)) for start in starts]
        layers = zip(self.model.class_embed, self.model.bbox_embed, states, references, strict=False)
        logits = []
        boxes = []
        for class_head, box_head, state, reference in list(layers)[None if self.aux_loss else -1 :]:
            logits.append(class_head(state))
            boxes.append(_box(box_head(state), reference))
        return {"logits": torch.stack(logits), "boxes": torch.stack(boxes)}

    def map_taps(self) -> list[MapTap]:
        levels = self.model.model.input_proj
        width = self.model.config.d_model
        return [projection_tap(level, 8 * 2**i, width) for i, level in enumerate(levels)]


def _box(deltas: Tensor, reference: Tensor) -> Tensor:
    """Return the logits of a box around a point `(B, Q, 2)`, or of a refined box `(B, Q, 4)`."""
    columns = reference.shape[-1]
    moved = deltas[..., :columns] + reference
    return torch.cat([moved, deltas[..., columns:]], dim=-1).sigmoid()
