"""Weights of timm's plain vision transformers for the ViTs that transformers builds YOLOS and RF-DETR with.

Both papers start from them: YOLOS from DeiT (ImageNet), RF-DETR from DINOv2.
"""

from collections.abc import Mapping

import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.models.backbones import timm_model
from toolkit.models.weights.names import Pairs, pairs, renamed, split_attention


def _names(layer: str) -> Pairs:
    """Return the names of a whole ViT, with a table of names in a layer."""
    stem = "cls_token embeddings.cls_token, patch_embed.proj embeddings.patch_embeddings.projection, norm layernorm"
    return pairs(layer, below=[("blocks.*.", "encoder.layer.*.")]) + pairs(f"blocks encoder.layer, {stem}")


YOLOS = _names("""
    norm1 layernorm_before, norm2 layernorm_after, mlp.fc1 intermediate.dense, mlp.fc2 output.dense
    attn.q_proj attention.attention.query, attn.k_proj attention.attention.key, attn.v_proj attention.attention.value
    attn.proj attention.output.dense
""")
DINOV2 = _names("""
    attn.proj attention.o_proj, attn attention, ls1.gamma layer_scale1.lambda1, ls2.gamma layer_scale2.lambda1
""")


@torch.no_grad()
def load_timm_vit(
    vit: nn.Module, by_width: Mapping[int, str], pretrained: bool | str, names: Pairs, grid_hw: tuple[int, int]
) -> None:
    """Load the weights of timm's ViT of the same width into one of transformers.

    Args:
        vit: with `embeddings`, `encoder.layer` and `layernorm`; tokens that timm's ViT lacks keep their weights.
        by_width: timm's names.
        pretrained: True (downloaded once), or a file of these weights.
        names: `YOLOS` or `DINOV2`, timm's names and transformers'.
        grid_hw: patches of the position embeddings, to which timm's are interpolated.

    Raises:
        BadInput: an unknown model, another depth or patch size, unavailable weights.
    """
    width = vit.embeddings.cls_token.shape[-1]
    if width not in by_width:
        widths = ", ".join(f"{w} ({name})" for w, name in by_width.items())
        raise BadInput(f"model.pretrained_backbone: timm has weights of width {widths}, not {width}; set it to false.")
    patch = vit.embeddings.patch_embeddings.projection.kernel_size[0]  # to which timm resamples its own
    source = timm_model(by_width[width], pretrained, num_classes=0, patch_size=patch).state_dict()
    positions = resample_abs_pos_embed(source.pop("pos_embed"), list(grid_hw), num_prefix_tokens=1)
    vit.embeddings.position_embeddings[:, : positions.shape[1]] = positions
    wanted = vit.state_dict()
    tensors = renamed(split_attention(source, ".qkv."), names)
    unfit = [key for key, tensor in tensors.items() if key not in wanted or wanted[key].shape != tensor.shape]
    missing = {key for key in wanted if key.startswith("encoder.layer.")} - set(tensors)
    if unfit or missing:
        first = sorted([*unfit, *missing])[0]
        raise BadInput(
            f"model.pretrained_backbone: {by_width[width]} does not fit the model ({first} first of all); leave depth "
            "and patch size as published, or set it to false."
        )
    vit.load_state_dict(tensors, strict=False)
