"""Faster R-CNNs from their settings: torchvision's by default, and what is frozen."""

import inspect

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from rcnn_data import CLASSES
from torchvision.models import resnet50
from torchvision.models.detection import faster_rcnn, fasterrcnn_resnet50_fpn

from toolkit.detectors.faster_rcnn.build import torchvision_settings
from toolkit.detectors.faster_rcnn.options import FasterRcnnOptions, ResNet50V2Options, TwoStageOptions
from toolkit.models import build_detector
from toolkit.step.freezing import FrozenBatchNorm2d

TRAINED = {"layer2", "layer3", "layer4", "inner_blocks", "layer_blocks"}


def trained_parts(detector):
    return {name.split(".")[1] for name, p in detector.backbone.named_parameters() if p.requires_grad}


def test_default_settings_are_torchvisions_resnet50_fpn():
    with torch.device("meta"):
        theirs = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
        detector = build_detector("faster_rcnn", class_names=["thing"] * 90)
    parameters = sum(p.numel() for p in detector.parameters())
    frozen = [m for m in detector.modules() if isinstance(m, FrozenBatchNorm2d)]
    parameters += sum(2 * norm.weight.numel() for norm in frozen)
    assert parameters == sum(p.numel() for p in theirs.parameters())
    assert trained_parts(detector) == TRAINED


@pytest.mark.parametrize(("freeze", "more"), [("paper", set()), ("norms", {"conv1", "layer1"})])
def test_torchvisions_own_freezes_what_it_says(freeze, more):
    with torch.device("meta"):
        detector = build_detector("fasterrcnn_resnet50_fpn", class_names=["a"], freeze=freeze)
    assert trained_parts(detector) == TRAINED | more


def test_version_two_freezes_where_it_starts_from_a_file_of_weights(tmp_path):
    torch.save(resnet50().state_dict(), tmp_path / "weights.pth")
    options = {"pretrained_backbone": str(tmp_path / "weights.pth"), "rpn_nms_thresh": 0.6}
    detector = build_detector("fasterrcnn_resnet50_fpn_v2", class_names=CLASSES, **options)
    assert detector.resolved_options()["freeze"] == "paper"
    assert not detector.resolved_options()["pretrained_backbone"]
    assert_resolved_options_build_it_again(detector, CLASSES)


@pytest.mark.parametrize("cls", [TwoStageOptions, FasterRcnnOptions, ResNet50V2Options])
def test_the_two_stages_have_all_settings_of_torchvision_with_its_values(cls):
    theirs = {}
    for name, parameter in inspect.signature(faster_rcnn.FasterRCNN).parameters.items():
        if name.startswith(("rpn_", "box_")) and parameter.default is not None:
            theirs[name] = parameter.default
    assert torchvision_settings(cls()) == theirs | {"bbox_reg_weights": [10.0, 10.0, 5.0, 5.0]}
