"""Weights of torchvision's Faster R-CNN and Mask R-CNN, whose tensors have the same names here.

The files are `fasterrcnn_resnet50_fpn_coco-*.pth`, `fasterrcnn_resnet50_fpn_v2_coco-*.pth`, and the same of `maskrcnn`,
whose detectors are those of `fasterrcnn` with the setting `masks`.
"""

from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights.names import Description, Publisher, class_names_for, pairs, required

CLASSIFIER = "roi_heads.box_predictor.cls_score.weight"  # a row for each class, and one for the background
BODY = "backbone.body.layer4.2.conv3.weight"
MASK_MARK = "roi_heads.mask_predictor.mask_fcn_logits.weight"
# Until 0.13 convolutions of pyramid and proposals stood alone, without a list around them; those of masks had numbers
# from 1.
NAMES_BEFORE_0_13 = pairs("""
    rpn.head.conv.weight rpn.head.conv.0.0.weight, rpn.head.conv.bias rpn.head.conv.0.0.bias
    backbone.fpn.inner_blocks.*.weight backbone.fpn.inner_blocks.*.0.weight
    backbone.fpn.inner_blocks.*.bias backbone.fpn.inner_blocks.*.0.bias
    backbone.fpn.layer_blocks.*.weight backbone.fpn.layer_blocks.*.0.weight
    backbone.fpn.layer_blocks.*.bias backbone.fpn.layer_blocks.*.0.bias
    roi_heads.mask_head.mask_fcn1 roi_heads.mask_head.0.0, roi_heads.mask_head.mask_fcn2 roi_heads.mask_head.1.0
    roi_heads.mask_head.mask_fcn3 roi_heads.mask_head.2.0, roi_heads.mask_head.mask_fcn4 roi_heads.mask_head.3.0
""")


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    """Describe `fasterrcnn_resnet50_fpn`. The epsilon of its batch norms is not among the tensors: the settings get
    `norm_eps` 0, as in torchvision's published detector, and a note says how to change it."""
    note = (
        "its batch norms have epsilon 0, as torchvision's published weights: --model.norm_eps 1.0e-5 for weights that "
        "were trained from ImageNet's"
    )
    options = {**_masks(state), "norm_eps": 0.0}
    return [Description("fasterrcnn_resnet50_fpn", options, _classes(state), [note])]


def _described_v2(state: Mapping[str, Tensor], file: str) -> list[Description]:
    return [Description("fasterrcnn_resnet50_fpn_v2", _masks(state), _classes(state))]


def _masks(state: Mapping[str, Tensor]) -> dict:
    return {"masks": True} if MASK_MARK in state else {}


def _classes(state: Mapping[str, Tensor]) -> list[str]:
    return class_names_for(len(required(state, CLASSIFIER, 2)) - 1)


FASTER_RCNN = Publisher(
    "torchvision",
    _described,
    (BODY, CLASSIFIER, "roi_heads.box_head.fc6.weight"),
    NAMES_BEFORE_0_13,
)
FASTER_RCNN_V2 = Publisher(
    "torchvision",
    _described_v2,
    (BODY, CLASSIFIER, "roi_heads.box_head.0.0.weight"),
    NAMES_BEFORE_0_13,
    left_out="^$",  # its batch norms learn
)
