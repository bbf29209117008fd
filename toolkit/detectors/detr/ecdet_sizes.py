"""The published sizes of ECDet as entries of transformers' config (Intellindust-AI-Lab/EdgeCrafter,
ecdetseg/configs/ecdet)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit.detectors.detr.deimv2_sizes import common_entries, vit_entries


class EcdetSize(NamedTuple):
    """A published size."""

    vit: tuple[int, int]  # width and feed-forward width of the ECViT
    file: str  # the publisher's file of the ECViT alone
    d_model: int
    ffn_dims: tuple[int, int]  # of encoder and decoder
    expansion: float
    depth: float


ECDET_SIZES = {
    "s": EcdetSize((192, 768), "ecvitt.pth", 192, (512, 512), 0.34, 0.67),
    "m": EcdetSize((256, 1024), "ecvittplus.pth", 256, (512, 1024), 0.75, 0.67),
    "l": EcdetSize((384, 1536), "ecvits.pth", 256, (1024, 1024), 0.75, 1.0),
    "x": EcdetSize((384, 2304), "ecvitsplus.pth", 256, (2048, 2048), 1.5, 1.0),
}


def size_config(size: str) -> dict[str, Any]:
    """Return the entries of transformers' config for a published size, a key of `ECDET_SIZES`; they serve as a source
    config."""
    vit, _, d_model, ffn_dims, expansion, depth = ECDET_SIZES[size]
    return ecdet_entries(ecvit_entries(*vit), d_model, ffn_dims) | {
        "hidden_expansion": expansion,
        "depth_mult": depth,
        "decoder_layers": 4,
    }


def size_of(config: Mapping[str, Any]) -> str | None:
    """Return the published size whose ECViT a config has; None: it has another backbone."""
    backbone = config.get("backbone_config") or {}
    for size in ECDET_SIZES:
        published = size_config(size)["backbone_config"]
        if all(backbone.get(name) == value for name, value in published.items()):
            return size
    return None


def ecvit_entries(width: int, ffn: int, heads: int | None = None, layers: int = 12) -> dict[str, Any]:
    """Return the config of transformers' DINOv3 with the dimensions of an ECViT, whose last two layers give maps.

    width, ffn: channels of the tokens and of the feed-forward layers. heads: None: attention heads of 64 channels.
    """
    return vit_entries(width, ffn, plain=True) | {
        "num_attention_heads": heads or width // 64,
        "num_hidden_layers": layers,
        "out_indices": [layers - 1, layers],
    }


def ecdet_entries(backbone: Mapping[str, Any], d_model: int, ffn_dims: tuple[int, int]) -> dict[str, Any]:
    """Return the config entries of an ECDet on this ECViT, but for the depths and the expansion of its encoder.

    ffn_dims: feed-forward widths of encoder and decoder.
    """
    return common_entries(levels=3, lite=False) | {
        "model_type": "ecdet",
        "backbone_config": dict(backbone),
        "encoder_in_channels": [d_model] * 3,
        "encoder_hidden_dim": d_model,
        "d_model": d_model,
        "decoder_in_channels": [d_model] * 3,
        "encoder_ffn_dim": ffn_dims[0],
        "decoder_ffn_dim": ffn_dims[1],
        "encoder_activation_function": "silu",
        "encoder_has_trailing_conv": False,
        "decoder_n_points": [3, 6, 3],
    }
