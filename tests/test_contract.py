"""What every detector keeps: losses that reach its parameters, their denominators, micro-batches, refused options."""

import math
import re
from dataclasses import dataclass
from types import MethodType
from typing import Literal, get_args, get_type_hints

import pytest
import torch
import yaml
from contract import (
    assert_losses_are_divided_as_announced,
    assert_resolved_options_build_it_again,
    trained_without_gradient,
)
from fcos_detector import FCOS
from places import SMALL_CONFIGS
from processes import as_launched, run_on_ranks
from small_detectors import (
    CLASSES,
    FINE,
    REAL_TIME,
    SMALL,
    TINY_LW_DETR,
    TINY_RF_DETR,
    batch_of,
    build,
    gradient_of,
    hub_config,
    run,
    wake,
)
from torch import nn

from toolkit import index
from toolkit.base import imports
from toolkit.base.errors import BadInput
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.models import DetectorOptions, build_detector, options_class
from toolkit.models.final import load_detector_weights
from toolkit.run.processes import prepare
from toolkit.step.guard import boxes_finite, with_finite_boxes
from toolkit.step.losses import LossWeights, window_denominators

CONFIGS = SMALL_CONFIGS


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
    gradients = [p.grad for p in detector.parameters() if p.grad is not None]
    assert total.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
    return trained_without_gradient(detector)


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


NARROW = {"d_model": 32, "heads": 2, "ffn_dim": 32, "num_queries": 4, "decoder_layers": 1}
DEPTHS = [("rf_detr", "base", None), ("rf_detr", "base", 12), ("rf_detr", "base", 2), ("rf_detr", "nano", 5),
          ("rf_detr", "nano", 1), ("lw_detr", "tiny", 5)]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "layers"), DEPTHS)
def test_a_vision_transformer_has_no_layer_behind_its_deepest_map_whatever_its_depth(name, size, layers):
    detector = build(name, **NARROW, size=size, encoder_layers=layers).train()
    side = detector.stride * 2
    losses, _ = run(detector, batch_of([2, 1], (side, side)))
    sum(losses.values()).backward()
    assert trained_without_gradient(detector) == [] and not detector.leaves_unused
    assert len(detector.model.model.backbone.backbone.encoder.layer) == (layers if layers in (1, 2, 5) else 11)


def test_weights_of_rf_detr_from_before_its_maps_were_at_each_quarter_are_refused(tmp_path):
    detector = build("rf_detr", **NARROW, size="nano", encoder_layers=5)
    before = detector.state_dict()
    assert before.pop("map_layers").tolist() == [1, 2, 4, 5]
    with pytest.raises(BadInput, match="run: the weights are not those of .*: 1 missing: map_layers"):
        load_detector_weights(detector, before, tmp_path / "run")
    published = build("rf_detr", **NARROW, size="nano").state_dict()
    assert "map_layers" not in published


@pytest.mark.parametrize(("name", "tiny"), [("rf_detr", TINY_RF_DETR), ("lw_detr", TINY_LW_DETR)])
def test_layers_behind_the_deepest_map_of_a_source_change_no_prediction(name, tiny):
    deeper = tiny["backbone_config"] | {"num_hidden_layers": 4}
    source = tiny | {"backbone_config": deeper}
    detector = wake(build(name, source_config=source)).eval()
    as_given = detector.config_class(**source, num_labels=len(CLASSES))
    theirs = detector.model_class(as_given).eval()
    left = theirs.load_state_dict(detector.model.state_dict(), strict=False)
    assert not left.unexpected_keys and len(detector.model.model.backbone.backbone.encoder.layer) == 2
    assert {re.sub(r".*layer\.(\d).*", r"\1", key) for key in left.missing_keys} == {"2", "3"}
    pixels = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert detector.model(pixels).pred_boxes.equal(theirs(pixels).pred_boxes)
    assert detector.resolved_options()["encoder_layers"] == 2
    assert_resolved_options_build_it_again(detector, CLASSES, ("pretrained", "size"))


def test_ddp_is_told_of_heads_and_stages_without_a_loss():
    dinov3 = hub_config("dinov3")
    del dinov3["backbone_config"]["stage_names"]
    dinov3["backbone_config"]["num_hidden_layers"] = 4
    of_source = {"source_config": dinov3, "num_denoising": 0}
    last_alone = SMALL["deformable_detr"] | {"box_refine": "iterative", "aux_loss": False}
    from_the_end = {"source_config": TINY_RF_DETR | {"backbone_config": {
        **TINY_RF_DETR["backbone_config"], "num_hidden_layers": 4, "out_indices": [-4, -3]}}}  # fmt: skip
    for name, options in (("deimv2", of_source), ("deformable_detr", last_alone), ("rf_detr", from_the_end)):
        detector = build(name, **options).train()
        losses, _ = run(detector, batch_of([2, 1], (64, 64)))
        sum(losses.values()).backward()
        assert trained_without_gradient(detector) and detector.leaves_unused, name


SIDES_PX = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320, "ssdlite": 320, "rf_detr": 224}
QUERIES = {"deimv2": 20, "ecdet": 20, "d_fine": 20, "rt_detr_v2": 20}  # as many as there are positions; others: 8


def published_sizes() -> list[tuple[str, str | None]]:
    """Every detector with each of its sizes; scene graphs have images of their own in their tests."""
    cases = []
    for name in sorted(index.DETECTORS.keys() - {"scene_graph", "egtr"}):
        kind = get_type_hints(options_class(name)).get("size", Literal[None])
        sizes = [size for choice in get_args(kind) for size in get_args(choice) or (choice,) if isinstance(size, str)]
        cases += [(name, size) for size in sizes or [None]]
    return cases


def two_steps(name: str, options: dict, side: int) -> list[list[str]]:
    """Trained parameters of this rank without a gradient after each of two steps on full batches."""
    accelerator = as_launched()
    detector = build(name, **options).train()
    optimizer = torch.optim.SGD(detector.parameters(), lr=1e-6)
    model, optimizer = prepare(accelerator, detector, optimizer, None, detector.fixed_size)
    batch = batch_of([3, 2], (side, side))
    [denominators] = window_denominators([detector.denominators(batch.targets)], "cpu")
    without = []
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(batch.images, batch.sizes, batch.targets)
        losses, _ = detector.criterion(outputs, batch.targets, denominators)
        accelerator.backward(sum(losses.values()))
        without.append(trained_without_gradient(detector))
        optimizer.step()
    return without


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), published_sizes())
def test_every_published_size_trains_on_two_processes_and_each_parameter_gets_a_gradient(name, size):
    options = {} if size is None else {"size": size}
    if "num_queries" in get_type_hints(options_class(name)):
        options["num_queries"] = QUERIES.get(name, 8)
    assert run_on_ranks(two_steps, 2, name, options, SIDES_PX.get(name, 128)) == [[[], []]] * 2


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
