"""Weights of Intellindust-AI-Lab/EdgeCrafter, which become an `ecdet`: `ecdet_s.pth` to `ecdet_x.pth`, and the
`model.safetensors` of the publisher's models on the hub."""

from collections.abc import Mapping

from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.sizes import ECDET_SIZES
from toolkit.detectors.detr.weights_deimv2 import (
    CSP,
    ENCODER,
    ENCODER_LAYER,
    LEFT_OUT,
    VIT_LAYER,
    box_constant,
    descriptions,
)
from toolkit.detectors.detr.weights_rt_detr import COPIES, CSP_PLACES, DOWNSAMPLE, PROJECTIONS_AND_HEADS
from toolkit.models.weights.names import (
    Description,
    Publisher,
    pairs,
    renamed,
    split_attention,
)

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
    """Return the tensors of a file of an ECViT under the names of our backbone; joint attention matrices are split, and
    the constant `rope_embed.periods` is left out."""
    ours = renamed(split_attention(state, ".qkv."), VIT)
    return {name: tensor for name, tensor in ours.items() if name != "rope_embed.periods"}


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    if any("segmentation_head" in name for name in state):
        raise BadInput(f"model.pretrained {file}: an ECSeg, which has masks; ecdet reads the publisher's ECDet")
    return descriptions(state, "ecdet", ECDET_SIZES)


ECDET = Publisher(
    "Intellindust-AI-Lab/EdgeCrafter",
    _described,
    ("backbone.backbone.register_token", "decoder.decoder.layers.0.gateway.gate.weight"),
    NAME_PAIRS,
    prepared=_prepared,
    left_out=LEFT_OUT,
    copies=COPIES,
)
