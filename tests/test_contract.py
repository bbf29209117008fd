"""What every detector keeps: losses that reach its parameters, their denominators, micro-batches, refused options."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

import pytest
import torch
import yaml
from contract import assert_losses_are_divided_as_announced
from fcos_detector import FCOS
from small_detectors import FINE, REAL_TIME, SMALL, TINY_RF_DETR, batch_of, build, gradient_of, hub_config, run, wake
from torch import nn

from toolkit.base import imports
from toolkit.base.errors import BadInput
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.models import DetectorOptions, build_detector, options_class
from toolkit.step.guard import boxes_finite, with_finite_boxes
from toolkit.step.losses import LossWeights, window_denominators

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


def built(name: str, **options):
    options = MODELS[name] | {"pretrained_backbone": False} | options
    return build(options.pop("architecture"), **options).train()


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
    detector = built(name)
    batches = [([2, 1], 0), ([0, 3], 1), ([0, 0], 0), ([2, 1], 2)]
    missing = [unused(detector, counts, crowd) for counts, crowd in batches]
    if name in REAL_TIME:  # without boxes there are no denoising queries, and their embedding is not trained
        embedding = ["model.model.denoising_class_embed.weight"]
        assert missing == [[], [], embedding, embedding]
    else:
        assert [bool(names) for names in missing] == [name in STAGES_LEFT] * 4
    assert detector.leaves_unused == any(missing)


ALIKE = ("deformable_detr", "deformable_detr+", "without denoising", "ssd, last stages", "faster_rcnn, last stages")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALIKE])
def test_every_loss_is_divided_by_the_denominator_it_names_and_by_no_other(name):
    detector, batch = built(name), batch_of([2, 1, 0], (64, 64))
    detector = wake(detector) if name in SMALL else detector
    outputs = detector(batch.images, batch.sizes, batch.targets)
    assert_losses_are_divided_as_announced(detector, outputs, batch.targets)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALIKE])
def test_a_training_in_bfloat16_is_evaluated_as_its_weights_are_afterwards(name):
    """To the bit, losses included: `evaluate.py` has no autocast. The scripts: tests/scripts/test_precision.py."""
    detector, batches = built(name), [batch_of([2, 1, 0], (64, 64))]
    weights = LossWeights(detector.loss_names, {}, detector.default_weights)
    afterwards = predict_dataset(detector, batches, "cpu", loss_weights=weights)
    # What Accelerate does with a detector that it prepares.
    detector.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(type(detector).forward), detector)
    in_training = predict_dataset(detector, batches, "cpu", loss_weights=weights)
    assert in_training.losses == afterwards.losses and in_training.losses["loss"] > 0
    for image_id, found in afterwards.by_image.items():
        assert all(torch.equal(in_training.by_image[image_id][key], value) for key, value in found.items())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALIKE])
def test_a_box_that_is_not_finite_is_known_before_the_detector_and_does_not_raise_in_it(name):
    """The guard need not trust the losses: of Faster R-CNN they are finite, and YOLOv3 raised."""
    detector = built(name)
    for value in (math.inf, -math.inf, math.nan):
        batch = batch_of([2, 1, 0], (64, 64))
        assert boxes_finite([batch])
        batch.targets[0]["boxes"][0, 2] = value
        assert not boxes_finite([batch]), value
        finite = with_finite_boxes(batch)
        assert boxes_finite([finite]) and not batch.targets[0]["boxes"].isfinite().all(), value
        losses, _ = run(detector, finite)
        sum(losses.values()).backward()


@pytest.mark.parametrize(("name", "options"), [("detr", {"freeze": "norms"}), ("yolov3", {"norm": "group"}),
                                               ("ssd", {"norm": "group"})])  # fmt: skip
def test_accumulated_gradients_equal_those_of_the_big_batch(name, options):
    """4 x 1 = 2 x 2 = 1 x 4 images, without norms over the batch, with the denominators of the window, in float64."""
    detector, batch = built(name, **options).double(), batch_of([2, 0, 7, 1])
    if name == "yolov3":  # images are normalised in float32
        detector.backbone.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    whole = gradient_of(detector, batch, 4)
    for size in (2, 1):
        assert (gradient_of(detector, batch, size) - whole).norm() / whole.norm() < 1e-6


@pytest.mark.parametrize(("name", "options", "words"), [
    ("dab-detr", {"source_config": {"model_type": "detr"}}, ["is a detr, not a dab-detr", "architecture to detr"]),
    ("deformable_detr", {"backbone": "vit_tiny_patch16_224"}, ["stride 8, 16, 32 are needed", "without 8, 32"]),
    ("deformable_detr", {"d_model": 48}, ["multiple of 32"]),
    ("deformable_detr", {"decoder_layers": 1}, ["1 is too few"]),
    ("deformable_detr", {"box_refine": "yes"}, ["none, iterative, two_stage"]),
    ("deformable_detr", {"d_model": 32, "heads": 3}, ["do not fit together"]),
    ("rf_detr", {"source_config": TINY_RF_DETR, "pretrained_backbone": True}, ["width 384 ", ", not 32"]),
    ("rf_detr", {"pretrained_backbone": "no/such.safetensors"}, ["the file no/such.safetensors does not exist"]),
    ("rf_detr", {"freeze": "paper"}, ["no setting model.freeze"]),
    ("lw_detr", {"size": "nano"}, ["model.size: 'nano'", "tiny, small, medium, large, xlarge"]),
    ("dert", {}, ["'dert'", "did you mean 'detr'", "rt_detr_v2"]),
    ("detr", {"backbone": "resnet51"}, ["model.backbone", "'resnet51'", "resnet50"]),
    ("rt_detr_v2", {"backbone": "vit_tiny_patch16_224"}, ["stride", "8, 16", "[16, 16, 16]"]),
    ("detr", {"freeze": "stem", "backbone": "test_resnet"}, ["model.freeze", "'stem'", "paper, norms, none"]),
    ("detr", {"class_names": [], "backbone": "test_resnet"}, ["no classes"]),
    ("detr", {"num_querys": 3}, ["num_querys", "did you mean model.num_queries"]),
    ("rt_detr_v2", {"decoder_layers": 1, "backbone": "test_resnet"}, ["model.decoder_layers: 1 is too few", "use 2"]),
    ("d_fine", {"source_config": hub_config("d_fine"), "backbone": "resnet18d", "freeze": "paper"},
     ["model.backbone", "hgnet_v2", "'paper'"]),
    ("rt_detr_v2", {"source_config": hub_config("rt_detr_v2"), "pretrained_backbone": True},
     ["model.pretrained_backbone", "rt_detr_resnet"]),
    ("deimv2", {"source_config": hub_config("deimv2"), "freeze": "stem"}, ["model.freeze", "'stem'", "paper, norms,"]),
    ("d_fine", {"source_config": hub_config("deimv2")}, ["d_fine", "'deimv2'"]),
    ("ssd", {"strides": [16, 64, -1], "channels": [8] * 3, "aspect_ratios": [[2]] * 3}, ["each twice"]),
    ("ssd", {"strides": [-1, 16]}, ["each twice"]),
    ("ssd", {"strides": [64, 128]}, ["some of these"]),
    ("ssd", {"channels": [8]}, ["2, 1 and 2 entries"]),
    ("ssd", {"aspect_ratios": [[2], [0]]}, ["positive"]),
    ("faster_rcnn", {"freeze": "paper", "norm": "group"}, ["use freeze none"]),
    ("faster_rcnn", {"freeze": "some"}, ["model.freeze"]),
    ("faster_rcnn", {"strides": [8, 32]}, ["double"]),
    ("faster_rcnn", {"anchor_sizes": [[16]]}, ["anchor_sizes"]),
    ("faster_rcnn", {"anchor_sizes": [[16], [32, 64]]}, ["anchor_sizes"]),
    ("faster_rcnn", {"head_norm": "layer"}, ["head_norm"]),
    ("yolov3", {"backbone": "xcit_nano_12_p16_224"}, ["8, 16, 32"]),
    ("yolov3", {"objectness_prior": 0.0}, ["model.objectness_prior: 0.0"]),
    ("yolov3", {"anchors": [[[1, 2]], [[3, 4]]]}, ["anchors"]),
    ("yolov3", {"anchors": [[[1, 0]], [[3, 4]], [[3, 4]]]}, ["anchors"]),
    ("yolov3", {"anchors": [[[1, 5]], [[3, 4], [1, 1]], [[3, 4]]]}, ["anchors"]),
])  # fmt: skip
def test_wrong_options_are_named_with_what_would_have_worked(name, options, words):
    others = settings_of(name) if name in ("ssd", "faster_rcnn", "yolov3") else {}
    with pytest.raises(BadInput) as error:
        build(name, **others | options)
    assert [word for word in words if word not in str(error.value)] == []


class PlainOptions:
    width: int = 32


class NotDecorated(DetectorOptions):
    width: int = 32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PlainOptions, "PlainOptions, is not a subclass of toolkit.models.DetectorOptions"),
        (dataclass(PlainOptions), "PlainOptions, is not a subclass of toolkit.models.DetectorOptions"),
        (NotDecorated, "NotDecorated, is not a dataclass"),
        ({"width": 32}, "is not a subclass of toolkit.models.DetectorOptions"),
        (None, "None, is not a subclass"),
    ],
    ids=["plain class", "dataclass", "without decorator", "dict", "none"],
)
def test_options_of_an_own_detector_have_the_base_class(options, words, monkeypatch):
    monkeypatch.setattr(FCOS, "Options", options)
    imports.trust_class("fcos_detector:FCOS")
    for use in (options_class, lambda name: build_detector(name, class_names=["a"])):
        with pytest.raises(BadInput, match=f"the Options of fcos_detector:FCOS, .*{re.escape(words)}.*DetectorOptions"):
            use("fcos_detector:FCOS")
