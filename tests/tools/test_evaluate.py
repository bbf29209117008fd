"""The programs of evaluation and reports on the predictions of another program, and of prediction on a final folder."""

import json
import re

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
    images = folder / "images"
    table, predictions = random_case(images, images=4)
    for name in table.file_names():
        Image.new("RGB", (160, 120)).save(images / name)
    truth = folder / "truth.json"
    write_coco(table.labelled(), truth)
    results = write_predictions(folder / "results.json", predictions, table)
    results.with_suffix(".about.json").unlink()
    words = [results, "--split", truth, "--image-dir", images]
    scores = CocoEvaluator(table).evaluate(predictions)
    return list(map(str, words)), scores


def report_in(folder) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_an_evaluation_is_saved_and_reported(foreign, tmp_path, capsys):
    words, scores = foreign
    saved = str(tmp_path / "again.json")
    status = evaluate.main([*words, "--expect.bbox_AP", "0.001", "--save", saved])
    assert status == 0
    printed = capsys.readouterr().out
    assert f'"bbox_AP": {scores["bbox_AP"]}' in printed
    assert "VOC07 mAP" in printed
    out = tmp_path / "report"
    report.main([saved, "--out", str(out)])  # opens the data as they were named
    numbers = report_in(out)["numbers"]
    assert numbers["AP"] == pytest.approx(scores["bbox_AP"], abs=1e-12)
    both = tmp_path / "both"
    report.main([saved, *words, "--out", str(both)])
    detectors = report_in(both)["detectors"]
    assert len(detectors) == 2


def test_a_metric_that_is_missed_or_unknown_fails(foreign, capsys):
    words, _ = foreign
    status = evaluate.main([*words, "--expect.bbox_AP", "0.99"])
    assert status == 1
    assert "missed: bbox_AP is" in capsys.readouterr().out
    status = evaluate.main([*words, "--expect.AQ", "0.1"])
    assert status == 2
    assert "--expect.AQ: no such metric" in capsys.readouterr().err


def test_every_image_gets_a_picture_and_the_class_may_not_matter(foreign, tmp_path, capsys):
    words, _ = foreign
    folder = tmp_path / "pictures"
    status = evaluate.main([*words, "--pictures", str(folder)])
    assert status == 0
    assert len(list(folder.glob("*.jpg"))) == 4
    printed = capsys.readouterr().out
    assert "pictures: 4 in" in printed
    (line,) = re.findall("^{.*", printed, re.MULTILINE)
    result = json.loads(line)
    assert 0 < result["bbox_AP_any_class"] < 1


def test_a_final_folder_predicts_pictures_and_files(tmp_path):
    final = tmp_path / "final"
    detector = exported_detector("ssd, few layers")
    detector.save_final(final, CATEGORIES, {"height": 64, "width": 64})
    photo = tmp_path / "photo.jpg"
    Image.new("RGB", (90, 60), "#336699").save(photo)
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"nothing")
    out = tmp_path / "out"
    asked = "--format json coco --score-threshold 0.01 --max-detections 5 --device cpu"
    words = [final, photo, broken, "--out", out, *asked.split()]
    status = predict.main(list(map(str, words)))
    assert status == 1
    document = json.loads((out / "predictions.json").read_text())
    (image,) = document["images"]
    assert len(image["detections"]) == 5
    (error,) = document["errors"]
    assert error["file_name"] == str(broken)
    results = json.loads((out / "results.json").read_text())
    assert len(results) == 5
    assert Image.open(out / image["picture"]).width > 90
