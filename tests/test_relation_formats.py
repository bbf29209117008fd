"""Scene graphs read in the published layouts of other programs, and written in theirs."""

import json

import networkx
import numpy as np
import pytest
import torch
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import loader_of_settings
from toolkit.detectors.scene_graphs.formats import graph_text, relations_as_json, without_graph_constraint
from toolkit.run.settings import DataConfig
from toolkit.tools.predict.choices import GRAPH_SUFFIXES


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


CUP, TABLE = {"category": 1, "bbox": [5, 15, 10, 30]}, {"category": 0, "bbox": [10, 40, 0, 60]}
ON, UNDER = ({"predicate": 1, "subject": CUP, "object": TABLE}, {"predicate": 0, "subject": TABLE, "object": CUP})


def write_vrd(folder, **splits):
    """splits: by name, the relations of each image by the name of its file."""
    pictures(folder / "images", [name for images in splits.values() for name in images])
    for split, images in splits.items():
        (folder / f"annotations_{split}.json").write_text(json.dumps(images))
    (folder / "objects.json").write_text('["table", "cup"]')
    (folder / "predicates.json").write_text('["under", "on"]')


def test_vrd(tmp_path):
    write_vrd(tmp_path, train=dict.fromkeys(["a.jpg", "b.jpg"], [ON, UNDER]), test={"c.jpg": [ON, UNDER]})
    tables = {split: opened(tmp_path, "vrd", split) for split in ("train:1", "val:1", "test")}
    assert [len(each) for each in tables.values()] == [1, 1, 1] and tables["test"].predicates == ("under", "on")
    expected = ([[10, 5, 30, 15], [0, 10, 60, 40]], [1, 0], [[0, 1, 1], [1, 0, 0]])
    assert graph(tables["test"]) == expected == graph(opened(tmp_path, "vrd", "test")), "from the cache too"
    assert [t.row(0)["file_name"] for t in tables.values()] == ["b.jpg", "a.jpg", "c.jpg"]
    (tmp_path / "annotations_test.json").write_text(json.dumps({"c.jpg": [{"predicate": 1, "subject": CUP}]}))
    with pytest.raises(BadInput, match=r"image c.jpg: expected relations .*KeyError\('object'\)"):
        opened(tmp_path, "vrd", "test")


def test_images_with_rare_predicates_come_more_often(tmp_path):
    write_vrd(tmp_path, test={f"{n}.jpg": [ON, UNDER] if n == 8 else [ON] for n in range(9)})
    found = opened(tmp_path, "vrd", "test")
    settings = DataConfig(image_size=32, batch_size_per_device=3, workers=0, predicate_repeat_factor=1.0)
    sampler, _ = loader_of_settings(found, settings, seed=0, stride=1)
    np.testing.assert_allclose(sampler.repeats, [1] * 8 + [3])  # sqrt(1 / (1 / 9))
    found.predicates = ()
    with pytest.raises(BadInput, match="predicate_repeat_factor: .* has no relations"):
        loader_of_settings(found, settings, seed=0, stride=1)


def test_gqa_keeps_its_most_frequent_names(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.detectors.scene_graphs.readers.gqa.NUM_CLASSES", 2)
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
    with pytest.raises(BadInput, match="'open_images' has no split 'mine'; expected train, val, test"):
        opened(tmp_path, "open_images", "mine")
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


GRAPH = {
    "file_name": 'a "b".jpg',
    "detections": [{"category": 'cup "x" \\', "bbox": [1, 2, 3, 4], "score": 0.9, "category_id": 1},
                   {"category": "table", "bbox": [0, 0, 9, 9], "score": 0.8, "category_id": 2}],
    "relations": [{"subject": 0, "object": 1, "predicate": "on", "score": 0.7},
                  {"subject": 0, "object": 1, "predicate": "near", "score": 0.2}],
}  # fmt: skip


def test_every_format_keeps_objects_and_relations():
    texts = {name: graph_text(GRAPH, name) for name in GRAPH_SUFFIXES}
    assert 'n0 [label="0 cup \\"x\\" \\\\"];' in texts["dot"] and 'n0 -> n1 [label="near 0.20"];' in texts["dot"]
    read = networkx.node_link_graph(json.loads(texts["networkx"]), edges="edges")
    assert isinstance(read, networkx.MultiDiGraph) and read.nodes[1]["category"] == "table"
    assert [edge["predicate"] for edge in read[0][1].values()] == ["on", "near"]
    for name in GRAPH_SUFFIXES:
        assert graph_text({"file_name": "a.jpg", "detections": [], "relations": []}, name)


def test_without_constraint_a_pair_comes_with_several_predicates():
    generator = torch.Generator().manual_seed(0)
    found = {"scores": torch.rand(4, generator=generator), "pairs": torch.tensor([[0, 1], [1, 0], [2, 3]]),
             "predicate_scores": torch.rand(3, 5, generator=generator)}  # fmt: skip
    free = without_graph_constraint(found, count=7)
    expected = sorted(
        (float(p * found["scores"][s] * found["scores"][o]) for (s, o), row in
         zip(found["pairs"].tolist(), found["predicate_scores"], strict=True) for p in row), reverse=True)  # fmt: skip
    torch.testing.assert_close(free["triplet_scores"], torch.tensor(expected[:7]))
    written = relations_as_json(free, list("abcde"), all_scores=True)
    assert len({(r["subject"], r["object"], r["predicate"]) for r in written}) == 7 > len(found["pairs"])
    assert all(list(r["predicate_scores"]) == sorted("abcde", key=r["predicate_scores"].get, reverse=True)
               for r in written)  # fmt: skip
    nothing = {"scores": torch.zeros(0), "pairs": torch.zeros(0, 2).long(), "predicate_scores": torch.zeros(0, 5)}
    assert relations_as_json(without_graph_constraint(nothing), list("abcde")) == []
