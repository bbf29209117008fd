"""The settings of the original programs: the defaults of each script, the published recipes."""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest

from toolkit.command_line import parse_config
from toolkit.models import build_detector
from toolkit.step.freezing import freeze_prefixes

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "coming_from"


def config(script: str, arguments: list[str], monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return parse_config(importlib.import_module(f"scripts.train_{script}").Config, arguments)


def has(config: object, **expected) -> None:
    """optim__lr=0.1: `optim.lr`."""
    found = {name: getattr(getattr(config, name.split("__")[0]), name.split("__")[1]) for name in expected}
    assert found == expected


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
def test_a_script_without_settings_has_its_originals_optimizer(script, monkeypatch):
    found = config(script, [], monkeypatch)
    has(found, **{f"optim__{key}": value for key, value in DEFAULTS[script].items()})
    assert found.schedule.power == (2.0 if script == "yolov3" else 0.9)


@pytest.mark.parametrize("page", ["detr", "seamseg", "gluoncv", "cvnets", "scene_graph_benchmark"])
def test_the_page_of_each_original_says_which_optimizer_and_what_is_clipped(page):
    text = (PAGES / f"{page}.md").read_text()
    assert re.search(r"`--optim\.name\b", text) and re.search(r"`--optim\.max_norm\b", text)


def here(page: str) -> list[list[str]]:
    """The arguments of the training commands that a page gives."""
    found = re.findall(r"scripts/train_\w+\.py (--config .*)", (PAGES / f"{page}.md").read_text())
    return [[str(ROOT / word) if word.startswith("configs/") else word for word in shlex.split(line)] for line in found]


def test_seamless_published_configuration(monkeypatch):
    """scripts/configurations/cityscapes_r50.ini over the defaults of detection.ini."""
    found = config("faster_rcnn", here("seamseg")[0], monkeypatch)
    has(found, optim__name="sgd", optim__lr=0.01, optim__momentum=0.9, optim__nesterov=True, optim__weight_decay=1e-4,
        optim__max_norm=0, schedule__name="multistep", schedule__milestones=[36000, 44000], schedule__gamma=0.1,
        schedule__warmup_steps=200, schedule__warmup_factor=0.333, schedule__per="step", run__epochs=130,
        run__eval_every="5 epochs", run__log_every=5, data__batch_size_per_device=1, data__max_size=4096,
        data__flip=True, loss__weights={})  # fmt: skip
    assert (min(found.data.scales), max(found.data.scales), found.data.scales[-1]) == (512, 2048, 1024)
    has(found, model__anchor_sizes=[[8 * stride] for stride in (4, 8, 16, 32, 64)], model__aspect_ratios=[1, 0.5, 2],
        model__rpn_nms_thresh=0.7, model__rpn_pre_nms_top_n_train=12000, model__rpn_post_nms_top_n_train=2000,
        model__rpn_pre_nms_top_n_test=6000, model__rpn_post_nms_top_n_test=1000, model__rpn_min_size=0,
        model__rpn_batch_size_per_image=256, model__rpn_positive_fraction=0.5, model__rpn_fg_iou_thresh=0.7,
        model__rpn_bg_iou_thresh=0.3, model__rpn_crowd_overlap=0.7, model__rpn_smooth_l1_beta=3.0**-2,
        model__box_batch_size_per_image=512, model__box_positive_fraction=0.25, model__box_fg_iou_thresh=0.5,
        model__box_bg_iou_thresh=0.5, model__box_bg_iou_from=0, model__box_crowd_overlap=0.7, model__nms_threshold=0.5,
        model__score_threshold=0.05, model__detections_per_image=100, model__bbox_reg_weights=[10, 10, 5, 5],
        model__box_smooth_l1_beta=1, model__fpn_channels=256, model__norm="sync", model__head_norm="sync",
        model__mean=[0.41738699, 0.45732192, 0.46886091], model__std=[0.25685097, 0.26509955, 0.29067996])  # fmt: skip
    settings = dataclasses.asdict(found.model) | {"pretrained_backbone": False}
    detector = build_detector(class_names=["a"], **settings)
    assert all(parameter.requires_grad for parameter in detector.parameters())  # bn_frozen no
    frozen = freeze_prefixes(detector, found.model.freeze_prefixes)  # num_frozen 2; they have these names
    assert {name.split(".")[2] for name in frozen} == {"conv1", "bn1", "layer1"}


def test_gluoncv_published_command(monkeypatch):
    """Its model zoo's yolo3_darknet53_coco.sh and the first line of the log; then with its three switches."""
    plain, switched = (config("yolov3", arguments, monkeypatch) for arguments in here("gluoncv"))
    for found in (plain, switched):
        has(found, optim__name="sgd", optim__lr=0.001, optim__momentum=0.9, optim__nesterov=False,
            optim__weight_decay=0.0005, optim__max_norm=0, schedule__name="multistep", schedule__gamma=0.1,
            schedule__milestones=["220 epochs", "250 epochs"], schedule__warmup_steps="1 epoch", run__epochs=280,
            run__log_every=100, run__eval_every="1 epoch", run__keep_every="10 epochs", data__image_size=416,
            data__multi_scale=[32 * side for side in range(10, 20)], data__multi_scale_every=10, data__plain_epochs=20,
            data__batch_size_per_device=64 // 8, model__norm="sync", model__nms_threshold=0.45)  # fmt: skip
    for found, on in ((plain, False), (switched, True)):
        has(found, data__mixup=on, model__label_smoothing=on, optim__no_weight_decay_on_norm_and_bias=on)


def test_cvnets_published_configuration(monkeypatch):
    """config/detection/ssd_coco/mobilevit.yaml."""
    found = config("ssd", here("cvnets")[0], monkeypatch)
    has(found, optim__name="adamw", optim__lr=0.0009, optim__betas=[0.9, 0.999], optim__weight_decay=0.01,
        optim__no_weight_decay_on_norm_and_bias=False, optim__max_norm=0, optim__accumulation_steps=1,
        optim__accumulate_after_epoch=0, optim__ema_decay=1 - 0.0005, optim__ema_warmup=False, schedule__name="cosine",
        schedule__per="epoch", schedule__warmup_steps=500, run__epochs=200, run__log_every=500, data__image_size=320,
        data__batch_size_per_device=32, data__multi_scale=[], data__recipe="ssd", data__iou_crop=True,
        data__photometric=True, data__zoom_out=1.0, eval__metric_for_best="ema/bbox_AP",
        model__strides=[16, 32, 64, 128, 256, -1], model__aspect_ratios=[[2, 3]] * 5 + [[2]], model__min_scale=0.1,
        model__max_scale=1.05, model__center_variance=0.1, model__size_variance=0.2, model__iou_threshold=0.5,
        model__channels=[512, 256, 256, 128, 128, 64], model__nms_threshold=0.5, model__negatives_per_positive=3,
        model__norm="sync")  # fmt: skip
    assert found.optim.lr * found.schedule.warmup_factor == pytest.approx(0.00009)
    assert found.optim.lr * found.schedule.final_factor == pytest.approx(1e-6, rel=1e-4)
