"""What a whole run of every training script leaves, and what report.py and evaluate.py make of it."""

import json
import math
import shutil

import pytest
from launching import ROOT, SCRIPTS, rows

OF_ITS_OWN = [script for script in SCRIPTS if script.name in ("train_detr", "train_sgg")]  # boxes, and graphs
EVALUATE, REPORT = (ROOT / "scripts" / f"{name}.py" for name in ("evaluate", "report"))


@pytest.fixture(scope="module")
def run(whole, script, tmp_path_factory):
    """A copy of the run of four steps with two evaluations: a report is written into it."""
    return shutil.copytree(whole, tmp_path_factory.mktemp(script.name) / "run", symlinks=True)


@pytest.mark.every_script
def test_folder_has_all_that_a_person_looks_at(whole):
    assert json.loads((whole / "status.json").read_text())["state"] == "done"
    for name in ("README.md", "curves.png", "pictures/step_000004.png"):
        assert (whole / "report" / name).stat().st_size > 100, name
    trained = [row for row in rows(whole) if "train/loss" in row]
    names = [name for name in trained[0] if name.startswith("train/loss_") and not name.endswith("_unscaled")]
    assert names
    for row in trained:
        assert row["train/loss"] == pytest.approx(sum(row[name] for name in names), rel=1e-4)
        assert all(math.isfinite(row[f"{name}_unscaled"]) for name in names)
    assert {"val/loss", "val/ema/loss"} <= rows(whole)[-1].keys()


@pytest.mark.every_script
def test_a_run_leaves_the_predictions_of_its_best_weights(server, script, run):
    about = json.loads((run / "report" / "predictions.about.json").read_text())
    best = json.loads((run / "checkpoints" / "best" / "state.json").read_text())["step"]
    assert about["step"] == best and "(raw weights)" in about["detector"]
    row = next(r for r in rows(run) if r["step"] == best and "val/loss" in r)
    assert {f"val/{k}": v for k, v in about["scores"].items()}.items() <= row.items()
    if script.name != "train_sgg":  # whose file has boxes; relations stand beside them
        numbers = server.run(EVALUATE, [run / "report" / "predictions.json"]).ok().numbers
        assert {k: numbers[k] for k in about["scores"]} == pytest.approx(about["scores"], abs=1e-12)
        assert numbers.keys() >= {"voc07_mAP", "voc12_mAP"}


@pytest.mark.parametrize("script", OF_ITS_OWN, indirect=True, ids=lambda script: script.name)
@pytest.mark.every_script("slow")
def test_the_report_of_a_run_and_of_two(server, script, run, tmp_path):
    server.run(REPORT, [run]).ok()
    content = json.loads((run / "report" / "report.json").read_text())
    assert content["images"] == 10 and (content["scene_graphs"] is None) == (script.name != "train_sgg")
    if script.name == "train_sgg":
        scores = json.loads((run / "report" / "predictions.about.json").read_text())["scores"]
        for name in ("R@20", "R@100", "mR@50", "ngR@50"):
            assert content["scene_graphs"]["row"][name] == pytest.approx(scores[name], abs=1e-6)
    assert "training" in (run / "report" / "index.html").read_text()
    other = shutil.copytree(run, tmp_path / "other_run", symlinks=True)
    server.run(REPORT, [run, other, "--out", tmp_path / "both"]).ok()
    assert "the same AP" in (tmp_path / "both" / "index.html").read_text()


def test_a_checkpoint_on_data_without_annotations_and_a_report_of_foreign_results(server, run, data, tmp_path):
    """Without annotations the predictions are all there is."""
    train = json.loads((data / "annotations" / "train.json").read_text())
    (tmp_path / "bare.json").write_text(json.dumps(train | {"annotations": [], "rel_annotations": []}))
    args = [run / "checkpoints" / "latest", "--split", tmp_path / "bare.json", "--image-dir", data / "train"]
    ended = server.run(EVALUATE, [*args, "--save", tmp_path / "bare_results.json"]).ok()
    assert "nothing can be measured" in ended.text
    assert isinstance(json.loads((tmp_path / "bare_results.json").read_text()), list)

    val, foreign = data / "annotations" / "val.json", tmp_path / "results.json"
    results = [{key: box[key] for key in ("image_id", "category_id", "bbox")} | {"score": 0.9}
               for box in json.loads(val.read_text())["annotations"]]  # fmt: skip
    foreign.write_text(json.dumps(results))
    missing = server.run(REPORT, [foreign])
    assert missing.code == 2 and "--split" in missing.text
    server.run(REPORT, [foreign, "--split", val]).ok()
    content = json.loads((tmp_path / "results_report" / "report.json").read_text())
    assert content["numbers"]["AP"] == 1 and content["best_f1"]["f1"] == 1


def test_classes_in_another_order_and_another_format_give_the_same_boxes(server, run, data, tmp_path):
    val = data / "annotations" / "val.json"
    document = json.loads(val.read_text())
    for category in document["categories"]:
        category["id"] = 100 - category["id"]
    for annotation in document["annotations"]:
        annotation["category_id"] = 100 - annotation["category_id"]
    document["categories"].reverse()
    (tmp_path / "turned.json").write_text(json.dumps(document))
    turned = ["--split", tmp_path / "turned.json", "--image-dir", data / "val", "--format", "coco"]
    detections = []
    for of_the_run, args in ((True, []), (False, turned)):
        ended = server.run(EVALUATE, [run, *args, "--save", tmp_path / "saved.json"]).ok()
        assert ("loss" in ended.numbers) == of_the_run
        detections.append(sorted(
            (row["image_id"], -row["score"], row["bbox"], abs((0 if of_the_run else 100) - row["category_id"]))
            for row in json.loads((tmp_path / "saved.json").read_text())
        ))  # fmt: skip
    assert detections[0] == detections[1] and len(detections[0]) > 20

    given = [val, tmp_path / "voc", "--image-dir", data / "val", "--to", "voc"]
    server.run(ROOT / "scripts" / "convert.py", given).ok()
    ended = server.run(EVALUATE, [run, "--path", tmp_path / "voc", "--split", "train", "--format", "voc"]).ok()
    assert "10 images" in ended.text, ended.text
