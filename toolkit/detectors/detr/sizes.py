"""Published sizes of DEIMv2, ECDet, LW-DETR and RF-DETR in one form: by size, the entries of transformers' config.

A detector of a size is built from its entries as from a source config, and a file of published weights is compared with
each of them. The sources are configs/deimv2 of Intellindust-AI-Lab/DEIMv2, ecdetseg/configs/ecdet of its EdgeCrafter,
scripts of Atten4Vis/LW-DETR, and rfdetr/config.py of roboflow/rf-detr.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Entries = dict[str, Any]


def size_of(config: Mapping[str, Any], sizes: Mapping[str, Entries], names: Sequence[str]) -> str | None:
    """Return the size whose entries of these names a config has; None: it has others.

    Of an entry that is itself a config, such as a backbone's, the entries of the size are compared, because
    transformers adds defaults to it.
    """
    for size, entries in sizes.items():
        if all(_agrees(config.get(name), entries[name]) for name in names):
            return size
    return None


def _agrees(value: Any, published: Any) -> bool:
    if isinstance(published, Mapping):
        return isinstance(value, Mapping) and all(value.get(name) == entry for name, entry in published.items())
    return value == published


# ---- DEIMv2 and ECDet ------------------------------------------------------------------------------------------------


def _hybrid(
    model_type: str,
    backbone: Entries,
    width: int,
    ffn_dims: tuple[int, int],
    *,
    points: list[int],
    expansion: float,
    depth: float,
) -> Entries:
    """Return the entries of an encoder of attention and convolutions, and of a decoder, on this backbone.

    Args:
        width: channels of encoder and decoder.
        ffn_dims: feed-forward widths of encoder and decoder.
        points: points of the decoder's attention in each feature map; the maps are the last of strides 8, 16 and 32.
        expansion: width of the encoder's convolution blocks as a fraction of `width`.
        depth: number of these blocks as a fraction of 3.
    """
    levels = len(points)
    return {
        "model_type": model_type,
        "backbone_config": backbone,
        "encoder_type": "hybrid",
        "encoder_layers": 1,
        "encode_proj_layers": [levels - 1],
        "encoder_in_channels": [width] * levels,
        "encoder_hidden_dim": width,
        "encoder_ffn_dim": ffn_dims[0],
        "encoder_has_trailing_conv": False,
        "hidden_expansion": expansion,
        "depth_mult": depth,
        "feat_strides": [8, 16, 32][-levels:],
        "num_feature_levels": levels,
        "d_model": width,
        "decoder_in_channels": [width] * levels,
        "decoder_layers": 4,
        "decoder_ffn_dim": ffn_dims[1],
        "decoder_n_points": points,
        "decoder_activation_function": "silu",
        "focal_loss_gamma": 1.5,
        "freeze_backbone_batch_norms": False,
    }


def _dinov3(width: int, ffn: int) -> Entries:
    """Return the config of transformers' DINOv3 with 12 layers and attention heads of 64 channels.

    width, ffn: channels of the tokens and of the feed-forward layers.
    """
    return {
        "model_type": "dinov3_vit",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": width // 64,
        "num_hidden_layers": 12,
        "use_gated_mlp": False,
        "hidden_act": "gelu",
        "num_register_tokens": 4,
        "key_bias": False,
        "layer_norm_eps": 1e-5,
        "layerscale_value": 1e-5,
        "pos_embed_rescale": 2.0,
        "apply_layernorm": True,
        "out_indices": [6, 9, 12],
    }


def _plain_vit(width: int, ffn: int) -> Entries:
    """Return the config of a distilled ViT, which has no registers, layer scales and norms of its maps."""
    return _dinov3(width, ffn) | {
        "num_register_tokens": 0,
        "key_bias": True,
        "layer_norm_eps": 1e-6,
        "layerscale_value": 1.0,
        "pos_embed_rescale": None,
        "apply_layernorm": False,
        "out_indices": [4, 8, 12],
    }


def _hgnet_b0(kernel: int, width: int, blocks: int, *, stages: int) -> Entries:
    """Return the config of HGNetV2-B0 with the last one or two of its stages as maps.

    kernel, width, blocks: kernel, output and blocks of the third stage.
    """
    widths = [64, 256, width, 1024][:stages]
    counts = [1, 1, blocks, 1][:stages]
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 64, 256, 512][:stages],
        "stage_mid_channels": [16, 32, 64, 128][:stages],
        **dict.fromkeys(("stage_out_channels", "hidden_sizes"), widths),
        **dict.fromkeys(("stage_num_blocks", "depths"), counts),
        "stage_numb_of_layers": [3] * stages,
        "stage_downsample": [False, True, True, True][:stages],
        "stage_light_block": [False, False, True, True][:stages],
        "stage_kernel_size": [3, 3, kernel, 5][:stages],
        "use_learnable_affine_block": True,
        "out_indices": [3, 4] if stages == 4 else [3],
    }


def _deimv2(backbone: Entries, width: int, ffn_dims: tuple[int, int], *, inplanes: int = 16, **others) -> Entries:
    """Return the entries of a DEIMv2. inplanes: width of the stem of the adapter of a vision transformer."""
    entries = {
        "num_queries": 300,
        "use_gateway": True,
        "share_bbox_head": False,
        "spatial_tuning_adapter_inplanes": inplanes,
    }
    return _hybrid("deimv2", backbone, width, ffn_dims, **others) | entries


def _deimv2_lite(third_stage: tuple[int, int, int], width: int, ffn: int, queries: int) -> Entries:
    """Return the entries of a DEIMv2 with the light encoder, on an HGNetV2-B0 without its fourth stage."""
    backbone = _hgnet_b0(*third_stage, stages=3)
    return _deimv2(backbone, width, (ffn, ffn), points=[4, 2], expansion=0.34, depth=0.5) | {
        "encoder_type": "lite",
        "encoder_layers": 0,
        "encoder_in_channels": [third_stage[1]],
        "encoder_has_trailing_conv": True,
        "decoder_layers": 3,
        "num_queries": queries,
        "use_gateway": False,
        "share_bbox_head": True,
    }


_ON_TWO_MAPS = {
    "encoder_in_channels": [512, 1024],
    "encoder_has_trailing_conv": True,
    "decoder_layers": 3,
}
_GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
_THREE = [3, 6, 3]  # points in three maps
DEIMV2_SIZES = {
    "atto": _deimv2_lite((3, 256, 1), 64, 160, queries=100),
    "femto": _deimv2_lite((5, 512, 1), 96, 256, queries=150),
    "pico": _deimv2_lite((5, 512, 2), 112, 320, queries=200),
    "n": _deimv2(_hgnet_b0(5, 512, 2, stages=4), 128, (512, 512), points=[6, 6], expansion=0.34, depth=0.5)
    | _ON_TWO_MAPS,
    "s": _deimv2(_plain_vit(192, 768), 192, (512, 512), points=_THREE, expansion=0.34, depth=0.67),
    "m": _deimv2(_plain_vit(256, 1024), 256, (512, 512), points=_THREE, expansion=0.67, depth=1.0),
    "l": _deimv2(_dinov3(384, 1536), 224, (896, 1792), points=_THREE, expansion=1.0, depth=1.0, inplanes=32),
    "x": _deimv2(_dinov3(384, 1536) | _GATED, 256, (1024, 2048), points=_THREE, expansion=1.25, depth=1.37, inplanes=64)
    | {"decoder_layers": 6},
}
DEIMV2_BACKBONE_FILES = {  # of the publisher of the vision transformer
    "s": "vitt_distill.pt",
    "m": "vittplus_distill.pt",
    "l": "dinov3_vits16_pretrain_lvd1689m-08c60483.pth",
    "x": "dinov3_vits16plus_pretrain_lvd1689m-4057cbaa.pth",
}


def _ecdet(vit: tuple[int, int], width: int, ffn_dims: tuple[int, int], *, expansion: float, depth: float) -> Entries:
    """Return the entries of an ECDet. vit: width and feed-forward width of its ECViT, whose last two layers give maps.
    """
    backbone = _plain_vit(*vit) | {"out_indices": [11, 12]}
    entries = _hybrid("ecdet", backbone, width, ffn_dims, points=_THREE, expansion=expansion, depth=depth)
    return entries | {"encoder_activation_function": "silu"}


ECDET_SIZES = {
    "s": _ecdet((192, 768), 192, (512, 512), expansion=0.34, depth=0.67),
    "m": _ecdet((256, 1024), 256, (512, 1024), expansion=0.75, depth=0.67),
    "l": _ecdet((384, 1536), 256, (1024, 1024), expansion=0.75, depth=1.0),
    "x": _ecdet((384, 2304), 256, (2048, 2048), expansion=1.5, depth=1.0),
}
ECDET_BACKBONE_FILES = {
    "s": "ecvitt.pth",
    "m": "ecvittplus.pth",
    "l": "ecvits.pth",
    "x": "ecvitsplus.pth",
}

# ---- LW-DETR ---------------------------------------------------------------------------------------------------------

# By depth: the blocks, counted from 0, that attend within windows; the blocks, counted from 1, that give maps.
# transformers' default config counts the latter from 0, as the original does, but its model counts from 1, after the
# embedded patches. The entries here are right for its model.
_PUBLISHED_BLOCKS = {
    6: ([0, 2, 4], [2, 4, 6]),
    10: ([0, 1, 3, 6, 7, 9], [3, 5, 6, 10]),
}


def lw_detr_vit(width: int, layers: int) -> Entries:
    """Return the config of LW-DETR's vision transformer. With another than a published depth, `layers`, every other
    block attends within windows, and maps are taken at each quarter of the depth."""
    of_depth = (list(range(0, layers, 2)), quarters(layers))
    windowed, maps = _PUBLISHED_BLOCKS.get(layers, of_depth)
    return {
        "model_type": "lw_detr_vit",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "window_block_indices": windowed,
        "out_indices": maps,
    }


def quarters(layers: int) -> list[int]:
    """Return the last layers, counted from 1, of each quarter of a depth; of 6 layers: 2, 3, 4 and 6."""
    return sorted({max(1, round(layers * part / 4)) for part in (1, 2, 3, 4)})


def _lw_detr(width: int, layers: int, *, queries: int = 300, d_model: int = 256, maps: str = "one") -> Entries:
    """Return the entries of an LW-DETR. maps: "one" of the stride of the patches, 16; "two" of half and twice that."""
    return {
        "model_type": "lw_detr",
        "backbone_config": lw_detr_vit(width, layers),
        "projector_scale_factors": [1.0] if maps == "one" else [2.0, 0.5],
        "d_model": d_model,
        "decoder_self_attention_heads": d_model // 32,
        "decoder_cross_attention_heads": d_model // 16,
        "decoder_n_points": 2 if maps == "one" else 4,
        "num_queries": queries,
    }


LW_DETR_SIZES = {
    "tiny": _lw_detr(192, 6, queries=100),
    "small": _lw_detr(192, 10),
    "medium": _lw_detr(384, 10),
    "large": _lw_detr(384, 10, d_model=384, maps="two"),
    "xlarge": _lw_detr(768, 10, d_model=384, maps="two"),
}
LW_DETR_BACKBONE_FILES = {  # by width
    192: "caev2_tiny_300e_objects365.pth",
    384: "caev2_small_300e_objects365.pth",
    768: "caev2_base_300e_objects365.pth",
}

# ---- RF-DETR ---------------------------------------------------------------------------------------------------------


def _rf_detr(patch: int, windows: int, maps: list[int], side: int, decoder_layers: int) -> Entries:
    """Return the entries of an RF-DETR.

    Args:
        patch: side of the patches in pixels.
        windows: number of windows along a side.
        maps: layers, counted from 1, of the 12 of DINOv2 that give maps. Layers behind the last one are not built.
        side: side of the image that the positions of patches are for, in pixels.
    """
    backbone = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": 384,
        "num_attention_heads": 6,
        "num_hidden_layers": 12,
        "patch_size": patch,
        "num_windows": windows,
        "out_indices": maps,
        "image_size": side,
    }
    return {"backbone_config": backbone, "decoder_layers": decoder_layers}


# The publisher's larger sizes have another licence, its large of 2025 another pyramid.
RF_DETR_SIZES = {
    "nano": _rf_detr(16, 2, [3, 6, 9, 12], 384, 2),
    "small": _rf_detr(16, 2, [3, 6, 9, 12], 512, 3),
    "medium": _rf_detr(16, 2, [3, 6, 9, 12], 576, 4),
    "large": _rf_detr(16, 2, [3, 6, 9, 12], 704, 4),
    "base": _rf_detr(14, 4, [2, 5, 8, 11], 518, 3),
}
