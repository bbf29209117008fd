"""Weights of Intellindust-AI-Lab/DEIMv2, which become a `deimv2`: `deimv2_hgnetv2_atto_coco.pth` to
`deimv2_dinov3_x_coco.pth`, and the `model.safetensors` of the publisher's models on the hub."""

import math
import re
from collections.abc import Mapping

from torch import Tensor

from toolkit.detectors.detr.deimv2_sizes import (
    DEIMV2_SIZES,
    DEPTHS,
    EXPANSIONS,
    common_entries,
    size_config,
    vit_entries,
)
from toolkit.detectors.detr.weights_rt_detr import (
    COPIES,
    CSP_PLACES,
    DOWNSAMPLE,
    PROJECTIONS_AND_HEADS,
    hgnet_entries,
    hgnet_names,
)
from toolkit.models.weights.names import (
    Description,
    IncompleteWeights,
    Publisher,
    copied,
    count,
    equal_parts,
    named,
    pairs,
    positive_number,
    renamed,
    required,
    required_count,
    split_attention,
)

LITE = "encoder.bi_fusion.cv.conv.weight"
ADAPTER = "backbone.sta.stem.0.weight"
ENCODER = "model.model.conv_encoder"
LEFT_OUT = (
    r"(bias_mask|rope_embed\.periods|mask_token)$|"
    r"^decoder\.(anchors|valid_mask|decoder\.(up|reg_scale|project))$"
)
CSP = "cv1 conv1, cv4 conv2, cv2.0 csp_rep1, cv2.1 csp_rep1.conv2, cv3.0 csp_rep2, cv3.1 csp_rep2.conv2"
PLACES = [*CSP_PLACES, *((f"encoder.{name}.", f"model.model.encoder.{name}.") for name in ("fpn_block", "pan_block"))]
ENCODER_LAYER = """
    linear1 mlp.layers.0, linear2 mlp.layers.1, self_attn.out_proj self_attn.o_proj
    norm1 self_attn_layer_norm, norm2 final_layer_norm
"""
DECODER_LAYER = """
    self_attn.out_proj self_attn.o_proj, cross_attn encoder_attn, swish_ffn.w3 mlp.down_proj, swish_ffn mlp
    gateway.norm.scale gateway.norm.weight
    norm1.scale self_attn_layer_norm.weight, norm2.scale encoder_attn_layer_norm.weight
    norm3.scale final_layer_norm.weight
"""
LITE_NAMES = pairs(
    """
    input_proj input_proj, bi_fusion.cv bi_fusion_conv
    down_sample1.1 down_conv1.conv, down_sample1.2 down_conv1.norm
    down_sample2.1 down_conv2.conv, down_sample2.2 down_conv2.norm
""",
    below=[("encoder.", "model.model.encoder.")],
)
VIT_LAYER = """
    attn.proj attention.o_proj, attn attention, ls1.gamma layer_scale1.lambda1, ls2.gamma layer_scale2.lambda1
    mlp.fc1 mlp.up_proj, mlp.fc2 mlp.down_proj, mlp.w1 mlp.gate_proj, mlp.w2 mlp.up_proj, mlp.w3 mlp.down_proj
"""
VIT = [
    *pairs(VIT_LAYER, below=[("blocks.*.", "model.layer.*.")]),
    *pairs("blocks model.layer, patch_embed.proj embeddings.patch_embeddings, cls_token embeddings.cls_token"),
    *pairs("storage_tokens embeddings.register_tokens"),
]
ADAPTER_NAMES = [
    *pairs("stem.0 stem_conv.conv, stem.1 stem_conv.norm, conv2.0 conv2.conv, conv2.1 conv2.norm, conv3.1 conv3.conv, "
           "conv3.2 conv3.norm, conv4.1 conv4.conv, conv4.2 conv4.norm",
           below=[("backbone.sta.", f"{ENCODER}.spatial_tuning_adapter.")]),
    *pairs(f"backbone.convs.* {ENCODER}.fusion_proj.*.conv, backbone.norms.* {ENCODER}.fusion_proj.*.norm"),
]  # fmt: skip
NAME_PAIRS = [
    *[(f"backbone.dinov3.{theirs}", f"{ENCODER}.backbone.{ours}") for theirs, ours in [*VIT, ("norm", "norm")]],
    *ADAPTER_NAMES,
    *hgnet_names(f"{ENCODER}.model"),
    *pairs(CSP, below=PLACES),
    *pairs("cv1 conv1, cv2 conv2", below=DOWNSAMPLE),
    *pairs(ENCODER_LAYER, below=[("encoder.encoder.*.layers.*.", "model.model.encoder.aifi.*.layers.*.")]),
    *pairs(DECODER_LAYER, below=[("decoder.decoder.layers.*.", "model.model.decoder.layers.*.")]),
    *pairs(f"encoder.input_proj {ENCODER}.encoder_input_proj, decoder.input_proj model.model.decoder_input_proj"),
    *pairs(PROJECTIONS_AND_HEADS),
]


def _prepared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with split projections. Those that safetensors stores once for several names are repeated
    under each of them, and those of the light encoder get our names, because it shares names with the other one."""
    result = {name.replace("dinov3._model.", "dinov3."): tensor for name, tensor in state.items()}
    result |= {f"decoder.{name}": box_constant(state, name) for name in ("up", "reg_scale")}
    shared = [f"decoder.dec_bbox_head.{i}" for i in range(1, count(state, "decoder.decoder.layers"))]
    result |= copied(result, dict.fromkeys(shared, "decoder.dec_bbox_head.0")) | result
    for name in [name for name in result if ".swish_ffn.w12." in name]:
        stem, leaf = name.split("w12.")
        gate, up = equal_parts(result, name, 2)
        del result[name]
        result[f"{stem}gate_proj.{leaf}"] = gate
        result[f"{stem}up_proj.{leaf}"] = up
    result = _split_vit(result)
    return renamed(result, LITE_NAMES) if LITE in state else result


def vit_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file of DINOv3, or of the distilled ViT-Tiny, to the names of transformers' DINOv3."""
    state = renamed(_split_vit(state), VIT)
    return {name: tensor for name, tensor in state.items() if not re.search(LEFT_OUT, name)}


def _split_vit(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split queries, keys and values; a bias mask is 0 for the keys, which then have no bias."""
    masked = {name.removesuffix("_mask") for name in state if name.endswith("qkv.bias_mask")}
    apart = split_attention(state, ".qkv.")
    return {name: tensor for name, tensor in apart.items() if name.replace("k_proj", "qkv") not in masked}


def box_constant(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return `up` or `reg_scale` of the boxes' distributions, which has two names in a file of the trainer and one of
    them in a file of the hub. Raises IncompleteWeights if it has neither."""
    stored = f"decoder.{name}" if f"decoder.{name}" in state else f"decoder.decoder.{name}"
    positive_number(state, stored)
    return state[stored]


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    state = {name.replace("dinov3._model.", "dinov3."): tensor for name, tensor in state.items()}
    lite = LITE in state
    block = "encoder.fpn_block" if LITE in state else "encoder.fpn_blocks.0"
    points = points_by_level(state, "decoder.decoder.layers.0.cross_attn.num_points_scale")
    levels = len(points)
    encoder = len(required(state, f"{block}.cv4.conv.weight", 4))
    ffn = required(state, "decoder.decoder.layers.0.swish_ffn.w12.weight", 2)
    queried = required(state, "decoder.query_pos_head.layers.2.bias", 1)
    has_own_ffn = "encoder.encoder.0.layers.0.linear1.weight" in state
    own_ffn = required(state, "encoder.encoder.0.layers.0.linear1.weight", 2) if has_own_ffn else ffn
    inner = len(required(state, f"{block}.cv3.0.bottlenecks.0.conv1.conv.weight", 4))  # round(expansion * width // 2)
    blocks = count(state, f"{block}.cv2.0.bottlenecks")
    vit = ADAPTER in state
    backbone = _vit(state) if vit else hgnet_entries(state, 1 if lite else levels)
    first_head = required(state, "decoder.dec_bbox_head.0.layers.0.weight", 2)
    second_head = state.get("decoder.dec_bbox_head.1.layers.0.weight")
    maps = [encoder] * 3
    if not vit:
        maps = [backbone["hidden_sizes"][i - 1] for i in backbone["out_indices"]]
    in_decoder = "decoder.input_proj.0.conv.weight"
    projected = required(state, in_decoder, 4) if in_decoder in state else queried[None]
    expansion = next((known for known in EXPANSIONS if round(known * encoder // 2) == inner), None)
    config = common_entries(levels, lite) | {
        "backbone_config": backbone,
        "encoder_in_channels": maps,
        "encoder_hidden_dim": encoder,
        "d_model": len(queried),
        "encoder_ffn_dim": len(own_ffn),
        "decoder_ffn_dim": len(ffn),
        "encoder_layers": count(state, "encoder.encoder.0.layers"),
        "decoder_in_channels": [projected.shape[1]] * levels,
        "decoder_layers": required_count(state, "decoder.decoder.layers"),
        "decoder_n_points": points,
        "hidden_expansion": expansion or (2 * inner + 0.5) / encoder,
        "depth_mult": DEPTHS.get(blocks, blocks / 3),
        "encoder_has_trailing_conv": f"{block}.cv2.1.conv.weight" in state,
        "use_gateway": "decoder.decoder.layers.0.gateway.gate.weight" in state,
        "share_bbox_head": second_head is None or first_head.equal(second_head),
        "spatial_tuning_adapter_inplanes": len(required(state, ADAPTER, 4)) if vit else 16,
    }
    structure = _structure(config)
    size = next((size for size in DEIMV2_SIZES if _structure(size_config(size)) == structure), None)
    config |= {
        "num_queries": DEIMV2_SIZES[size][5] if size else 300,
        "reg_scale": float(box_constant(state, "reg_scale")),
        "up": float(box_constant(state, "up")),
        "max_num_bins": len(required(state, "decoder.dec_bbox_head.0.layers.2.bias", 1)) // 4 - 1,
    }
    notes = [] if size else ["not one of the published sizes: 300 queries, unless --model.num_queries says otherwise"]
    options = {"source_config": config, "original": True, "size": size}
    classes = named(len(required(state, "decoder.dec_score_head.0.weight", 2)))
    return [Description("deimv2", options, classes, notes, image_side(state, config["feat_strides"]))]


def _structure(config: Mapping) -> dict:
    """Return the part of a config that the tensors determine."""
    return {**config, "num_queries": None, "depth_mult": round(3 * config["depth_mult"])}


def points_by_level(state: Mapping[str, Tensor], name: str) -> list[int]:
    """Return the number of points of each level from the tensor of this name, which holds 1 / points for each point.

    Raises IncompleteWeights if it does not.
    """
    values = required(state, name, 1).tolist()
    points = [round(1 / value) if value > 1e-6 else 0 for value in values]
    counts = []
    while sum(counts) < len(points):
        counts.append(max(points[sum(counts)], 1))
    if [points_of_level for points_of_level in counts for _ in range(points_of_level)] != points:
        raise IncompleteWeights(f"has {name} that does not hold 1 / points for each point of attention")
    return counts


def image_side(state: Mapping[str, Tensor], strides: list[int]) -> dict[str, int] | None:
    """Return the side that images are resized to, from the number of positions in evaluation; None: not a square."""
    anchors = "decoder.anchors"
    positions = required(state, anchors, 3).shape[1] if anchors in state else 0
    per_cell = sum((32 // stride) ** 2 for stride in strides)  # of 32 x 32 px: 21 with strides of 8, 16 and 32
    side = 32 * math.isqrt(positions // per_cell)
    fits = side and positions == sum((side // stride) ** 2 for stride in strides)
    return {"height": side, "width": side} if fits else None


def _vit(state: Mapping[str, Tensor]) -> dict:
    """Return the config of transformers' DINOv3."""
    block = "backbone.dinov3.blocks.0"
    gated = f"{block}.mlp.w1.weight" in state
    plain = "backbone.dinov3.norm.weight" not in state
    ffn = required(state, f"{block}.mlp.{'w1' if gated else 'fc1'}.weight", 2)
    return vit_entries(ffn.shape[1], len(ffn), plain=plain, gated=gated)


DEIMV2 = Publisher(
    "Intellindust-AI-Lab/DEIMv2",
    _described,
    ("decoder.decoder.layers.0.swish_ffn.w12.weight",),
    NAME_PAIRS,
    prepared=_prepared,
    left_out=LEFT_OUT,
    copies=COPIES,
)
