"""Folders of YOLO and Darknet data, most of them in `assets/dirty_sets/yolo_folders.txt`."""

import pytest
from dirty_sets import check_set, sets_in
from small_data import BOX, YOLO_ROW, boxes_of, write_text, yolo_folder

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.formats.darknet import lines_of
from toolkit.data.formats.yolo_pairs import last_parts


@pytest.mark.parametrize("one", sets_in("yolo_folders"))
def test_folders(one, tmp_path):
    check_set(one, tmp_path)


def test_a_settings_file_in_another_encoding_is_named(tmp_path):
    folder = yolo_folder(tmp_path, {"a": YOLO_ROW})
    (folder / "data.yaml").write_text("names: [a]\ntrain: images\n", encoding="utf-16")
    with pytest.raises(BadInput, match="error: data.yaml: cannot be read as YAML in UTF-8"):
        open_dataset("train", path=folder, cache_dir=tmp_path / "cache")


def test_labels_that_come_later_are_read(tmp_path):
    folder = yolo_folder(tmp_path / "set", {"a": ""})
    (folder / "labels" / "a.txt").unlink()
    (folder / "labels").rmdir()
    reading = {"path": folder, "cache_dir": tmp_path / "cache"}
    assert boxes_of(open_dataset("train", **reading)) == [[]]
    write_text(folder / "labels" / "a.txt", YOLO_ROW)
    assert boxes_of(open_dataset("train", **reading)) == [[BOX]]


def test_classes_that_come_later_are_read(tmp_path):
    folder = yolo_folder(tmp_path / "set", {"a": YOLO_ROW}, settings=None)
    reading = {"path": folder, "cache_dir": tmp_path / "cache"}
    assert open_dataset("train", **reading).class_names == ["class 0"]
    write_text(folder / "classes.txt", "cat\n")
    assert open_dataset("train", **reading).class_names == ["cat"]


def test_lines_of_a_list_are_stripped(tmp_path):
    assert list(lines_of(write_text(tmp_path / "list.txt", " a.png \n\nb.png\n"))) == [
        "a.png",
        "b.png",
    ]


def test_a_folder_of_images_is_not_looked_for_by_its_last_part():
    assert last_parts("/gone/valid/images") == ["gone/valid/images", "valid/images"]
    assert last_parts("/gone/photos/a.png") == [
        "gone/photos/a.png",
        "photos/a.png",
        "a.png",
    ]
