"""Data of one's own on the first try: what is wrong is said at once, and the printed command trains."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from places import ROOT

from scripts import check_data, train_detr
from scripts.train_detr import DEFAULT_CONFIG, Config
from toolkit.base.errors import BadInput
from toolkit.data.splits import open_all_splits
from toolkit.detectors.detr.options import RTDetrV2Options
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.models import build_detector
from toolkit.models.start import check_weights
from toolkit.run.command_line import parse_config, resolve, run_script, sources_of
from toolkit.run.synonyms import ELSEWHERE, SYNONYMS
from toolkit.tools.shapes import make_shapes

DETECTORS = ("detr", "faster_rcnn", "ssd", "yolov3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A COCO folder without splits, of 12 images, one of which is cut off."""
    folder = tmp_path_factory.mktemp("own") / "my data"
    make_shapes(folder, 12, 1, 64)
    shutil.rmtree(folder / "val")
    (folder / "annotations" / "val.json").unlink()
    (folder / "annotations" / "train.json").rename(folder / "annotations" / "all.json")
    (folder / "train").rename(folder / "images")
    picture = sorted((folder / "images").iterdir())[3]
    picture.write_bytes(picture.read_bytes()[:-300])
    return folder


@pytest.mark.parametrize("kind", [RTDetrV2Options, SceneGraphOptions])
def test_no_split_no_weights_and_a_cut_image_are_one_message(whole, tmp_path, kind, capsys):
    weights = partial(check_weights, kind(pretrained_backbone=str(tmp_path / "none.safetensors")))
    where = {"say": print, "path": whole, "cache_dir": tmp_path}
    with pytest.raises(BadInput) as caught:
        open_all_splits("train", "val", "test", tmp_path, weights, **where)
    early, late, all_of_it = capsys.readouterr().err, caught.value.untold(), str(caught.value)
    for words in ("no split 'val'; hold a share", "no split 'test'", "pretrained_backbone: the file"):
        assert early.count(words) == all_of_it.count(words) == 1 and words not in late, "each is printed once"
    assert "000003" in all_of_it and "000003" in late and "000003" not in early
    weights = partial(check_weights, RTDetrV2Options())
    table, val_table, test_table = open_all_splits("train", "25%", None, tmp_path, weights, **where, on_error="drop")
    assert len(table) + len(val_table) == 11 and test_table is None


def test_missing_files_of_two_splits_are_one_message(tmp_path):
    with pytest.raises(BadInput) as caught:
        open_all_splits(str(tmp_path / "a.json"), str(tmp_path / "b.json"), None, tmp_path, say=print)
    assert [problem[-31:] for problem in caught.value.problems] == [f"{n}.json: no such annotation file" for n in "ab"]


def printed_command(whole, tmp_path, monkeypatch, capsys) -> tuple[str, dict[str, str]]:
    """The last line of check_data.py, and its flags."""
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert check_data.main([str(whole), "--image-size", "96"]) == 2
    said, command = capsys.readouterr().out.strip().splitlines()[-2:]
    words = shlex.split(command)
    assert said.startswith("to train on them") and words[:2] == ["accelerate", "launch"]
    return command, dict(zip(words[3::2], words[4::2], strict=True))


def test_the_printed_command_names_the_data(whole, tmp_path, monkeypatch, capsys):
    _, given = printed_command(whole, tmp_path, monkeypatch, capsys)
    assert given["--data.path"] == str(whole) and given["--data.val"] == "0.2" and given["--data.on_error"] == "drop"
    assert "--data.train" not in given and given["--data.image_size"] == "96"


@pytest.mark.slow
def test_the_printed_command_trains(whole, tmp_path, monkeypatch, capsys):
    command, given = printed_command(whole, tmp_path, monkeypatch, capsys)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(f"{command} --run.max_steps 2", shell=True, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads((tmp_path / "runs" / given["--run.name"] / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", 2)


def test_folders_of_images_have_the_flag_of_the_other_scripts_too():
    for words in (["--image-dir", "photos"], ["--image-dir=photos"], ["--data.image_dir", "photos"]):
        assert parse_config(Config, ["--data.train", "a.json", *words]).data.image_dir == "photos"


def test_other_data_have_other_commands(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    make_shapes(tmp_path / "d", 3, 2, 48)
    files = [str(tmp_path / "d" / "annotations" / f"{split}.json") for split in ("train", "val")]

    def printed(*arguments):
        check_data.main([*arguments])
        return capsys.readouterr().out.strip().splitlines()[-1]

    folder = printed(str(tmp_path / "d"), "--script", "train_ssd")
    assert "train_ssd.py" in folder and "--data.val" not in folder and "--data.on_error" not in folder
    assert f"--data.train {files[0]} --data.val {files[1]} " in printed(*files)
    assert "there is only val" in printed(files[1])
    graphs = printed(str(tmp_path / "d"), "--script", "train_sgg")
    assert "configs/sgg/own_data_cpu.yaml" in graphs, "which downloads nothing"


@pytest.mark.parametrize("name", DETECTORS)
def test_the_recipe_without_gpu_and_network_needs_neither(name):
    module = __import__(f"scripts.train_{name}", fromlist=["Config"])
    config = parse_config(module.Config, ["--config", str(ROOT / "configs" / name / "own_data_cpu.yaml")])
    assert config.data.augment is None and not config.model.pretrained and not config.model.pretrained_backbone
    assert config.data.format == "auto" and config.data.image_dir is None
    build_detector(**config.model.given | {"architecture": config.model.architecture}, class_names=["a", "b"])


@pytest.mark.parametrize("name", DETECTORS)
def test_that_recipe_learns_as_the_one_that_was_measured_on_photographs(name):
    """A line of the optimizer that one of them lacks fails here: without a name, Faster R-CNN's default was SGD."""
    module = __import__(f"scripts.train_{name}", fromlist=["Config"])
    files = [ROOT / "configs" / name / f"{recipe}.yaml" for recipe in ("own_data_cpu", "bccd")]
    own, measured = (parse_config(module.Config, ["--config", str(file)]) for file in files)
    faster = 2 if name == "faster_rcnn" else 1  # its rate was chosen for five minutes, on held-out training pictures
    assert own.optim == replace(measured.optim, lr=faster * measured.optim.lr)
    assert own.schedule == measured.schedule


def test_a_settings_file_for_another_detector_is_one_sentence():
    words = ["--config", str(ROOT / "configs" / "detr" / "own_data_cpu.yaml"), "--model.architecture", "detr"]
    with pytest.raises(BadInput) as error:
        parse_config(Config, words)
    told, *rest = error.value.problems
    assert "own_data_cpu.yaml: it is for model.architecture rt_detr_v2, and sets " in told, told
    assert "num_denoising" in told, told
    assert told.endswith("which detr does not have. Take a copy of the file without these lines")
    assert "num_queries" not in told and "backbone" not in told, "which DETR has too"
    assert rest == ["`--help all` lists every setting with its type."]


def test_a_misspelt_key_in_a_file_for_another_detector_keeps_its_hint(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {architecture: rt_detr_v2, num_denoising: 3, num_querys: 5}\n")
    with pytest.raises(BadInput) as error:
        parse_config(Config, ["--config", str(file), "--model.architecture", "detr"])
    for_another, misspelt, _ = error.value.problems
    assert "num_denoising, which detr does not have" in for_another and "num_querys" not in for_another
    assert misspelt.endswith("no such setting model.num_querys; did you mean model.num_queries?")


def test_flags_win_over_a_settings_file_that_follows_them():
    file = str(ROOT / "configs" / "detr" / "bccd.yaml")
    for words in (["--config", file], [f"--config={file}"]):
        config = parse_config(Config, ["--data.image_size", "64", *words, "--run.max_minutes=1"])
        assert (config.data.image_size, config.run.max_minutes, config.run.name) == (64, 1, "bccd")
        assert parse_config(Config, ["--model.architecture", "d_fine", *words]).model.architecture == "d_fine"


def test_a_path_takes_the_place_of_the_data_set_of_a_settings_file(tmp_path, capsys):
    file, other = str(ROOT / "configs" / "detr" / "bccd.yaml"), ["--data.path", "other"]
    usual, theirs = Config().data, parse_config(Config, ["--config", file])
    for words in (["--config", file], [f"--config={file}"]):
        ours = parse_config(Config, [*words, *other])
        for key in ("train", "val", "image_dir", "format"):
            assert getattr(ours.data, key) == getattr(usual, key) != getattr(theirs.data, key)
        assert ours.model.given == theirs.model.given and asdict(ours.optim) == asdict(theirs.optim)
        assert ours.data.augment == theirs.data.augment
    assert "bccd.yaml: data.train, data.val, data.image_dir, data.format are of its own" in capsys.readouterr().err
    assert parse_config(Config, ["--config", file, *other, "--data.train", "trainval"]).data.train == "trainval"
    share = tmp_path / "share.yaml"
    share.write_text("data: {val: 20%}\n")
    assert parse_config(Config, ["--config", str(share), *other]).data.val == "20%"
    assert parse_config(Config, other, default_config=DEFAULT_CONFIG).data.format == "auto"


OWN_DATA = ["--data.path other", "--data.train a.json --data.val b.json", "--data.train [a.json,b.json]",
            "--data.format voc", "--data.name someone/pictures", "--data.train folder", "--data.val=b.csv"]  # fmt: skip


def resolved(words, default_config=DEFAULT_CONFIG):
    config, stack = resolve(Config, words, default_config)
    return config, sources_of(stack)


@pytest.mark.parametrize("words", OWN_DATA)
def test_without_a_settings_file_own_data_get_the_recipe_for_them(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "folder").mkdir()
    config, sources = resolved(words.split())
    assert config.run.max_minutes == 20 and config.data.image_size == 256
    assert "/own_data_cpu.yaml (your own data, no GPU; --config chooses " in sources[0]
    assert sources[1:] == ["the command line"]


def test_on_a_gpu_that_recipe_starts_from_trained_weights(monkeypatch):
    monkeypatch.setattr("toolkit.base.distributed.default_device", partial(torch.device, "cuda"))
    config, sources = resolved(["--data.path", "other"])
    large = DEFAULT_CONFIG.with_name("own_data.yaml")
    expected = parse_config(Config, ["--config", str(large), "--data.path", "other"])
    assert config == expected and config.model.given == expected.model.given and config.model.pretrained
    assert "/own_data.yaml (your own data, a GPU; --config " in sources[0] and "own_data_cpu.yaml" in sources[0]


def test_a_copied_script_says_that_its_settings_are_of_the_bundled_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    copy = shutil.copy(DEFAULT_CONFIG, tmp_path / "mine.yaml")
    config, sources = resolved(["--data.path", "other"], copy)
    assert sources[0].startswith(f"{copy} (made for the bundled shapes, not for your data; --config")
    assert config.data.format == "auto"


def test_every_synonym_leads_to_one_setting_that_exists():
    config = Config()
    settings = {f"{group.name}.{key.name}" for group in fields(config) for key in fields(getattr(config, group.name))}
    assert set(SYNONYMS) <= settings
    words = [word for words in SYNONYMS.values() for word in words.split()]
    assert len(words) == len(set(words)) and not set(words) & set(ELSEWHERE)


@pytest.mark.parametrize("words", ["", "--data.val 0.2", "--data.val 1/5", "--data.train val", "--data.format shapes",
                                   "--data.path null", "--run.epochs 3"])  # fmt: skip
def test_without_own_data_the_settings_are_those_of_the_bundled_shapes(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val").mkdir()  # a folder of this name does not make it a path
    config, sources = resolved(words.split())
    assert sources == [str(DEFAULT_CONFIG), "the command line"][: 1 + bool(words)]
    assert config.run.max_minutes == 4.75 and config.data.format == "shapes"


def test_another_model_keeps_the_rest_of_the_recipe_and_a_settings_file_is_named_as_given(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = ["--data.path", "other", "--model.architecture", "detr"]
    config, sources = resolved(words)
    assert sources[0].endswith("without its groups model and loss") and config.data.format == "auto"
    assert config.run.max_minutes == 20 and config.model.given == {"architecture": "detr"}
    monkeypatch.chdir(ROOT)
    given = ["--config", "configs/detr/shapes.yaml", "--config", "configs/detr/bccd.yaml"]
    assert resolved(given)[1] == given[1::2]


def test_a_file_on_the_command_line_is_recognised_whatever_a_settings_file_says(tmp_path):
    words = ["--config", str(DEFAULT_CONFIG), "--data.train", "a.json", "--data.val", "0.2"]
    assert parse_config(Config, words).data.format == "auto"
    assert parse_config(Config, [*words, "--data.format", "coco"]).data.format == "coco"
    hub = tmp_path / "hub.yaml"
    hub.write_text("data: {format: hub, name: someone/pictures, image_size: 96}\n")
    data = parse_config(Config, ["--config", str(hub), "--data.train", "[a.json, b.csv]"]).data
    assert (data.format, data.name, data.image_size) == ("auto", None, 96)
    assert parse_config(Config, ["--config", str(hub), "--data.train", "train"]).data.format == "hub"


def test_the_first_line_names_the_settings_and_errors_are_printed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("toolkit.run.command_line.find_launch", lambda: None)
    words = ["--data.path", "nothere", "--model.pretrained_backbone", "none.pth", "--run.threads", "1"]
    assert run_script(train_detr.main, Config, DEFAULT_CONFIG, words) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("settings: ") and "own_data_cpu.yaml" in printed.out.splitlines()[0]
    for words in ("nothere: no such folder", "pretrained_backbone: the file"):
        assert (printed.out + printed.err).count(words) == 1 and words in printed.err
