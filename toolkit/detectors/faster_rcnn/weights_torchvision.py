"""Weights of torchvision's Faster R-CNN and Mask R-CNN, whose tensors have the same names here.

The files are `fasterrcnn_resnet50_fpn_coco-*.pth`, `fasterrcnn_resnet50_fpn_v2_coco-*.pth`, and the same of `maskrcnn`,
whose detectors are those of `fasterrcnn` with the setting `masks`.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights.names import Description, named, required

program = "torchvision"
CLASSIFIER = "roi_heads.box_predictor.cls_score.weight"  # a row for each class, and one for the background
BODY = "backbone.body.layer4.2.conv3.weight"
# By detector: a name that only its tensors have.
MARKS = {
    "fasterrcnn_resnet50_fpn": "roi_heads.box_head.fc6.weight",
    "fasterrcnn_resnet50_fpn_v2": "roi_heads.box_head.0.0.weight",
}
MASK_MARK = "roi_heads.mask_predictor.mask_fcn_logits.weight"
# Until 0.13 convolutions of pyramid and proposals stood alone, without a list around them; those of masks had numbers
# from 1.
WITH_LISTS = {
    r"^rpn\.head\.conv(?=\.[^.]+$)": r"rpn.head.conv.0.0",
    r"^(backbone\.fpn\.(inner|layer)_blocks\.\d+)(?=\.[^.]+$)": r"\1.0",
}
OF_MASKS = re.compile(r"^roi_heads\.mask_head\.mask_fcn(\d+)(?=\.[^.]+$)")


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Return whether the names of these tensors are those of one of torchvision's detectors."""
    return _architecture(state) is not None


def _architecture(state: Mapping[str, Tensor]) -> str | None:
    if BODY not in state or CLASSIFIER not in state:
        return None
    for name, mark in MARKS.items():
        if mark in state:
            return name
    return None


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """Return the architecture, settings and class names of the detector that these tensors belong to. `file` is not
    used.

    The epsilon of batch norms is not among the tensors. For `fasterrcnn_resnet50_fpn` the settings get `norm_eps` 0, as
    in torchvision's published detector, and a note says how to change it.
    """
    architecture = _architecture(state)
    options = {"masks": True} if MASK_MARK in state else {}
    description = Description(architecture, options, named(len(required(state, CLASSIFIER, 2)) - 1))
    if architecture == "fasterrcnn_resnet50_fpn":
        description.options["norm_eps"] = 0.0
        description.notes.append(
            "its batch norms have epsilon 0, as torchvision's published weights: --model.norm_eps 1.0e-5 for weights "
            "that were trained from ImageNet's"
        )
    return description


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names of today's torchvision; files from before 0.13 have others.

    `num_batches_tracked` of `fasterrcnn_resnet50_fpn` is left out, because its batch norms are constants.
    """
    if _architecture(state) == "fasterrcnn_resnet50_fpn":
        state = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    for pattern, today in WITH_LISTS.items():
        state = {re.sub(pattern, today, name): tensor for name, tensor in state.items()}
    return {OF_MASKS.sub(_numbered_from_0, name): tensor for name, tensor in state.items()}


def _numbered_from_0(name: re.Match) -> str:
    return f"roi_heads.mask_head.{int(name[1]) - 1}.0"
