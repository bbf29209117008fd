"""Formats: what is written in one is read again, and predictions are a data set, and links to images are followed.

How the folders of each format are recognised, and what is said of their faults, is in `assets/dirty_sets`.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from dirty_sets import check_set, sets_in
from documents import needs_bccd, row_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import BCCD
from small_data import BOX, boxes_of, picture

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.data.annotations import ImageRow
from toolkit.data.formats import FOLDERS, open_dataset, recognise
from toolkit.data.table import Category, LabelledImages
from toolkit.data.table_cache import write_rows
from toolkit.tools.predict.outputs import write_outputs
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.shapes import make_shapes
from toolkit.tools.writers import write_folder


class Holds(NamedTuple):
    """What a format keeps beside boxes: crowd regions, areas, names of files, and classes without a box."""

    crowds: bool
    areas: bool
    names: bool
    all_classes: bool


FORMATS = {
    "coco": Holds(crowds=True, areas=True, names=True, all_classes=True),
    "voc": Holds(crowds=True, areas=False, names=True, all_classes=True),
    "yolo": Holds(crowds=False, areas=False, names=True, all_classes=True),
    "csv": Holds(crowds=True, areas=False, names=True, all_classes=False),
    "hub": Holds(crowds=True, areas=True, names=False, all_classes=True),
}
# By format of predictions: the file or folder that is opened, and whether the images must be given.
PREDICTIONS = {
    "coco": ("dataset.json", True),
    "csv": ("predictions.csv", False),
    "voc": ("annotations", True),
    "yolo": ("labels", True),
}
# Names that differ in the suffix alone, or in the case of letters, keep their own boxes.
NAMES = ["a.png", "a.bmp", "A.tif", "sub/a.png"]

x = st.floats(0, 98, width=32)
y = st.floats(0, 78, width=32)
side = st.floats(1.5, 100, width=32)  # larger than what a table takes for fractions
boxes_inside = st.lists(st.tuples(x, y, side, side), max_size=4)
class_name = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
class_names = st.lists(class_name.filter(lambda name: name != "background"), min_size=1, max_size=3, unique=True)


def corners_of(boxes_xywh) -> np.ndarray:
    """Return boxes xyxy, clipped to their image."""
    boxes = np.array(boxes_xywh, np.float32).reshape(-1, 4)
    ends = (boxes[:, :2] + boxes[:, 2:]).clip(0, [100, 80])
    return np.concatenate([boxes[:, :2], ends], axis=1)


def write_table(folder: Path, images: list, names: list[str], crowds: bool):
    """Return a table with a picture for each list of boxes; every other box may be a crowd."""
    rows = []
    for number, of_image in enumerate(images):
        count = len(of_image)
        labels = [index % len(names) for index in range(count)]
        ids = [10 * number + index for index in range(count)]
        flags = [int(index % 2 and crowds) for index in range(count)]
        columns = {"id": ids, "iscrowd": flags, "area": [3.5] * count}
        row = row_of(number, corners_of(of_image), (100, 80), labels, **columns)
        rows.append(row | {"file_name": NAMES[number]})
        picture(folder / NAMES[number], number)
    categories = [Category(number, name) for number, name in enumerate(names, start=1)]
    return write_rows(rows, cache_file=folder / "t.json", categories=categories, image_root=folder)


def by_picture(table) -> dict[bytes, dict]:
    """Return the objects of each image by its pixels, with the names of their classes."""
    found = {}
    for index in range(len(table)):
        row = table.row(index)
        names = [table.class_names[label] for label in row["objects"]["category"]]
        found[table.decode_image(row).numpy().tobytes()] = row["objects"] | {"names": names}
    return found


@settings(max_examples=30)
@example([[(0.0, 0.0, 2.0, 2.0)]], ["#", "0"], "voc")  # a name, and not a comment
@given(
    images=st.lists(boxes_inside, min_size=1, max_size=4).filter(any),
    names=class_names,
    format=st.sampled_from(sorted(FORMATS)),
)
def test_nothing_is_lost_that_a_format_can_hold(tmp_path_factory, images, names, format):
    folder = tmp_path_factory.mktemp("round")
    holds = FORMATS[format]
    names = sorted(names)
    if not holds.all_classes:
        names = names[: max(map(len, images))]
    table = write_table(folder / "pictures", images, names, holds.crowds)
    write_folder(table, folder / "set", "train", format)
    again = open_dataset("train", path=folder / "set", format=format, cache_dir=folder / "cache")
    assert again.class_names == names
    expected = by_picture(table)
    found = by_picture(again)
    assert found.keys() == expected.keys()
    for pixels, ours in expected.items():
        theirs = found[pixels]
        assert theirs["names"] == ours["names"]
        assert theirs["iscrowd"].tolist() == ours["iscrowd"].tolist()
        assert np.allclose(theirs["bbox"], ours["bbox"], atol=1e-4, rtol=0)
        if holds.areas:
            assert theirs["area"].tolist() == ours["area"].tolist()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The tables of 6 + 3 shapes by split."""
    folder = tmp_path_factory.mktemp("shapes") / "coco"
    make_shapes(folder, 6, 3, 64)
    return {split: open_dataset(split, path=folder, cache_dir=folder / "cache") for split in ("train", "val")}


@pytest.mark.parametrize("format", FOLDERS)
def test_splits_are_the_same_in_every_format(shapes, tmp_path, format):
    for split, table in shapes.items():
        write_folder(table, tmp_path / "set", split, format)
    recognised = recognise(tmp_path / "set")
    assert recognised.format == format
    assert recognised.splits == ("train", "val")
    assert not recognised.others
    for split, table in shapes.items():
        again = open_dataset(split, path=tmp_path / "set", cache_dir=tmp_path / "cache")
        assert sorted(again.class_names) == sorted(table.class_names)
        assert not [problem for problem in again.problems if problem.severity != "note"]
        found = by_picture(again)
        for pixels, objects in by_picture(table).items():
            assert found[pixels]["names"] == objects["names"]
            assert found[pixels]["bbox"].tolist() == objects["bbox"].tolist()
        if FORMATS[format].names:  # VOC puts the split before a name that another split has too
            names = {Path(name).stem.removeprefix("val_") for name in again.file_names()}
            assert names == {Path(name).stem for name in table.file_names()}


def found_of(files: list[str], boxes: list[np.ndarray], labels: np.ndarray, scores: np.ndarray, names: list[str]):
    """Predictions for files of 100 x 80 pixels."""
    counts = [len(of_image) for of_image in boxes]
    found = Boxes.found(counts=counts, xyxy=np.concatenate(boxes), scores=scores, labels=labels)
    rows = [ImageRow(number, file, 100, 80) for number, file in enumerate(files)]
    categories = tuple(Category(10 * number, name) for number, name in enumerate(names, start=1))
    return LabelledImages(images=rows, boxes=found, categories=categories)


outside = st.floats(-60, 160, width=32)
extent = st.floats(0.5, 90, width=32)
boxes_anywhere = st.lists(st.tuples(outside, outside, extent, extent), max_size=5)


@settings(max_examples=20)
@given(st.lists(boxes_anywhere, min_size=1, max_size=3), class_names, st.sampled_from(sorted(PREDICTIONS)))
def test_predictions_are_a_data_set(tmp_path_factory, images, names, format):
    """With the part of each box that lies in its image; some boxes lie outside altogether."""
    folder = tmp_path_factory.mktemp("predictions")
    names = sorted(names)
    files = [str(picture(folder / "pictures" / f"{number}.png", number)) for number in range(len(images))]
    images[0] = [(10, 10, 20, 20), *images[0]]
    boxes = [np.array(of_image, np.float64).reshape(-1, 4) for of_image in images]
    for of_image in boxes:
        of_image[:, 2:] += of_image[:, :2]
    count = sum(map(len, boxes))
    labels = np.arange(count) % len(names)
    found = found_of(files, boxes, labels, np.full(count, 0.5), names)
    write_outputs({"images": [], "errors": []}, found, [Path(file).name for file in files], [format], folder / "out")
    place, needs_images = PREDICTIONS[format]
    options = {"cache_dir": folder / "cache", "on_error": "raise"}
    if needs_images:
        options["image_dir"] = str(folder / "pictures")
    if format == "coco":
        table = open_dataset(str(folder / "out" / place), **options)
    else:
        table = open_dataset("train", path=folder / "out" / place, **options)
    read = {Path(table.file_name(index)).name: table.row(index)["objects"] for index in range(len(table))}
    for number, of_image in enumerate(boxes):
        inside = of_image.clip(0, [100, 80, 100, 80])
        has_area = (inside[:, 2:] > inside[:, :2]).all(axis=1)
        first = sum(map(len, boxes[:number]))
        expected = [names[label] for label in labels[first : first + len(of_image)][has_area]]
        objects = read[f"{number}.png"] if has_area.any() else read.get(f"{number}.png", {"bbox": [], "category": []})
        assert [table.class_names[label] for label in objects["category"]] == expected
        assert np.reshape(objects["bbox"], (-1, 4)) == pytest.approx(inside[has_area], abs=1e-4)


@settings(max_examples=15)
@given(st.lists(boxes_inside, min_size=1, max_size=3), class_names, st.integers(0, 99))
def test_results_come_back_to_the_last_digit(tmp_path_factory, images, names, seed):
    folder = tmp_path_factory.mktemp("results")
    table = write_table(folder / "images", images, sorted(names), crowds=False)
    boxes = [corners_of(of_image).astype(np.float64) for of_image in images]
    truth = table.boxes()
    scores = np.random.default_rng(seed).random(len(truth))
    found = found_of(table.file_names(), boxes, truth.labels, scores, table.class_names)
    found = LabelledImages(found.images, found.boxes, table.categories)
    write_outputs({"images": [], "errors": []}, found, NAMES[: len(images)], ["coco"], folder)
    read = read_predictions(folder / "results.json", table).predictions
    assert read.offsets.tolist() == found.boxes.offsets.tolist()
    assert read.labels.tolist() == found.boxes.labels.tolist()
    assert np.array_equal(read.scores, scores)
    assert np.allclose(read.xyxy, found.boxes.xyxy, atol=1e-12, rtol=0)


def predict(folder: Path, names: list[str], formats: list[str]) -> list[list[list[float]]]:
    """Write predictions of one box for each picture, another for each; return the boxes."""
    for number, name in enumerate(names):
        picture(folder / "pictures" / name, number)
    files = [str(folder / "pictures" / name) for name in names]
    boxes = [np.array([[10.0 + number, 10, 30, 30]]) for number in range(len(names))]
    found = found_of(files, boxes, np.zeros(len(names), int), np.full(len(names), 0.5), ["a"])
    write_outputs({"images": [], "errors": []}, found, names, formats, folder / "out")
    return [box.tolist() for box in boxes]


@pytest.mark.parametrize("place", ["", "labels"])
@pytest.mark.parametrize("names", [["a.png", "sub/a.png", "sub/deep er/b.c.png"], ["x/a.png", "y/a.png"]])
def test_predictions_for_folders_of_pictures_are_read(tmp_path, place, names):
    boxes = predict(tmp_path, names, ["voc", "yolo"])  # at the top VOC is recognised
    reading = {"image_dir": str(tmp_path / "pictures"), "cache_dir": tmp_path / "cache"}
    assert boxes_of(open_dataset("train", path=tmp_path / "out" / place, **reading)) == boxes


def test_predictions_for_relative_paths_are_read_elsewhere(tmp_path, monkeypatch):
    picture(tmp_path / "pictures" / "a.png")
    monkeypatch.chdir(tmp_path)
    found = found_of(["pictures/a.png"], [np.array([BOX])], np.zeros(1, int), np.ones(1), ["a"])
    write_outputs({"images": [], "errors": []}, found, ["a.png"], ["csv"], Path("out"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    table = open_dataset("train", path=tmp_path / "out" / "predictions.csv", cache_dir=tmp_path / "cache")
    assert boxes_of(table) == [[BOX]]


def test_predictions_for_a_name_that_is_not_utf_8_are_not_lost(tmp_path):
    predict(tmp_path, ["a.png", os.fsdecode(b"b\xc3\xff.png")], ["json", "jsonl", "coco", "yolo", "voc", "csv"])
    assert "b\ufffd\ufffd.png" in (tmp_path / "out" / "predictions.csv").read_text(encoding="utf-8")
    assert len(list((tmp_path / "out" / "annotations").glob("*.xml"))) == 2


@pytest.mark.parametrize("one", sets_in("links"))
def test_links_are_followed(one, tmp_path):
    check_set(one, tmp_path)


@pytest.mark.parametrize("format", ["csv", "shapes"])
def test_formats_that_are_not_streamed_say_so(tmp_path, format):
    if format == "csv":
        (tmp_path / "annotations.csv").write_text("image,x1,y1,x2,y2,label\na.jpg,1,1,2,2,x\n")
        options = {"path": tmp_path}
    else:
        options = {"format": "shapes"}
    with pytest.raises(BadInput, match=r"data\.streaming reads Parquet"):
        open_dataset("train", streaming=True, **options)


@needs_bccd
@pytest.mark.parametrize(("split", "images", "boxes"), [("train", 205, 2804), ("val", 87, 1137), ("test", 72, 945)])
def test_bccd_as_downloaded_is_the_same_in_both_formats(tmp_path, split, images, boxes):
    voc = open_dataset(split, path=BCCD, cache_dir=tmp_path)
    coco = open_dataset(split, path=BCCD, format="coco", cache_dir=tmp_path)
    assert len(voc) == images
    assert voc.num_boxes().sum() == boxes
    expected = by_picture(coco)
    found = by_picture(voc)
    assert found.keys() == expected.keys()
    for pixels, objects in expected.items():
        assert found[pixels]["names"] == objects["names"]
        assert found[pixels]["iscrowd"].tolist() == objects["iscrowd"].tolist()
        assert np.array_equal(found[pixels]["bbox"], objects["bbox"])
