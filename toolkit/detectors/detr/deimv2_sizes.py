"""The published sizes of DEIMv2 as entries of transformers' config (Intellindust-AI-Lab/DEIMv2, configs/deimv2)."""

from typing import Any

# (widths of encoder and decoder, feed-forward widths of both, decoder layers, expansion, depth, queries)
DEIMV2_SIZES = {
    "atto": ((64, 64), (160, 160), 3, 0.34, 0.5, 100),
    "femto": ((96, 96), (256, 256), 3, 0.34, 0.5, 150),
    "pico": ((112, 112), (320, 320), 3, 0.34, 0.5, 200),
    "n": ((128, 128), (512, 512), 3, 0.34, 0.5, 300),
    "s": ((192, 192), (512, 512), 4, 0.34, 0.67, 300),
    "m": ((256, 256), (512, 512), 4, 0.67, 1.0, 300),
    "l": ((224, 224), (896, 1792), 4, 1.0, 1.0, 300),
    "x": ((256, 256), (1024, 2048), 6, 1.25, 1.37, 300),
}
# Kernel, output and blocks of the third stage of HGNetV2-B0; N alone has the fourth.
THIRD_STAGE = {"atto": (3, 256, 1), "femto": (5, 512, 1), "pico": (5, 512, 2), "n": (5, 512, 2)}
# Width and feed-forward width of the ViT, and width of the adapter's stem; the publisher's file of the ViT.
VITS = {
    "s": (192, 768, 16, "vitt_distill.pt"),
    "m": (256, 1024, 16, "vittplus_distill.pt"),
    "l": (384, 1536, 32, "dinov3_vits16_pretrain_lvd1689m-08c60483.pth"),
    "x": (384, 1536, 64, "dinov3_vits16plus_pretrain_lvd1689m-4057cbaa.pth"),
}
EXPANSIONS = (0.34, 0.5, 0.67, 1.0, 1.25)
DEPTHS = {1: 0.34, 2: 0.67, 3: 1.0, 4: 1.37}  # depth by number of blocks


def size_config(size: str) -> dict[str, Any]:
    """Return the entries of transformers' config for a published size, a key of `DEIMV2_SIZES`; they serve as a source
    config."""
    (encoder, decoder), (encoder_ffn, decoder_ffn), layers, expansion, depth, queries = DEIMV2_SIZES[size]
    lite = size in ("atto", "femto", "pico")
    levels = 3 if size in VITS else 2
    if size in VITS:
        width, ffn, _, _ = VITS[size]
        backbone = vit_entries(width, ffn, plain=size in "sm", gated=size == "x")
        maps = [encoder] * 3
    else:
        backbone = _hgnet(*THIRD_STAGE[size], fourth=size == "n")
        maps = backbone["hidden_sizes"][2:]
    if lite:
        points = [4, 2]
    elif levels == 2:
        points = [6, 6]
    else:
        points = [3, 6, 3]
    return common_entries(levels, lite) | {
        "backbone_config": backbone,
        "encoder_in_channels": maps,
        "encoder_hidden_dim": encoder,
        "d_model": decoder,
        "encoder_ffn_dim": encoder_ffn,
        "decoder_ffn_dim": decoder_ffn,
        "decoder_in_channels": [decoder] * levels,
        "decoder_layers": layers,
        "decoder_n_points": points,
        "hidden_expansion": expansion,
        "depth_mult": depth,
        "num_queries": queries,
        "encoder_has_trailing_conv": size not in VITS,
        "use_gateway": not lite,
        "share_bbox_head": lite,
        "spatial_tuning_adapter_inplanes": VITS[size][2] if size in VITS else 16,
    }


def common_entries(levels: int, lite: bool) -> dict[str, Any]:
    """Return the config entries that all sizes share, and those that follow from the number of feature levels.

    lite: the encoder is the light one of the smallest sizes (Atto, Femto, Pico).
    """
    return {
        "model_type": "deimv2",
        "encoder_type": "lite" if lite else "hybrid",
        "encoder_layers": 0 if lite else 1,
        "encode_proj_layers": [levels - 1],
        "feat_strides": [8, 16, 32][-levels:],
        "num_feature_levels": levels,
        "decoder_activation_function": "silu",
        "focal_loss_gamma": 1.5,
        "freeze_backbone_batch_norms": False,
    }


def vit_entries(width: int, ffn: int, *, plain: bool, gated: bool = False) -> dict[str, Any]:
    """Return the config of transformers' DINOv3 backbone with 12 layers and attention heads of 64 channels.

    width, ffn: channels of the tokens and of the feed-forward layers. plain: the distilled ViT-Tiny of the sizes S and
    M, which does not have registers, layer scales and norms of its maps. gated: feed-forward layers have a gate.
    """
    return {
        "model_type": "dinov3_vit",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": max(1, width // 64),
        "num_hidden_layers": 12,
        "use_gated_mlp": gated,
        "hidden_act": "silu" if gated else "gelu",
        "num_register_tokens": 0 if plain else 4,
        "key_bias": plain,
        "layer_norm_eps": 1e-6 if plain else 1e-5,
        "layerscale_value": 1.0 if plain else 1e-5,
        "pos_embed_rescale": None if plain else 2.0,
        "apply_layernorm": not plain,
        "out_indices": [4, 8, 12] if plain else [6, 9, 12],
    }


def _hgnet(kernel: int, width: int, blocks: int, fourth: bool) -> dict[str, Any]:
    stages = slice(4 if fourth else 3)
    widths = [64, 256, width, 1024][stages]
    counts = [1, 1, blocks, 1][stages]
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 64, 256, 512][stages],
        "stage_mid_channels": [16, 32, 64, 128][stages],
        **dict.fromkeys(("stage_out_channels", "hidden_sizes"), widths),
        **dict.fromkeys(("stage_num_blocks", "depths"), counts),
        "stage_numb_of_layers": [3] * len(widths),
        "stage_downsample": [False, True, True, True][stages],
        "stage_light_block": [False, False, True, True][stages],
        "stage_kernel_size": [3, 3, kernel, 5][stages],
        "use_learnable_affine_block": True,
        "out_indices": [3, 4] if fourth else [3],
    }
