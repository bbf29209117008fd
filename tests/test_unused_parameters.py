"""Which trained parameters may have no part in the losses of a step: where there are none, processes look for none.

python -m pytest tests/test_unused_parameters.py
"""

from pathlib import Path

import pytest
import torch
import yaml
from test_detr import CLASSES, batch_of
from test_detr_family import SMALL as FAMILY
from torch import nn

from toolkit.models import build_detector
from toolkit.step.losses import window_denominators

CONFIGS = Path(__file__).parent / "scripts" / "configs"
TRANSFORMER = {"backbone": "test_resnet", "freeze": "none", "d_model": 32, "heads": 2, "decoder_layers": 2,
               "ffn_dim": 32, "num_queries": 6}  # fmt: skip


def settings_of(script: str) -> dict:
    return yaml.safe_load((CONFIGS / f"train_{script}.yaml").read_text())["model"]


SMALL = {name: {"architecture": name.rstrip("+"), **options} for name, options in FAMILY.items()} | {
    "rt_detr_v2": {"architecture": "rt_detr_v2", **TRANSFORMER},
    "without denoising": {"architecture": "rt_detr_v2", **TRANSFORMER, "num_denoising": 0},
    "d_fine": {"architecture": "d_fine", **TRANSFORMER},
    "deimv2": {"architecture": "deimv2", **TRANSFORMER},
    "yolov3": {"architecture": "yolov3", **settings_of("yolov3")},
    "ssd": {"architecture": "ssd", **settings_of("ssd")},
    "faster_rcnn": {"architecture": "faster_rcnn", **settings_of("faster_rcnn")},
    "ssd, last stages": {"architecture": "ssd", **settings_of("ssd"), "strides": [16, 32]},
    "faster_rcnn, last stages": {"architecture": "faster_rcnn", **settings_of("faster_rcnn"), "strides": [16, 32]},
}
WITHOUT_BOXES = {"rt_detr_v2", "d_fine", "deimv2"}  # no denoising queries are made of none, nor their embedding trained
STAGES_LEFT = {"ssd", "faster_rcnn"}  # of the backbone, behind the maps that are looked at


def unused(detector: nn.Module, counts: list[int]) -> list[str]:
    """Trained parameters without a gradient after a batch of images with so many boxes."""
    batch = batch_of(counts, hw=(64, 64))
    [denominators] = window_denominators([detector.denominators(batch.targets)], "cpu")
    outputs = detector(batch.images, batch.sizes, batch.targets)
    losses, _ = detector.criterion(outputs, batch.targets, denominators)
    detector.zero_grad()
    sum(losses.values()).backward()
    return [name for name, p in detector.named_parameters() if p.requires_grad and p.grad is None]


@pytest.mark.parametrize("name", SMALL)
def test_a_detector_announces_whether_it_leaves_trained_parameters_unused(name):
    torch.manual_seed(0)
    detector = build_detector(class_names=CLASSES, **{**SMALL[name], "pretrained_backbone": False}).train()
    found = [bool(unused(detector, counts)) for counts in ([2, 1], [0, 3], [0, 0])]
    assert found == [name in STAGES_LEFT] * 2 + [name in STAGES_LEFT | WITHOUT_BOXES]
    assert detector.leaves_unused == any(found)
