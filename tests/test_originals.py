"""What stands in the settings of the original programs stands here: the defaults of each script, the published recipes.

    python -m pytest tests/test_originals.py
"""

import importlib
import re
from pathlib import Path

import pytest

from toolkit.command_line import parse_config

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
    assert re.search(r"`--optim\.name`", text) and re.search(r"`--optim\.max_norm`", text)
