"""Weights of torchvision's Faster R-CNN, whose tensors have the same names here.

The files are `fasterrcnn_resnet50_fpn_coco-*.pth` and `fasterrcnn_resnet50_fpn_v2_coco-*.pth`.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights.names import Description, named

CLASSIFIER = "roi_heads.box_predictor.cls_score.weight"  # a row for each class, and one for the background
BODY = "backbone.body.layer4.2.conv3.weight"
# By detector: a name that only its tensors have.
MARKS = {
    "fasterrcnn_resnet50_fpn": "roi_heads.box_head.fc6.weight",
    "fasterrcnn_resnet50_fpn_v2": "roi_heads.box_head.0.0.weight",
}
# Until 0.13 convolutions of pyramid and proposals stood alone, without a list around them.
WITH_LISTS = {
    r"^rpn\.head\.conv(?=\.[^.]+$)": r"rpn.head.conv.0.0",
    r"^(backbone\.fpn\.(inner|layer)_blocks\.\d+)(?=\.[^.]+$)": r"\1.0",
}


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Return whether the names of these tensors are those of one of torchvision's two detectors."""
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
    description = Description(architecture, {}, named(len(state[CLASSIFIER]) - 1))
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
    return state
