"""A detector that the toolkit does not know, by `module:Class`: trained, killed, resumed, evaluated, predicted."""

import json

import pytest
from launching import ROOT, Script, all_rows, assert_same_run, kill, small_settings
from places import SUPPORT

ENV = {"PYTHONPATH": str(SUPPORT)}  # of fcos_detector.py
FASTER_RCNN = Script("train_faster_rcnn")


@pytest.fixture(scope="module")
def arguments(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    empty = folder / "empty.yaml"
    empty.write_text("run: {}\n")
    own = {
        "--config": empty,
        "--model.architecture": "fcos_detector:FCOS",
        "--model.score_threshold": 0.01,
        "--run.save_every": 2,
        "--optim.lr": 1e-3,
        "--run.output_dir": folder,
        "--run.resume": "latest",
    }
    return small_settings(FASTER_RCNN, data, [part for pair in own.items() for part in pair])


def test_fcos_is_trained_resumed_evaluated_and_predicted(server, arguments, data):
    reference = server.run(FASTER_RCNN, [*arguments, "--run.name", "reference"], env=ENV).ok().folder
    args = [*arguments, "--run.name", "killed"]
    assert server.run(FASTER_RCNN, args, faults=[kill(8)], env=ENV).code == -9
    folder = server.run(FASTER_RCNN, args, env=ENV).ok().folder
    assert_same_run(folder, reference)
    assert any("train/bbox_ctrness" in row for row in all_rows(folder))
    assert "architecture: fcos_detector:FCOS" in (folder / "config.yaml").read_text()

    evaluate = ROOT / "scripts" / "evaluate.py"
    refused = server.run(evaluate, [folder], env=ENV)
    assert refused.code == 2
    assert "add --trust" in refused.text
    evaluated = server.run(evaluate, [folder, "--trust"], env=ENV).ok()
    assert "bbox_AP" in evaluated.numbers
    for source in (folder, folder / "final"):
        out = folder.parent / f"found_{source.name}"
        predict = [
            source,
            data / "val",
            "--out",
            out,
            "--score-threshold",
            "0.01",
            "--trust",
        ]
        server.run(ROOT / "scripts" / "predict.py", predict, env=ENV).ok()
        assert len(json.loads((out / "predictions.json").read_text())["images"]) == 10
