"""convert.py reads every split and writes it in another format: `assets/dirty_sets/conversions.txt`."""

import pytest
from dirty_sets import check_set, sets_in
from small_data import one_image_folder

from toolkit.tools.convert import open_source_splits


@pytest.mark.parametrize("one", sets_in("conversions"))
def test_conversions(one, tmp_path):
    check_set(one, tmp_path)


def test_an_annotation_file_is_training_data(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    folder = one_image_folder(tmp_path, "coco")
    assert list(open_source_splits(str(folder / "boxes.json"), "auto", None, "raise", {})) == ["train"]
    assert list(open_source_splits(str(folder), "auto", None, "raise", {})) == ["train"]
