"""Data of every form, names that act on what shows them, exact resume with every augmentation and of shards."""

import json
import shutil

import datasets
import pytest
from launching import SCRIPTS, assert_same_run, kill, rows, training_rows
from test_text import NASTY_NAMES

from toolkit.data.formats import open_dataset
from toolkit.evaluation.matches import metric_keys
from toolkit.tools.writers import write_folder

BOXES_AND_GRAPHS = [SCRIPTS[0], SCRIPTS[3]]
SHORT = ("--run.epochs", 1, "--run.max_steps", 1)
FOLDER = ("--data.train", "train", "--data.val", "val", "--data.format", "shapes")
EVERYTHING = (
    "--data.augment", '[{"RandomVerticalFlip": {"p": 0.5}}, {"RandomPhotometricDistort": {"p": 0.5}}]',
    "--data.repeat_factor", "0.9", "--data.zoom_out", "2", "--data.iou_crop", "true", "--data.multi_scale", "[64,96]",
    "--data.multi_scale_pixels", "false", "--data.mosaic", "0.5", "--data.plain_epochs", "1",
    "--data.batch_mixup", "0.4", "--data.copy_blend", "0.6", "--data.plain_without",
    '["mosaic","mixup","batch_mixup","copy_blend","augment","zoom_out","iou_crop","multi_scale"]',
)  # fmt: skip


def test_the_same_losses_from_every_form(server, script, settings, data, tmp_path):
    losses = {}
    for format, title in {"coco": "COCO", "voc": "Pascal VOC", "yolo": "YOLO"}.items():
        folder = data if format == "coco" else tmp_path / format
        for split in ("train", "val") if format != "coco" else ():
            write_folder(open_dataset(split, path=data, cache_dir=tmp_path / "cache"), folder, split, format)
        args = settings(*FOLDER, "--data.path", folder, "--run.output_dir", tmp_path, "--run.name", f"run_{format}",
                        "--run.epochs", 1, "--run.eval_every", 0, "--run.save_every", 0)  # fmt: skip
        run = server.run(script, args).ok()
        assert title in run.text
        losses[format] = [row["train/loss"] for row in training_rows(run.folder)]
    assert len(losses["coco"]) == 5 and losses["voc"] == losses["yolo"] == losses["coco"]


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", BOXES_AND_GRAPHS, indirect=True, ids=lambda script: script.name)
def test_exact_resume_with_every_augmentation(server, script, settings, tmp_path):
    args = settings(*EVERYTHING, "--run.output_dir", tmp_path, "--run.resume", "latest", "--data.workers", 1,
                    "--run.save_every", 2, "--run.eval_every", 0)  # fmt: skip
    reference = server.run(script, [*args, "--run.name", "reference"]).ok().folder
    assert server.run(script, args, 1, [kill(8)]).code == -9
    assert_same_run(server.run(script, args).ok().folder, reference)


@pytest.mark.slow
def test_streamed_shards_are_resumed_to_the_bit(server, script, settings, data, tmp_path):
    """On two processes, with two workers each."""
    for split in ("train", "val"):
        table = open_dataset(split, path=data, cache_dir=tmp_path / "cache")
        write_folder(table, tmp_path / "whole", split, "hub")
        whole = next((tmp_path / "whole" / "data").glob(f"{'validation' if split == 'val' else split}-*"))
        images = datasets.Dataset.from_parquet(str(whole), cache_dir=str(tmp_path / "hf"))
        (tmp_path / "shards" / "data").mkdir(parents=True, exist_ok=True)
        for i in range(3):
            file = tmp_path / "shards" / "data" / f"{split}-{i:05d}-of-00003.parquet"
            images.shard(3, i).to_parquet(str(file), batch_size=2)
    args = settings(*FOLDER, "--data.path", tmp_path / "shards", "--data.streaming", "true", "--data.workers", 2,
                    "--data.mosaic", 0, "--data.mixup", "false", "--data.multi_scale_pixels", "false",
                    "--data.batch_size_per_device", 2, "--eval.batch_size_per_device", 2, "--run.output_dir", tmp_path,
                    "--run.save_every", 2, "--run.resume", "latest")  # fmt: skip
    reference = server.run(script, [*args, "--run.name", "reference"], 2).ok()
    assert "training data: 18 images" in reference.text
    assert server.run(script, args, 2, [kill(4)]).code == -9  # in the middle of the first epoch, after it was saved
    assert_same_run(server.run(script, args, 2).ok().folder, reference.folder)


@pytest.mark.slow
@pytest.mark.every_script
def test_two_partly_labelled_sets_are_resumed_to_the_bit(server, script, settings, data, tmp_path):
    """On two processes; scene graphs refuse it in one sentence where not all sets list the same predicates."""
    shutil.copytree(data, tmp_path / "other")
    for split in ("train", "val"):
        path = tmp_path / "other" / "annotations" / f"{split}.json"
        document = json.loads(path.read_text())
        last = document["categories"].pop()["id"]  # one class less, and one of another name
        document["categories"][0]["name"] = "new"
        document["annotations"] = [entry for entry in document["annotations"] if entry["category_id"] != last]
        path.write_text(json.dumps({key: document[key] for key in ("images", "annotations", "categories")}))
    args = settings(*FOLDER, "--data.path", f"[{data}, {tmp_path / 'other'}]", "--data.shares", "[3, 1]",
                    "--data.batch_size_per_device", 2, "--eval.batch_size_per_device", 2, "--run.output_dir", tmp_path,
                    "--run.max_steps", 5, "--run.save_every", 2, "--run.resume", "latest")  # fmt: skip
    reference = server.run(script, [*args, "--run.name", "reference"], 2)
    if script == SCRIPTS[3]:
        assert reference.code == 2 and "error: data.path, data.train: shapes + other are several" in reference.text
        assert "do not all list the same predicates" in reference.text
        return
    assert "other: 18 images" in reference.ok().text and "does not label new" in reference.text
    assert json.loads((reference.folder / "environment.json").read_text())["data"]["train"]["sets"].keys() == {
        "shapes", "other"
    }
    assert {"val/bbox_AP/shapes", "val/bbox_AP/other"} <= {key for row in rows(reference.folder) for key in row}
    assert server.run(script, args, 2, [kill(4)]).code == -9
    assert_same_run(server.run(script, args, 2).ok().folder, reference.folder)


@pytest.mark.parametrize("script", BOXES_AND_GRAPHS, indirect=True, ids=lambda script: script.name)
@pytest.mark.every_script("slow")
def test_classes_with_names_of_every_kind(server, script, settings, data, tmp_path):
    """Trained, evaluated, drawn and tracked; no control character reaches the console or a key."""
    names = [name[:5000] for name in NASTY_NAMES if name.strip()]
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        document = json.loads((data / "annotations" / f"{split}.json").read_text())
        kept = [category | {"name": name} for category, name in zip(document["categories"], names, strict=False)]
        kept += [{"id": 100 + i, "name": name} for i, name in enumerate(names[4:])]
        predicates = [entry | {"name": names[i]} for i, entry in enumerate(document["rel_categories"])]
        text = json.dumps(document | {"categories": kept, "rel_categories": predicates})
        (tmp_path / "annotations" / f"{split}.json").write_text(text)
        (tmp_path / split).symlink_to(data / split)
    args = settings("--run.output_dir", tmp_path, "--data.train", tmp_path / "annotations" / "train.json", "--data.val",
                    tmp_path / "annotations" / "val.json", "--eval.pictures", 2, "--run.tracker",
                    "[tensorboard, wandb]", *SHORT)  # fmt: skip
    ended = server.run(script, args).ok()
    assert ended.status["state"] == "done" and "switched off" not in ended.text
    printed = "".join(line for line in ended.text.splitlines(keepends=True) if "wandb" not in line)  # it has colours
    assert "Traceback" not in printed and not {"\x1b", "\x07", "\x08", "\x00", "\u202e", "\u2028"} & set(printed)
    assert len(list((ended.folder / "report").glob("pictures/*.png"))) == 1
    evaluated = next(row for row in rows(ended.folder) if "val/loss" in row)
    assert script.name == "train_sgg" or f"val/AP/{metric_keys(names)[0]}" in evaluated
    assert all(key.isprintable() or "\u200d" in key for key in evaluated)
