"""scripts/export.py on a run: its files find what the run finds; tests/tools/export exports every detector."""

import json

import pytest
from launching import SCRIPTS
from places import ROOT

PROGRAMS = ROOT / "scripts"
BOXES_AND_GRAPHS = [script for script in SCRIPTS if script.name in ("train_detr", "train_sgg")]
SSD = SCRIPTS[-1:]


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", BOXES_AND_GRAPHS, indirect=True, ids=lambda script: script.name)
def test_exported_files_find_what_the_run_finds(server, script, settings, data, tmp_path):
    """In export.py, predict.py, evaluate.py and report.py; of a scene graph its detector alone.

    After two steps most scores are equal to rounding, and which of two boxes suppresses the other is left to chance.
    """
    args = settings(f"--run.output_dir {tmp_path} --run.epochs 40 --run.max_steps 120 --run.eval_every 120")
    run = server.run(script, args).ok().folder
    out = tmp_path / "out"
    ended = server.run(PROGRAMS / "export.py", f"{run} --out {out} --weights ema").ok()
    assert "| model.onnx | " in ended.text
    assert {path.name for path in out.iterdir()} == {"model.onnx", "model.pt2", "export.json"}
    judged = {line["file"]: line for line in json.loads((out / "export.json").read_text())["files"]}
    split = f"--split {data}/annotations/val.json --image-dir {data}/val --trust"
    picture = min((data / "val").iterdir())
    for name in ("model.onnx", "model.pt2"):
        assert abs(judged[name]["AP_moved"]) <= 1e-3
        assert judged[name]["differences"].keys() == {"1", "2", "5"}
        found = tmp_path / name
        asked = f"{out}/{name} {picture} --out {found} --score-threshold 0 --format json coco --trust"
        server.run(PROGRAMS / "predict.py", asked).ok()
        assert json.loads((found / "predictions.json").read_text())["images"][0]["detections"]
        assert (found / "results.json").exists()
        evaluated = server.run(PROGRAMS / "evaluate.py", f"{out}/{name} {split}").ok()
        assert evaluated.numbers["bbox_AP"] == judged[name]["AP"]
        server.run(PROGRAMS / "report.py", f"{out}/{name} {split} --out {found}/report").ok()
        report = json.loads((found / "report" / "report.json").read_text())
        assert report["numbers"]["AP"] == pytest.approx(judged[name]["AP"], abs=1e-12)
        assert (found / "report" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", SSD, indirect=True, ids=lambda script: script.name)
def test_a_file_that_finds_something_else_is_refused(server, script, whole, tmp_path):
    """Its AP is held to that of PyTorch on the validation data: below 0 apart none is good enough."""
    strict = {"set": "toolkit.tools.export.request:ExportRequest.tolerance", "to": -1.0}
    ended = server.run(PROGRAMS / "export.py", f"{whole} --out {tmp_path} --formats onnx", faults=[strict])
    assert ended.code == 1
    assert "more than -1.0 apart" in ended.text
    assert (tmp_path / "model.onnx.wrong").exists()
    assert not (tmp_path / "model.onnx").exists()
