"""Faster R-CNNs of maskrcnn-benchmark and Scene-Graph-Benchmark (`pretrained_faster_rcnn/model_final.pth`), with a
feature pyramid on a ResNet or ResNeXt, as `faster_rcnn` with the settings that give the original's boxes.

The originals take BGR pixels from 0 to 255: the first convolution's channels are reversed, and mean and deviation do
the rest. Batch norms have epsilon 0; boxes end at the last pixel instead of behind it (`whole_pixels`); anchors are
read from the file. Attribute and relation heads are left out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.models.weights.names import Description, Publisher, named, pairs, resnet_name

STEM = "backbone.body.stem.conv1.weight"
LEVELS = [(f"backbone.fpn.fpn_inner{i + 1}", f"backbone.fpn.inner_blocks.{i}.0") for i in range(4)]
LEVELS += [(f"backbone.fpn.fpn_layer{i + 1}", f"backbone.fpn.layer_blocks.{i}.0") for i in range(4)]
OTHERS = """
    backbone.body.stem backbone.body, rpn.head.conv rpn.head.conv.0.0
    roi_heads.box.feature_extractor roi_heads.box_head, roi_heads.box.predictor roi_heads.box_predictor
"""
CLASSIFIER = "roi_heads.box.predictor.cls_score.weight"
PIXEL_MEAN = (122.7717, 115.9465, 102.9801)  # red, green, blue
LEFT_OUT = r"^roi_heads\.(relation|attribute|mask|keypoint)\.|^rpn\.anchor_generator\.|num_batches_tracked$"


def _described(state: Mapping[str, Tensor], file: str) -> Description:
    name = resnet_name(state, "backbone.body.")
    needed = ("backbone.fpn.fpn_inner1.weight", "roi_heads.box.feature_extractor.fc6.weight")
    if name is None or not all(key in state for key in needed):
        raise BadInput(
            f"model.pretrained {file}: a detector of maskrcnn-benchmark without feature pyramid, or not on a ResNet; "
            "faster_rcnn takes R-50-FPN, R-101-FPN, X-101-32x8d-FPN and the like"
        )
    stride_in_1x1 = not name.startswith("resnext")
    cells = [state[key] for key in sorted(k for k in state if k.startswith("rpn.anchor_generator.cell_anchors."))]
    after = torch.tensor([0.0, 0.0, 1.0, 1.0])
    options = {
        "backbone": name,
        "stride_in_1x1": stride_in_1x1,
        "norm_eps": 0.0,
        "whole_pixels": True,
        **({"cell_anchors": [(cell + after).tolist() for cell in cells]} if cells else {}),
        "anchor_sizes": [[2.0 ** (5 + i)] for i in range(5)],
        "fpn_channels": len(state["backbone.fpn.fpn_inner1.weight"]),
        "representation_size": len(state["roi_heads.box.feature_extractor.fc6.weight"]),
        "mean": [value / 255 for value in PIXEL_MEAN],
        "std": [1 / 255] * 3,
    }
    note = (
        f"the first stage's stride is in {'1 x 1' if stride_in_1x1 else '3 x 3'} convolutions, as published for this "
        "backbone: --model.stride_in_1x1 says otherwise"
    )
    return Description("faster_rcnn", options, named(len(state[CLASSIFIER]) - 1), [note])


class _ForBGR(Publisher):
    def ours_from(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the publisher's tensors under our names, the first convolution for RGB."""
        return super().ours_from(state) | {"backbone.body.conv1.weight": state[STEM].flip(1)}


MASKRCNN_BENCHMARK = _ForBGR(_described, (STEM, CLASSIFIER), [*LEVELS, *pairs(OTHERS)], LEFT_OUT)
