"""Names of classes, and of a ResNet by its tensors."""

import json

import pytest
import torch
import torchvision
from places import ASSETS
from torchvision.models import detection

from toolkit.models.weights.names import COCO_80, VG_150, coco_by_id, resnet_name


def test_the_class_names_are_those_of_torchvision_and_of_visual_genome():
    names = detection.FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"][1:]
    ours = coco_by_id(1)
    assert len(ours) == len(set(ours)) == 90
    assert {theirs for mine, theirs in zip(ours, names, strict=True) if mine != theirs} == {"N/A"}
    assert len(COCO_80) == len(set(COCO_80)) == 80
    document = json.loads((ASSETS / "vg150_stats" / "vocab.json").read_text())
    assert [entry["name"] for entry in document["objects"]] == VG_150


RESNETS = [
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
]


@pytest.mark.parametrize("name", RESNETS)
def test_a_resnet_is_known_by_its_tensors(name):
    with torch.device("meta"):
        state = getattr(torchvision.models, name)().state_dict()
    assert resnet_name(state, "") == name
