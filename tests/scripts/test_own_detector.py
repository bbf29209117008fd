"""A detector that the toolkit does not know, by `module:Class`: trained, killed, resumed, evaluated, predicted."""

import json

import pytest
from launching import ROOT, Script, all_rows, assert_same_run, kill, small_settings
from places import SUPPORT

from scripts.train_faster_rcnn import Config
from toolkit.base.errors import BadInput
from toolkit.run.command_line import parse_config

ENV = {"PYTHONPATH": str(SUPPORT)}  # of fcos_detector.py
FASTER_RCNN = Script("train_faster_rcnn")


@pytest.fixture(scope="module")
def arguments(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    empty = folder / "empty.yaml"
    empty.write_text("run: {}\n")
    own = ["--config", empty, "--model.architecture", "fcos_detector:FCOS", "--model.score_threshold", 0.01,
           "--run.save_every", 2, "--optim.lr", 1e-3, "--run.output_dir", folder, "--run.resume", "latest"]  # fmt: skip
    return small_settings(FASTER_RCNN, data, own)


def test_fcos_is_trained_resumed_evaluated_and_predicted(server, arguments, data):
    script = FASTER_RCNN
    reference = server.run(script, [*arguments, "--run.name", "reference"], env=ENV).ok().folder
    args = [*arguments, "--run.name", "killed"]
    assert server.run(script, args, faults=[kill(8)], env=ENV).code == -9
    folder = server.run(script, args, env=ENV).ok().folder
    assert_same_run(folder, reference)
    assert any("train/bbox_ctrness" in row for row in all_rows(folder))
    assert "architecture: fcos_detector:FCOS" in (folder / "config.yaml").read_text()

    refused = server.run(ROOT / "scripts" / "evaluate.py", [folder], env=ENV)
    assert refused.code == 2 and "add --trust" in refused.text
    evaluated = server.run(ROOT / "scripts" / "evaluate.py", [folder, "--trust"], env=ENV).ok()
    assert "val/bbox_AP" in all_rows(folder)[-1] and "bbox_AP" in evaluated.text
    for source in (folder, folder / "final"):
        out = folder.parent / f"found_{source.name}"
        predict = [source, data / "val", "--out", out, "--score-threshold", "0.01", "--trust"]
        server.run(ROOT / "scripts" / "predict.py", predict, env=ENV).ok()
        assert len(json.loads((out / "predictions.json").read_text())["images"]) == 10


def test_a_class_that_is_no_detector_is_refused_before_anything_is_read():
    for architecture, words in {
        "fcos_detector:Fcos": "cannot be imported: fcos_detector has no Fcos; the nearest name is FCOS",
        "fcos_detector:FCOSOptions": "not a subclass",
        "nowhere:FCOS": "cannot be imported", "faster_rcn": "did you mean faster_rcnn",
        "rt_detr_v2": "train_detr.py trains it",
    }.items():  # fmt: skip
        with pytest.raises(BadInput, match=words):
            parse_config(Config, ["--model.architecture", architecture])
