"""RF-DETR: the layers of its vision transformer, its sizes, and the weights of timm in it."""

import pytest
import timm
import torch
from contract import assert_resolved_options_build_it_again, trained_without_gradient
from safetensors.torch import save_file
from small_detectors import CLASSES, TINY_RF_DETR, batch_of, build, run
from torch.testing import assert_close

from toolkit.base.errors import BadInput
from toolkit.models.final import load_detector_weights

NARROW = {
    "d_model": 32,
    "heads": 2,
    "ffn_dim": 32,
    "num_queries": 4,
    "decoder_layers": 1,
}
# (name, size, layers that are asked for, layers that are built)
DEPTHS = [
    ("rf_detr", "base", None, 11),
    ("rf_detr", "base", 12, 11),
    ("rf_detr", "base", 2, 2),
    ("rf_detr", "nano", 5, 5),
    ("rf_detr", "nano", 1, 1),
    ("lw_detr", "tiny", 5, 5),
]


@pytest.mark.parametrize(("name", "size", "asked", "layers"), DEPTHS)
def test_no_layer_lies_behind_the_deepest_map_whatever_the_depth(name, size, asked, layers):
    detector = build(name, **NARROW, size=size, encoder_layers=asked).train()
    side = detector.stride * 2
    losses, _ = run(detector, batch_of([2, 1], (side, side)))
    sum(losses.values()).backward()
    assert trained_without_gradient(detector) == []
    assert not detector.leaves_unused
    assert len(detector.model.model.backbone.backbone.encoder.layer) == layers


def test_weights_from_before_maps_were_at_each_quarter_are_refused(tmp_path):
    detector = build("rf_detr", **NARROW, size="nano", encoder_layers=5)
    before = detector.state_dict()
    assert before.pop("map_layers").tolist() == [1, 2, 4, 5]
    with pytest.raises(BadInput, match="run: the weights are not those of .*: 1 missing: map_layers"):
        load_detector_weights(detector, before, tmp_path / "run")
    assert "map_layers" not in build("rf_detr", **NARROW, size="nano").state_dict()


@pytest.mark.parametrize(
    ("size", "layers", "stride", "side"),
    [
        ("nano", 2, 32, 24),
        ("small", 3, 32, 32),
        ("medium", 4, 32, 36),
        ("base", 3, 56, 37),
    ],
)
def test_sizes_are_those_of_its_program(size, layers, stride, side):
    """roboflow/rf-detr, rfdetr/config.py; a number of layers that is given counts more."""
    detector = build("rf_detr", size=size, encoder_layers=4)
    assert detector.resolved_options()["size"] == size
    assert detector.resolved_options()["decoder_layers"] == layers
    assert detector.stride == stride
    positions = detector.model.model.backbone.backbone.embeddings.position_embeddings
    assert positions.shape[1] == 1 + side**2
    assert (
        build(
            "rf_detr",
            size=size,
            encoder_layers=4,
            decoder_layers=1,
        ).resolved_options()["decoder_layers"]
        == 1
    )


def test_heads_of_a_source_in_another_proportion_are_no_setting():
    odd = build("rf_detr", source_config={**TINY_RF_DETR, "decoder_cross_attention_heads": 2})
    assert_resolved_options_build_it_again(odd, CLASSES, ("pretrained", "heads", "size"))
    assert odd.resolved_options()["heads"] is None


def test_the_vision_transformer_takes_the_weights_of_timm(tmp_path):
    theirs = timm.create_model("vit_small_patch14_dinov2").eval()
    for tensor in theirs.parameters():  # norms, biases and layer scales too
        torch.nn.init.normal_(tensor, std=0.2)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    options = {"num_queries": 4, "pretrained_backbone": str(tmp_path / "vit.safetensors")}
    vit = build("rf_detr", **options).eval().model.model.backbone.backbone

    tokens = torch.randn(1, 7, theirs.embed_dim)
    pixels = torch.randn(1, 3, 28, 42)
    with torch.no_grad():
        patches = theirs.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        assert_close(
            vit.embeddings.patch_embeddings(pixels),
            patches,
            rtol=1e-4,
            atol=1e-4,
        )
        assert_close(vit.layernorm(tokens), theirs.norm(tokens))
        for layer, block in zip(vit.encoder.layer, theirs.blocks, strict=False):
            if not layer.global_attention:  # which puts windows together before it
                assert_close(layer(tokens), block(tokens), rtol=1e-3, atol=1e-3)
    assert_close(vit.embeddings.cls_token, theirs.cls_token)
    assert_close(vit.embeddings.position_embeddings, theirs.pos_embed)
    with pytest.raises(BadInput, match="does not fit the model.*depth"):
        build("rf_detr", **options, encoder_layers=4)
