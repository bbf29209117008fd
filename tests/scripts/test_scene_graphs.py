"""What only train_sgg.py does: a detector below, files of Visual Genome, a rate that validation decides."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import (
    ROOT,
    Script,
    assert_same_run,
    checkpoint_state,
    checkpoint_tensors,
    flat,
    kill,
    pairs,
    rows,
    training_rows,
)
from PIL import Image
from places import SMALL_CONFIGS
from test_visual_genome import synthetic_table
from visual_genome_writer import write_visual_genome

SGG = Script("train_sgg")
GIVEN = {"--model.mode": "predcls", "--optim.ema_decay": 0, "--run.epochs": 1, "--eval.metric_for_best": "R@20",
         "--data.image_size": 64, "--data.workers": 0, "--run.log_every": 1, "--eval.pictures": 0,
         "--run.name": "run"}  # fmt: skip


def arguments(folder, train, val, **options) -> list:
    given = {"--config": SGG.config} | GIVEN | {"--run.output_dir": folder, "--data.train": train, "--data.val": val}
    return flat(given | {f"--{key.replace('__', '.')}": value for key, value in options.items()})


def without(args: list, *names: str) -> list:
    return flat({name: value for name, value in pairs(args).items() if name not in names})


def of_coco(folder, data, **options) -> list:
    files = (data / "annotations" / f"{split}.json" for split in ("train", "val"))
    return arguments(folder, *files, **{"data__format": "coco", "data__batch_size_per_device": 4} | options)


def test_a_rank_whose_batches_have_no_relation_does_not_stop_the_others(server, data, tmp_path):
    """Of two ranks one has an image with relations in each step; the other none, or not even an object."""
    document = json.loads((data / "annotations" / "train.json").read_text())
    kept = {document["images"][0]["id"]}
    few = {document["images"][i]["id"] for i in range(1, 6)}
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] in kept | few]
    document["rel_annotations"] = [r for r in document["rel_annotations"] if r["image_id"] in kept]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "train.json").write_text(json.dumps(document))
    (tmp_path / "train").symlink_to(data / "train")
    args = of_coco(tmp_path, data, data__train=tmp_path / "annotations" / "train.json", run__eval_every=0,
                   data__batch_size_per_device=1)  # fmt: skip
    for mode in ("predcls", "sgdet"):
        ended = server.run(SGG, [*args, "--run.name", mode, "--model.mode", mode], processes=2).ok()
        trained = training_rows(ended.folder)
        assert len(trained) == 9 and sum(row["train/loss_rel"] > 0 for row in trained) >= 1


def trained_detector(server, data, tmp_path, name: str) -> Path:
    detector = Script(name)
    given = pairs(of_coco(tmp_path, data)) | {"--config": detector.config, "--run.name": "detector"}
    common = {key: value for key, value in given.items() if key.startswith(("--config", "--run", "--data"))}
    return server.run(detector, flat(common)).ok().folder


@pytest.mark.parametrize(
    ("name", "mode"),
    [("train_faster_rcnn", "sgdet"), *(pytest.param(name, mode, marks=pytest.mark.slow) for name, mode in (
        ("train_detr", "sgdet"), ("train_yolov3", "sgcls"), ("train_ssd", "predcls")))],
)  # fmt: skip
def test_on_a_frozen_detector_of_a_run(server, data, tmp_path, name, mode):
    """The chain: train a detector, then graphs on it; resumed when the detector's run is gone; used by itself."""
    trained = trained_detector(server, data, tmp_path, name)
    args = [*of_coco(tmp_path, data, model__mode=mode, model__detector=trained, model__map_channels=16,
                     model__representation_size=32, run__epochs=2, run__eval_every=2, run__save_every=2,
                     run__resume="latest", eval__metric_for_best="mR@100", schedule__name="plateau",
                     schedule__plateau_patience=1, schedule__max_decays=9),
            "--model.backbone", "null", "--model.detector_options", "null"]  # fmt: skip
    if name == "train_faster_rcnn":  # has a pyramid and a head of its own
        args = without(args, "--model.map_channels", "--model.representation_size")
    ended = server.run(SGG, [*args, "--run.name", "reference"]).ok()
    assert "weights of the detector" in ended.text
    reference = ended.folder
    assert server.run(SGG, [*args, "--run.name", "killed"], 1, [kill(6)]).code == -9
    trained.rename(tmp_path / "elsewhere")
    assert_same_run(server.run(SGG, [*args, "--run.name", "killed"]).ok().folder, reference)

    own = checkpoint_tensors(tmp_path / "elsewhere" / "checkpoints" / "best")
    graphs = checkpoint_tensors(reference / "checkpoints" / "latest")
    inside = "model/detector." if name == "train_faster_rcnn" else "model/detector.inner."
    parts = {key.removeprefix(inside): value for key, value in graphs.items() if key.startswith(inside)}
    averaged = "ema/" if any(key.startswith("ema/") for key in own) else "model/"
    assert parts and all(torch.equal(value, own[averaged + key]) for key, value in parts.items())

    asked = server.run(ROOT / "scripts" / "evaluate.py", [reference]).ok().numbers
    best = checkpoint_state(reference / "checkpoints" / "best")["step"]
    (row,) = (row for row in rows(reference) if row["step"] == best and "val/R@100" in row)
    assert {key: asked[key] for key in asked if "R@" in key} == {k[4:]: v for k, v in row.items() if "R@" in k}
    boxes = ["--boxes", data / "annotations" / "val.json"] if mode != "sgdet" else []
    for source in ("final", "."):
        out = tmp_path / f"predicted_{source}"
        server.run(ROOT / "scripts" / "predict.py", [reference / source, data / "val", "--out", out, *boxes]).ok()
        document = json.loads((out / "predictions.json").read_text())
        assert [category["name"] for category in document["categories"]] == ["circle", "square", "triangle", "star"]
        assert len(document["images"]) == 10 and all("relations" in image for image in document["images"])


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_in_one_stage(server, data, tmp_path, processes):
    """EGTR: killed and resumed to the bit, used for prediction with another choice than in training."""
    config = SMALL_CONFIGS / "egtr.yaml"
    args = of_coco(tmp_path, data, config=config, run__save_every=2, run__resume="latest")
    args = without(args, "--model.mode")
    reference = server.run(SGG, [*args, "--run.name", "reference"], processes).ok().folder
    assert server.run(SGG, [*args, "--run.name", "killed"], processes, [kill(3)]).code != 0
    assert_same_run(server.run(SGG, [*args, "--run.name", "killed"], processes).ok().folder, reference)
    trained = training_rows(reference)
    assert all(row["train/loss_rel"] > 0 < row["train/loss_connectivity"] for row in trained)
    assert trained[-1]["train/loss_rel_unscaled"] * 15 == pytest.approx(trained[-1]["train/loss_rel"], rel=1e-5)
    assert rows(reference)[-1]["val/R@100"] >= 0
    out, choice = tmp_path / "out", ["--threshold", "0", "--model.prior_adjustment", "0.5", "--no-pictures"]
    server.run(ROOT / "scripts" / "predict.py", [reference, data / "val", "--out", out, *choice]).ok()
    images = json.loads((out / "predictions.json").read_text())["images"]
    assert len(images) == 10 and all(len(image["relations"]) for image in images)


def test_training_ends_when_the_rate_has_fallen_often_enough(server, data, tmp_path):
    """With rate 0 nothing improves: two falls, and the model of the end is saved."""
    args = of_coco(tmp_path, data, optim__lr=0, schedule__name="plateau", schedule__plateau_patience=2,
                   schedule__max_decays=2, run__eval_every=1, run__epochs=50, eval__before_training="true",
                   optim__gradient_table_every=2, model__head="imp", model__head_options="{}",
                   optim__scale_lr_by_images="true")  # fmt: skip
    ended = server.run(SGG, args).ok()
    evaluated = [row for row in rows(ended.folder) if "val/R@20" in row]
    assert [row["step"] for row in evaluated] == list(range(len(evaluated))), "before the first step too"
    state = checkpoint_state(ended.folder / "checkpoints" / "latest")
    assert state["step"] == evaluated[-1]["step"] < 50 and state["parts"]["plan"]["schedule"]["decays"] == 2
    assert state["parts"]["data"]["predicates"][0] == "left of"
    assert ended.status["ended_by"] == ["schedule.max_decays"] and ended.status["reason"] in ended.text
    assert (ended.folder / "final" / "model.safetensors").exists()
    assert "---Total norm" in ended.text and "with 4 images a step" in ended.text


def test_a_choice_at_inference_is_made_on_a_trained_run(server, data, tmp_path):
    """The direct effect, by evaluate.py and by `run.eval_only`, which needs neither training data nor optimizer."""
    args = of_coco(tmp_path, data, model__head="causal", model__head_options="{}", run__eval_every=0)
    trained = server.run(SGG, args).ok().folder
    args = [*args, "--run.eval_only", "true", "--run.resume", trained, "--run.name", "tde", "--data.train", "gone.json",
            "--optim.name", "sgd", "--model.head_options", "{effect: tde}"]  # fmt: skip
    alone = server.run(SGG, args).ok()
    assert "validation data: " in alone.text and "optim" not in alone.text
    evaluate = ROOT / "scripts" / "evaluate.py"
    plain = server.run(evaluate, [trained]).ok().numbers
    asked = server.run(evaluate, [trained, "--head.effect", "tde", "--save", tmp_path / "tde.json"]).ok().numbers
    assert asked == server.run(evaluate, [alone.folder]).ok().numbers
    assert {f"val/{key}": value for key, value in asked.items()}.items() <= rows(alone.folder)[-1].items()
    assert asked != plain
    check_prediction_of_given_boxes(server, data, trained, tmp_path)
    for flag in ("--head.dropout", "--model.mode"):
        refused = server.run(evaluate, [trained, flag, "1"])
        assert refused.code == 2 and "there are head_options.effect" in refused.text, flag


def check_prediction_of_given_boxes(server, data, trained: Path, folder: Path) -> None:
    """Pictures, graphs and all scores of the boxes of a COCO file; without boxes there is nothing to describe."""
    predict, boxes = ROOT / "scripts" / "predict.py", data / "annotations" / "val.json"
    args = [trained, data / "val", "--out", folder / "out", "--boxes", boxes, "--image-ids", boxes, "--head.effect",
            "tde", "--all-scores", "--format", "json", "dot"]  # fmt: skip
    server.run(predict, args).ok()
    document, truth = (json.loads(path.read_text()) for path in (folder / "out" / "predictions.json", boxes))
    for image in document["images"]:
        annotated = sorted(a["bbox"] for a in truth["annotations"] if a["image_id"] == image["id"])
        np.testing.assert_allclose(sorted(d["bbox"] for d in image["detections"]), annotated, atol=1e-3)
        assert len(image["relations"]) == min(100, len(annotated) * (len(annotated) - 1))
        for relation in image["relations"]:
            best, score = next(iter(relation["predicate_scores"].items()))
            assert relation["predicate"] == best and score == max(relation["predicate_scores"].values())
        dot = folder / "out" / "graphs" / Path(image["file_name"]).with_suffix(".dot").name
        assert dot.read_text().count(" -> ") == len(image["relations"])
        assert (folder / "out" / image["picture"]).stat().st_size > 1000
    refused = server.run(predict, [trained, data / "val", "--out", folder / "other"])
    assert refused.code == 2 and "--boxes FILE.json" in refused.text
    truth["annotations"][0] |= {"bbox": [1, 2, 0, 4], "category_id": 99}
    (folder / "wrong.json").write_text(json.dumps(truth))
    args = [trained, data / "val", "--out", folder / "other", "--boxes", folder / "wrong.json"]
    refused = server.run(predict, args)
    assert refused.code == 2 and "both sides above 0" in refused.text and "category 99" in refused.text


def visual_genome(folder: Path, train: int, test: int) -> Path:
    """Files in the layout of VG150, its vocabulary, random boxes and relations, and a picture for each image."""
    tables = synthetic_table(folder, train, first_id=2_000_000), synthetic_table(folder, test, 3_000_000, seed=1)
    write_visual_genome([(tables[0], 0), (tables[1], 2)], folder)
    (folder / "images").mkdir()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (768, 1024, 3), np.uint8))
    noise.save(folder / "picture.jpg", quality=5)
    for image_id in [*tables[0].image_ids().tolist(), *tables[1].image_ids().tolist()]:
        (folder / "images" / f"{image_id}.jpg").hardlink_to(folder / "picture.jpg")
    return folder


def test_files_of_visual_genome(server, tmp_path):
    """tests/test_vg_scale.py does the same with 1,000 images."""
    folder = visual_genome(tmp_path / "vg", train=20, test=4)
    args = arguments(tmp_path / "runs", "train:2", "test", data__format="visual_genome", data__name=folder,
                     data__image_dir=folder / "images", data__batch_size_per_device=8,
                     model__pairs_per_image=64, model__union_levels="all", eval__test_split="test")  # fmt: skip
    ended = server.run(SGG, args).ok()
    last, tested = rows(ended.folder)[-2:]
    assert {key[4:]: value for key, value in last.items() if key.startswith("val/")} == {
        key[5:]: value for key, value in tested.items() if key.startswith("test/")
    }, "here both are the same split"
    assert "test split" in ended.text and (ended.folder / "report" / "test_predictions.graphs.npz").exists()
    assert 0 <= last["val/R@20"] <= last["val/R@100"] <= 1 and 0 <= last["val/zR@100"] <= 1
    assert len([name for name in last if name.startswith("val/mR@100/")]) == 50
    counts = checkpoint_tensors(ended.folder / "checkpoints" / "latest")["model/relation_counts"]
    assert counts.shape == (151, 151, 51) and counts.sum() > 0
