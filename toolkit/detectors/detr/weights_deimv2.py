"""Weights of Intellindust-AI-Lab/DEIMv2, which become a `deimv2`: `deimv2_hgnetv2_atto_coco.pth` to
`deimv2_dinov3_x_coco.pth`, and the `model.safetensors` of the publisher's models on the hub."""

import copy
import math
import re
from collections.abc import Mapping

from torch import Tensor

from toolkit.detectors.detr.sizes import DEIMV2_SIZES
from toolkit.detectors.detr.weights_rt_detr import (
    COPIES,
    CSP_PLACES,
    DOWNSAMPLE,
    PROJECTIONS_AND_HEADS,
    check_points,
    hgnet_names,
)
from toolkit.models.weights.names import (
    Description,
    Publisher,
    class_names_for,
    copied,
    count_parts,
    equal_parts,
    pairs,
    positive_number,
    renamed,
    required,
    split_attention,
)

LITE = "encoder.bi_fusion.cv.conv.weight"
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
    shared = [f"decoder.dec_bbox_head.{i}" for i in range(1, count_parts(state, "decoder.decoder.layers"))]
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
    """Return the tensors of a file of DINOv3, or of the distilled ViT-Tiny, under the names of transformers' DINOv3;
    joint attention matrices are split, and tensors without a counterpart are left out."""
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


def descriptions(
    state: Mapping[str, Tensor], architecture: str, sizes: Mapping[str, Mapping], **options
) -> list[Description]:
    """Describe the published sizes of DEIMv2 or ECDet with the classes and constants of a file. options: others than
    the source config.

    Raises:
        IncompleteWeights: the file does not have the constants, or no size has its numbers of points.
    """
    classes = class_names_for(len(required(state, "decoder.dec_score_head.0.weight", 2)))
    constants = {name: float(box_constant(state, name)) for name in ("up", "reg_scale")}
    check_points(state, [entries["decoder_n_points"] for entries in sizes.values()])
    result = []
    for size, entries in sizes.items():
        config = copy.deepcopy(dict(entries)) | constants
        resized = image_side(state, config["feat_strides"])
        about = {"source_config": config, **options}
        result.append(Description(architecture, about, classes, size=resized, variant=f"size {size}"))
    return result


def image_side(state: Mapping[str, Tensor], strides: list[int]) -> dict[str, int] | None:
    """Return the side that images are resized to, from the number of positions in evaluation; None: not a square."""
    anchors = "decoder.anchors"
    positions = required(state, anchors, 3).shape[1] if anchors in state else 0
    per_cell = sum((32 // stride) ** 2 for stride in strides)  # of 32 x 32 px: 21 with strides of 8, 16 and 32
    side = 32 * math.isqrt(positions // per_cell)
    fits = side and positions == sum((side // stride) ** 2 for stride in strides)
    return {"height": side, "width": side} if fits else None


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    found = descriptions(state, "deimv2", DEIMV2_SIZES, original=True)
    for size, description in zip(DEIMV2_SIZES, found, strict=True):
        description.options["size"] = size
    return found


DEIMV2 = Publisher(
    "Intellindust-AI-Lab/DEIMv2",
    _described,
    ("decoder.decoder.layers.0.swish_ffn.w12.weight",),
    NAME_PAIRS,
    prepared=_prepared,
    left_out=LEFT_OUT,
    copies=COPIES,
)
