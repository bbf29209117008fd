"""The scan of a folder and the splits that names say, most of it in `assets/dirty_sets/splits.txt`."""

import os
from collections import Counter

import pytest
from dirty_sets import check_set, sets_in
from small_data import YOLO_ROW, yolo_folder

from toolkit.base.files import folders_below
from toolkit.data.formats import recognise
from toolkit.data.layout import may_hold, ordered, split_in_name, split_of


@pytest.mark.parametrize("one", sets_in("splits"))
def test_sets(one, tmp_path):
    check_set(one, tmp_path)


SPLITS_IN_NAMES = {
    "train": "custom_train.json train_labels.csv dataset_training.csv COCOTrain.json my_TRAIN.2.json",
    "val": "instances_val2017.json My-Validation-set.json dev.csv valset",
    "test": "annotations_test.json testLabels.json testset.csv instances_test-dev2017.json val_test.json",
    None: "latest.json contest.csv train_val.json trainval.json annotations.json train_test.csv",
}


@pytest.mark.parametrize("split", SPLITS_IN_NAMES)
def test_the_words_of_a_name_say_the_split(split):
    names = SPLITS_IN_NAMES[split].split()
    assert {name: split_in_name(name) for name in names} == dict.fromkeys(names, split)


def test_a_name_that_is_a_split_has_no_other_word():
    assert [split_of(name) for name in ("train2017", "instances_Valid.json", "test_annotations.json")] == [
        "train",
        "val",
        "test",
    ]
    assert split_of("my_train") is None


def test_pictures_are_not_looked_for_in_the_folder_of_another_split():
    assert may_hold("images", "val")
    assert may_hold("valid", "val")
    assert may_hold("val", "trainval")
    assert may_hold("val", None)
    assert not may_hold("train", "val")


def test_splits_come_in_one_order():
    assert ordered(["b", "test", "train", "a", "val"]) == (
        "train",
        "val",
        "test",
        "a",
        "b",
    )


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
    folder = yolo_folder(tmp_path, {"a": YOLO_ROW})
    listed = Counter()
    scandir = os.scandir

    def counted(path):
        listed[os.fspath(path)] += 1
        return scandir(path)

    monkeypatch.setattr("os.scandir", counted)
    found = recognise(folder)
    assert found.format == "yolo"
    assert not found.others
    assert not found.unused
    inside = {path: times for path, times in listed.items() if path.startswith(str(folder))}
    assert {
        str(folder),
        str(folder / "images"),
        str(folder / "labels"),
    } <= inside.keys()
    assert set(inside.values()) == {1}
