"""Splits of a run: opened with the same classes, told of, and compared; most of it in `assets/dirty_sets/runs.txt`."""

from functools import partial
from types import SimpleNamespace

import pytest
from dirty_sets import check_set, sets_in
from documents import row_of
from small_data import BOX, YOLO_ROW, boxes_of, picture, yolo_folder

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.splits import (
    Fold,
    check_not_empty,
    describe_held_out_share,
    mostly_empty,
    open_all_splits,
    open_split,
    open_splits,
    share_of,
    shared_images,
    what_was_wrong,
)
from toolkit.data.table import Category, Problem
from toolkit.data.table_cache import write_rows
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.models.start import check_weights
from toolkit.tools.writers import write_folder


@pytest.mark.parametrize("one", sets_in("runs"))
def test_runs(one, tmp_path):
    check_set(one, tmp_path)


@pytest.fixture
def opening(tmp_path):
    """`open_splits`, of 6 images without a split."""
    folder = yolo_folder(tmp_path / "d", dict.fromkeys("abcdef", YOLO_ROW), "names: [a]\ntrain: images\n")
    return partial(
        open_splits,
        "train",
        "0.4",
        tmp_path,
        say=str,
        path=folder,
        cache_dir=tmp_path / "cache",
    )


def test_the_first_images_may_be_taken_alone(opening):
    assert len(opening(max_train_images=3)[0]) == 3
    train, val = opening(overfit_images=2)
    assert len(train) == 2
    assert train is val


def test_problems_are_listed_in_the_folder_of_the_run(opening, tmp_path):
    labels = tmp_path / "d" / "labels" / "a.txt"
    labels.write_text("0 .5 .5 0 .2\n")
    opening()
    listing = (tmp_path / "data_problems_train.txt").read_text()
    assert listing.startswith("warning: images/a.png (image 1): box [")
    assert listing.count("\n") == 1
    assert not (tmp_path / "data_problems_val.txt").exists()


def test_each_kind_of_note_is_told_once():
    alpha = "alpha channel dropped, the colours under it kept"
    notes = [Problem("note", f"x/{number}.png", number, None, alpha) for number in range(30)]
    notes.append(Problem("note", "x/b.tif", 31, None, "first 3 of 5 bands used"))
    notes.append(Problem("note", "x", None, None, "2 of 31 images are links to files elsewhere"))
    text = what_was_wrong(SimpleNamespace(problems=notes))
    firsts = "x: 2 of 31 images are links to files elsewhere; 0.png: " + alpha + "; b.tif: first 3 of 5 bands used"
    assert text == f"32 notes (first {firsts})"


# ---- shares and folds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "share"),
    [
        ("25%", 0.25),
        (" 25 % ", 0.25),
        (0.25, 0.25),
        ("2/5", Fold(2, 5)),
        ("val", None),
        ("annotations/5", None),
    ],
)
def test_shares_and_folds_are_told_from_names(value, share):
    assert share_of(value) == share


@pytest.mark.parametrize("value", ["1.5", "0", "-0.1", "nan", "150%", "0%", "0/5", "6/5", "1/1"])
def test_shares_that_cannot_be_are_refused(value):
    with pytest.raises(BadInput, match=r"data\.val is .*; expected a split, a file, a share"):
        share_of(value)


def test_a_share_of_training_data_is_validation_data(opening, tmp_path):
    train, val = opening()
    assert (len(train), len(val)) == (4, 2)
    assert sorted([*train.image_ids(), *val.image_ids()]) == [1, 2, 3, 4, 5, 6]
    assert boxes_of(train) + boxes_of(val) == [[BOX]] * 6
    again = open_split("0.4", part_of="train", **opening.keywords)
    assert again.image_ids().tolist() == val.image_ids().tolist()
    assert again.fingerprint == val.fingerprint


def test_a_share_that_came_out_otherwise_is_warned_of():
    assert "warning" not in describe_held_out_share(45, 200, 0.2)
    text = describe_held_out_share(75, 100, 0.2)
    assert "75 of these 100 images (75%, asked for: 20%)" in text
    assert "\nwarning: " in text
    assert "\nwarning: " in describe_held_out_share(5, 100, Fold(1, 5))


# ---- faults of all splits at once ------------------------------------------------------------------------------------


def test_missing_splits_missing_weights_and_a_cut_image_are_one_message(opening, tmp_path, capsys):
    file = tmp_path / "d" / "images" / "d.png"
    file.write_bytes(file.read_bytes()[:-300])
    options = SceneGraphOptions(pretrained_backbone=str(tmp_path / "none.safetensors"))
    with pytest.raises(BadInput) as caught:
        open_all_splits(
            "train",
            "val",
            "test",
            tmp_path,
            partial(check_weights, options),
            **opening.keywords,
        )
    early = capsys.readouterr().err
    late = caught.value.untold()
    for words in (
        "no split 'val'; hold a share",
        "no split 'test'",
        "pretrained_backbone: the file",
    ):
        assert early.count(words) == 1
        assert str(caught.value).count(words) == 1
        assert words not in late, "each is printed once"
    assert "d.png" in late
    assert "d.png" not in early


# ---- data without objects, and images in two splits ------------------------------------------------------------------


def test_data_whose_labels_are_not_found_are_asked_about(tmp_path):
    folder = yolo_folder(tmp_path / "empty", dict.fromkeys("abc", ""))
    cache = {"cache_dir": tmp_path / "cache"}
    table = open_dataset("train", path=folder, **cache)
    assert mostly_empty(table).startswith("3 of 3 images have no object, such as ")
    with pytest.raises(BadInput, match="Were the labels found"):
        check_not_empty(table, is_allowed=False)
    check_not_empty(table, is_allowed=True)
    other = yolo_folder(tmp_path / "other", {"d": YOLO_ROW})
    joined = open_dataset(["train", "train"], path=[str(other), str(folder)], **cache)
    with pytest.raises(
        BadInput,
        match="3 of 3 images of empty have no object, such as .*Were the labels found",
    ):
        check_not_empty(joined, is_allowed=False)
    some = yolo_folder(tmp_path / "some", {"a": YOLO_ROW, "b": "", "c": ""})
    assert mostly_empty(open_dataset("train", path=some, **cache)) == ""


@pytest.mark.parametrize(("with_objects", "is_asked"), [(0, True), (1, False), (2, False)])
def test_hardly_any_objects_are_few_in_twenty(tmp_path, with_objects, is_asked):
    rows = [row_of(number, [(1, 1, 9, 9)] * (number < with_objects)) for number in range(20)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=[Category(0, "a")])
    assert bool(mostly_empty(table)) == is_asked


def test_images_within_tables_are_compared_by_their_content(tmp_path):
    for seed, split in enumerate(("train", "val")):
        folder = yolo_folder(tmp_path / split, {"a": YOLO_ROW})
        picture(folder / "images" / "a.png", seed)
        table = open_dataset("train", path=folder, cache_dir=tmp_path / "cache")
        write_folder(table, tmp_path / "hub", split, "hub")
    opening = partial(open_dataset, path=tmp_path / "hub", cache_dir=tmp_path / "cache")
    train = opening("train")
    assert train.image_root is None, "the images lie in the table"
    assert shared_images(train, opening("val")) == 0
    assert shared_images(train, train) == 1
