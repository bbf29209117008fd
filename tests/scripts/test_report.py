"""scripts/report.py on runs, and on the results of another program."""

import json
import shutil

import pytest
from launching import SCRIPTS
from places import ROOT

REPORT = ROOT / "scripts" / "report.py"
BOXES_AND_GRAPHS = [script for script in SCRIPTS if script.name in ("train_detr", "train_sgg")]


@pytest.mark.parametrize("script", BOXES_AND_GRAPHS, indirect=True, ids=lambda script: script.name)
@pytest.mark.every_script("slow")
def test_report_of_a_run_and_of_two(server, script, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    server.run(REPORT, f"{run}").ok()
    content = json.loads((run / "report" / "report.json").read_text())
    assert content["images"] == 10
    if script.name == "train_sgg":
        scores = json.loads((run / "report" / "predictions.about.json").read_text())["scores"]
        for name in ("R@20", "R@100", "mR@50", "ngR@50"):
            assert content["scene_graphs"]["row"][name] == pytest.approx(scores[name], abs=1e-6)
    else:
        assert content["scene_graphs"] is None
    assert "training" in (run / "report" / "index.html").read_text()
    server.run(REPORT, f"{run} {whole} --out {tmp_path}/both").ok()
    assert "the same AP" in (tmp_path / "both" / "index.html").read_text()


def test_report_of_foreign_results(server, data, tmp_path):
    val = data / "annotations" / "val.json"
    boxes = json.loads(val.read_text())["annotations"]
    results = [{"score": 0.9} | {key: box[key] for key in ("image_id", "category_id", "bbox")} for box in boxes]
    foreign = tmp_path / "results.json"
    foreign.write_text(json.dumps(results))
    server.run(REPORT, f"{foreign}").refused("--split")
    server.run(REPORT, f"{foreign} --split {val}").ok()
    content = json.loads((tmp_path / "results_report" / "report.json").read_text())
    assert content["numbers"]["AP"] == 1
    assert content["best_f1"]["f1"] == 1
