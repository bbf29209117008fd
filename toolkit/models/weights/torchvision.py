"""torchvision's detectors, whose state dicts are ours name by name: `fasterrcnn_resnet50_fpn_coco-*.pth`, `_v2`,
`ssd300_vgg16_coco-*.pth`, `ssdlite320_mobilenet_v3_large_coco-*.pth`."""

from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights.class_names import named
from toolkit.models.weights.names import Description

CLASSES = "head.classification_head.module_list"


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Whether these are names of one of the four detectors."""
    return _architecture(state) is not None


def _architecture(state: Mapping[str, Tensor]) -> str | None:
    if "roi_heads.box_predictor.cls_score.weight" in state and "backbone.body.layer4.2.conv3.weight" in state:
        if "roi_heads.box_head.fc6.weight" in state:
            return "fasterrcnn_resnet50_fpn"
        return "fasterrcnn_resnet50_fpn_v2" if "roi_heads.box_head.0.0.weight" in state else None
    if "backbone.scale_weight" in state and f"{CLASSES}.0.weight" in state:
        return "ssd300_vgg16"
    return "ssdlite320_mobilenet_v3_large" if f"{CLASSES}.0.1.weight" in state else None


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """The detector that these tensors are of.

    A batch norm's epsilon is not among the tensors: torchvision's published `fasterrcnn_resnet50_fpn` has 0.
    """
    architecture = _architecture(state)
    if architecture.startswith("fasterrcnn"):
        rows = len(state["roi_heads.box_predictor.cls_score.weight"])
    elif architecture == "ssd300_vgg16":
        rows = len(state[f"{CLASSES}.0.weight"]) // 4
    else:
        rows = len(state[f"{CLASSES}.0.1.weight"]) // 6
    options, notes = {}, []
    if architecture == "fasterrcnn_resnet50_fpn":
        options["norm_eps"] = 0.0
        notes = ["its batch norms have epsilon 0, as torchvision's published weights: --model.norm_eps 1.0e-5 for "
                 "weights that were trained from ImageNet's"]  # fmt: skip
    return Description(architecture, options, named(rows - 1), notes)


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors; batch norms of this detector are constants and count no batches."""
    frozen = _architecture(state) == "fasterrcnn_resnet50_fpn"
    return {_new_name(n): t for n, t in state.items() if not (frozen and n.endswith("num_batches_tracked"))}



def _new_name(name: str) -> str:
    """Today's name: until 0.13 convolutions of pyramid and proposals stood alone, without a list around them."""
    stem, _, leaf = name.rpartition(".")
    if stem == "rpn.head.conv" or stem.startswith(("backbone.fpn.inner_blocks.", "backbone.fpn.layer_blocks.")):
        last = stem.rpartition(".")[2]
        if stem == "rpn.head.conv":
            return f"{stem}.0.0.{leaf}"
        if stem.count(".") == 3 and last.isdigit():
            return f"{stem}.0.{leaf}"
    return name
