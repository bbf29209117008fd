"""Settings of the DETR family: published values, what a run resolves them to, DETR's variants, denominators."""

import json
from dataclasses import fields

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from small_detectors import (
    CATEGORIES,
    CLASSES,
    HYBRIDS,
    ON_TIMM,
    SMALL,
    TINY_RF_DETR,
    batch_of,
    build,
    hub_config,
    image_size,
    run,
    small,
    wake,
    weighted,
)
from torch import nn
from transformers import ResNetConfig

from toolkit.base.batch import normalize_images, pixel_mask
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.query_points import encode_sinusoidal_position_embedding, grid_points
from toolkit.index import DETECTORS
from toolkit.models import build_detector, options_class
from toolkit.models.final import load_detector_folder
from toolkit.run.help import field_texts

SETTINGS = SMALL | {
    "conditional_detr": {**ON_TIMM, "dilation": True},
    "rf_detr": {"encoder_layers": 4, "decoder_layers": 2, "num_queries": 6, "heads": 4},
    "lw_detr": {"size": "tiny", "decoder_layers": 2, "num_queries": 6, "heads": 4, "d_model": 64, "ffn_dim": 32},
}
FAMILY = [name for name, (module, _) in DETECTORS.items() if module.startswith("toolkit.detectors.detr.")]


def plain(value):
    return json.loads(json.dumps(value))


def assert_built_again(detector, no_value=("pretrained",)) -> dict:
    """The settings with the values that were used; DEIMv2 on a timm backbone has none of its published sizes."""
    no_value = (*no_value, "size") if detector.options["architecture"] == "deimv2" else no_value
    assert_resolved_options_build_it_again(detector, CLASSES, no_value)
    resolved = plain(detector.resolved_options())
    assert {key for key, value in resolved.items() if value is None} == set(no_value)
    assert resolved == plain(detector.options)
    again = build_detector(**resolved, class_names=CLASSES)
    assert again.model.config.to_dict() == detector.model.config.to_dict()
    assert getattr(again.set_loss, "matching_costs", None) == getattr(detector.set_loss, "matching_costs", None)
    return resolved


@pytest.mark.parametrize("name", FAMILY)
def test_help_has_a_sentence_for_every_setting_and_its_value(name):
    texts = field_texts(options_class(name))
    for field in fields(options_class(name)):
        assert texts[field.name].endswith("."), field.name
    assert options_class(name)().architecture == name and options_class(name).__doc__


def test_a_setting_that_an_architecture_does_not_use_is_not_its_own():
    for name, key in [("rf_detr", "freeze"), ("lw_detr", "backbone"), ("deformable_detr", "dilation"),
                      ("conditional_detr", "eos_coef"), ("rt_detr_v2", "depth_mult"), ("d_fine", "aux_loss"),
                      ("dab-detr", "pre_norm")]:  # fmt: skip
        with pytest.raises(BadInput, match=f"{name} has no setting model.{key}"):
            build(name, **{key: 1})


@pytest.mark.parametrize("name", FAMILY)
def test_resolved_settings_of_an_untouched_detector_are_the_published_ones(name):
    detector = build(name)
    resolved = detector.resolved_options()
    for field in fields(options_class(name)):
        if field.name not in ("mean", "std", "freeze_prefixes", "fresh_prefixes"):
            assert resolved[field.name] == field.default, field.name
    assert len(resolved["mean"]) == len(resolved["std"]) == 3


@pytest.mark.parametrize("name", list(SETTINGS))
def test_resolved_settings_and_those_of_a_source_build_the_same_model(name):
    given = {**SETTINGS[name], "num_queries": 5}
    detector = build(name, **given)
    resolved = assert_built_again(detector)
    assert {key: resolved[key] for key in given} == given

    config = plain(detector.model.config.to_dict())
    again = build(name, seed=1, source_config=config, **({"freeze": "none"} if "backbone" in given else {}))
    resolved = assert_built_again(again)
    assert {key: resolved[key] for key in given} == given
    again.model.load_state_dict(wake(detector).model.state_dict())
    batch = batch_of([1, 2], (112, 112) if name == "rf_detr" else image_size(name))
    with torch.no_grad():
        mine, theirs = (d.eval()(batch.images, batch.sizes) for d in (again, detector))
    torch.testing.assert_close(mine["boxes"], theirs["boxes"])


def test_one_setting_that_stands_for_two_entries_leaves_a_source_alone_that_tells_them_apart():
    """As published RT-DETR-v2 with ResNet-101: 384 channels in the encoder, 256 in the decoder."""
    source = hub_config("rt_detr_v2") | {"encoder_hidden_dim": 32, "decoder_in_channels": [32] * 3,
                                         "decoder_ffn_dim": 24, "decoder_attention_heads": 4}  # fmt: skip
    detector = build("rt_detr_v2", source_config=source)
    assert_built_again(detector, ("pretrained", "backbone", "d_model", "heads", "ffn_dim"))
    config = build("rt_detr_v2", source_config=source, heads=2, ffn_dim=40).model.config
    assert config.encoder_hidden_dim == 32 and config.d_model == 16 and config.decoder_attention_heads == 2
    assert config.encoder_ffn_dim == config.decoder_ffn_dim == 40


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("freeze", [None, "none"])
def test_resolved_settings_of_a_source_with_its_own_backbone(name, freeze):
    detector = build(name, source_config=plain(hub_config(name)), freeze=freeze)
    assert assert_built_again(detector, ("pretrained", "backbone"))["freeze"] == (freeze or "norms")


@pytest.mark.parametrize("name", ["detr", "conditional_detr", "deformable_detr", "dab-detr"])
def test_a_source_with_a_resnet_of_transformers(name):
    own = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 32], depths=[1, 1, 1, 1], layer_type="basic",
                       out_features=["stage2", "stage3", "stage4"]).to_dict()  # fmt: skip
    config = plain(small(name).model.config.to_dict() | {"backbone_config": own})
    trained = {}
    for freeze in (None, "norms"):
        detector = build(name, source_config=config, **({"freeze": freeze} if freeze else {}))
        assert assert_built_again(detector, ("pretrained", "backbone"))["freeze"] == (freeze or "paper")
        losses, _ = run(detector.train(), batch_of([1, 2]))
        sum(losses.values()).backward()
        trained[freeze] = {k for k, p in detector.named_parameters() if "backbone" in k and p.requires_grad}
    assert trained[None] and all(".encoder.stages." in k and ".stages.0." not in k for k in trained[None])
    assert trained[None] < trained["norms"]

    on_timm = build(name, source_config=config, backbone="test_resnet", freeze="none")
    assert on_timm.model.config.backbone_config.backbone == "test_resnet"
    for options, words in [
        ({"freeze": "none"}, "'none' is not possible.*paper or norms"),
        ({"pretrained_backbone": True}, "is not timm's"),
        ({"freeze": "everything"}, "'everything' is not one of"),
        *([({"dilation": True}, "model.dilation.*no such setting")] if name != "deformable_detr" else []),
    ]:
        with pytest.raises(BadInput, match=words):
            build(name, source_config=config, **options)


def test_a_source_s_groups_and_proportions_of_rf_detr():
    detector = build("rf_detr", source_config=TINY_RF_DETR)
    assert_built_again(detector, ("pretrained", "size"))
    assert detector.resolved_options()["heads"] == 2 and detector.resolved_options()["encoder_layers"] == 2
    odd = build("rf_detr", source_config={**TINY_RF_DETR, "decoder_cross_attention_heads": 2})
    assert_built_again(odd, ("pretrained", "heads", "size"))
    with pytest.raises(BadInput, match="model.size nano: the pretrained model has another one"):
        build("rf_detr", source_config=TINY_RF_DETR, size="nano")


def test_learned_position_embeddings_learn_and_are_saved(tmp_path):
    detector = small("detr", position_embedding="learned").train()
    assert_built_again(detector)
    table = detector.model.model.position_embedding
    assert len(table.row_embeddings.weight) == 50 and 0 <= table.row_embeddings.weight.min()
    assert 0.4 < table.column_embeddings.weight.mean() < 0.6  # uniform from 0 to 1, as in the original
    batch = batch_of([2, 1])
    optimizer = torch.optim.SGD(detector.parameters(), lr=0.1)
    for _ in range(2):
        before = table.row_embeddings.weight.detach().clone()
        losses, _ = run(detector, batch)
        optimizer.zero_grad()
        weighted(detector, losses).backward()
        optimizer.step()
        moved = (table.row_embeddings.weight != before).any(1)
        assert moved[:2].all() and not moved[2:].any()  # two rows of 32 pixels
    wake(detector).eval().save_final(tmp_path, CATEGORIES)
    assert '"learned"' in (tmp_path / "config.json").read_text()
    again = build("detr", seed=3, source_config=json.loads((tmp_path / "config.json").read_text()), freeze="none")
    again.model.load_state_dict(detector.model.state_dict())
    with torch.no_grad():
        mine, theirs = (d.eval()(batch.images, batch.sizes)["boxes"] for d in (detector, again))
    torch.testing.assert_close(mine, theirs)
    with pytest.raises(BadInput, match="model.position_embedding learned.*1664 px.*50 positions, sides of 1600"):
        detector(torch.zeros(1, 3, 32, 1664, dtype=torch.uint8), torch.tensor([[32, 1664]]))


def test_learned_position_embeddings_are_the_original_s():
    detector = small("detr", position_embedding="learned")
    table = detector.model.model.position_embedding
    column, row = table.column_embeddings.weight, table.row_embeddings.weight
    height, width = 3, 5
    found = table(torch.Size([2, 1, height, width]), column.device, column.dtype)
    # facebookresearch/detr models/position_encoding.py: columns first
    wanted = torch.cat([column[:width].repeat(height, 1, 1), row[:height, None].repeat(1, width, 1)], dim=-1)
    torch.testing.assert_close(found, wanted.permute(2, 0, 1).repeat(2, 1, 1, 1))


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
    pos = core.position_embedding(features.shape, features.device, features.dtype, padding).flatten(2).permute(2, 0, 1)
    src, padding = core.input_projection(features).flatten(2).permute(2, 0, 1), ~padding.flatten(1)
    for layer in core.encoder.layers:  # forward_pre
        src2 = layer.self_attn_layer_norm(src)
        src = src + OriginalAttention(layer.self_attn)(src2 + pos, src2 + pos, src2, padding)
        src = src + feed_forward(layer.mlp, layer.final_layer_norm(src))
    memory = core.encoder.layernorm(src)
    query_pos = core.query_position_embeddings.weight[:, None].repeat(1, len(pixels), 1)
    tgt, states = torch.zeros_like(query_pos), []
    for layer in core.decoder.layers:
        tgt2 = layer.self_attn_layer_norm(tgt)
        tgt = tgt + OriginalAttention(layer.self_attn)(tgt2 + query_pos, tgt2 + query_pos, tgt2)
        tgt2 = layer.encoder_attn_layer_norm(tgt)
        tgt = tgt + OriginalAttention(layer.encoder_attn)(tgt2 + query_pos, memory + pos, memory, padding)
        tgt = tgt + feed_forward(layer.mlp, layer.final_layer_norm(tgt))
        states.append(core.decoder.layernorm(tgt))
    return torch.stack(states).transpose(1, 2)


def pre_norm_detr(**options):
    return wake(small("detr", **{"encoder_layers": 2, "decoder_layers": 3, "pre_norm": True, **options}))


@pytest.mark.parametrize("training", [True, False])
def test_pre_norm_is_the_original_s_formula(training):
    detector = pre_norm_detr().train(training)
    batch = batch_of([1, 1], (64, 90), smaller=(40, 64))
    detector.model.model.backbone.eval()  # batch statistics would be updated in between
    pixels = normalize_images(batch.images, batch.sizes, detector.mean, detector.std)
    with torch.no_grad():
        found = detector(batch.images, batch.sizes)
        states = original_pre_norm(detector.model.model, pixels, pixel_mask(batch.sizes, pixels.shape[-2:]))
        logits, boxes = detector.model.class_labels_classifier(states), detector.model.bbox_predictor(states).sigmoid()
    torch.testing.assert_close(found["logits"], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["boxes"], boxes, rtol=1e-4, atol=1e-5)
    post_norm = pre_norm_detr(pre_norm=False).eval()
    post_norm.model.load_state_dict(detector.model.state_dict(), strict=False)
    with torch.no_grad():
        assert (post_norm(batch.images, batch.sizes)["logits"] - found["logits"]).abs().max() > 0.1


POINTS = {"d_model": 96, "heads": 4, "num_queries": 16, "query_points": True}


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_queries_look_first_around_their_points(count, pre_norm):
    """Where the first cross-attention of a new model goes, on a map of the encoder with any content."""
    core = small("detr", **{**POINTS, "num_queries": count, "pre_norm": pre_norm}).model.model
    points = grid_points(count)
    assert len(points.unique(dim=0)) == count and torch.all((points > 0) & (points < 1))
    tokens = (torch.cartesian_prod(torch.arange(8), torch.arange(8)).flip(1) + 0.5) / 8  # x, y of an 8 x 8 map
    content = core.encoder(torch.randn(1, 64, 96), spatial_position_embeddings=torch.zeros(1, 64, 96)).last_hidden_state
    attention = core.decoder.layers[0].encoder_attn
    queries = attention.q_proj(core.query_position_embeddings.weight).view(count, 4, -1)
    keys = attention.k_proj(content[0] + encode_sinusoidal_position_embedding(tokens, 48)).view(64, 4, -1)
    weights = (torch.einsum("qhd,khd->hqk", queries, keys) / 24**0.5).softmax(-1)
    distances = (points[:, None] - tokens).abs().amax(-1)  # of query and token, in parts of the image
    assert (weights * distances).sum(-1).max() < 0.2, "0.25 and more where all are looked at alike"


def test_boxes_are_told_from_the_points_and_move_with_them():
    detector, batch = small("detr", **POINTS).eval(), batch_of([2, 0, 1])
    with torch.no_grad():
        boxes = detector(batch.images, batch.sizes)["boxes"]
        torch.testing.assert_close(boxes[..., :2], grid_points(16).expand_as(boxes[..., :2]))  # before any step
        detector.query_points += 1.0
        moved = detector(batch.images, batch.sizes)["boxes"]
    torch.testing.assert_close(moved[..., :2].logit(), boxes[..., :2].logit() + 1, atol=1e-5, rtol=1e-5)


def test_points_have_the_embeddings_of_transformers():
    core = small("detr", d_model=96, heads=4).model.model
    mask = torch.ones(1, 8, 8, dtype=torch.bool)
    theirs = core.position_embedding(torch.zeros(1, 96, 8, 8).shape, "cpu", torch.float32, mask)
    tokens = (torch.cartesian_prod(torch.arange(8), torch.arange(8)).flip(1) + 1) / 8  # theirs count from 1
    ours = encode_sinusoidal_position_embedding(tokens, 48)
    torch.testing.assert_close(ours, theirs[0].flatten(1).T, atol=1e-4, rtol=0)


def test_points_need_sines_and_room_in_a_head():
    for wrong, said in (
        [("position_embedding", "learned"), "learned and 4 heads of 24"],
        [("heads", 16), "of 6 channels"],
    ):
        with pytest.raises(BadInput, match=f"model.query_points with model.position_embedding .*{said}"):
            small("detr", **POINTS | dict([wrong]))


def test_pre_norm_and_points_train_drop_out_and_are_saved_in_our_own_format(tmp_path):
    detector = pre_norm_detr(dropout=0.5, freeze="norms", query_points=True).train()
    assert_built_again(detector)
    batch = batch_of([2, 0, 1])
    first, second = (run(detector, batch)[0]["loss_ce"] for _ in range(2))
    assert first != second
    weighted(detector, run(detector, batch)[0]).backward()
    assert not [n for n, p in detector.named_parameters() if p.requires_grad and p.grad is None]
    encoder = detector.model.model.encoder
    assert encoder.layers[0].mlp.fc1.weight.abs().max() <= (6 / 64) ** 0.5  # Xavier, as without pre_norm

    detector.eval().save_final(tmp_path, CATEGORIES)
    loaded, categories, _ = load_detector_folder(tmp_path)
    with torch.no_grad():
        mine, theirs = (d(batch.images, batch.sizes)["logits"] for d in (detector, loaded))
    assert torch.equal(mine, theirs) and categories == CATEGORIES
    for own in ("pre_norm", "query_points"):
        with pytest.raises(BadInput, match="model.pre_norm, model.query_points: the pretrained model"):
            build("detr", source_config=plain(small("detr").model.config.to_dict()), **{own: True})


BY_NAME = [("nano", 2, 32), ("small", 3, 32), ("medium", 4, 32), ("base", 3, 56)]


@pytest.mark.parametrize(("size", "layers", "stride"), BY_NAME)
def test_sizes_of_rf_detr_by_name(size, layers, stride):
    """Those of roboflow/rf-detr, rfdetr/config.py; a number of layers that is given counts more."""
    detector = build("rf_detr", size=size, encoder_layers=4)
    resolved = detector.resolved_options()
    assert (resolved["size"], resolved["decoder_layers"], detector.stride) == (size, layers, stride)
    side = {"nano": 24, "small": 32, "medium": 36, "base": 37}[size]
    positions = detector.model.model.backbone.backbone.embeddings.position_embeddings
    assert positions.shape[1] == 1 + side**2
    assert build("rf_detr", size=size, encoder_layers=4, decoder_layers=1).resolved_options()["decoder_layers"] == 1
