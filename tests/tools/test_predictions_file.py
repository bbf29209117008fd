"""Predictions in a file, and what of it is refused: of this toolkit and of other programs."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from mask_data import random_masks
from pytest import approx
from report_data import SIZE, ground_truth_as_predictions, random_case, table_of

from toolkit.base.boxes import COLUMNS
from toolkit.base.errors import BadInput
from toolkit.base.masks import bitmap, tight_boxes
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.predictions import about_file, boxes_of, write_predictions
from toolkit.tools.predictions_file import read_predictions


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return random_case(tmp_path_factory.mktemp("case"), images=8, scores=10**6)


@pytest.fixture
def file(case, tmp_path):
    table, predictions = case
    return write_predictions(
        tmp_path / "new" / "found.json",
        predictions,
        table,
        data={"source": "val"},
    )


def rewritten(file: Path, content) -> Path:
    if not isinstance(content, str):
        content = json.dumps(content)
    file.write_text(content)
    return file


def read_again(file: Path, content, table):
    """Return the predictions that are read from a file with this content."""
    return read_predictions(rewritten(file, content), table)


def test_predictions_come_back(case, tmp_path):
    table, predictions = case
    scores = CocoEvaluator(table).evaluate(predictions)
    path = tmp_path / "new" / "found.json"
    file = write_predictions(path, predictions, table, scores=scores)
    read = read_predictions(file, table)
    assert read.about["scores"] == scores
    assert not read.corrected
    expected = boxes_of(predictions, table.image_ids().tolist())
    found = read.predictions
    for key in ("offsets", "scores", "labels"):
        column = getattr(found, key)
        assert column.tolist() == getattr(expected, key).tolist()
    assert found.xyxy == approx(expected.xyxy, rel=1e-12)
    assert CocoEvaluator(table).evaluate(found) == approx(scores, abs=1e-12)
    # As evaluate.py --save of a predictions file.
    saved = write_predictions(tmp_path / "again.json", found, table)
    again = read_predictions(saved, table).predictions
    assert np.allclose(again.xyxy, found.xyxy, rtol=1e-12)


def test_predictions_of_another_program_are_matched_by_file_name(case, file):
    table, _ = case
    expected = read_predictions(file, table).predictions
    about_file(file).unlink()
    image_ids = table.image_ids().tolist()
    names = dict(zip(image_ids, table.file_names(), strict=True))
    new_ids = {}
    for number, image_id in enumerate(reversed(image_ids), start=10):  # some are ids of others
        new_ids[image_id] = number
    renumbered = []
    named = []
    stems = []
    for entry in json.loads(file.read_text()):
        image_id = entry["image_id"]
        name = names[image_id]
        new = entry | {"image_id": new_ids[image_id]}
        renumbered.append(new)
        named.append(new | {"file_name": f"C:\\out\\{name}"})
        stems.append(entry | {"image_id": Path(name).stem})
    images = []
    for image_id, name in names.items():
        images.append({"id": new_ids[image_id], "file_name": name})
    of_coco = {"images": images, "annotations": renumbered}
    for content in (named, of_coco, stems):
        read = read_again(file, content, table).predictions
        for key in ("offsets", *COLUMNS[:3]):
            column = getattr(read, key)
            assert (column == getattr(expected, key)).all()


DETECTION = {
    "image_id": 10,
    "category_id": 1,
    "bbox": [0, 0, 1, 1],
    "score": 1,
}
OTHER_CONTENT = {
    "nothing": "not a COCO results file",
    "{}": "expected a list",
    '[{"image_id": 10}]': "detection 0",
    json.dumps([DETECTION | {"image_id": 99}]): "image ids",
    json.dumps([DETECTION | {"image_id": "away"}]): r"image ids \['away'\] .* no names of its files say",
    json.dumps([DETECTION | {"category_id": 2}]): "category ids",
    json.dumps([DETECTION, DETECTION | {"bbox": [0, 0, 1, "x"]}]): "detection 1: the bbox is .*four finite numbers",
    json.dumps([DETECTION | {"bbox": [math.nan, 0, 1, 1]}]): "the bbox is",
    json.dumps([DETECTION | {"score": True}]): "the score is .*; expected a finite number",
    json.dumps([DETECTION | {"score": 1e300}]): "the score is",
    '{"annotations": [], "images": true}': "found.json: `images` is .*; expected a list",
}


@pytest.mark.parametrize("content", OTHER_CONTENT)
def test_other_content_is_refused(case, file, content):
    with pytest.raises(BadInput, match=OTHER_CONTENT[content]):
        read_again(file, content, case[0])


def test_ten_faults_are_listed(case, file):
    faulty = DETECTION | {"score": None}
    with pytest.raises(BadInput) as refused:
        read_again(file, [faulty] * 30, case[0])
    assert len(refused.value.problems) == 10


def test_a_predictions_file_ends_in_json(case, tmp_path):
    table, predictions = case
    with pytest.raises(BadInput, match=".json"):
        write_predictions(tmp_path / "found.txt", predictions, table)


OTHER_METADATA = [
    None,
    [],
    "x",
    {"made_on": 7},
    {"made_on": {"fingerprint": None}},
    {"data": "x"},
    {"data": {}},
    {"data": {"source": None}},
    {"scores": [1]},
    {"detector": 7},
]


@pytest.mark.parametrize("content", OTHER_METADATA, ids=str)
def test_metadata_of_another_form_are_one_sentence(case, file, content):
    path = about_file(file)
    about = json.loads(path.read_text())
    if isinstance(content, dict):
        content = about | content
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match="found.about.json: .* is .*, expected .*; remove that file") as refused:
        read_predictions(file, case[0])
    assert len(refused.value.problems) == 1


def test_predictions_on_other_images_are_refused(case, file, tmp_path):
    other, _ = random_case(tmp_path / "other", images=9)
    with pytest.raises(BadInput, match="made on other images"):
        read_predictions(file, other)
    about_file(file).unlink()
    # Of another program: nothing says so.
    read = read_predictions(file, other)
    assert read.predictions.num_images == 9


def test_boxes_but_no_graphs_can_be_judged_on_corrected_annotations(case, file, tmp_path):
    corrected, _ = random_case(tmp_path / "corrected", images=8, seed=5)  # other boxes in the same images
    read = read_predictions(file, corrected)
    assert read.corrected
    expected = read_predictions(file, case[0]).predictions
    assert (read.predictions.xyxy == expected.xyxy).all()
    file.with_suffix(".graphs.npz").touch()
    with pytest.raises(BadInput, match="has scene graphs, made with other annotations"):
        read_predictions(file, corrected)


BOXES = {
    "cat": [10, 10, 60, 70],
    "dog": [80, 10, 120, 70],
    "ace": [10, 80, 60, 110],
    "owl": [130, 80, 150, 110],
}
PETS = [(1, "cat"), (4, "dog"), (7, "ace")]


def pets(folder, categories):
    """Ten images with one box of each class; categories: (id, name) of each."""
    ids, names = zip(*categories, strict=True)
    objects = []
    for label, name in enumerate(names):
        objects.append((BOXES[name.lower()], label))
    return table_of(folder, [objects] * 10, names, draw=False, category_ids=ids)


@pytest.fixture(scope="module")
def pets_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pets")
    table = pets(folder, PETS)
    found = ground_truth_as_predictions(table)
    return write_predictions(folder / "found.json", found, table)


RENAMED = "the class 'ace' is called 'Ace' now"
NEW = "the class 'owl' is new: its 10 boxes can only count as missed"
GONE = "the predictions of the class 'ace', which is gone, are left out"
CORRECTED_CLASSES = [
    pytest.param([(7, "ace"), (1, "cat"), (4, "dog")], None, id="in another order"),
    pytest.param([(0, "dog"), (1, "ace"), (2, "cat")], None, id="with the ids of others"),
    pytest.param([(1, "cat"), (4, "dog"), (7, "Ace")], RENAMED, id="renamed"),
    pytest.param([(7, "Ace"), (4, "dog"), (1, "cat")], RENAMED, id="renamed and in another order"),
    pytest.param([*PETS, (9, "owl")], NEW, id="one more at the end"),
    pytest.param([(0, "owl"), *PETS], NEW, id="one more at the beginning"),
    pytest.param(PETS[:2], GONE, id="one less"),
]


@pytest.mark.parametrize(("categories", "told"), CORRECTED_CLASSES)
def test_classes_of_corrected_annotations_are_matched_by_name(pets_file, tmp_path, categories, told):
    corrected = pets(tmp_path, categories)
    read = read_predictions(pets_file, corrected)
    assert read.corrected
    assert read.changed_classes == ((told,) if told else ())
    known = [name for _, name in categories if name != "owl"]
    assert len(read.predictions) == 10 * len(known)
    scores = CocoEvaluator(corrected).evaluate(read.predictions)
    for name in known:
        assert scores[f"AP/{name}"] == approx(1.0)
    assert not scores.get("AP/owl")


def test_classes_that_do_not_fit_are_refused_in_one_sentence(pets_file, tmp_path):
    others = pets(tmp_path, [(1, "cat"), (4, "dog"), (8, "owl")])  # renamed, or another one? nothing says it
    with pytest.raises(BadInput) as error:
        read_predictions(pets_file, others)
    (sentence,) = error.value.problems
    expected = r"predictions of \['ace'\], which .* does not know, and .* has boxes of \['owl'\]"
    assert re.search(expected, sentence)


def test_classes_of_another_form_are_refused(pets_file, tmp_path):
    file = shutil.copy(pets_file, tmp_path / "found.json")
    about = json.loads(about_file(pets_file).read_text())
    corrected = pets(tmp_path, PETS[:2])
    for classes in (7, [7], [{"id": [], "name": "cat"}], [{"id": 1}]):
        rewritten(about_file(file), about | {"classes": classes})
        with pytest.raises(BadInput, match="expected `classes`, a list of objects with id and name"):
            read_predictions(file, corrected)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """A predictions file of scene graphs with its table, and the arrays of its graphs."""
    folder = tmp_path_factory.mktemp("graphs")
    image = {"objects": [([0, 0, 9, 9], 0)] * 2, "relations": []}
    table = table_of(folder, [image] * 2, predicates=("on",), draw=False)
    graph = {
        "boxes": np.zeros((2, 4), np.float32),
        "labels": np.zeros(2, np.int64),
        "scores": np.ones(2, np.float32),
        "pairs": np.array([[0, 1]]),
        "predicate_scores": np.ones((1, 1), np.float32),
    }
    image_ids = table.image_ids().tolist()
    of_images = dict.fromkeys(image_ids, graph)
    file = write_predictions(folder / "g.json", of_images, table)
    archive = file.with_suffix(".graphs.npz")
    return file, table, archive.read_bytes(), dict(np.load(archive))


@pytest.mark.parametrize("share", [0, 0.01, 0.1, 0.5, 0.9])
def test_a_damaged_file_of_graphs_is_one_sentence(graphs, share):
    file, table, whole, _ = graphs
    rest = whole[: int(share * len(whole))]
    file.with_suffix(".graphs.npz").write_bytes(rest)
    with pytest.raises(BadInput, match="g.graphs.npz: not a file of scene graphs"):
        read_predictions(file, table)


@pytest.mark.parametrize("name", ["boxes", "labels", "scores", "pairs", "predicate_scores"])
def test_arrays_of_graphs_that_do_not_fit_are_refused(graphs, name):
    file, table, _, arrays = graphs
    column = arrays[name]
    columns = [
        np.array(3),
        column[:-1],
        column[None],
        column.astype(str),
        column.astype(complex),
    ]
    columns.append(column + 5 if name == "pairs" else column * math.nan)
    changes = [arrays | {name: other} for other in columns]
    for rows in (3, [1.0, 1.0], [-1, 3], [1]):
        changes.append(arrays | {f"{name}/rows": np.array(rows)})
    without = dict(arrays)
    del without[name]
    changes.append(without)
    archive = file.with_suffix(".graphs.npz")
    for changed in changes:
        np.savez(archive, **changed)
        with pytest.raises(BadInput, match="g.graphs.npz: "):
            read_predictions(file, table)


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return random_masks(tmp_path_factory.mktemp("masks"), 6, 2, seed=3)


@pytest.fixture
def mask_file(masks, tmp_path):
    table, predictions = masks
    return write_predictions(tmp_path / "found.json", predictions, table)


def test_masks_come_back(masks, mask_file):
    table, predictions = masks
    read = read_predictions(mask_file, table).predictions
    expected = boxes_of(predictions, table.image_ids().tolist())
    assert list(read.extra["masks"]) == list(expected.extra["masks"])
    scores = CocoEvaluator(table).evaluate(read)
    assert scores == CocoEvaluator(table).evaluate(predictions)


def test_polygons_and_masks_without_boxes_of_another_program_are_read(masks, mask_file):
    """COCO's own form of results of segmentation has no boxes."""
    entries = json.loads(mask_file.read_text())
    entries[0]["segmentation"] = [[1.0, 1.0, 20.0, 1.0, 20.0, 30.0]]
    for entry in entries:
        del entry["bbox"]
    read = read_again(mask_file, entries, masks[0]).predictions
    polygon, *others = read.extra["masks"]
    area = bitmap(polygon, SIZE).sum()
    assert area == approx(0.5 * 19 * 29, rel=0.1)
    first, *rest = read.xyxy.tolist()
    assert first == [1, 1, 20, 30]  # the corners of the polygon
    assert rest == tight_boxes(others, SIZE).tolist()
    height, width = SIZE
    # Column by column: 3 pixels from row 10 on, in the columns 2 and 3.
    runs = [
        2 * height + 10,
        3,
        height - 3,
        3,
        height * (width - 4) + height - 13,
    ]
    mask = {"size": [height, width], "counts": runs}
    uncompressed = entries[0] | {"segmentation": mask}
    read = read_again(mask_file, [uncompressed], masks[0]).predictions
    assert read.xyxy.tolist() == [[2, 10, 4, 13]]


WRONG_MASKS = {
    "mask cannot be used: the run lengths cover 4": {"segmentation": {"size": [3, 3], "counts": [4]}},
    "outline is 1200000 pixels long": {"segmentation": [[0, 0, 60, 60] * 10_000]},
    "has no segmentation": {},
    "run lengths cannot be read": {"segmentation": {"size": list(SIZE), "counts": "\x05"}},
}


@pytest.mark.parametrize("words", WRONG_MASKS)
def test_a_mask_that_cannot_be_used_is_named_with_its_detection(masks, mask_file, words):
    entries = json.loads(mask_file.read_text())
    del entries[1]["segmentation"]
    entries[1] |= WRONG_MASKS[words]
    if "cannot be used" in words:
        del entries[1]["bbox"]  # which is then that of the mask
    with pytest.raises(BadInput, match=f"detection 1: .*{words}") as said:
        read_again(mask_file, entries, masks[0])
    assert len(str(said.value)) < 500
