"""Weights of Atten4Vis/LW-DETR, which become an `lw_detr`: `LWDETR_tiny_60e_coco.pth` to `LWDETR_xlarge_60e_coco.pth`,
those of `30e_objects365`, and the files of its vision transformer alone, such as `caev2_tiny_300e_objects365.pth`."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.lw_detr_sizes import PUBLISHED_BLOCKS, vit_entries
from toolkit.detectors.detr.weights_rf_detr import (
    DECODER_NAMES,
    TRANSFORMER_AND_HEADS,
    decoder_entries,
    projector_names,
)
from toolkit.models.weights.names import (
    Description,
    Publisher,
    count,
    named,
    pairs,
    renamed,
    required,
    required_count,
    required_rows,
    split_attention,
)

HEADS = 12  # of the vision transformer, as published
VIT = "backbone.0.encoder"
OUR_VIT = "model.model.backbone.backbone"
PROJECTOR = "backbone.0.projector"
OUR_PROJECTOR = "model.model.backbone.projector.scale_layers"
BLOCK = """
    attn.q_bias attention.q_proj.bias, attn.v_bias attention.v_proj.bias, attn.proj attention.o_proj
    attn attention, norm1 layernorm_before, norm2 layernorm_after, mlp intermediate
"""
VIT_NAMES = [
    *pairs(BLOCK, below=[("blocks.*.", "encoder.layer.*.")]),
    *pairs("blocks encoder.layer, patch_embed.proj embeddings.projection, pos_embed embeddings.position_embeddings"),
]
SAMPLING = (f"{PROJECTOR}.stages_sampling.*.*.*", f"{OUR_PROJECTOR}.*.sampling_layers.*.layers.*")


def vit_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file of the vision transformer to the names of our backbone."""
    without_prefix = {name.removeprefix("encoder."): tensor for name, tensor in state.items()}
    return renamed(split_attention(without_prefix, ".qkv."), VIT_NAMES)


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    width = required_rows(state, f"{VIT}.patch_embed.proj.weight", multiple_of=HEADS)
    layers = count(state, f"{VIT}.blocks")
    if layers not in PUBLISHED_BLOCKS:
        known = " and ".join(map(str, PUBLISHED_BLOCKS))
        raise BadInput(
            f"model.pretrained {file}: the vision transformer has {layers} blocks, and the file does not say which of "
            f"them have windows; lw_detr reads the publisher's sizes, which have {known}"
        )
    levels = required_count(state, f"{PROJECTOR}.stages")
    config = {
        "model_type": "lw_detr",
        "backbone_config": vit_entries(width, layers),
        "projector_scale_factors": [_scale(state, level) for level in range(levels)],
        **decoder_entries(state, levels),
    }
    size = dict.fromkeys(("height", "width"), 640)
    classes = named(len(required(state, "class_embed.bias", 1)))
    return [Description("lw_detr", {"source_config": config}, classes, size=size)]


def _scale(state: Mapping[str, Tensor], level: int) -> float:
    """Return the size of a map relative to that of the patches, by the layers that resample it."""
    layers = f"{PROJECTOR}.stages_sampling.{level}.0"
    if not count(state, layers):
        return 1.0
    first = f"{layers}.0.conv.weight"
    halves = first in state and required(state, first, 4).shape[-1] == 3  # a convolution of stride 2
    return 0.5 if halves else 2.0


LW_DETR = Publisher(
    "Atten4Vis/LW-DETR",
    _described,
    (f"{VIT}.pos_embed", "refpoint_embed.weight"),
    [
        *[(f"{VIT}.{theirs}", f"{OUR_VIT}.{ours}") for theirs, ours in VIT_NAMES],
        *projector_names(f"{PROJECTOR}.stages.*.0.", f"{OUR_PROJECTOR}.*.projector_layer."),
        (f"{PROJECTOR}.stages.*.1", f"{OUR_PROJECTOR}.*.layer_norm"),
        (f"{SAMPLING[0]}.bn", f"{SAMPLING[1]}.norm"),
        SAMPLING,
        *DECODER_NAMES,
        *pairs(TRANSFORMER_AND_HEADS),
    ],
    # Its keys have no bias, its queries and values have one of their own.
    prepared=partial(split_attention, joint=".qkv."),
    left_out="^$",  # nothing
)
