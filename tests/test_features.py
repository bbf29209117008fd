"""Feature maps of timm backbones."""

import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import BatchNormAct2d
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.backbones import leaves_stages, number_of_groups, replace_batch_norms, timm_features
from toolkit.models.detector import Detector
from toolkit.step.freezing import FrozenBatchNorm2d, freeze_prefixes

BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


def maps_of(features, side=64):
    with torch.no_grad():
        return features.eval()(torch.rand(2, 3, side, side))


@pytest.mark.parametrize("backbone", ["resnet18d", "mobilenetv3_small_050", "test_convnext", "mobilevit_xxs"])
def test_maps_have_the_strides_and_channels_that_are_promised(backbone):
    features, channels = timm_features(backbone, strides=(8, 32))
    maps = maps_of(features)
    assert [tuple(m.shape) for m in maps] == [(2, channels[0], 8, 8), (2, channels[1], 2, 2)]


def test_images_are_normalised_as_the_weights_of_imagenet_expect():
    assert (Detector.mean, Detector.std) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def test_the_deepest_map_of_a_stride_is_taken_and_channels_come_first():
    features, _ = timm_features("xcit_nano_12_p16_224", strides=(16,))  # all its blocks have stride 16
    blocks = timm.create_model("xcit_nano_12_p16_224", features_only=True).feature_info.reduction()
    assert features.feature_info.out_indices == (len(blocks) - 1,)
    features, channels = timm_features("swin_tiny_patch4_window7_224", strides=(8, 16))  # channels last inside
    assert [m.shape[1] for m in maps_of(features, side=224)] == channels == [192, 384]


def test_a_plain_transformer_gets_a_pyramid_and_weights_of_other_patches_are_resampled(tmp_path):
    features, channels = timm_features("test_vit", strides=(4, 8, 16, 32), norm="group")
    with torch.no_grad():
        maps = features.eval()(torch.rand(1, 3, 64, 96))
    assert [tuple(m.shape) for m in maps] == [(1, 16, 16, 24), (1, 32, 8, 12), (1, 64, 4, 6), (1, 64, 2, 3)]
    assert channels == [16, 32, 64, 64] and not leaves_stages(features)
    loss = sum(m.square().mean() for m in features.train()(torch.rand(2, 3, 64, 64)))
    loss.backward()
    assert all(parameter.grad is not None for parameter in features.parameters())
    published = timm.create_model("test_vit", patch_size=14, img_size=518)  # as DINOv2
    torch.save(published.state_dict(), tmp_path / "vit.pth")
    features, _ = timm_features("test_vit", strides=(8,), pretrained_backbone=str(tmp_path / "vit.pth"))
    own = features.vit.model
    assert own.blocks[0].mlp.fc1.weight.equal(published.blocks[0].mlp.fc1.weight)
    assert own.pos_embed.shape[1] - 1 == (160 // 16) ** 2 and own.patch_embed.proj.weight.shape[-1] == 16
    constant = torch.ones(1, 3, 160, 160)  # a resampled patch answers a constant image as the original does
    for model, image in ((own, constant), (published, torch.ones(1, 3, 518, 518))):
        model.patch_embed.strict_img_size = False
        model.answer = model.patch_embed.proj(image)[0, :, 0, 0]
    torch.testing.assert_close(own.answer, published.answer, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("backbone", "norm", "kind"), [
    ("resnet18d", "batch", nn.BatchNorm2d),
    ("resnet18d", "frozen", FrozenBatchNorm2d),
    ("mobilenetv3_small_050", "frozen", FrozenBatchNorm2d),
    ("mobilenetv3_small_050", "group", nn.GroupNorm),
    ("resnet18d", "sync", nn.SyncBatchNorm),
])  # fmt: skip
def test_every_batch_norm_becomes_what_norm_says(backbone, norm, kind):
    features, _ = timm_features(backbone, strides=(8, 16), norm=norm)
    norms = [m for m in features.modules() if isinstance(m, (*BATCH_NORMS, FrozenBatchNorm2d, nn.GroupNorm))]
    assert norms and all(isinstance(m, kind) for m in norms)
    assert norm != "frozen" or all(m.weight.all() for m in norms), "residual branches are not shut"
    assert all(torch.isfinite(m).all() and m.std() > 0 for m in maps_of(features))


def test_a_group_norm_keeps_weights_activation_and_mode():
    norm = BatchNormAct2d(24, eps=1e-3, act_layer=nn.Hardswish).eval()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(2, 24, 5, 5)
    group = replace_batch_norms(norm)
    expected = nn.functional.hardswish(nn.functional.group_norm(x, 12, norm.weight, norm.bias, 1e-3))
    torch.testing.assert_close(group(x), expected)
    assert not group.training and list(group.state_dict()) == ["weight", "bias"]
    assert [number_of_groups(channels) for channels in (1, 2, 7, 16, 24, 64, 256)] == [1, 1, 1, 8, 12, 32, 32]


def test_what_a_file_gives_is_said_and_without_a_whole_part_it_is_refused(tmp_path, capsys):
    state, file = timm.create_model("resnet10t").state_dict(), tmp_path / "weights.pth"

    def taken_from(tensors):
        torch.save({"state_dict_ema": {f"module.{key}": value for key, value in tensors.items()}}, file)
        features, _ = timm_features("resnet10t", strides=(8,), pretrained_backbone=str(file))
        return features.state_dict(), capsys.readouterr().out

    kept, said = taken_from(state)
    assert all(torch.equal(kept[key], state[key]) for key in kept)
    assert "taken 40 of 40 tensors\n" in said  # the classifier and the stages behind the map are no fault

    renamed = {key.replace("layer2.0.conv1", "layer2.0.first"): value for key, value in state.items()}
    renamed["layer1.0.conv1.weight"] = torch.zeros(5, 3, 3, 3)
    kept, said = taken_from(renamed)
    assert torch.equal(kept["layer2.0.conv2.weight"], state["layer2.0.conv2.weight"])
    assert "taken 38 of 40 tensors; 1 missing: layer2.0.conv1.weight; 1 unused: layer2.0.first.weight" in said
    assert "1 of another shape: layer1.0.conv1.weight (5, 3, 3, 3) instead of (64, 64, 3, 3)" in said

    for tensors, words in [
        ({key.replace("layer2", "stage2"): value for key, value in state.items()}, r"no weight of layer2\.0 of"),
        ({f"encoder.{key}": value for key, value in state.items()}, "no weight of conv1.0.*taken 0 of 40.*unused: enc"),
    ]:
        with pytest.raises(BadInput, match=words):
            taken_from(tensors)
    torch.save({"features.0.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(BadInput, match="not those of timm's 'test_convnext'|no weight of stem"):
        timm_features("test_convnext", strides=(8,), pretrained_backbone=str(file))
    with pytest.raises(BadInput, match='no weight of conv1.*of "torchvision\'s resnet50"'):
        build_detector("fasterrcnn_resnet50_fpn", class_names=["a"], pretrained_backbone=str(file))


@pytest.mark.parametrize("backbone", ["tf_efficientnet_lite0", "efficientnet_b0"])
def test_files_of_efficientnet_pytorch_are_loaded(backbone, tmp_path, capsys):
    """The publisher's modules, by their order in its `model.py`; both list their tensors in the order of the layers."""
    weights = timm.create_model(backbone).state_dict()
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    layers = ["_conv_stem", "_bn0"]
    for block in range(16):
        wide = ["_expand_conv", "_bn0"] if block else []
        se = ["_se_reduce", "_se_expand"] if backbone == "efficientnet_b0" else []
        inner = [*wide, "_depthwise_conv", "_bn1", *se, "_project_conv", "_bn2"]
        layers += [f"_blocks.{block}.{layer}" for layer in inner]
    layers += ["_conv_head", "_bn1", "_fc"]
    biased = ("_fc", "_se_reduce", "_se_expand")
    parts = [norm if "_bn" in x else ("weight", "bias") if x.endswith(biased) else ("weight",) for x in layers]
    names = [f"{layer}.{part}" for layer, own in zip(layers, parts, strict=True) for part in own]
    file = tmp_path / "published.pth"
    torch.save(dict(zip(names, weights.values(), strict=True)), file)
    features, _ = timm_features(backbone, strides=(8, 16, 32), pretrained_backbone=str(file))
    loaded = features.state_dict()
    assert len(loaded) > 240 and all(tensor.equal(weights[name]) for name, tensor in loaded.items())
    assert "missing" not in capsys.readouterr().out


def test_a_file_that_holds_no_weights_is_one_sentence(tmp_path):
    torch.save({"weight": torch.zeros(100)}, tmp_path / "cut.pth")
    whole = (tmp_path / "cut.pth").read_bytes()
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save(nn.Linear(1, 1), tmp_path / "module.pth")
    junk = {"cut.pth": whole[:-200], "empty.pth": b"", "dot.pth": b".", "stop.pth": b"\x80\x02.",
            "text.pth": b"hello world\n", "page.pth": b"<html>404</html>", "bytes.pth": bytes(range(256)),
            "head.safetensors": b"hi"}  # fmt: skip
    for name, content in junk.items():
        (tmp_path / name).write_bytes(content)
    words = {"list.pth": "holds no tensors by name", "module.pth": "holds objects beside tensors",
             "head.safetensors": "not a safetensors file"}  # fmt: skip
    for name in [*junk, "list.pth", "module.pth"]:
        with pytest.raises(BadInput, match=words.get(name, "cannot be read as weights of PyTorch")) as refused:
            timm_features("resnet10t", strides=(8,), pretrained_backbone=str(tmp_path / name))
        assert str(refused.value).startswith(f"model.pretrained_backbone {tmp_path / name}: ")
        assert "network" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("options", "words"), [
    ({"backbone": "resnet18dd"}, "similar names"),
    ({"strides": (8, 64)}, r"strides \[2, 4, 8, 16, 32\]"),
    ({"strides": (16, 8)}, "increasing"),
    ({"strides": ()}, "increasing"),
    ({"norm": "layer"}, "batch, frozen, group, sync"),
    ({"pretrained_backbone": "no/such/file"}, "does not exist"),
])  # fmt: skip
def test_faults_are_bad_input(options, words):
    with pytest.raises(BadInput, match=words):
        timm_features(**{"backbone": "resnet18d", "strides": (8, 16), **options})


def test_a_frozen_transformer_stays_as_it_is_below_a_detector_that_learns():
    detector = build_detector("yolov3", class_names=["a"], backbone="test_vit", head_channels=[8, 8, 8])
    freeze_prefixes(detector, ["backbone.vit"])
    trained = [name for name, p in detector.named_parameters() if p.requires_grad]
    assert any(name.startswith("backbone.scales") for name in trained) and not any(".vit." in name for name in trained)
    assert not detector.train().backbone.vit.training and detector.backbone.scales.training
