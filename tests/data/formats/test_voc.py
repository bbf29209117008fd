"""Folders of Pascal VOC and their annotations, most of them in `assets/dirty_sets/voc.txt`."""

import pytest
from dirty_sets import check_set, sets_in
from small_data import one_image_folder, voc_text, write_text

from toolkit.data.formats import open_dataset
from toolkit.data.formats.voc import FORMAT


@pytest.mark.parametrize("one", sets_in("voc"))
def test_folders(one, tmp_path):
    check_set(one, tmp_path)


def test_changed_annotations_and_class_lists_are_read_anew(tmp_path):
    folder = one_image_folder(tmp_path / "set", "voc")
    reading = {"path": folder, "cache_dir": tmp_path / "cache"}
    assert open_dataset("train", **reading).class_names == ["a"]
    write_text(folder / "Annotations" / "a.xml", voc_text("a.png", label="giraffe"))
    assert open_dataset("train", **reading).class_names == ["giraffe"]
    write_text(folder / "labels.txt", "dog\ngiraffe\n")
    table = open_dataset("train", **reading)
    assert table.class_names == ["dog", "giraffe"]
    assert not table.problems


def test_an_annotation_is_parsed_with_its_size_and_difficult_objects(tmp_path):
    extra = "<size><width>40</width><height>30</height></size>"
    text = voc_text("C:\\elsewhere\\1.jpg", extra).replace("<bndbox>", "<difficult>1</difficult><bndbox>")
    image = FORMAT.parse(write_text(tmp_path / "1.xml", text))
    assert image[:3] == ("1.jpg", 40, 30)
    assert image.boxes[0].ignored
    assert not FORMAT.parse(write_text(tmp_path / "2.xml", voc_text("2.jpg"))).boxes[0].ignored
