"""Settings of a training on data of one's own: the file that applies, what flags change, what recipes need."""

import importlib
import shutil
from dataclasses import asdict, fields, replace
from functools import partial

import pytest
import torch
from places import ROOT

from scripts import train_detr
from scripts.train_detr import DEFAULT_CONFIG, Config
from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.run.command_line import parse_config, resolve, run_script, sources_of
from toolkit.run.synonyms import ELSEWHERE, SYNONYMS

DETECTORS = ("detr", "faster_rcnn", "ssd", "yolov3")
BCCD = str(ROOT / "configs" / "detr" / "bccd.yaml")
OWN_DATA_CPU = str(ROOT / "configs" / "detr" / "own_data_cpu.yaml")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def resolved(words: str, default_config=DEFAULT_CONFIG):
    """Return the settings, and the texts that name their sources."""
    config, stack = resolve(Config, words.split(), default_config)
    return config, sources_of(stack)


# ---- which file applies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "--data.path other",
        "--data.train a.json --data.val b.json",
        "--data.train [a.json,b.json]",
        "--data.format voc",
        "--data.name someone/pictures",
        "--data.train folder",
        "--data.val=b.csv",
    ],
)
def test_own_data_get_the_recipe_for_them(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    config, sources = resolved(words)
    assert config.run.max_minutes == 20
    assert config.data.image_size == 256
    assert "/own_data_cpu.yaml (your own data, no GPU; --config chooses " in sources[0]
    assert sources[1:] == ["the command line"]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--data.val 0.2",
        "--data.val 1/5",
        "--data.train val",
        "--data.format shapes",
        "--data.path null",
        "--run.epochs 3",
    ],
)
def test_without_own_data_the_settings_are_those_of_the_bundled_shapes(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val").mkdir()  # a folder of this name does not make it a path
    config, sources = resolved(words)
    assert sources == [str(DEFAULT_CONFIG), "the command line"][: 1 + bool(words)]
    assert config.run.max_minutes == 4.75
    assert config.data.format == "shapes"


def test_on_a_gpu_the_recipe_starts_from_trained_weights(monkeypatch):
    monkeypatch.setattr("toolkit.base.distributed.default_device", partial(torch.device, "cuda"))
    config, sources = resolved("--data.path other")
    large = str(DEFAULT_CONFIG.with_name("own_data.yaml"))
    expected = parse_config(Config, ["--config", large, "--data.path", "other"])
    assert config == expected
    assert config.model.given == expected.model.given
    assert config.model.pretrained
    assert "/own_data.yaml (your own data, a GPU; --config " in sources[0]
    assert "own_data_cpu.yaml" in sources[0]


def test_a_copied_script_says_that_its_settings_are_of_the_bundled_shapes(tmp_path):
    copy = shutil.copy(DEFAULT_CONFIG, tmp_path / "mine.yaml")
    config, sources = resolved("--data.path other", copy)
    assert sources[0].startswith(f"{copy} (made for the bundled shapes, not for your data; --config")
    assert config.data.format == "auto"


def test_another_model_keeps_the_rest_of_the_recipe():
    config, sources = resolved("--data.path other --model.architecture detr")
    assert sources[0].endswith("without its groups model and loss")
    assert config.data.format == "auto"
    assert config.run.max_minutes == 20
    assert config.model.given == {"architecture": "detr"}


def test_settings_files_are_named_as_given(monkeypatch):
    monkeypatch.chdir(ROOT)
    given = "--config configs/detr/shapes.yaml --config configs/detr/bccd.yaml"
    assert resolved(given)[1] == given.split()[1::2]


def test_the_first_line_names_the_settings_and_errors_are_printed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.run.command_line.find_launch", lambda: None)
    words = [
        "--data.path",
        "nothere",
        "--model.pretrained_backbone",
        "none.pth",
        "--run.threads",
        "1",
    ]
    assert run_script(train_detr.main, Config, DEFAULT_CONFIG, words) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("settings: ")
    assert "own_data_cpu.yaml" in printed.out.splitlines()[0]
    for told in ("nothere: no such folder", "pretrained_backbone: the file"):
        assert (printed.out + printed.err).count(told) == 1
        assert told in printed.err


# ---- flags and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--config", BCCD], [f"--config={BCCD}"]])
def test_flags_win_over_a_settings_file_that_follows_them(words):
    config = parse_config(Config, ["--data.image_size", "64", *words, "--run.max_minutes=1"])
    assert (config.data.image_size, config.run.max_minutes, config.run.name) == (
        64,
        1,
        "bccd",
    )
    assert parse_config(Config, ["--model.architecture", "d_fine", *words]).model.architecture == "d_fine"


@pytest.mark.parametrize("words", [["--config", BCCD], [f"--config={BCCD}"]])
def test_a_path_takes_the_place_of_the_data_set_of_a_settings_file(words, capsys):
    usual = Config().data
    theirs = parse_config(Config, words)
    ours = parse_config(Config, [*words, "--data.path", "other"])
    for key in ("train", "val", "image_dir", "format"):
        assert getattr(ours.data, key) == getattr(usual, key) != getattr(theirs.data, key)
    assert ours.model.given == theirs.model.given
    assert asdict(ours.optim) == asdict(theirs.optim)
    assert ours.data.augment == theirs.data.augment
    assert "bccd.yaml: data.train, data.val, data.image_dir, data.format are of its own" in capsys.readouterr().err
    named = parse_config(Config, [*words, "--data.path", "other", "--data.train", "trainval"])
    assert named.data.train == "trainval"


def test_a_share_of_a_settings_file_stays_with_another_path(tmp_path):
    share = tmp_path / "share.yaml"
    share.write_text("data: {val: 20%}\n")
    assert parse_config(Config, ["--config", str(share), "--data.path", "other"]).data.val == "20%"
    assert parse_config(Config, ["--data.path", "other"], default_config=DEFAULT_CONFIG).data.format == "auto"


def test_a_file_on_the_command_line_is_recognised_whatever_a_settings_file_says(
    tmp_path,
):
    words = [
        "--config",
        str(DEFAULT_CONFIG),
        "--data.train",
        "a.json",
        "--data.val",
        "0.2",
    ]
    assert parse_config(Config, words).data.format == "auto"
    assert parse_config(Config, [*words, "--data.format", "coco"]).data.format == "coco"
    hub = tmp_path / "hub.yaml"
    hub.write_text("data: {format: hub, name: someone/pictures, image_size: 96}\n")
    data = parse_config(Config, ["--config", str(hub), "--data.train", "[a.json, b.csv]"]).data
    assert (data.format, data.name, data.image_size) == ("auto", None, 96)
    assert parse_config(Config, ["--config", str(hub), "--data.train", "train"]).data.format == "hub"


@pytest.mark.parametrize("words", ["--image-dir photos", "--image-dir=photos", "--data.image_dir photos"])
def test_folders_of_images_have_the_flag_of_the_other_scripts_too(words):
    assert parse_config(Config, ["--data.train", "a.json", *words.split()]).data.image_dir == "photos"


def test_a_settings_file_for_another_detector_is_one_sentence():
    with pytest.raises(BadInput) as error:
        parse_config(Config, ["--config", OWN_DATA_CPU, "--model.architecture", "detr"])
    told, *rest = error.value.problems
    assert "own_data_cpu.yaml: it is for model.architecture rt_detr_v2, and sets " in told
    assert "num_denoising" in told
    assert told.endswith("which detr does not have. Take a copy of the file without these lines")
    assert "num_queries" not in told, "which DETR has too"
    assert "backbone" not in told
    assert rest == ["`--help all` lists every setting with its type."]


def test_a_misspelt_key_in_a_file_for_another_detector_keeps_its_hint(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {architecture: rt_detr_v2, num_denoising: 3, num_querys: 5}\n")
    with pytest.raises(BadInput) as error:
        parse_config(Config, ["--config", str(file), "--model.architecture", "detr"])
    for_another, misspelt, _ = error.value.problems
    assert "num_denoising, which detr does not have" in for_another
    assert "num_querys" not in for_another
    assert misspelt.endswith("no such setting model.num_querys; did you mean model.num_queries?")


def test_every_synonym_leads_to_one_setting_that_exists():
    config = Config()
    settings = set()
    for group in fields(config):
        settings |= {f"{group.name}.{key.name}" for key in fields(getattr(config, group.name))}
    assert set(SYNONYMS) <= settings
    words = [word for words in SYNONYMS.values() for word in words.split()]
    assert len(words) == len(set(words))
    assert not set(words) & set(ELSEWHERE)


# ---- recipes ---------------------------------------------------------------------------------------------------------


def recipe(name: str, file: str):
    config = importlib.import_module(f"scripts.train_{name}").Config
    return parse_config(config, ["--config", str(ROOT / "configs" / name / f"{file}.yaml")])


@pytest.mark.parametrize("name", DETECTORS)
def test_the_recipe_without_gpu_and_network_needs_neither(name):
    config = recipe(name, "own_data_cpu")
    assert config.data.augment is None
    assert not config.model.pretrained
    assert not config.model.pretrained_backbone
    assert config.data.format == "auto"
    assert config.data.image_dir is None
    build_detector(
        **config.model.given | {"architecture": config.model.architecture},
        class_names=["a", "b"],
    )


@pytest.mark.parametrize("name", DETECTORS)
def test_that_recipe_learns_as_the_one_that_was_measured_on_photographs(name):
    """A line of the optimizer that one of them lacks fails here: without a name, Faster R-CNN's default was SGD."""
    own = recipe(name, "own_data_cpu")
    measured = recipe(name, "bccd")
    faster = 2 if name == "faster_rcnn" else 1  # its rate was chosen for five minutes, on held-out training pictures
    assert own.optim == replace(measured.optim, lr=faster * measured.optim.lr)
    assert own.schedule == measured.schedule
