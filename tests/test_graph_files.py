"""Published relations that are not VG150's, found by their content.   Run: pytest tests/test_graph_files.py"""

import json

import h5py
import numpy as np
import pytest
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.detectors.scene_graphs.readers.visual_genome import load_image_list
from toolkit.detectors.scene_graphs.readers.visual_genome_files import find_files

NAMES = {"label_to_idx": {"ship": 1, "crane": 2}, "predicate_to_idx": {"over": 1, "beside": 2, "at": 3}}
ARRAYS = {  # two images, the second without relations; boxes are centre x, y, w, h where the longer side is 1024
    "boxes_1024": np.array([[100.5, 50.25, 40.5, 20.5], [300, 200, 64, 32], [512, 256, 100, 100]], np.float32),
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


def write_graphs(file, arrays):
    with h5py.File(file, "w") as h5:
        for key, values in arrays.items():
            h5[key] = values


def write(folder, arrays=ARRAYS, h5="VG-SGG.h5", names="VG-SGG-dicts.json"):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    write_graphs(folder / h5, arrays)
    (folder / names).write_text(json.dumps(NAMES | {"object_count": {"ship": 2}}))
    images = [{"width": 512, "url": "", "height": 256, "image_id": str(number), "coco_id": None} for number in (1, 2)]
    (folder / "image_data.json").write_text(json.dumps(images))
    for number in (1, 2):
        Image.new("RGB", (512, 256)).save(folder / "images" / f"{number}.png")
    return folder


def opened(folder, name=None, split="train:0"):
    options = {"format": "visual_genome", "name": str(name or folder), "image_dir": folder / "images"}
    return open_dataset(split, **options, cache_dir=folder / "cache")


def test_fractions_and_flat_predicates_are_read(tmp_path):
    table = opened(write(tmp_path))
    row = table.row(0)
    assert table.class_names == ["ship", "crane"] and table.predicates == ("over", "beside", "at") and len(table) == 1
    assert row["image_id"] == "1" and row["file_name"] == "1.png"
    np.testing.assert_allclose(row["objects"]["bbox"][0], [40.125, 20, 60.375, 30.25])  # half of the file's numbers
    assert [row["relations"][key].tolist() for key in ("subject", "object", "predicate")] == [[0, 1], [1, 0], [2, 0]]
    columns = {key: ARRAYS[key].reshape(-1, 1) for key in ("predicates", "labels", "split")}
    again = opened(write(tmp_path / "columns", ARRAYS | columns, "a.hdf5", "b.json")).row(0)
    assert again["relations"]["predicate"].tolist() == [2, 0]


def test_wrong_shapes_are_named(tmp_path):
    wrong = {"predicates": np.zeros((2, 2), np.int32), "labels": np.ones(3), "boxes_1024": np.ones((3, 5))}
    with pytest.raises(BadInput) as caught:
        opened(write(tmp_path, ARRAYS | wrong))
    assert "`predicates` is int32 (2, 2); expected integers (N, 1) or (N,)" in str(caught.value)
    assert "`labels` is float64 (3,)" in str(caught.value) and "`boxes_1024` is float64 (3, 5)" in str(caught.value)
    with pytest.raises(BadInput, match=r"box row 1 .*nan"):
        opened(write(tmp_path, ARRAYS | {"boxes_1024": ARRAYS["boxes_1024"] * [[1], [np.nan], [1]]}))


def test_files_are_found_by_their_content(tmp_path):
    write(tmp_path, h5="graphs.h5", names="words.json")
    (tmp_path / "captions.json").write_text(json.dumps([{"image_id": 1, "objects": [{"width": 3, "height": 4}]}]))
    write_graphs(tmp_path / "features.h5", {"features": np.zeros(3)})
    expected = tuple(tmp_path / name for name in ("graphs.h5", "words.json", "image_data.json"))
    assert find_files(tmp_path) == expected
    write_graphs(tmp_path / "with-attri.h5", ARRAYS | {"attributes": np.zeros((3, 10), np.int64)})
    with pytest.raises(BadInput, match=r"2 files .*\(graphs.h5, with-attri.h5\); choose one: --data.name FILE"):
        find_files(tmp_path)
    (tmp_path / "dicts-with-attri.json").write_text(json.dumps(NAMES | {"attribute_to_idx": {"big": 1}}))
    assert find_files(tmp_path / "graphs.h5") == expected
    assert find_files(tmp_path / "with-attri.h5")[1] == tmp_path / "dicts-with-attri.json"
    assert len(opened(tmp_path, tmp_path / "graphs.h5")) == 1
    (tmp_path / "more.json").write_text(json.dumps(NAMES))
    with pytest.raises(BadInput, match=r"\(more.json, words.json\); leave one of them in the folder"):
        find_files(tmp_path / "graphs.h5")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput) as caught:
        find_files(tmp_path / "empty")
    assert [fault.split("; ")[0].count(" no ") for fault in str(caught.value).splitlines()[-3:]] == [1, 1, 1]


@pytest.mark.parametrize("rows, first", [(4, 1592), (3, 5)])
def test_corrupted_images_are_left_out_only_where_the_count_then_fits(tmp_path, rows, first):
    images = [{"image_id": number, "width": 8, "height": 8} for number in (1592, 5, 6, 7)]
    (tmp_path / "image_data.json").write_text(json.dumps(images))
    found = load_image_list(tmp_path / "image_data.json", tmp_path, rows)
    assert len(found) == rows and found[0]["image_id"] == first


def test_names_of_vrd_from_text_files_and_relations_of_a_box_to_itself(tmp_path):
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    cup = {"category": 1, "bbox": [5, 15, 10, 30]}
    (tmp_path / "annotations_test.json").write_text(json.dumps({"a.png": [{"predicate": 0} | dict.fromkeys(
        ("subject", "object"), cup)]}))  # fmt: skip
    (tmp_path / "obj.txt").write_text("table\ncup\n")
    (tmp_path / "rel.txt").write_text("next to\n")
    table = open_dataset("test", format="vrd", name=str(tmp_path), image_dir=tmp_path, cache_dir=tmp_path / "cache")
    row = table.row(0)
    assert table.class_names == ["table", "cup"] and table.predicates == ("next to",)
    assert row["objects"]["bbox"].tolist() == [[10, 5, 30, 15]] * 2
    assert [row["relations"][key].tolist() for key in ("subject", "object", "predicate")] == [[0], [1], [0]]
