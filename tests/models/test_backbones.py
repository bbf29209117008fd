"""Feature maps of timm backbones: their strides, their norms, and the pyramid of plain transformers."""

import pytest
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import BatchNormAct2d
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.backbones import leaves_stages, number_of_groups, replace_batch_norms, timm_features
from toolkit.models.detector import Detector
from toolkit.step.freezing import FrozenBatchNorm2d, freeze_prefixes

NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, FrozenBatchNorm2d, nn.GroupNorm)


def maps_of(features, hw=(64, 64)):
    with torch.no_grad():
        return features.eval()(torch.rand(2, 3, *hw))


def shapes(maps) -> list[tuple]:
    return [tuple(each.shape[1:]) for each in maps]


@pytest.mark.parametrize("backbone", ["resnet18d", "mobilenetv3_small_050", "test_convnext", "mobilevit_xxs"])
def test_maps_have_the_promised_strides_and_channels(backbone):
    features, (first, second) = timm_features(backbone, strides=(8, 32))
    assert shapes(maps_of(features)) == [(first, 8, 8), (second, 2, 2)]


def test_images_are_normalised_as_the_weights_of_imagenet_expect():
    assert (Detector.mean, Detector.std) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def test_the_deepest_map_of_a_stride_is_taken():
    features, _ = timm_features("xcit_nano_12_p16_224", strides=(16,))
    assert features.feature_info.out_indices == (2,)  # the last of three maps of this stride


def test_channels_come_first():
    features, channels = timm_features("swin_tiny_patch4_window7_224", strides=(8, 16))  # channels last inside
    assert channels == [192, 384]
    assert shapes(maps_of(features, (224, 224))) == [(192, 28, 28), (384, 14, 14)]


def test_a_plain_transformer_gets_a_pyramid():
    features, channels = timm_features("test_vit", strides=(4, 8, 16, 32), norm="group")
    assert channels == [16, 32, 64, 64]
    assert shapes(maps_of(features, (64, 96))) == [
        (16, 16, 24),
        (32, 8, 12),
        (64, 4, 6),
        (64, 2, 3),
    ]
    assert not leaves_stages(features)
    loss = sum(each.square().mean() for each in features.train()(torch.rand(2, 3, 64, 64)))
    loss.backward()
    assert all(parameter.grad is not None for parameter in features.parameters())


def test_a_frozen_transformer_stays_as_it_is_below_a_detector_that_learns():
    detector = build_detector(
        "yolov3",
        class_names=["a"],
        backbone="test_vit",
        head_channels=[8, 8, 8],
    )
    freeze_prefixes(detector, ["backbone.vit"])
    trained = [name for name, parameter in detector.named_parameters() if parameter.requires_grad]
    assert any(name.startswith("backbone.scales") for name in trained)
    assert not any(".vit." in name for name in trained)
    assert not detector.train().backbone.vit.training


@pytest.mark.parametrize(
    ("backbone", "norm", "kind"),
    [
        ("resnet18d", "batch", nn.BatchNorm2d),
        ("resnet18d", "frozen", FrozenBatchNorm2d),
        ("mobilenetv3_small_050", "frozen", FrozenBatchNorm2d),
        ("mobilenetv3_small_050", "group", nn.GroupNorm),
        ("resnet18d", "sync", nn.SyncBatchNorm),
    ],
)
def test_every_batch_norm_becomes_what_norm_says(backbone, norm, kind):
    features, _ = timm_features(backbone, strides=(8, 16), norm=norm)
    norms = [module for module in features.modules() if isinstance(module, NORMS)]
    assert norms
    assert all(isinstance(module, kind) for module in norms)
    if norm == "frozen":  # residual branches are not shut
        assert all(module.weight.all() for module in norms)
    assert all(each.std() > 0 for each in maps_of(features))


def test_a_group_norm_keeps_weights_activation_and_mode():
    norm = BatchNormAct2d(24, eps=1e-3, act_layer=nn.Hardswish).eval()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(2, 24, 5, 5)
    expected = nn.functional.hardswish(
        nn.functional.group_norm(
            x,
            12,
            norm.weight,
            norm.bias,
            1e-3,
        )
    )
    group = replace_batch_norms(norm)
    torch.testing.assert_close(group(x), expected)
    assert not group.training
    assert list(group.state_dict()) == ["weight", "bias"]
    assert [number_of_groups(channels) for channels in (1, 2, 7, 16, 64, 256)] == [1, 1, 1, 8, 32, 32]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backbone": "resnet18dd"}, "similar names"),
        ({"strides": (8, 64)}, r"strides \[2, 4, 8, 16, 32\]"),
        ({"strides": (16, 8)}, "increasing"),
        ({"strides": ()}, "increasing"),
        ({"norm": "layer"}, "batch, frozen, group, sync"),
        ({"pretrained_backbone": "no/such/file"}, "does not exist"),
    ],
)
def test_faults_are_bad_input(options, words):
    with pytest.raises(BadInput, match=words):
        timm_features(**{"backbone": "resnet18d", "strides": (8, 16), **options})
