"""Splits of a run: opened with the same classes, told of in a line, and compared with each other."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from documents import row_of
from small_data import YOLO_ROW, picture, yolo_folder

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.splits import (
    Fold,
    check_not_empty,
    check_same_classes,
    check_splits,
    counts_of,
    mostly_empty,
    open_all_splits,
    open_split,
    open_splits,
    share_of,
    share_that_came_out,
    shared_images,
)
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.detectors.detr.options import RTDetrV2Options
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.models.start import check_weights
from toolkit.tools.shapes import make_shapes
from toolkit.tools.writers import write_folder


@pytest.fixture
def reading(tmp_path):
    """Shapes, 5 to train on and 2 to validate on, one of the boxes of which has five numbers."""
    make_shapes(tmp_path / "shapes", train_images=5, val_images=2, image_size=48)
    file = tmp_path / "shapes" / "annotations" / "train.json"
    file.write_text(file.read_text().replace('"bbox": [', '"bbox": [-1000.0, ', 1))
    return {"path": tmp_path / "shapes", "cache_dir": tmp_path / "cache", "on_error": "drop"}


def test_splits_are_told_of_and_their_problems_listed(reading, tmp_path):
    said = []
    train, val = open_splits("train", "val", tmp_path / "run", say=said.append, **reading)
    assert (len(train), len(val)) == (5, 2)
    assert len(said) == 4
    assert said[1].startswith("train: 5 images")
    assert "1 record left out (" in said[2]
    listing = tmp_path / "run" / "data_problems_train.txt"
    assert listing.read_text().count("\n") == len(train.problems)
    assert not (tmp_path / "run" / "data_problems_val.txt").exists()


def test_the_first_images_may_be_taken_alone(reading, tmp_path):
    opening = partial(open_splits, "train", "val", tmp_path / "run", say=str, **reading)
    assert len(opening(max_train_images=3)[0]) == 3
    train, val = opening(overfit_images=2)
    assert len(train) == 2
    assert train is val


def test_splits_of_other_classes_are_refused_with_advice(reading, tmp_path):
    train, val = open_splits("train", "val", tmp_path / "run", say=str, **reading)
    last = val.class_names[3]
    fewer = replace(val, categories=val.categories[:3])
    advice = f"{train.name} lists '{last}', which {val.name} does not: .*{last}: null"
    advice = advice.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(BadInput, match=f"4 classes .*{advice}"):
        check_same_classes(train, fewer)
    with pytest.raises(BadInput, match="lists '.*', which .* does not: list the same in both$"):
        check_same_classes(fewer, train)
    with pytest.raises(BadInput, match="4 classes .*same categories in the same order"):
        check_same_classes(train, replace(val, categories=val.categories[::-1]))


# ---- shares and folds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "share"),
    [("25%", 0.25), (" 25 % ", 0.25), (0.25, 0.25), ("2/5", Fold(2, 5)), ("val", None), ("annotations/5", None)],
)
def test_shares_and_folds_are_told_from_names(value, share):
    assert share_of(value) == share


@pytest.mark.parametrize("value", ["1.5", "0", "-0.1", "nan", "150%", "0%", "0/5", "6/5", "1/1"])
def test_shares_that_cannot_be_are_refused(value):
    with pytest.raises(BadInput, match=r"data\.val is .*; expected a split, a file, a share"):
        share_of(value)


def test_a_share_of_training_data_is_validation_data(reading, tmp_path):
    said = []
    reading = {**reading, "on_error": "drop"}
    train, val = open_splits("train", "0.4", tmp_path, say=said.append, **reading)
    assert (len(train), len(val)) == (3, 2)
    assert any("held out" in text for text in said)
    whole = open_dataset("train", **reading)
    assert sorted([*train.image_ids(), *val.image_ids()]) == sorted(whole.image_ids())
    again = open_split("0.4", say=said.append, part_of="train", **reading)
    assert again.image_ids().tolist() == val.image_ids().tolist()
    assert again.fingerprint == val.fingerprint


def test_a_share_that_came_out_otherwise_is_warned_of():
    assert "warning" not in share_that_came_out(45, 200, 0.2)
    text = share_that_came_out(75, 100, 0.2)
    assert "75 of these 100 images (75%, asked for: 20%)" in text
    assert "\nwarning: " in text
    assert "\nwarning: " in share_that_came_out(5, 100, Fold(1, 5))


# ---- faults of all splits at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [RTDetrV2Options, SceneGraphOptions])
def test_missing_splits_missing_weights_and_a_cut_image_are_one_message(tmp_path, options, capsys):
    folder = yolo_folder(tmp_path / "d", dict.fromkeys("abcdef", YOLO_ROW), "names: [a]\ntrain: images\n")
    file = folder / "images" / "d.png"
    file.write_bytes(file.read_bytes()[:-300])
    weights = partial(check_weights, options(pretrained_backbone=str(tmp_path / "none.safetensors")))
    where = {"say": print, "path": folder, "cache_dir": tmp_path / "cache"}
    with pytest.raises(BadInput) as caught:
        open_all_splits("train", "val", "test", tmp_path, weights, **where)
    early = capsys.readouterr().err
    late = caught.value.untold()
    for words in ("no split 'val'; hold a share", "no split 'test'", "pretrained_backbone: the file"):
        assert early.count(words) == 1
        assert str(caught.value).count(words) == 1
        assert words not in late, "each is printed once"
    assert "d.png" in late
    assert "d.png" not in early


def test_a_share_and_dropped_records_leave_the_other_images(tmp_path):
    folder = yolo_folder(tmp_path / "d", dict.fromkeys("abcdef", YOLO_ROW), "names: [a]\ntrain: images\n")
    (folder / "images" / "d.png").write_bytes(b"")
    weights = partial(check_weights, RTDetrV2Options())
    where = {"say": str, "path": folder, "cache_dir": tmp_path / "cache", "on_error": "drop"}
    train, val, test = open_all_splits("train", "25%", None, tmp_path, weights, **where)
    assert len(train) + len(val) == 5
    assert test is None


def test_missing_files_of_two_splits_are_one_message(tmp_path):
    with pytest.raises(BadInput) as caught:
        open_all_splits(str(tmp_path / "a.json"), str(tmp_path / "b.json"), None, tmp_path, say=print)
    expected = [f"{tmp_path}/{name}.json: no such annotation file" for name in "ab"]
    assert caught.value.problems == expected


def test_faults_of_several_data_sets_are_told_together(tmp_path):
    folder = yolo_folder(tmp_path / "d", {"a": YOLO_ROW})
    with pytest.raises(BadInput) as caught:
        check_splits(["train", "nowhere"], path=[str(folder), str(tmp_path / "gone")])
    assert "gone: no such folder" in str(caught.value)
    check_splits("train", "0.2", None, path=str(folder))


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
    with pytest.raises(BadInput, match="3 of 3 images of empty have no object, such as .*Were the labels found"):
        check_not_empty(joined, is_allowed=False)
    some = yolo_folder(tmp_path / "some", {"a": YOLO_ROW, "b": "", "c": ""})
    assert mostly_empty(open_dataset("train", path=some, **cache)) == ""


@pytest.mark.parametrize(("with_objects", "is_asked"), [(0, True), (1, False), (2, False)])
def test_hardly_any_objects_are_few_in_twenty(tmp_path, with_objects, is_asked):
    rows = [row_of(number, [(1, 1, 9, 9)] * (number < with_objects)) for number in range(20)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=[Category(0, "a")])
    assert bool(mostly_empty(table)) == is_asked


def test_crowds_are_counted_apart_and_explained(tmp_path):
    rows = [row_of(number, [(1, 1, 9, 9)], labels=[0], iscrowd=[1]) for number in range(2)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=[Category(0, "a")])
    assert counts_of(table) == {"images": 2, "boxes": 0, "crowd_regions": 2}
    assert "2 of them have crowd regions alone. Crowd regions (COCO's iscrowd 1" in mostly_empty(table)


SPLITS = {
    "train: images\nval: images": "the training data and the validation data have the same 2 images",
    "train: all.txt\nval: some.txt": "1 of the 1 images of the validation data are in the training data too",
    "train: some.txt\nval: all.txt": "1 of the 2 images of the validation data are in the training data too",
    "train: some.txt\nval: other.txt": None,
}


@pytest.mark.parametrize("settings", SPLITS)
def test_validation_data_that_are_training_data_are_said(tmp_path, settings):
    folder = yolo_folder(tmp_path / "data", dict.fromkeys("ab", YOLO_ROW), f"names: [a]\n{settings}\n")
    for name, images in (("all", "ab"), ("some", "a"), ("other", "b")):
        (folder / f"{name}.txt").write_text("".join(f"images/{image}.png\n" for image in images))
    lines = []
    where = {"path": str(folder), "cache_dir": tmp_path / "cache"}
    open_all_splits("train", "val", None, tmp_path / "run", say=lines.append, **where)
    warnings = [line.removeprefix("warning: ").split(":")[0] for line in lines if line.startswith("warning")]
    assert warnings == [SPLITS[settings]] * bool(SPLITS[settings])


def test_validation_data_that_are_the_test_split_are_said(tmp_path):
    settings = "names: [a]\ntrain: train/images\nval: other/images\ntest: other/images\n"
    folder = tmp_path / "data"
    for seed, part in enumerate(("train", "other")):
        yolo_folder(folder / part, {"a": YOLO_ROW}, None)
        picture(folder / part / "images" / "a.png", seed)
    (folder / "data.yaml").write_text(settings)
    lines = []
    where = {"path": str(folder), "cache_dir": tmp_path / "cache"}
    open_all_splits("train", "val", "test", tmp_path / "run", say=lines.append, **where)
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: the validation data and the test split have the same 1 images")


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


def test_what_was_left_out_or_noted_is_named(tmp_path):
    faulty = f"0 .5 .5 0 .2\n{YOLO_ROW}0 .5 .5 0 0"
    folder = yolo_folder(tmp_path / "data", {"a": YOLO_ROW, "b": faulty}, settings=None)
    lines = []
    where = {"path": str(folder), "cache_dir": tmp_path / "cache"}
    open_all_splits("train", "0.5", None, tmp_path / "run", say=lines.append, **where)
    (line,) = (line for line in lines if "see data_problems_train.txt" in line)
    assert line.startswith("train: 2 warnings (first b.png: box [")
    assert "; 1 note (data: no class names (data.yaml, classes.txt or *.names); classes are numbered); see " in line
    problems = (tmp_path / "run" / "data_problems_train.txt").read_text()
    assert problems.count("\n") == 3


def test_rows_of_a_share_are_whole(reading, tmp_path):
    train, val = open_splits("train", "0.4", tmp_path, say=str, **reading)
    whole = open_dataset("train", **reading)
    rows = {row["image_id"]: row for row in map(whole.row, range(len(whole)))}
    for table in (train, val):
        for row in map(table.row, range(len(table))):
            for group in ("objects", "relations"):
                for key, values in rows[row["image_id"]][group].items():
                    assert np.array_equal(row[group][key], values), key
