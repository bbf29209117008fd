"""Weights of torchvision's SSD and SSDLite, whose tensors have the same names here.

The files are `ssd300_vgg16_coco-*.pth` and `ssdlite320_mobilenet_v3_large_coco-*.pth`.
"""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from toolkit.models.weights.names import Description, Publisher, class_names_for, required

HEAD = "head.classification_head.module_list.0"  # of the first map
ALL = "^$"  # no tensor is left out


def _described(
    architecture: str, classifier: str, anchors: int, state: Mapping[str, Tensor], file: str
) -> list[Description]:
    """Describe the detector whose tensor `classifier` has a row for each anchor and each class or background."""
    classes = len(required(state, classifier, 4)) // anchors - 1
    return [Description(architecture, {}, class_names_for(classes))]


SSD300 = Publisher(
    "torchvision",
    partial(_described, "ssd300_vgg16", f"{HEAD}.weight", 4),
    ("backbone.scale_weight", f"{HEAD}.weight"),
    left_out=ALL,
)
SSDLITE320 = Publisher(
    "torchvision",
    partial(_described, "ssdlite320_mobilenet_v3_large", f"{HEAD}.1.weight", 6),
    (f"{HEAD}.1.weight",),
    left_out=ALL,
)
