"""Configs of the hub: a model with our classes, settings that override them, and backbones of transformers' own."""

import json
import re

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from small_detectors import (
    CLASSES,
    HYBRIDS,
    TINY_LW_DETR,
    TINY_RF_DETR,
    batch_of,
    build,
    hub_config,
    predicted,
    run,
    small,
    wake,
)
from torch.testing import assert_close
from transformers import AutoModelForObjectDetection, ResNetConfig


@pytest.mark.parametrize("name", [*HYBRIDS, "dinov3"])
def test_a_config_of_the_hub_builds_its_model_with_our_classes(name):
    source = hub_config(name)
    detector = build("deimv2" if name == "dinov3" else name, source_config=source).train()
    config = detector.config_class.from_dict(source | {"id2label": dict(enumerate(CLASSES))})
    original = AutoModelForObjectDetection.from_config(config).eval()
    losses, _ = run(detector, batch_of([2, 0, 1], (64, 64)))
    assert set(losses) == set(detector.loss_names)
    assert sum(losses.values()).isfinite()
    detector.model.load_state_dict(original.state_dict())
    batch = batch_of([0, 0], (64, 64))
    mean = torch.tensor(detector.mean)[:, None, None]
    std = torch.tensor(detector.std)[:, None, None]
    ours = predicted(detector, batch)
    with torch.no_grad():
        theirs = original(pixel_values=(batch.images / 255 - mean) / std)
    assert ours["logits"].shape == (2, 10, len(CLASSES))
    assert_close(ours["logits"], theirs.logits, rtol=1e-4, atol=1e-5)
    assert_close(ours["boxes"], theirs.pred_boxes, rtol=1e-4, atol=1e-5)
    assert source == hub_config(name), "not touched"


@pytest.mark.parametrize("architecture", ["rt_detr_v2", "deimv2"])
def test_given_settings_override_a_config_of_the_hub(architecture):
    given = {
        "num_queries": 7,
        "num_denoising": 0,
        "decoder_layers": 3,
        "d_model": 32,
        "freeze": "none",
    }
    detector = build(architecture, source_config=hub_config(architecture), **given)
    assert given.items() <= detector.resolved_options().items()
    assert detector.model.config.encoder_hidden_dim == 32
    assert detector.model.config.encoder_ffn_dim == 16
    assert detector.mean == (0, 0, 0)
    assert not any("_dn_" in name for name in detector.loss_names)
    frozen = build(architecture, source_config=hub_config(architecture), freeze="norms")
    assert [name for name, _ in detector._backbone().named_parameters() if "norm" in name]
    assert not [name for name, _ in frozen._backbone().named_parameters() if "norm" in name]


def test_one_setting_for_two_entries_leaves_a_source_alone_that_tells_them_apart():
    """As published RT-DETR-v2 with ResNet-101: 384 channels in the encoder, 256 in the decoder."""
    source = hub_config("rt_detr_v2") | {
        "encoder_hidden_dim": 32,
        "decoder_in_channels": [32] * 3,
        "decoder_ffn_dim": 24,
        "decoder_attention_heads": 4,
    }
    detector = build("rt_detr_v2", source_config=source)
    without_value = ("pretrained", "backbone", "d_model", "heads", "ffn_dim")
    assert_resolved_options_build_it_again(detector, CLASSES, without_value)
    resolved = detector.resolved_options()
    assert [resolved[name] for name in without_value] == [None] * 5
    config = build("rt_detr_v2", source_config=source, heads=2, ffn_dim=40).model.config
    assert config.encoder_hidden_dim == 32
    assert config.d_model == 16
    assert config.decoder_attention_heads == 2
    assert config.encoder_ffn_dim == config.decoder_ffn_dim == 40


RESNET = ResNetConfig(
    embedding_size=8,
    hidden_sizes=[8, 8, 16, 32],
    depths=[1, 1, 1, 1],
    layer_type="basic",
    out_features=["stage2", "stage3", "stage4"],
)


def config_on_resnet(name: str) -> dict:
    return json.loads(json.dumps(small(name).model.config.to_dict() | {"backbone_config": RESNET.to_dict()}))


def trained_of_backbone(detector) -> set[str]:
    return {name for name, p in detector.named_parameters() if "backbone" in name and p.requires_grad}


@pytest.mark.parametrize(
    "name",
    [
        "detr",
        "conditional_detr",
        "deformable_detr",
        "dab-detr",
    ],
)
def test_a_source_with_a_resnet_of_transformers_is_frozen_as_in_the_paper(name):
    config = config_on_resnet(name)
    detector = build(name, source_config=config)
    assert_resolved_options_build_it_again(detector, CLASSES, ("pretrained", "backbone"))
    assert detector.resolved_options()["freeze"] == "paper"
    losses, _ = run(detector.train(), batch_of([1, 2]))
    sum(losses.values()).backward()
    trained = trained_of_backbone(detector)
    assert trained
    assert all(".encoder.stages." in key and ".stages.0." not in key for key in trained)
    assert trained < trained_of_backbone(build(name, source_config=config, freeze="norms"))
    on_timm = build(name, source_config=config, backbone="test_resnet", freeze="none")
    assert on_timm.model.config.backbone_config.backbone == "test_resnet"


@pytest.mark.parametrize(("name", "tiny"), [("rf_detr", TINY_RF_DETR), ("lw_detr", TINY_LW_DETR)])
def test_layers_behind_the_deepest_map_of_a_source_change_no_prediction(name, tiny):
    source = tiny | {"backbone_config": tiny["backbone_config"] | {"num_hidden_layers": 4}}
    detector = wake(build(name, source_config=source)).eval()
    theirs = detector.model_class(detector.config_class(**source, num_labels=len(CLASSES))).eval()
    left = theirs.load_state_dict(detector.model.state_dict(), strict=False)
    assert not left.unexpected_keys
    assert {re.sub(r".*layer\.(\d).*", r"\1", key) for key in left.missing_keys} == {"2", "3"}
    pixels = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert detector.model(pixels).pred_boxes.equal(theirs(pixels).pred_boxes)
    assert detector.resolved_options()["encoder_layers"] == 2
    assert_resolved_options_build_it_again(detector, CLASSES, ("pretrained", "size"))
