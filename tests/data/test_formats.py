"""Data sets are opened by a folder, a file or a name, and one sentence says what cannot be."""

import pytest
from documents import DIRTY
from small_data import one_image_folder

from toolkit.base.errors import BadInput
from toolkit.data.formats import (
    is_several,
    open_dataset,
    pair_folders_and_splits,
    recognise,
    split_in,
)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("nowhere.json", {}, "no such annotation file"),
        ("nowhere", {}, "nowhere: no such file or folder"),
        ("data.csv", {}, "no such file or folder"),
        (".", {"format": "coco"}, "cannot be read"),
        (DIRTY / "README.md", {}, "cannot tell the format"),
        (
            "train",
            {},
            "the name of a split, but no data set is given: .* the bundled data need data.format shapes",
        ),
        ("test", {"format": "shapes"}, "choose from train, val"),
        ("train", {"format": "shapes", "name": "someone/photographs"}, "--data.format"),
        ("a.json", {"format": "voc2"}, "choose from auto, coco"),
        ("train", {"format": "hub"}, "--data.name"),
        ("train", {"path": "nowhere"}, r"nowhere: no such file or folder \(data.path\)"),
        (
            DIRTY / "annotations" / "instances.json",
            {"image_dir": "no/such"},
            "no such image folder",
        ),
        (
            DIRTY / "annotations" / "instances.json",
            {"on_error": "ignore"},
            "expected 'raise' or 'drop'",
        ),
    ],
)
def test_one_sentence_for_what_cannot_be_opened(tmp_path, source, options, words):
    with pytest.raises(BadInput, match=words) as caught:
        open_dataset(source, cache_dir=tmp_path, **options)
    assert len(caught.value.problems) == 1


def test_masks_are_not_read_from_tables(tmp_path):
    folder = one_image_folder(tmp_path, "csv")
    with pytest.raises(
        BadInput,
        match="masks are not read from the format 'csv'; formats with masks are coco",
    ):
        open_dataset("train", path=folder, masks=True, cache_dir=tmp_path / "cache")


def test_a_folder_is_given_by_its_settings_file_too(tmp_path):
    folder = one_image_folder(tmp_path, "yolo")
    (folder / "data.yaml").write_text("names: [a]\ntrain: images\n")
    assert recognise(folder / "data.yaml").splits == ("train",)


def test_a_folder_of_two_formats_says_the_other(tmp_path):
    one_image_folder(tmp_path, "voc")
    folder = one_image_folder(tmp_path, "csv")
    assert str(recognise(folder)).endswith("it can be read as csv too (data.format)")


def test_training_data_are_all_data_where_nothing_is_split(tmp_path):
    found = recognise(one_image_folder(tmp_path, "voc"))
    assert split_in(found, "train") == "all"


def test_folders_and_splits_are_paired():
    assert pair_folders_and_splits(["a", "b"], "train") == [
        ("a", "train"),
        ("b", "train"),
    ]
    assert pair_folders_and_splits("a", ["train", "val"]) == [
        ("a", "train"),
        ("a", "val"),
    ]
    assert pair_folders_and_splits(None, ["a.json"]) == [(None, "a.json")]
    assert is_several("a", ["b"])
    assert not is_several("a", None)


@pytest.mark.parametrize(
    ("path", "source", "words"),
    [
        (["a", "b"], ["x", "y", "z"], "2 entries, data.train .* 3"),
        (["a", "b"], [], "2 entries, data.train .* 0"),
        (None, ["a.json", "a.json"], "a.json: named twice; data.shares"),
    ],
)
def test_folders_and_splits_that_do_not_fit_are_refused(path, source, words):
    with pytest.raises(BadInput, match=words):
        pair_folders_and_splits(path, source)
