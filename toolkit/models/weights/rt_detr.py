"""lyuwenyu/RT-DETR, both PyTorch versions: `rtdetr_r18vd_*.pth`, `rtdetrv2_r50vd_*.pth` and so on, as `rt_detr_v2`.

The first version's deformable attention is the second's with four points a level, so that its weights give the same
boxes there. Backbones are the ResNets of the original, as transformers has them.
"""

from collections.abc import Mapping

from torch import Tensor

from toolkit.errors import BadInput
from toolkit.models.weights.class_names import named
from toolkit.models.weights.names import Description, Pairs, copied, count, renamed, split_attention, without

BLOCK = "model.model.backbone.model.encoder.stages.*.layers.*"
CONV: Pairs = [("conv", "convolution"), ("norm", "normalization")]
BACKBONE: Pairs = [
    *((f"backbone.conv1.conv1_{i + 1}.{a}", f"model.model.backbone.model.embedder.embedder.{i}.{b}")
      for i in range(3) for a, b in CONV),
    *((f"backbone.res_layers.*.blocks.*.branch2{letter}.{a}", f"{BLOCK}.layer.{i}.{b}")
      for i, letter in enumerate("abc") for a, b in CONV),
    *((f"backbone.res_layers.*.blocks.*.short.conv.{a}", f"{BLOCK}.shortcut.1.{b}") for a, b in CONV),
    *((f"backbone.res_layers.*.blocks.*.short.{a}", f"{BLOCK}.shortcut.{b}") for a, b in CONV),
]  # fmt: skip


def projections(theirs: str, ours: str) -> Pairs:
    """Convolution and norm, which have names there and numbers here."""
    return [(f"{theirs}.*.conv", f"{ours}.*.0"), (f"{theirs}.*.norm", f"{ours}.*.1")]


def transformer(feed_forward: tuple[str, str]) -> Pairs:
    """Encoder and decoder layers, as D-FINE has them too. feed_forward: our names of its two layers."""
    common = [("linear1", feed_forward[0]), ("linear2", feed_forward[1]), ("self_attn.out_proj", "self_attn.o_proj"),
              ("norm1", "self_attn_layer_norm"), ("cross_attn", "encoder_attn")]  # fmt: skip
    encoder = [*common, ("norm2", "final_layer_norm")]
    decoder = [*common, ("norm2", "encoder_attn_layer_norm"), ("norm3", "final_layer_norm")]
    return [
        *((f"encoder.encoder.*.layers.*.{a}", f"model.model.encoder.aifi.*.layers.*.{b}") for a, b in encoder),
        *((f"decoder.decoder.layers.*.{a}", f"model.model.decoder.layers.*.{b}") for a, b in decoder),
        ("encoder.encoder", "model.model.encoder.aifi"),
    ]


HEADS: Pairs = [
    *projections("encoder.input_proj", "model.model.encoder_input_proj"),
    *projections("decoder.input_proj", "model.model.decoder_input_proj"),
    ("encoder.input_proj", "model.model.encoder_input_proj"),  # of the first version, with numbers already
    ("decoder.enc_output.proj", "model.model.enc_output.0"), ("decoder.enc_output.norm", "model.model.enc_output.1"),
    ("decoder.enc_output", "model.model.enc_output"), ("decoder.dec_score_head", "model.model.decoder.class_embed"),
    ("decoder.dec_bbox_head", "model.model.decoder.bbox_embed"),
    ("decoder.denoising_class_embed", "model.model.denoising_class_embed"),
    ("decoder.enc_score_head", "model.model.enc_score_head"), ("decoder.enc_bbox_head", "model.model.enc_bbox_head"),
    ("decoder.query_pos_head", "model.model.decoder.query_pos_head"), ("encoder", "model.model.encoder"),
    ("decoder.decoder.layers", "model.model.decoder.layers"),
]  # fmt: skip
POINTS = ("decoder.decoder.layers.*.cross_attn.num_points_scale",
          "model.model.decoder.layers.*.encoder_attn.n_points_scale")
NAMES: Pairs = [*BACKBONE, POINTS, *transformer(("mlp.fc1", "mlp.fc2")), *HEADS]
COPIES = {"model.class_embed": "model.model.decoder.class_embed", "model.bbox_embed": "model.model.decoder.bbox_embed"}
CONSTANTS = (r"^decoder\.(anchors|valid_mask)$",)  # which follow from the size of the images


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Whether these are its names."""
    return "decoder.dec_score_head.0.weight" in state and "backbone.res_layers.0.blocks.0.branch2a.conv.weight" in state


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """The detector that these tensors are of; what they cannot tell (heads, queries) is as published.

    Raises:
        BadInput: attention with another number of points than four.
    """
    points = [len(t) for n, t in state.items() if n.endswith("cross_attn.attention_weights.bias")]
    levels = count(state, "encoder.input_proj")
    if set(points) != {8 * 4 * levels}:
        raise BadInput(f"model.pretrained {file}: its attention has {points[0] // 8 // levels} points a level (`sp1` "
                       "to `sp3` in RT-DETR's names); rt_detr_v2 has 4")  # fmt: skip
    config = family_entries(state) | {"model_type": "rt_detr_v2", "backbone_config": resnet_entries(state)}
    config["freeze_backbone_batch_norms"] = "backbone.conv1.conv1_1.norm.num_batches_tracked" not in state
    notes = []
    if "dsp" in file.lower():
        config["decoder_method"] = "discrete"
        notes.append("by the name of the file it samples at whole pixels (`dsp`)")
    classes = named(len(state["decoder.dec_score_head.0.weight"]))
    return Description("rt_detr_v2", {"source_config": config}, classes, notes)


def family_entries(state: Mapping[str, Tensor]) -> dict:
    """Entries of transformers' config that RT-DETR and D-FINE have in common, read from their tensors."""
    levels = count(state, "encoder.input_proj")
    first = state["encoder.encoder.0.layers.0.linear1.weight"]
    decoder = state["decoder.decoder.layers.0.linear1.weight"]
    projected = state.get("decoder.input_proj.0.conv.weight")  # D-FINE has none where the widths agree
    return {
        "encoder_in_channels": [_projection(state, i).shape[1] for i in range(levels)],
        "encoder_hidden_dim": first.shape[1], "encoder_ffn_dim": len(first), "d_model": decoder.shape[1],
        "decoder_ffn_dim": len(decoder), "encode_proj_layers": [levels - 1], "num_feature_levels": levels,
        "encoder_layers": count(state, "encoder.encoder.0.layers"),
        "decoder_layers": count(state, "decoder.decoder.layers"), "feat_strides": [8, 16, 32][-levels:],
        "decoder_n_levels": levels,
        "decoder_in_channels": [first.shape[1] if projected is None else projected.shape[1]] * levels,
        "hidden_expansion": _expansion(state, first.shape[1]),
    }  # fmt: skip


def _projection(state: Mapping[str, Tensor], level: int) -> Tensor:
    of_first_version = state.get(f"encoder.input_proj.{level}.0.weight")
    return state[f"encoder.input_proj.{level}.conv.weight"] if of_first_version is None else of_first_version


def _expansion(state: Mapping[str, Tensor], width: int) -> float:
    if "encoder.fpn_blocks.0.conv1.conv.weight" in state:
        return len(state["encoder.fpn_blocks.0.conv1.conv.weight"]) / width
    inner = len(state["encoder.fpn_blocks.0.cv2.0.conv1.conv.weight"])  # D-FINE: round(expansion * width / 2)
    published = next((e for e in (0.34, 0.5, 1.0) if round(e * width // 2) == inner), None)
    return published or 2 * inner / width


def resnet_entries(state: Mapping[str, Tensor]) -> dict:
    """The config of transformers' ResNet for RT-DETR."""
    prefix = "backbone.res_layers"
    last = "c" if f"{prefix}.0.blocks.0.branch2c.conv.weight" in state else "b"
    stages = range(count(state, prefix))
    return {
        "model_type": "rt_detr_resnet",
        "layer_type": "bottleneck" if last == "c" else "basic",
        "depths": [count(state, f"{prefix}.{i}.blocks") for i in stages],
        "hidden_sizes": [len(state[f"{prefix}.{i}.blocks.0.branch2{last}.conv.weight"]) for i in stages],
        "out_indices": [2, 3, 4],
    }


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    kept = split_attention(without(state, *CONSTANTS))
    return copied(renamed(kept, NAMES), COPIES)
