"""DETR with norms before each sublayer: the original's formula, written again here."""

import pytest
import torch
from small_detectors import batch_of, small, wake
from torch import nn
from torch.testing import assert_close

from toolkit.base.batch import normalize_images, pixel_mask


class OriginalAttention(nn.Module):
    """`nn.MultiheadAttention` with the weights of an attention of transformers."""

    def __init__(self, theirs):
        super().__init__()
        projections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
        d_model = theirs.o_proj.out_features
        self.attention = nn.MultiheadAttention(d_model, d_model // theirs.head_dim)
        with torch.no_grad():
            self.attention.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
            self.attention.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        self.attention.out_proj.load_state_dict(theirs.o_proj.state_dict())

    def forward(self, query, key, value, padding=None):
        return self.attention(query, key, value, key_padding_mask=padding)[0]


def feed_forward(mlp, x):
    return mlp.fc2(mlp.fc1(x).relu())


def original_pre_norm(core, pixels, mask):
    """facebookresearch/detr `models/transformer.py` with `normalize_before`, sequence first; every layer's output."""
    features, padding = core.backbone(pixels, mask)[-1]
    pos = (
        core.position_embedding(
            features.shape,
            features.device,
            features.dtype,
            padding,
        )
        .flatten(2)
        .permute(2, 0, 1)
    )
    src = core.input_projection(features).flatten(2).permute(2, 0, 1)
    padding = ~padding.flatten(1)
    for layer in core.encoder.layers:  # forward_pre
        src2 = layer.self_attn_layer_norm(src)
        src = src + OriginalAttention(layer.self_attn)(
            src2 + pos,
            src2 + pos,
            src2,
            padding,
        )
        src = src + feed_forward(layer.mlp, layer.final_layer_norm(src))
    memory = core.encoder.layernorm(src)
    query_pos = core.query_position_embeddings.weight[:, None].repeat(1, len(pixels), 1)
    tgt = torch.zeros_like(query_pos)
    states = []
    for layer in core.decoder.layers:
        tgt2 = layer.self_attn_layer_norm(tgt)
        tgt = tgt + OriginalAttention(layer.self_attn)(tgt2 + query_pos, tgt2 + query_pos, tgt2)
        tgt2 = layer.encoder_attn_layer_norm(tgt)
        tgt = tgt + OriginalAttention(layer.encoder_attn)(
            tgt2 + query_pos,
            memory + pos,
            memory,
            padding,
        )
        tgt = tgt + feed_forward(layer.mlp, layer.final_layer_norm(tgt))
        states.append(core.decoder.layernorm(tgt))
    return torch.stack(states).transpose(1, 2)


def pre_norm_detr(**options):
    return wake(
        small(
            "detr",
            **{
                "encoder_layers": 2,
                "decoder_layers": 3,
                "pre_norm": True,
                **options,
            },
        )
    )


@pytest.mark.parametrize("training", [True, False])
def test_pre_norm_is_the_original_s_formula(training):
    detector = pre_norm_detr().train(training)
    model = detector.model
    model.model.backbone.eval()  # batch statistics would be updated in between
    batch = batch_of([1, 1], (64, 90), smaller=(40, 64))
    pixels = normalize_images(batch.images, batch.sizes, detector.mean, detector.std)
    with torch.no_grad():
        found = detector(batch.images, batch.sizes)
        states = original_pre_norm(model.model, pixels, pixel_mask(batch.sizes, pixels.shape[-2:]))
        logits = model.class_labels_classifier(states)
        boxes = model.bbox_predictor(states).sigmoid()
    assert_close(found["logits"], logits, rtol=1e-4, atol=1e-4)
    assert_close(found["boxes"], boxes, rtol=1e-4, atol=1e-5)
