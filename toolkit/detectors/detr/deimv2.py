"""DEIMv2 (Huang et al., 2025, arXiv 2509.20787): D-FINE with a lighter encoder and decoder and another classification
loss. On any timm backbone it computes what transformers' model does; in its published sizes, what its own program does.

transformers' DEIMv2 differs from the program that trained the published weights (Intellindust-AI-Lab/DEIMv2,
engine/deim/deim_decoder.py): transformers projects and normalises the encoder's output before it chooses queries,
embeds the position of a query again in every layer, and has ReLU in its heads. `as_its_program_` undoes all of it.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import Deimv2Config, Deimv2ForObjectDetection
from transformers.models.deimv2.modeling_deimv2 import (
    Deimv2Decoder,
    Deimv2DecoderOutput,
    distance2bbox,
    weighting_function,
)

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import inverse_sigmoid
from toolkit.detectors.detr.d_fine import DFine, box_heads, silu_in_
from toolkit.detectors.detr.options import Deimv2Options
from toolkit.detectors.detr.sizes import DEIMV2_BACKBONE_FILES, DEIMV2_SIZES, size_of
from toolkit.detectors.detr.weights_deimv2 import vit_names
from toolkit.models.weights.backbone_file import load_publishers_file

ENTRIES_OF_A_SIZE = ("d_model", "encoder_ffn_dim", "decoder_layers", "feat_strides", "backbone_config")


class Deimv2(DFine):
    """`transformers.Deimv2ForObjectDetection`. Settings: see `Deimv2Options`. See `RTDetrV2` for the images and the
    exceptions."""

    Options = Deimv2Options
    config_class = Deimv2Config
    model_class = Deimv2ForObjectDetection
    is_mal = True  # the classification loss: matchability-aware
    published = {
        **DFine.published,
        "decoder_activation_function": "silu",
        "encoder_has_trailing_conv": False,
    }
    default_weights = {
        "loss_mal": 1.0,
        "loss_bbox": 5.0,
        "loss_giou": 2.0,
        "loss_fgl": 0.15,
        "loss_ddf": 1.5,
    }

    def __init__(self, class_names: Sequence[str], options: Deimv2Options, *, source_config: Mapping | None = None):
        if options.size not in (None, *DEIMV2_SIZES):
            raise BadInput(f"model.size: {options.size!r} is not one of {', '.join(DEIMV2_SIZES)}.")
        if options.size and source_config is None:
            source_config = copy.deepcopy(DEIMV2_SIZES[options.size])
        elif options.size and size_of(source_config, DEIMV2_SIZES, ENTRIES_OF_A_SIZE) != options.size:
            raise BadInput(f"model.size {options.size}: the pretrained model has another one; leave it out")
        own = copy.copy(options)  # with a backbone of its own, whose file timm does not know
        backbone_file = DEIMV2_BACKBONE_FILES.get(options.size)
        if backbone_file:
            own.pretrained_backbone = False
        super().__init__(class_names, own, source_config=source_config)
        self.original = options.original or options.size is not None
        self.is_of_transformers = not self.original
        if self.original:
            as_its_program_(self.model)
        if backbone_file and options.pretrained_backbone:
            file = options.pretrained_backbone
            load_publishers_file(self._backbone(), file, vit_names, f"DEIMv2 {options.size}", backbone_file)
        self.used["original"] = self.original

    def _backbone(self) -> nn.Module:
        encoder = self.model.model.conv_encoder
        return encoder.backbone if hasattr(encoder, "backbone") else encoder.model


def as_its_program_(model: Deimv2ForObjectDetection) -> None:
    """Change a DEIMv2 of transformers in place so that, with the same weights, it computes what DEIMv2's own program
    does."""
    core = model.model
    config = model.config
    core.enc_output = nn.Identity()
    core.decoder.__class__ = _Decoder
    silu_in_(box_heads(model))
    encoder = core.conv_encoder
    if not hasattr(encoder, "backbone"):
        projections = nn.ModuleList()
        widths = encoder.intermediate_channel_sizes
        for width, projection in zip(widths, encoder.encoder_input_proj, strict=True):
            fits = width == config.encoder_hidden_dim
            projections.append(nn.Identity() if fits else projection)
        encoder.encoder_input_proj = projections
        return
    vit = encoder.backbone
    vit.embeddings.mask_token = None  # of pretraining: never used
    if not vit.config.apply_layernorm:  # the distilled ViT-Tiny
        vit.norm = nn.Identity()
        for layer in vit.model.layer:
            layer.layer_scale1 = nn.Identity()
            layer.layer_scale2 = nn.Identity()


class _Decoder(Deimv2Decoder):
    """transformers' decoder with the queries' positions embedded only once."""

    def forward(
        self,
        encoder_hidden_states: Tensor,
        reference_points: Tensor,
        inputs_embeds: Tensor,
        spatial_shapes: Tensor,
        spatial_shapes_list: Sequence | None = None,
        encoder_attention_mask: Tensor | None = None,
        **_,
    ) -> Deimv2DecoderOutput:
        """See `Deimv2Decoder.forward`."""
        project = weighting_function(self.max_num_bins, self.up, self.reg_scale)
        references = reference_points.sigmoid()
        states = inputs_embeds
        positions = self.query_pos_head(references)
        same_for_all = {
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "spatial_shapes": spatial_shapes,
            "spatial_shapes_list": spatial_shapes_list,
            "position_embeddings": positions.clamp(min=-10, max=10),
        }
        corners = 0
        before = 0
        all_logits = []  # the boxes before refinement count as a layer of these two
        all_boxes = []
        all_corners = []
        all_states = []
        for i, layer in enumerate(self.layers):
            states = layer(states, reference_points=references[:, :, None], **same_for_all)
            if i == 0:
                moved = self.pre_bbox_head(states) + inverse_sigmoid(references)
                unrefined = moved.sigmoid()
                start = unrefined.detach()
            corners = self.bbox_embed[i](states + before) + corners
            boxes = distance2bbox(start, self.integral(corners, project), self.reg_scale)
            if self.training or i == self.eval_idx:
                logits = self.class_embed[i](states)
                if i == 0:
                    all_logits.append(logits)
                    all_boxes.append(unrefined)
                all_logits.append(self.lqe_layers[i](logits, corners))
                all_boxes.append(boxes)
                all_corners.append(corners)
                all_states.append(states)
            references = boxes.detach()
            before = states.detach()
        return Deimv2DecoderOutput(
            last_hidden_state=states,
            intermediate_hidden_states=torch.stack(all_states),
            intermediate_logits=torch.stack(all_logits, dim=1),
            intermediate_reference_points=torch.stack(all_boxes, dim=1),
            intermediate_predicted_corners=torch.stack(all_corners, dim=1),
            initial_reference_points=torch.stack([start] * len(all_states), dim=1),
        )
