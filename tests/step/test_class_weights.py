"""Weights of classes (`loss.class_weights`): what a setting means, and the classification losses of every detector."""

import json
import math
import re

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from small_detectors import MODELS, batch_of, built, run

from scripts import replay, train_ssd
from toolkit.base.errors import BadInput, StoppedByGuard
from toolkit.models.detector import Detector
from toolkit.models.start import check_losses
from toolkit.run.command_line import parse_config
from toolkit.step.class_weights import balanced_weights, class_weights
from toolkit.tools.shapes import make_shapes

OF_CLASSES = re.compile("loss_(ce|vfl|mal|cls|classifier)(_|$)")


def losses_of(detector) -> dict[str, torch.Tensor]:
    """Return the losses of a batch whose objects are all of class 1."""
    batch = batch_of([3, 2, 0], (64, 64))
    for target in batch.targets:
        target["labels"] = torch.ones_like(target["labels"])
    torch.manual_seed(0)
    return run(detector, batch)[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_weight_of_its_class_multiplies_the_loss_of_an_object(name):
    """In training alone. Denominators do not depend on the weights."""
    detector = built(name)
    plain = losses_of(detector)
    evaluated = losses_of(detector.eval())
    detector.weigh_classes([7.0, 0.0, 7.0])
    torch.testing.assert_close(losses_of(detector), evaluated, rtol=0, atol=0)
    zero = losses_of(detector.train())
    detector.weigh_classes([7.0, 1.0, 0.0])
    torch.testing.assert_close(losses_of(detector), plain)
    detector.weigh_classes([7.0, 3.0, 7.0])
    three = losses_of(detector)
    for key, value in plain.items():
        # The encoder of two-stage Deformable DETR looks for objects of any class.
        if OF_CLASSES.match(key) and not (name == "deformable_detr++" and key == "loss_ce_enc"):
            of_objects = value - zero[key]
            assert of_objects > 0, key
            torch.testing.assert_close(three[key], value + 2 * of_objects)
        else:
            assert three[key].equal(value), key


def test_losses_that_do_not_weigh_classes_are_refused_by_name():
    detector = built("ssd")
    check_losses(detector, mixup=False, partly_labelled=False, weighs_classes=True)
    detector.weighs_classes = False
    with pytest.raises(BadInput, match="loss.class_weights: the losses of ssd do not weight classes"):
        check_losses(detector, mixup=False, partly_labelled=False, weighs_classes=True)
    detector.predicates = ["on"]  # of a scene graph
    with pytest.raises(BadInput, match="model.rare_predicate_power"):
        check_losses(detector, mixup=False, partly_labelled=False, weighs_classes=True)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any))
def test_balanced_weights_have_the_mean_1_over_objects_and_are_bounded(counts):
    weights = balanced_weights(counts)
    pairs = sorted(zip(counts, weights, strict=True))
    assert math.isclose(sum(count * weight for count, weight in pairs), sum(counts), rel_tol=1e-9)
    assert {weight for count, weight in pairs if not count} <= {1}
    by_count = [weight for count, weight in pairs if count]
    assert by_count == sorted(by_count, reverse=True)
    assert by_count[0] <= 1001 * by_count[-1]


def test_balanced_weights_go_by_the_effective_numbers_of_the_paper():
    rare, common = balanced_weights([10, 1000])  # 9.955 and 632.3 in Cui et al.
    assert rare / common == pytest.approx(632.3 / 9.955, rel=1e-3)


NAMES = ["car", "person", "7"]
A_NUMBER = "car has the weight .*; expected a number from 0 to 1,000,000$"


def test_the_weights_of_a_setting():
    assert class_weights({"person": 3, 7: 0}, NAMES, [9, 9, 9]) == [1, 3, 0]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"persn": 2, "car": -1, "7": "x"}, r"did you mean person\?(.|\n)*car has(.|\n)*7 has"),
        ({"car": 0, "person": 0, "7": 0}, "all classes have the weight 0"),
        (dict.fromkeys(NAMES, 1e-50), "the weight 0, or nearly so"),
        ("balance", "loss.class_weights is balance; expected balanced"),
        *(
            ({"car": weight}, A_NUMBER)
            for weight in (
                1e39,
                10**400,
                -1e-9,
                math.inf,
                math.nan,
                True,
                None,
            )
        ),
    ],
)
def test_settings_that_are_not_weights_are_refused(setting, words):
    with pytest.raises(BadInput, match=words):
        class_weights(setting, NAMES, [1, 1, 1])


def test_a_run_counts_its_objects_and_its_windows_are_replayed_with_the_weights(tmp_path, monkeypatch, capsys):
    """The second window breaks."""
    monkeypatch.setattr("toolkit.run.session_end._report", lambda *_, **__: None)
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    make_shapes(tmp_path / "data", 8, 4, 48, seed=0)
    settings = f"""
        --run.output_dir {tmp_path} --run.name mine --run.max_steps 5 --run.epochs 5 --data.path {tmp_path}/data
        --data.workers 0 --data.image_size 32 --data.batch_size_per_device 4 --model.backbone lcnet_035
        --model.pretrained_backbone false --model.strides [4,-1] --model.channels [16,16]
        --model.aspect_ratios [[2],[2]] --eval.pictures 0 --schedule.warmup_steps 0 --schedule.name constant
        --optim.lr 1e18 --optim.max_norm 0 --optim.name sgd --loss.class_weights balanced
    """
    config = parse_config(train_ssd.Config, [*settings.split(), "--data.classes", "{star: null}"])
    with pytest.raises(StoppedByGuard):
        train_ssd.main(config)
    AcceleratorState._reset_state(True)
    assert "weights of classes in the losses: circle " in capsys.readouterr().out
    weights = json.loads((tmp_path / "mine" / "environment.json").read_text())["class_weights"]
    assert list(weights) == ["circle", "square", "triangle"]
    assert len(set(weights.values())) > 1
    given = []
    monkeypatch.setattr(Detector, "weigh_classes", lambda detector, weights: given.append(weights))
    [report] = (tmp_path / "mine" / "nan").glob("*/rank0")
    assert replay.main([str(report)]) == 0
    assert given == [pytest.approx(list(weights.values()))]
