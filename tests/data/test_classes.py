"""The setting `data.classes`: classes renamed, merged and left out, in every format and split alike."""

import json
import pickle

import numpy as np
import pytest
import yaml
from accelerate.state import AcceleratorState
from documents import row_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_data import predictions_of, table_of

from scripts import convert, evaluate, train_ssd
from toolkit.base.errors import BadInput
from toolkit.data.classes import describe_class_map, with_classes, written_class_map
from toolkit.data.formats import open_dataset
from toolkit.data.splits import open_split, open_splits
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.models import options_class
from toolkit.run.command_line import parse_config
from toolkit.run.settings_file import load_config_dict
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.judgement import judge
from toolkit.tools.report.write import write_page
from toolkit.tools.shapes import make_shapes

MAP = {"circle": "round", "square": "box", "triangle": "box", "star": None}
CATEGORIES = (Category(7, "a"), Category(3, "b"), Category(9, "c"), Category(1, "d"))
NAMES = [category.name for category in CATEGORIES]


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """A COCO folder of shapes with the splits train and val, relations and attributes."""
    folder = tmp_path_factory.mktemp("classes") / "coco"
    make_shapes(folder, 12, 6, 48, seed=0)
    return folder


@pytest.fixture(scope="module", params=["coco", "voc", "yolo", "csv", "parquet"])
def folder(request, coco):
    """The shapes in each format."""
    if request.param == "coco":
        return coco
    other = coco.parent / request.param
    convert.main([str(coco), str(other), "--to", request.param])
    return other


def opened(folder, split="train", **options):
    return open_dataset(split, path=str(folder), cache_dir=folder.parent / "cache", **options)


def boxes_by_name(table) -> list[list[tuple]]:
    """Return class, box, area, crowd flag and attributes of every object, by image."""
    images = []
    for index in range(len(table)):
        objects = table.row(index)["objects"]
        names = [table.class_names[label] for label in objects["category"]]
        columns = [map(str, objects[key].tolist()) for key in objects if key != "category"]
        images.append(list(zip(names, *columns, strict=True)))
    return images


def triplets_by_id(table) -> list[set[tuple]]:
    images = []
    for index in range(len(table)):
        row = table.row(index)
        ids = row["objects"]["id"]
        relations = row["relations"]
        ends = (
            ids[relations["subject"]],
            ids[relations["object"]],
            relations["predicate"],
        )
        images.append(set(zip(*(end.tolist() for end in ends), strict=True)))
    return images


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_format_and_split_gets_the_new_classes(folder, split):
    whole = opened(folder, split)
    table = opened(folder, split, classes=MAP)
    assert table.class_names == ["round", "box"]
    assert [category.id for category in table.categories] == [category.id for category in whole.categories][:2]
    expected = [[(MAP[name], *rest) for name, *rest in image if MAP[name]] for image in boxes_by_name(whole)]
    assert boxes_by_name(table) == expected
    assert table.num_boxes().sum() < whole.num_boxes().sum()
    for index in (0, len(table) - 1):
        assert table.decode_image(table.row(index)).equal(whole.decode_image(whole.row(index)))
    copied = pickle.loads(pickle.dumps(table))  # noqa: S301 - as a spawned worker gets it
    assert copied.boxes().labels.tolist() == table.boxes().labels.tolist()
    assert opened(folder, split, classes=MAP).fingerprint == table.fingerprint != whole.fingerprint


@st.composite
def data(draw):
    """Rows with boxes of four classes, crowds, attributes and relations, and a mapping of some of the classes."""
    rows = []
    for number in range(draw(st.integers(1, 4))):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        count = draw(st.integers(0, 5))
        boxes = rng.integers(0, 30, (count, 4)).astype(float).tolist()
        labels = rng.integers(0, 4, count).tolist()
        relations = rng.integers(0, count, (draw(st.integers(0, 6)), 3)).tolist() if count else []
        columns = {
            "id": (100 * number + np.arange(count)).tolist(),
            "iscrowd": rng.integers(0, 2, count).tolist(),
            "area": rng.integers(0, 99, count).astype(float).tolist(),
            "attributes": rng.integers(0, 2, (count, 2)).tolist(),
        }
        rows.append(row_of(number, boxes, (40, 30), labels, relations, **columns))
    new_name = st.sampled_from([None, "a", "b", "x", "y"])
    return rows, draw(st.dictionaries(st.sampled_from([*NAMES, "*"]), new_name))


@given(data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_boxes_of_kept_classes_are_untouched_and_relations_follow_them(tmp_path, drawn):
    rows, class_map = drawn
    written = {
        "categories": CATEGORIES,
        "predicates": ("p", "q", "r", "s", "t"),
        "attributes": ("u", "v"),
    }
    whole = write_rows(rows, cache_file=tmp_path / "t.json", **written)
    new = {name: class_map.get(name, class_map.get("*", name)) for name in NAMES}
    if set(new.values()) == {None}:
        with pytest.raises(BadInput, match="left without a class"):
            with_classes(whole, class_map)
        return
    table = with_classes(whole, class_map)
    assert table.class_names == list(dict.fromkeys(name for name in new.values() if name))
    first = {new[category.name]: category.id for category in reversed(CATEGORIES)}
    assert [category.id for category in table.categories] == [first[name] for name in table.class_names]
    expected = [[(new[name], *rest) for name, *rest in image if new[name]] for image in boxes_by_name(whole)]
    assert boxes_by_name(table) == expected
    kept = set(table.boxes().ids.tolist())
    of_kept = [{triplet for triplet in image if {*triplet[:2]} <= kept} for image in triplets_by_id(whole)]
    assert triplets_by_id(table) == of_kept
    assert table.before_classes is (None if table is whole else whole)
    half = table.head(1)
    assert boxes_by_name(half) == expected[:1]
    assert half.num_boxes().tolist() == [len(expected[0])]


# ---- faults and texts ------------------------------------------------------------------------------------------------


def test_a_mapping_to_the_same_names_changes_nothing(coco):
    assert opened(coco, classes={"circle": "circle"}).fingerprint == opened(coco).fingerprint


def test_a_mapping_is_described_and_written():
    assert describe_class_map(MAP) == "circle -> round; square, triangle -> box; left out: star"
    odd = MAP | {"*": "ü: {"}
    assert yaml.safe_load(written_class_map(odd)) == odd


# ---- splits and sets -------------------------------------------------------------------------------------------------


def test_what_is_held_out_stays_the_same(coco):
    where = {"path": str(coco), "cache_dir": coco.parent / "cache"}
    whole = hold_out(opened(coco), 0.25, where["cache_dir"])
    held = open_splits("train", 0.25, coco.parent, say=str, classes=MAP, **where)
    for before, part in zip(whole, held, strict=True):
        assert part.image_ids().tolist() == before.image_ids().tolist()
        assert part.class_names == ["round", "box"]
        assert part.class_map == MAP
    alone = open_split("25%", part_of="train", say=str, classes=MAP, **where)
    assert alone.image_ids().tolist() == held[1].image_ids().tolist()


def test_classes_of_several_sets_get_their_names_before_they_are_joined(coco, tmp_path):
    other = tmp_path / "other"
    convert.main(
        [
            str(coco),
            str(other),
            "--to",
            "coco",
            "--classes",
            "{circle: Disc, '*': null}",
        ]
    )
    assert opened(other, "val").class_names == ["Disc"]
    class_map = {
        "circle": "disc",
        "Disc": "disc",
        "star": None,
        "square": "box",
        "triangle": "box",
    }
    how = {"path": [str(coco), str(other)], "cache_dir": tmp_path, "classes": class_map}
    table = open_dataset("train", **how)
    assert table.class_names == ["disc", "box"]
    assert table.class_map == class_map
    assert [one.classes for one in table.sets] == [(0, 1), (0,)]
    alone = {"cache_dir": tmp_path, "classes": class_map, "say": str}
    both = open_splits([str(coco), str(other)], str(other), tmp_path, **alone)
    for part in both:
        assert part.class_names == ["disc", "box"]
        assert part.class_map == class_map
    assert set(both[1].boxes().labels.tolist()) == {0}
    with pytest.raises(BadInput, match="no class Disk in .*did you mean Disc"):
        open_dataset("train", **how | {"classes": {"Disk": "disc"}})


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_resume_says_that_another_mapping_is_other_data(coco):
    table = opened(coco, classes=MAP)
    identity = json.loads(json.dumps(table.identity))
    assert table.changed_since(identity) == ""
    other = opened(
        coco,
        classes={"circle": "round", "square": "box", "star": "box", "triangle": None},
    )
    said = "data.classes was {circle: round, square: box, triangle: box, star: null}, and is {circle"
    assert said in other.changed_since(identity)
    assert "data.classes was {}" in table.changed_since(opened(coco).identity)
    assert "of the images 7 gone" in table.head(5).changed_since(identity)


def train(words: list[str], class_map: dict) -> None:
    train_ssd.main(parse_config(train_ssd.Config, [*words, "--data.classes", written_class_map(class_map)]))
    AcceleratorState._reset_state(True)


FLAGS = {
    "run.name": "mine",
    "run.max_steps": 1,
    "run.epochs": 1,
    "data.workers": 0,
    "data.image_size": 32,
    "data.batch_size_per_device": 4,
    "model.backbone": "lcnet_035",
    "model.pretrained_backbone": "false",
    "model.strides": "[4, -1]",
    "model.channels": "[16, 16]",
    "model.aspect_ratios": "[[2], [2]]",
    "eval.pictures": 0,
    "schedule.warmup_steps": 0,
}


def test_a_run_records_them_and_its_evaluation_opens_the_data_alike(coco, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("toolkit.run.session_end._report", lambda *_, **__: None)
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    flags = FLAGS | {"run.output_dir": tmp_path, "data.path": coco}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    train(words, MAP)
    run = tmp_path / "mine"
    assert load_config_dict(run / "config.yaml", options_class)["data"]["classes"] == MAP
    final = json.loads((run / "final" / "categories.json").read_text())  # by whose names other runs load these weights
    assert [(category["id"], category["name"]) for category in final] == [
        (1, "round"),
        (2, "box"),
    ]
    capsys.readouterr()
    saved = tmp_path / "found.json"
    assert evaluate.main([str(run), "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert "left out: star" in printed
    assert '"AP/round"' in printed
    about = json.loads((tmp_path / "found.about.json").read_text())
    assert about["data"]["classes"] == MAP
    assert {entry["category_id"] for entry in json.loads(saved.read_text())} <= {1, 2}
    assert evaluate.main([str(saved)]) == 0
    other = tmp_path / "renamed"  # data that have the new names already
    convert.main([str(coco), str(other), "--to", "coco", "--classes", written_class_map(MAP)])
    capsys.readouterr()
    assert evaluate.main([str(run), "--path", str(other)]) == 0
    assert '"AP/box"' in capsys.readouterr().out
    words += [
        "--run.resume",
        "latest",
        "--run.resume_schedule",
        "new",
        "--run.max_steps",
        "2",
    ]
    train(words, MAP | {"star": "box", "triangle": None})
    assert capsys.readouterr().out.count("data.classes was {circle: round") == 2
    with pytest.raises(
        BadInput,
        match=r"the data \['round', 'square', 'triangle', 'star'\]; data.classes .* -> ",
    ):
        train(words, {"circle": "round"})
    AcceleratorState._reset_state(True)


def test_the_report_says_what_became_of_the_classes(tmp_path):
    box = (10, 10, 50, 60)
    table = with_classes(table_of(tmp_path, [[(box, 0)], [(box, 1)]]), {"dog": "animal", "cat": "animal"})
    judged = judge("mine", predictions_of(table, [[(box, 0, 0.9)], []]), table, draws=2)
    page = write_page(tmp_path / "report", judged, RunFacts(), "mine").read_text()
    assert "1 classes (data.classes: dog, cat -&gt; animal)" in page
    assert json.loads((tmp_path / "report" / "report.json").read_text())["class_map"] == table.class_map
