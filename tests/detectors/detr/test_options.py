"""Settings of the DETR family: published values, and what a run resolves them to."""

import json
from dataclasses import fields

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from small_detectors import CLASSES, ON_TIMM, SMALL, batch_of, build, image_size, predicted, small, wake

from toolkit.index import DETECTORS
from toolkit.models import options_class

FAMILY = [name for name, (module, _) in DETECTORS.items() if module.startswith("toolkit.detectors.detr.")]
OF_THE_DATA = ("mean", "std", "freeze_prefixes", "fresh_prefixes")
SETTINGS = {name: settings for name, settings in SMALL.items() if "source_config" not in settings} | {
    "conditional_detr": {**ON_TIMM, "dilation": True},
    "rf_detr": {"encoder_layers": 4, "decoder_layers": 2, "heads": 4},
    "lw_detr": {
        "size": "tiny",
        "decoder_layers": 2,
        "heads": 4,
        "d_model": 64,
        "ffn_dim": 32,
    },
    "ecdet": {"decoder_layers": 2},
}


@pytest.mark.parametrize("name", FAMILY)
def test_an_untouched_detector_has_the_published_settings(name):
    resolved = build(name).resolved_options()
    for field in fields(options_class(name)):
        if field.name not in OF_THE_DATA:
            assert resolved[field.name] == field.default, field.name
    assert len(resolved["mean"]) == len(resolved["std"]) == 3


@pytest.mark.parametrize("name", SMALL)
def test_costs_and_weights_are_those_of_the_published_configuration(name):
    detector = small(name)
    options = detector.Options()
    published = vars(detector.config_class())
    if hasattr(options, "class_cost"):  # not a setting of RT-DETR and its like
        of_class = published["class_cost"] + (options.architecture == "deformable_detr")  # the original's is 2
        assert options.class_cost == of_class
        assert options.bbox_cost == published["bbox_cost"]
        assert options.giou_cost == published["giou_cost"]
    named = {}
    for loss in detector.default_weights:
        kind = loss.removeprefix("loss_")
        value = published.get(f"weight_loss_{kind}", published.get(f"{kind}_loss_coefficient"))
        if value is not None:
            named[loss] = value
    assert named.keys() >= {"loss_bbox", "loss_giou"}
    assert named.items() <= detector.default_weights.items()


@pytest.mark.parametrize("name", SETTINGS)
def test_resolved_settings_and_those_of_a_source_build_the_same_model(name):
    given = SETTINGS[name] | {"num_queries": 5}
    detector = build(name, **given)
    assert given.items() <= detector.resolved_options().items()
    config = json.loads(json.dumps(detector.model.config.to_dict()))
    again = build(
        name,
        seed=1,
        source_config=config,
        **({"freeze": "none"} if "backbone" in given else {}),
    )
    assert given.items() <= again.resolved_options().items()
    assert_resolved_options_build_it_again(again, CLASSES, ("pretrained", "size"))
    again.model.load_state_dict(wake(detector).model.state_dict())
    batch = batch_of([1, 2], (112, 112) if name == "rf_detr" else image_size(name))
    torch.testing.assert_close(predicted(again, batch)["boxes"], predicted(detector, batch)["boxes"])


def test_an_evaluation_keeps_as_many_detections_as_queries_and_100_at_least():
    assert small("rt_detr_v2").max_detections == 100
    assert small("rt_detr_v2", num_queries=120).max_detections == 120
