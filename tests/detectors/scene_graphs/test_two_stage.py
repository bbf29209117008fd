"""Scene graphs on a Faster R-CNN: losses and gradients of every head and mode, what is frozen, and weights below."""

import copy

import pytest
import torch
import yaml
from contract import assert_losses_are_divided_as_announced, assert_resolved_options_build_it_again
from scene_graph_data import INNER, WITHOUT_VALUE, criterion_of, losses_of, model_of

from toolkit.base.errors import BadInput
from toolkit.base.seeding import seed_images
from toolkit.detectors.scene_graphs.graph_detector import GraphDetector
from toolkit.detectors.scene_graphs.heads import RELATION_HEADS
from toolkit.models import build_detector
from toolkit.tools.shapes import ATTRIBUTES

OF_GIVEN_BOXES = [("predcls", head) for head in RELATION_HEADS]
DETECTED = [
    ("sgcls", "vctree"),
    ("sgcls", "vtranse"),
    ("sgdet", "vctree"),
    ("sgdet", "causal"),
]


@pytest.mark.parametrize(("mode", "head"), OF_GIVEN_BOXES + DETECTED)
def test_losses_are_divided_as_announced_and_reach_all_that_trains(table, batch, mode, head):
    model = model_of(table, mode, head, attributes=ATTRIBUTES).train()
    outputs = model(batch.images, batch.sizes, batch.targets)
    assert_losses_are_divided_as_announced(model, outputs, batch.targets)
    losses, metrics = criterion_of(model, outputs, batch.targets)
    assert metrics.keys() == set(model.metric_names)
    assert ("loss_objectness" in losses) == (mode != "predcls"), "the detector's own"
    total = sum(losses.values())
    assert total.isfinite()
    total.backward()
    reached = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    if head == "frequency":
        assert "head" in reached
        return
    of_union = {"union"} if model.reads_union else set()
    assert reached == {"detector", "box_features", "head", "attribute_predictor"} | of_union
    unreached = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert mode == "sgdet" or not unreached


@pytest.mark.parametrize(("mode", "head"), OF_GIVEN_BOXES + DETECTED)
def test_micro_batches_make_the_gradient_of_the_big_batch(table, batch, mode, head):
    """Of drawn pairs and labels, with images of few and of many pairs, where no batch norm learns. In sgdet so many
    detections that the objects are among them."""
    model = model_of(
        table,
        mode,
        head,
        head_options={} if head in ("frequency", "imp", "vtranse") else {"dropout": 0.0},
        freeze="norms",
        pairs_per_image=9,
        detections_per_image=40,
        attributes=ATTRIBUTES,
        detector_options=INNER | {"score_threshold": 0.0},
    ).train()
    seed_images(batch.targets, 0, 0)
    counts = model.denominators(batch.targets)
    gradients = []
    for parts in ([slice(0, 6)], [slice(3, 6), slice(0, 3)]):
        model.zero_grad()
        for number, part in enumerate(parts):
            torch.manual_seed(len(parts) + number)
            losses, _ = losses_of(model, batch, part, counts)
            sum(losses.values()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    whole, in_parts = gradients
    assert (in_parts - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("mode", ["predcls", "sgdet"])
@pytest.mark.parametrize("freeze", ["norms", "detector", "detector_and_norms"])
def test_what_is_frozen_stays_as_it_is_in_training(table, batch, mode, freeze):
    model = model_of(table, mode, freeze=freeze).train()
    kept = model.detector if freeze == "detector" else model
    before = copy.deepcopy(kept.state_dict())
    losses, _ = losses_of(model, batch)
    sum(losses.values()).backward()
    norms = [m for m in kept.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert norms
    for norm in norms:
        assert not norm.training
        assert not norm.weight.requires_grad
    assert model.head.training
    for name, value in kept.state_dict().items():
        assert torch.equal(before[name], value)
    trained = any(p.grad is not None for p in model.detector.parameters())
    assert trained == (freeze == "norms")
    assert model.joint == ("loss_objectness" in losses) == (trained and mode == "sgdet")


@pytest.mark.parametrize(
    ("mode", "head", "options", "freeze"),
    [
        ("predcls", "imp", {"freeze": "detector"}, "detector"),
        ("sgcls", "motifs", {"norm_momentum": 0.1, "head_options": {"dropout": 0.1}}, "none"),
        ("sgdet", "frequency", {"detector": "runs/detector"}, "detector"),
    ],
)
def test_resolved_settings_say_what_is_frozen(table, mode, head, options, freeze):
    model = model_of(table, mode, head, attributes=ATTRIBUTES, **options)
    assert_resolved_options_build_it_again(model, table.class_names, WITHOUT_VALUE)
    resolved = model.resolved_options()
    assert resolved["freeze"] == freeze
    assert resolved["detector_options"]["strides"] == INNER["strides"]


def test_parts_of_imp_learn_slowly(table):
    model = model_of(table, head="imp")
    assert isinstance(model, GraphDetector)
    parameters = [name for name, _ in model.named_parameters()]
    assert model.slow_prefixes
    for prefix in model.slow_prefixes:
        assert any(name.startswith(f"{prefix}.") for name in parameters)
    assert not model_of(table).slow_prefixes


@pytest.mark.parametrize("count", [1, 6], ids=["no objects", "six images"])
def test_outputs_hang_on_nothing_that_no_loss_is_made_of(table, batch, count):
    """DDP waits for the gradient of every parameter that its outputs hang on: other ranks would wait for ever."""
    model = model_of(table, "sgcls", "imp").train()
    targets = batch.targets[:count]
    outputs = model(batch.images[:count], batch.sizes[:count], targets)
    values = [
        *vars(outputs["output"]).values(),
        *vars(outputs["batch"]).values(),
        *outputs["detector"].values(),
    ]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    hang = torch.autograd.grad(
        sum(t.sum() for t in tensors),
        parameters,
        retain_graph=True,
        allow_unused=True,
    )
    losses, _ = criterion_of(model, outputs, targets)
    learn = torch.autograd.grad(sum(losses.values()), parameters, allow_unused=True)
    assert [h is None for h in hang] == [g is None for g in learn]


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("motifs", {}),
        ("transformer", {}),
        ("causal", {"nms_threshold": 0.9}),
    ],
)
def test_labels_of_head_and_graph_are_of_one_threshold(table, head, options):
    model = model_of(table, "sgdet", head, nms_threshold=0.3, head_options=options)
    used = {module.nms_threshold for module in model.head.modules() if hasattr(module, "nms_threshold")}
    assert used == {options.get("nms_threshold", 0.3)}


def detector_of(table, **options):
    return build_detector("faster_rcnn", class_names=table.class_names, backbone="test_resnet", **INNER | options)


def test_weights_of_a_detector_go_where_they_belong(table):
    model = model_of(table, "sgdet", freeze="detector")
    inner = detector_of(table)
    found = model.load_detector_weights(inner.state_dict())
    for taken in (model.detector.box_head, model.box_features, model.union.head):
        assert torch.equal(taken.fc6.weight, inner.roi_heads.box_head.fc6.weight)
    lines = found.table()
    assert "mapped  union.head.fc6.weight <- detector.roi_heads.box_head.fc6.weight\n" in lines
    assert "new     union.rectangles" in lines
    assert "new     head." in lines
    assert not found.unused
    with pytest.raises(BadInput, match="box_features.fc6.weight"):
        model.load_detector_weights(detector_of(table, representation_size=32).state_dict())


def test_masks_of_a_detector_are_left_out(table):
    model = model_of(table, "sgdet", freeze="detector")
    unused = model.load_detector_weights(detector_of(table, masks=True).state_dict()).unused
    assert unused
    for name in unused:
        assert ".mask_" in name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{pairs_per_relation: 0, match_iou: 50.0}", r"(?s)pairs_per_relation is 0.*match_iou is 50"),
        ("detector_options: {stride: [8]}", "model.detector_options: .*did you mean model.strides"),
        (
            "detector_options: {architecture: ssd, strides: [8, 32], channels: [8, 8], aspect_ratios: [[2], [2]]}",
            "model.detector_options: ssd has feature maps of strides .8, 32.",
        ),
        ("detector_options: {masks: true}", "model.detector_options: masks: scene graphs do not use masks"),
        ("head_options: {context: vctree}", "head_options"),
        ("separate_spatial: true", "separate_spatial is for the head causal"),
        ("class_balanced_beta: 1.0", "class_balanced_beta is 1.0"),
        ("class_balanced_beta: -0.1", "class_balanced_beta is -0.1"),
        ("{class_balanced_beta: 0.9, rare_predicate_power: 0.5}", "0 where model.rare_predicate_power is set"),
    ],
)
def test_wrong_settings_are_named(table, options, words):
    with pytest.raises(BadInput, match=words):
        model_of(table, **yaml.safe_load(options))


def test_all_wrong_choices_are_named_at_once(table, batch):
    with pytest.raises(BadInput) as caught:
        build_detector("scene_graph", class_names=["a"], mode="sgdett", head="motif", freeze="all")
    for word in ("sgdett", "'motif'", "'all'", "predicates"):
        assert word in str(caught.value)
    model = model_of(table, rare_predicate_power=0.5)
    with pytest.raises(BadInput, match="--model.mode sgdet"):
        model(batch.images, batch.sizes)
