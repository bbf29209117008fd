"""1,000 images in the layout of VG150, through the commands that the real files take: docs/data.md, configs/sgg.

Only sizes, steps and the backbone's random weights differ from the commands.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT, checkpoint_state, checkpoint_tensors, finish, rows, start, training_rows
from test_scene_graphs import visual_genome
from test_visual_genome import CLASSES, PREDICATES

from toolkit.data.annotations import Reading
from toolkit.detectors.scene_graphs.readers.visual_genome import read_visual_genome

VAL_IMAGES = 40
SMALL = {"data.scales": "[64]", "data.max_size": 96, "data.batch_size_per_device": 4, "data.workers": 0,
         "eval.batch_size_per_device": 4, "run.max_steps": 4, "run.eval_every": 2, "run.save_every": 4,
         "run.log_every": 1}  # fmt: skip
BACKBONE = {"model.backbone": "test_resnet", "model.pretrained_backbone": "false"}
DETECTOR = BACKBONE | {"model.fpn_channels": 16, "model.representation_size": 32,
                       "model.rpn_post_nms_top_n_train": 50, "model.rpn_post_nms_top_n_test": 50}  # fmt: skip
DETR = BACKBONE | {"model.d_model": 32, "model.heads": 2, "model.ffn_dim": 32, "model.num_queries": 20}
GRAPHS = {"model.hidden_dim": 16, "model.embed_dim": 8, "model.pairs_per_image": 32, "optim.gradient_table_every": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """833 training images, 40 of them for validation, and 167 for test."""
    return visual_genome(tmp_path_factory.mktemp("data") / "visual_genome", train=833, test=167)


def run(folder: Path, script: str, *args) -> str:
    """What a script prints that ends well."""
    env = {"DETECTION_TOOLKIT_CACHE": str(folder / "cache"), "WANDB_MODE": "offline"}
    code, text = finish(start([sys.executable, ROOT / "scripts" / script, *args], env, folder), timeout_s=900)
    assert code == 0, text
    return text


def train(folder: Path, script: str, config: str, files: Path, **options) -> str:
    options |= SMALL | {"data.name": files, "data.image_dir": files / "images"}
    options |= {"data.train": f"train:{VAL_IMAGES}", "data.val": f"val:{VAL_IMAGES}"}
    args = [part for name, value in options.items() for part in (f"--{name}", value)]
    return run(folder, script, "--config", ROOT / "configs" / "sgg" / config, *args)


@pytest.mark.slow
def test_the_documented_chain(files, tmp_path):
    train(tmp_path, "train_faster_rcnn.py", "vg150_detector.yaml", files, **DETECTOR)
    detector = tmp_path / "runs" / "vg150_detector"
    assert math.isfinite(training_rows(detector)[-1]["train/loss"]) and 0 <= rows(detector)[-1]["val/bbox_AP"] <= 1

    printed = train(tmp_path, "train_sgg.py", "vg150.yaml", files, **GRAPHS | {"model.detector": detector})
    assert "weights of the detector" in printed and "---Total norm" in printed and "150 classes" in printed
    graphs = tmp_path / "runs" / "sgg_vg150"
    trained, evaluated = training_rows(graphs), [row for row in rows(graphs) if "val/R@20" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert [row["step"] for row in evaluated] == [0, 2, 4], "before the first step too"
    assert all(math.isfinite(row["train/loss_rel"]) for row in trained)
    check_metrics({name.removeprefix("val/"): value for name, value in evaluated[-1].items()})
    assert checkpoint_state(graphs / "checkpoints" / "latest")["parts"]["data"]["predicates"] == PREDICATES
    check_counts(files, checkpoint_tensors(graphs / "checkpoints" / "latest"), tmp_path)

    command = ("evaluate.py", graphs, "--split", "test", "--image-dir", files / "images")
    printed = run(tmp_path, *command)
    reading = Reading(files / "images", cache_dir=tmp_path / "cache", check_images=False)
    test = read_visual_genome(files, "test", reading)
    assert f"{len(test)} images" in printed and 100 < len(test) <= 167
    check_metrics(json.loads(printed.strip().splitlines()[-1]))


@pytest.mark.slow
def test_the_documented_chain_of_one_stage(files, tmp_path):
    train(tmp_path, "train_detr.py", "vg150_detr.yaml", files, **DETR)
    chain = {"model.detector": tmp_path / "runs" / "vg150_detr", "eval.test_split": "null"}
    assert "weights of the detector" in train(tmp_path, "train_sgg.py", "vg150_egtr.yaml", files, **chain)
    trained = training_rows(tmp_path / "runs" / "vg150_egtr")
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert all(math.isfinite(row["train/loss_rel"]) for row in trained)
    rates = {name: rate for name, rate in trained[-1].items() if name.startswith("train/lr/")}
    assert {round(rate / rates["train/lr/main"], 6) for rate in rates.values()} == {1, 0.01, 0.001}, rates


def check_metrics(row: dict) -> None:
    """All metrics of predcls, in order, and a recall for each of the 50 predicates."""
    for name in ("R", "ngR", "zR", "ngzR", "mR", "ngmR", "A"):
        assert 0 <= row[f"{name}@20"] <= row[f"{name}@50"] <= row[f"{name}@100"] <= 1, name
    assert row["A@100"] > 0, "some of 50 predicates are guessed right"
    by_predicate = [row[f"mR@100/{name}"] for name in PREDICATES]
    assert len(by_predicate) == 50 and math.isclose(np.mean(by_predicate), row["mR@100"], abs_tol=1e-9)


def check_counts(files: Path, tensors: dict, folder: Path) -> None:
    """The frequency bias has seen the training split, and nothing else, with the vocabulary of VG150."""
    counts = tensors["model/relation_counts"]
    assert counts.shape == (len(CLASSES) + 1, len(CLASSES) + 1, len(PREDICATES) + 1) == (151, 151, 51)
    reading = Reading(files / "images", cache_dir=folder / "cache", check_images=False)
    table = read_visual_genome(files, "train", reading, VAL_IMAGES, drop_non_overlapping=True)
    assert counts.sum() == sum(len(table.row(i)["relations"]["subject"]) for i in range(len(table)))
