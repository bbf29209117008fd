"""scripts/evaluate.py on runs of the training scripts gives the numbers of the runs."""

import json
from collections import Counter
from pathlib import Path

import pytest
from launching import checkpoint_state, rows
from places import ROOT

EVALUATE = ROOT / "scripts" / "evaluate.py"
CONVERT = ROOT / "scripts" / "convert.py"


def best_row(folder: Path) -> dict:
    """Return the row of the evaluation that the best checkpoint stands for."""
    best = checkpoint_state(folder / "checkpoints" / "best")["step"]
    (row,) = [row for row in rows(folder) if "val/bbox_AP" in row and row["step"] == best]
    return row


@pytest.mark.every_script
def test_folder_alone_gives_the_numbers_of_the_run(server, whole):
    row = best_row(whole)
    for weights, prefix in (("model", "val/"), ("ema", "val/ema/")):
        numbers = server.run(EVALUATE, f"{whole} --weights {weights}").ok().numbers
        assert 0 <= numbers.pop("bbox_AP_any_class") <= 1  # which a training does not compute
        expected = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(f"{prefix}bbox")}
        assert {key: value for key, value in numbers.items() if key.startswith("bbox")} == expected
    missed = server.run(EVALUATE, f"{whole} --expect.bbox_AP 0.99")
    assert missed.code == 1
    assert "missed: bbox_AP" in missed.text


@pytest.mark.every_script
def test_predictions_of_a_run_are_those_of_its_best_weights(server, script, whole):
    about = json.loads((whole / "report" / "predictions.about.json").read_text())
    row = best_row(whole)
    assert about["step"] == row["step"]
    assert "(raw weights)" in about["detector"]
    assert about["scores"] == {key: row[f"val/{key}"] for key in about["scores"]}
    if script.name != "train_sgg":  # whose file has boxes; relations stand beside them
        numbers = server.run(EVALUATE, f"{whole}/report/predictions.json").ok().numbers
        assert {key: numbers[key] for key in about["scores"]} == pytest.approx(about["scores"], abs=1e-12)
        assert {"voc07_mAP", "voc12_mAP"} <= numbers.keys()


@pytest.mark.slow
def test_folds_of_a_cross_validation_are_judged_as_one(server, script, settings, tmp_path):
    folds = []
    for number in (1, 2):
        args = settings(f"--run.output_dir {tmp_path} --run.name {number} --run.max_steps 1 --data.val {number}/2")
        folds.append(server.run(script, args, whole=True).ok().folder)
    first, second = folds
    together = server.run(EVALUATE, f"{first} {second} --save {tmp_path}/all.json").ok()
    assert "AP of the folds" in together.text
    assert "18 images" in together.text
    assert together.numbers == server.run(EVALUATE, f"{tmp_path}/all.json").ok().numbers
    assert together.numbers["bbox_AR100"] > 0
    server.run(EVALUATE, f"{first} {first}").refused("fold 1 is given 2 times, fold 2 is given 0 times")
    server.run(EVALUATE, f"{first} {tmp_path}/all.json").refused("not judged on a fold")


def test_predictions_are_all_there_is_without_annotations(server, whole, data, tmp_path):
    train = json.loads((data / "annotations" / "train.json").read_text())
    (tmp_path / "bare.json").write_text(json.dumps(train | {"annotations": [], "rel_annotations": []}))
    asked = f"{whole}/checkpoints/latest --split {tmp_path}/bare.json --image-dir {data}/train"
    ended = server.run(EVALUATE, f"{asked} --save {tmp_path}/found.json").ok()
    assert "nothing can be measured" in ended.text
    assert isinstance(json.loads((tmp_path / "found.json").read_text()), list)


def test_classes_in_another_order_give_the_same_boxes(server, whole, data, tmp_path):
    document = json.loads((data / "annotations" / "val.json").read_text())
    for category in document["categories"]:
        category["id"] = 100 - category["id"]
    for annotation in document["annotations"]:
        annotation["category_id"] = 100 - annotation["category_id"]
    document["categories"].reverse()
    (tmp_path / "turned.json").write_text(json.dumps(document))
    turned = f"--split {tmp_path}/turned.json --image-dir {data}/val --format coco"
    of_run = server.run(EVALUATE, f"{whole} --save {tmp_path}/run.json").ok()
    of_turned = server.run(EVALUATE, f"{whole} {turned} --save {tmp_path}/found.json").ok()
    assert "loss" in of_run.numbers
    assert "loss" not in of_turned.numbers
    expected = json.loads((tmp_path / "run.json").read_text())
    found = json.loads((tmp_path / "found.json").read_text())
    for detection in found:
        detection["category_id"] = 100 - detection["category_id"]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert len(found) > 20


def test_data_of_another_format_are_read(server, whole, data, tmp_path):
    server.run(CONVERT, f"{data}/annotations/val.json {tmp_path}/voc --image-dir {data}/val --to voc").ok()
    ended = server.run(EVALUATE, f"{whole} --path {tmp_path}/voc --split train --format voc").ok()
    assert "10 images" in ended.text


def test_as_many_detections_are_kept_as_asked(server, whole, tmp_path):
    """Training tells of images that have more objects: tests/scripts/test_train.py."""
    for number in (1, 4):
        found = tmp_path / f"{number}.json"
        server.run(EVALUATE, f"{whole} --max-detections {number} --save {found}").ok()
        counts = Counter(detection["image_id"] for detection in json.loads(found.read_text()))
        assert max(counts.values()) == number
