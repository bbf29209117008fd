"""What only train_sgg.py does: a detector below, files of Visual Genome, a rate that validation decides."""

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import ROOT, Script, checkpoint_state, checkpoint_tensors, flat, pairs, rows, training_rows
from places import SMALL_CONFIGS
from visual_genome_data import CLASSES, PREDICATES, visual_genome

from toolkit.data.annotations import Reading
from toolkit.detectors.scene_graphs.readers.visual_genome import read_visual_genome

SGG = Script("train_sgg")
EVALUATE = ROOT / "scripts" / "evaluate.py"
PREDICT = ROOT / "scripts" / "predict.py"
COMMON = "--data.image_size 64 --data.workers 0 --eval.pictures 0 --run.log_every 1 --run.epochs 1 --run.name run"
OF_GRAPHS = "--model.mode predcls --optim.ema_decay 0 --eval.metric_for_best R@20"


@pytest.fixture(scope="module")
def shapes(data):
    """Settings for the shapes."""
    files = f"--data.train {data}/annotations/train.json --data.val {data}/annotations/val.json"
    return f"{COMMON} {files} --data.format coco --data.batch_size_per_device 4"


def train(server, folder, settings: str, script: Script = SGG, config: Path | None = None):
    """A whole run with these settings, as in a shell; the later ones win."""
    first = {"--config": config or script.config, "--run.output_dir": folder}
    return server.run(script, flat(first | pairs(shlex.split(settings)))).ok()


def images_of(folder: Path) -> list[dict]:
    return json.loads((folder / "predictions.json").read_text())["images"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("train_faster_rcnn", "sgdet"),
        pytest.param("train_detr", "sgdet", marks=pytest.mark.slow),
        pytest.param("train_yolov3", "sgcls", marks=pytest.mark.slow),
        pytest.param("train_ssd", "predcls", marks=pytest.mark.slow),
    ],
)
def test_on_a_frozen_detector_of_a_run(server, data, shapes, tmp_path, name, mode):
    """Trained on it, which stays as it was; evaluated as in training; used from the run and from final/."""
    detector = train(server, tmp_path, f"{shapes} --run.name detector", Script(name)).folder
    is_two_stage = name == "train_faster_rcnn"  # which has a pyramid and a head of its own
    features = "" if is_two_stage else "--model.map_channels 16 --model.representation_size 32"
    below = f"--model.detector {detector} --model.backbone null --model.detector_options null {features}"
    ended = train(server, tmp_path, f"{shapes} {OF_GRAPHS} --model.mode {mode} {below}")
    assert "weights of the detector" in ended.text

    own = checkpoint_tensors(detector / "checkpoints" / "best")
    graphs = checkpoint_tensors(ended.folder / "checkpoints" / "latest")
    inside = "model/detector." if is_two_stage else "model/detector.inner."
    averaged = "ema/" if any(key.startswith("ema/") for key in own) else "model/"
    taken = [key for key in graphs if key.startswith(inside)]
    assert taken
    for key in taken:
        assert torch.equal(graphs[key], own[averaged + key.removeprefix(inside)])

    asked = server.run(EVALUATE, [ended.folder]).ok().numbers
    evaluated = [row for row in rows(ended.folder) if "val/R@100" in row][-1]
    assert asked["mR@100"] == evaluated["val/mR@100"]
    boxes = ["--boxes", data / "annotations" / "val.json"] if mode != "sgdet" else []
    for source in ("final", "."):
        out = tmp_path / f"predicted_{source}"
        server.run(PREDICT, [ended.folder / source, data / "val", "--out", out, *boxes]).ok()
        images = images_of(out)
        assert len(images) == 10
        assert all("relations" in image for image in images)


def test_in_one_stage(server, data, shapes, tmp_path):
    """EGTR, used for prediction with another choice than in training."""
    folder = train(server, tmp_path, f"{shapes} --optim.ema_decay 0", config=SMALL_CONFIGS / "egtr.yaml").folder
    last = training_rows(folder)[-1]
    assert last["train/loss_connectivity"] > 0
    assert last["train/loss_rel_unscaled"] * 15 == pytest.approx(last["train/loss_rel"], rel=1e-5)
    assert rows(folder)[-1]["val/R@100"] >= 0
    choice = "--threshold 0 --model.prior_adjustment 0.5 --no-pictures".split()
    server.run(PREDICT, [folder, data / "val", "--out", tmp_path / "out", *choice]).ok()
    images = images_of(tmp_path / "out")
    assert len(images) == 10
    assert all(image["relations"] for image in images)


def test_training_ends_when_the_rate_has_fallen_often_enough(server, shapes, tmp_path):
    """With rate 0 nothing improves: two falls, and the model of the end is saved."""
    rate = "--optim.lr 0 --schedule.name plateau --schedule.plateau_patience 2 --schedule.max_decays 2"
    told = "--optim.gradient_table_every 2 --optim.scale_lr_by_images true --eval.before_training true"
    head = "--model.head imp --model.head_options {}"
    ended = train(server, tmp_path, f"{shapes} {OF_GRAPHS} {rate} {told} {head} --run.eval_every 1 --run.epochs 50")
    evaluated = [row["step"] for row in rows(ended.folder) if "val/R@20" in row]
    assert evaluated == list(range(len(evaluated))), "before the first step too"
    state = checkpoint_state(ended.folder / "checkpoints" / "latest")
    assert state["step"] == evaluated[-1] < 50
    assert state["parts"]["plan"]["schedule"]["decays"] == 2
    assert state["parts"]["data"]["predicates"][0] == "left of"
    assert ended.status["ended_by"] == ["schedule.max_decays"]
    assert ended.status["reason"] in ended.text
    assert (ended.folder / "final" / "model.safetensors").exists()
    assert "---Total norm" in ended.text
    assert "with 4 images a step" in ended.text


@pytest.fixture(scope="module")
def causal(server, shapes, tmp_path_factory):
    """Settings and folder of a run whose effect can be chosen when it is used."""
    settings = f"{shapes} {OF_GRAPHS} --model.head causal --model.head_options {{}} --run.eval_every 0"
    return settings, train(server, tmp_path_factory.mktemp("causal"), settings).folder


def test_a_choice_at_inference_is_made_on_a_trained_run(server, causal, tmp_path):
    """The direct effect, by evaluate.py and by `run.eval_only`, which needs neither training data nor optimizer."""
    settings, trained = causal
    only = f"--run.eval_only true --run.resume {trained} --data.train gone.json --optim.name sgd"
    alone = train(server, tmp_path, f"{settings} {only} --model.head_options '{{effect: tde}}'")
    assert alone.text.count(" without objects), ") == 1, "the validation data"
    assert "optim" not in alone.text
    asked = server.run(EVALUATE, [trained, "--head.effect", "tde", "--save", tmp_path / "tde.json"]).ok().numbers
    assert asked == server.run(EVALUATE, [alone.folder]).ok().numbers
    assert asked != server.run(EVALUATE, [trained]).ok().numbers
    last = rows(alone.folder)[-1]
    for key, value in asked.items():
        assert last[f"val/{key}"] == value
    for flag in ("--head.dropout", "--model.mode"):
        refused = server.run(EVALUATE, [trained, flag, "1"])
        assert refused.code == 2
        assert "there are head_options.effect" in refused.text, flag


def test_given_boxes_are_described_with_all_scores(server, data, causal, tmp_path):
    boxes = data / "annotations" / "val.json"
    out = tmp_path / "out"
    args = f"--out {out} --boxes {boxes} --image-ids {boxes} --all-scores --format json dot".split()
    server.run(PREDICT, [causal[1], data / "val", *args]).ok()
    truth = json.loads(boxes.read_text())
    for image in images_of(out):
        annotated = sorted(a["bbox"] for a in truth["annotations"] if a["image_id"] == image["id"])
        np.testing.assert_allclose(
            sorted(d["bbox"] for d in image["detections"]),
            annotated,
            atol=1e-3,
        )
        relations = image["relations"]
        assert len(relations) == min(100, len(annotated) * (len(annotated) - 1))
        for relation in relations:
            scores = relation["predicate_scores"]
            assert next(iter(scores)) == max(scores, key=scores.get) == relation["predicate"]
        dot = out / "graphs" / Path(image["file_name"]).with_suffix(".dot").name
        assert dot.read_text().count(" -> ") == len(relations)
        assert (out / image["picture"]).stat().st_size > 1000


def test_given_boxes_that_are_missing_or_wrong_are_refused(server, data, causal, tmp_path):
    truth = json.loads((data / "annotations" / "val.json").read_text())
    truth["annotations"][0] |= {"bbox": [1, 2, 0, 4], "category_id": 99}
    (tmp_path / "wrong.json").write_text(json.dumps(truth))
    command = [causal[1], data / "val", "--out", tmp_path / "other"]
    refused = server.run(PREDICT, command)
    assert refused.code == 2
    assert "--boxes FILE.json" in refused.text
    refused = server.run(PREDICT, [*command, "--boxes", tmp_path / "wrong.json"])
    assert refused.code == 2
    assert "both sides above 0" in refused.text
    assert "category 99" in refused.text


@pytest.fixture(scope="module")
def genome(tmp_path_factory):
    """Files of 60 training images, 20 of them for validation, and 12 for test."""
    return visual_genome(tmp_path_factory.mktemp("data") / "visual_genome", train=60, test=12)


BACKBONE = "--model.backbone test_resnet --model.pretrained_backbone false"
FASTER_RCNN = "--model.fpn_channels 16 --model.representation_size 32 --model.rpn_post_nms_top_n_train 50"
DETR = "--model.d_model 32 --model.heads 2 --model.ffn_dim 32 --model.num_queries 20"
MOTIFS = "--model.hidden_dim 16 --model.embed_dim 8 --model.pairs_per_image 32 --optim.gradient_table_every 2"


def documented(server, folder, genome, script, config, settings):
    """A documented run; only sizes, steps and the backbone's random weights differ from its command."""
    files = f"--data.name {genome} --data.image_dir {genome}/images --data.train train:20 --data.val val:20"
    sizes = "--data.scales [64] --data.max_size 96 --data.batch_size_per_device 4 --eval.batch_size_per_device 4"
    steps = "--run.max_steps 4 --run.eval_every 2 --run.save_every 4 --run.log_every 1 --data.workers 0"
    given = f"--run.name {Path(config).stem} {files} {sizes} {steps} {settings}"
    return train(server, folder, given, Script(script), ROOT / "configs" / "sgg" / config)


def check_metrics(row: dict) -> None:
    """All metrics of predcls, in order, and a recall for each of the 50 predicates."""
    for name in ("R", "ngR", "zR", "ngzR", "mR", "ngmR", "A"):
        assert 0 <= row[f"{name}@20"] <= row[f"{name}@50"] <= row[f"{name}@100"] <= 1, name
    assert row["A@100"] > 0, "some of 50 predicates are guessed right"
    by_predicate = [row[f"mR@100/{name}"] for name in PREDICATES]
    assert row["mR@100"] == pytest.approx(np.mean(by_predicate), abs=1e-9)


def test_the_documented_chain_of_two_stages(server, genome, tmp_path):
    """docs/scene_graph_data.md and configs/sgg: a detector, graphs on it, and their evaluation on the test split."""
    of_detector = f"{BACKBONE} {FASTER_RCNN}"
    detector = documented(server, tmp_path, genome, "train_faster_rcnn", "vg150_detector.yaml", of_detector).folder
    assert 0 <= rows(detector)[-1]["val/bbox_AP"] <= 1
    ended = documented(server, tmp_path, genome, "train_sgg", "vg150.yaml", f"{MOTIFS} --model.detector {detector}")
    for words in ("weights of the detector", "---Total norm", "150 classes", "test split"):
        assert words in ended.text
    evaluated = [row for row in rows(ended.folder) if "val/R@20" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4], "before the first step too"
    check_metrics({name.removeprefix("val/"): value for name, value in evaluated[-1].items()})
    counts = checkpoint_tensors(ended.folder / "checkpoints" / "latest")["model/relation_counts"]
    assert counts.shape == (len(CLASSES) + 1, len(CLASSES) + 1, len(PREDICATES) + 1) == (151, 151, 51)
    reading = Reading(genome / "images", cache_dir=tmp_path / "cache", check_images=False)
    table = read_visual_genome(genome, "train", reading, 20, drop_non_overlapping=True)
    assert counts.sum() == len(table.relations()), "of the training split, and nothing else"
    asked = server.run(EVALUATE, [ended.folder, "--split", "test", "--image-dir", genome / "images"]).ok()
    assert f"{len(read_visual_genome(genome, 'test', reading))} images" in asked.text
    check_metrics(asked.numbers)
    tested = rows(ended.folder)[-1]
    assert tested["test/R@100"] == asked.numbers["R@100"]
    assert (ended.folder / "report" / "test_predictions.graphs.npz").exists()


@pytest.mark.slow
def test_the_documented_chain_of_one_stage(server, genome, tmp_path):
    detector = documented(server, tmp_path, genome, "train_detr", "vg150_detr.yaml", f"{BACKBONE} {DETR}").folder
    on_detector = f"--model.detector {detector} --eval.test_split null"
    ended = documented(server, tmp_path, genome, "train_sgg", "vg150_egtr.yaml", on_detector)
    assert "weights of the detector" in ended.text
    last = training_rows(ended.folder)[-1]
    assert math.isfinite(last["train/loss_rel"])
    rates = [rate for name, rate in last.items() if name.startswith("train/lr/")]
    assert {round(rate / max(rates), 6) for rate in rates} == {1, 0.01, 0.001}
