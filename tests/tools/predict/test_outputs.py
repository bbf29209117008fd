"""The files of predictions, and the names by which their images are found again."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import predict
from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.masks import bitmap, column_of, rles_of
from toolkit.data.annotations import ImageRow
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category, LabelledImages
from toolkit.tools.predict.image_files import find_images
from toolkit.tools.predict.outputs import (
    check_output_folder,
    clear_outputs,
    names_of_outputs,
    write_outputs,
)
from toolkit.tools.predict.program import picture_names, prediction_summary

CATEGORIES = [Category(7, "cup"), Category(90, "plate")]
FORMATS = ["json", "jsonl", "coco", "yolo", "voc", "csv"]
DETECTION = {
    "category_id": 90,
    "category": "plate",
    "bbox": [1.0, 2.0, 4.0, 8.0],
    "score": 0.5,
}
DOCUMENT = {
    "model": "test",
    "categories": [{"id": 7, "name": "cup"}, {"id": 90, "name": "plate"}],
    "images": [
        {
            "id": 5,
            "file_name": "x/a.jpg",
            "width": 10,
            "height": 20,
            "detections": [DETECTION],
        },
        {"id": 6, "file_name": "y/a.jpg", "width": 10, "height": 20, "detections": []},
    ],
    "errors": [],
}


def labelled(files, counts, boxes, scores, labels) -> LabelledImages:
    rows = [ImageRow(number, str(path), 10, 20) for number, path in enumerate(files, start=5)]
    return LabelledImages(rows, Boxes.found(counts, boxes, scores, labels), CATEGORIES)


FOUND = labelled(["x/a.jpg", "y/a.jpg"], [1, 0], [[1.0, 2.0, 5.0, 10.0]], [0.5], [1])


def images_in(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 20)).save(folder / name)


def test_every_format_has_the_same_boxes(tmp_path):
    write_outputs(DOCUMENT, FOUND, ["a.jpg", "a_2.jpg"], FORMATS, tmp_path)
    assert json.loads((tmp_path / "predictions.json").read_text()) == DOCUMENT
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == DOCUMENT["images"]
    (result,) = json.loads((tmp_path / "results.json").read_text())
    assert result == {
        "image_id": 5,
        "category_id": 90,
        "bbox": [1.0, 2.0, 4.0, 8.0],
        "score": 0.5,
    }
    assert (tmp_path / "labels" / "a.txt").read_text() == "1 0.3 0.3 0.4 0.4 0.5\n"
    assert (tmp_path / "labels" / "a_2.txt").read_text() == ""
    assert (tmp_path / "labels" / "classes.txt").read_text() == "cup\nplate\n"
    voc = ElementTree.parse(tmp_path / "annotations" / "a.xml")
    assert [float(each.text) for each in voc.find("object/bndbox")] == [1.0, 2.0, 5.0, 10.0]  # as our reader takes them
    assert voc.findtext("filename") == "a.jpg"
    assert voc.findtext("object/score") == "0.5"
    first, second = csv.DictReader((tmp_path / "predictions.csv").open(newline=""))
    assert first["image"] == os.path.abspath("x/a.jpg")  # the table lies in another folder
    columns = ("x1", "y1", "x2", "y2", "label", "score", "image_id", "category_id")
    assert [first[key] for key in columns] == [
        "1",
        "2",
        "5",
        "10",
        "plate",
        "0.5",
        "5",
        "90",
    ]
    assert second["image"] == os.path.abspath("y/a.jpg")
    assert second["label"] == second["score"] == ""


FOLDERS = ["x/a.png", "y/a.png", "y/z/b.png"]
ENDINGS = ["a.jpg", "a.png"]


@pytest.mark.parametrize(("format", "names"), [("voc", FOLDERS), ("yolo", FOLDERS), ("voc", ENDINGS)])
def test_labels_are_found_again_by_the_images(tmp_path, format, names):
    """Labels of x/a.png must not become those of y/a.png, nor of no image at all."""
    pictures = tmp_path / "pictures"
    images_in(pictures, *names)
    files = find_images([pictures / "x" / "a.png", pictures / "y"] if names is FOLDERS else [pictures])
    named = list(names_of_outputs(files, set(), [format]).values())
    count = len(named)
    boxes = [[1 + number, 2, 5 + number, 10] for number in range(count)]
    found = labelled(files, [1] * count, boxes, [0.5] * count, [0] * count)
    write_outputs(DOCUMENT, found, named, [format], tmp_path / "out")
    source = tmp_path / "out" / ("labels" if format == "yolo" else "")
    table = open_dataset("train", path=source, image_dir=str(pictures), cache_dir=tmp_path / "cache")
    assert [row.file_name for row in table.image_rows()] == names
    assert table.boxes().xyxy == pytest.approx(found.boxes.xyxy, abs=1e-4)


def test_pre_annotations_of_label_studio_are_the_boxes_and_pixels_that_were_found(tmp_path):
    images_in(tmp_path / "in", "x/a b.png", "y/c.png")
    files = [tmp_path / "in" / "x" / "a b.png", tmp_path / "in" / "y" / "c.png"]
    boxes = [[1, 2, 5, 10], [-3, 4, 4, 9], [1, 1, 9, 9]]
    masks = torch.zeros(3, 20, 10, dtype=torch.bool)
    masks[0, 2:10, 1:5] = True
    masks[0, 4:6, 2:4] = False
    masks[2, 5:8, 3] = True
    for drawn in (None, masks):
        found = labelled(files, [2, 1], boxes, [0.5, 0.4, 0.3], [1, 0, 0])
        if drawn is not None:
            found = replace(found, boxes=replace(found.boxes, extra={"masks": column_of(rles_of(drawn))}))
        write_outputs(DOCUMENT, found, ["a b.png", "c.png"], ["label_studio"], tmp_path / "out")
        tasks = json.loads((tmp_path / "out" / "label_studio.json").read_text())
        assert tasks[0]["data"]["image"] == "/data/local-files/?d=in/x/a%20b.png"
        assert [result["score"] for result in tasks[0]["predictions"][0]["result"]] == [0.5, 0.4]
        for task in tasks:
            task["annotations"] = task.pop("predictions")
        (tmp_path / "in" / "accepted.json").write_text(json.dumps(tasks))
        table = open_dataset("train", path=tmp_path / "in", cache_dir=tmp_path / "cache", masks=drawn is not None)
        assert table.file_names() == ["x/a b.png", "y/c.png"]
        expected = [[1, 2, 5, 10], [0, 4, 4, 9], [1, 1, 9, 9] if drawn is None else [3, 5, 4, 8]]
        assert table.boxes().xyxy == pytest.approx(np.array(expected), abs=1e-4)
        assert [table.class_names[label] for label in table.boxes().labels] == ["plate", "cup", "cup"]
    (first, without_a_pixel), (last,) = table.masks_of(0), table.masks_of(1)
    assert np.array_equal(bitmap(first, (20, 10)), masks[0])
    assert without_a_pixel is None
    assert np.array_equal(bitmap(last, (20, 10)), masks[2])


def test_images_that_would_share_a_file_of_labels_are_named_first(tmp_path, capsys):
    images_in(tmp_path / "pictures", "a.jpg", "a.png", "b.png")
    arguments = [
        "no_run",
        str(tmp_path / "pictures"),
        "--out",
        str(tmp_path / "out"),
        "--format",
        "yolo",
    ]
    assert predict.main(arguments) == 2
    said = capsys.readouterr().err
    assert "a.png would share the file labels/a.txt" in said
    assert "or choose --format coco" in said
    assert not (tmp_path / "out").exists()


def test_pictures_of_one_name_do_not_replace_each_other():
    given = {
        Path("x/a.jpg"): "a.jpg",
        Path("y/a.jpg"): "a.jpg",
        Path("z/a.webp"): "a.webp",
        Path("z/b/a.jpg"): "b/a.jpg",
    }
    named = picture_names({path: Path(name) for path, name in given.items()})
    assert list(map(str, named.values())) == [
        "pictures/a.jpg",
        "pictures/a_2.jpg",
        "pictures/a.png",
        "pictures/b/a.jpg",
    ]


def test_an_earlier_prediction_is_not_mixed_with_a_new_one(tmp_path):
    check_output_folder(tmp_path, [], overwrite=False)
    write_outputs(DOCUMENT, FOUND, ["a.jpg", "b.jpg"], ["json", "yolo"], tmp_path)
    (tmp_path / "mine.txt").write_text("")
    itself = tmp_path / "itself.jpg"
    itself.symlink_to(itself)
    check_output_folder(tmp_path, [itself], overwrite=True)
    with pytest.raises(BadInput, match="--overwrite"):
        check_output_folder(tmp_path, [], overwrite=False)
    with pytest.raises(BadInput, match="would overwrite it"):
        check_output_folder(tmp_path, [tmp_path / "labels" / "a.txt"], overwrite=True)
    clear_outputs(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "itself.jpg"}


def test_the_summary_names_what_was_written(tmp_path):
    write_outputs(DOCUMENT, FOUND, ["a.jpg", "b.jpg"], ["json", "yolo"], tmp_path)
    (tmp_path / "mine.txt").write_text("")
    document = DOCUMENT | {"errors": [], "score_threshold": 0.3}
    _, last = prediction_summary(document, tmp_path).splitlines()
    assert last == f"written: {tmp_path}/predictions.json, {tmp_path}/labels/"


def test_found_boxes_become_a_data_set_to_train_on(tmp_path):
    images_in(tmp_path, "x/a.png", "y/a.png")
    boxes = [[1, 2, 5, 10], [-3, 4, 4, 9], [12, 1, 15, 9]]  # the third lies outside of its image
    found = labelled(
        [tmp_path / "x/a.png", tmp_path / "y/a.png"],
        [2, 1],
        boxes,
        [0.5, 0.4, 0.3],
        [1, 0, 0],
    )
    write_outputs(DOCUMENT, found, ["a.png", "b.png"], ["coco"], tmp_path / "out")
    entries = json.loads((tmp_path / "out" / "dataset.json").read_text())["annotations"]
    assert [entry["score"] for entry in entries] == [0.5, 0.4]
    table = open_dataset(tmp_path / "out" / "dataset.json", image_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert table.categories == tuple(CATEGORIES)
    assert not table.problems
    assert [row.file_name for row in table.image_rows()] == ["x/a.png", "y/a.png"]
    assert table.boxes().xyxy.tolist() == [[1, 2, 5, 10], [0, 4, 4, 9]]
    assert table.boxes().labels.tolist() == [1, 0]


def test_a_mask_without_a_pixel_loses_no_detection(tmp_path):
    pixels = torch.zeros(2, 20, 10, dtype=torch.uint8)
    pixels[1, 1:3, 2:6] = 1
    masks = rles_of(pixels)
    found = labelled(["a.png"], [2], [[1, 1, 3, 3], [2, 1, 6, 3]], [0.9, 0.8], [0, 1])
    found = replace(found, boxes=replace(found.boxes, extra={"masks": column_of(masks)}))
    changes = write_outputs(DOCUMENT, found, ["a.png"], FORMATS, tmp_path)
    assert changes == ["yolo: of detections whose mask has no pixel, the boxes are written: 1"]
    first, second = (tmp_path / "labels" / "a.txt").read_text().splitlines()
    assert list(map(float, first.split())) == pytest.approx([0, 0.2, 0.1, 0.2, 0.1, 0.9])
    assert second.startswith("1 ")
    assert second.endswith(" 0.8")
    assert len(second.split()) > 6
    results = json.loads((tmp_path / "results.json").read_text())
    assert [entry["segmentation"] for entry in results] == [mask.as_json() for mask in masks]
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 3
    assert (tmp_path / "annotations" / "a.xml").read_text().count("<object>") == 2


def test_a_score_threshold_is_a_score(capsys):
    for text, words in (("50", "did you mean 0.5?"), ("-0.1", "expected a number from 0 to 1, or auto"), ("nan", "")):
        with pytest.raises(SystemExit) as ended:
            predict.main(["runs/none", "a.png", "--out", "out", f"--score-threshold={text}"])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    assert predict.score_or_auto("auto") == "auto"
