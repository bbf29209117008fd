"""The originals' published commands as docs/coming_from/ translates them: every value is the one they ran with."""

import argparse
from dataclasses import asdict
from functools import reduce

import pytest
import torch
from published import as_detr_saves_it
from test_commands import COMMANDS, ROOT, module_of, split

from toolkit.command_line import parse_config
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.data.shapes import make_shapes
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.models import build_detector

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
ORIGINALS = {"detr": (DETR, DETR_EVAL, DETR_DC5),
             "scene_graph_benchmark": (*SGB_PUBLISHED, SGB_DETECTOR, SGB_PREDCLS, SGB_SGCLS, SGB_SGDET)}  # fmt: skip


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
    (line,) = [line for line in CocoEvaluator(table).describe(expected, {}).splitlines() if line.startswith("AP ")]
    assert line.split()[::2] == [name.removeprefix("bbox_") for name in twelve]
