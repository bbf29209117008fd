"""Data as annotation tools leave them: what a row, a name or a link means is decided, or named as a fault."""

import importlib
import json
import os
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from flags import parser_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from places import ROOT
from test_commands import module_of

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.files import folders_below, read_yaml
from toolkit.data.annotations import ImageRow
from toolkit.data.decoding import decode_image
from toolkit.data.formats import open_dataset, recognise
from toolkit.data.layout import split_in_name
from toolkit.data.splits import check_not_empty, mostly_empty, open_all_splits, shared_images
from toolkit.data.table import Category, LabelledImages
from toolkit.run.command_line import parse_config
from toolkit.run.metrics_log import read_metrics
from toolkit.run.setting_types import format_value
from toolkit.tools import anchors
from toolkit.tools.arguments import inference_flags
from toolkit.tools.doctor.program import data_settings
from toolkit.tools.predict.outputs import write_outputs
from toolkit.tools.writers import write_folder

sys.path.append(str(ROOT / "scripts"))
import check_data  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))


def picture(path: Path, number: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(0, 255, (80, 100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


ONE_CLASS = "names: [a]\ntrain: images\nval: images\n"


def yolo(folder: Path, labels: dict[str, str], settings: str | None = ONE_CLASS) -> Path:
    for number, (name, text) in enumerate(labels.items()):
        picture(folder / "images" / f"{name}.png", number)
        (folder / "labels").mkdir(parents=True, exist_ok=True)
        (folder / "labels" / f"{name}.txt").write_text(text, encoding="utf-8")
    if settings is not None:
        (folder / "data.yaml").write_text(settings, encoding="utf-8")
    return folder


def boxes_of(folder: Path, split: str = "train", **options) -> list:
    """Boxes xyxy of each image in pixels, rounded."""
    table = open_dataset(split, path=folder, **options)
    boxes = table.boxes()
    return [boxes.xyxy[boxes.of_image(i)].round().tolist() for i in range(len(table))]


BOX = [40.0, 32.0, 60.0, 48.0]


@pytest.mark.parametrize(("row", "box"), [
    ("0 .5 .5 .2 .2", BOX), ("0 .5 .5 .2 .2 .9", BOX), ("0 .5 .5 .2 .2 .9 7", BOX), ("0 .5 .5 .2 .2 .9 7.0", BOX),
    ("0 .1 .1 .2 .1 .2 .2 .1 .2", [10.0, 8.0, 20.0, 16.0]), ("0 .1 .1 .2 .1 .2 .2 .1 .2 .95", [10.0, 8.0, 20.0, 16.0]),
    ("0 .1 .1 .2 .1 .2 .2 .95", [10.0, 8.0, 20.0, 16.0]), ("0 .5 .5 .2 .2 7", BOX),
    ("0 .1 .1 .2 .1 .2 .2 .1 .2 7", [10.0, 8.0, 20.0, 16.0]), ("0 .1 .1 .2 .1 .2 .2 .9 7", [10.0, 8.0, 20.0, 16.0]),
    ("0 .5 .4 .6 .5 .5 .6 .4 .5", BOX), ("0 0 0 1 0 1 1 0 1", [0.0, 0.0, 100.0, 80.0]),
])  # fmt: skip
def test_the_numbers_of_a_yolo_row(tmp_path, row, box):
    assert boxes_of(yolo(tmp_path, {"a": row})) == [[box]]


@pytest.mark.parametrize(("rows", "fault"), [
    (["0 .5 .5 .2 .2 .9 0.3"], "line 1: 6 numbers can be a triangle, or a box with its confidence and a track"),
    (["0 .1 .1 .2 .1 .2 .2"], "6 numbers can be a triangle"),
    (["0 .5 .5 .2 .2 .5 .5 2", "0 .5 .5 .2 .2 .5 .5 2"], "line 2: 7 numbers look like a box with key points"),
    (["0 .5 .5 .2 .2 .9 .9 1"], "7 numbers are not a polygon"),
    (["0 .95 .5 .2 .2 .9 1"], "6 numbers can be a triangle"),
    (["0 .5 .5 .2 .2 .5 .5 .45 .5"], "8 numbers look like a box with key points"),
    (["0 .5 .5 .2 .2 .5 .5 .45 .5"] * 3, "line 3: 8 numbers look like a box with key points"),
    (["0 .5 .5 .2 .2 .5 .5 2 .45 .5 1 .55 .5 0"] * 3, "13 numbers look like a box with key points"),
    (["0 .5 .5 .2 .2 .5 .5 .9 .45 .5 .8 .88"], "11 numbers look like a box with key points"),  # predicted
    (["0 .5 .5 .2 .2 .5 .5 .9 .45 .5 .8 .88 3"], "12 numbers look like a box with key points"),
    (["0 .1 .1 .2 .1 .2 .2 .1 .2 7.5"], "9 numbers are not a polygon"),
    (["0 .1 .1 .2 .1 .2 .2 .1 .2 .9 1"], "the last two of 10 numbers can be a corner of a polygon, or its confidence"),
    (["0 .5 .5 .4 .1 1.57", "0 .5 .5 .4 .1 .3"], "line 2: the fifth number of a line is neither a confidence"),
])  # fmt: skip
def test_a_yolo_row_that_can_be_two_things_is_a_fault(tmp_path, rows, fault):
    with pytest.raises(BadInput) as error:
        boxes_of(yolo(tmp_path, {"a": "\n".join(rows)}))
    assert any(fault in problem for problem in error.value.problems)
    assert len([problem for problem in error.value.problems if "a.txt, line" in problem]) == len(rows)


def test_the_rows_of_all_files_decide(tmp_path):
    polygon = "0 .1 .1 .2 .1 .2 .2 .1 .2"
    assert boxes_of(yolo(tmp_path / "a", {"a": polygon, "b": "0 .1 .1 .2 .1 .2 .2"})) == [[[10.0, 8.0, 20.0, 16.0]]] * 2
    points = "0 .5 .5 .2 .2 .5 .5 2 .45 .5 1 .55 .5 0\n" * 3
    said = yolo(tmp_path / "b", {"a": points}, "names: [a]\ntrain: images\nval: images\nkpt_shape: [3, 3]\n")
    assert boxes_of(said) == [[BOX] * 3]
    tracks = {"a": "0 .5 .5 .2 .2 .9 1", "b": "0 .5 .5 .2 .2 .9 2\n0 .1 .1 .2 .1 .2 .2 .1 .2 .8 1"}
    assert boxes_of(yolo(tmp_path / "c", tracks)) == [[BOX], [BOX, [10.0, 8.0, 20.0, 16.0]]]


def test_a_corner_that_is_wrong_does_not_make_tracks_of_all_polygons(tmp_path):
    with pytest.raises(BadInput) as error:
        boxes_of(yolo(tmp_path, {"a": "0 .1 .1 .2 .1 .2 .2 .1 .2\n0 .1 .1 .2 .1 .2 .2 .1 7"}))
    assert [problem for problem in error.value.problems if "a.txt" in problem] == [
        "error: images/a.png: a.txt, line 2: the last two of 8 numbers can be a corner of a polygon, or its confidence "
        "and track; leave out what is behind the polygon, or write its first corner once more at its end"
    ]


def test_kpt_shape_says_what_rows_are(tmp_path):
    said = ONE_CLASS + "kpt_shape: [2, 3]\n"
    points = "0 .5 .5 .2 .2 .5 .5 2 .45 .5 1"
    rows = [points, f"{points} .9", f"{points} .9 7", "0 .5 .5 .2 .2"]
    assert boxes_of(yolo(tmp_path / "points", {"a": "\n".join(rows)}, said)) == [[BOX] * 4]
    with pytest.raises(BadInput, match="8 numbers; expected a box and 6 numbers of key points, as `kpt_shape"):
        boxes_of(yolo(tmp_path / "polygon", {"a": "0 .1 .1 .2 .1 .2 .2 .1 .2"}, said))
    none = yolo(tmp_path / "none", {"a": "0 .5 .5 .45 .5 .6 .6 .4 .55"}, ONE_CLASS + "kpt_shape: null\n")
    assert boxes_of(none) == [[[40.0, 40.0, 60.0, 48.0]]]
    with pytest.raises(BadInput, match=r"is 'many'; expected \[points, 2 or 3\]"):
        boxes_of(yolo(tmp_path / "odd", {"a": points}, ONE_CLASS + "kpt_shape: many\n"))


@pytest.mark.parametrize("settings", [None, "names: [a, b]\ntrain: images\nval: images\n"])
def test_class_ids_may_be_written_as_floats_and_files_begin_with_a_mark(tmp_path, settings):
    folder = yolo(tmp_path, {"a": "\ufeff1.0 .5 .5 .2 .2\n0.0 .5 .5 .2 .2\n"}, settings)
    table = open_dataset("train", path=folder)
    assert len(table.categories) == 2 and table.boxes().labels.tolist() == [1, 0]


def test_names_of_classes_are_as_they_are_written(tmp_path):
    text = "names:\n  0: yes\n  1: 007\n  2: null\n  3: 1.0\ntrain: images\nval: images\n"
    assert open_dataset("train", path=yolo(tmp_path / "a", {"a": "3 .5 .5 .2 .2"}, text)).class_names == [
        "yes", "007", "null", "1.0"]  # fmt: skip
    text = "names: [on, 1e3, ~, 2024-01-01]\ntrain: images\nval: images\n"
    assert open_dataset("train", path=yolo(tmp_path / "b", {"a": "3 .5 .5 .2 .2"}, text)).class_names == [
        "on", "1e3", "~", "2024-01-01"]  # fmt: skip


def test_class_files_of_annotation_tools(tmp_path):
    folder = yolo(tmp_path / "roboflow", {"a": "1 .5 .5 .2 .2"}, None)
    (folder / "_darknet.labels").write_text("cat\ndog\n")
    assert open_dataset("train", path=folder).class_names == ["cat", "dog"]
    folder = yolo(tmp_path / "label_studio", {"a": "1 .5 .5 .2 .2"}, None)
    (folder / "classes.txt").write_text("cat\ndog\n")
    notes = {"categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}], "info": {"year": 2026}}
    (folder / "notes.json").write_text(json.dumps(notes))
    assert recognise(folder).format == "yolo" and open_dataset("train", path=folder).class_names == ["cat", "dog"]


def test_the_export_of_cvat(tmp_path):
    picture(tmp_path / "obj_train_data" / "a.png")
    (tmp_path / "obj_train_data" / "a.txt").write_text("1 .5 .5 .2 .2")
    (tmp_path / "obj.names").write_text("cat\ndog\n")
    (tmp_path / "train.txt").write_text("data/obj_train_data/a.png\n")
    assert boxes_of(tmp_path) == [[BOX]] and open_dataset("train", path=tmp_path).class_names == ["cat", "dog"]


def test_what_a_yaml_file_says_and_does_not_hold_is_said(tmp_path):
    row = {"a": "0 .5 .5 .2 .2"}
    folder = yolo(tmp_path / "gone", row, "names: [a]\ntrain: images\nval: ../valid/images\n")
    assert recognise(folder).splits == ("train",)
    assert "not there: val (data.yaml names " in str(recognise(folder))
    folder = yolo(tmp_path / "count", row, f"nc: 3\n{ONE_CLASS}")
    problems = [problem.message for problem in open_dataset("train", path=folder).problems]
    assert problems == ["`nc` is 3, and `names` has 1; `names` counts"]
    folder = yolo(tmp_path / "odd", row, "names: [[a], b]\ntrain: images\nval: images\n")
    with pytest.raises(BadInput, match=r"`names` of the YAML file: \['a'\] is not a name"):
        open_dataset("train", path=folder)
    folder = yolo(tmp_path / "encoded", row)
    (folder / "data.yaml").write_text(ONE_CLASS, encoding="utf-16")
    with pytest.raises(BadInput) as error:
        open_dataset("train", path=folder)
    assert error.value.problems[1].startswith("error: data.yaml: cannot be read as YAML in UTF-8")


def test_splits_may_each_list_the_classes(tmp_path):
    folder = tmp_path
    for number, split in enumerate(("train", "valid")):
        picture(folder / split / "a.png", number)
        (folder / split / "a.txt").write_text("1 .5 .5 .2 .2")
        (folder / split / "_darknet.labels").write_text("cat\ndog\n")
    assert open_dataset("val", path=folder).class_names == ["cat", "dog"]
    (folder / "valid" / "_darknet.labels").write_text("dog\ncat\n")
    with pytest.raises(BadInput, match="its splits list different classes"):
        open_dataset("val", path=folder)


def test_classes_that_are_listed_later_are_read(tmp_path):
    folder = yolo(tmp_path, {"a": "0 .5 .5 .2 .2"}, None)
    assert open_dataset("train", path=folder).class_names == ["class 0"]
    (folder / "classes.txt").write_text("cat\n")
    assert open_dataset("train", path=folder).class_names == ["cat"]


def test_another_text_beside_the_labels_is_not_taken_for_them(tmp_path):
    folder = yolo(tmp_path, {"b": "0 .5 .5 .2 .2"}, None)
    (folder / "labels" / "README.txt").write_text("How these were drawn\n")
    assert boxes_of(folder) == [[BOX]]


# ---------------------------------------------------------------- links


def linked_folder(tmp_path: Path, format: str) -> Path:
    """A data set whose folder of images is a link to one elsewhere."""
    picture(tmp_path / "store" / "a.png")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "images").symlink_to(tmp_path / "store")
    if format.startswith("yolo"):
        (folder / "labels").mkdir()
        (folder / "labels" / "a.txt").write_text("0 .5 .5 .2 .2\n")
        if format == "yolo, YAML":
            (folder / "data.yaml").write_text(f"path: {folder}\nnames: [a]\ntrain: images\nval: images\n")
        if format == "yolo, list":
            (folder / "train.txt").write_text(f"{folder}/images/a.png\n")
            (folder / "data.yaml").write_text(f"names: [a]\ntrain: {folder}/train.txt\nval: {folder}/train.txt\n")
    elif format == "csv":
        (folder / "boxes.csv").write_text("image,x1,y1,x2,y2,label\nimages/a.png,40,32,60,48,a\n")
    elif format == "coco":
        annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [40, 32, 20, 16], "area": 320, "iscrowd": 0}
        images = [{"id": 1, "file_name": "images/a.png", "width": 100, "height": 80}]
        document = {"images": images, "annotations": [annotation], "categories": [{"id": 1, "name": "a"}]}
        (folder / "boxes.json").write_text(json.dumps(document))
    else:
        (folder / "Annotations").mkdir()
        bounds = "<xmin>40</xmin><ymin>32</ymin><xmax>60</xmax><ymax>48</ymax>"
        entry = f"<object><name>a</name><bndbox>{bounds}</bndbox></object>"
        (folder / "Annotations" / "a.xml").write_text(f"<annotation><filename>a.png</filename>{entry}</annotation>")
    return folder


@pytest.mark.parametrize("format", ["yolo", "yolo, YAML", "yolo, list", "csv", "coco", "voc"])
def test_a_linked_folder_of_images_is_read_in_every_format(tmp_path, format):
    assert boxes_of(linked_folder(tmp_path, format)) == [[BOX]]


@pytest.mark.parametrize("format", ["yolo", "voc"])
def test_linked_folders_in_folders_are_read(tmp_path, format):
    folder = linked_folder(tmp_path, format)
    (folder / "images").unlink()
    (folder / "images").mkdir()
    picture(tmp_path / "store" / "deeper" / "b.png", 1)
    (folder / "images" / "linked").symlink_to(tmp_path / "store")
    (folder / "images" / "linked" / "up").symlink_to(folder)  # leads to itself
    labels = folder / ("labels" if format == "yolo" else "Annotations")
    kept = next(file for file in labels.iterdir()).read_text()
    for name in ("a", "deeper/b"):
        (labels / "linked" / name).parent.mkdir(parents=True, exist_ok=True)
        suffix = "txt" if format == "yolo" else "xml"
        text = kept.replace("a.png", Path(name).name + ".png")
        (labels / "linked" / f"{name}.{suffix}").write_text(text)
    (labels / f"a.{suffix}").unlink()
    if format == "yolo":
        (folder / "data.yaml").write_text("names: [a]\ntrain: images\nval: images\n")
    assert boxes_of(folder) == [[BOX], [BOX]]


def test_folders_below_are_listed_once(tmp_path):
    for name in ("data/b/inner", "data/c", "elsewhere/d"):
        (tmp_path / name).mkdir(parents=True)
    data = tmp_path / "data"
    (data / "a").symlink_to(data / "b")
    (data / "c" / "out").symlink_to(tmp_path / "elsewhere")
    (data / "c" / "up").symlink_to(tmp_path)
    (data / "c" / "self").symlink_to(data / "c" / "self")
    (tmp_path / "elsewhere" / "back").symlink_to(data)
    names = [path.relative_to(data).as_posix() for path in folders_below(data)]
    assert names == [".", "b", "b/inner", "c", "c/out", "c/out/d"]


def test_all_formats_look_at_a_folder_once(tmp_path, monkeypatch):
    folder = yolo(tmp_path, {"a": "0 .5 .5 .2 .2"})
    listed = Counter()
    scandir = os.scandir

    def counted(path):
        listed[os.fspath(path)] += 1
        return scandir(path)

    monkeypatch.setattr("os.scandir", counted)
    found = recognise(folder)
    assert found.format == "yolo" and not found.others and not found.unused
    assert {str(folder), str(folder / "images"), str(folder / "labels")} <= listed.keys()
    assert {times for path, times in listed.items() if path.startswith(str(folder))} == {1}


@pytest.mark.parametrize("format", ["yolo", "yolo, YAML", "yolo, list", "csv", "coco", "voc"])
def test_a_linked_image_is_read_in_every_format(tmp_path, format):
    """One link among the files of a folder, and a link within the data; each is read, and a note counts the first."""
    folder = linked_folder(tmp_path, format)
    (folder / "images").unlink()
    (folder / "images").mkdir()
    (folder / "images" / "a.png").symlink_to(tmp_path / "store" / "a.png")
    table = open_dataset("train", path=folder)
    assert table.boxes().xyxy.tolist() == [BOX]
    notes = [problem.message for problem in table.problems if "links" in problem.message]
    assert len(notes) == 1 and notes[0].startswith("1 of 1 images are links to files elsewhere, which are read: ")
    assert decode_image(table.image_source(table.row(0))).shape == (3, 80, 100)
    (folder / "images" / "a.png").unlink()
    picture(folder / "kept" / "a.png")
    (folder / "images" / "a.png").symlink_to("../kept/a.png")
    assert boxes_of(folder) == [[BOX]]


@pytest.mark.parametrize("format", ["yolo", "csv", "coco", "voc"])
def test_a_linked_image_that_leads_nowhere_is_a_fault(tmp_path, format):
    folder = linked_folder(tmp_path, format)
    (tmp_path / "store" / "a.png").rename(tmp_path / "store" / "b.png")
    (folder / "images").unlink()
    (folder / "images").mkdir()
    (folder / "images" / "a.png").symlink_to(tmp_path / "store" / "a.png")
    with pytest.raises(BadInput):
        boxes_of(folder)
    picture(folder / "images" / "b.png")  # beside one that is there
    document = next((file for file in folder.rglob("a.txt")), None)
    if document:
        document.with_name("b.txt").write_text(document.read_text())
    (folder / "images" / "c.png").symlink_to(folder / "images" / "c.png")  # leads to itself
    if format == "yolo":
        with pytest.raises(BadInput) as error:
            boxes_of(folder)
        said = str(error.value)
        assert f"error: {folder}/images/a.png" in said and f"error: {folder}/images/c.png" in said
        assert "images/b.png" not in said


def test_a_link_to_itself_hides_no_split(tmp_path):
    for split in ("train", "val"):
        coco_file(tmp_path / split / "_annotations.coco.json", ["a.png"])
        picture(tmp_path / split / "a.png")
    (tmp_path / "up").symlink_to(tmp_path / "up")
    assert recognise(tmp_path).splits == ("train", "val")


def test_hard_links_of_a_conversion_are_of_the_file_behind_a_link(tmp_path):
    """A relative link, copied as a link, would lead nowhere."""
    folder = linked_folder(tmp_path, "voc")
    (folder / "images").unlink()
    (folder / "images").mkdir()
    (folder / "images" / "a.png").symlink_to("../../store/a.png")
    write_folder(open_dataset("train", path=folder), tmp_path / "far" / "away" / "out", "train", "coco", link=True)
    (copy,) = (tmp_path / "far").rglob("a.png")
    assert not copy.is_symlink() and copy.samefile(tmp_path / "store" / "a.png")


# ---------------------------------------------------------------- data without objects


def test_data_whose_labels_are_not_found_are_asked_about(tmp_path, capsys):
    folder = yolo(tmp_path / "data", dict.fromkeys("abc", ""))
    table = open_dataset("train", path=folder)
    assert mostly_empty(table).startswith("3 of 3 images have no object, such as ")
    with pytest.raises(BadInput, match="Were the labels found"):
        check_not_empty(table, is_allowed=False)
    check_not_empty(table, is_allowed=True)
    assert check_data.main([str(folder)]) == 2
    printed = capsys.readouterr().out
    assert "accelerate launch" not in printed and "look where the labels are" in printed
    other = yolo(tmp_path / "other", {"d": "0 .5 .5 .2 .2"})
    joined = open_dataset(["train", "train"], path=[str(other), str(folder)])
    with pytest.raises(BadInput, match="3 of 3 images of data have no object, such as .*Were the labels found"):
        check_not_empty(joined, is_allowed=False)
    some = yolo(tmp_path / "some", {"a": "0 .5 .5 .2 .2", "b": "", "c": ""})
    assert mostly_empty(open_dataset("train", path=some)) == ""


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize(("name", "split"), [
    ("custom_train.json", "train"), ("annotations_test.json", "test"), ("train_labels.csv", "train"),
    ("instances_val2017.json", "val"), ("My-Validation set.json", "val"), ("latest.json", None), ("contest.csv", None),
    ("train_val.json", None), ("trainval.json", None), ("annotations.json", None), ("dataset_training.csv", "train"),
    ("testLabels.json", "test"), ("testset.csv", "test"), ("instances_test-dev2017.json", "test"), ("dev.csv", "val"),
    ("val_test.json", "test"), ("COCOTrain.json", "train"), ("train_test.csv", None), ("my_TRAIN.2.json", "train"),
])  # fmt: skip
def test_the_words_of_a_name_say_the_split(name, split):
    assert split_in_name(name) == split


def coco_file(path: Path, images: list[str], folder: str = "") -> None:
    annotation = {"image_id": 1, "category_id": 1, "bbox": [40, 32, 20, 16], "area": 320, "iscrowd": 0}
    rows = [{"id": i, "file_name": folder + name, "width": 100, "height": 80} for i, name in enumerate(images, 1)]
    annotations = [annotation | {"id": row["id"], "image_id": row["id"]} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"images": rows, "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}
    path.write_text(json.dumps(document))


def layout(folder: Path, kind: str) -> None:
    names = [f"{number}.png" for number in range(6)]
    at = {"folders": ("train2017", "val2017")}.get(kind, ("images", "images"))
    for number, name in enumerate(names):
        picture(folder / at[number >= 4] / name, number)
    if kind == "custom":
        coco_file(folder / "custom_train.json", names[:4], "images/")
        coco_file(folder / "custom_val.json", names[4:], "images/")
    elif kind == "test":
        coco_file(folder / "annotations_train.json", names[:4], "images/")
        coco_file(folder / "annotations_test.json", names[4:], "images/")
    elif kind == "unnamed":
        coco_file(folder / "annotations.json", names[:4], "images/")
        coco_file(folder / "annotations_val.json", names[4:], "images/")
        coco_file(folder / "old_train.json", names[:2], "images/")
        coco_file(folder / "annotations" / "train.json", names[:4], "../images/".replace("../", ""))
    elif kind == "folders":
        coco_file(folder / "annotations" / "train.json", names[:4])
        coco_file(folder / "annotations" / "val.json", names[4:])
    else:
        head = "image,x1,y1,x2,y2,label\n"
        (folder / "train_labels.csv").write_text(head + "".join(f"images/{n},40,32,60,48,a\n" for n in names[:4]))
        (folder / "test_labels.csv").write_text(head + "".join(f"images/{n},40,32,60,48,a\n" for n in names[4:]))


def printed_settings(capsys, monkeypatch, *arguments: str):
    """(settings of the command that check_data.py prints, as its script parses them, and all that was printed)."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["script"])
    check_data.main([*arguments])
    printed = capsys.readouterr().out
    words = shlex.split(printed[printed.rindex("accelerate launch") :].splitlines()[0])
    return parse_config(module_of(words[2]).Config, words[3:]), printed


def opened_sizes(config, folder: Path) -> list[int]:
    """Numbers of images in the training, validation and test data of settings."""
    reading = {key: getattr(config.data, key) for key in ("path", "format", "image_dir")}
    test = config.eval.test_split
    tables = open_all_splits(config.data.train, config.data.val, test, folder, say=print, **reading)
    return [len(table) for table in tables if table is not None]


@pytest.mark.parametrize(("kind", "sizes"), [
    ("custom", [4, 2]), ("test", [4, 2]), ("unnamed", [4, 2]), ("folders", [4, 2]), ("csv", [4, 2])
])  # fmt: skip
def test_the_command_that_is_printed_opens_the_splits_that_are_there(tmp_path, capsys, monkeypatch, kind, sizes):
    layout(tmp_path / "data", kind)
    config, printed = printed_settings(capsys, monkeypatch, str(tmp_path / "data"))
    assert "scripts/train_faster_rcnn.py" in printed, "which finds most after minutes on a CPU"
    opened = opened_sizes(config, tmp_path / "run")
    if kind in ("test", "csv"):  # a share validates, and the test split is for the end
        assert (config.data.val, config.eval.test_split) == ("0.2", "test")
        assert "to validate on the test split" in printed
        opened = [opened[0] + opened[1], opened[2]]
    assert opened == sizes
    assert "not used" in printed if kind == "unnamed" else "not used" not in printed


@pytest.mark.parametrize(("files", "sizes", "unused"), [
    (["labels/train", "labels/val"], [3, 3], []),
    (["annotation/instances_train", "annotation/instances_val"], [3, 3], []),
    (["my_labels/train", "my_labels/val"], [3, 3], []),
    (["annotations/train", "annotations/eval"], [3, 3], []),
    (["annotations/instances_trainval35k", "annotations/instances_minival"], [3, 3], []),
    (["annotations/training", "annotations/validation", "annotations/testing"], [2, 2, 2], []),
    (["annotations/train", "labels/train", "labels/val"], [2, 2], ["labels/train.json"]),
    (["annotations/train", "annotations/dev", "annotations/trainval"], [2, 2], ["annotations/trainval.json"]),
    (["annotations/train", *(f"annotations/night{letter}" for letter in "abcdef")], [1],
     [f"annotations/night{letter}.json" for letter in "abcdef"]),
])  # fmt: skip
def test_coco_files_are_found_in_folders_called_so_and_the_others_named(
    tmp_path, capsys, monkeypatch, files, sizes, unused
):
    for number in range(6):
        picture(tmp_path / "data" / "images" / f"{number}.png", number)
    for name, part in zip(files, np.array_split(np.arange(6), len(files)), strict=True):
        coco_file(tmp_path / "data" / f"{name}.json", [f"{number}.png" for number in part] or ["0.png"])
    config, printed = printed_settings(capsys, monkeypatch, str(tmp_path / "data"))
    assert all(name in printed for name in unused) and ("not used, as" in printed) == bool(unused)
    if config.data.val == "0.2":
        assert recognise(tmp_path / "data").splits == ("train",)
    else:
        assert opened_sizes(config, tmp_path / "run") == sizes


def test_coco_files_beside_yolo_labels_do_not_take_their_place(tmp_path):
    folder = yolo(tmp_path, {"a": "0 .5 .5 .2 .2"})
    coco_file(folder / "labels" / "train.json", ["a.png"])
    assert recognise(folder).format == "yolo"


@pytest.mark.parametrize("format", ["coco", "csv"])
@pytest.mark.parametrize(("files", "settings", "sizes"), [
    (["my_train", "my_val"], ("my_train", "my_val", None), [1, 1]),
    (["my_test", "my_val", "a"], ("a", "my_val", "my_test"), [1, 1, 1]),
    (["train_1", "train_2", "val"], ("[train_1, train_2]", "val", None), [2, 1]),
    (["train", "val", "notes"], ("train", "val", None), [1, 1]),
])  # fmt: skip
def test_the_command_for_files_names_them_all(tmp_path, capsys, monkeypatch, format, files, settings, sizes):
    split_files(tmp_path, format, dict(zip(files, "xyz", strict=False)))
    suffix = ".json" if format == "coco" else ".csv"
    paths = {name: str(tmp_path / f"{name}{suffix}") for name in files}
    config, printed = printed_settings(capsys, monkeypatch, *paths.values())
    train = [paths[name] for name in settings[0].strip("[]").split(", ")]
    assert config.data.train == (train if len(train) > 1 else train[0])
    assert config.data.val == paths[settings[1]] and config.eval.test_split == paths.get(settings[2])
    assert opened_sizes(config, tmp_path / "run") == sizes
    named = f"not used by this command: {tmp_path / 'notes'}{suffix}\n"
    assert (named in printed) == ("notes" in files)


def test_folders_that_were_exported_one_by_one_are_splits(tmp_path, capsys, monkeypatch):
    folders = []
    for number, split in enumerate(("train", "valid", "test")):
        picture(tmp_path / split / "a.png", number)
        coco_file(tmp_path / split / "_annotations.coco.json", ["a.png"])
        folders.append(str(tmp_path / split))
    for sources in (folders, [f"{folder}/_annotations.coco.json" for folder in folders]):
        config, _ = printed_settings(capsys, monkeypatch, *sources)
        assert [config.data.train, config.data.val, config.eval.test_split] == sources
        assert opened_sizes(config, tmp_path / "run") == [1, 1, 1]


def test_several_folders_are_one_set(tmp_path, capsys, monkeypatch):
    split_files(tmp_path / "a", "coco", {"train": "x", "val": "y", "test": "z"})
    split_files(tmp_path / "b", "csv", {"train": "p", "dev": "q"})
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    config, printed = printed_settings(capsys, monkeypatch, *folders)
    assert config.data.path == folders and config.eval.test_split is None
    assert f"not used by this command: test of {folders[0]}\n" in printed
    assert opened_sizes(config, tmp_path / "run") == [2, 2]


@pytest.mark.parametrize(("value", "said"), [
    ("1", "no training data: there is only 1 (--data.train NAME --data.val NAME say which are which)"),
    ("test", "no training data: there is only test"),
])  # fmt: skip
def test_what_does_not_train_by_itself_is_said(tmp_path, capsys, value, said):
    picture(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text(f"image,x1,y1,x2,y2,label,split\na.png,40,32,60,48,a,{value}\n")
    check_data.main([str(tmp_path)])
    assert said in capsys.readouterr().out


def test_data_without_relations_are_not_offered_for_scene_graphs(tmp_path, capsys):
    split_files(tmp_path, "coco", {"train": "a", "val": "b"})
    check_data.main([str(tmp_path), "--script", "train_sgg"])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("train_sgg needs relations, and these data have none")


def split_files(folder: Path, format: str, splits: dict[str, str]) -> None:
    """Write a data set of one image a split: name of its file or folder -> name of the image."""
    for number, (split, name) in enumerate(splits.items()):
        row = f"images/{name}.png,40,32,60,48,a\n"
        xml = VOC_FILE.format(name=name)
        picture(folder / ("JPEGImages" if format == "voc" else "images") / f"{name}.png", number)
        files = {
            "coco": {},
            "csv": {f"{split}.csv": f"image,x1,y1,x2,y2,label\n{row}"},
            "voc": {f"ImageSets/Main/{split}.txt": name, f"Annotations/{name}.xml": xml},
            "voc folders": {f"{split}/{name}.xml": xml},
            "yolo": {f"labels/{split}/{name}.txt": "0 .5 .5 .2 .2"},
        }[format]
        if format == "coco":
            coco_file(folder / f"{split}.json", [f"{name}.png"], "images/")
        if format == "yolo":
            picture(folder / "images" / split / f"{name}.png", number)
        if format == "voc folders":
            picture(folder / split / f"{name}.png", number)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)


VOC_FILE = (
    "<annotation><filename>{name}.png</filename><object><name>a</name><bndbox><xmin>40</xmin><ymin>32</ymin>"
    "<xmax>60</xmax><ymax>48</ymax></bndbox></object></annotation>"
)


@pytest.mark.parametrize("format", ["coco", "csv", "voc", "voc folders", "yolo"])
@pytest.mark.parametrize(("splits", "read", "unused"), [
    ({"my_train": "t", "my_dev": "v"}, {"train": "t", "val": "v"}, []),
    ({"my_test": "x", "my_train": "t"}, {"train": "t", "test": "x"}, []),
    ({"old_train": "o", "testset": "x", "train": "t", "valset": "v"}, {"train": "t", "val": "v", "test": "x"},
     ["old_train"]),
])  # fmt: skip
def test_the_words_of_names_decide_in_every_format(tmp_path, format, splits, read, unused):
    split_files(tmp_path, format, splits)
    recognised = recognise(tmp_path)
    assert set(recognised.splits) == set(read)
    for split, name in read.items():
        names = open_dataset(split, path=tmp_path).file_names()
        assert [Path(file).stem for file in names] == [name]
    assert [Path(name).stem for name in recognised.unused] == unused
    assert all(name in str(recognised) for name in unused)


def test_the_folders_of_a_yaml_file_are_those_that_are_read(tmp_path):
    split_files(tmp_path, "yolo", {"train": "t", "val": "v", "test": "x"})
    (tmp_path / "data.yaml").write_text("names: [a]\ntrain: images/train\nval: images/val\n")
    assert recognise(tmp_path).unused == ("images/test",)


@pytest.mark.parametrize("folders", ["{}2017", "{}_images", "images/{}2017", "{}_set/images"])
@pytest.mark.parametrize("format", ["coco", "csv"])
def test_folders_of_images_are_found_by_the_words_of_their_names(tmp_path, format, folders):
    for number, split in enumerate(("train", "val")):  # one name, and other images
        picture(tmp_path / folders.format(split) / "a.png", number)
        if format == "coco":
            coco_file(tmp_path / "annotations" / f"{split}.json", ["a.png"])
        else:
            (tmp_path / f"{split}.csv").write_text("image,x1,y1,x2,y2,label\na.png,40,32,60,48,a\n")
    for split in ("train", "val"):
        table = open_dataset(split, path=tmp_path)
        assert table.image_source(table.row(0)) == (tmp_path / folders.format(split) / "a.png").resolve()


def test_one_table_may_come_in_parts(tmp_path):
    split_files(tmp_path, "csv", {"train_1": "a", "train_2": "b", "train_old": "c"})
    assert len(open_dataset("train", path=tmp_path)) == 2
    assert recognise(tmp_path).unused == ("train_old.csv",)


def test_the_same_images_in_two_splits_are_said(tmp_path, capsys):
    text = "names: [a]\ntrain: train/images\nval: other/images\ntest: other/images\n"
    folder = tmp_path / "data"
    for part, names in (("train", "ab"), ("other", "cd")):
        yolo(folder / part, dict.fromkeys(names, "0 .5 .5 .2 .2"), None)
    (folder / "data.yaml").write_text(text)
    check_data.main([str(folder)])
    assert "val and test have the same 2 images" in capsys.readouterr().out
    said = []
    open_all_splits("train", "val", "test", tmp_path / "run", say=said.append, path=str(folder))
    warnings = [line for line in said if line.startswith("warning")]
    assert [line.split(":")[1] for line in warnings] == [
        " the validation data and the test split have the same 2 images"
    ]


@pytest.mark.parametrize(("val", "said"), [
    ("train: images\nval: images", "the training data and the validation data have the same 2 images"),
    ("train: all.txt\nval: some.txt", "1 of the 1 images of the validation data are in the training data too"),
    ("train: some.txt\nval: all.txt", "1 of the 2 images of the validation data are in the training data too"),
    ("train: some.txt\nval: other.txt", None),
])  # fmt: skip
def test_validation_data_that_are_training_data_are_said(tmp_path, val, said):
    folder = yolo(tmp_path / "data", dict.fromkeys("ab", "0 .5 .5 .2 .2"), f"names: [a]\n{val}\n")
    for name, images in (("all", "ab"), ("some", "a"), ("other", "b")):
        (folder / f"{name}.txt").write_text("".join(f"images/{image}.png\n" for image in images))
    lines = []
    open_all_splits("train", "val", None, tmp_path / "run", say=lines.append, path=str(folder))
    warnings = [line.removeprefix("warning: ").split(":")[0] for line in lines if line.startswith("warning")]
    assert warnings == ([said] if said else [])


def test_splits_without_files_are_compared_by_what_they_hold(tmp_path):
    for split, number in (("train", 1), ("val", 2)):
        yolo(tmp_path / split, {"a": "0 .5 .5 .2 .2", "b": "0 .5 .5 .2 .2"})
        picture(tmp_path / split / "images" / "a.png", number)
        write_folder(open_dataset("train", path=tmp_path / split), tmp_path / "hub", split, "hub")
    train, val = (open_dataset(split, path=tmp_path / "hub", name=None) for split in ("train", "val"))
    assert train.image_root is None, "the images lie in the table"
    assert shared_images(train, val) == 0 and shared_images(train, train) == 2


def test_what_was_left_out_or_noted_is_named(tmp_path):
    folder = yolo(tmp_path / "data", {"a": "0 .5 .5 .2 .2", "b": "0 .5 .5 0 .2\n0 .5 .5 .2 .2\n0 .5 .5 0 0"}, None)
    lines = []
    open_all_splits("train", "0.5", None, tmp_path / "run", say=lines.append, path=str(folder))
    (line,) = (line for line in lines if "see data_problems_train.txt" in line)
    assert line.startswith("train: 2 warnings (first b.png: box [")
    assert "; 1 note (data: no class names (data.yaml, classes.txt or *.names); classes are numbered); see " in line


# ---------------------------------------------------------------- tables


def csv_table(folder: Path, text: str) -> list:
    picture(folder / "a.png")
    (folder / "boxes.csv").write_text(text)
    return boxes_of(folder)


HEAD = "image,x1,y1,x2,y2,label\n"


@pytest.mark.parametrize("text", [
    "image;label;x;y;width;height\na.png;cat;40;32;20;16\n",
    "filename,left,top,width,height,label\na.png,40,32,20,16,cat\n",
    "image,xmin,ymin,bbox_width,bbox_height,width,height,label\na.png,40,32,20,16,100,80,cat\n",
    "image,x,y,width,height,image_width,image_height,label\na.png,40,32,20,16,100,80,cat\n",
])  # fmt: skip
def test_columns_width_and_height_of_a_box_are_not_those_of_the_image(tmp_path, text):
    assert csv_table(tmp_path, text) == [[BOX]]


def test_a_size_that_is_not_that_of_the_image_is_told_without_json(tmp_path):
    with pytest.raises(BadInput, match="size differs from the annotations: .* the annotations say 90 x 80"):
        csv_table(tmp_path, "image,x1,y1,x2,y2,label,width,height\na.png,40,32,60,48,a,90,80\n")


def test_the_line_of_a_fault_counts_empty_lines_too(tmp_path):
    with pytest.raises(BadInput, match="boxes.csv, line 4: 'a.png,40,x,60,48,a'"):
        csv_table(tmp_path, f"{HEAD}\na.png,40,32,60,48,a\na.png,40,x,60,48,a\n")


def test_numbers_as_classes_are_one_class_however_they_are_written(tmp_path):
    csv_table(tmp_path, "image,x1,y1,x2,y2,label\na.png,40,32,60,48,1\na.png,40,32,60,48,1.0\na.png,4,3,6,4,2\n")
    assert open_dataset("train", path=tmp_path).class_names == ["1", "2"]


def test_numbers_as_classes_keep_their_digits(tmp_path):
    for name in ("007", "1e3", "12345678901234567890"):
        folder = tmp_path / name
        csv_table(folder, f"{HEAD}a.png,40,32,60,48,{name}\na.png,40,32,60,48,1.0\n")
        assert name in open_dataset("train", path=folder).class_names


@pytest.mark.parametrize("name", ["/gone/a.png", "C:\\gone\\a.png", "gone/images/a.png", "./a.png"])
def test_paths_of_another_machine_are_found_beside_the_table(tmp_path, name):
    assert csv_table(tmp_path, f"{HEAD}{name},40,32,60,48,a\n") == [[BOX]]


def test_paths_of_another_machine_keep_the_folders_that_are_here(tmp_path):
    for number, part in enumerate("xy"):
        picture(tmp_path / part / "a.png", number)
    (tmp_path / "boxes.csv").write_text(f"{HEAD}/gone/x/a.png,40,32,60,48,a\n/gone/y/a.png,4,3,6,4,a\n")
    assert boxes_of(tmp_path) == [[BOX], [[4.0, 3.0, 6.0, 4.0]]]


def test_two_images_that_would_become_one_file_are_a_fault(tmp_path):
    with pytest.raises(BadInput, match="line 3: /gone/y/a.png is not there, and a.png was found for"):
        csv_table(tmp_path, f"{HEAD}/gone/x/a.png,40,32,60,48,a\n/gone/y/a.png,4,3,6,4,a\n")


@st.composite
def detections(draw):
    """Boxes that may leave their image of 100 x 80 px, some of them altogether."""
    side = st.floats(-60, 160, allow_nan=False, width=32)
    corners = st.tuples(side, side, st.floats(0.5, 90, width=32), st.floats(0.5, 90, width=32))
    xywh = np.array([(10, 10, 20, 20), *draw(st.lists(corners, max_size=6))], dtype=np.float64)
    return np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1)


@pytest.mark.parametrize("format", ["yolo", "voc", "csv", "coco"])
@settings(max_examples=15)
@given(xyxy=detections())
def test_what_is_written_is_read(tmp_path_factory, format, xyxy):
    """By our own readers, with the part of each box that lies in its image."""
    folder = tmp_path_factory.mktemp("written")
    picture(folder / "pictures" / "a.png")
    boxes = Boxes.found(counts=[len(xyxy)], xyxy=xyxy, scores=np.full(len(xyxy), 0.5), labels=np.zeros(len(xyxy), int))
    row = ImageRow(1, str(folder / "pictures" / "a.png"), 100, 80)
    found = LabelledImages(images=[row], boxes=boxes, categories=(Category(1, "a"),))
    document = {"images": [], "errors": []}
    write_outputs(document, found, ["a.png"], [format], folder / "out")
    inside = xyxy.clip(0, [100, 80, 100, 80])
    expected = inside[(inside[:, 2:] > inside[:, :2]).all(axis=1)]
    source = {"voc": "annotations", "csv": "predictions.csv", "coco": "dataset.json", "yolo": "labels"}[format]
    images = str(folder / "pictures")
    options = {"cache_dir": folder / "cache", "on_error": "raise"}
    if format == "coco":
        table = open_dataset(str(folder / "out" / source), image_dir=images, **options)
    elif format == "csv":
        table = open_dataset("train", path=folder / "out" / source, **options)  # its paths are absolute
    else:
        table = open_dataset("train", path=folder / "out" / source, image_dir=images, **options)
    read = table.boxes().xyxy
    order = np.lexsort(read.T), np.lexsort(expected.T)
    assert read[order[0]] == pytest.approx(expected[order[1]], abs=1e-4)


@pytest.mark.parametrize("format", ["yolo", "voc", "csv", "coco"])
@settings(max_examples=8)
@given(xyxy=detections())
def test_what_is_converted_is_read(tmp_path_factory, format, xyxy):
    """Names that differ in the suffix alone, or in the case of letters, keep their own boxes."""
    folder = tmp_path_factory.mktemp("written")
    names = ["a.png", "a.bmp", "A.tif", "sub/a.png"]
    inside = xyxy.clip(0, [100, 80, 100, 80])
    inside = inside[(inside[:, 2:] - inside[:, :2] > 1e-4).all(axis=1)]
    images = []
    annotations = []
    for number, name in enumerate(names):
        picture(folder / "images" / name, number)
        images.append({"id": number, "file_name": name, "width": 100, "height": 80})
        for x1, y1, x2, y2 in inside.tolist()[number:]:
            ids = {"id": len(annotations), "image_id": number, "category_id": 1}
            annotations.append(ids | {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": 1, "iscrowd": 0})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "yes"}]}
    (folder / "train.json").write_text(json.dumps(document))
    reading = {"cache_dir": folder / "cache"}
    table = open_dataset(str(folder / "train.json"), image_dir=str(folder / "images"), **reading)
    write_folder(table, folder / "out", "train", format)
    written = open_dataset("train", path=folder / "out", **reading)
    assert written.class_names == ["yes"]
    counts = [max(0, len(inside) - number) for number in range(len(names))]
    assert sorted(written.num_boxes().tolist()) == sorted(counts)
    by_count = {count: index for index, count in enumerate(written.num_boxes().tolist())}
    for number, count in enumerate(counts):
        if count:
            read = written.boxes().xyxy[written.boxes().of_image(by_count[count])]
            assert read == pytest.approx(inside[number:], abs=1e-3)


def predicted(folder: Path, names: list[str], formats: list[str]) -> list[list[list[float]]]:
    """Predictions of one box for each picture, another for each; the boxes."""
    for number, name in enumerate(names):
        picture(folder / "pictures" / name, number)
    xyxy = np.array([(10 + number, 10, 30, 30) for number in range(len(names))], dtype=np.float64)
    scores = np.full(len(names), 0.5)
    boxes = Boxes.found(counts=[1] * len(names), xyxy=xyxy, scores=scores, labels=np.zeros(len(names), int))
    rows = [ImageRow(number, str(folder / "pictures" / name), 100, 80) for number, name in enumerate(names)]
    found = LabelledImages(images=rows, boxes=boxes, categories=(Category(1, "a"),))
    write_outputs({"images": [], "errors": []}, found, names, formats, folder / "out")
    return [[box] for box in xyxy.tolist()]


@pytest.mark.parametrize("source", ["annotations", "labels"])
@pytest.mark.parametrize("names", [["a.png", "sub/a.png", "sub/deep er/b.c.png"], ["x/a.png", "y/a.png"]])
def test_predictions_for_folders_of_pictures_are_read(tmp_path, source, names):
    boxes = predicted(tmp_path, names, ["voc", "yolo"])
    folder = tmp_path / "out" / ("" if source == "annotations" else source)
    assert boxes_of(folder, image_dir=str(tmp_path / "pictures")) == boxes


def test_predictions_for_relative_paths_are_read(tmp_path, monkeypatch):
    picture(tmp_path / "pictures" / "a.png")
    boxes = Boxes.found(counts=[1], xyxy=np.array([BOX]), scores=np.ones(1), labels=np.zeros(1, int))
    rows = [ImageRow(1, "pictures/a.png", 100, 80)]
    found = LabelledImages(images=rows, boxes=boxes, categories=(Category(1, "a"),))
    monkeypatch.chdir(tmp_path)
    write_outputs({"images": [], "errors": []}, found, ["a.png"], ["csv"], Path("out"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert boxes_of(tmp_path / "out" / "predictions.csv") == [[BOX]]


def test_predictions_for_a_name_that_is_not_utf_8_are_not_lost(tmp_path):
    predicted(tmp_path, ["a.png", os.fsdecode(b"b\xc3\xff.png")], ["json", "jsonl", "coco", "yolo", "voc", "csv"])
    assert "b\ufffd\ufffd.png" in (tmp_path / "out" / "predictions.csv").read_text(encoding="utf-8")
    assert len(list((tmp_path / "out" / "annotations").glob("*.xml"))) == 2


def test_labels_without_images_say_what_to_give(tmp_path):
    predicted(tmp_path, ["a.png"], ["yolo"])
    with pytest.raises(BadInput, match=r"labels without images; give the folder of the images \(data.image_dir\)"):
        boxes_of(tmp_path / "out")


def test_two_images_do_not_share_a_file_of_labels(tmp_path):
    folder = yolo(tmp_path, {"a": "0 .5 .5 .2 .2"})
    picture(folder / "images" / "a.bmp", 7)
    with pytest.raises(BadInput, match="images/a.png: a.txt is the file of labels of images/a.bmp too"):
        boxes_of(folder)


def test_two_annotations_of_one_image_are_a_fault(tmp_path):
    folder = linked_folder(tmp_path, "voc")
    (folder / "Annotations" / "old").mkdir()
    (folder / "Annotations" / "old" / "a.xml").write_text((folder / "Annotations" / "a.xml").read_text())
    (folder / "Annotations" / "old" / "other.xml").write_text("<project></project>")
    with pytest.raises(BadInput) as error:
        boxes_of(folder)
    assert error.value.problems[1:] == ["error: old/a.xml: a.xml is an annotation of a.png too; keep one of them"]


@pytest.mark.parametrize("format", ["voc", "csv"])
def test_another_folder_of_images_is_not_taken_from_the_cache(tmp_path, format):
    folder = linked_folder(tmp_path, format)
    if format == "csv":
        (folder / "boxes.csv").write_text(f"{HEAD}a.png,40,32,60,48,a\n")
    for number, name in enumerate(("first", "second")):
        picture(tmp_path / name / "a.png", number)
        table = open_dataset("train", path=folder, image_dir=str(tmp_path / name))
        assert table.image_root == tmp_path / name


def test_labels_that_come_later_are_read(tmp_path):
    folder = yolo(tmp_path, {"a": ""})
    (folder / "labels" / "a.txt").unlink()
    (folder / "labels").rmdir()
    assert boxes_of(folder) == [[]]
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text("0 .5 .5 .2 .2")
    assert boxes_of(folder) == [[BOX]]


# ---------------------------------------------------------------- what parsers raise


def test_numbers_and_encodings_that_python_refuses_are_sentences(tmp_path):
    coco_file(tmp_path / "a" / "train.json", ["a.png"])
    text = (tmp_path / "a" / "train.json").read_text()
    (tmp_path / "a" / "train.json").write_text(text.replace('"area": 320', f'"area": {"9" * 5000}'))
    picture(tmp_path / "a" / "a.png")
    with pytest.raises(BadInput, match=r"train.json: invalid JSON at line 1, column \d+: not a number"):
        open_dataset(str(tmp_path / "a" / "train.json"))
    folder = linked_folder(tmp_path / "b", "voc")
    file = folder / "Annotations" / "a.xml"
    file.write_text("<?xml version='1.0' encoding='klingon'?>" + file.read_text())
    with pytest.raises(BadInput, match="unknown encoding: klingon; save the file as UTF-8"):
        boxes_of(folder)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "dataset_dict.json").write_text("{")
    with pytest.raises(BadInput, match="dataset_dict.json"):
        recognise(tmp_path / "c")


ODD_YAML = {
    "digits": "9" * 5000, "day": "2001-99-99", "int": "!!int x", "float": "!!float x", "bool": "!!bool x",
    "time": "!!timestamp x", "deep": "[" * 1200, "key": "{[]: 1}",
}  # fmt: skip


@pytest.mark.parametrize("value", ODD_YAML.values(), ids=ODD_YAML)
def test_values_that_yaml_lets_through_are_sentences(tmp_path, value):
    file = tmp_path / "other.yaml"
    file.write_text(f"data: {value}\n")
    with pytest.raises(BadInput, match="other.yaml: cannot be read as YAML"):
        read_yaml(file, str(file))
    with pytest.raises(BadInput, match="expected a settings file of training"):
        data_settings(str(file), "train_ssd")
    with pytest.raises(BadInput, match="--model.nms_threshold .*: cannot be read as a value of a setting"):
        inference_flags(["--model.nms_threshold", value])
    folder = yolo(tmp_path / "data", {"a": "0 .5 .5 .2 .2"}, f"names: [a]\ntrain: images\nnc: {value}\n")
    with pytest.raises(BadInput, match="data.yaml: cannot be read as YAML"):
        boxes_of(folder)


def test_a_field_of_a_table_that_is_too_long_is_named(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text(f"image,x1,y1,x2,y2,label\na.png,4,4,14,14,{'x' * 200_000}\n")
    with pytest.raises(BadInput, match=r"a.csv, line 2: cannot be read as CSV: field larger than field limit"):
        boxes_of(tmp_path)


def test_labels_beside_a_yaml_file_whose_folders_are_gone_are_asked_about(tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 .5 .5 .2 .2")
    (tmp_path / "data.yaml").write_text("names: [a]\ntrain: gone/images\n")
    with pytest.raises(BadInput, match=r"labels without images; not there: train .*gone/images"):
        boxes_of(tmp_path)


def test_settings_with_a_number_of_thousands_of_digits_are_refused_and_shown(tmp_path):
    (tmp_path / "settings.yaml").write_text(f"optim: {{lr: 0x{'f' * 5000}}}")
    with pytest.raises(BadInput, match=r"optim.lr is a number of thousands of digits.*; expected a number"):
        parse_config(module_of("scripts/train_ssd.py").Config, ["--config", str(tmp_path / "settings.yaml")])
    assert format_value([10**5000]).startswith("a number of thousands of digits")


@pytest.mark.parametrize("step", ["1e999", "9" * 5000, "Infinity", "NaN"])
def test_a_step_that_is_not_a_number_of_steps_is_one_sentence(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    with pytest.raises(BadInput, match="metrics.jsonl, line 1: not a row of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_flags_of_training_are_taken_by_the_other_scripts():
    parser = parser_of("check_data")
    options = parser.parse_args(["DIR", "--data.image_dir", "x", "--data.on_error", "drop", "--data.format", "yolo"])
    assert options == parser.parse_args(["DIR", "--image-dir", "x", "--on-error", "drop", "--format", "yolo"])
    assert options.image_dir == ["x"]


@pytest.mark.parametrize("script", ["check_data", "convert", "evaluate", "export", "report", "anchors"])
def test_every_flag_about_data_has_the_name_that_it_has_in_training_too(script, capsys):
    main = anchors.main if script == "anchors" else importlib.import_module(script).main
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    flags = [flag for flag in ("image-dir", "name", "path", "on-error", "image-size") if f" --{flag} " in text]
    assert "image-dir" in flags
    for flag in flags:
        assert f" --data.{flag.replace('-', '_')} " in text, flag


def test_folders_of_images_are_given_one_by_one_or_as_settings_have_them(capsys):
    parse = parser_of("check_data").parse_args
    several = (["--image-dir", "a", "--data.image_dir", "b"], ["--data.image_dir", "[a, b]"], ["--image-dir", "a", "b"])
    for words in several:
        assert parse(["DIR", *words]).image_dir == ["a", "b"]
    assert parse(["DIR"]).image_dir is None
    with pytest.raises(SystemExit):
        parse(["DIR", "--image-dir", "[a, {]"])
    assert "expected a folder, or a list of folders such as [images, more.zip]" in capsys.readouterr().err


# ---------------------------------------------------------------- pictures and labels in other places
def coco_of(file: Path, names: list[str], categories: list[dict] | None = None) -> None:
    images = [{"id": i, "file_name": name, "width": 100, "height": 80} for i, name in enumerate(names)]
    boxes = [{"id": i, "image_id": i, "category_id": 3, "bbox": [40, 32, 20, 16]} for i in range(len(names))]
    classes = categories or [{"id": 3, "name": "cat"}]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"images": images, "annotations": boxes, "categories": classes}))


def xml_of(name: str) -> str:
    box = "<bndbox><xmin>40</xmin><ymin>32</ymin><xmax>60</xmax><ymax>48</ymax></bndbox>"
    return f"<annotation><filename>{name}</filename><object><name>cat</name>{box}</object></annotation>"


@pytest.mark.parametrize("places", [["train", "train/images"], ["train/images", "train"], ["train/a", "train/b"]])
@pytest.mark.parametrize("format", ["coco", "voc", "csv"])
def test_pictures_are_looked_for_in_all_places_of_a_split(tmp_path, format, places):
    names = ["0.png", "1.png"]
    for number, (place, name) in enumerate(zip(places, names, strict=True)):
        picture(tmp_path / place / name, number)
    picture(tmp_path / "valid" / "1.png", 7)  # another split has files of these names
    if format == "coco":
        coco_of(tmp_path / "train" / "_annotations.coco.json", names)
        (tmp_path / "thumbs").mkdir()
        Image.new("RGB", (10, 8)).save(tmp_path / "thumbs" / "1.png")
    elif format == "voc":
        for name in names:
            (tmp_path / "train" / f"{name[0]}.xml").write_text(xml_of(name))
    else:
        rows = [f"{name},40,32,60,48,cat" for name in names]
        (tmp_path / "train.csv").write_text("image,x1,y1,x2,y2,label\n" + "\n".join(rows))
    assert boxes_of(tmp_path) == [[BOX], [BOX]]
    table = open_dataset("train", path=tmp_path)
    for index, (place, name) in enumerate(zip(places, names, strict=True)):
        assert Path(table.image_source(table.row(index))).samefile(tmp_path / place / name)
    assert any("were found here" in problem.message for problem in table.problems)
    assert not any(problem.severity == "error" for problem in table.problems)


def test_a_picture_of_another_split_is_not_taken_and_one_that_is_added_is_found(tmp_path):
    for number in range(2):
        picture(tmp_path / "train" / f"{number}.png", number)
    picture(tmp_path / "valid" / "0.png", 5)
    coco_of(tmp_path / "annotations" / "train.json", ["0.png"])
    coco_of(tmp_path / "annotations" / "val.json", ["0.png", "1.png"])
    with pytest.raises(BadInput, match=r"1.png \(image 1\): image file not found"):
        open_dataset("val", path=tmp_path)
    picture(tmp_path / "valid" / "more" / "1.png", 6)
    assert open_dataset("val", path=tmp_path).file_names() == ["0.png", "more/1.png"]


def test_the_super_category_that_roboflow_adds_is_left_out_unless_it_has_boxes(tmp_path):
    added = [{"id": 0, "name": "cats", "supercategory": "none"}, {"id": 3, "name": "cat", "supercategory": "cats"}]
    picture(tmp_path / "train" / "0.png")
    coco_of(tmp_path / "train" / "_annotations.coco.json", ["0.png"], added)
    table = open_dataset("train", path=tmp_path)
    assert table.class_names == ["cat"]
    assert "category 0 ('cats') is the super-category of all others" in table.problems[0].message
    used = [*reversed(added), {"id": 7, "name": "dog", "supercategory": "cat"}]  # not of all others
    coco_of(tmp_path / "train" / "_annotations.coco.json", ["0.png"], used)
    assert open_dataset("train", path=tmp_path).class_names == ["cats", "cat", "dog"]
    with_boxes = [{**added[0], "id": 3}, {**added[1], "id": 4}]
    coco_of(tmp_path / "train" / "_annotations.coco.json", ["0.png"], with_boxes)
    assert open_dataset("train", path=tmp_path).class_names == ["cats", "cat"]


def test_labels_without_a_picture_are_counted_and_those_with_one_beside_are_read(tmp_path):
    for number, place in enumerate(("images", "", "more")):
        picture(tmp_path / "train" / place / f"{number}.png", number)
    (tmp_path / "train" / "labels").mkdir()
    for number in range(5):
        (tmp_path / "train" / "labels" / f"{number}.txt").write_text("0 .5 .5 .2 .2")
    (tmp_path / "things.names").write_text("car\n")
    assert boxes_of(tmp_path) == [[BOX]] * 3
    table = open_dataset("train", path=tmp_path)
    assert table.class_names == ["car"]
    told = [problem.message for problem in table.problems]
    assert told[0] == "2 label files have no picture and are not used: train/labels/3.txt, train/labels/4.txt"
    assert told[1].startswith("2 pictures with labels that are not in the folder of the others were found: train/1.png")


@pytest.mark.parametrize("described", [True, False])
def test_lists_of_darknet(tmp_path, described):
    for number in range(3):
        picture(tmp_path / "obj" / "deep" / f"{number}.png", number)
        (tmp_path / "obj" / "deep" / f"{number}.txt").write_text(f"{number % 2} .5 .5 .2 .2")
    (tmp_path / "train.txt").write_text("C:\\data\\obj\\0.png\ndata/obj/deep/1.png\n")  # of another computer
    (tmp_path / "valid.txt").write_text("data/obj/deep/2.png\n")
    if described:
        (tmp_path / "my.data").write_text("classes = 2\ntrain = data/train.txt\nvalid = data/valid.txt\nnames = a.list")
        (tmp_path / "a.list").write_text("cat\ndog\n")
    assert recognise(tmp_path).splits == ("train", "val")
    assert boxes_of(tmp_path) == [[BOX]] * 2 and boxes_of(tmp_path, "val") == [[BOX]]
    names = ["cat", "dog"] if described else ["class 0", "class 1"]
    assert [open_dataset(split, path=tmp_path).class_names for split in ("train", "val")] == [names] * 2


@pytest.mark.parametrize(("row", "words"), [
    ("0 50 50 20 20", "'0 50 50 20 20': YOLO rows are fractions of the image (0 to 1); these look like pixels"),
    ("0 10 10 50 10 50 50", "these look like pixels"), ("0 .5 .5 .2 20", "20 is far beyond it"),
    ("0 1.4 1.4 .2 .2", "this box lies outside of it"),
])  # fmt: skip
def test_a_yolo_row_in_pixels_is_told_as_it_is_written(tmp_path, row, words):
    with pytest.raises(BadInput) as error:
        boxes_of(yolo(tmp_path, {"a": f"0 .95 .5 .2 .2\n{row}"}))
    (fault,) = error.value.problems[1:]
    assert fault.startswith("error: images/a.png (image 1): a.txt, line 2: ") or "a.txt, line 2: " in fault
    assert words in fault


OTHER_TOOLS = {
    "LabelMe": ("a.json", '{"shapes": [], "imagePath": "a.jpg"}'),
    "VIA": ("via.json", '{"a.jpg1": {"filename": "a.jpg", "regions": []}}'),
    "CVAT XML": ("annotations.xml", '<?xml version="1.0"?><annotations><image id="0" name="a.jpg"/></annotations>'),
    "Label Studio": ("project.json", '[{"id": 1, "data": {"image": "a.jpg"}, "annotations": []}]'),
    "Supervisely": ("ds/ann/a.jpg.json", '{"size": {"height": 2, "width": 3}, "objects": []}'),
}


@pytest.mark.parametrize("tool", OTHER_TOOLS)
def test_files_of_tools_that_are_not_read_are_named_with_the_way_to_coco(tmp_path, tool):
    name, text = OTHER_TOOLS[tool]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=f"this looks like {tool} .*, which is not read; convert it to COCO with "):
        recognise(tmp_path)
    with pytest.raises(BadInput, match=f"this looks like {tool}, which is not read"):
        open_dataset(tmp_path / name)
