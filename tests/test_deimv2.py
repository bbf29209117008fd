"""DEIMv2 as its own program has it: sizes, files through the public path, and `final/`."""

import pytest
import torch
from published import published, with_small_sizes
from safetensors.torch import save_file
from small_detectors import CATEGORIES, batch_of, build, run, small, wake
from transformers import Deimv2Config, Deimv2ForObjectDetection

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.deimv2 import as_its_program_
from toolkit.detectors.detr.sizes import DEIMV2_SIZES
from toolkit.detectors.detr.weights_deimv2 import DEIMV2, vit_names
from toolkit.detectors.detr.weights_rf_detr import RF_DETR
from toolkit.models.final import load_detector_folder
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.models.weights.weight_files import fitting
from toolkit.tools.predict.open import open_own_detector

# Numbers that learn in the models of configs/deimv2, built with the program; L and X less the masked biases of keys.
LEARNING = {"atto": 508983, "femto": 983943, "pico": 1539537, "n": 3600419, "s": 9779836, "m": 18357748, "l": 32546220,
            "x": 51206742}  # fmt: skip


@pytest.mark.parametrize("size", DEIMV2_SIZES)
def test_a_size_has_as_many_weights_as_the_program_s(size):
    with torch.device("meta"):
        config = Deimv2Config.from_dict(DEIMV2_SIZES[size] | {"num_labels": 80})
        model = Deimv2ForObjectDetection(config)
        as_its_program_(model)
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == LEARNING[size]


def test_a_size_trains_and_is_rebuilt_from_its_settings():
    detector = build("deimv2", size="atto").train()
    losses, _ = run(detector, batch_of([2, 0, 1], (320, 320)))
    assert set(losses) == set(detector.loss_names)
    sum(losses.values()).backward()
    silent = [name for name, weight in detector.named_parameters() if weight.requires_grad and weight.grad is None]
    assert silent == [], "every weight takes part"
    settings = detector.resolved_options()
    again = build(settings.pop("architecture"), **settings)
    assert str(again) == str(detector) and again.original and again.options["size"] == "atto"


def test_the_program_s_decoder_is_saved_and_loaded_in_our_own_format(tmp_path):
    detector = wake(small("deimv2", original=True)).eval()
    detector.save_final(tmp_path, CATEGORIES)
    again, _, _ = load_detector_folder(tmp_path)
    batch = batch_of([0, 0], (64, 64))
    with torch.no_grad():
        ours, theirs = detector(batch.images, batch.sizes), again(batch.images, batch.sizes)
        transformers_ = small("deimv2")
        transformers_.load_state_dict(detector.state_dict(), strict=False)
        other = transformers_.eval()(batch.images, batch.sizes)
    assert ours["logits"].equal(theirs["logits"]) and ours["boxes"].equal(theirs["boxes"])
    assert (ours["logits"] - other["logits"]).abs().max() > 0.1  # transformers computes something else


def test_files_of_the_trainer_and_of_the_hub_are_opened(tmp_path, monkeypatch):
    with_small_sizes(monkeypatch)
    state, _ = published("deimv2_atto", {"num_points_scale": torch.tensor([0.25] * 4 + [0.5] * 2),
                                         "up": torch.tensor([0.5]), "reg_scale": torch.tensor([4.0])})  # fmt: skip
    other = {name: tensor + 1 for name, tensor in state.items()}
    torch.save(
        {"date": "x", "last_epoch": 3, "model": other, "ema": {"module": state, "updates": 7}}, tmp_path / "a.pth"
    )
    save_file(state, tmp_path / "model.safetensors")
    files = [open_pretrained(str(tmp_path / name)) for name in ("a.pth", "model.safetensors")]
    for file in files:
        assert file.architecture == "deimv2" and file.options["original"] and len(file.class_names) == 80
        assert file.size == {"height": 96, "width": 96} and file.options["size"] == "atto"
    assert all(tensor.equal(files[1].tensors[name]) for name, tensor in files[0].tensors.items())
    opened = open_own_detector(tmp_path / "model.safetensors")
    assert opened.size == files[0].size and opened.detector.original


def test_the_file_of_a_backbone_has_the_names_of_the_whole_model_s():
    state, _ = published("deimv2_s")
    below, ours = "backbone.dinov3._model.", "model.model.conv_encoder.backbone."
    alone = vit_names({name.removeprefix(below): tensor for name, tensor in state.items() if name.startswith(below)})
    whole = {n.removeprefix(ours): tensor for n, tensor in DEIMV2.ours_from(state).items() if n.startswith(ours)}
    assert alone.keys() == whole.keys() and all(tensor.equal(whole[name]) for name, tensor in alone.items())


def test_what_does_not_fit_is_said():
    with pytest.raises(BadInput, match=r"model.size: 'xl' is not one of atto, femto"):
        build("deimv2", size="xl")
    with pytest.raises(BadInput, match=r"publisher's file of the backbone of DEIMv2 m: vittplus_distill.pt"):
        build("deimv2", size="m", pretrained_backbone=True)
    with pytest.raises(BadInput, match=r"model.pretrained_backbone: the model comes with a backbone of its own"):
        build("deimv2", size="n", pretrained_backbone=True)
    with pytest.raises(BadInput, match=r"model.size s: the pretrained model has another one"):
        build("deimv2", size="s", source_config=DEIMV2_SIZES["n"])
    state, _ = published("rfdetr_nano")
    with pytest.raises(BadInput, match=r"rf-detr-large.pth: the large RF-DETR of 2025 with two feature maps"):
        fitting(RF_DETR, state | {"backbone.0.projector.stages.1.0.cv1.conv.weight": None}, "rf-detr-large.pth")
