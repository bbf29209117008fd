"""Data sets of the `datasets` library."""

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.decoding import decode_image
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category

NAMES = ["cell", "plate"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    datasets.disable_progress_bars()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def png(colour=0, width=20, height=10):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def make(rows, sizes=True, label=None, as_list=False, ids=True):
    value = datasets.Value
    inner = {"bbox": datasets.List(value("float32"), length=4), "category": label or datasets.ClassLabel(names=NAMES)}
    inner |= {"area": value("float32")} | ({"id": value("int64")} if ids else {})
    objects = datasets.List(inner) if as_list else {key: datasets.List(feature) for key, feature in inner.items()}
    features = {"image": datasets.Image(), "objects": objects}
    features |= {key: value("int64") for key in ("image_id", "width", "height") if sizes}
    full = []
    for number, (image, boxes, categories) in enumerate(rows):
        parts = {"bbox": boxes, "category": categories, "area": [b[2] * b[3] for b in boxes]}
        parts |= {"id": [10 * number + k for k in range(len(boxes))]} if ids else {}
        listed = [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)] if as_list else parts
        row = {"image": image, "objects": listed, "image_id": 50 + number, "width": 20, "height": 10}
        full.append({key: row[key] for key in features})
    return datasets.Dataset.from_list(full, features=datasets.Features(features))


def opened(tmp_path, split="train", **options):
    return open_dataset(split, name=str(tmp_path / "set"), cache_dir=tmp_path / "cache", **options)


ROWS = [(png(1), [[1, 2, 3, 4]], [1]), (png(2), [], []), (png(3), [[0, 0, 20, 10], [5, 5, 2, 2]], [0, 1])]


def check(table, ids):
    assert table.image_ids().tolist() == ids and table.num_boxes().tolist() == [1, 0, 2]
    assert table.categories == (Category(0, "cell"), Category(1, "plate")) and table.image_root is None
    assert table.row(0)["objects"]["bbox"].tolist() == [[1, 2, 4, 6]]
    assert table.row(2)["objects"]["category"].tolist() == [0, 1]
    assert table.sizes_hw().tolist() == [[10, 20]] * 3
    assert [int(decode_image(table.image_source(table.row(i)))[0, 0, 0]) for i in range(3)] == [1, 2, 3]


def test_saved_to_disk_and_cached(tmp_path):
    datasets.DatasetDict({"train": make(ROWS)}).save_to_disk(tmp_path / "set")
    for _ in range(2):
        check(opened(tmp_path), [50, 51, 52])
    with pytest.raises(BadInput, match="choose from train"):
        opened(tmp_path, "val")
    make(ROWS[:2], as_list=True).save_to_disk(tmp_path / "list" / "set")
    assert opened(tmp_path / "list").num_boxes().tolist() == [1, 0], "objects as a list of dicts"


def test_parquet_folder_without_sizes_or_ids(tmp_path):
    (tmp_path / "set").mkdir()
    make(ROWS, sizes=False, ids=False).to_parquet(tmp_path / "set" / "train-0.parquet")
    table = opened(tmp_path)
    check(table, [0, 1, 2])
    assert [table.row(i)["objects"]["id"].tolist() for i in range(3)] == [[1], [], [2, 3]]


def test_labels_without_names(tmp_path):
    make(ROWS, label=datasets.Value("string")).save_to_disk(tmp_path / "set")
    table = opened(tmp_path)
    assert table.categories == (Category("0", "0"), Category("1", "1"))
    assert "not a ClassLabel" in table.problems[0].message


def test_defects_are_listed_and_dropped(tmp_path):
    cut, nothing = ({"bytes": data, "path": None} for data in (png()["bytes"][:-20], b""))
    wrong = (png(width=30), [[1, 1, -2, 2], [1, 1, np.nan, 2]], [0, 1])
    make([*ROWS, (cut, [[1, 1, 2, 2]], [0]), wrong, (nothing, [], [])]).save_to_disk(tmp_path / "set")
    with pytest.raises(BadInput) as caught:
        opened(tmp_path)
    for words in ("image 53): image data truncated", "image 54): size differs", "annotation 40): negative width",
                  "annotation 41): non-finite", "image 55): empty image file"):
        assert words in str(caught.value)
    check(opened(tmp_path, on_error="drop"), [50, 51, 52])


@pytest.mark.parametrize(("columns", "words"), [
    ({"image": [png()]}, "no `objects` column; the columns are image"),
    ({"objects": [{"bbox": [[1, 2, 3, 4]]}]}, "no image column"),
    ({"image": [png()], "objects": [{"bbox": [[1, 2, 3, 4]]}]}, "expected `bbox` and `category`"),
])  # fmt: skip
def test_other_columns_are_named(tmp_path, columns, words):
    data = datasets.Dataset.from_dict(columns)
    if "image" in columns:
        data = data.cast_column("image", datasets.Image())
    data.save_to_disk(tmp_path / "set")
    with pytest.raises(BadInput, match=words):
        opened(tmp_path)


@pytest.mark.parametrize(("name", "words"), [
    ("someone/something", "hub cannot be reached.*local folder.*HF_HUB_OFFLINE"),
    ("./nowhere", "cannot be loaded"),
])  # fmt: skip
def test_without_network_one_clear_sentence(tmp_path, name, words):
    with pytest.raises(BadInput, match=words) as caught:
        open_dataset("train", name=name, cache_dir=tmp_path)
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def sgg_benchmark(folder, relations, names=True, **other):
    """Rows as SGG-Benchmark publishes PSG, VG150 and IndoorVG: ids are the data set's, the names stand beside them."""
    boxes = {7: (3, [1.0, 2.0, 3.0, 4.0]), 8: (0, [5.0, 5.0, 2.0, 2.0])}
    objects = [{"id": id_, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0, "segmentation": []}
               for id_, (label, box) in boxes.items()]  # fmt: skip
    row = {"image": png(1), "image_id": 50, "width": 20, "height": 10, "file_name": "a.png", "objects": objects}
    rows = [row | {"relations": relations}, row | {"image_id": 51, "objects": [], "relations": []}]
    (folder / "set" / "data").mkdir(parents=True)
    data = datasets.Dataset.from_list([row | other for row in rows]).cast_column("image", datasets.Image())
    data.to_parquet(folder / "set" / "data" / "train-00000-of-00001.parquet")
    if names:
        told = {"categories": [{"id": 0, "name": "cell"}, {"id": 3, "name": "plate"}]}
        told |= {"rel_categories": [{"id": 0, "name": "in"}, {"id": 5, "name": "beside"}]}
        (folder / "set" / "categories.json").write_text(json.dumps(told))
    return folder


RELATION = {"id": 0, "subject_id": 8, "predicate_id": 5, "object_id": 7}


@pytest.mark.parametrize("streaming", [False, True])
def test_relations_and_names_of_sgg_benchmark(tmp_path, streaming):
    table = opened(sgg_benchmark(tmp_path, [RELATION]), streaming=streaming)
    assert table.categories == (Category(0, "cell"), Category(3, "plate")) and table.predicates == ("in", "beside")
    row = table.row(0)
    assert row["objects"]["category"].tolist() == [1, 0] and row["objects"]["bbox"].tolist()[0] == [1, 2, 4, 6]
    assert [row["relations"][key].tolist() for key in ("subject", "object", "predicate")] == [[1], [0], [1]]
    assert len(table) == 2 and not table.problems


def test_relations_without_names_or_with_other_keys_are_told(tmp_path):
    table = opened(sgg_benchmark(tmp_path / "bare", [RELATION], names=False))
    assert table.predicates == ("5",) and [category.name for category in table.categories] == ["0", "3"]
    told = [problem.message for problem in table.problems]
    assert len(told) == 2 and "categories.json; classes" in told[0] and "predicates are called by" in told[1]
    table = opened(sgg_benchmark(tmp_path / "other", [{"from": 8, "to": 7}]))
    assert not table.predicates and "`relations` without the keys subject_id" in table.problems[0].message
    with pytest.raises(BadInput, match=r"predicate 9 is not defined"):
        opened(sgg_benchmark(tmp_path / "unknown", [RELATION | {"predicate_id": 9}]))
    wrong = sgg_benchmark(tmp_path / "wrong", [RELATION])
    (wrong / "set" / "categories.json").write_text('{"categories": 3}')
    with pytest.raises(BadInput, match="categories.json: `categories` is not a list"):
        opened(wrong)
