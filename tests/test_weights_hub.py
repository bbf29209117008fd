"""Weights of the hub with the default command: a local folder with its config.json, two steps, new are class rows only.

    python -m pytest tests/test_weights_hub.py
"""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForObjectDetection

from scripts import train_detr
from toolkit.command_line import parse_config
from toolkit.errors import BadInput
from toolkit.models.start import start_detector
from toolkit.models.weights.class_names import COCO_80, coco_by_id

RESNET = {"model_type": "rt_detr_resnet", "layer_type": "basic", "depths": [1, 1, 1, 1], "embedding_size": 8,
          "hidden_sizes": [8, 16, 24, 32], "out_indices": [2, 3, 4]}  # fmt: skip
HGNET = {"model_type": "hgnet_v2", "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 24, 32],
         "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [16, 24, 32, 40], "hidden_sizes": [16, 24, 32, 40],
         "stage_num_blocks": [1, 1, 1, 1], "depths": [1, 1, 1, 1], "stage_numb_of_layers": [2, 2, 2, 2],
         "use_learnable_affine_block": True, "out_indices": [2, 3, 4]}  # fmt: skip
TIMM = {"model_type": "timm_backbone", "backbone": "resnet10t", "out_indices": [4], "freeze_batch_norm_2d": True}
LAYERS = {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 7, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
SMALL = {**LAYERS, "d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
REAL_TIME = {**SMALL, "encoder_hidden_dim": 32, "decoder_in_channels": [32] * 3, "num_denoising": 10}
FOLDERS = {  # architecture: entries of config.json as its hub models have them, in a small size
    "detr": {**SMALL, "backbone_config": TIMM},
    "conditional_detr": {**SMALL, "backbone_config": TIMM},
    "deformable_detr": {**SMALL, "two_stage": False, "backbone_config": {**TIMM, "out_indices": [2, 3, 4]}},
    "dab-detr": {**LAYERS, "hidden_size": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                 "backbone_config": TIMM},
    "rt_detr_v2": {**REAL_TIME, "backbone_config": RESNET, "encoder_in_channels": [16, 24, 32]},
    "d_fine": {**REAL_TIME, "backbone_config": HGNET, "encoder_in_channels": [24, 32, 40],
               "decoder_n_points": [3, 6, 3]},
    "deimv2": {**REAL_TIME, "backbone_config": HGNET, "encoder_in_channels": [24, 32, 40]},
    "rf_detr": {"backbone_config": {"model_type": "rf_detr_dinov2", "hidden_size": 32, "num_attention_heads": 2,
                                    "image_size": 64, "patch_size": 8, "num_windows": 2, "num_hidden_layers": 2,
                                    "out_indices": [1, 2]},
                "d_model": 32, "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 4,
                "decoder_layers": 2, "decoder_ffn_dim": 32, "num_queries": 7, "group_detr": 3},
    "yolos": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
              "image_size": [128, 128], "num_detection_tokens": 7},
}  # fmt: skip


@pytest.mark.parametrize("architecture", FOLDERS)
def test_a_hub_model_trains_with_the_default_command(architecture, tmp_path):
    torch.manual_seed(0)
    entries, kind = dict(FOLDERS[architecture]), CONFIG_MAPPING[architecture]
    classes = COCO_80 if architecture in ("rt_detr_v2", "d_fine", "deimv2") else coco_by_id(0)
    if "backbone_config" in entries:
        inner = dict(entries["backbone_config"])
        entries["backbone_config"] = CONFIG_MAPPING[inner.pop("model_type")](**inner)
    config = kind(**entries, id2label=dict(enumerate(classes)), label2id={name: i for i, name in enumerate(classes)})
    AutoModelForObjectDetection.from_config(config).save_pretrained(tmp_path / "hub")
    argv = ["--model.pretrained", str(tmp_path / "hub"), "--model.architecture", architecture]
    if architecture == "rt_detr_v2":
        argv = argv[:2]  # the script's own
    options = parse_config(train_detr.Config, argv, train_detr.DEFAULT_CONFIG).model
    assert set(options.given) <= {"pretrained", "architecture"}
    (tmp_path / "run").mkdir()
    detector = start_detector(options, ["person", "hexagon", "dog"], tmp_path / "run", resumed_from=None, say=print)
    lines = (tmp_path / "run" / "pretrained.txt").read_text().splitlines()[1:]
    unmatched = [line for line in lines if line.startswith(("new", "unused"))]
    assert not unmatched, unmatched
    assert any("rows of 2 of 3 classes: person, dog" in line for line in lines)

    images, sizes = torch.randint(0, 256, (2, 3, 128, 128), dtype=torch.uint8), torch.tensor([[128, 128]] * 2)
    targets = [{"boxes": torch.tensor([[10.0, 10, 60, 70], [50, 20, 120, 90]]), "labels": torch.tensor([0, 2]),
                "iscrowd": torch.zeros(2), "size": torch.tensor([128, 128])} for _ in range(2)]  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in detector.parameters() if p.requires_grad], lr=1e-4)
    detector.train()
    for _ in range(2):
        outputs = detector(images, sizes, targets)
        counts = {name: torch.tensor(value) for name, value in detector.denominators(targets).items()}
        losses = detector.criterion(outputs, targets, counts)[0]
        total = sum(losses.values())
        assert torch.isfinite(total)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


def test_what_cannot_be_decided_by_the_source_is_told_in_three_lines(tmp_path):
    entries = dict(FOLDERS["rt_detr_v2"])
    inner = dict(entries["backbone_config"])
    entries["backbone_config"] = CONFIG_MAPPING[inner.pop("model_type")](**inner)
    config = CONFIG_MAPPING["rt_detr_v2"](**entries, id2label=dict(enumerate(COCO_80)))
    AutoModelForObjectDetection.from_config(config).save_pretrained(tmp_path / "hub")
    (tmp_path / "run").mkdir()

    def start(*argv):
        options = parse_config(train_detr.Config, ["--model.pretrained", str(tmp_path / "hub"), *argv],
                               train_detr.DEFAULT_CONFIG).model  # fmt: skip
        start_detector(options, ["dog"], tmp_path / "run", resumed_from=None, say=print)

    with pytest.raises(BadInput, match="leave out --model.ffn_dim") as caught:
        start("--model.ffn_dim", "24")
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(BadInput, match="--model.architecture rt_detr_v2") as caught:
        start("--model.architecture", "detr")
    assert len(str(caught.value).splitlines()) == 3
    assert parse_config(train_detr.Config, [], Path(train_detr.DEFAULT_CONFIG)).model.d_model == 96
