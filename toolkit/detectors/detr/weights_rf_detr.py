"""Weights of roboflow/rf-detr, which become an `rf_detr`: `rf-detr-nano.pth` and those of small, medium, large-2026,
base; with masks `rf-detr-seg-nano.pt` and the others of `seg`."""

import math
from collections.abc import Mapping

from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.models.weights.names import (
    Description,
    IncompleteWeights,
    Pairs,
    Publisher,
    class_names_for,
    pairs,
    required,
    required_count,
    required_rows,
)

SIDE_OF_SEG_NANO = 312  # pixels; it has no windows, which the file does not say
HEAD_DIM = 64  # channels of an attention head of the vision transformer, as published
VIT = "backbone.0.encoder.encoder"
VIT_LAYERS = "model.model.backbone.backbone.encoder.layer"  # our name
PROJECTOR = "cv1 conv1, cv2 conv2, m.*.cv1 bottlenecks.*.conv1, m.*.cv2 bottlenecks.*.conv2"
ATTENTION = """
    attention.query q_proj, attention.key k_proj, attention.value v_proj, output.dense o_proj
"""
DECODER_LAYER = """
    norm1 self_attn_layer_norm, norm2 cross_attn_layer_norm, norm3 layer_norm, linear1 mlp.fc1, linear2 mlp.fc2
    self_attn.out_proj self_attn.o_proj
"""
DECODER_NAMES = pairs(DECODER_LAYER, below=[("transformer.decoder.layers.*.", "model.model.decoder.layers.*.")])
MASK_HEAD = """
    query_features_block.layers.0 query_features_block.mlp.fc1
    query_features_block.layers.2 query_features_block.mlp.fc2
    query_features_block.norm_in query_features_block.norm, blocks.*.dwconv blocks.*.depthwise_conv
    blocks.*.norm blocks.*.layernorm, blocks.*.pwconv1 blocks.*.pointwise_conv, bias segmentation_bias
    spatial_features_proj spatial_features_proj, query_features_proj query_features_proj
"""
MASK_MARK = "segmentation_head.bias"
TRANSFORMER_AND_HEADS = """
    transformer.decoder.norm model.model.decoder.layernorm, transformer model.model
    refpoint_embed model.model.reference_point_embed, query_feat model.model.query_feat
    class_embed model.class_embed, bbox_embed model.bbox_embed
"""
REST = f"""
    {VIT} model.model.backbone.backbone, backbone.0.projector.stages.0.1 model.model.backbone.projector.layer_norm
    {TRANSFORMER_AND_HEADS}
"""


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    has_two_maps = "backbone.0.projector.stages.1.0.cv1.conv.weight" in state
    has_masks = MASK_MARK in state
    if has_two_maps:
        raise BadInput(
            f"model.pretrained {file}: the large RF-DETR of 2025 with two feature maps; rf_detr is nano, small, "
            "medium, large-2026 and base"
        )
    patches = required(state, f"{VIT}.embeddings.patch_embeddings.projection.weight", 4)
    width = required_rows(state, f"{VIT}.embeddings.patch_embeddings.projection.weight", multiple_of=HEAD_DIM)
    patch = patches.shape[-1]
    depth = required_count(state, f"{VIT}.encoder.layer")
    side = patch * math.isqrt(required(state, f"{VIT}.embeddings.position_embeddings", 3).shape[1] - 1)
    first = patch == 14  # base, which is used with larger images than its positions
    windows = 4 if first else 2
    if has_masks and side == SIDE_OF_SEG_NANO:
        windows = 1
    backbone = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": width,
        "num_attention_heads": width // HEAD_DIM,
        "num_hidden_layers": depth,
        "patch_size": patch,
        "num_windows": windows,
        "out_indices": [2, 5, 8, 11] if first else [3, 6, 9, 12],
        "image_size": side,
    }
    notes = []
    behind = range(max(backbone["out_indices"]), depth)
    if behind:
        notes.append(
            f"{len(behind)} of the {depth} layers of its vision transformer lie behind the deepest feature map: no "
            "prediction depends on them, and they are left out"
        )
    layers_behind = "|".join(rf"{VIT_LAYERS}\.{layer}\." for layer in behind) or "^$"
    config = {
        "model_type": "rf_detr",
        "backbone_config": backbone,
        "layer_norm_eps": 1e-6,
        **_decoder_entries(state),
        **query_entries(state),
    }
    options: dict[str, object] = {"source_config": config}
    if has_masks:
        config["intermediate_size"] = len(required(state, "segmentation_head.query_features_block.layers.0.weight", 2))
        options["masks"] = True
    resized = dict.fromkeys(("height", "width"), 560 if first else side)
    classes = class_names_for(len(required(state, "class_embed.bias", 1)))
    return [Description("rf_detr", options, classes, notes, resized, needless=layers_behind)]


def _decoder_entries(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the config entries of the decoder."""
    layer = "transformer.decoder.layers.0"
    d_model = required(state, "query_feat.weight", 2).shape[1]
    heads = d_model // 16
    points = len(required(state, f"{layer}.cross_attn.attention_weights.bias", 1))
    if heads < 2 or points < heads:
        raise IncompleteWeights(
            f"has {layer}.cross_attn.attention_weights.bias of {points} numbers, which do not go with queries of "
            f"{d_model} channels"
        )
    return {
        "d_model": d_model,
        "decoder_layers": required_count(state, "transformer.decoder.layers"),
        "decoder_ffn_dim": len(required(state, f"{layer}.linear1.weight", 2)),
        "decoder_self_attention_heads": heads // 2,
        "decoder_cross_attention_heads": heads,
        "decoder_n_points": points // heads,
    }


def query_entries(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the config entries of the queries of RF-DETR or LW-DETR, which are in groups."""
    queries = len(required(state, "query_feat.weight", 2))
    groups = required_count(state, "transformer.enc_output")
    if queries < groups:
        raise IncompleteWeights(f"has query_feat.weight of {queries} rows for {groups} groups of queries")
    return {
        "group_detr": groups,
        "num_queries": queries // groups,
    }


def projector_names(theirs: str, ours: str) -> Pairs:
    """Return the pairs of names of a projector's convolution block, whose names begin with `theirs` and `ours`."""
    below = [(f"{block}.", f"{our_block}.") for block, our_block in pairs(PROJECTOR, below=[(theirs, ours)])]
    return pairs("conv conv, bn norm", below)


RF_DETR = Publisher(
    "roboflow/rf-detr",
    _described,
    (f"{VIT}.embeddings.cls_token", "refpoint_embed.weight"),
    [
        *pairs(
            ATTENTION,
            below=[(f"{VIT}.encoder.layer.*.attention.", f"{VIT_LAYERS}.*.attention.")],
        ),
        *projector_names("backbone.0.projector.stages.0.0.", "model.model.backbone.projector.projector_layer."),
        *DECODER_NAMES,
        *pairs(MASK_HEAD, below=[("segmentation_head.", "masks.")]),
        *pairs(REST),
    ],
    left_out=r"^_",  # flags of its poses
)
