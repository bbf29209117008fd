"""Weights of torchvision's SSD and SSDLite, whose tensors have the same names here.

The files are `ssd300_vgg16_coco-*.pth` and `ssdlite320_mobilenet_v3_large_coco-*.pth`.
"""

from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights.names import Description, named, required

program = "torchvision"
HEAD = "head.classification_head.module_list.0"
# By detector: names that only its tensors have; the last one has this many rows for each class and the background.
MARKS = {
    "ssd300_vgg16": (("backbone.scale_weight", f"{HEAD}.weight"), 4),
    "ssdlite320_mobilenet_v3_large": ((f"{HEAD}.1.weight",), 6),
}


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Return whether the names of these tensors are those of one of torchvision's two detectors."""
    return _architecture(state) is not None


def _architecture(state: Mapping[str, Tensor]) -> str | None:
    for name, (marks, _) in MARKS.items():
        if all(mark in state for mark in marks):
            return name
    return None


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """Return the architecture and class names of the detector that these tensors belong to. `file` is not used."""
    architecture = _architecture(state)
    marks, rows = MARKS[architecture]
    classes = len(required(state, marks[-1], 4)) // rows - 1
    return Description(architecture, {}, named(classes))


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of the state dict; torchvision's tensors already have our names."""
    return dict(state)
