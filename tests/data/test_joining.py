"""Several data sets as one: classes by name, unique ids, relations, shares; `dirty_sets/runs.txt` has what is told."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
from small_data import SIZE, coco_text, picture, write_text

from toolkit.base.errors import BadInput
from toolkit.data import splits
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import loader_of_settings, repeats_for_shares
from toolkit.data.table import hash_of
from toolkit.data.table_cache import write_table
from toolkit.detectors.scene_graphs.evaluator import SceneGraphEvaluator
from toolkit.evaluation.coco import CocoEvaluator, check_ground_truth
from toolkit.run.settings import DataConfig

CLASSES = {
    "a": ["circle", "square", "star"],
    "b": ["triangle", "circle"],
}  # which overlap in `circle`
JOINED = ["circle", "square", "star", "triangle"]
PREDICATES = {
    "a": ["left of", "right of", "above"],
    "b": ["above", "left of", "right of"],
    "c": ["left of"],
}


def numbered(names: list[str]) -> list[dict]:
    return [{"id": number, "name": name} for number, name in enumerate(names, start=1)]


def write_set(folder, classes: list[str], predicates: list[str], **counts: int) -> str:
    """Write a COCO folder whose images have two boxes and a relation; counts: of images by split."""
    for split, count in counts.items():
        lists = {"images": [], "annotations": [], "rel_annotations": []}
        for number in range(1, count + 1):
            about = {"image_id": number, "area": 400, "iscrowd": 0}
            picture(
                folder / split / f"{number}.png",
                number + 100 * len(classes) + 1000 * (split == "val"),
            )
            size = dict(zip(("width", "height"), SIZE, strict=True))
            lists["images"].append({"id": number, "file_name": f"{number}.png", **size})
            for at in (0, 1):
                category = 1 + (number + at) % len(classes)
                box = {
                    "id": 2 * number + at,
                    "category_id": category,
                    "bbox": [10 + 40 * at, number, 20, 20],
                }
                lists["annotations"].append(about | box)
            relation = {
                "id": number,
                "image_id": number,
                "predicate_id": 1 + number % len(predicates),
            }
            lists["rel_annotations"].append(relation | {"subject_id": 2 * number, "object_id": 2 * number + 1})
        lists |= {
            "categories": numbered(classes),
            "rel_categories": numbered(predicates),
        }
        write_text(folder / "annotations" / f"{split}.json", coco_text([], **lists))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two folders with the same names of files, ids and predicates, these in another order."""
    folder = tmp_path_factory.mktemp("joining")
    for extra, (name, classes) in enumerate(CLASSES.items()):
        write_set(folder / name, classes, PREDICATES[name], train=6 + 2 * extra, val=3)
    return folder


@pytest.fixture
def opened(folder):
    return partial(
        open_dataset,
        path=[str(folder / "a"), str(folder / "b")],
        cache_dir=folder / "cache",
    )


@pytest.fixture
def alone(folder):
    return [open_dataset("train", path=folder / name, cache_dir=folder / "cache") for name in CLASSES]


@pytest.fixture
def table(opened):
    return opened("train")


def names_in(table, index: int) -> tuple[list, list]:
    """Return the names of the classes of an image's objects, and its relations with the names of predicates."""
    row = table.row(index)
    ends = row["relations"]
    predicates = [table.predicates[predicate] for predicate in ends["predicate"]]
    relations = list(zip(ends["subject"].tolist(), ends["object"].tolist(), predicates, strict=True))
    return [table.class_names[label] for label in row["objects"]["category"]], relations


# ---- the joined table ------------------------------------------------------------------------------------------------


def test_a_joined_table_has_joined_classes_and_unique_ids(table):
    assert table.name == "a + b"
    assert table.class_names == JOINED
    assert table.predicates == tuple(PREDICATES["a"])
    assert [category.id for category in table.categories] == [
        1,
        2,
        3,
        4,
    ]  # the files give 1 to circle and to triangle
    assert [one.name for one in table.sets] == ["a", "b"]
    assert table.set_of_image().tolist() == [0] * 6 + [1] * 8
    assert len(set(table.image_ids())) == 14
    assert len(set(table.boxes().ids)) == len(table.boxes()) == 28


def test_a_joined_table_holds_the_images_boxes_and_relations_of_all_sets(opened, alone):
    places = [("a", alone[0], index) for index in range(6)] + [("b", alone[1], index) for index in range(8)]
    for _ in range(2):  # the second time from the cache
        table = opened("train")
        for number, (name, source, index) in enumerate(places):
            row = table.row(number)
            before = source.row(index)
            assert row["image_id"] == f"{name}:{before['image_id']}"  # the original id remains to be found
            assert row["objects"]["bbox"].tolist() == before["objects"]["bbox"].tolist()
            assert names_in(table, number) == names_in(source, index)
            assert table.decode_image(row).equal(source.decode_image(before))


def test_runs_of_earlier_versions_keep_the_fingerprint_of_a_joined_table(opened, table, alone, folder):
    """Those wrote the joined table."""
    assert opened("train").fingerprint == table.fingerprint
    names = table.file_names()
    fingerprints = [one.fingerprint for one in alone]
    about = (
        fingerprints,
        str(table.image_root),
        [names[:6], names[6:]],
        table.categories,
        list(table.sets),
    )
    file = folder / "cache" / "tables" / f"{hash_of(*about, table.predicates)}-joined.json"
    written = write_table(table.image_rows(), table.boxes(), cache_file=file, categories=table.categories)
    assert opened("train").fingerprint == written.fingerprint != table.fingerprint
    file.write_text(file.read_text().replace(written.fingerprint, "0" * 32))  # damaged
    assert opened("train").fingerprint == table.fingerprint
    file.unlink()


def test_ids_that_are_unique_stay(folder, tmp_path):
    text = (folder / "b" / "annotations" / "train.json").read_text()
    document = json.loads(text.replace('"image_id": ', '"image_id": 100'))
    for entry in document["images"]:
        entry["id"] = int(f"100{entry['id']}")
    for box in document["annotations"]:
        box["id"] += 10_000
    for key in ("rel_annotations", "rel_categories"):
        del document[key]
    other = folder / "b" / "train" / "other.json"  # beside its images
    other.write_text(json.dumps(document))
    table = open_dataset(
        [str(folder / "a" / "annotations" / "train.json"), str(other)],
        cache_dir=tmp_path,
    )
    other.unlink()
    assert table.image_ids().tolist() == [1, 2, 3, 4, 5, 6, *range(1001, 1009)]


def test_relations_that_not_all_sets_list_are_left_out(folder, tmp_path):
    third = write_set(tmp_path / "c", CLASSES["a"], PREDICATES["c"], train=2)
    mixed = open_dataset("train", path=[str(folder / "a"), third], cache_dir=tmp_path)
    assert mixed.predicates == ()
    assert not len(mixed.relations())


# ---- validation and evaluation ---------------------------------------------------------------------------------------


def test_a_part_of_joined_data_keeps_the_sets(opened, table, tmp_path):
    _, held = splits.open_splits("train", "0.3", tmp_path, say=str, **opened.keywords)
    assert 0 < len(held) < 14
    assert held.sets == table.sets
    val = opened("val")
    assert not [note for note in check_ground_truth(val) if "AP" in note and "undefined" not in note]


@pytest.mark.parametrize(
    ("unlisted", "labelled"),
    [("unknown", [[True, False, False, True]]), ("background", None)],
)
def test_one_file_validates_in_the_joined_classes_and_predicates(folder, tmp_path, unlisted, labelled):
    files = [str(folder / name / "annotations" / "train.json") for name in CLASSES]
    lone = str(folder / "b" / "annotations" / "val.json")
    reading = {"cache_dir": folder / "cache", "say": str, "unlisted_classes": unlisted}
    _, val = splits.open_splits(files, lone, tmp_path, **reading)
    alone = open_dataset(lone, cache_dir=folder / "cache")
    assert val.class_names == JOINED
    assert val.predicates == tuple(PREDICATES["a"])  # in the order of training, where the file has another one
    assert [names_in(val, index) for index in range(3)] == [names_in(alone, index) for index in range(3)]
    assert val.labelled_classes is None if labelled is None else val.labelled_classes.tolist() == labelled


def test_a_class_that_no_training_set_has_is_refused(folder, tmp_path):
    files = [str(folder / "a" / "annotations" / f"{split}.json") for split in ("train", "val")]
    lone = str(folder / "b" / "annotations" / "val.json")
    with pytest.raises(BadInput, match="classes .'triangle'. are in no training set"):
        splits.open_splits(files, lone, tmp_path, say=str, cache_dir=folder / "cache")


def test_detections_are_evaluated_by_set_and_not_where_nobody_labelled(opened):
    val = opened("val")
    boxes = val.boxes()
    found = {}
    for index, image_id in enumerate(val.image_ids().tolist()):
        part = boxes.of_image(index)
        found[image_id] = {
            "boxes": boxes.xyxy[part],
            "labels": boxes.labels[part],
            "scores": np.full(2, 0.5),
        }
        if index >= 3:  # nothing of set b is found, and squares where nobody labelled any
            found[image_id] = {
                "boxes": np.array([[1.0, 1, 9, 9]]),
                "labels": np.array([1]),
                "scores": np.array([0.9]),
            }
    row = CocoEvaluator(val).evaluate(found)
    assert row["bbox_AP/a"] == pytest.approx(1)
    assert row["bbox_AP/b"] == 0
    assert row["AP/square"] == pytest.approx(1)
    labelled = replace(val, sets=tuple(replace(one, classes=(0, 1, 2, 3)) for one in val.sets))
    assert CocoEvaluator(labelled).evaluate(found)["AP/square"] < 1


def test_scene_graphs_are_measured_by_set(opened):
    table = opened("val")
    found = {}
    for index, image_id in enumerate(table.image_ids().tolist()):
        row = table.row(index)
        ends = row["relations"]
        pairs = np.stack([ends["subject"], ends["object"]], 1)
        if table.set_of_image()[index] == 1:  # all the wrong way round
            pairs = pairs[:, ::-1]
        objects = {
            "boxes": row["objects"]["bbox"],
            "labels": row["objects"]["category"],
            "scores": np.ones(2),
        }
        found[image_id] = objects | {
            "pairs": pairs,
            "predicate_scores": np.eye(3)[ends["predicate"]],
        }
    row = SceneGraphEvaluator(table, "predcls").evaluate(found)
    assert row["R@100/a"] == 1
    assert row["R@100/b"] == 0
    assert row["R@100"] == 0.5


# ---- shares ----------------------------------------------------------------------------------------------------------

SHARES = DataConfig(shares=[3, 1], batch_size_per_device=2, workers=0, image_size=32)


def sampler_of(table, settings=SHARES, epoch=3):
    sampler, _ = loader_of_settings(table, settings, seed=0, stride=1)
    sampler.set_epoch(epoch)
    return sampler


def test_each_set_has_its_share_of_the_samples_exactly(table):
    for epoch in range(9):
        drawn = Counter(
            int(table.set_of_image()[key.index]) for batch in sampler_of(table, epoch=epoch) for key in batch
        )
        assert drawn.total() == 14
        assert drawn[0] in (10, 11)  # of 10.5


def test_shares_are_the_same_after_a_resume_and_on_any_number_of_processes(table):
    sampler = sampler_of(table)
    whole = [key for batch in sampler for key in batch]
    sampler.advance(6)
    resumed = sampler_of(table, epoch=0)
    assert not resumed.load_state_dict(sampler.state_dict())
    assert [key for batch in resumed for key in batch] == whole[6:]
    parts = []
    for rank in range(2):
        one = sampler_of(table, replace(SHARES, batch_size_per_device=1))
        one.rank = rank
        one.world_size = 2
        one.batch_size = 1
        one.set_epoch(3)
        parts.append(list(one))
    updates = [chain(*batches) for batches in zip(*parts, strict=True)]
    assert list(chain(*updates)) == whole


def test_other_factors_count_within_a_set():
    repeats = repeats_for_shares(np.array([0, 0, 1]), 2, [1, 1], np.array([1.0, 3.0, 2.0]))
    assert repeats.tolist() == [0.75, 2.25, 3.0]


@pytest.mark.parametrize("shares", [[1], [1, -1], [1, 1, 1]])
def test_shares_that_do_not_fit_the_sets_are_refused(table, shares):
    with pytest.raises(BadInput, match="expected 2 numbers above 0"):
        sampler_of(table, replace(SHARES, shares=shares))


def test_a_set_without_images_has_no_share(table):
    with pytest.raises(BadInput, match="set 2 of 2 has no training images"):
        sampler_of(table.head(3))
