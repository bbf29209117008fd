"""Published relations that are not VG150's: their files are found by their content, and read in their own forms."""

import json

import h5py
import numpy as np
import pytest
from PIL import Image
from rows import boxes

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.detectors.scene_graphs.readers.visual_genome import load_image_list
from toolkit.detectors.scene_graphs.readers.visual_genome_files import find_files

NAMES = {
    "label_to_idx": {"ship": 1, "crane": 2},
    "predicate_to_idx": {"over": 1, "beside": 2, "at": 3},
}
ARRAYS = {  # two images, the second without relations; boxes are centre x, y, w, h where the longer side is 1024
    "boxes_1024": boxes("100.5 50.25 40.5 20.5, 300 200 64 32, 512 256 100 100").numpy(),
    "labels": np.array([[1], [2], [1]], np.int32),
    "relationships": np.array([[0, 1], [1, 0]], np.int32),
    "predicates": np.array([3, 1], np.int32),
    "split": np.array([0, 0], np.int8),
    "img_to_first_box": np.array([0, 2], np.int32),
    "img_to_last_box": np.array([1, 2], np.int32),
    "img_to_first_rel": np.array([0, -1], np.int32),
    "img_to_last_rel": np.array([1, -1], np.int32),
    "attribute": np.zeros(0, np.int32),
}


def write_graphs(file, **changes):
    with h5py.File(file, "w") as h5:
        for key, values in (ARRAYS | changes).items():
            h5[key] = values


def write(folder, h5="VG-SGG.h5", names="VG-SGG-dicts.json", **changes):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    write_graphs(folder / h5, **changes)
    (folder / names).write_text(json.dumps(NAMES | {"object_count": {"ship": 2}}))
    images = []
    for number in ("1", "2"):
        images.append({"width": 512, "url": "", "height": 256, "image_id": number, "coco_id": None})
        Image.new("RGB", (512, 256)).save(folder / "images" / f"{number}.png")
    (folder / "image_data.json").write_text(json.dumps(images))
    return folder


def opened(folder, name=None):
    options = {"name": str(name or folder), "image_dir": folder / "images", "cache_dir": folder / "cache"}
    return open_dataset("train:0", format="visual_genome", **options)


def test_fractions_and_flat_predicates_are_read(tmp_path):
    table = opened(write(tmp_path))
    assert len(table) == 1
    assert table.class_names == ["ship", "crane"]
    assert table.predicates == ("over", "beside", "at")
    row = table.row(0)
    assert row["image_id"] == "1"
    assert row["file_name"] == "1.png"
    np.testing.assert_allclose(row["objects"]["bbox"][0], [40.125, 20, 60.375, 30.25])  # half of the file's numbers
    assert row["relations"]["subject"].tolist() == [0, 1]
    assert row["relations"]["object"].tolist() == [1, 0]
    assert row["relations"]["predicate"].tolist() == [2, 0]


def test_columns_are_read_as_rows_are(tmp_path):
    columns = {key: ARRAYS[key].reshape(-1, 1) for key in ("predicates", "labels", "split")}
    row = opened(write(tmp_path, "a.hdf5", "b.json", **columns)).row(0)
    assert row["relations"]["predicate"].tolist() == [2, 0]


def test_wrong_shapes_are_named(tmp_path):
    wrong = {
        "predicates": np.zeros((2, 2), np.int32),
        "labels": np.ones(3),
        "boxes_1024": np.ones((3, 5)),
    }
    with pytest.raises(BadInput) as caught:
        opened(write(tmp_path, **wrong))
    assert "`predicates` is int32 (2, 2); expected integers (N, 1) or (N,)" in str(caught.value)
    assert "`labels` is float64 (3,)" in str(caught.value)
    assert "`boxes_1024` is float64 (3, 5)" in str(caught.value)
    with pytest.raises(BadInput, match=r"box row 1 .*nan"):
        opened(
            write(
                tmp_path,
                boxes_1024=ARRAYS["boxes_1024"]
                * [
                    [1],
                    [np.nan],
                    [1],
                ],
            )
        )


@pytest.fixture
def folder(tmp_path):
    """Files with names of their own, among others that are not graphs."""
    write(tmp_path, h5="graphs.h5", names="words.json")
    (tmp_path / "captions.json").write_text(
        json.dumps(
            [
                {
                    "image_id": 1,
                    "objects": [{"width": 3, "height": 4}],
                }
            ]
        )
    )
    with h5py.File(tmp_path / "features.h5", "w") as h5:
        h5["features"] = np.zeros(3)
    return tmp_path


def test_files_are_found_by_their_content(folder):
    assert find_files(folder) == tuple(folder / name for name in ("graphs.h5", "words.json", "image_data.json"))


def test_of_several_files_one_is_to_be_chosen(folder):
    write_graphs(folder / "with-attri.h5", attributes=np.zeros((3, 10), np.int64))
    (folder / "dicts-with-attri.json").write_text(json.dumps(NAMES | {"attribute_to_idx": {"big": 1}}))
    with pytest.raises(BadInput, match=r"2 files .*\(graphs.h5, with-attri.h5\); choose one: --data.name FILE"):
        find_files(folder)
    assert find_files(folder / "graphs.h5")[1] == folder / "words.json"
    assert find_files(folder / "with-attri.h5")[1] == folder / "dicts-with-attri.json"
    assert len(opened(folder, folder / "graphs.h5")) == 1
    (folder / "more.json").write_text(json.dumps(NAMES))
    with pytest.raises(BadInput, match=r"\(more.json, words.json\); leave one of them in the folder"):
        find_files(folder / "graphs.h5")


def test_all_missing_files_are_named(tmp_path):
    with pytest.raises(BadInput) as caught:
        find_files(tmp_path)
    faults = str(caught.value).splitlines()[-3:]
    assert [fault.split("; ")[0].count(" no ") for fault in faults] == [1, 1, 1]


@pytest.mark.parametrize(("rows", "first"), [(4, 1592), (3, 5)])
def test_corrupted_images_are_left_out_only_where_the_count_then_fits(tmp_path, rows, first):
    images = [
        {
            "image_id": number,
            "width": 8,
            "height": 8,
        }
        for number in (1592, 5, 6, 7)
    ]
    (tmp_path / "image_data.json").write_text(json.dumps(images))
    found = load_image_list(tmp_path / "image_data.json", tmp_path, rows)
    assert len(found) == rows
    assert found[0]["image_id"] == first
