"""LW-DETR as its publisher's program has it: sizes, losses, and files through the public path.

`assets/weights/lwdetr_*.npz` were computed with Atten4Vis/LW-DETR (d5e6e6c), whose deformable attention was its own
function in PyTorch: tiny and large with 6 queries in 3 groups, images of 64 x 128 pixels. `losses`, in training,
unweighted, are of `BOXES` and `LABELS`.
"""

import json
from argparse import Namespace

import pytest
import torch
from published import pixels, published
from small_detectors import TINY_LW_DETR, batch_of, build, run, small

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.sizes import LW_DETR_SIZES
from toolkit.detectors.detr.weights_lw_detr import LW_DETR
from toolkit.models.weights.names import coco_by_id
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.models.weights.weight_files import fitting
from toolkit.tools.predict.open import open_own_detector

# Numbers that learn in the program's models for COCO.
LEARNING = {"tiny": 12052002, "small": 14557378, "medium": 28237378, "large": 46823650, "xlarge": 118033378}
BOXES = [[[0.3, 0.4, 0.4, 0.5], [0.6, 0.6, 0.2, 0.3]], [[0.5, 0.5, 0.8, 0.6]]]  # cxcywh, fractions of the image
LABELS = [[3, 70], [0]]
HW = (64, 128)


@pytest.mark.parametrize("size", LW_DETR_SIZES)
def test_a_size_has_as_many_weights_as_the_program_s(size):
    with torch.device("meta"):
        detector = build("lw_detr", size=size, class_names=coco_by_id(0))
    assert sum(weight.numel() for weight in detector.parameters() if weight.requires_grad) == LEARNING[size]
    strides = {"large": [8, 32], "xlarge": [8, 32]}.get(size, [16])
    assert detector.resolved_options()["size"] == size and detector.map_taps()[0].strides == strides


def target(boxes, labels) -> dict:
    height, width = HW
    centre, half = (torch.tensor(boxes) * torch.tensor([width, height, width / 2, height / 2])).split(2, dim=1)
    return {"boxes": torch.cat([centre - half, centre + half], 1), "labels": torch.tensor(labels),
            "size": torch.tensor(HW)}  # fmt: skip


@pytest.mark.parametrize("size", ["tiny", "large"])
def test_losses_are_those_of_the_program(size):
    state, expected = published(f"lwdetr_{size}")
    found, ours = fitting(LW_DETR, state, f"LWDETR_{size}_60e_coco.pth")
    detector = build("lw_detr", class_names=found.class_names, **found.options).train()
    detector.load_state_dict(ours)
    targets = [target(*each) for each in zip(BOXES, LABELS, strict=True)]
    outputs = detector(pixels(2, 3, *HW), torch.tensor([HW] * 2), targets)
    losses, _ = detector.criterion(outputs, targets, detector.denominators(targets))
    theirs = json.loads(expected["losses"].tobytes())
    assert theirs.keys() == losses.keys()
    for name, value in theirs.items():
        assert losses[name].item() == pytest.approx(value, rel=1e-5), name


def test_a_size_trains_and_is_rebuilt_from_its_settings():
    detector = build("lw_detr", size="large", num_queries=20).train()
    losses, _ = run(detector, batch_of([2, 0], (64, 64)))
    assert set(losses) == set(detector.loss_names)
    sum(losses.values()).backward()
    assert not [name for name, weight in detector.named_parameters() if weight.grad is None]
    settings = detector.resolved_options()
    again = build(settings.pop("architecture"), **settings)
    assert str(again) == str(detector)
    assert {"size": "large", "d_model": 384, "heads": 12, "num_queries": 20}.items() <= again.options.items()


def test_the_depth_decides_which_blocks_have_windows_and_give_maps():
    other = build("lw_detr", size="tiny", encoder_layers=4, num_queries=4)
    vit = other.model.config.backbone_config
    assert vit.window_block_indices == [0, 2] and vit.out_indices == [1, 2, 3, 4]
    assert other.resolved_options()["size"] == "tiny"
    deeper = build("lw_detr", source_config=TINY_LW_DETR, encoder_layers=3).model.config.backbone_config
    assert (deeper.hidden_size, deeper.num_attention_heads, deeper.num_hidden_layers) == (24, 2, 3)
    assert deeper.window_block_indices == [0, 2] and deeper.out_indices == [1, 2, 3]


def test_the_maps_are_the_outputs_of_the_blocks_that_the_entries_count_from_1():
    """As the original takes them, which counts from 0."""
    detector = small("lw_detr").eval()
    vit = detector.model.model.backbone.backbone
    outputs = []
    for layer in vit.encoder.layer:
        layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        maps = vit(torch.rand(1, 3, *HW)).feature_maps
    assert len(maps) == len(outputs) == 2
    for of_image, of_windows in zip(maps, outputs, strict=True):
        windows = of_image.unflatten(2, (4, 1)).unflatten(4, (4, 2)).permute(0, 2, 4, 3, 5, 1).flatten(0, 2)
        assert windows.flatten(1, 2).equal(of_windows)


def test_random_weights_are_drawn_as_in_the_program():
    detector = build("lw_detr", size="tiny")
    vit = detector.model.model.backbone.backbone
    for layer in vit.encoder.layer:
        assert (layer.gamma_1 == 0.1).all() and (layer.gamma_2 == 0.1).all()
        assert not layer.attention.q_proj.bias.any() and layer.attention.k_proj.bias is None
        assert layer.intermediate.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    patches = vit.embeddings.projection.weight  # PyTorch's initial values: uniform within 1 / sqrt(16 * 16 * 3)
    assert patches.abs().max() <= 768**-0.5 and patches.std().item() == pytest.approx((3 * 768) ** -0.5, rel=0.05)
    assert not detector.model.model.reference_point_embed.weight.any()


def test_files_of_the_trainer_are_opened(tmp_path):
    state, _ = published("lwdetr_tiny")
    other = {name: tensor + 1 for name, tensor in state.items()}
    torch.save({"model": other, "ema_model": state, "epoch": 3, "args": Namespace(lr=1e-4)}, tmp_path / "a.pth")
    file = open_pretrained(str(tmp_path / "a.pth"))
    assert file.architecture == "lw_detr" and file.class_names == coco_by_id(0)
    assert file.size == {"height": 640, "width": 640}
    assert all(tensor.equal(file.tensors[name]) for name, tensor in LW_DETR.ours_from(state).items())
    opened = open_own_detector(tmp_path / "a.pth")
    assert opened.size == file.size and opened.detector.resolved_options()["size"] == "tiny"


def test_the_file_of_the_vision_transformer_is_loaded(tmp_path, capsys):
    """As in the publisher's `caev2_tiny_300e_objects365.pth`: names of the encoder, more blocks than are used."""
    below, ours = "backbone.0.encoder.", "model.model.backbone.backbone."
    state, _ = published("lwdetr_tiny")
    alone = {f"encoder.{n.removeprefix(below)}": tensor for n, tensor in state.items() if n.startswith(below)}
    deeper = {name.replace("blocks.0.", "blocks.6."): tensor for name, tensor in alone.items() if "blocks.0." in name}
    torch.save({"model": alone | deeper}, tmp_path / "caev2.pth")
    detector = build("lw_detr", size="tiny", pretrained_backbone=str(tmp_path / "caev2.pth"))
    own = detector.state_dict()
    expected = {name: tensor for name, tensor in LW_DETR.ours_from(state).items() if name.startswith(ours)}
    assert len(expected) == len(detector.model.model.backbone.backbone.state_dict())
    assert all(tensor.equal(own[name]) for name, tensor in expected.items())
    assert "missing" not in capsys.readouterr().out


def test_what_does_not_fit_is_said():
    with pytest.raises(BadInput, match=r"publisher's file of .*width 384: caev2_small_300e_objects365.pth"):
        build("lw_detr", size="medium", pretrained_backbone=True)
    with pytest.raises(BadInput, match=r"the file no/such.pth does not exist"):
        build("lw_detr", size="tiny", pretrained_backbone="no/such.pth")
    with pytest.raises(BadInput, match=r"model.size small: the pretrained model has another one"):
        build("lw_detr", source_config=TINY_LW_DETR, size="small")
    with pytest.raises(BadInput, match=r"is a detr, not a lw_detr"):
        build("lw_detr", source_config={"model_type": "detr"})
    state, _ = published("lwdetr_tiny")
    more = {name.replace("blocks.0.", "blocks.6."): tensor for name, tensor in state.items() if "blocks.0." in name}
    deeper = r"most similar is size tiny .* unused: model.model.backbone.backbone.encoder.layer.6."
    with pytest.raises(BadInput, match=deeper):
        fitting(LW_DETR, state | more, "b.pth")
