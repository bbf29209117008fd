"""What every detector of `toolkit.index.DETECTORS` promises to all that trains, evaluates and saves it."""

import math
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
from places import ASSETS
from processes import as_launched, run_on_ranks
from small_detectors import (
    CATEGORIES,
    CLASSES,
    HYBRIDS,
    MODELS,
    TINY_LW_DETR,
    TINY_RF_DETR,
    batch_of,
    build,
    forward,
    gradient_of,
    hub_config,
    predicted,
    run,
    settings_in,
    small,
    wake,
)
from transformers import ResNetConfig

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.base.seeding import seed_images
from toolkit.detectors.detr.sizes import DEIMV2_SIZES, ECDET_SIZES
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.models import build_detector, options_class
from toolkit.models.weights.pretrained import Pretrained, load_pretrained, open_pretrained
from toolkit.run.help import field_texts
from toolkit.run.processes import prepare
from toolkit.step.freezing import hold_batch_norms
from toolkit.step.guard import boxes_finite, with_finite_boxes
from toolkit.step.losses import LossWeights, window_denominators

GRAPH = settings_in("train_sgg") | {"architecture": "scene_graph", "predicates": ["on", "under"], "head_options": {}}
EGTR = settings_in("egtr") | {"predicates": ["on", "under"]}
GRAPHS = {"scene_graph": GRAPH | {"mode": "predcls"}, "scene_graph, sgdet": GRAPH, "egtr": EGTR}
HEAVY = {
    "fasterrcnn_resnet50_fpn": {"box_batch_size_per_image": 8},
    "fasterrcnn_resnet50_fpn_v2": {"box_batch_size_per_image": 8},
    "ssd300_vgg16": {},
    "ssdlite320_mobilenet_v3_large": {},
}
DETECTORS = MODELS | GRAPHS | {"ssdlite": {"architecture": "ssdlite", **settings_in("train_ssd")}}
LAST_STAGES = {f"{name}, last stages": MODELS[name] | {"strides": [16, 32]} for name in ("ssd", "faster_rcnn")}
STAGES_LEFT = ("ssd", "ssdlite", "faster_rcnn")  # of the backbone, behind the maps that are looked at
VARIANTS = {
    "detr, learned positions": MODELS["detr"] | {"position_embedding": "learned"},
    "detr, norms before and points": MODELS["detr"] | {"pre_norm": True, "query_points": True},
    "deimv2, as its program": MODELS["deimv2"] | {"original": True},
    "d_fine, backbone of transformers": {"architecture": "d_fine", "source_config": hub_config("d_fine")},
}
EVERY = DETECTORS | LAST_STAGES | VARIANTS
EVERY |= {name: {"architecture": name, **options} for name, options in HEAVY.items()}
# Of images in the slow test, and those that such an SSD needs everywhere.
SIDES_PX = {
    "ssd300_vgg16": 300,
    "ssdlite320_mobilenet_v3_large": 320,
    "ssdlite": 320,
    "rf_detr": 224,
}
WITHOUT_VALUE = (
    "backbone",
    "detector",
    "norm_momentum",
    "pretrained",
    "size",
    "word_vectors",
)
OF_BOXES = (
    "loss_bbox",
    "loss_giou",
    "loss_box_reg",
    "loss_loc",
    "loss_scale",
    "loss_center",
)


def cases(names):
    slow = HEAVY.keys() - {"ssdlite320_mobilenet_v3_large"}
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


every_detector = pytest.mark.parametrize("name", cases(EVERY))
# Variants of one class of detectors add nothing to most promises.
ALIKE = (
    "deformable_detr",
    "deformable_detr+",
    "without denoising",
    *VARIANTS,
    *LAST_STAGES,
)
CLASSES_OF_DETECTORS = [name for name in EVERY if name not in (*ALIKE, *HEAVY)]
PLAIN = [name for name in CLASSES_OF_DETECTORS if name not in GRAPHS]
every_class = pytest.mark.parametrize("name", CLASSES_OF_DETECTORS)
every_plain_class = pytest.mark.parametrize("name", PLAIN)


def detector_of(name: str, **options):
    options = EVERY[name] | options
    detector = build(options.pop("architecture"), **options).train()
    return wake(detector) if hasattr(detector, "set_loss") else detector


def batch_for(name: str, counts, crowd: int = 0):
    """Small images with `counts` boxes each, which are a chain of relations."""
    batch = batch_of(counts, (SIDES_PX[name],) * 2 if name.startswith("ssd3") else (64, 128), crowd)
    for target, count in zip(batch.targets, counts, strict=True):
        rows = [(subject, subject + 1, subject % 2) for subject in range(crowd, count - 1)]
        target["relations"] = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    seed_images(batch.targets, 0, 0)
    return batch


def test_every_name_of_the_index_has_a_small_model():
    assert {settings["architecture"] for settings in EVERY.values()} == set(index.DETECTORS)


@pytest.mark.parametrize("name", index.DETECTORS)
def test_help_has_a_sentence_for_every_setting(name):
    kind = options_class(name)
    assert kind().architecture == name
    assert kind.__doc__
    for setting, text in field_texts(kind).items():
        assert text.endswith("."), setting


@every_detector
def test_resolved_settings_build_it_again(name):
    assert_resolved_options_build_it_again(detector_of(name), CLASSES, WITHOUT_VALUE)


@every_detector
@pytest.mark.parametrize(
    ("counts", "crowd"),
    [
        ([2, 1], 0),
        ([0, 3], 1),
        ([0, 0], 0),
        ([2, 1], 2),
    ],
)
def test_losses_are_those_announced_and_reach_what_is_trained(name, counts, crowd):
    """`leaves_unused` tells DDP of parameters that no loss reaches, and whether there are any."""
    detector = detector_of(name)
    batch = batch_for(name, counts, crowd)
    [denominators] = window_denominators([detector.denominators(batch.targets)], "cpu")
    losses, metrics = run(detector, batch, denominators)
    without_objects = max(counts) <= crowd
    missing = set(detector.loss_names) - set(losses)
    assert set(losses) <= set(detector.loss_names)
    assert set(metrics) == set(detector.metric_names)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    if without_objects:
        assert all("_dn_" in loss for loss in missing)
        assert not any(value for loss, value in losses.items() if loss.startswith(OF_BOXES))
    else:
        assert not missing
    total = sum(losses.values())
    total.backward()
    assert total.isfinite()
    assert all(p.grad.isfinite().all() for p in detector.parameters() if p.grad is not None)
    unused = trained_without_gradient(detector)
    if any("_dn_" in loss for loss in missing):  # the embedding of denoising queries is not trained without objects
        (embedding,) = unused
        assert embedding.endswith("model.denoising_class_embed.weight")
    elif name not in GRAPHS:
        assert bool(unused) == (name in STAGES_LEFT)
    assert detector.leaves_unused or not unused


@every_class
def test_every_loss_is_divided_by_its_own_denominator(name):
    detector = detector_of(name)
    batch = batch_for(name, [2, 1, 0])
    outputs = forward(detector, batch)
    assert_losses_are_divided_as_announced(detector, outputs, batch.targets)


# The settings with which nothing is drawn. D-FINE and its successors: tests/detectors/detr/test_d_fine.py
IN_FLOAT64 = {
    "detr": {},
    "conditional_detr": {},
    "deformable_detr+": {},
    "deformable_detr++": {},
    "rf_detr": {},
    "lw_detr": {},
    "rt_detr_v2": {"num_denoising": 0},
    "yolov3": {},
    "ssd": {},
    "ssdlite": {},
}
IN_FLOAT32 = {
    "dab-detr": {},
    "faster_rcnn": {},
    "scene_graph": {},
    "egtr": {"detector_options": EGTR["detector_options"] | {"num_denoising": 0}},
}


@pytest.mark.parametrize("name", IN_FLOAT64 | IN_FLOAT32)
def test_micro_batches_add_up_to_the_gradient_of_the_big_batch(name):
    detector = detector_of(name, **(IN_FLOAT64 | IN_FLOAT32)[name])
    detector.to(memory_format=torch.channels_last)  # as a run does
    hold_batch_norms(detector)  # whose statistics are those of a micro-batch
    if name in IN_FLOAT64:
        detector.double()
    if name == "yolov3":  # images are normalised in float32
        detector.backbone.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    batch = batch_for(name, [2, 0, 7, 1])
    whole = gradient_of(detector, batch, 4)
    for size in (2, 1):
        error = (gradient_of(detector, batch, size) - whole).norm() / whole.norm()
        assert error < (1e-6 if name in IN_FLOAT64 else 1e-5), size


@every_class
def test_a_training_in_bfloat16_is_evaluated_as_its_weights_are_afterwards(name):
    """To the bit, losses included, whatever the generator of random numbers: `evaluate.py` has no autocast."""
    detector = detector_of(name)
    batches = [batch_for(name, [2, 1, 0])]
    evaluated, _ = run(detector.eval(), batches[0])
    assert set(evaluated) == {loss for loss in detector.loss_names if "_dn_" not in loss}
    weights = LossWeights(detector.loss_names, {}, detector.default_weights)
    afterwards = predict_dataset(detector, batches, "cpu", loss_weights=weights)
    detector.train()
    # What Accelerate does with a detector that it prepares.
    detector.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(type(detector).forward), detector)
    torch.manual_seed(1)
    in_training = predict_dataset(detector, batches, "cpu", loss_weights=weights)
    assert in_training.losses == afterwards.losses
    assert in_training.losses["loss"] > 0
    for image_id, found in afterwards.by_image.items():
        for column, value in found.items():
            assert torch.equal(in_training.by_image[image_id][column], value), column


@every_plain_class
def test_detections_are_the_best_above_the_threshold(name):
    detector = detector_of(name)
    batch = batch_for(name, [2, 1])
    outputs = predicted(detector, batch)

    def found(threshold, top_k=100, outputs=outputs):
        return detector.postprocess(
            outputs,
            batch.sizes,
            batch.sizes * 2,
            threshold,
            top_k,
        )

    every = found(-1.0)
    assert str(found(-1.0, outputs=forward(detector, batch))) == str(every), "targets change nothing"
    few = found(-1.0, top_k=3)
    for all_of_them, best in zip(every, few, strict=True):
        assert best["scores"].tolist() == all_of_them["scores"].sort(descending=True).values[:3].tolist()
        assert best["boxes"].shape == (3, 4)
        assert best["boxes"].dtype == torch.float32
        assert best["labels"].dtype == torch.int64
        assert set(all_of_them["labels"].tolist()) <= {0, 1, 2}
    scores = few[0]["scores"].tolist()
    kept = found(scores[1], top_k=3)[0]["scores"].tolist()
    assert kept == [score for score in scores if score > scores[1]]
    assert [image["boxes"].shape for image in found(1.0)] == [(0, 4)] * 2


@pytest.mark.parametrize("name", cases(name for name in EVERY if name not in LAST_STAGES))
def test_the_final_folder_gives_the_same_detections(name, tmp_path):
    detector = detector_of(name).eval()
    detector.save_final(tmp_path, CATEGORIES)
    source = open_pretrained(str(tmp_path))
    assert source.class_names == CLASSES
    again = build_detector(source.architecture, class_names=CLASSES, **source.options).eval()
    table = load_pretrained(again, source, CLASSES)
    assert not table.new
    batch = batch_for(name, [2, 1])
    with torch.no_grad():
        found = [each.postprocess(forward(each, batch), batch.sizes, batch.sizes) for each in (detector, again)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", cases([*PLAIN, *HEAVY]))
def test_rows_of_classes_of_the_same_name_are_taken_over(name):
    theirs = ["a", "b"]
    ours = ["x", "b", "y", "z"]
    source = detector_of(name, class_names=theirs)
    detector = detector_of(name, class_names=ours, seed=1)
    old = source.state_dict()
    fresh = {key: value.clone() for key, value in detector.state_dict().items()}
    weights = Pretrained("source", EVERY[name]["architecture"], {}, theirs, old)
    table = load_pretrained(detector, weights, ours)
    assert not table.new
    assert not table.unused
    loaded = detector.state_dict()
    whole = table.sources.keys() - table.rows
    assert whole
    assert all(loaded[key].equal(old[key]) for key in whole)
    assert any(not loaded[key].equal(fresh[key]) for key in table.rows)
    assert {key for key in loaded if loaded[key].shape != old[key].shape} <= table.rows.keys()
    assert set(table.rows.values()) == {"rows of 1 of 4 classes: b"}


@every_class
def test_a_box_that_is_not_finite_is_known_and_does_not_raise(name):
    """The guard need not trust the losses: of Faster R-CNN they are finite, and YOLOv3 raised."""
    detector = detector_of(name)
    for value in (math.inf, -math.inf, math.nan):
        batch = batch_for(name, [2, 1, 0])
        assert boxes_finite([batch])
        batch.targets[0]["boxes"][0, 2] = value
        assert not boxes_finite([batch])
        finite = with_finite_boxes(batch)
        assert boxes_finite([finite])
        assert not batch.targets[0]["boxes"].isfinite().all()
        losses, _ = run(detector, finite)
        sum(losses.values()).backward()


OTHER_SETTINGS = {
    "detr": {"backbone": "test_resnet"},
    "rt_detr_v2": {"backbone": "test_resnet"},
    "ssd": settings_in("train_ssd"),
    "faster_rcnn": settings_in("train_faster_rcnn"),
    "yolov3": settings_in("train_yolov3"),
}
SOURCES = {
    "detr": {"model_type": "detr"},
    "tiny rf_detr": TINY_RF_DETR,
    "tiny lw_detr": TINY_LW_DETR,
    "deimv2 n": DEIMV2_SIZES["n"],
    "ecdet m": ECDET_SIZES["m"],
    "ecdet as deimv2": ECDET_SIZES["s"] | {"model_type": "deimv2"},
}
SOURCES["detr on a resnet"] = small("detr").model.config.to_dict() | {"backbone_config": ResNetConfig().to_dict()}
SOURCES |= {f"hub {name}": hub_config(name) for name in HYBRIDS}
WRONG = yaml.safe_load((ASSETS / "wrong_settings.yaml").read_text())


@pytest.mark.parametrize(("name", "options", "words"), WRONG)
def test_wrong_settings_are_named_with_what_would_have_worked(name, options, words):
    if "source_config" in options:
        given = options | {"source_config": SOURCES[options["source_config"]]}
    else:
        given = OTHER_SETTINGS.get(name, {}) | options
    with pytest.raises(BadInput) as error:
        build(name, **given)
    assert [word for word in words if word not in str(error.value)] == []


FEW_QUERIES = {
    "deimv2": 20,
    "ecdet": 20,
    "d_fine": 20,
    "rt_detr_v2": 20,
}  # as many as there are positions


def sizes_of(name: str) -> list[str | None]:
    """The published sizes among the settings of a detector; one that is None, if it has none."""
    kind = get_type_hints(options_class(name)).get("size", Literal[None])
    sizes = []
    for choice in get_args(kind):
        sizes += get_args(choice) or [choice]
    return [size for size in sizes if isinstance(size, str)] or [None]


def steps_of_every_size(name: str) -> dict:
    """By size: what of this rank has no gradient after each of two steps, and a number for its weights at the end."""
    report = {}
    for size in sizes_of(name):
        options = {} if size is None else {"size": size}
        if "num_queries" in get_type_hints(options_class(name)):
            options["num_queries"] = FEW_QUERIES.get(name, 8)
        report[size] = steps_of(build(name, **options).train(), SIDES_PX.get(name, 128))
    return report


def steps_of(detector, side: int) -> tuple[list[str], float]:
    """Two steps on full batches, and one in which a rank has no boxes."""
    accelerator = as_launched()
    optimizer = torch.optim.SGD(detector.parameters(), lr=1e-6)
    model, optimizer = prepare(
        accelerator,
        detector,
        optimizer,
        None,
        detector.fixed_size,
    )
    without = []
    for counts in ([3, 2], [3, 2], [0, 0] if accelerator.is_main_process else [1, 2]):
        batch = batch_of(counts, (side, side))
        [denominators] = window_denominators([detector.denominators(batch.targets)], "cpu")
        optimizer.zero_grad()
        outputs = forward(model, batch)
        losses, _ = detector.criterion(outputs, batch.targets, denominators)
        accelerator.backward(sum(losses.values()))
        if counts == [3, 2]:
            without += trained_without_gradient(detector)
        optimizer.step()
    return without, sum(float(parameter.double().sum()) for parameter in detector.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(index.DETECTORS.keys() - {"scene_graph", "egtr"}))
def test_every_published_size_trains_on_two_processes(name):
    first, second = run_on_ranks(steps_of_every_size, 2, name)
    assert first == second
    assert {size: without for size, (without, _) in first.items()} == dict.fromkeys(sizes_of(name), [])
    assert all(math.isfinite(weights) for _, weights in first.values())
