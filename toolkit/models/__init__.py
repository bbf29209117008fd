"""Detectors. `build_detector` is the one place that training, evaluation and prediction make a model in."""

import difflib
import importlib
import inspect
from collections.abc import Sequence

from torch import nn

from toolkit.errors import BadInput

# Module and class (or function) by name. Imported when needed: transformers takes seconds, which other scripts and
# loader processes need not wait for.
ARCHITECTURES = {
    "detr": ("toolkit.models.detr.detr", "Detr"),
    "conditional_detr": ("toolkit.models.detr.conditional_detr", "ConditionalDetr"),
    "deformable_detr": ("toolkit.models.detr.deformable_detr", "DeformableDetr"),
    "dab-detr": ("toolkit.models.detr.dab_detr", "DabDetr"),
    "rf_detr": ("toolkit.models.detr.rf_detr", "RfDetr"),
    "yolos": ("toolkit.models.detr.yolos", "Yolos"),
    "rt_detr_v2": ("toolkit.models.detr.rt_detr", "RTDetrV2"),
    "d_fine": ("toolkit.models.detr.d_fine", "DFine"),
    "deimv2": ("toolkit.models.detr.d_fine", "Deimv2"),
    "faster_rcnn": ("toolkit.models.faster_rcnn.build", "build_faster_rcnn"),
    "fasterrcnn_resnet50_fpn_v2": ("toolkit.models.faster_rcnn.build", "build_resnet50_fpn_v2"),
    "scene_graph": ("toolkit.models.relation.scene_graph", "SceneGraph"),
    "yolov3": ("toolkit.models.yolov3.model", "build_yolov3"),
    "ssd": ("toolkit.models.ssd.model", "SSD"),
    "ssdlite": ("toolkit.models.ssd.model", "SSDLite"),
}


def build_detector(architecture: str, *, class_names: Sequence[str], **options) -> nn.Module:
    """A detector, with the interface described in docs/design.md; its `options` build the same one again.

    Args:
        architecture: one of `ARCHITECTURES`.
        class_names: one name per class, in the order of the labels.
        options: keyword arguments of that detector's class, all of them plain numbers, strings and lists, so that a
            run's `config.yaml` builds the same model again.

    Raises:
        BadInput: unknown architecture, no classes, an option that it does not have, or that cannot be met (unknown
            backbone, no weights, ...).
    """
    if not class_names:
        raise BadInput("the data names no classes; a detector needs at least one.")
    if architecture not in ARCHITECTURES:
        similar = difflib.get_close_matches(str(architecture), ARCHITECTURES, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise BadInput(f"model.architecture: {architecture!r} is none of {', '.join(ARCHITECTURES)}{hint}")
    module, name = ARCHITECTURES[architecture]
    build = getattr(importlib.import_module(module), name)
    known = list(inspect.signature(build).parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build).parameters.values())
    if not takes_any and (foreign := [option for option in options if option not in known]):
        raise BadInput(f"{architecture} has no setting model.{', model.'.join(foreign)}; it has {', '.join(known)}")
    detector = build(class_names=class_names, **options)
    detector.options = {"architecture": architecture, **options, "pretrained_backbone": False}
    return detector
