"""The table: rows come back, parts of it keep theirs, and what changed since an earlier one is told."""

import json
import pickle

import numpy as np
import pytest
from documents import row_of
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.dataset import DetectionDataset
from toolkit.data.sampling import SampleKey
from toolkit.data.table import Category, Problem
from toolkit.data.table_cache import open_table, write_rows

CATEGORIES = (Category(7, "a"), Category("x", "b"))
PREDICATES = ("p", "q", "r")
COUNTS = {5: 0, 3: 3, 9: 1, 4: 2}


def row(image_id, count, **extra):
    """Every second box is a crowd region, and of the other class."""
    boxes = [tuple(range(4 * number, 4 * number + 4)) for number in range(count)]
    alternating = [number % 2 for number in range(count)]
    relations = [(0, 1, 2)] if count > 1 else ()
    columns = {"iscrowd": alternating, "area": [float(number) for number in range(count)]}
    return row_of(image_id, boxes, (40, 30 + count), alternating, relations, **columns) | extra


def table_of(folder, rows, name="t"):
    return write_rows(rows, cache_file=folder / f"{name}.json", categories=CATEGORIES, predicates=PREDICATES)


@pytest.mark.parametrize("ids", [[5, 3, 9], ["a", "b", "ü"]])
def test_rows_come_back(tmp_path, ids):
    rows = [row(image_id, count) for image_id, count in zip(ids, (0, 3, 1), strict=True)]
    table = table_of(tmp_path, rows)
    sent = pickle.loads(pickle.dumps(table))  # noqa: S301 - as for a spawned worker
    opened, _ = open_table(tmp_path / "t.json")
    for seen in (table, sent, opened):
        assert seen.image_ids().tolist() == ids
        assert seen.num_boxes().tolist() == [0, 3, 1]
        assert seen.num_objects().tolist() == [0, 2, 1]
        assert seen.described_boxes() == "3 boxes, 1 crowd regions"
        assert seen.sizes_hw().tolist() == [[30, 40], [33, 40], [31, 40]]
        assert seen.categories == CATEGORIES
        assert seen.predicates == PREDICATES
        for index, expected in enumerate(rows):
            assert_row(seen.row(index), expected)
    with pytest.raises(IndexError):
        table.row(3)


def assert_row(got, expected):
    for name in ("image_id", "file_name", "width", "height"):
        assert got[name] == expected[name]
    for group in ("objects", "relations"):
        assert got[group].keys() == expected[group].keys()
        for name, values in got[group].items():
            assert values.tolist() == np.reshape(expected[group][name], values.shape).tolist(), name
            assert values.dtype == (np.float32 if name in ("bbox", "area") else np.int64), name


def test_a_row_may_be_written_to(tmp_path):
    table = table_of(tmp_path, [row(1, 2)])
    table.row(0)["objects"]["bbox"] += 1
    assert table.row(0)["objects"]["bbox"][0, 0] == 0


def test_the_first_images_and_a_selection_keep_what_is_theirs(tmp_path):
    table = table_of(
        tmp_path,
        [
            row(
                number,
                number % 4,
                image=bytes([number]),
            )
            for number in range(10)
        ],
    )
    assert table.image_source(table.row(4)) == bytes([4])
    assert table.head(99) is table
    head = table.head(5)
    assert head.fingerprint != table.fingerprint
    assert head.num_boxes().tolist() == [0, 1, 2, 3, 0]
    chosen = table.select(np.array([7, 2]))
    for part, ids in ((head, [0, 1, 2, 3, 4]), (chosen, [7, 2])):
        sent = pickle.loads(pickle.dumps(part))  # noqa: S301 - pickled here, as for a spawned worker
        for seen in (part, sent):
            assert seen.image_ids().tolist() == ids
            assert [seen.row(index)["image"] for index in range(len(ids))] == [bytes([id_]) for id_ in ids]
            assert seen.row(1)["objects"]["id"].tolist() == list(range(ids[1] % 4))


def test_no_picture_has_more_pixels_than_the_limit_of_the_table(tmp_path):
    file = tmp_path / "1.png"
    table = write_rows(
        [row(1, 1)],
        cache_file=tmp_path / "t.json",
        categories=CATEGORIES,
        image_root=tmp_path,
    )
    table.max_image_pixels = 40 * 31
    Image.new("RGB", (50, 31)).save(file)  # changed while the run goes on
    with pytest.raises(BadInput, match="50 x 31 pixels are more than data.max_image_pixels 1240"):
        DetectionDataset(table, transform=None)[SampleKey(0, 0)]


def test_a_problem_is_one_line():
    problem = Problem("warning", "a\nb.png", 3, "x\ty", "wrong\nin two lines")
    assert str(problem).count("\n") == 0
    assert str(problem).startswith("warning: a")


# ---- what changed ----------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path):
    return table_of(tmp_path, [row(*each) for each in COUNTS.items()], "old")


@pytest.fixture
def new(tmp_path):
    """Without the image 4, with an image 7, and another box in the image 3."""
    rows = [row(*each) for each in COUNTS.items() if each[0] != 4]
    rows[1]["objects"]["bbox"][2] = (1.0, 2.0, 3.0, 5.0)
    return table_of(tmp_path, [*rows, row(7, 2)], "new")


def stored(table):
    return json.loads(json.dumps(table.identity))


GONE = "1 gone (4.png (id 4))"
ADDED = "1 new (7.png (id 7))"
EDITED = "1 with other boxes or labels (3.png (id 3))"
THEN_AND_NOW = "4 images with 4 boxes then, 4 images with 4 boxes now"  # without crowd regions


def test_annotations_that_were_edited_are_told_image_by_image(old, new):
    assert new.changed_since(stored(old)) == f"{THEN_AND_NOW}; of the images {GONE}, {ADDED}, {EDITED}"
    assert new.head(3).changed_since(stored(old)).endswith(f"of the images {GONE}, {EDITED}")
    assert new.changed_since(stored(old) | {"file": "gone.arrow"}) == THEN_AND_NOW


def test_the_same_annotations_did_not_change(old, tmp_path):
    again = table_of(
        tmp_path,
        [row(*each) for each in COUNTS.items()],
        "again",
    )
    assert again.changed_since(stored(old)) == ""


def test_changes_of_a_selection_are_those_of_all_images(old, new):
    is_chosen = np.arange(4) != 1
    told = new.select(is_chosen).changed_since(stored(old.select(is_chosen)))
    assert told.endswith(f"now; of all images, those held out among them, {GONE}, {ADDED}, {EDITED}")
    assert new.select(is_chosen).changed_since(stored(old)) == "4 images with 4 boxes then, 3 images with 2 boxes now"
