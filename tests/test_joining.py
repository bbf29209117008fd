"""Several data sets as one: classes by name, unique ids, shares, partly labelled images."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from toolkit.base.errors import BadInput
from toolkit.data import splits
from toolkit.data.decoding import decode_image
from toolkit.data.formats import open_dataset, pair_folders_and_splits
from toolkit.data.pipeline import loader_of_settings, set_repeats
from toolkit.data.table import hash_of
from toolkit.data.table_cache import write_table
from toolkit.detectors.scene_graphs.evaluator import SceneGraphEvaluator
from toolkit.evaluation.coco import CocoEvaluator, check_ground_truth
from toolkit.run.settings import DataConfig
from toolkit.tools.shapes import make_shapes

KEPT = {"a": ["circle", "square", "star"], "b": ["triangle", "circle"]}  # in this order, with these classes only


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two COCO folders of shapes with the same file names and ids, whose class lists overlap in `circle`."""
    folder = tmp_path_factory.mktemp("joining")
    for seed, (name, kept) in enumerate(KEPT.items()):
        make_shapes(folder / name, 6 + 2 * seed, 3, 48, seed=seed)
        for file in (folder / name / "annotations").glob("*.json"):
            document = json.loads(file.read_text())
            names = {category["id"]: category["name"] for category in document["categories"]}
            boxes = [box for box in document["annotations"] if names[box["category_id"]] in kept]
            columns = "id", "image_id", "bbox", "area", "iscrowd"
            annotations = [
                {key: box[key] for key in columns} | {"category_id": 1 + kept.index(names[box["category_id"]])}
                for box in boxes
            ]
            categories = [{"id": number, "name": class_name} for number, class_name in enumerate(kept, 1)]
            content = {"images": document["images"], "annotations": annotations, "categories": categories}
            file.write_text(json.dumps(content))
    return folder


def opened(folder, split="train", **options):
    return open_dataset(split, path=[str(folder / "a"), str(folder / "b")], cache_dir=folder / "cache", **options)


def test_a_joined_table_holds_the_images_and_boxes_of_all_sets_under_joined_classes(folder):
    alone = [open_dataset("train", path=folder / name, cache_dir=folder / "cache") for name in KEPT]
    table = opened(folder)
    assert table.class_names == ["circle", "square", "star", "triangle"] and len(table) == 14
    assert [category.id for category in table.categories] == [1, 2, 3, 4]  # the files give 1 to circle and to triangle
    assert [one.name for one in table.sets] == ["a", "b"] and table.set_of_image().tolist() == [0] * 6 + [1] * 8
    assert len(set(table.image_ids())) == 14 and len(set(table.boxes().ids)) == len(table.boxes())
    for number in range(14):
        source, index = alone[number >= 6], number % 6 if number < 6 else number - 6
        row, before = table.row(number), source.row(index)
        assert row["image_id"] == f"{'ab'[number >= 6]}:{before['image_id']}"  # the original id remains to be found
        assert row["objects"]["bbox"].tolist() == before["objects"]["bbox"].tolist()
        names = [
            [t.class_names[label] for label in r["objects"]["category"]] for t, r in ((table, row), (source, before))
        ]
        assert names[0] == names[1]
        assert decode_image(table.image_source(row)).equal(decode_image(source.image_source(before)))
    again = opened(folder)
    assert again.fingerprint == table.fingerprint and again.sets == table.sets and again.name == "a + b"
    # A run of an earlier version, which wrote the joined table, goes on with the fingerprint of that.
    names = table.file_names()
    fingerprints = [one.fingerprint for one in alone]
    about = (fingerprints, str(table.image_root), [names[:6], names[6:]], table.categories, list(table.sets))
    file = folder / "cache" / "tables" / f"{hash_of(*about, table.predicates)}-joined.json"
    written = write_table(table.image_rows(), table.boxes(), cache_file=file, categories=table.categories)
    assert opened(folder).fingerprint == written.fingerprint != table.fingerprint
    file.write_text(file.read_text().replace(written.fingerprint, "0" * 32))  # damaged
    assert opened(folder).fingerprint == table.fingerprint


def test_ids_that_are_unique_stay_and_files_and_splits_can_be_joined_too(folder, tmp_path):
    document = json.loads((folder / "b" / "annotations" / "train.json").read_text())
    for entry in document["images"]:
        entry["id"] += 1000
    for entry in document["annotations"]:
        entry["image_id"] += 1000
        entry["id"] += 10_000
    document["categories"] = [{"id": 7, "name": "triangle"}, {"id": 1, "name": "circle"}]
    document["annotations"] = [
        box | {"category_id": {1: 7, 2: 1}[box["category_id"]]} for box in document["annotations"]
    ]
    other = folder / "b" / "train" / "other.json"  # beside its images
    other.write_text(json.dumps(document))
    files = [str(folder / "a" / "annotations" / "train.json"), str(other)]
    table = open_dataset(files, cache_dir=tmp_path)
    other.unlink()
    assert [category.id for category in table.categories] == [1, 2, 3, 7] and max(table.image_ids()) > 1000
    both = open_dataset(["train", "val"], path=str(folder / "a"), cache_dir=tmp_path)
    assert len(both) == 9 and [one.name for one in both.sets] == ["train", "val"] and both.labelled_classes is None


def related(folder, name: str, predicates: list[str], seed: int) -> str:
    """A COCO folder of shapes whose predicates are listed in this order, these alone."""
    make_shapes(folder / name, 4, 3, 48, seed=seed)
    for file in (folder / name / "annotations").glob("*.json"):
        document = json.loads(file.read_text())
        names = {entry["id"]: entry["name"] for entry in document["rel_categories"]}
        document["rel_categories"] = [{"id": number, "name": one} for number, one in enumerate(predicates, 1)]
        kept = [relation for relation in document["rel_annotations"] if names[relation["predicate_id"]] in predicates]
        document["rel_annotations"] = [
            relation | {"predicate_id": 1 + predicates.index(names[relation["predicate_id"]])} for relation in kept
        ]
        file.write_text(json.dumps(document))
    return str(folder / name)


def named_relations(table) -> list[list[tuple]]:
    """Subject, object and the predicate's name of each relation of each image."""
    graphs = []
    for index in range(len(table)):
        ends = table.row(index)["relations"]
        columns = (ends[name].tolist() for name in ("subject", "object", "predicate"))
        graphs.append([(s, o, table.predicates[p]) for s, o, p in zip(*columns, strict=True)])
    return graphs


def test_relations_are_joined_by_the_names_of_predicates_that_all_sets_list(tmp_path):
    first = related(tmp_path, "a", ["left of", "right of", "above", "below"], seed=0)
    second = related(tmp_path, "b", ["below", "above", "left of", "right of"], seed=1)
    reading = {"cache_dir": tmp_path / "cache"}
    alone = [open_dataset("train", path=one, **reading) for one in (first, second)]
    expected = [graph for table in alone for graph in named_relations(table)]
    assert any(expected[:4]) and any(expected[4:])
    table = open_dataset("train", path=[first, second], **reading)
    assert table.predicates == ("left of", "right of", "above", "below") and named_relations(table) == expected
    assert named_relations(open_dataset("train", path=[first, second], **reading)) == expected  # from the cache
    _, val = splits.open_splits(["train", "train"], "val", tmp_path, say=str, path=[first, second], **reading)
    assert val.predicates == table.predicates and any(named_relations(val))
    lone = str(tmp_path / "b" / "annotations" / "val.json")
    files = [str(tmp_path / name / "annotations" / "train.json") for name in "ab"]
    _, one = splits.open_splits(files, lone, tmp_path, say=str, **reading)
    assert one.predicates == table.predicates  # in the order of training, where the file has another one
    assert named_relations(one) == named_relations(open_dataset(lone, **reading))
    third = related(tmp_path, "c", ["left of"], seed=2)
    mixed = open_dataset("train", path=[first, third], **reading)
    assert mixed.predicates == () and not len(mixed.relations())


def test_scene_graphs_are_measured_by_set(tmp_path):
    names = ["left of", "right of", "above", "below"]
    paths = [related(tmp_path, name, names, seed) for seed, name in enumerate("ab")]
    table = open_dataset("val", path=paths, cache_dir=tmp_path / "cache")
    found = {}
    for index, image_id in enumerate(table.image_ids().tolist()):
        row = table.row(index)
        ends = row["relations"]
        pairs = np.stack([ends["subject"], ends["object"]], 1)
        scores = np.eye(4)[ends["predicate"]]
        if table.set_of_image()[index] == 1:  # all the wrong way round
            pairs = pairs[:, ::-1]
        boxes, labels = row["objects"]["bbox"], row["objects"]["category"]
        found[image_id] = {"boxes": boxes, "labels": labels, "scores": np.ones(len(labels)), "pairs": pairs,
                           "predicate_scores": scores}  # fmt: skip
    row = SceneGraphEvaluator(table, "predcls").evaluate(found)
    assert row["R@100/a"] == 1 and row["R@100/b"] < 1 and row["R@100/b"] < row["R@100"] < 1


def test_what_cannot_be_joined_is_said_at_once_with_all_of_it(folder, tmp_path):
    for name, classes in (("c", ["Circle", "squares"]), ("d", ["traffic light"]), ("e", ["traffic_light", "circle"])):
        image = {"id": 1, "file_name": "x.png", "width": 48, "height": 48}
        document = {
            "images": [image],
            "annotations": [],
            "categories": [{"id": i, "name": c} for i, c in enumerate(classes)],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    files = [str(tmp_path / f"{name}.json") for name in "cde"]
    with pytest.raises(BadInput) as caught:
        open_dataset(files, image_dir=str(tmp_path), cache_dir=tmp_path, check_images=False)
    said = str(caught.value)
    assert (
        len(caught.value.problems) == 2 and "'Circle', 'circle'" in said and "'traffic light', 'traffic_light'" in said
    )
    with pytest.raises(BadInput, match="2 entries, data.train .* 3"):
        pair_folders_and_splits(["a", "b"], ["x", "y", "z"])
    with pytest.raises(BadInput, match="a.json: named twice; data.shares"):
        pair_folders_and_splits(None, ["a.json", "a.json"])
    with pytest.raises(BadInput) as caught:  # the faults of both sets
        splits.check_splits(["train", "nowhere"], path=[str(folder / "a"), str(tmp_path / "gone")])
    assert "gone: no such folder" in str(caught.value)


def test_validation_data_take_the_joined_classes_and_are_evaluated_by_set(folder, tmp_path):
    said, reading = [], {"path": [str(folder / "a"), str(folder / "b")], "cache_dir": folder / "cache"}
    train, val = splits.open_splits("train", "val", tmp_path, say=said.append, **reading)
    assert train.class_names == val.class_names and len(val) == 6
    text = "\n".join(said)
    assert "classes joined by name: circle, square, star, triangle" in text
    assert "  a: 6 images" in text and "does not label square, star (data.unlisted_classes unknown)" in text
    assert not [note for note in check_ground_truth(val) if "AP" in note and "undefined" not in note]
    boxes = val.boxes()
    found = {}
    for index, image_id in enumerate(val.image_ids().tolist()):
        part = boxes.of_image(index)
        found[image_id] = {
            "boxes": boxes.xyxy[part],
            "labels": boxes.labels[part],
            "scores": np.full(part.stop - part.start, 0.5),
        }
        if index >= 3:  # nothing of set b is found, and squares where nobody labelled any
            found[image_id] = {"boxes": np.array([[1.0, 1, 9, 9]]), "labels": np.array([1]), "scores": np.array([0.9])}
    row = CocoEvaluator(val).evaluate(found)
    assert row["bbox_AP/a"] == pytest.approx(1) and row["bbox_AP/b"] == 0 and row["AP/square"] == pytest.approx(1)
    labelled = replace(val, sets=tuple(replace(one, classes=(0, 1, 2, 3)) for one in val.sets))
    assert CocoEvaluator(labelled).evaluate(found)["AP/square"] < 1
    _, held = splits.open_splits("train", "0.3", tmp_path, say=said.append, **reading)
    assert 0 < len(held) < 14 and held.sets == train.sets
    _, one = splits.open_splits(
        ["train", "val"], "val", tmp_path, say=said.append, **reading | {"path": str(folder / "b")}
    )
    assert one.class_names == ["triangle", "circle"] and one.labelled_classes is None
    files = [str(folder / name / "annotations" / "train.json") for name in KEPT]
    alone = str(folder / "b" / "annotations" / "val.json")
    reading = {"cache_dir": folder / "cache"}
    _, one = splits.open_splits(files, alone, tmp_path, say=said.append, **reading)
    assert one.class_names == train.class_names and one.labelled_classes.tolist() == [[True, False, False, True]]
    _, one = splits.open_splits(files, alone, tmp_path, say=said.append, **reading, unlisted_classes="background")
    assert one.labelled_classes is None
    with pytest.raises(BadInput, match="classes .'triangle'. are in no training set"):
        files[1] = str(folder / "a" / "annotations" / "val.json")
        splits.open_splits(files, alone, tmp_path, say=said.append, **reading)


def test_each_set_has_its_share_of_the_samples_exactly_on_any_number_of_processes(folder):
    table, settings = opened(folder), DataConfig(shares=[3, 1], batch_size_per_device=2, workers=0, image_size=32)
    sampler, _ = loader_of_settings(table, settings, seed=0, stride=1)
    assert sampler.num_samples == len(table)
    for epoch in range(9):
        sampler.set_epoch(epoch)
        drawn = Counter(int(table.set_of_image()[key.index]) for batch in sampler for key in batch)
        assert drawn.total() == 14 and drawn[0] in (10, 11)  # of 10.5
    sampler.set_epoch(3)
    whole = [key for batch in sampler for key in batch]
    sampler.advance(6)
    resumed, _ = loader_of_settings(table, settings, seed=0, stride=1)
    assert not resumed.load_state_dict(sampler.state_dict())
    assert [key for batch in resumed for key in batch] == whole[6:]
    parts = []
    for rank in range(2):
        share = replace(settings, batch_size_per_device=1)
        one, _ = loader_of_settings(table, share, seed=0, stride=1)
        one.rank, one.world_size, one.batch_size = rank, 2, 1
        one.set_epoch(3)
        parts.append(list(one))
    assert [key for batches in zip(*parts, strict=True) for batch in batches for key in batch] == whole
    repeats = set_repeats(np.array([0, 0, 1]), 2, [1, 1], np.array([1.0, 3.0, 2.0]))
    assert repeats.tolist() == [0.75, 2.25, 3.0]  # other factors count within a set
    for shares in ([1], [1, -1], [1, 1, 1]):
        with pytest.raises(BadInput, match="expected 2 numbers above 0"):
            loader_of_settings(table, replace(settings, shares=shares), seed=0, stride=1)
    with pytest.raises(BadInput, match="set 2 of 2 has no training images"):
        loader_of_settings(table.head(3), settings, seed=0, stride=1)
