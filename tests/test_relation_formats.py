"""VRD, GQA, Open Images and SGG-Benchmark's COCO files in their published layouts."""

import json

import numpy as np
import pytest
from PIL import Image

from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import loader_of_settings
from toolkit.errors import BadInput
from toolkit.runs.settings import DataConfig


def pictures(folder, names, size=(60, 40)):
    folder.mkdir(exist_ok=True)
    for name in names:
        Image.new("RGB", size).save(folder / name)
    return folder


def opened(folder, format, split):
    return open_dataset(split, format=format, name=str(folder), image_dir=folder / "images", cache_dir=folder / "cache")


def graph(table, row=0):
    found = table.row(row)
    relations = np.stack([found["relations"][key] for key in ("subject", "object", "predicate")], 1)
    return found["objects"]["bbox"].tolist(), found["objects"]["category"].tolist(), relations.tolist()


def test_vrd(tmp_path):
    pictures(tmp_path / "images", ["a.jpg", "b.jpg", "c.jpg"])
    cup, table = {"category": 1, "bbox": [5, 15, 10, 30]}, {"category": 0, "bbox": [10, 40, 0, 60]}
    rows = [{"predicate": 1, "subject": cup, "object": table}, {"predicate": 0, "subject": table, "object": cup}]
    for name, images in (("train", ["a.jpg", "b.jpg"]), ("test", ["c.jpg"])):
        (tmp_path / f"annotations_{name}.json").write_text(json.dumps(dict.fromkeys(images, rows)))
    (tmp_path / "objects.json").write_text('["table", "cup"]')
    (tmp_path / "predicates.json").write_text('["under", "on"]')
    tables = {split: opened(tmp_path, "vrd", split) for split in ("train:1", "val:1", "test")}
    assert [len(each) for each in tables.values()] == [1, 1, 1] and tables["test"].predicates == ("under", "on")
    expected = ([[10, 5, 30, 15], [0, 10, 60, 40]], [1, 0], [[0, 1, 1], [1, 0, 0]])
    assert graph(tables["test"]) == expected == graph(opened(tmp_path, "vrd", "test")), "from the cache too"
    assert [t.row(0)["file_name"] for t in tables.values()] == ["b.jpg", "a.jpg", "c.jpg"]
    (tmp_path / "annotations_test.json").write_text(json.dumps({"c.jpg": [{"predicate": 1, "subject": cup}]}))
    with pytest.raises(BadInput, match=r"image c.jpg: expected relations .*KeyError\('object'\)"):
        opened(tmp_path, "vrd", "test")


def test_images_with_rare_predicates_come_more_often(tmp_path):
    pictures(tmp_path / "images", [f"{n}.jpg" for n in range(9)])
    cup, table = {"category": 1, "bbox": [5, 15, 10, 30]}, {"category": 0, "bbox": [10, 40, 0, 60]}
    often, rare = ({"predicate": number, "subject": cup, "object": table} for number in (1, 0))
    rows = {f"{n}.jpg": [often, rare] if n == 8 else [often] for n in range(9)}
    (tmp_path / "annotations_test.json").write_text(json.dumps(rows))
    (tmp_path / "objects.json").write_text('["table", "cup"]')
    (tmp_path / "predicates.json").write_text('["under", "on"]')
    found = opened(tmp_path, "vrd", "test")
    settings = DataConfig(image_size=32, batch_size_per_device=3, workers=0, predicate_repeat_factor=1.0)
    sampler, _ = loader_of_settings(found, settings, seed=0, stride=1)
    np.testing.assert_allclose(sampler.repeats, [1] * 8 + [3])  # sqrt(1 / (1 / 9))
    found.predicates = ()
    with pytest.raises(BadInput, match="predicate_repeat_factor: .* has no relations"):
        loader_of_settings(found, settings, seed=0, stride=1)


def test_gqa_keeps_its_most_frequent_names(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.scene_graphs.readers.gqa.CLASSES", 2)
    pictures(tmp_path / "images", ["1.jpg", "2.jpg", "3.jpg"])

    def image(*objects):
        keys = ("name", "x", "y", "w", "h", "relations")
        found = {str(i): dict(zip(keys, each, strict=True)) for i, each in enumerate(objects)}
        return {"width": 60, "height": 40, "objects": found}

    on = [{"name": "on", "object": "1"}, {"name": "on", "object": "2"}]
    both = image(("cup", 1, 2, 3, 4, on), ("table", 0, 0, 60, 30, []), ("a rare thing", 0, 0, 9, 9, []))
    fewer = image(("cup", 1, 2, 3, 4, on), ("table", 0, 0, 60, 30, []))
    (tmp_path / "train_sceneGraphs.json").write_text(json.dumps({"1": both, "2": fewer}))
    lonely = image(("cup", 1, 2, 3, 4, []))
    (tmp_path / "val_sceneGraphs.json").write_text(json.dumps({"3": both, "4": lonely}))
    table = opened(tmp_path, "gqa", "test")
    assert table.class_names == ["cup", "table"] and len(table) == 1
    assert graph(table) == ([[1, 2, 4, 6], [0, 0, 60, 30]], [0, 1], [[0, 1, 0]])
    assert opened(tmp_path, "gqa", "train:1").row(0)["image_id"] == "2"


def test_open_images(tmp_path):
    pictures(tmp_path / "images", ["00a.jpg"])
    entry = {"img_fn": "00a", "img_size": [60, 40], "bbox": [[1, 2, 11, 12], [20, 20, 50, 40]], "det_labels": [1, 0],
             "rel": [[0, 1, 1]]}  # fmt: skip
    (tmp_path / "vrd-test-anno.json").write_text(json.dumps([entry]))
    (tmp_path / "categories_dict.json").write_text('{"obj": ["Chair", "Man"], "rel": ["at", "on"]}')
    table = opened(tmp_path, "open_images", "test")
    assert graph(table) == ([[1, 2, 11, 12], [20, 20, 50, 40]], [1, 0], [[0, 1, 1]])
    assert table.class_names == ["Chair", "Man"] and table.predicates == ("at", "on")
    with pytest.raises(BadInput, match="vrd-train-anno.json: no such annotation file"):
        opened(tmp_path, "open_images", "train")
    (tmp_path / "vrd-test-anno.json").write_text(json.dumps([entry, entry | {"bbox": [[1, 2, 3]]}]))
    with pytest.raises(BadInput, match="entry 1: expected img_fn"):
        opened(tmp_path, "open_images", "test")


def test_coco_files_of_sgg_benchmark(tmp_path):
    """Ids count from 0, and the images lie beside the file, one folder for each split."""
    pictures(tmp_path / "train", ["x.jpg"])
    document = {
        "images": [{"id": 0, "file_name": "x.jpg", "width": 60, "height": 40}],
        "categories": [{"id": 0, "name": "person", "supercategory": "none"}, {"id": 1, "name": "hat"}],
        "annotations": [{"id": 0, "image_id": 0, "category_id": 0, "bbox": [5, 5, 20, 30], "area": 600, "iscrowd": 0},
                        {"id": 1, "image_id": 0, "category_id": 1, "bbox": [8, 0, 9, 9], "area": 81, "iscrowd": 0}],
        "rel_categories": [{"id": 0, "name": "above"}, {"id": 1, "name": "wearing"}],
        "rel_annotations": [{"id": 0, "subject_id": 0, "predicate_id": 1, "object_id": 1, "image_id": 0}],
    }  # fmt: skip
    (tmp_path / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    table = open_dataset(tmp_path / "train" / "_annotations.coco.json", cache_dir=tmp_path / "cache")
    assert graph(table) == ([[5, 5, 25, 35], [8, 0, 17, 9]], [0, 1], [[0, 1, 1]])
    assert table.predicates == ("above", "wearing")
