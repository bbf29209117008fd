"""The originals' published commands as docs/coming_from/ translates them: every value is the one they ran with."""

import argparse
import re
from dataclasses import asdict
from functools import reduce

import pytest
import torch
from published import as_detr_saves_it
from test_commands import COMMANDS, ROOT, module_of, split

from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.models import build_detector
from toolkit.run.command_line import parse_config
from toolkit.step.freezing import freeze_prefixes
from toolkit.tools.shapes import make_shapes

# facebookresearch/detr main.py, get_args_parser, and datasets/coco.py
DETR = {
    "optim.name": "adamw", "optim.lr": 1e-4, "optim.backbone_lr": 1e-5, "optim.weight_decay": 1e-4,
    "optim.max_norm": 0.1, "optim.accumulation_steps": 1, "run.seed": 42, "run.epochs": 300, "run.max_steps": None,
    "run.log_every": 10, "run.save_every": "1 epoch", "run.eval_every": "1 epoch", "run.keep_every": "100 epochs",
    "schedule.name": "step", "schedule.step_size": "200 epochs", "schedule.gamma": 0.1, "schedule.warmup_steps": 0,
    "data.batch_size_per_device": 2, "eval.batch_size_per_device": 2, "data.workers": 2, "data.flip": True,
    "data.random_crop": True, "data.scales": list(range(480, 801, 32)), "data.max_size": 1333,
    "model.architecture": "detr", "model.backbone": "resnet50", "model.freeze": "paper", "model.dilation": False,
    "model.position_embedding": "sine", "model.encoder_layers": 6, "model.decoder_layers": 6, "model.ffn_dim": 2048,
    "model.d_model": 256, "model.dropout": 0.1, "model.heads": 8, "model.num_queries": 100, "model.pre_norm": False,
    "model.aux_loss": True, "model.class_cost": 1.0, "model.bbox_cost": 5.0, "model.giou_cost": 2.0,
    "model.eos_coef": 0.1, "loss.weights": {},
}  # fmt: skip
DETR_EVAL = DETR | {"run.eval_only": True, "model.aux_loss": False, "model.pretrained": "detr-r50-e632da11.pth"}
DETR_DC5 = DETR_EVAL | {
    "model.dilation": True, "model.backbone": "resnet101", "eval.batch_size_per_device": 1,
    "model.pretrained": "detr-r101-dc5-a2e86def.pth",
}  # fmt: skip

# Scene-Graph-Benchmark configs/e2e_relation_*.yaml over config/defaults.py, and the commands of its README; iterations
# between two lines are in its training scripts, where transforms/build.py has the probability of mirroring.
SGB = {
    "data.scales": [600], "data.max_size": 1000, "data.flip": True, "data.workers": 4,
    "data.group_by_aspect_ratio": True, "optim.name": "sgd", "optim.momentum": 0.9, "optim.weight_decay": 1e-4,
    "optim.bias_weight_decay": 0.0, "schedule.warmup_steps": 500, "schedule.warmup_factor": 0.1,
    "schedule.warmup_method": "linear", "schedule.gamma": 0.1, "run.eval_every": 2000, "run.save_every": 2000,
    "run.keep_every": 2000, "run.max_steps": 50000, "run.log_every": 200, "eval.batch_size_per_device": 1,
}  # fmt: skip
SGB_DETECTOR = SGB | {
    "data.batch_size_per_device": 2, "data.keep_images_without_relations": True, "optim.lr": 8 * 0.001,
    "optim.scale_lr_by_images": False, "optim.bias_lr_factor": 2.0, "optim.max_norm": 0, "schedule.name": "multistep",
    "schedule.milestones": [30000, 45000], "eval.before_training": False, "model.backbone": "resnext101_32x8d.tv_in1k",
    "model.representation_size": 4096, "model.anchor_sizes": [[32], [64], [128], [256], [512]],
    "model.aspect_ratios": [0.23232838, 0.63365731, 1.28478321, 3.15089189], "model.rpn_fg_iou_thresh": 0.7,
    "model.rpn_bg_iou_thresh": 0.3, "model.rpn_batch_size_per_image": 256, "model.rpn_positive_fraction": 0.5,
    "model.rpn_pre_nms_top_n_train": 12000, "model.rpn_pre_nms_top_n_test": 6000,
    "model.rpn_post_nms_top_n_train": 2000, "model.rpn_post_nms_top_n_test": 2000, "model.rpn_nms_thresh": 0.7,
    "model.box_fg_iou_thresh": 0.5, "model.box_bg_iou_thresh": 0.3, "model.box_batch_size_per_image": 256,
    "model.box_positive_fraction": 0.5, "model.detections_per_image": 256, "model.score_threshold": 0.01,
    "model.nms_threshold": 0.3,
}  # fmt: skip
SGB_PREDCLS = SGB | {
    "data.batch_size_per_device": 6, "optim.lr": 0.01, "optim.scale_lr_by_images": True, "optim.bias_lr_factor": 1.0,
    "optim.max_norm": 5.0, "optim.gradient_table_every": 4000, "schedule.name": "plateau",
    "schedule.plateau_patience": 2, "schedule.plateau_threshold": 0.001, "schedule.plateau_cooldown": 0,
    "schedule.max_decays": 3, "eval.before_training": True, "eval.test_split": "test", "model.mode": "predcls",
    "model.head": "motifs", "model.head_options": {}, "model.hidden_dim": 512, "model.embed_dim": 200,
    "model.union_levels": "all", "model.pairs_per_image": 1024, "model.positive_fraction": 0.25,
    "model.pairs_per_relation": 4, "model.match_iou": 0.5, "model.add_annotated_boxes": True,
    "model.require_overlap": False, "model.detections_per_image": 80, "model.nms_threshold": 0.5,
    "model.label_smoothing": 0.0, "model.separate_spatial": False,
    "model.detector_options": {"rpn_post_nms_top_n_test": 1000},
}  # fmt: skip
SGB_SGCLS = SGB_PREDCLS | {
    "model.mode": "sgcls", "model.head": "causal",
    "model.head_options": {"effect": "none", "fusion": "sum", "context": "motifs"},
}  # fmt: skip
SGB_SGDET = SGB_PREDCLS | {
    "data.batch_size_per_device": 8, "model.mode": "sgdet", "model.head": "transformer", "optim.lr": 0.001,
    "schedule.name": "multistep", "schedule.milestones": [10000, 16000], "run.max_steps": 16000,
}  # fmt: skip
PUBLISHED = {"model.pretrained": "model_0028000.pth", "data.scales": [600], "data.max_size": 1000}
SGB_PUBLISHED = PUBLISHED | {"run.eval_only": True, "data.val": "test"}, PUBLISHED | {"model.mode": "predcls"}
# Seamless: scripts/configurations/cityscapes_r50.ini over the defaults of detection.ini
SEAMSEG = {
    "optim.name": "sgd", "optim.lr": 0.01, "optim.momentum": 0.9, "optim.nesterov": True, "optim.weight_decay": 1e-4,
    "optim.max_norm": 0, "schedule.name": "multistep", "schedule.milestones": [36000, 44000], "schedule.gamma": 0.1,
    "schedule.warmup_steps": 200, "schedule.warmup_factor": 0.333, "schedule.per": "step", "run.epochs": 130,
    "run.eval_every": "5 epochs", "run.log_every": 5, "data.batch_size_per_device": 1, "data.max_size": 4096,
    "data.flip": True, "loss.weights": {}, "model.anchor_sizes": [[8 * stride] for stride in (4, 8, 16, 32, 64)],
    "model.aspect_ratios": [1, 0.5, 2], "model.rpn_nms_thresh": 0.7, "model.rpn_pre_nms_top_n_train": 12000,
    "model.rpn_post_nms_top_n_train": 2000, "model.rpn_pre_nms_top_n_test": 6000,
    "model.rpn_post_nms_top_n_test": 1000, "model.rpn_min_size": 0, "model.rpn_batch_size_per_image": 256,
    "model.rpn_positive_fraction": 0.5, "model.rpn_fg_iou_thresh": 0.7, "model.rpn_bg_iou_thresh": 0.3,
    "model.rpn_crowd_overlap": 0.7, "model.rpn_smooth_l1_beta": 3.0**-2, "model.box_batch_size_per_image": 512,
    "model.box_positive_fraction": 0.25, "model.box_fg_iou_thresh": 0.5, "model.box_bg_iou_thresh": 0.5,
    "model.box_bg_iou_from": 0, "model.box_crowd_overlap": 0.7, "model.nms_threshold": 0.5,
    "model.score_threshold": 0.05, "model.detections_per_image": 100, "model.bbox_reg_weights": [10, 10, 5, 5],
    "model.box_smooth_l1_beta": 1, "model.fpn_channels": 256, "model.norm": "sync", "model.head_norm": "sync",
    "model.mean": [0.41738699, 0.45732192, 0.46886091], "model.std": [0.25685097, 0.26509955, 0.29067996],
}  # fmt: skip
# GluonCV: its model zoo's yolo3_darknet53_coco.sh and the first line of the log; then with its three switches
GLUONCV = {
    "optim.name": "sgd", "optim.lr": 0.001, "optim.momentum": 0.9, "optim.nesterov": False,
    "optim.weight_decay": 0.0005, "optim.max_norm": 0, "schedule.name": "multistep", "schedule.gamma": 0.1,
    "schedule.milestones": ["220 epochs", "250 epochs"], "schedule.warmup_steps": "1 epoch", "run.epochs": 280,
    "run.log_every": 100, "run.eval_every": "1 epoch", "run.keep_every": "10 epochs", "data.image_size": 416,
    "data.multi_scale": [32 * side for side in range(10, 20)], "data.multi_scale_every": 10, "data.plain_epochs": 20,
    "data.batch_size_per_device": 64 // 8, "model.norm": "sync", "model.nms_threshold": 0.45,
}  # fmt: skip
GLUONCV_SWITCHES = ("data.mixup", "model.label_smoothing", "optim.no_weight_decay_on_norm_and_bias")
# CVNets: config/detection/ssd_coco/mobilevit.yaml
CVNETS = {
    "optim.name": "adamw", "optim.lr": 0.0009, "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.01,
    "optim.no_weight_decay_on_norm_and_bias": False, "optim.max_norm": 0, "optim.accumulation_steps": 1,
    "optim.accumulate_after_epoch": 0, "optim.ema_decay": 1 - 0.0005, "optim.ema_warmup": False,
    "schedule.name": "cosine", "schedule.per": "epoch", "schedule.warmup_steps": 500, "run.epochs": 200,
    "run.log_every": 500, "data.image_size": 320, "data.batch_size_per_device": 32, "data.multi_scale": [],
    "data.recipe": "ssd", "data.iou_crop": True, "data.photometric": True, "data.zoom_out": 1.0,
    "eval.metric_for_best": "ema/bbox_AP", "model.strides": [16, 32, 64, 128, 256, -1],
    "model.aspect_ratios": [[2, 3]] * 5 + [[2]], "model.min_scale": 0.1, "model.max_scale": 1.05,
    "model.center_variance": 0.1, "model.size_variance": 0.2, "model.iou_threshold": 0.5,
    "model.channels": [512, 256, 256, 128, 128, 64], "model.nms_threshold": 0.5, "model.negatives_per_positive": 3,
    "model.norm": "sync",
}  # fmt: skip
ORIGINALS = {
    "detr": (DETR, DETR_EVAL, DETR_DC5), "seamseg": (SEAMSEG,), "cvnets": (CVNETS,),
    "gluoncv": tuple(GLUONCV | dict.fromkeys(GLUONCV_SWITCHES, on) for on in (False, True)),
    "scene_graph_benchmark": (*SGB_PUBLISHED, SGB_DETECTOR, SGB_PREDCLS, SGB_SGCLS, SGB_SGDET),
}  # fmt: skip


def translated(page: str) -> list[str]:
    """The training commands of a page."""
    path = f"docs/coming_from/{page}.md"
    return [command for file, command in COMMANDS if file == path and "scripts/train_" in command]


def settings_of(command: str):
    script, arguments = split(command)
    module = module_of(script)
    paths = [str(ROOT / word) if word.startswith("configs/") else word for word in arguments]
    return parse_config(module.Config, paths, module.DEFAULT_CONFIG)


@pytest.mark.parametrize("page, place", [(page, i) for page in ORIGINALS for i in range(len(ORIGINALS[page]))])
def test_a_translated_command_has_the_originals_values(page, place):
    commands = translated(page)
    assert len(commands) == len(ORIGINALS[page])
    document, expected = asdict(settings_of(commands[place])), ORIGINALS[page][place]
    ours = {key: reduce(dict.__getitem__, key.split("."), document) for key in expected}
    assert ours == expected


def test_what_published_configurations_say_in_other_terms():
    """Sides of Seamless' images, its frozen stages (num_frozen 2, bn_frozen no); rates of CVNets' schedule."""
    found = settings_of(translated("seamseg")[0])
    assert (min(found.data.scales), max(found.data.scales), found.data.scales[-1]) == (512, 2048, 1024)
    detector = build_detector(class_names=["a"], **asdict(found.model) | {"pretrained_backbone": False})
    assert all(parameter.requires_grad for parameter in detector.parameters())
    frozen = freeze_prefixes(detector, found.model.freeze_prefixes)
    assert {name.split(".")[2] for name in frozen} == {"conv1", "bn1", "layer1"}
    found = settings_of(translated("cvnets")[0])
    assert found.optim.lr * found.schedule.warmup_factor == pytest.approx(0.00009)
    assert found.optim.lr * found.schedule.final_factor == pytest.approx(1e-6, rel=1e-4)


# Seamless: seamseg/config/defaults/detection.ini; GluonCV: train_yolo3.py's arguments; CVNets: ssd_coco/mobilevit.yaml;
# Scene-Graph-Benchmark: e2e_relation_X_101_32_8_FPN_1x.yaml and defaults.py. No clipping in the first three.
DEFAULTS = {
    "detr": {"name": "adamw", "lr": 1e-4, "weight_decay": 1e-4, "max_norm": 0.1},
    "faster_rcnn": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "max_norm": 0},
    "yolov3": {"name": "sgd", "lr": 1e-3, "momentum": 0.9, "nesterov": False, "weight_decay": 5e-4, "max_norm": 0},
    "ssd": {"name": "adamw", "lr": 9e-4, "betas": [0.9, 0.999], "weight_decay": 0.01, "max_norm": 0},
    "sgg": {"name": "sgd", "lr": 0.01, "scale_lr_by_images": True, "momentum": 0.9, "nesterov": False,
            "weight_decay": 1e-4, "bias_lr_factor": 1, "bias_weight_decay": 0, "max_norm": 5},
}  # fmt: skip


@pytest.mark.parametrize("script", DEFAULTS)
def test_a_script_without_settings_has_its_originals_optimizer(script):
    found = parse_config(module_of(f"scripts/train_{script}.py").Config, [])
    assert {key: getattr(found.optim, key) for key in DEFAULTS[script]} == DEFAULTS[script]
    assert found.schedule.power == (2.0 if script == "yolov3" else 0.9)


@pytest.mark.parametrize("page", ["detr", "seamseg", "gluoncv", "cvnets", "scene_graph_benchmark"])
def test_the_page_of_each_original_says_which_optimizer_and_what_is_clipped(page):
    text = (ROOT / "docs" / "coming_from" / f"{page}.md").read_text()
    assert re.search(r"`--optim\.name\b", text) and re.search(r"`--optim\.max_norm\b", text)


def test_a_checkpoint_of_detrs_own_program_is_evaluated(tmp_path, monkeypatch):
    """`--eval --resume checkpoint.pth`: weights under "model", beside the flags of the program and its optimizer."""
    make_shapes(tmp_path / "shapes", train_images=2, val_images=5, image_size=64)
    annotations = tmp_path / "shapes" / "annotations"
    table = open_dataset(annotations / "val.json", cache_dir=tmp_path / "cache")
    torch.manual_seed(0)
    detector = build_detector(
        "detr", class_names=table.class_names, backbone="resnet18", pretrained_backbone=False, d_model=32, ffn_dim=32,
        encoder_layers=1, decoder_layers=2, num_queries=20,
    )  # fmt: skip
    document = {"model": as_detr_saves_it(detector.state_dict()), "optimizer": {"param_groups": []},
                "lr_scheduler": {"step_size": 200}, "epoch": 299,
                "args": argparse.Namespace(lr=1e-4, coco_path="coco", masks=False)}  # fmt: skip
    torch.save(document, tmp_path / "checkpoint.pth")
    (tmp_path / "checkpoint.names").write_text("\n".join(table.class_names))
    loader = validation_loader(table, val_transform(64, [64], 1333), batch_size=2, workers=0, stride=detector.stride)
    expected = CocoEvaluator(table).evaluate(predict_dataset(detector.eval(), loader, "cpu").by_image)

    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    command = translated("detr")[1].replace("detr-r50-e632da11.pth", str(tmp_path / "checkpoint.pth"))
    small = f" --data.train {annotations / 'train.json'} --data.val {annotations / 'val.json'} --eval.pictures 0"
    small += f" --data.workers 0 --model.backbone resnet18 --data.scales [64] --run.output_dir {tmp_path / 'runs'}"
    module = module_of("scripts/train_detr.py")
    row = module.main(settings_of(command + small))
    twelve = [name for name in expected if name.startswith("bbox_")]
    assert len(twelve) == 12 and max(expected[name] or 0 for name in twelve) > 0
    assert {name: row[f"val/{name}"] for name in twelve} == pytest.approx({name: expected[name] for name in twelve})
    folder = tmp_path / "runs" / "detr_r50"
    assert "new" not in (folder / "pretrained.txt").read_text().split()
    assert not list((folder / "checkpoints").glob("step_*")), "nothing was trained"
    said = CocoEvaluator(table).describe(expected, {}).splitlines()
    lines = [line for line in said if line.startswith(("AP ", "AR1 "))]
    assert " ".join(lines).split()[::2] == [name.removeprefix("bbox_") for name in twelve]
    assert max(map(len, lines)) < 80
