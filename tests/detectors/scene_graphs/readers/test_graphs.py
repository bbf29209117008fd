"""Scene graphs in the published layouts of VRD, GQA, Open Images and PSG."""

import json

import numpy as np
import pytest
from small_data import picture

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import loader_of_settings
from toolkit.detectors.scene_graphs.readers import gqa, open_graphs, open_images, psg, vrd
from toolkit.run.settings import DataConfig

SIZE = (60, 40)


def opened(folder, format, split):
    return open_dataset(split, format=format, name=str(folder), image_dir=folder / "images", cache_dir=folder / "cache")


def graph(table, index=0):
    """Return boxes, labels and relations of an image."""
    row = table.row(index)
    relations = np.stack([row["relations"][key] for key in ("subject", "object", "predicate")], 1)
    return row["objects"]["bbox"].tolist(), row["objects"]["category"].tolist(), relations.tolist()


def write_json(folder, **contents):
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("reader", [gqa, open_images, vrd, psg])
def test_files_that_are_not_there_are_named(tmp_path, reader):
    format = reader.__name__.rpartition(".")[2]
    place = tmp_path / "psg.json" if format == "psg" else tmp_path
    reading = Reading(tmp_path, format=format, name=str(place), cache_dir=tmp_path / "cache")
    with pytest.raises(BadInput) as caught:
        open_graphs("train", reading)
    assert str(reader.files_of(place, "train")[0]) in str(caught.value)


def test_settings_that_are_missing_are_told_together():
    with pytest.raises(BadInput) as caught:
        open_graphs("mine", Reading(None, format="psg"))
    of_name, of_images, of_split = caught.value.problems
    assert "set the annotation file psg.json (--data.name)" in of_name
    assert "--data.image_dir" in of_images
    assert "no split 'mine'; expected train, val, test, train:50 or val:50" in of_split


# ---- VRD -------------------------------------------------------------------------------------------------------------

CUP = {"category": 1, "bbox": [5, 15, 10, 30]}
TABLE = {"category": 0, "bbox": [10, 40, 0, 60]}
ON = {"predicate": 1, "subject": CUP, "object": TABLE}
UNDER = {"predicate": 0, "subject": TABLE, "object": CUP}


def write_vrd(folder, **splits):
    """splits: by name, the relations of each image by the name of its file."""
    for split, images in splits.items():
        write_json(folder, **{f"annotations_{split}": images})
        for name in images:
            picture(folder / "images" / name, size_wh=SIZE)
    write_json(folder, objects=["table", "cup"], predicates=["under", "on"])


def test_vrd_has_validation_images_in_its_training_file(tmp_path):
    write_vrd(tmp_path, train=dict.fromkeys(["a.jpg", "b.jpg"], [ON, UNDER]), test={"c.jpg": [ON, UNDER]})
    tables = [opened(tmp_path, "vrd", split) for split in ("train:1", "val:1", "test")]
    assert [table.file_names() for table in tables] == [["b.jpg"], ["a.jpg"], ["c.jpg"]]
    assert tables[2].predicates == ("under", "on")
    expected = ([[10, 5, 30, 15], [0, 10, 60, 40]], [1, 0], [[0, 1, 1], [1, 0, 0]])
    assert graph(tables[2]) == expected
    assert graph(opened(tmp_path, "vrd", "test")) == expected, "from the cache too"


def test_relations_of_vrd_without_an_object_are_named(tmp_path):
    write_vrd(tmp_path, test={"c.jpg": [{"predicate": 1, "subject": CUP}]})
    with pytest.raises(BadInput, match=r"image c.jpg: expected relations .*KeyError\('object'\)"):
        opened(tmp_path, "vrd", "test")


def test_images_with_rare_predicates_come_more_often(tmp_path):
    write_vrd(tmp_path, test={f"{number}.jpg": [ON, UNDER] if number == 8 else [ON] for number in range(9)})
    found = opened(tmp_path, "vrd", "test")
    settings = DataConfig(image_size=32, batch_size_per_device=3, workers=0, predicate_repeat_factor=1.0)
    sampler, _ = loader_of_settings(found, settings, seed=0, stride=1)
    np.testing.assert_allclose(sampler.repeats, [1] * 8 + [3])  # sqrt(1 / (1 / 9))
    found.predicates = ()
    with pytest.raises(BadInput, match="predicate_repeat_factor: .* has no relations"):
        loader_of_settings(found, settings, seed=0, stride=1)


# ---- GQA -------------------------------------------------------------------------------------------------------------


def gqa_image(*objects):
    keys = ("name", "x", "y", "w", "h", "relations")
    entries = {str(number): dict(zip(keys, entry, strict=True)) for number, entry in enumerate(objects)}
    return {"width": SIZE[0], "height": SIZE[1], "objects": entries}


def test_gqa_keeps_its_most_frequent_names(tmp_path, monkeypatch):
    monkeypatch.setattr(gqa, "NUM_CLASSES", 2)
    for number in (1, 2, 3):
        picture(tmp_path / "images" / f"{number}.jpg", size_wh=SIZE)
    on = [{"name": "on", "object": "1"}, {"name": "on", "object": "2"}]
    table = ("table", 0, 0, 60, 30, [])
    both = gqa_image(("cup", 1, 2, 3, 4, on), table, ("a rare thing", 0, 0, 9, 9, []))
    fewer = gqa_image(("cup", 1, 2, 3, 4, on), table)
    lonely = gqa_image(("cup", 1, 2, 3, 4, []))
    write_json(tmp_path, train_sceneGraphs={"1": both, "2": fewer}, val_sceneGraphs={"3": both, "4": lonely})
    test = opened(tmp_path, "gqa", "test")
    assert test.class_names == ["cup", "table"]
    assert len(test) == 1
    assert graph(test) == ([[1, 2, 4, 6], [0, 0, 60, 30]], [0, 1], [[0, 1, 0]])
    assert opened(tmp_path, "gqa", "train:1").row(0)["image_id"] == "2"


# ---- Open Images -----------------------------------------------------------------------------------------------------

ENTRY = {
    "img_fn": "00a",
    "img_size": list(SIZE),
    "bbox": [[1, 2, 11, 12], [20, 20, 50, 40]],
    "det_labels": [1, 0],
    "rel": [[0, 1, 1]],
}


@pytest.fixture
def of_open_images(tmp_path):
    picture(tmp_path / "images" / "00a.jpg", size_wh=SIZE)
    write_json(tmp_path, **{"vrd-test-anno": [ENTRY]}, categories_dict={"obj": ["Chair", "Man"], "rel": ["at", "on"]})
    return tmp_path


def test_open_images_are_read(of_open_images):
    table = opened(of_open_images, "open_images", "test")
    assert graph(table) == ([[1, 2, 11, 12], [20, 20, 50, 40]], [1, 0], [[0, 1, 1]])
    assert table.class_names == ["Chair", "Man"]
    assert table.predicates == ("at", "on")


def test_other_splits_and_entries_of_open_images_are_refused(of_open_images):
    with pytest.raises(BadInput, match="vrd-train-anno.json: no such annotation file"):
        opened(of_open_images, "open_images", "train")
    with pytest.raises(BadInput, match="'open_images' has no split 'mine'; expected train, val, test"):
        opened(of_open_images, "open_images", "mine")
    write_json(of_open_images, **{"vrd-test-anno": [ENTRY, ENTRY | {"bbox": [[1, 2, 3]]}]})
    with pytest.raises(BadInput, match="entry 1: expected img_fn"):
        opened(of_open_images, "open_images", "test")


# ---- PSG -------------------------------------------------------------------------------------------------------------

NAMES = {"thing_classes": ["cat"], "stuff_classes": ["sky"], "predicate_classes": ["over", "in", "on"]}


def psg_image(image_id, relations):
    boxes = [{"bbox": [1, 2, 11, 22], "category_id": 0}, {"bbox": [5, 5, 30, 40], "category_id": 1}]
    about = {"image_id": image_id, "file_name": f"val/{image_id}.jpg", "width": 64, "height": 48}
    return about | {"annotations": boxes, "segments_info": [], "relations": relations}


def open_psg(folder, split, names=NAMES, **changed):
    """changed: images by "i" and their id."""
    images = {f"i{number}": psg_image(str(number), [[0, 1, 2], [1, 0, 0]]) for number in range(4)}
    content = names | {"test_image_ids": ["2"], "data": [*(images | changed).values()]}
    write_json(folder, psg=content)
    options = {"check_images": False, "cache_dir": folder / "cache"}
    return open_graphs(f"{split}:1", Reading(folder, format="psg", name=folder / "psg.json", **options))


@pytest.mark.parametrize(("split", "ids"), [("train", ["1", "3"]), ("val", ["0"]), ("test", ["2"])])
def test_psg_is_read_with_things_and_stuff(tmp_path, split, ids):
    table = open_psg(tmp_path, split)
    assert table.image_ids().tolist() == ids
    assert table.class_names == ["cat", "sky"]
    assert table.predicates == ("over", "in", "on")
    assert graph(table) == ([[1, 2, 11, 22], [5, 5, 30, 40]], [0, 1], [[0, 1, 2], [1, 0, 0]])


def test_classes_of_psg_without_names_are_numbered(tmp_path):
    names = {"predicate_classes": NAMES["predicate_classes"]}
    assert open_psg(tmp_path, "train", names).class_names == ["class 0", "class 1"]


def test_relations_of_psg_that_cannot_be_are_told_together(tmp_path):
    with pytest.raises(BadInput) as caught:
        open_psg(tmp_path, "train", i1=psg_image("1", [[0, 7, 1], [0, 1, 9], [0, 0, 1]]))
    for words in ("predicate 9", "position 7 of 2", "one annotation"):  # the last: a relation of an object to itself
        assert words in str(caught.value)


def test_entries_of_psg_of_another_form_are_named(tmp_path):
    with pytest.raises(BadInput) as caught:
        open_psg(tmp_path, "train", i1=psg_image("1", [[0, 1]]), i3={"image_id": "3", "annotations": []})
    assert "(image 1): relation [0, 1]" in str(caught.value)
    assert "(image 3): key `relations`" in str(caught.value)
    wrong = psg_image("1", [])
    wrong["annotations"][0]["category_id"] = [0]
    with pytest.raises(BadInput, match="image 1, annotation"):
        open_psg(tmp_path, "train", i1=wrong)
