"""Weights of Intellindust-AI-Lab/EdgeCrafter, which become an `ecdet`: `ecdet_s.pth` to `ecdet_x.pth`, and the
`model.safetensors` of the publisher's models on the hub."""

from collections.abc import Mapping

from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.deimv2_sizes import DEPTHS
from toolkit.detectors.detr.ecdet_sizes import ECDET_SIZES, ecdet_entries, ecvit_entries
from toolkit.detectors.detr.weights_deimv2 import (
    CSP,
    ENCODER,
    ENCODER_LAYER,
    LEFT_OUT,
    VIT_LAYER,
    box_constant,
    image_side,
    points_by_level,
)
from toolkit.detectors.detr.weights_rt_detr import COPIES, CSP_PLACES, DOWNSAMPLE, PROJECTIONS_AND_HEADS
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

HEADS = 8  # of the attention in encoder and decoder, as published
VIT = [
    *pairs(VIT_LAYER, below=[("blocks.*.", "model.layer.*.")]),
    *pairs("blocks model.layer, patch_embed.proj embeddings.patch_embeddings, patch_embed embeddings.patch_embeddings"),
    *pairs("register_token embeddings.cls_token"),  # of DINOv3 the class token, which alone has no position
]
DECODER_LAYER = """
    self_attn.out_proj self_attn.o_proj, cross_attn encoder_attn, linear1 mlp.layers.0, linear2 mlp.layers.1
    norm1 self_attn_layer_norm, norm2 final_layer_norm
"""
NAME_PAIRS = [
    *[(f"backbone.backbone.{theirs}", f"{ENCODER}.backbone.{ours}") for theirs, ours in VIT],
    *pairs(f"backbone.projector {ENCODER}.projections"),
    *pairs(CSP, below=CSP_PLACES),
    *pairs("cv1 conv1, cv2 conv2", below=DOWNSAMPLE),
    *pairs(ENCODER_LAYER, below=[("encoder.encoder.*.layers.*.", "model.model.encoder.aifi.*.layers.*.")]),
    *pairs(DECODER_LAYER, below=[("decoder.decoder.layers.*.", "model.model.decoder.layers.*.")]),
    *pairs(PROJECTIONS_AND_HEADS),
]


def _prepared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with split projections. Those with two names, of which safetensors has only one, get both."""
    constants = {f"decoder.{name}": box_constant(state, name) for name in ("up", "reg_scale")}
    return split_attention({**state, **constants}, ".qkv.")


def ecvit_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file of an ECViT to the names of our backbone."""
    ours = renamed(split_attention(state, ".qkv."), VIT)
    return {name: tensor for name, tensor in ours.items() if name != "rope_embed.periods"}


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    if any("segmentation_head" in name for name in state):
        raise BadInput(f"model.pretrained {file}: an ECSeg, which has masks; ecdet reads the publisher's ECDet")
    block = "encoder.fpn_blocks.0"
    layer = "decoder.decoder.layers.0"
    d_model = required_rows(state, f"{block}.cv4.conv.weight", multiple_of=HEADS)
    blocks = count(state, f"{block}.cv2.0.bottlenecks")
    inner = len(required(state, f"{block}.cv3.0.bottlenecks.0.conv1.conv.weight", 4))  # round(expansion * width // 2)
    known = [size.expansion for size in ECDET_SIZES.values() if round(size.expansion * d_model // 2) == inner]
    of_layers = ("encoder.encoder.0.layers.0", layer)
    ffn_dims = tuple(len(required(state, f"{name}.linear1.weight", 2)) for name in of_layers)
    config = ecdet_entries(_vit(state), d_model, ffn_dims) | {
        "encoder_layers": count(state, "encoder.encoder.0.layers"),
        "hidden_expansion": known[0] if known else (2 * inner + 0.5) / d_model,
        "depth_mult": DEPTHS.get(blocks, blocks / 3),
        "decoder_layers": required_count(state, "decoder.decoder.layers"),
        "decoder_n_points": points_by_level(state, f"{layer}.cross_attn.num_points_scale"),
        "reg_scale": float(box_constant(state, "reg_scale")),
        "up": float(box_constant(state, "up")),
        "max_num_bins": len(required(state, "decoder.dec_bbox_head.0.layers.2.bias", 1)) // 4 - 1,
    }
    classes = named(len(required(state, "decoder.dec_score_head.0.weight", 2)))
    size = image_side(state, config["feat_strides"])
    return [Description("ecdet", {"source_config": config}, classes, size=size)]


def _vit(state: Mapping[str, Tensor]) -> dict:
    ffn, width = required(state, "backbone.backbone.blocks.0.mlp.fc1.weight", 2).shape
    head_dim = 4 * len(required(state, "backbone.backbone.rope_embed.periods", 1))
    return ecvit_entries(width, ffn, width // head_dim, count(state, "backbone.backbone.blocks"))


ECDET = Publisher(
    "Intellindust-AI-Lab/EdgeCrafter",
    _described,
    ("backbone.backbone.register_token", "decoder.decoder.layers.0.gateway.gate.weight"),
    NAME_PAIRS,
    prepared=_prepared,
    left_out=LEFT_OUT,
    copies=COPIES,
)
