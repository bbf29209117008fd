"""Which trained parameters may have no part in the losses of a step: where there are none, processes look for none."""

from pathlib import Path

import pytest
import yaml
from small_detectors import FINE, HYBRIDS, SMALL, batch_of, build, run
from torch import nn

from toolkit.step.losses import window_denominators

CONFIGS = Path(__file__).parent / "scripts" / "configs"


def settings_of(script: str) -> dict:
    return yaml.safe_load((CONFIGS / f"train_{script}.yaml").read_text())["model"]


MODELS = {name: {"architecture": name.rstrip("+"), **options} for name, options in SMALL.items()} | {
    "without denoising": {"architecture": "rt_detr_v2", **FINE, "num_denoising": 0},
    "yolov3": {"architecture": "yolov3", **settings_of("yolov3")},
    "ssd": {"architecture": "ssd", **settings_of("ssd")},
    "faster_rcnn": {"architecture": "faster_rcnn", **settings_of("faster_rcnn")},
    "ssd, last stages": {"architecture": "ssd", **settings_of("ssd"), "strides": [16, 32]},
    "faster_rcnn, last stages": {"architecture": "faster_rcnn", **settings_of("faster_rcnn"), "strides": [16, 32]},
}
STAGES_LEFT = {"ssd", "faster_rcnn"}  # of the backbone, behind the maps that are looked at


def unused(detector: nn.Module, counts: list[int], crowd: int) -> list[str]:
    """Trained parameters without a gradient after a batch of images with so many boxes; all losses are announced."""
    batch = batch_of(counts, (64, 64), crowd)
    [denominators] = window_denominators([detector.denominators(batch.targets)], "cpu")
    losses, metrics = run(detector, batch, denominators)
    missing = set(detector.loss_names) - set(losses)
    assert not missing or max(counts) <= crowd and all("_dn_" in name for name in missing)
    assert set(losses) <= set(detector.loss_names) and set(metrics) == set(detector.metric_names)
    if max(counts) <= crowd:  # no object: nothing to be learned of boxes
        boxes = ("loss_bbox", "loss_giou", "loss_box_reg", "loss_loc", "loss_scale", "loss_center")
        assert not any(value for name, value in losses.items() if name.startswith(boxes))
    detector.zero_grad()
    total = sum(losses.values())
    total.backward()
    gradients = {name: p.grad for name, p in detector.named_parameters() if p.requires_grad}
    assert total.isfinite() and all(g.isfinite().all() for g in gradients.values() if g is not None)
    return [name for name, gradient in gradients.items() if gradient is None]


@pytest.mark.parametrize("name", MODELS)
def test_a_detector_announces_whether_it_leaves_trained_parameters_unused(name):
    options = {**MODELS[name], "pretrained_backbone": False}
    detector = build(options.pop("architecture"), **options).train()
    batches = [([2, 1], 0), ([0, 3], 1), ([0, 0], 0), ([2, 1], 2)]
    missing = [unused(detector, counts, crowd) for counts, crowd in batches]
    if name in HYBRIDS:  # without boxes there are no denoising queries, and their embedding is not trained
        embedding = ["model.model.denoising_class_embed.weight"]
        assert missing == [[], [], embedding, embedding]
    else:
        assert [bool(names) for names in missing] == [name in STAGES_LEFT] * 4
    assert detector.leaves_unused == any(missing)
