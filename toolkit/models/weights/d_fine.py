"""Peterande/D-FINE: `dfine_n_coco.pth` to `dfine_x_obj2coco.pth`, as `d_fine`, on their HGNetv2 of transformers."""

import re
from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights import rt_detr
from toolkit.models.weights.class_names import named
from toolkit.models.weights.names import Description, Pairs, copied, count, renamed, split_attention, without

CONV: Pairs = [("conv", "convolution"), ("bn", "normalization")]
BODY = "model.model.backbone.model"
STAGE = "stages.*.blocks.*"


def _layers(theirs: str, ours: str) -> Pairs:
    """Layers of one convolution, or of two (`conv1`, `conv2`) in light blocks."""
    light = [(f"{theirs}.conv{i}.{a}", f"{ours}.conv{i}.{b}") for i in (1, 2) for a, b in CONV]
    return [*light, *((f"{theirs}.{a}", f"{ours}.{b}") for a, b in CONV)]


CSP: Pairs = [("cv1", "conv1"), ("cv4", "conv4"), ("cv2.0", "csp_rep1"), ("cv2.1", "conv2"), ("cv3.0", "csp_rep2"),
              ("cv3.1", "conv3")]  # fmt: skip
NAMES: Pairs = [
    *(pair for stem in ("stem1", "stem2a", "stem2b", "stem3", "stem4")
      for pair in _layers(f"backbone.stem.{stem}", f"{BODY}.embedder.{stem}")),
    *_layers(f"backbone.{STAGE}.layers.*", f"{BODY}.encoder.{STAGE}.layers.*"),
    *_layers(f"backbone.{STAGE}.aggregation.*", f"{BODY}.encoder.{STAGE}.aggregation.*"),
    *_layers("backbone.stages.*.downsample", f"{BODY}.encoder.stages.*.downsample"),
    ("backbone.stem", f"{BODY}.embedder"), ("backbone.stages", f"{BODY}.encoder.stages"),
    *((f"encoder.{blocks}.*.{a}", f"model.model.encoder.{blocks}.*.{b}")
      for blocks in ("fpn_blocks", "pan_blocks") for a, b in CSP),
    *((f"encoder.downsample_convs.*.0.cv{i}", f"model.model.encoder.downsample_convs.*.conv{i}") for i in (1, 2)),
    *rt_detr.transformer(("mlp.layers.0", "mlp.layers.1")), *rt_detr.HEADS,
    ("decoder.pre_bbox_head", "model.model.decoder.pre_bbox_head"),
    ("decoder.decoder.lqe_layers", "model.model.decoder.lqe_layers"), ("decoder.up", "model.model.decoder.up"),
    ("decoder.reg_scale", "model.model.decoder.reg_scale"),
]  # fmt: skip
CONSTANTS = (r"^decoder\.(anchors|valid_mask|decoder\.up|decoder\.reg_scale|decoder\.project)$",)


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Whether these are its names."""
    return "decoder.pre_bbox_head.layers.0.weight" in state and "backbone.stem.stem1.conv.weight" in state


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """The detector that these tensors are of; what they cannot tell (heads, queries) is as published."""
    entries = rt_detr.family_entries(state)
    levels, scale = entries["num_feature_levels"], float(state["decoder.reg_scale"])
    bottlenecks = count(state, "encoder.fpn_blocks.0.cv2.0.bottlenecks")
    config = entries | {
        "model_type": "d_fine",
        "backbone_config": _hgnet_entries(state, levels),
        "decoder_n_points": [6, 6] if levels == 2 else [3, 6, 3],
        "depth_mult": {1: 0.34, 2: 0.67, 3: 1.0}.get(bottlenecks, bottlenecks / 3) if levels == 3 else 0.5,
        "reg_scale": scale, "up": float(state["decoder.up"]),
        "max_num_bins": len(state["decoder.dec_bbox_head.0.layers.2.bias"]) // 4 - 1,
        "freeze_backbone_batch_norms": "backbone.stem.stem1.bn.num_batches_tracked" not in state,
    }  # fmt: skip
    return Description("d_fine", {"source_config": config}, named(len(state["decoder.dec_score_head.0.weight"])))


def _hgnet_entries(state: Mapping[str, Tensor], levels: int) -> dict:
    """The config of transformers' HGNetV2."""
    stages = range(count(state, "backbone.stages"))

    def first(stage: int, *names: str) -> Tensor:
        prefix = f"backbone.stages.{stage}.blocks.0.layers.0."
        return next(state[prefix + name] for name in names if prefix + name in state)

    layers = [first(i, "conv.weight", "conv1.conv.weight") for i in stages]
    light = [f"backbone.stages.{i}.blocks.0.layers.0.conv1.conv.weight" in state for i in stages]
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [state["backbone.stem.stem1.conv.weight"].shape[1],
                          len(state["backbone.stem.stem1.conv.weight"]), len(state["backbone.stem.stem4.conv.weight"])],
        "stage_in_channels": [layer.shape[1] for layer in layers],
        "stage_mid_channels": [len(layer) for layer in layers],
        "stage_out_channels": [len(state[f"backbone.stages.{i}.blocks.0.aggregation.1.conv.weight"]) for i in stages],
        "hidden_sizes": [len(state[f"backbone.stages.{i}.blocks.0.aggregation.1.conv.weight"]) for i in stages],
        "stage_num_blocks": [count(state, f"backbone.stages.{i}.blocks") for i in stages],
        "depths": [count(state, f"backbone.stages.{i}.blocks") for i in stages],
        "stage_numb_of_layers": [count(state, f"backbone.stages.{i}.blocks.0.layers") for i in stages],
        "stage_downsample": [f"backbone.stages.{i}.downsample.conv.weight" in state for i in stages],
        "stage_light_block": light,
        "stage_kernel_size": [first(i, "conv2.conv.weight", "conv.weight").shape[-1] for i in stages],
        "use_learnable_affine_block": any(re.search(r"^backbone\..*\.lab\.scale$", name) for name in state),
        "out_indices": [2, 3, 4][-levels:],
    }  # fmt: skip


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    kept = split_attention(without(state, *CONSTANTS))
    return copied(renamed(kept, NAMES), rt_detr.COPIES)
