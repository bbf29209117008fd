"""The published sizes of LW-DETR as entries of transformers' config (Atten4Vis/LW-DETR, scripts).

transformers' default config counts the blocks whose maps are used from 0, as the original does, but its model counts
them from 1, after the embedded patches. The entries here are right for its model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class LwDetrSize(NamedTuple):
    """A published size."""

    width: int  # of the vision transformer
    encoder_layers: int
    num_queries: int
    d_model: int
    heads: int  # of the decoder's self-attention
    points: int  # for each head and map of the decoder's deformable attention
    scales: Sequence[float]  # of the maps, relative to that of the patches of 16 px


LW_DETR_SIZES = {
    "tiny": LwDetrSize(192, 6, 100, 256, 8, 2, [1.0]),
    "small": LwDetrSize(192, 10, 300, 256, 8, 2, [1.0]),
    "medium": LwDetrSize(384, 10, 300, 256, 8, 2, [1.0]),
    "large": LwDetrSize(384, 10, 300, 384, 12, 4, [2.0, 0.5]),
    "xlarge": LwDetrSize(768, 10, 300, 384, 12, 4, [2.0, 0.5]),
}
# By width: the publisher's files of the vision transformer alone.
VIT_FILES = {
    192: "caev2_tiny_300e_objects365.pth",
    384: "caev2_small_300e_objects365.pth",
    768: "caev2_base_300e_objects365.pth",
}
# By depth: the blocks, counted from 0, that attend within windows; the blocks, counted from 1, that give maps.
PUBLISHED_BLOCKS = {
    6: ([0, 2, 4], [2, 4, 6]),
    10: ([0, 1, 3, 6, 7, 9], [3, 5, 6, 10]),
}


def vit_entries(width: int, layers: int) -> dict[str, Any]:
    """Return the config of the vision transformer. With another than a published depth, `layers`, every other block
    attends within windows, and maps are taken at each quarter of the depth."""
    quarters = {max(1, round(layers * part / 4)) for part in (1, 2, 3, 4)}
    of_depth = (list(range(0, layers, 2)), sorted(quarters))
    windowed, maps = PUBLISHED_BLOCKS.get(layers, of_depth)
    return {
        "model_type": "lw_detr_vit",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "window_block_indices": windowed,
        "out_indices": maps,
    }


def size_of(config: Mapping[str, Any]) -> str | None:
    """Return the published size whose vision transformer and maps a config has; None: it has others."""
    backbone = config["backbone_config"]
    for name, size in LW_DETR_SIZES.items():
        published = vit_entries(size.width, size.encoder_layers)
        same_vit = all(backbone.get(key) == value for key, value in published.items())
        if same_vit and list(config["projector_scale_factors"]) == size.scales:
            return name
    return None
