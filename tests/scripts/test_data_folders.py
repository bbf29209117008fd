"""A folder is enough: `--data.path DIR` in every form, a share held out, and resume with every augmentation on."""

import datasets
import pytest
from launching import SCRIPTS, assert_same_run, training_rows

from toolkit.data.formats import open_dataset
from toolkit.data.formats.folders import write_folder

FOLDER = ("--data.train", "train", "--data.val", "val", "--data.format", "shapes")
EVERYTHING = (
    "--data.augment", '[{"RandomVerticalFlip": {"p": 0.5}}, {"RandomPhotometricDistort": {"p": 0.5}}]',
    "--data.repeat_factor", "0.9", "--data.zoom_out", "2", "--data.iou_crop", "true", "--data.multi_scale", "[64,96]",
    "--data.multi_scale_pixels", "false", "--data.mosaic", "0.5", "--data.plain_epochs", "1",
    "--data.batch_mixup", "0.4", "--data.copy_blend", "0.6", "--data.plain_without",
    '["mosaic","mixup","batch_mixup","copy_blend","augment","zoom_out","iou_crop","multi_scale"]',
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory):
    """The small data set as COCO, Pascal VOC and YOLO."""
    place = tmp_path_factory.mktemp("forms")
    tables = {split: open_dataset(split, path=data, cache_dir=place / "cache") for split in ("train", "val")}
    for format in ("voc", "yolo"):
        for split, table in tables.items():
            write_folder(table, place / format, split, format)
    return {"coco": data, "voc": place / "voc", "yolo": place / "yolo"}


def test_the_same_losses_from_every_form(server, script, settings, folders, tmp_path):
    losses = {}
    for format, folder in folders.items():
        args = settings(*FOLDER, "--data.path", folder, "--run.output_dir", tmp_path, "--run.name", format,
                        "--run.epochs", 1, "--run.eval_every", 0, "--run.save_every", 0)  # fmt: skip
        run = server.run(script, args).ok()
        assert {"coco": "COCO", "voc": "Pascal VOC", "yolo": "YOLO"}[format] in run.text
        losses[format] = [row["train/loss"] for row in training_rows(run.folder)]
    assert len(losses["coco"]) == 5 and all(each == losses["coco"] for each in losses.values()), losses


def test_a_share_is_held_out_and_evaluated_again(server, script, settings, data, tmp_path):
    args = settings(*FOLDER, "--data.path", data, "--data.val", 0.3, "--run.output_dir", tmp_path,
                    "--run.epochs", 1, "--run.max_steps", 1)  # fmt: skip
    run = server.run(script, args).ok()
    assert "held out by their content" in run.text and "val: '0.3'" in (run.folder / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", [SCRIPTS[0], SCRIPTS[3]], indirect=True, ids=lambda script: script.name)
def test_exact_resume_with_every_augmentation(server, script, settings, tmp_path):
    def args(name, *more):
        return settings(*EVERYTHING, "--run.output_dir", tmp_path, "--run.name", name, "--run.resume", "latest",
                        "--data.workers", 1, "--run.save_every", 2, "--run.eval_every", 0, *more)  # fmt: skip

    reference = server.run(script, args("reference")).ok().folder
    kill = {"signal": "SIGKILL", "at": "toolkit.training:Training.seed_micro_batch", "call": 8, "rank": 0}
    assert server.run(script, args("killed"), 1, [kill]).code == -9
    assert "Resuming from" in server.run(script, args("killed")).ok().text
    assert_same_run(tmp_path / "killed", reference)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_streamed_shards_are_resumed_to_the_bit(server, script, settings, data, tmp_path, processes):
    table = open_dataset("train", path=data, cache_dir=tmp_path / "cache")
    for split in ("train", "val"):
        write_folder(open_dataset(split, path=data, cache_dir=tmp_path / "cache"), tmp_path / "whole", split, "hub")
        whole = next((tmp_path / "whole" / "data").glob(f"{'validation' if split == 'val' else split}-*"))
        rows = datasets.Dataset.from_parquet(str(whole), cache_dir=str(tmp_path / "hf"))
        (tmp_path / "shards" / "data").mkdir(parents=True, exist_ok=True)
        for i in range(3):
            rows.shard(3, i).to_parquet(str(tmp_path / "shards" / "data" / f"{split}-{i:05d}-of-00003.parquet"),
                                        batch_size=2)  # fmt: skip
    args = settings(*FOLDER, "--data.path", tmp_path / "shards", "--data.streaming", "true", "--data.workers", 2,
                    "--data.mosaic", 0, "--data.mixup", "false", "--data.multi_scale_pixels", "false",
                    "--data.batch_size_per_device", 2, "--eval.batch_size_per_device", 2, "--run.output_dir", tmp_path,
                    "--run.save_every", 2, "--run.resume", "latest")  # fmt: skip
    reference = server.run(script, [*args, "--run.name", "reference"], processes).ok()
    assert f"training data: {len(table)} images" in reference.text
    args = [*args, "--run.name", "killed"]
    fault = {"signal": "SIGKILL", "at": "toolkit.training:Training.seed_micro_batch", "call": 4, "rank": 0}
    killed = server.run(script, args, processes, [fault])  # in the middle of the first epoch, after it was saved
    assert killed.code == -9
    assert_same_run(server.run(script, args, processes).ok().folder, reference.folder)
