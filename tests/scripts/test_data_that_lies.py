"""Data that passes every check of a record and is wrong all the same, and names that act on what shows them."""

import json
import os
from pathlib import Path

import pytest
from launching import SCRIPTS, rows
from PIL import Image
from test_box_formats import CONVERTED, convert
from test_text import NASTY_NAMES

from toolkit.evaluation.class_keys import metric_keys

SHORT = ("--run.epochs", 1, "--run.max_steps", 1)
CONTROL = ("\x1b", "\x07", "\x08", "\x00", "\u202e", "\u2028")


def written(document, path) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_boxes_in_another_format_are_refused(server, script, settings, data, tmp_path):
    document = json.loads((data / "annotations" / "train.json").read_text())
    wrong = written(convert(document, CONVERTED["xyxy"]), tmp_path / "wrong.json")
    for on_error in ("raise", "drop"):
        args = settings("--run.output_dir", tmp_path, "--run.name", on_error, "--data.train", wrong,
                        "--data.image_dir", data / "train", "--data.on_error", on_error, *SHORT)  # fmt: skip
        ended = server.run(script, args)
        assert ended.code == 2 and "Traceback" not in ended.text, ended.text
        assert "wrong.json" in ended.text and "write every bbox as [" in ended.text


@pytest.mark.parametrize("script", [SCRIPTS[0], SCRIPTS[3]], indirect=True, ids=lambda script: script.name)
@pytest.mark.every_script("slow")
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_classes_with_names_of_every_kind(server, script, settings, data, tmp_path, tracker):
    """Trained, evaluated, drawn and tracked; no control character reaches the console or a key."""
    names = [name[:5000] for name in NASTY_NAMES if name.strip()]
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        document = json.loads((data / "annotations" / f"{split}.json").read_text())
        extra = [{"id": 100 + i, "name": name} for i, name in enumerate(names[4:])]
        kept = [category | {"name": name} for category, name in zip(document["categories"], names, strict=False)]
        predicates = [each | {"name": names[i]} for i, each in enumerate(document["rel_categories"])]
        document |= {"categories": kept + extra, "rel_categories": predicates}
        written(document, tmp_path / "annotations" / f"{split}.json")
        (tmp_path / split).symlink_to(data / split)
    args = settings("--run.output_dir", tmp_path, "--data.train", tmp_path / "annotations" / "train.json", "--data.val",
                    tmp_path / "annotations" / "val.json", "--eval.pictures", 2, "--run.tracker", tracker,
                    *SHORT)  # fmt: skip
    ended = server.run(script, args).ok()
    assert ended.status["state"] == "done" and "switched off" not in ended.text
    ours = "".join(line for line in ended.text.splitlines(keepends=True) if "wandb" not in line)  # theirs has colours
    assert "Traceback" not in ours and not set(CONTROL) & set(ours)
    assert len(list((ended.folder / "report").glob("pictures/*.png"))) == 1
    evaluated = next(row for row in rows(ended.folder) if "val/loss" in row)
    if script.name == "train_detr":
        assert f"val/AP/{metric_keys(names)[0]}" in evaluated
    assert all(key.isprintable() or "\u200d" in key for key in evaluated)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_images_that_are_none_are_named_and_left_out(server, script, settings, data, tmp_path):
    document = json.loads((data / "annotations" / "train.json").read_text())
    (tmp_path / "images").mkdir()
    for path in (data / "train").iterdir():
        (tmp_path / "images" / path.name).write_bytes(path.read_bytes())
    pipe, large = document["images"][0]["file_name"], document["images"][1]
    (tmp_path / "images" / pipe).unlink()
    os.mkfifo(tmp_path / "images" / pipe)
    Image.new("1", (13_000, 13_000)).save(tmp_path / "images" / large["file_name"], "PNG")
    large |= {"width": 13_000, "height": 13_000}
    args = settings("--run.output_dir", tmp_path, "--data.train", written(document, tmp_path / "a.json"),
                    "--data.image_dir", tmp_path / "images", "--data.val", tmp_path / "a.json", *SHORT)  # fmt: skip
    ended = server.run(script, args)
    assert ended.code == 2 and "it is a pipe" in ended.text and "13000 x 13000 pixels are more" in ended.text
    ended = server.run(script, [*args, "--data.on_error", "drop", "--run.name", "dropped"]).ok()
    assert "16 images" in ended.text
    ended = server.run(script, [*args, "--data.max_image_pixels", "1000", "--run.name", "small"])
    assert ended.code == 2 and "data.max_image_pixels 1000" in ended.text


def test_a_run_that_ends_too_soon_is_warned_of(server, script, settings, tmp_path):
    """By minutes, once their steps are known, and by steps, before the first."""
    for name, length in (("minutes", ("--run.max_minutes", 0.005, "--run.epochs", 500)), ("steps", SHORT)):
        args = settings("--run.output_dir", tmp_path, "--run.name", name, "--run.eval_every", 0,
                        "--schedule.warmup_steps", 10_000, *length)  # fmt: skip
        ended = server.run(script, args).ok()
        assert "training ends inside the warm-up" in ended.text and "of its 10000 steps" in ended.text
        assert name == "minutes" or "of the 5 steps of an epoch" in ended.text
    args = settings("--run.output_dir", tmp_path, "--run.name", "whole", "--schedule.warmup_steps", 1)
    assert "warning: training ends" not in server.run(script, args).ok().text


def test_the_first_evaluations_do_not_accuse(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.name", "early", "--optim.lr", 0, *SHORT)
    text = server.run(script, args).ok().text
    assert "AP is 0" not in text or "too early to tell: 1 optimizer steps" in text
