"""Weights of the Faster R-CNNs of maskrcnn-benchmark and Scene-Graph-Benchmark
(`pretrained_faster_rcnn/model_final.pth`) with a feature pyramid on a ResNet or ResNeXt. They become a `faster_rcnn`
with the settings that give the original's boxes.

The originals take BGR pixels from 0 to 255: the first convolution's channels are reversed, and mean and deviation do
the rest. Batch norms have epsilon 0; boxes end at the last pixel instead of behind it (`whole_pixels`); anchors are
read from the file. Attribute and relation heads are left out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.models.weights.names import (
    Description,
    IncompleteWeights,
    Publisher,
    class_names_for,
    pairs,
    required,
    resnet_name,
)

STEM = "backbone.body.stem.conv1.weight"  # of the first convolution
# The pyramid has four levels, which the originals count from 1: a 1 x 1 convolution of the backbone's map and a 3 x 3
# convolution of the sum, each.
LEVELS = [(f"backbone.fpn.fpn_inner{i + 1}", f"backbone.fpn.inner_blocks.{i}.0") for i in range(4)]
LEVELS += [(f"backbone.fpn.fpn_layer{i + 1}", f"backbone.fpn.layer_blocks.{i}.0") for i in range(4)]
# Their names and ours, as `pairs` reads them.
OTHERS = """
    backbone.body.stem backbone.body, rpn.head.conv rpn.head.conv.0.0
    roi_heads.box.feature_extractor roi_heads.box_head, roi_heads.box.predictor roi_heads.box_predictor
"""
CLASSIFIER = "roi_heads.box.predictor.cls_score.weight"
PIXEL_MEAN = (122.7717, 115.9465, 102.9801)  # red, green, blue, from 0 to 255
# What faster_rcnn has no counterpart for: other heads, the anchors, which become an option, and counters.
LEFT_OUT = r"^roi_heads\.(relation|attribute|mask|keypoint)\.|^rpn\.anchor_generator\.|num_batches_tracked$"


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    name = resnet_name(state, "backbone.body.")
    needed = ("backbone.fpn.fpn_inner1.weight", "roi_heads.box.feature_extractor.fc6.weight")
    if name is None or not all(key in state for key in needed):
        raise BadInput(
            f"model.pretrained {file}: a detector of maskrcnn-benchmark without feature pyramid, or not on a ResNet; "
            "faster_rcnn takes R-50-FPN, R-101-FPN, X-101-32x8d-FPN and the like"
        )
    stride_in_1x1 = not name.startswith("resnext")
    options = {
        "backbone": name,
        "stride_in_1x1": stride_in_1x1,
        "norm_eps": 0.0,
        "whole_pixels": True,
        "anchor_sizes": [[32.0], [64.0], [128.0], [256.0], [512.0]],
        "fpn_channels": len(required(state, "backbone.fpn.fpn_inner1.weight", 4)),
        "representation_size": len(required(state, "roi_heads.box.feature_extractor.fc6.weight", 2)),
        "mean": [value / 255 for value in PIXEL_MEAN],
        "std": [1 / 255] * 3,
    }
    cell_anchors = _cell_anchors(state)
    if cell_anchors:
        options["cell_anchors"] = cell_anchors
    kernel = "1 x 1" if stride_in_1x1 else "3 x 3"
    note = (
        f"the first stage's stride is in {kernel} convolutions, as published for this backbone: "
        "--model.stride_in_1x1 says otherwise"
    )
    class_names = class_names_for(len(required(state, CLASSIFIER, 2)) - 1)  # row 0 is the background
    return [Description("faster_rcnn", options, class_names, [note])]


def _cell_anchors(state: Mapping[str, Tensor]) -> list[list[list[float]]]:
    """Return the anchors xyxy around the first position of each level; empty if the file has none.

    Theirs end at the last pixel, ours behind it: (-22, -10, 25, 13) becomes (-22, -10, 26, 14).
    """
    names = sorted(name for name in state if name.startswith("rpn.anchor_generator.cell_anchors."))
    behind = torch.tensor([0.0, 0.0, 1.0, 1.0])
    anchors = [required(state, name, 2) for name in names]
    for name, of_level in zip(names, anchors, strict=True):
        if of_level.shape[1] != 4:
            raise IncompleteWeights(f"has {name} of shape {list(of_level.shape)}; expected rows of 4 numbers")
    return [(of_level + behind).tolist() for of_level in anchors]


def _for_rgb(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a first convolution for RGB instead of BGR."""
    return {**state, STEM: required(state, STEM, 4).flip(1)}


MASKRCNN_BENCHMARK = Publisher(
    "maskrcnn-benchmark",
    _described,
    (STEM, CLASSIFIER),
    [*LEVELS, *pairs(OTHERS)],
    prepared=_for_rgb,
    left_out=LEFT_OUT,
)
