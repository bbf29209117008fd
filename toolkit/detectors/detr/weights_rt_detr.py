"""Weights of lyuwenyu/RT-DETR, both PyTorch versions, which become an `rt_detr_v2`: `rtdetr_r18vd_*.pth`,
`rtdetrv2_r50vd_*.pth` and so on. Weights of Peterande/D-FINE, which become a `d_fine`: `dfine_n_coco.pth` to
`dfine_x_obj2coco.pth`; and those of Intellindust-AI-Lab/DEIM and RT-DETRs/RT-DETRv4, which trained D-FINE with SiLU.

The deformable attention of RT-DETR's first version is the second version's with four points a level, so that its
weights give the same boxes in `rt_detr_v2`. Backbones are the ResNets and HGNetv2 of the originals, as transformers has
them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.models.weights.names import (
    Description,
    IncompleteWeights,
    Pairs,
    Publisher,
    class_names_for,
    count_parts,
    pairs,
    positive_number,
    required,
    required_count,
)

BODY = "model.model.backbone.model"
POINTS = "decoder.decoder.layers.0.cross_attn.num_points_scale"
COPIES = {"model.class_embed": "model.model.decoder.class_embed", "model.bbox_embed": "model.model.decoder.bbox_embed"}


# Convolution and norm of a projection have names there and numbers here.
PROJECTIONS_AND_HEADS = """
    encoder.encoder model.model.encoder.aifi
    encoder.input_proj.*.conv model.model.encoder_input_proj.*.0
    encoder.input_proj.*.norm model.model.encoder_input_proj.*.1
    encoder.input_proj model.model.encoder_input_proj, encoder model.model.encoder
    decoder.input_proj.*.conv model.model.decoder_input_proj.*.0
    decoder.input_proj.*.norm model.model.decoder_input_proj.*.1
    decoder.enc_output.proj model.model.enc_output.0, decoder.enc_output.norm model.model.enc_output.1
    decoder.enc_output model.model.enc_output
    decoder.dec_score_head model.model.decoder.class_embed, decoder.dec_bbox_head model.model.decoder.bbox_embed
    decoder.enc_score_head model.model.enc_score_head, decoder.enc_bbox_head model.model.enc_bbox_head
    decoder.denoising_class_embed model.model.denoising_class_embed
    decoder.decoder model.model.decoder, decoder model.model.decoder
"""


def _transformer(first: str, second: str) -> Pairs:
    """Return the names of everything but the backbone. first, second: our names of the layers of a feed-forward
    network."""
    layer = (
        f"linear1 {first}, linear2 {second}, self_attn.out_proj self_attn.o_proj, "
        "norm1 self_attn_layer_norm, cross_attn encoder_attn"
    )
    encoder = "norm2 final_layer_norm"
    decoder = "norm2 encoder_attn_layer_norm, norm3 final_layer_norm"
    return [
        *pairs(f"{layer}, {encoder}", below=[("encoder.encoder.*.layers.*.", "model.model.encoder.aifi.*.layers.*.")]),
        *pairs(f"{layer}, {decoder}", below=[("decoder.decoder.layers.*.", "model.model.decoder.layers.*.")]),
        *pairs(PROJECTIONS_AND_HEADS),
    ]


def check_points(state: Mapping[str, Tensor], known: Iterable[Sequence[int]]) -> None:
    """Raise IncompleteWeights if the decoder's attention has none of the known numbers of points in each feature map.

    A file has 1 / points for each point: with 4 and 2 points in two maps, four times 0.25 and twice 0.5.
    """
    values = required(state, POINTS, 1)
    for points in known:
        expected = torch.tensor([1 / number for number in points for _ in range(number)])
        if values.shape == expected.shape and torch.allclose(values.float(), expected):
            return
    raise IncompleteWeights(f"has {POINTS} that does not hold 1 / points for each point of attention")


def _family_entries(state: Mapping[str, Tensor]) -> dict:
    """Return the config entries that RT-DETR and D-FINE share, read from their tensors; those that tensors do not show
    (heads, queries) are as published."""
    levels = required_count(state, "encoder.input_proj")
    encoder = required(state, "encoder.encoder.0.layers.0.linear1.weight", 2)
    decoder = required(state, "decoder.decoder.layers.0.linear1.weight", 2)
    in_decoder = "decoder.input_proj.0.conv.weight"
    projected = required(state, in_decoder, 4) if in_decoder in state else encoder  # D-FINE: none where widths agree
    is_first_version = "encoder.input_proj.0.0.weight" in state  # its projections are numbered
    leaf = "0.weight" if is_first_version else "conv.weight"
    maps = [required(state, f"encoder.input_proj.{level}.{leaf}", 4) for level in range(levels)]
    return {
        "encoder_in_channels": [projection.shape[1] for projection in maps],
        "encoder_hidden_dim": encoder.shape[1],
        "encoder_ffn_dim": len(encoder),
        "d_model": decoder.shape[1],
        "decoder_ffn_dim": len(decoder),
        "encode_proj_layers": [levels - 1],
        "num_feature_levels": levels,
        "encoder_layers": count_parts(state, "encoder.encoder.0.layers"),
        "decoder_layers": required_count(state, "decoder.decoder.layers"),
        "feat_strides": [8, 16, 32][-levels:],
        "decoder_n_levels": levels,
        "decoder_in_channels": [projected.shape[1]] * levels,
        "hidden_expansion": _expansion(state, encoder.shape[1]),
    }


def _expansion(state: Mapping[str, Tensor], width: int) -> float:
    if "encoder.fpn_blocks.0.conv1.conv.weight" in state:
        return len(required(state, "encoder.fpn_blocks.0.conv1.conv.weight", 4)) / width
    inner = len(required(state, "encoder.fpn_blocks.0.cv2.0.conv1.conv.weight", 4))
    for expansion in (0.34, 0.5, 1.0):  # D-FINE: inner is round(expansion * width / 2)
        if round(expansion * width // 2) == inner:
            return expansion
    return 2 * inner / width


# ---------------------------------------------------------------- RT-DETR


def _rt_detr(state: Mapping[str, Tensor], file: str) -> list[Description]:
    layers = range(required_count(state, "decoder.decoder.layers"))
    biases = [f"decoder.decoder.layers.{layer}.cross_attn.attention_weights.bias" for layer in layers]
    points = [len(required(state, bias, 1)) for bias in biases]
    levels = required_count(state, "encoder.input_proj")
    if set(points) != {8 * 4 * levels}:
        raise BadInput(
            f"model.pretrained {file}: its attention has {points[0] // 8 // levels} points a level (`sp1` to `sp3` in "
            "RT-DETR's names); rt_detr_v2 has 4"
        )
    if "deim" in file.lower():
        raise BadInput(
            f"model.pretrained {file}: by its name it is DEIM's, whose decoder has SiLU, where rt_detr_v2 has ReLU; of "
            "DEIM's files those on HGNetV2 are read, as d_fine. If it is another program's, rename it"
        )
    config = _family_entries(state) | {"model_type": "rt_detr_v2", "backbone_config": _resnet_entries(state)}
    config["freeze_backbone_batch_norms"] = "backbone.conv1.conv1_1.norm.num_batches_tracked" not in state
    notes = []
    if "dsp" in file.lower():
        config["decoder_method"] = "discrete"
        notes.append("by the name of the file it samples at whole pixels (`dsp`)")
    classes = class_names_for(len(required(state, "decoder.dec_score_head.0.weight", 2)))
    return [Description("rt_detr_v2", {"source_config": config}, classes, notes)]


def _resnet_entries(state: Mapping[str, Tensor]) -> dict:
    """Return the config of transformers' ResNet for RT-DETR."""
    prefix = "backbone.res_layers"
    last = "c" if f"{prefix}.0.blocks.0.branch2c.conv.weight" in state else "b"
    stages = range(required_count(state, prefix))
    return {
        "model_type": "rt_detr_resnet",
        "layer_type": "bottleneck" if last == "c" else "basic",
        "depths": [count_parts(state, f"{prefix}.{i}.blocks") for i in stages],
        "hidden_sizes": [len(required(state, f"{prefix}.{i}.blocks.0.branch2{last}.conv.weight", 4)) for i in stages],
        "out_indices": [2, 3, 4],
    }


def _resnet() -> Pairs:
    theirs = "backbone.res_layers.*.blocks.*"
    ours = f"{BODY}.encoder.stages.*.layers.*"
    prefixes = [(f"backbone.conv1.conv1_{i + 1}.", f"{BODY}.embedder.embedder.{i}.") for i in range(3)]
    prefixes += [(f"{theirs}.branch2{letter}.", f"{ours}.layer.{i}.") for i, letter in enumerate("abc")]
    prefixes += [(f"{theirs}.short.conv.", f"{ours}.shortcut.1."), (f"{theirs}.short.", f"{ours}.shortcut.")]
    return pairs("conv convolution, norm normalization", below=prefixes)


POINTS_NAME = """
    decoder.decoder.layers.*.cross_attn.num_points_scale model.model.decoder.layers.*.encoder_attn.n_points_scale
"""
RT_DETR = Publisher(
    "lyuwenyu/RT-DETR",
    _rt_detr,
    ("decoder.dec_score_head.0.weight", "backbone.res_layers.0.blocks.0.branch2a.conv.weight"),
    [*_resnet(), *pairs(POINTS_NAME), *_transformer("mlp.fc1", "mlp.fc2")],
    left_out=r"^decoder\.(anchors|valid_mask)$",  # which follow from the size of the images
    copies=COPIES,
)

# ---------------------------------------------------------------- D-FINE


def _d_fine(state: Mapping[str, Tensor], file: str) -> list[Description]:
    entries = _family_entries(state)
    levels = entries["num_feature_levels"]
    bottlenecks = count_parts(state, "encoder.fpn_blocks.0.cv2.0.bottlenecks")
    depth_mult = 0.5
    if levels == 3:
        depth_mult = {1: 0.34, 2: 0.67, 3: 1.0}.get(bottlenecks, bottlenecks / 3)
    points = [6, 6] if levels == 2 else [3, 6, 3]
    check_points(state, [points])
    config = entries | {
        "model_type": "d_fine",
        "backbone_config": _hgnet_entries(state, levels),
        "decoder_n_points": points,
        "depth_mult": depth_mult,
        "reg_scale": positive_number(state, "decoder.reg_scale"),
        "up": positive_number(state, "decoder.up"),
        "max_num_bins": len(required(state, "decoder.dec_bbox_head.0.layers.2.bias", 1)) // 4 - 1,
        "freeze_backbone_batch_norms": "backbone.stem.stem1.bn.num_batches_tracked" not in state,
    }
    notes = []
    if any(name.startswith(FEATURE_PROJECTOR) for name in state):
        config |= SILU
    elif "deim" in file.lower():
        config |= SILU
        notes.append("by the name of the file its decoder has SiLU (DEIM), where D-FINE has ReLU")
    classes = class_names_for(len(required(state, "decoder.dec_score_head.0.weight", 2)))
    return [Description("d_fine", {"source_config": config}, classes, notes)]


def _hgnet_entries(state: Mapping[str, Tensor], levels: int) -> dict:
    """Return the config of transformers' HGNetV2 that these tensors belong to, with its last `levels` feature maps as
    outputs."""
    stages = [f"backbone.stages.{i}" for i in range(required_count(state, "backbone.stages"))]
    firsts = [f"{stage}.blocks.0.layers.0" for stage in stages]
    light = [f"{first}.conv1.conv.weight" in state for first in firsts]  # blocks of two convolutions each
    entering = []  # the first convolution of each stage, and the last one of the same layer
    leaving = []
    for first, is_light in zip(firsts, light, strict=True):
        entering.append(required(state, f"{first}.conv1.conv.weight" if is_light else f"{first}.conv.weight", 4))
        leaving.append(required(state, f"{first}.conv2.conv.weight" if is_light else f"{first}.conv.weight", 4))
    widths = [len(required(state, f"{stage}.blocks.0.aggregation.1.conv.weight", 4)) for stage in stages]
    blocks = [count_parts(state, f"{stage}.blocks") for stage in stages]
    stem = required(state, "backbone.stem.stem1.conv.weight", 4)
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [stem.shape[1], len(stem), len(required(state, "backbone.stem.stem4.conv.weight", 4))],
        "stage_in_channels": [weight.shape[1] for weight in entering],
        "stage_mid_channels": [len(weight) for weight in entering],
        **dict.fromkeys(("stage_out_channels", "hidden_sizes"), widths),
        **dict.fromkeys(("stage_num_blocks", "depths"), blocks),
        "stage_numb_of_layers": [count_parts(state, f"{stage}.blocks.0.layers") for stage in stages],
        "stage_downsample": [f"{stage}.downsample.conv.weight" in state for stage in stages],
        "stage_light_block": light,
        "stage_kernel_size": [weight.shape[-1] for weight in leaving],
        "use_learnable_affine_block": any(re.search(r"^backbone\..*\.lab\.scale$", name) for name in state),
        "out_indices": list(range(1, len(stages) + 1))[-levels:],
    }


def hgnet_names(body: str) -> Pairs:
    """Return the pairs of names of HGNetV2's tensors, the publisher's and ours. body: our name of the whole
    backbone."""
    stems = ("stem1", "stem2a", "stem2b", "stem3", "stem4")
    parts = ("blocks.*.layers.*", "blocks.*.aggregation.*", "downsample")
    prefixes = [(f"backbone.stem.{stem}.", f"{body}.embedder.{stem}.") for stem in stems]
    prefixes += [(f"backbone.stages.*.{part}.", f"{body}.encoder.stages.*.{part}.") for part in parts]
    # A layer is one convolution, in light blocks two.
    prefixes = [(theirs + conv, ours + conv) for theirs, ours in prefixes for conv in ("conv1.", "conv2.", "")]
    whole = f"backbone.stem {body}.embedder, backbone.stages {body}.encoder.stages"
    return [*pairs("conv convolution, bn normalization", below=prefixes), *pairs(whole)]


# The decoder of DEIM and RT-DETRv4; the tensors are D-FINE's.
SILU = {"decoder_activation_function": "silu", "head_activation": "silu"}
FEATURE_PROJECTOR = "encoder.feature_projector."  # by which RT-DETRv4 learns from another model; not for predictions
CSP = "cv1 conv1, cv4 conv4, cv2.0 csp_rep1, cv2.1 conv2, cv3.0 csp_rep2, cv3.1 conv3"
CSP_PLACES = [(f"encoder.{name}.*.", f"model.model.encoder.{name}.*.") for name in ("fpn_blocks", "pan_blocks")]
DOWNSAMPLE = [("encoder.downsample_convs.*.0.", "model.model.encoder.downsample_convs.*.")]
D_FINE = Publisher(
    "Peterande/D-FINE",
    _d_fine,
    ("decoder.pre_bbox_head.layers.0.weight", "decoder.enc_output.proj.weight", "backbone.stem.stem1.conv.weight"),
    [
        *hgnet_names(BODY),
        *pairs(CSP, below=CSP_PLACES),
        *pairs("cv1 conv1, cv2 conv2", below=DOWNSAMPLE),
        *_transformer("mlp.layers.0", "mlp.layers.1"),
    ],
    left_out=r"^decoder\.(anchors|valid_mask|decoder\.up|decoder\.reg_scale|decoder\.project)$|^encoder\.feature_projector\.",
    copies=COPIES,
)
