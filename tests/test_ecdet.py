"""ECDet as its publisher's program has it: sizes, losses, files through the public path, and `final/`.

`assets/weights/ecdet_*.npz` were computed with Intellindust-AI-Lab/EdgeCrafter (706d037): S and L with three layers
of 64 channels in the ECViT, images of 96 pixels, a decoder of three layers. `losses`, in training, unweighted, without
those of the denoising queries, are of `BOXES` and `LABELS` with a tenth of the last weights of every box head.
"""

import json

import pytest
import torch
from published import pixels, published, with_small_sizes
from safetensors.torch import save_file
from small_detectors import CATEGORIES, batch_of, build, run, small, wake
from transformers import Deimv2ForObjectDetection

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.ecdet import EcdetConfig, as_ecdet_
from toolkit.detectors.detr.sizes import ECDET_SIZES
from toolkit.detectors.detr.weights_ecdet import ECDET, ecvit_names
from toolkit.models.final import load_detector_folder
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.models.weights.weight_files import fitting
from toolkit.tools.predict.open import open_own_detector

# Numbers that learn in the models of configs/ecdet, built with the program.
LEARNING = {"s": 9884100, "m": 19431500, "l": 32966108, "x": 49941980}
CONSTANTS = {"num_points_scale": torch.tensor([1 / 3] * 3 + [1 / 6] * 6 + [1 / 3] * 3), "up": torch.tensor([0.5]),
             "reg_scale": torch.tensor([4.0])}  # fmt: skip
BOXES = [[[0.3, 0.4, 0.4, 0.5], [0.6, 0.6, 0.2, 0.3]], [[0.5, 0.5, 0.8, 0.6]]]  # cxcywh, fractions of the image
LABELS = [[3, 70], [0]]
SIDE = 96


@pytest.mark.parametrize("size", ECDET_SIZES)
def test_a_size_has_as_many_weights_as_the_program_s(size):
    with torch.device("meta"):
        model = Deimv2ForObjectDetection(EcdetConfig.from_dict(ECDET_SIZES[size] | {"num_labels": 80}))
        as_ecdet_(model)
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == LEARNING[size]


def target(boxes, labels) -> dict:
    centre, half = (SIDE * torch.tensor(boxes)).split(2, dim=1)
    size = torch.tensor([SIDE, SIDE])
    return {"boxes": torch.cat([centre - half / 2, centre + half / 2], 1), "labels": torch.tensor(labels), "size": size}


@pytest.mark.parametrize("size", ["s", "l"])
def test_losses_are_those_of_the_program(size, monkeypatch):
    with_small_sizes(monkeypatch)
    state, expected = published(f"ecdet_{size}", CONSTANTS)
    for name in state:
        if "bbox_head" in name and ".layers.2." in name:
            state[name] = state[name] * 0.1
    found, ours = fitting(ECDET, state, f"ecdet_{size}.pth")
    found.options["source_config"]["num_queries"] = 6
    detector = build("ecdet", class_names=found.class_names, **found.options).train()
    detector.load_state_dict(ours, strict=False)
    targets = [target(*each) for each in zip(BOXES, LABELS, strict=True)]
    outputs = detector(pixels(2, 3, SIDE, SIDE), torch.tensor([[SIDE, SIDE]] * 2), targets)
    losses, _ = detector.criterion(outputs, targets, detector.denominators(targets))
    theirs = {name.replace("enc_0", "enc"): value for name, value in json.loads(expected["losses"].tobytes()).items()}
    assert theirs.keys() == {name for name in losses if "_dn_" not in name}
    for name, value in theirs.items():
        assert losses[name].item() == pytest.approx(value, rel=1e-4, abs=1e-6), name  # loss_ddf is a small difference


def test_a_size_trains_and_is_rebuilt_from_its_settings():
    detector = build("ecdet", size="m", num_queries=20).train()
    losses, _ = run(detector, batch_of([2, 0, 1], (64, 64)))
    assert set(losses) == set(detector.loss_names)
    sum(losses.values()).backward()
    silent = [name for name, weight in detector.named_parameters() if weight.grad is None and weight.numel()]
    assert silent == ["model.model.decoder.reg_scale", "model.model.decoder.up"], "every other weight takes part"
    settings = detector.resolved_options()
    again = build(settings.pop("architecture"), **settings)
    assert str(again) == str(detector) and again.options["size"] == "m" and again.options["d_model"] == 256


def test_it_is_saved_and_loaded_in_our_own_format(tmp_path):
    detector = wake(small("ecdet")).eval()
    detector.save_final(tmp_path, CATEGORIES)
    again, _, _ = load_detector_folder(tmp_path)
    batch = batch_of([0, 0], (64, 64))
    with torch.no_grad():
        ours, theirs = detector(batch.images, batch.sizes), again(batch.images, batch.sizes)
    assert ours["logits"].equal(theirs["logits"]) and ours["boxes"].equal(theirs["boxes"])


def test_files_of_the_trainer_and_of_the_hub_are_opened(tmp_path, monkeypatch):
    with_small_sizes(monkeypatch)
    state, _ = published("ecdet_s", CONSTANTS)
    other = {name: tensor + 1 for name, tensor in state.items()}
    torch.save({"last_epoch": 3, "model": other, "ema": {"module": state, "updates": 7}}, tmp_path / "a.pth")
    once = ("decoder.decoder.up", "decoder.decoder.reg_scale")  # safetensors has a tensor with two names under one
    save_file({name: tensor for name, tensor in state.items() if name not in once}, tmp_path / "model.safetensors")
    files = [open_pretrained(str(tmp_path / name)) for name in ("a.pth", "model.safetensors")]
    for file in files:
        assert file.architecture == "ecdet" and len(file.class_names) == 80
        assert file.size == {"height": 96, "width": 96}
    assert files[0].tensors.keys() == files[1].tensors.keys()
    assert all(tensor.equal(files[1].tensors[name]) for name, tensor in files[0].tensors.items())
    opened = open_own_detector(tmp_path / "model.safetensors")
    assert opened.size == files[0].size and opened.detector.resolved_options()["size"] == "s"


def test_the_file_of_a_backbone_is_loaded(tmp_path, capsys, monkeypatch):
    """As the publisher's `ecvitt.pth` has it: the names of the whole model's, without the prefix."""
    with_small_sizes(monkeypatch)
    below, ours = "backbone.backbone.", "model.model.conv_encoder.backbone."
    state, _ = published("ecdet_s", CONSTANTS)
    alone = {name.removeprefix(below): tensor for name, tensor in state.items() if name.startswith(below)}
    torch.save(alone, tmp_path / "ecvit.pth")
    found, weights = fitting(ECDET, state, "ecdet_s.pth")
    source = found.options["source_config"]
    detector = build("ecdet", source_config=source, pretrained_backbone=str(tmp_path / "ecvit.pth"))
    whole = {n.removeprefix(ours): tensor for n, tensor in weights.items() if n.startswith(ours)}
    assert ecvit_names(alone).keys() == whole.keys()
    own = detector.state_dict()
    assert all(tensor.equal(own[ours + name]) for name, tensor in whole.items())
    assert "missing" not in capsys.readouterr().out


def test_what_does_not_fit_is_said():
    with pytest.raises(BadInput, match=r"model.size: 'xl' is not one of s, m, l, x"):
        build("ecdet", size="xl")
    with pytest.raises(BadInput, match=r"publisher's file of the backbone of ECDet m: ecvittplus.pth"):
        build("ecdet", size="m", pretrained_backbone=True)
    with pytest.raises(BadInput, match=r"model.size s: the pretrained model has another one"):
        build("ecdet", size="s", source_config=ECDET_SIZES["m"])
    with pytest.raises(BadInput, match=r"ecdet: the weights are of a 'deimv2' model"):
        build("ecdet", source_config={**ECDET_SIZES["s"], "model_type": "deimv2"})
    with pytest.raises(BadInput, match=r"ecdet has no setting model.backbone"):
        build("ecdet", backbone="resnet18")
    state, _ = published("ecdet_s", CONSTANTS)
    with pytest.raises(BadInput, match=r"ecseg_s.pth: an ECSeg, which has masks"):
        fitting(ECDET, state | {"decoder.decoder.segmentation_head.bias": torch.zeros(1)}, "ecseg_s.pth")
