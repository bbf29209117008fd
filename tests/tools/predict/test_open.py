"""What a path is: a run, a final folder, a model of transformers, an exported file, a file of predictions."""

import os

import pytest
import torch
from report_data import random_case

from toolkit.base.distributed import usable_device
from toolkit.base.errors import BadInput
from toolkit.evaluation.predictions import write_predictions
from toolkit.models import options_class
from toolkit.run.open_run import kind_of, open_run
from toolkit.tools.predict.open import open_predictor
from toolkit.tools.predict.predict_split import (
    SplitOptions,
    open_any,
    open_predictions_file,
    split_arguments,
)

FILES = {
    "run/config.yaml": "",
    "run/checkpoints/none": "",
    "final/config.json": "{}",
    "detr/config.json": '{"model_type": "detr"}',
    "bert/config.json": '{"model_type": "bert"}',
    "broken/config.json": "{",
    "model.onnx": "",
    "results.json": "",
    "weights.pth": "",
}
KINDS = {
    "run": "run",
    "run/checkpoints": "run",
    "final": "final",
    "detr": "transformers",
    "model.onnx": "exported",
    "results.json": "predictions",
    "weights.pth": "file",
}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def test_what_a_path_is(folder):
    assert {name: kind_of(folder / name) for name in KINDS} == KINDS
    assert kind_of("facebook/detr-resnet-50") == "transformers"


@pytest.mark.parametrize(
    ("open_it", "name", "words"),
    [
        (kind_of, "broken", "config.json: cannot be read"),
        (kind_of, "finel", "did you mean .*final"),
        (open_predictor, "", "not a run folder"),
        (open_predictor, "broken", "cannot be read"),
        (open_predictor, "bert", "neither a run folder"),
    ],
)
def test_other_folders_are_refused(folder, open_it, name, words):
    with pytest.raises(BadInput, match=words):
        open_it(folder / name)


NEAR = {
    "runs/dter": "did you mean runs/detr?",
    "rnus/detr/final": "did you mean runs?",
    "runs/detr/fnal": "did you mean runs/detr/final?",
    "runs/else.onnx": f"runs{os.sep} contains detr",
}
OPENERS = {
    "open_predictor": open_predictor,
    "open_run": lambda typed: open_run(typed, options_class),
    "kind_of": kind_of,
    "open_any": lambda typed: open_any(typed, None, SplitOptions(), None),
}


@pytest.mark.parametrize("opener", OPENERS)
def test_a_mistyped_path_is_answered_with_the_names_near_it(tmp_path, monkeypatch, opener):
    (tmp_path / "runs" / "detr" / "final").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for typed, near in (NEAR | {str(tmp_path / "run"): f"did you mean {tmp_path / 'runs'}?"}).items():
        with pytest.raises(BadInput, match="no such run") as refused:
            OPENERS[opener](typed)
        assert str(refused.value).startswith(typed)
        assert near in str(refused.value)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:x", "cuda:99", "meta", "xpu:1", "vulkan"])
def test_a_device_that_is_not_there_is_one_sentence(device, tmp_path):
    with pytest.raises(BadInput, match=f"--device {device}: .*; leave it out, or use cpu"):
        open_predictor(tmp_path, device=device)
    assert usable_device("cpu:0") == usable_device(torch.device("cpu")) == torch.device("cpu")


DATA = {
    "path": None,
    "name": None,
    "format": "auto",
    "train": "a.json",
    "val": "b.json",
    "on_error": "drop",
}


@pytest.mark.parametrize("given", [{"path": "d"}, {"name": "someone/set"}, {"format": "shapes"}, {}])
def test_a_split_is_one_of_the_data_of_the_run_where_they_have_splits(given):
    config = {"data": DATA | given}
    asked = split_arguments(config, SplitOptions(split="test"))
    assert asked["source"] == "test"
    assert asked.get("part_of") == ("a.json" if given else None)
    assert split_arguments(config, SplitOptions())["source"] == "b.json"


def test_data_that_a_predictions_file_names_have_known_keys(tmp_path):
    table, predictions = random_case(tmp_path, images=2)
    data = {"source": "val", "path": str(tmp_path), "cache_dir": "/"}
    file = write_predictions(tmp_path / "found.json", predictions, table, data=data)
    with pytest.raises(BadInput, match="found.about.json: `data` has cache_dir"):
        open_predictions_file(file, SplitOptions(), print)
