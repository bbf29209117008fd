"""Weights of Atten4Vis/LW-DETR, which become an `lw_detr`: `LWDETR_tiny_60e_coco.pth` to `LWDETR_xlarge_60e_coco.pth`,
those of `30e_objects365`, and the files of only its vision transformer, such as `caev2_tiny_300e_objects365.pth`."""

import copy
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from toolkit.detectors.detr.sizes import LW_DETR_SIZES
from toolkit.detectors.detr.weights_rf_detr import (
    DECODER_NAMES,
    TRANSFORMER_AND_HEADS,
    projector_names,
    query_entries,
)
from toolkit.models.weights.names import (
    Description,
    Publisher,
    class_names_for,
    pairs,
    renamed,
    required,
    split_attention,
)

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
    """Return the tensors of a file of the vision transformer under the names of our backbone; joint attention matrices
    are split."""
    without_prefix = {name.removeprefix("encoder."): tensor for name, tensor in state.items()}
    return renamed(split_attention(without_prefix, ".qkv."), VIT_NAMES)


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    classes = class_names_for(len(required(state, "class_embed.bias", 1)))
    queries = query_entries(state)
    resized = dict.fromkeys(("height", "width"), 640)
    result = []
    for size, entries in LW_DETR_SIZES.items():
        options = {"source_config": copy.deepcopy(entries) | queries}
        result.append(Description("lw_detr", options, classes, size=resized, variant=f"size {size}"))
    return result


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
