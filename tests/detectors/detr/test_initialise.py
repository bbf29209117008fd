"""Random weights: what lets an image through, where queries look first, and how scores start."""

import pytest
import torch
from pytest import approx
from small_detectors import HYBRIDS, REAL_TIME, SMALL, batch_of, build, forward, image_size, predicted, small
from torch.testing import assert_close

from toolkit.step.optim import parameter_groups

WITH_PRIOR = [name for name in SMALL if name not in ("detr", *REAL_TIME)]


@pytest.mark.parametrize("name", WITH_PRIOR)
def test_scores_start_at_the_prior_and_every_query_looks_elsewhere(name):
    batch = batch_of([1, 1], image_size(name))
    outputs = predicted(small(name), batch)
    scores = outputs["logits"].sigmoid()
    assert 0.0005 < scores.min()
    assert scores.max() < 0.2
    assert 0.005 < scores.median() < 0.02
    if name != "deformable_detr++":  # whose proposals may lie at the border, beside each other
        centres = outputs["boxes"][-1, 0, :, :2]
        distances = torch.pdist(centres)
        assert distances.min() > 1e-4


def test_deformable_attention_starts_as_a_star_and_boxes_at_an_eighth():
    detector = small("deformable_detr")
    attention = detector.model.model.encoder.layers[0].self_attn
    assert not attention.sampling_offsets.weight.any()
    assert not attention.attention_weights.weight.any()
    heads = 2
    levels = 4
    points = 4
    offsets = attention.sampling_offsets.bias.view(heads, levels, points, 2)
    distances = offsets.abs().amax(-1)
    expected = torch.arange(1.0, 5)
    assert_close(distances, expected.expand(heads, levels, points))
    outputs = predicted(detector, batch_of([1]))
    sides = outputs["boxes"][..., 2:]
    eighth = torch.tensor(-2.0).sigmoid()
    assert_close(sides, eighth.expand_as(sides))


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_random_weights_let_the_image_through_and_start_from_the_prior(architecture):
    detector = small(architecture).train()
    batch = batch_of([1, 1, 2], (64, 64))
    layers = forward(detector, batch)["layers"]
    logits = layers["encoder_logits"]
    scores = logits.sigmoid()
    assert scores.mean() < 0.05, "nearly everything is background"
    deviations = logits.std(dim=(0, 1))
    assert deviations.mean() > 0.05, "it depends on where one looks"
    first = detector.model.model.decoder.layers[0]
    for module in first.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.any():  # gates and offsets start at 0
            assert module.weight.std() > 0.05  # transformers: 0.01
    groups = parameter_groups(
        detector,
        lr=1.0,
        weight_decay=0.0,
        backbone_lr=0.1,
    )
    in_backbone = []
    for group in groups:
        if group["name"] == "backbone":
            in_backbone += group["params"]
    expected = list(detector._backbone().parameters())
    assert len(in_backbone) == len(expected)


def test_lw_detr_starts_as_in_its_program():
    detector = build("lw_detr", size="tiny")
    vit = detector.model.model.backbone.backbone
    for layer in vit.encoder.layer:
        assert (layer.gamma_1 == 0.1).all()
        assert (layer.gamma_2 == 0.1).all()
        attention = layer.attention
        assert not attention.q_proj.bias.any()
        assert attention.k_proj.bias is None
        deviation = layer.intermediate.fc1.weight.std()
        assert deviation.item() == approx(0.02, rel=0.05)
    patches = vit.embeddings.projection.weight  # PyTorch's initial values: uniform within 1 / sqrt(16 * 16 * 3)
    assert patches.abs().max() <= 768**-0.5
    deviation = patches.std()
    assert deviation.item() == approx((3 * 768) ** -0.5, rel=0.05)
    assert not detector.model.model.reference_point_embed.weight.any()
