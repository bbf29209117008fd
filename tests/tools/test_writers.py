"""Writers of data sets: names of files and classes, links, and what a format cannot hold.

That what is written is read again is tested in `promises/test_formats.py`.
"""

import csv

import numpy as np
import pytest
from PIL import Image
from small_data import coco_text, one_image_folder, picture, write_text

from toolkit.base.boxes import Boxes
from toolkit.data.annotations import ImageRow
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category, LabelledImages
from toolkit.tools.writers import (
    names_by_content,
    write_coco_folder,
    write_csv,
    write_folder,
)

NAMES = [
    "=1+1",
    "'=1+1",
    "+x",
    "-x",
    "@SUM(A1)",
    "'it'",
    "it's",
    "''",
    "plain",
    "a,b",
    'say "=x"',
    "＝1",
    "=it'",
]


@pytest.mark.parametrize("names", [NAMES, ["'-'"]], ids=len)
def test_names_in_a_table_are_no_formulas_and_come_back(names, tmp_path):
    names = sorted(names)
    count = len(names)
    boxes = Boxes.found(
        [count],
        np.array([[1, 2, 30, 20]] * count),
        np.full(count, 0.5),
        np.arange(count),
    )
    categories = [Category(number, name) for number, name in enumerate(names, start=1)]
    write_csv(
        LabelledImages([ImageRow(1, "=photo.png", 40, 30)], boxes, categories),
        tmp_path / "predictions.csv",
    )
    with open(tmp_path / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [row[key] for row in rows for key in ("image", "label")]
    assert not [cell for cell in cells if cell[0] in "=+-@＝"]
    Image.new("RGB", (40, 30)).save(tmp_path / "=photo.png")
    table = open_dataset(
        "train",
        path=tmp_path / "predictions.csv",
        format="csv",
        cache_dir=tmp_path / "cache",
    )
    assert table.class_names == names
    assert table.row(0)["file_name"] == "=photo.png"
    assert table.row(0)["objects"]["category"].tolist() == list(range(count))


def test_hard_links_are_of_the_file_behind_a_link(tmp_path):
    """A relative link, copied as a link, would lead nowhere."""
    folder = one_image_folder(tmp_path / "set", "voc")
    (folder / "images" / "a.png").rename(tmp_path / "a.png")
    (folder / "images" / "a.png").symlink_to("../../a.png")
    table = open_dataset("train", path=folder, cache_dir=tmp_path / "cache")
    write_folder(table, tmp_path / "far" / "away" / "out", "train", "coco", link=True)
    (copy,) = (tmp_path / "far").rglob("a.png")
    assert not copy.is_symlink()
    assert copy.samefile(tmp_path / "a.png")
    write_folder(table, tmp_path / "copied", "train", "coco")
    assert not (tmp_path / "copied" / "train" / "a.png").samefile(tmp_path / "a.png")


def test_a_suffix_that_is_missing_or_wrong_is_that_of_the_content(tmp_path):
    names = ["a.jpg", "b"]
    for seed, name in enumerate(names):
        picture(tmp_path / "right.png", seed).rename(tmp_path / name)
    file = write_text(tmp_path / "train.json", coco_text(names))
    table = open_dataset(file, image_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert names_by_content(table) == ["a.png", "b.png"]
    write_coco_folder(table, tmp_path / "out", "train")
    assert sorted(path.name for path in (tmp_path / "out" / "train").iterdir()) == [
        "a.jpg",
        "b.png",
    ]
