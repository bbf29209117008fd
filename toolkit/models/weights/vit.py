"""Weights of timm's plain vision transformers for the ViTs that transformers builds YOLOS and RF-DETR with.

Both papers start from them: YOLOS from DeiT (ImageNet), RF-DETR from DINOv2.
"""

from collections.abc import Mapping

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from toolkit.errors import BadInput
from toolkit.models.backbones import timm_model

STEM = {"cls_token": "embeddings.cls_token", "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm"}  # fmt: skip
YOLOS = {"norm1": "layernorm_before", "attn.proj": "attention.output.dense", "norm2": "layernorm_after",
         "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
         "qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value")}  # fmt: skip
DINOV2 = {"norm1": "norm1", "attn.proj": "attention.o_proj", "norm2": "norm2", "mlp.fc1": "mlp.fc1",
          "mlp.fc2": "mlp.fc2", "ls1.gamma": "layer_scale1.lambda1", "ls2.gamma": "layer_scale2.lambda1",
          "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj")}  # fmt: skip


@torch.no_grad()
def load_timm_vit(
    vit: nn.Module, by_width: Mapping[int, str], pretrained: bool | str, names: Mapping, grid_hw: tuple[int, int]
) -> None:
    """Gives a ViT of transformers the weights of timm's of the same width.

    Args:
        vit: with `embeddings`, `encoder.layer` and `layernorm`; tokens that timm's has not keep their weights.
        by_width: timm's names.
        pretrained: True (downloaded once), or a file of these weights.
        names: `YOLOS` or `DINOV2`, timm's names of the parts of a layer to transformers'.
        grid_hw: patches of the position embeddings, to which timm's are interpolated.

    Raises:
        BadInput: no such model, another depth or patch size, weights that cannot be had.
    """
    width = vit.embeddings.cls_token.shape[-1]
    if width not in by_width:
        known = ", ".join(f"{w} ({name})" for w, name in by_width.items())
        raise BadInput(f"model.pretrained_backbone: timm has weights of width {known}, not {width}; set it to false.")
    source = timm_model(by_width[width], pretrained, num_classes=0).state_dict()
    positions = resample_abs_pos_embed(source.pop("pos_embed"), list(grid_hw), num_prefix_tokens=1)
    vit.embeddings.position_embeddings[:, : positions.shape[1]] = positions
    wanted = vit.state_dict()
    renamed = {new: tensor for key, tensor in source.items() for new, tensor in _renamed(key, tensor, names)}
    unfit = [key for key, tensor in renamed.items() if key not in wanted or wanted[key].shape != tensor.shape]
    missing = {key for key in wanted if key.startswith("encoder.layer.")} - set(renamed)
    if unfit or missing:
        first = sorted([*unfit, *missing])[0]
        raise BadInput(
            f"model.pretrained_backbone: {by_width[width]} does not fit the model ({first} first of all); leave depth "
            "and patch size as published, or set it to false."
        )
    vit.load_state_dict(renamed, strict=False)


def _renamed(key: str, tensor: Tensor, names: Mapping) -> list[tuple[str, Tensor]]:
    """A tensor of timm by its name, or names, in transformers: query, key and value are one matrix in timm."""
    if not key.startswith("blocks."):
        part, _, leaf = key.rpartition(".")
        return [(f"{STEM[part]}.{leaf}" if part else STEM[key], tensor)]
    _, index, inside = key.split(".", 2)
    layer = f"encoder.layer.{index}."
    if inside in names:  # a parameter of its own
        return [(layer + names[inside], tensor)]
    part, _, leaf = inside.rpartition(".")
    if part == "attn.qkv":
        return [(f"{layer}{name}.{leaf}", piece) for name, piece in zip(names["qkv"], tensor.chunk(3), strict=True)]
    return [(f"{layer}{names[part]}.{leaf}", tensor)]
