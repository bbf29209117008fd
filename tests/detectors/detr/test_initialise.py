"""Random weights: what lets an image through, where queries look first, and how scores start."""

import pytest
import torch
from small_detectors import HYBRIDS, REAL_TIME, SMALL, batch_of, build, forward, image_size, predicted, small
from torch.testing import assert_close

from toolkit.step.optim import parameter_groups


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("detr", *REAL_TIME)])
def test_scores_start_at_the_prior_and_every_query_looks_elsewhere(name):
    outputs = predicted(small(name), batch_of([1, 1], image_size(name)))
    scores = outputs["logits"].sigmoid()
    assert 0.0005 < scores.min()
    assert scores.max() < 0.2
    assert 0.005 < scores.median() < 0.02
    if name != "deformable_detr++":  # whose proposals may lie at the border, beside each other
        centres = outputs["boxes"][-1, 0, :, :2]
        assert torch.cdist(centres, centres).fill_diagonal_(1).min() > 1e-4


def test_deformable_attention_starts_as_a_star_and_boxes_at_an_eighth():
    detector = small("deformable_detr")
    attention = detector.model.model.encoder.layers[0].self_attn
    assert not attention.sampling_offsets.weight.any()
    assert not attention.attention_weights.weight.any()
    heads, levels, points = 2, 4, 4
    offsets = attention.sampling_offsets.bias.view(heads, levels, points, 2)
    assert_close(offsets.abs().amax(-1), torch.arange(1.0, 5).expand(2, 4, 4))
    sides = predicted(detector, batch_of([1]))["boxes"][..., 2:]
    assert_close(sides, torch.full_like(sides, torch.tensor(-2.0).sigmoid().item()))


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_random_weights_let_the_image_through_and_start_from_the_prior(architecture):
    detector = small(architecture).train()
    batch = batch_of([1, 1, 2], (64, 64))
    logits = forward(detector, batch)["layers"]["encoder_logits"]
    assert logits.sigmoid().mean() < 0.05, "nearly everything is background"
    assert logits.std(dim=(0, 1)).mean() > 0.05, "it depends on where one looks"
    for module in detector.model.model.decoder.layers[0].modules():
        if isinstance(module, torch.nn.Linear) and module.weight.any():  # gates and offsets start at 0
            assert module.weight.std() > 0.05  # transformers: 0.01
    groups = parameter_groups(detector, lr=1.0, weight_decay=0.0, backbone_lr=0.1)
    in_backbone = sum(len(group["params"]) for group in groups if group["name"] == "backbone")
    assert in_backbone == len(list(detector._backbone().parameters()))


def test_lw_detr_starts_as_in_its_program():
    detector = build("lw_detr", size="tiny")
    vit = detector.model.model.backbone.backbone
    for layer in vit.encoder.layer:
        assert (layer.gamma_1 == 0.1).all()
        assert (layer.gamma_2 == 0.1).all()
        assert not layer.attention.q_proj.bias.any()
        assert layer.attention.k_proj.bias is None
        assert layer.intermediate.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    patches = vit.embeddings.projection.weight  # PyTorch's initial values: uniform within 1 / sqrt(16 * 16 * 3)
    assert patches.abs().max() <= 768**-0.5
    assert patches.std().item() == pytest.approx((3 * 768) ** -0.5, rel=0.05)
    assert not detector.model.model.reference_point_embed.weight.any()
