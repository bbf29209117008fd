"""The programs of evaluation and reports on the predictions of another program, and of prediction on a final folder."""

import json

import pytest
from exported_detectors import CATEGORIES, exported_detector
from PIL import Image
from report_data import random_case

from scripts import evaluate, predict, report
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.predictions import write_predictions
from toolkit.tools.writers import write_coco


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """The words for a file of results and its data, and the numbers that it has."""
    folder = tmp_path_factory.mktemp("foreign")
    table, predictions = random_case(folder / "images", images=4)
    for name in table.file_names():
        Image.new("RGB", (160, 120)).save(folder / "images" / name)
    write_coco(table.labelled(), folder / "truth.json")
    results = write_predictions(folder / "results.json", predictions, table)
    results.with_suffix(".about.json").unlink()
    data = ["--split", folder / "truth.json", "--image-dir", folder / "images"]
    return [str(word) for word in (results, *data)], CocoEvaluator(table).evaluate(predictions)


def test_an_evaluation_is_saved_and_reported(foreign, tmp_path, capsys):
    words, scores = foreign
    saved = tmp_path / "again.json"
    assert evaluate.main([*words, "--expect.bbox_AP", "0.001", "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert f'"bbox_AP": {scores["bbox_AP"]}' in printed
    assert "VOC07 mAP" in printed
    report.main([str(saved), "--out", str(tmp_path / "report")])  # opens the data as they were named
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())["numbers"]
    assert numbers["AP"] == pytest.approx(scores["bbox_AP"], abs=1e-12)
    report.main([str(saved), words[0], *words[1:], "--out", str(tmp_path / "both")])
    assert len(json.loads((tmp_path / "both" / "report.json").read_text())["detectors"]) == 2


def test_a_metric_that_is_missed_or_unknown_fails(foreign, capsys):
    words, _ = foreign
    assert evaluate.main([*words, "--expect.bbox_AP", "0.99"]) == 1
    assert "missed: bbox_AP is" in capsys.readouterr().out
    assert evaluate.main([*words, "--expect.AQ", "0.1"]) == 2
    assert "--expect.AQ: no such metric" in capsys.readouterr().err


def test_every_image_gets_a_picture_and_the_class_may_not_matter(foreign, tmp_path, capsys):
    words, _ = foreign
    assert evaluate.main([*words, "--pictures", str(tmp_path / "pictures")]) == 0
    assert len(list((tmp_path / "pictures").glob("*.jpg"))) == 4
    printed = capsys.readouterr().out
    assert "pictures: 4 in" in printed
    result = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert 0 < result["bbox_AP_any_class"] < 1


def test_a_final_folder_predicts_pictures_and_files(tmp_path):
    exported_detector("ssd, few layers").save_final(tmp_path / "final", CATEGORIES, {"height": 64, "width": 64})
    Image.new("RGB", (90, 60), "#336699").save(tmp_path / "photo.jpg")
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    words = [tmp_path / "final", tmp_path / "photo.jpg", tmp_path / "broken.jpg", "--out", tmp_path / "out"]
    asked = ["--format", "json", "coco", "--score-threshold", "0.01", "--max-detections", "5", "--device", "cpu"]
    assert predict.main([*map(str, words), *asked]) == 1
    document = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert len(document["images"][0]["detections"]) == 5
    assert [error["file_name"] for error in document["errors"]] == [str(tmp_path / "broken.jpg")]
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())) == 5
    assert Image.open(tmp_path / "out" / document["images"][0]["picture"]).width > 90
