"""Formats: what is written in one is read again, and predictions are a data set, and links to images are followed.

How the folders of each format are recognised, and what is said of their faults, is in `assets/dirty_sets`.
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pytest
from dirty_sets import check_set, sets_in
from documents import needs_bccd, row_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import BCCD
from small_data import BOX, SIZE, boxes_of, picture

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.data.annotations import ImageRow
from toolkit.data.formats import open_dataset, recognise
from toolkit.data.table import Category, LabelledImages
from toolkit.data.table_cache import write_rows
from toolkit.tools.predict.outputs import write_outputs
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.writers import write_folder


class Holds(NamedTuple):
    """What a format keeps beside boxes: crowd regions, areas, and classes without a box."""

    crowds: bool
    areas: bool
    all_classes: bool


FORMATS = {
    "coco": Holds(crowds=True, areas=True, all_classes=True),
    "voc": Holds(crowds=True, areas=False, all_classes=True),
    "yolo": Holds(crowds=False, areas=False, all_classes=True),
    "csv": Holds(crowds=True, areas=False, all_classes=False),
    "hub": Holds(crowds=True, areas=True, all_classes=True),
    "labelme": Holds(crowds=True, areas=False, all_classes=True),
}
# By format of predictions: the file or folder that is opened, and options.
PREDICTIONS = {
    "coco": ("dataset.json", {"image_dir": "pictures"}),
    "csv": ("predictions.csv", {}),
    "voc": ("annotations", {"image_dir": "pictures"}),
    "yolo": ("labels", {"image_dir": "pictures"}),
}
# Names that differ in the suffix alone, or in the case of letters, keep their own boxes.
NAMES = ["a.png", "a.bmp", "A.tif", "sub/a.png"]

datasets.disable_progress_bars()
side = st.floats(1.5, 100, width=32)  # larger than what a table takes for fractions
boxes_inside = st.lists(
    st.tuples(st.floats(0, 98, width=32), st.floats(0, 78, width=32), side, side),
    max_size=4,
)
class_name = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
class_names = st.lists(
    class_name.filter(lambda name: name != "background"),
    min_size=1,
    max_size=3,
    unique=True,
)


def corners_of(boxes_xywh) -> np.ndarray:
    boxes = np.array(boxes_xywh, np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes


def write_table(folder: Path, images: list, names: list[str], crowds: bool):
    """Return a table with a picture for each list of boxes; every other box may be a crowd."""
    rows = []
    for number, of_image in enumerate(images):
        picture(folder / NAMES[number], number)
        order = np.arange(len(of_image))
        columns = {
            "id": 10 * number + order,
            "iscrowd": order % 2 * crowds,
            "area": order + 3.5,
        }
        boxes = corners_of(of_image).clip(0, [*SIZE, *SIZE])
        row = row_of(number, boxes, SIZE, order % len(names), **columns)
        rows.append(row | {"file_name": NAMES[number]})
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


@settings(max_examples=25)
@example([[(0.0, 0.0, 2.0, 2.0)]], ["#", "0"], "voc")  # a name, and not a comment
@example([[], [(0.0, 0.0, 2.0, 2.0)]], ["a"], "voc")  # a.bmp of the one split, and a.png of the other
@given(
    st.lists(boxes_inside, min_size=1, max_size=4).filter(any),
    class_names,
    st.sampled_from(sorted(FORMATS)),
)
def test_nothing_is_lost_that_a_format_can_hold(tmp_path_factory, images, names, format):
    """Two splits have files of the same names."""
    folder = tmp_path_factory.mktemp("round")
    holds = FORMATS[format]
    used = len(names) if holds.all_classes else max(map(len, images))
    names = sorted(names)[:used]
    table = write_table(folder / "pictures", images, names, holds.crowds)
    expected = by_picture(table)
    for split in ("train", "val"):
        write_folder(table, folder / "set", split, format)
    recognised = recognise(folder / "set")
    assert (recognised.format, recognised.splits, recognised.others) == (
        format,
        ("train", "val"),
        (),
    )
    for split in recognised.splits:
        again = open_dataset(split, path=folder / "set", cache_dir=folder / "cache")
        assert again.class_names == names
        assert not [problem for problem in again.problems if problem.severity != "note"]
        found = by_picture(again)
        assert found.keys() == expected.keys()
        for pixels, ours in expected.items():
            theirs = found[pixels]
            assert theirs["names"] == ours["names"]
            assert theirs["iscrowd"].tolist() == ours["iscrowd"].tolist()
            assert np.allclose(theirs["bbox"], ours["bbox"], atol=1e-4, rtol=0)
            if holds.areas:
                assert theirs["area"].tolist() == ours["area"].tolist()


# ---- predictions -----------------------------------------------------------------------------------------------------


def predict(folder: Path, files: list[str], boxes: list, names: list[str], formats: list[str]) -> LabelledImages:
    """Write predictions of these boxes xyxy, by image, for files of pictures; return them."""
    counts = list(map(len, boxes))
    labels = np.arange(sum(counts)) % len(names)
    scores = np.linspace(0.1, 0.9, len(labels))
    found = Boxes.found(counts=counts, xyxy=np.concatenate(boxes), scores=scores, labels=labels)
    rows = [ImageRow(number, str(folder / file), *SIZE) for number, file in enumerate(files)]
    categories = tuple(Category(10 * number, name) for number, name in enumerate(names, start=1))
    predictions = LabelledImages(images=rows, boxes=found, categories=categories)
    write_outputs({"images": [], "errors": []}, predictions, files, formats, Path("out"))
    return predictions


@pytest.fixture
def pictures(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pictures"


outside = st.floats(-60, 160, width=32)
extent = st.floats(0.5, 90, width=32)
boxes_anywhere = st.lists(st.tuples(outside, outside, extent, extent), max_size=5)


@settings(max_examples=20)
@given(
    st.lists(boxes_anywhere, min_size=1, max_size=3),
    class_names,
    st.sampled_from(sorted(PREDICTIONS)),
)
def test_predictions_are_a_data_set(tmp_path_factory, images, names, format):
    """With the part of each box that lies in its image; some boxes lie outside altogether."""
    folder = tmp_path_factory.mktemp("predictions")
    files = [f"{number}.png" for number in range(len(images))]
    for number, file in enumerate(files):
        picture(folder / "pictures" / file, number)
    boxes = [corners_of([(10, 10, 20, 20), *of_image]) for of_image in images]
    names = sorted(names)
    place, options = PREDICTIONS[format]
    with contextlib.chdir(folder):
        found = predict(folder / "pictures", files, boxes, names, [format])
        table = open_dataset(str(Path("out", place)), cache_dir="cache", **options)
    read = {Path(table.file_name(index)).name: table.row(index)["objects"] for index in range(len(table))}
    for number, file in enumerate(files):
        inside = boxes[number].clip(0, [*SIZE, *SIZE])
        has_area = (inside[:, 2:] > inside[:, :2]).all(axis=1)
        labels = found.boxes.labels[found.boxes.of_image(number)][has_area]
        assert [table.class_names[label] for label in read[file]["category"]] == [names[label] for label in labels]
        assert read[file]["bbox"] == pytest.approx(inside[has_area], abs=1e-4)
    if format == "coco":
        results = read_predictions(folder / "out" / "results.json", replace(table, categories=found.categories))
        assert results.predictions.labels.tolist() == found.boxes.labels.tolist()
        assert np.array_equal(results.predictions.scores, found.boxes.scores)
        assert np.allclose(results.predictions.xyxy, found.boxes.xyxy, atol=1e-12, rtol=0)


@pytest.mark.parametrize("place", ["", "labels"])
@pytest.mark.parametrize("names", [["a.png", "sub/a.png", "sub/deep er/b.c.png"], ["x/a.png", "y/a.png"]])
def test_predictions_for_folders_of_pictures_are_read(pictures, place, names):
    """At the top VOC is recognised, in `labels` YOLO."""
    boxes = []
    for number, name in enumerate(names):
        picture(pictures / name, number)
        boxes.append(np.array([[10.0 + number, 10, 30, 30]]))
    predict(pictures, names, boxes, ["a"], ["voc", "yolo"])
    table = open_dataset("train", path=Path("out") / place, image_dir=str(pictures), cache_dir="cache")
    assert boxes_of(table) == [box.tolist() for box in boxes]


def test_predictions_for_relative_paths_are_read_elsewhere(pictures, monkeypatch):
    picture(pictures / "a.png")
    predict(Path("pictures"), ["a.png"], [np.array([BOX])], ["a"], ["csv"])
    monkeypatch.chdir(pictures)
    assert boxes_of(open_dataset("train", path="../out/predictions.csv", cache_dir="../cache")) == [[BOX]]


def test_predictions_for_a_name_that_is_not_utf_8_are_not_lost(pictures):
    names = ["a.png", os.fsdecode(b"b\xc3\xff.png")]
    predict(
        pictures,
        names,
        [np.array([BOX])] * 2,
        ["a"],
        ["json", "jsonl", "coco", "yolo", "voc", "csv"],
    )
    assert "b\ufffd\ufffd.png" in Path("out/predictions.csv").read_text(encoding="utf-8")
    assert len(list(Path("out/annotations").glob("*.xml"))) == 2


# ---- links, streams, and a data set as it is downloaded --------------------------------------------------------------


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
@pytest.mark.parametrize(
    ("split", "images", "boxes"),
    [("train", 205, 2804), ("val", 87, 1137), ("test", 72, 945)],
)
def test_bccd_as_downloaded_is_the_same_in_both_formats(tmp_path, split, images, boxes):
    voc = open_dataset(split, path=BCCD, cache_dir=tmp_path)
    coco = open_dataset(split, path=BCCD, format="coco", cache_dir=tmp_path)
    assert len(voc) == images
    assert voc.num_boxes().sum() == boxes
    expected = by_picture(coco)
    found = by_picture(voc)
    for pixels, objects in expected.items():
        assert found[pixels]["names"] == objects["names"]
        assert found[pixels]["iscrowd"].tolist() == objects["iscrowd"].tolist()
        assert np.array_equal(found[pixels]["bbox"], objects["bbox"])
