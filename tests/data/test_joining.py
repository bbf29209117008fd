"""Several data sets as one: classes by name, unique ids, shares, partly labelled images."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from toolkit.base.errors import BadInput
from toolkit.data import splits
from toolkit.data.decoding import decode_image
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import loader_of_settings, set_repeats
from toolkit.data.table import hash_of
from toolkit.data.table_cache import write_table
from toolkit.detectors.scene_graphs.evaluator import SceneGraphEvaluator
from toolkit.evaluation.coco import CocoEvaluator, check_ground_truth
from toolkit.run.settings import DataConfig
from toolkit.tools.shapes import make_shapes

KEPT = {"a": ["circle", "square", "star"], "b": ["triangle", "circle"]}  # in this order, with these classes only
JOINED = ["circle", "square", "star", "triangle"]


def keep_classes(file, kept):
    """Leave these classes alone in a COCO file, without relations."""
    document = json.loads(file.read_text())
    names = {category["id"]: category["name"] for category in document["categories"]}
    annotations = []
    for box in document["annotations"]:
        if names[box["category_id"]] in kept:
            columns = {key: box[key] for key in ("id", "image_id", "bbox", "area", "iscrowd")}
            annotations.append(columns | {"category_id": 1 + kept.index(names[box["category_id"]])})
    categories = [{"id": number, "name": name} for number, name in enumerate(kept, 1)]
    content = {"images": document["images"], "annotations": annotations, "categories": categories}
    file.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two COCO folders of shapes with the same file names and ids, whose class lists overlap in `circle`."""
    folder = tmp_path_factory.mktemp("joining")
    for seed, (name, kept) in enumerate(KEPT.items()):
        make_shapes(folder / name, 6 + 2 * seed, 3, 48, seed=seed)
        for file in (folder / name / "annotations").glob("*.json"):
            keep_classes(file, kept)
    return folder


def opened(folder, split="train", **options):
    return open_dataset(split, path=[str(folder / "a"), str(folder / "b")], cache_dir=folder / "cache", **options)


def alone(folder):
    return [open_dataset("train", path=folder / name, cache_dir=folder / "cache") for name in KEPT]


# ---- the joined table ------------------------------------------------------------------------------------------------


def test_a_joined_table_has_joined_classes_and_unique_ids(folder):
    table = opened(folder)
    assert table.name == "a + b"
    assert table.class_names == JOINED
    assert [category.id for category in table.categories] == [1, 2, 3, 4]  # the files give 1 to circle and to triangle
    assert [one.name for one in table.sets] == ["a", "b"]
    assert table.set_of_image().tolist() == [0] * 6 + [1] * 8
    assert len(set(table.image_ids())) == 14
    assert len(set(table.boxes().ids)) == len(table.boxes())


def test_a_joined_table_holds_the_images_and_boxes_of_all_sets(folder):
    sources = alone(folder)
    table = opened(folder)
    assert len(table) == 14
    places = [(0, index) for index in range(6)] + [(1, index) for index in range(8)]
    for number, (of_set, index) in enumerate(places):
        source = sources[of_set]
        row = table.row(number)
        before = source.row(index)
        assert row["image_id"] == f"{'ab'[of_set]}:{before['image_id']}"  # the original id remains to be found
        assert row["objects"]["bbox"].tolist() == before["objects"]["bbox"].tolist()
        names = [table.class_names[label] for label in row["objects"]["category"]]
        assert names == [source.class_names[label] for label in before["objects"]["category"]]
        assert decode_image(table.image_source(row)).equal(decode_image(source.image_source(before)))


def test_runs_of_earlier_versions_keep_the_fingerprint_of_a_joined_table(folder):
    """Those wrote the joined table."""
    table = opened(folder)
    again = opened(folder)
    assert again.fingerprint == table.fingerprint
    assert again.sets == table.sets
    names = table.file_names()
    fingerprints = [one.fingerprint for one in alone(folder)]
    about = (fingerprints, str(table.image_root), [names[:6], names[6:]], table.categories, list(table.sets))
    file = folder / "cache" / "tables" / f"{hash_of(*about, table.predicates)}-joined.json"
    written = write_table(table.image_rows(), table.boxes(), cache_file=file, categories=table.categories)
    assert opened(folder).fingerprint == written.fingerprint != table.fingerprint
    file.write_text(file.read_text().replace(written.fingerprint, "0" * 32))  # damaged
    assert opened(folder).fingerprint == table.fingerprint


def test_ids_that_are_unique_stay(folder, tmp_path):
    document = json.loads((folder / "b" / "annotations" / "train.json").read_text())
    for entry in document["images"]:
        entry["id"] += 1000
    document["categories"] = [{"id": 7, "name": "triangle"}, {"id": 1, "name": "circle"}]
    for box in document["annotations"]:
        box["image_id"] += 1000
        box["id"] += 10_000
        box["category_id"] = {1: 7, 2: 1}[box["category_id"]]
    other = folder / "b" / "train" / "other.json"  # beside its images
    other.write_text(json.dumps(document))
    table = open_dataset([str(folder / "a" / "annotations" / "train.json"), str(other)], cache_dir=tmp_path)
    other.unlink()
    assert [category.id for category in table.categories] == [1, 2, 3, 7]
    assert max(table.image_ids()) > 1000


def test_splits_can_be_joined_too(folder, tmp_path):
    both = open_dataset(["train", "val"], path=str(folder / "a"), cache_dir=tmp_path)
    assert len(both) == 9
    assert [one.name for one in both.sets] == ["train", "val"]
    assert both.labelled_classes is None


def test_names_that_are_almost_the_same_are_not_joined(tmp_path):
    image = {"id": 1, "file_name": "x.png", "width": 48, "height": 48}
    lists = [["Circle", "squares"], ["traffic light"], ["traffic_light", "circle"]]
    files = []
    for number, classes in enumerate(lists):
        categories = [{"id": id_, "name": name} for id_, name in enumerate(classes)]
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"images": [image], "annotations": [], "categories": categories}))
    with pytest.raises(BadInput) as caught:
        open_dataset(files, image_dir=str(tmp_path), cache_dir=tmp_path, check_images=False)
    assert len(caught.value.problems) == 2
    assert "'Circle', 'circle'" in str(caught.value)
    assert "'traffic light', 'traffic_light'" in str(caught.value)


# ---- relations -------------------------------------------------------------------------------------------------------


def related(folder, name: str, predicates: list[str], seed: int) -> str:
    """Write a COCO folder of shapes whose predicates are listed in this order, these alone."""
    make_shapes(folder / name, 4, 3, 48, seed=seed)
    for file in (folder / name / "annotations").glob("*.json"):
        document = json.loads(file.read_text())
        names = {entry["id"]: entry["name"] for entry in document["rel_categories"]}
        document["rel_categories"] = [{"id": number, "name": one} for number, one in enumerate(predicates, 1)]
        kept = []
        for relation in document["rel_annotations"]:
            if names[relation["predicate_id"]] in predicates:
                kept.append(relation | {"predicate_id": 1 + predicates.index(names[relation["predicate_id"]])})
        document["rel_annotations"] = kept
        file.write_text(json.dumps(document))
    return str(folder / name)


def named_relations(table) -> list[list[tuple]]:
    """Return subject, object and the predicate's name of each relation of each image."""
    graphs = []
    for index in range(len(table)):
        ends = table.row(index)["relations"]
        names = [table.predicates[predicate] for predicate in ends["predicate"]]
        graphs.append(list(zip(ends["subject"].tolist(), ends["object"].tolist(), names, strict=True)))
    return graphs


DIRECTIONS = ["left of", "right of", "above", "below"]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Two folders with the same predicates in another order."""
    folder = tmp_path_factory.mktemp("graphs")
    related(folder, "a", DIRECTIONS, seed=0)
    related(folder, "b", ["below", "above", "left of", "right of"], seed=1)
    return folder


def test_relations_are_joined_by_the_names_of_predicates(graphs):
    expected = []
    for table in alone(graphs):
        expected += named_relations(table)
    assert any(expected[:4])
    assert any(expected[4:])
    for _ in range(2):  # the second time from the cache
        table = opened(graphs)
        assert table.predicates == tuple(DIRECTIONS)
        assert named_relations(table) == expected


def test_validation_data_take_the_joined_predicates(graphs, tmp_path):
    reading = {"cache_dir": graphs / "cache", "say": str}
    both = [str(graphs / "a"), str(graphs / "b")]
    _, val = splits.open_splits(["train", "train"], "val", tmp_path, path=both, **reading)
    assert val.predicates == tuple(DIRECTIONS)
    assert any(named_relations(val))
    lone = str(graphs / "b" / "annotations" / "val.json")
    files = [str(graphs / name / "annotations" / "train.json") for name in "ab"]
    _, one = splits.open_splits(files, lone, tmp_path, **reading)
    assert one.predicates == tuple(DIRECTIONS)  # in the order of training, where the file has another one
    assert named_relations(one) == named_relations(open_dataset(lone, cache_dir=graphs / "cache"))


def test_relations_that_not_all_sets_list_are_left_out(graphs, tmp_path):
    third = related(tmp_path, "c", ["left of"], seed=2)
    mixed = open_dataset("train", path=[str(graphs / "a"), third], cache_dir=tmp_path)
    assert mixed.predicates == ()
    assert not len(mixed.relations())


def test_scene_graphs_are_measured_by_set(graphs):
    table = opened(graphs, "val")
    found = {}
    for index, image_id in enumerate(table.image_ids().tolist()):
        row = table.row(index)
        ends = row["relations"]
        pairs = np.stack([ends["subject"], ends["object"]], 1)
        if table.set_of_image()[index] == 1:  # all the wrong way round
            pairs = pairs[:, ::-1]
        labels = row["objects"]["category"]
        found[image_id] = {
            "boxes": row["objects"]["bbox"],
            "labels": labels,
            "scores": np.ones(len(labels)),
            "pairs": pairs,
            "predicate_scores": np.eye(4)[ends["predicate"]],
        }
    row = SceneGraphEvaluator(table, "predcls").evaluate(found)
    assert row["R@100/a"] == 1
    assert row["R@100/b"] < row["R@100"] < 1


# ---- training and validation data ------------------------------------------------------------------------------------


def test_validation_data_take_the_joined_classes_and_the_sets_are_told(folder, tmp_path):
    said = []
    reading = {"path": [str(folder / "a"), str(folder / "b")], "cache_dir": folder / "cache", "say": said.append}
    train, val = splits.open_splits("train", "val", tmp_path, **reading)
    assert train.class_names == val.class_names == JOINED
    assert len(val) == 6
    text = "\n".join(said)
    assert "classes joined by name: circle, square, star, triangle" in text
    assert "  a: 6 images" in text
    assert "does not label square, star (data.unlisted_classes unknown)" in text
    assert not [note for note in check_ground_truth(val) if "AP" in note and "undefined" not in note]
    _, held = splits.open_splits("train", "0.3", tmp_path, **reading)
    assert 0 < len(held) < 14
    assert held.sets == train.sets


def test_one_set_validates_in_its_classes_or_in_the_joined_ones(folder, tmp_path):
    reading = {"cache_dir": folder / "cache", "say": str}
    _, one = splits.open_splits(["train", "val"], "val", tmp_path, path=str(folder / "b"), **reading)
    assert one.class_names == ["triangle", "circle"]
    assert one.labelled_classes is None
    files = [str(folder / name / "annotations" / "train.json") for name in KEPT]
    lone = str(folder / "b" / "annotations" / "val.json")
    _, one = splits.open_splits(files, lone, tmp_path, **reading)
    assert one.class_names == JOINED
    assert one.labelled_classes.tolist() == [[True, False, False, True]]
    _, one = splits.open_splits(files, lone, tmp_path, unlisted_classes="background", **reading)
    assert one.labelled_classes is None
    files[1] = str(folder / "a" / "annotations" / "val.json")
    with pytest.raises(BadInput, match="classes .'triangle'. are in no training set"):
        splits.open_splits(files, lone, tmp_path, **reading)


def test_detections_are_evaluated_by_set_and_not_where_nobody_labelled(folder):
    val = opened(folder, "val")
    boxes = val.boxes()
    found = {}
    for index, image_id in enumerate(val.image_ids().tolist()):
        part = boxes.of_image(index)
        scores = np.full(part.stop - part.start, 0.5)
        found[image_id] = {"boxes": boxes.xyxy[part], "labels": boxes.labels[part], "scores": scores}
        if index >= 3:  # nothing of set b is found, and squares where nobody labelled any
            found[image_id] = {"boxes": np.array([[1.0, 1, 9, 9]]), "labels": np.array([1]), "scores": np.array([0.9])}
    row = CocoEvaluator(val).evaluate(found)
    assert row["bbox_AP/a"] == pytest.approx(1)
    assert row["bbox_AP/b"] == 0
    assert row["AP/square"] == pytest.approx(1)
    labelled = replace(val, sets=tuple(replace(one, classes=(0, 1, 2, 3)) for one in val.sets))
    assert CocoEvaluator(labelled).evaluate(found)["AP/square"] < 1


# ---- shares ----------------------------------------------------------------------------------------------------------

SHARES = DataConfig(shares=[3, 1], batch_size_per_device=2, workers=0, image_size=32)


def test_each_set_has_its_share_of_the_samples_exactly(folder):
    table = opened(folder)
    sampler, _ = loader_of_settings(table, SHARES, seed=0, stride=1)
    assert sampler.num_samples == len(table)
    for epoch in range(9):
        sampler.set_epoch(epoch)
        drawn = Counter(int(table.set_of_image()[key.index]) for batch in sampler for key in batch)
        assert drawn.total() == 14
        assert drawn[0] in (10, 11)  # of 10.5


def test_shares_are_the_same_after_a_resume_and_on_any_number_of_processes(folder):
    table = opened(folder)
    sampler, _ = loader_of_settings(table, SHARES, seed=0, stride=1)
    sampler.set_epoch(3)
    whole = [key for batch in sampler for key in batch]
    sampler.advance(6)
    resumed, _ = loader_of_settings(table, SHARES, seed=0, stride=1)
    assert not resumed.load_state_dict(sampler.state_dict())
    assert [key for batch in resumed for key in batch] == whole[6:]
    parts = []
    for rank in range(2):
        one, _ = loader_of_settings(table, replace(SHARES, batch_size_per_device=1), seed=0, stride=1)
        one.rank = rank
        one.world_size = 2
        one.batch_size = 1
        one.set_epoch(3)
        parts.append(list(one))
    together = []
    for batches in zip(*parts, strict=True):
        for batch in batches:
            together += batch
    assert together == whole


def test_other_factors_count_within_a_set():
    repeats = set_repeats(np.array([0, 0, 1]), 2, [1, 1], np.array([1.0, 3.0, 2.0]))
    assert repeats.tolist() == [0.75, 2.25, 3.0]


@pytest.mark.parametrize("shares", [[1], [1, -1], [1, 1, 1]])
def test_shares_that_do_not_fit_the_sets_are_refused(folder, shares):
    with pytest.raises(BadInput, match="expected 2 numbers above 0"):
        loader_of_settings(opened(folder), replace(SHARES, shares=shares), seed=0, stride=1)


def test_a_set_without_images_has_no_share(folder):
    with pytest.raises(BadInput, match="set 2 of 2 has no training images"):
        loader_of_settings(opened(folder).head(3), SHARES, seed=0, stride=1)
