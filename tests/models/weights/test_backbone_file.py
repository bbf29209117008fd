"""Weights of a backbone from a file: what was taken of it is said, and a file of something else is refused."""

import pytest
import timm
import torch
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.backbones import timm_features


def taken_from(file, backbone: str = "resnet10t", strides=(8,)) -> nn.Module:
    features, _ = timm_features(backbone, strides=strides, pretrained_backbone=str(file))
    return features


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return timm.create_model("resnet10t").state_dict()


@pytest.fixture
def saved(tmp_path):
    """`saved(tensors)`: their file, in a wrapping and under a prefix that publishers use."""

    def save(tensors):
        torch.save({"state_dict_ema": {f"module.{name}": tensor for name, tensor in tensors.items()}}, tmp_path / "w")
        return tmp_path / "w"

    return save


def test_stages_behind_the_maps_and_the_classifier_are_not_missed(state, saved, capsys):
    kept = taken_from(saved(state)).state_dict()
    assert all(tensor.equal(state[name]) for name, tensor in kept.items())
    assert "taken 40 of 40 tensors\n" in capsys.readouterr().out


def test_what_is_missing_unused_or_of_another_shape_is_said(state, saved, capsys):
    renamed = {name.replace("layer2.0.conv1", "layer2.0.first"): tensor for name, tensor in state.items()}
    renamed["layer1.0.conv1.weight"] = torch.zeros(5, 3, 3, 3)
    kept = taken_from(saved(renamed)).state_dict()
    assert kept["layer2.0.conv2.weight"].equal(state["layer2.0.conv2.weight"])
    said = capsys.readouterr().out
    assert "taken 38 of 40 tensors; 1 missing: layer2.0.conv1.weight; 1 unused: layer2.0.first.weight" in said
    assert "1 of another shape: layer1.0.conv1.weight (5, 3, 3, 3) instead of (64, 64, 3, 3)" in said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("layer2", "stage2", r"no weight of layer2\.0 of"), ("", "encoder.", "no weight of conv1.0.*taken 0 of 40")],
)
def test_a_file_without_a_whole_part_is_refused(state, saved, old, new, words):
    renamed = {name.replace(old, new, 1): tensor for name, tensor in state.items()}
    with pytest.raises(BadInput, match=words):
        taken_from(saved(renamed))


def test_a_file_of_another_network_is_refused(saved):
    file = saved({"features.0.weight": torch.zeros(2, 2)})
    with pytest.raises(BadInput, match="not those of timm's 'test_convnext'|no weight of stem"):
        taken_from(file, "test_convnext")
    with pytest.raises(BadInput, match='no weight of conv1.*of "torchvision\'s resnet50"'):
        build_detector("fasterrcnn_resnet50_fpn", class_names=["a"], pretrained_backbone=str(file))


@pytest.mark.parametrize("backbone", ["tf_efficientnet_lite0", "efficientnet_b0"])
def test_files_of_efficientnet_pytorch_are_loaded(backbone, tmp_path, capsys):
    """The publisher's modules, by their order in its `model.py`; both list their tensors in the order of the layers."""
    weights = timm.create_model(backbone).state_dict()
    squeeze = ["_se_reduce", "_se_expand"] if backbone == "efficientnet_b0" else []
    layers = ["_conv_stem", "_bn0"]
    for block in range(16):
        wide = ["_expand_conv", "_bn0"] if block else []
        inner = [*wide, "_depthwise_conv", "_bn1", *squeeze, "_project_conv", "_bn2"]
        layers += [f"_blocks.{block}.{layer}" for layer in inner]
    layers += ["_conv_head", "_bn1", "_fc"]
    names = []
    for layer in layers:
        parts = ["weight"]
        if "_bn" in layer:
            parts = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
        elif layer.endswith(("_fc", "_se_reduce", "_se_expand")):
            parts = ["weight", "bias"]
        names += [f"{layer}.{part}" for part in parts]
    torch.save(dict(zip(names, weights.values(), strict=True)), tmp_path / "published.pth")
    loaded = taken_from(tmp_path / "published.pth", backbone, (8, 16, 32)).state_dict()
    assert len(loaded) > 240
    assert all(tensor.equal(weights[name]) for name, tensor in loaded.items())
    assert "missing" not in capsys.readouterr().out


def test_patches_of_another_size_are_resampled(tmp_path):
    """A resampled patch answers a constant image as the original does."""
    published = timm.create_model("test_vit", patch_size=14, img_size=518)  # as DINOv2
    torch.save(published.state_dict(), tmp_path / "vit.pth")
    own = taken_from(tmp_path / "vit.pth", "test_vit").vit.model
    assert own.blocks[0].mlp.fc1.weight.equal(published.blocks[0].mlp.fc1.weight)
    assert own.pos_embed.shape[1] - 1 == (160 // 16) ** 2
    assert own.patch_embed.proj.weight.shape[-1] == 16
    answers = [model.patch_embed.proj(torch.ones(1, 3, 32, 32))[0, :, 0, 0] for model in (own, published)]
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


UNREADABLE = "cannot be read as weights of PyTorch"
JUNK = {
    "empty.pth": (b"", UNREADABLE),
    "stop.pth": (b"\x80\x02.", UNREADABLE),
    "text.pth": (b"hello world\n", UNREADABLE),
    "head.safetensors": (b"hi", "not a safetensors file"),
    "list.pth": ([1, 2], "holds no tensors by name"),
    "module.pth": (nn.Linear(1, 1), "holds other objects than tensors"),
    "cut.pth": ({"weight": torch.zeros(100)}, UNREADABLE),
}


@pytest.mark.parametrize("name", JUNK)
def test_a_file_that_holds_no_weights_is_one_sentence(name, tmp_path):
    content, words = JUNK[name]
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    if name == "cut.pth":
        file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(BadInput, match=words) as refused:
        taken_from(file)
    [problem] = refused.value.problems
    assert problem.startswith(f"model.pretrained_backbone {file}: ")
    assert "network" not in problem
    assert "\n" not in problem
