"""`loss.class_weights`: the weights of classes in the classification losses of each detector."""

import json
import math
import re

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from small_detectors import REAL_TIME, batch_of, gradient_of, run
from test_contract import MODELS, built
from test_unlabelled import class_gradients, of_class_1

from scripts import replay, train_ssd
from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput, StoppedByGuard
from toolkit.base.seeding import seed_images
from toolkit.models.detector import Detector
from toolkit.models.start import check_losses
from toolkit.run.command_line import parse_config
from toolkit.step.class_weights import balanced_weights, class_weights
from toolkit.tools.shapes import make_shapes

NAMES = [name for name in MODELS if "stages" not in name]
OF_CLASSES = re.compile("loss_(ce|vfl|mal|cls|classifier)(_|$)")


def losses_of(name: str, weights: list[float] | None, training: bool = True) -> dict[str, torch.Tensor]:
    detector = built(name).train(training)
    if weights is not None:
        detector.weigh_classes(weights)
    torch.manual_seed(0)
    return run(detector, batch_of([3, 2, 0], (64, 64)))[0]


@pytest.mark.parametrize("name", NAMES)
def test_weights_multiply_the_classification_losses_of_objects_in_training_alone(name):
    plain = losses_of(name, None)
    ones = losses_of(name, [1.0, 1.0, 1.0])
    zero, two, three = (losses_of(name, [weight] * 3) for weight in (0.0, 2.0, 3.0))
    for key, value in plain.items():
        torch.testing.assert_close(ones[key], value)
        if OF_CLASSES.match(key) and not (name == "deformable_detr++" and key == "loss_ce_enc"):
            of_objects = value - zero[key]
            assert of_objects > 0, key
            torch.testing.assert_close(two[key], value + of_objects)
            torch.testing.assert_close(three[key], value + 2 * of_objects)
        else:
            assert torch.equal(three[key], value), key
    evaluated = losses_of(name, None, training=False)
    weighted = losses_of(name, [5.0, 0.0, 2.0], training=False)
    assert all(torch.equal(weighted[key], value) for key, value in evaluated.items())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_pulls_towards_a_class_of_weight_0(name):
    batch = of_class_1(None)  # all boxes are of class 1
    detector = built(name)
    before, _ = class_gradients(detector, batch)
    denominators = detector.denominators(batch.targets)
    detector.weigh_classes([1.0, 0.0, 1.0])
    after, _ = class_gradients(detector, batch)
    assert detector.denominators(batch.targets) == denominators
    for plain, weighted in zip(before, after, strict=True):
        assert (plain[..., 1] < -1e-8).any() and not (weighted[..., 1] < -1e-8).any()
    detector.weigh_classes([0.0, 1.0, 0.0])  # of classes that have no boxes here
    same, _ = class_gradients(detector, batch)
    for plain, weighted in zip(before, same, strict=True):
        torch.testing.assert_close(plain, weighted)


def exact(name: str):
    """A detector whose losses of an image do not depend on the other images of its batch."""
    options = {"num_denoising": 0} if name in REAL_TIME else {"norm": "group"} if name == "ssd" else {}
    detector = built(name, **options)
    if name not in ("faster_rcnn", "dab-detr"):  # parts of them take float32 alone
        detector.double()
    for module in detector.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    if name == "yolov3":  # images are normalised in float32
        detector.backbone.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    detector.weigh_classes([0.5, 2.0, 3.0])
    return detector


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_have_the_classification_losses_of_the_big_batch(name):
    detector = exact(name)
    batch = batch_of([2, 0, 7, 1], (64, 64))
    seed_images(batch.targets, 0, 0)
    denominators = detector.denominators(batch.targets)
    whole, _ = run(detector, batch, denominators)
    keys = [key for key in whole if OF_CLASSES.match(key)]
    sums = dict.fromkeys(keys, 0)
    for start in (0, 2):
        part = slice(start, start + 2)
        micro = Batch(batch.images[part], batch.sizes[part], batch.targets[part])
        losses, _ = run(detector, micro, denominators)
        for key in keys:
            sums[key] += losses[key]
    for key in keys:
        torch.testing.assert_close(sums[key], whole[key], rtol=1e-5, atol=1e-6)
    if name in ("detr", "rt_detr_v2", "ssd"):
        gradient = gradient_of(detector, batch, 4)
        assert (gradient_of(detector, batch, 2) - gradient).norm() < 1e-6 * gradient.norm()
        detector.weigh_classes([1.0, 1.0, 1.0])
        assert (gradient_of(detector, batch, 4) - gradient).norm() > 1e-2 * gradient.norm()


def test_scene_graphs_are_refused_by_name():
    detector = built("ssd")
    check_losses(detector, mixup=False, partly_labelled=False, weighs_classes=True)
    detector.weighs_classes = False
    with pytest.raises(BadInput, match="loss.class_weights: the losses of ssd do not weigh classes"):
        check_losses(detector, mixup=False, partly_labelled=False, weighs_classes=True)
    detector.predicates = ["on"]
    with pytest.raises(BadInput, match="model.rare_predicate_power"):
        check_losses(detector, mixup=False, partly_labelled=False, weighs_classes=True)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any))
def test_balanced_weights_have_the_mean_1_over_objects_and_are_bounded(counts):
    weights = balanced_weights(counts)
    pairs = [(count, weight) for count, weight in zip(counts, weights, strict=True) if count]
    assert math.isclose(sum(count * weight for count, weight in pairs), sum(counts), rel_tol=1e-9)
    assert max(weight for _, weight in pairs) <= 1001 * min(weight for _, weight in pairs)
    assert all(weight == 1 for count, weight in zip(counts, weights, strict=True) if not count)
    by_count = [weight for _, weight in sorted(pairs)]
    assert by_count == sorted(by_count, reverse=True)


def test_the_weights_of_a_setting_and_all_its_faults():
    names = ["car", "person", "7"]
    assert class_weights({"person": 3, 7: 0}, names, [9, 9, 9]) == [1, 3, 0]
    rare, common = balanced_weights([10, 1000])  # effective numbers 9.955 and 632.3 of Cui et al.
    assert rare / common == pytest.approx(632.3 / 9.955, rel=1e-3)
    with pytest.raises(BadInput) as caught:
        class_weights({"persn": 2, "car": -1, "7": "x"}, names, [1, 1, 1])
    assert len(caught.value.problems) == 3 and "did you mean person?" in str(caught.value)
    with pytest.raises(BadInput, match="all classes have the weight 0"):
        class_weights({"car": 0, "person": 0, "7": 0}, names, [1, 1, 1])
    for weight in (1e39, 10**400, -1e-9, math.inf, math.nan, True, None):
        with pytest.raises(BadInput, match="car has the weight .*; expected a number from 0 to 1,000,000$"):
            class_weights({"car": weight}, names, [1, 1, 1])
    with pytest.raises(BadInput, match="the weight 0, or nearly so"):
        class_weights(dict.fromkeys(names, 1e-50), names, [1, 1, 1])
    with pytest.raises(BadInput, match="loss.class_weights is balance; expected balanced"):
        class_weights("balance", names, [1, 1, 1])


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    """The command line of a training of one step with balanced weights."""
    monkeypatch.setattr("toolkit.run.session_end._report", lambda *_, **__: None)
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    make_shapes(tmp_path / "data", 8, 4, 48, seed=0)
    flags = {
        "run.output_dir": tmp_path, "run.name": "mine", "run.max_steps": 1, "data.path": tmp_path / "data",
        "data.workers": 0, "data.image_size": 32, "data.batch_size_per_device": 4, "model.backbone": "lcnet_035",
        "model.pretrained_backbone": "false", "model.strides": "[4, -1]", "model.channels": "[16, 16]",
        "model.aspect_ratios": "[[2], [2]]", "eval.pictures": 0, "schedule.warmup_steps": 0,
        "loss.class_weights": "balanced", "data.classes": "{star: null}",
    }  # fmt: skip
    return [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def test_a_run_counts_the_objects_of_its_training_data(tmp_path, words, capsys):
    train_ssd.main(parse_config(train_ssd.Config, words))
    AcceleratorState._reset_state(True)
    weights = json.loads((tmp_path / "mine" / "environment.json").read_text())["class_weights"]
    assert list(weights) == ["circle", "square", "triangle"] and len(set(weights.values())) > 1
    assert "weights of classes in the losses: circle " in capsys.readouterr().out


def test_a_window_is_run_again_with_the_weights_that_it_had(tmp_path, words, monkeypatch, capsys):
    words += ["--optim.lr", "1e18", "--optim.max_norm", "0", "--optim.name", "sgd", "--schedule.name", "constant"]
    with pytest.raises(StoppedByGuard):
        train_ssd.main(parse_config(train_ssd.Config, [*words, "--run.max_steps", "5", "--run.epochs", "5"]))
    AcceleratorState._reset_state(True)
    weights = json.loads((tmp_path / "mine" / "environment.json").read_text())["class_weights"]
    given = []
    monkeypatch.setattr(Detector, "weigh_classes", lambda detector, weights: given.append(weights))
    [report] = (tmp_path / "mine" / "nan").glob("*/rank0")
    assert replay.main([str(report)]) == 0
    assert given == [pytest.approx(list(weights.values()))]
