"""What a report counts, against hand-worked cases and other programs."""

import json
import math
import re
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from places import TESTS
from report_data import (
    ground_truth_as_predictions,
    predictions_of,
    random_case,
    table_of,
)

from toolkit.base.box_ops import pairwise_iou
from toolkit.base.boxes import COLUMNS
from toolkit.base.errors import BadInput
from toolkit.evaluation import matches
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.coco_numbers import exact_numbers
from toolkit.evaluation.matches import match_predictions
from toolkit.evaluation.predictions import about_file, boxes_of, write_predictions
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.evaluation.voc import voc_metrics
from toolkit.tools.predict.predict_split import SplitOptions, open_predictions_file
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.report.bootstrap import interval, resample, weighted_numbers
from toolkit.tools.report.comparison import compare
from toolkit.tools.report.detection_errors import ERROR_KINDS, strata, tide_errors
from toolkit.tools.report.judgement import as_json, judge
from toolkit.tools.report.suspects import suspects
from toolkit.tools.report.thresholds import calibration, confusion_matrix, sweep


def test_a_draw_counts_an_image_as_often_as_it_was_drawn(tmp_path):
    """Against a data set in which the images really stand several times."""
    table, predictions = random_case(tmp_path / "a", images=12, classes=2, crowd=0)
    times = np.random.default_rng(3).multinomial(12, np.full(12, 1 / 12))
    truth, found = [], []
    for i, p in enumerate(predictions.values()):
        objects = table.row(i)["objects"]
        truth += [list(zip(objects["bbox"], objects["category"].tolist(), strict=True))] * times[i]
        found += [list(zip(p["boxes"], p["labels"], p["scores"], strict=True))] * times[i]
    again = table_of(tmp_path / "b", truth, table.class_names, draw=False)
    expected = exact_numbers(match_predictions(predictions_of(again, found), again))
    drawn = weighted_numbers(match_predictions(predictions, table), times[:, None].astype(np.float32))
    for name in COCO_METRICS:  # AR: no interpolation at recalls that rounding moves, no order among equals
        tolerance = 1e-6 if name in ("AR1", "AR10", "AR100") else 2e-2
        expected_number = pytest.approx(expected.numbers[name][0], abs=tolerance, nan_ok=True)
        assert drawn.numbers[name][0] == expected_number, name


def test_intervals_lie_around_the_number_and_shrink_with_data(tmp_path):
    widths = []
    for images in (20, 200):
        m = match_predictions(*reversed(random_case(tmp_path / str(images), images=images)))
        value = float(exact_numbers(m).numbers["AP50"][0])
        low, high = interval(resample(m, 200).numbers["AP50"], value)
        assert low < value < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
    assert interval(np.full(5, np.nan), 0.5) is None


def test_ground_truth_as_predictions_is_perfect(tmp_path):
    table, _ = random_case(tmp_path, crowd=0)
    judged = judge("truth", ground_truth_as_predictions(table), table, draws=20)
    boxes = int(judged.matches.num_truth.sum())
    assert judged.numbers["AP"] == 1 and judged.overall.best.f1 == 1
    assert judged.matrix.trace() == boxes == judged.matrix.sum()
    assert not judged.suspects and not judged.errors.missed.any()
    assert all(len(judged.errors.of(kind)) == 0 for kind in ERROR_KINDS[:-1])
    assert judged.errors.ap50 == 1 and judged.errors.cost["class"] == 0


def apart(count=12):
    """One box an image of each of three classes, in three corners."""
    places = ([5, 5, 45, 45], [60, 5, 110, 50], [10, 60, 70, 110])
    return [[(np.add(box, i % 5), k) for k, box in enumerate(places)] for i in range(count)]


def test_labels_moved_by_one_leave_the_diagonal_empty(tmp_path):
    table = table_of(tmp_path, apart(), ("a", "b", "c"), draw=False)
    truth = ground_truth_as_predictions(table)
    judged = judge("moved", {i: p | {"labels": (p["labels"] + 1) % 3} for i, p in truth.items()}, table, draws=20)
    assert judged.matrix.trace() == 0 and judged.matrix[:3, :3].sum() == 36
    assert judged.matrix[:3, 3].sum() == 0 and len(judged.errors.of("class")) == 36
    assert judged.errors.cost["class"] == pytest.approx(1) and judged.overall.best is None


@pytest.mark.parametrize("seed", range(4))
def test_every_box_has_one_fate_and_the_threshold_gives_the_best_f1(tmp_path, seed):
    table, predictions = random_case(tmp_path, seed=seed, scores=40)
    m = match_predictions(predictions, table)
    best = sweep(m).best
    matrix = confusion_matrix(m, best.threshold)
    assert (matrix[:-1].sum(axis=1) == m.num_truth).all()
    assert matrix.trace() == (m.right & (m.found.scores > best.threshold)).sum()
    for operator in (np.greater, np.greater_equal):  # a deployed threshold means either
        kept = operator(m.found.scores, best.threshold) & m.counts
        right = (kept & m.right).sum()
        assert 2 * right / (kept.sum() + m.num_truth.sum()) == pytest.approx(best.f1, abs=1e-6)
    every = [
        2 * (m.right & (m.found.scores >= s)).sum() / ((m.counts & (m.found.scores >= s)).sum() + m.num_truth.sum())
        for s in np.unique(m.found.scores)
    ]
    assert best.f1 == pytest.approx(max(every), abs=1e-12)


def test_a_wanted_precision(tmp_path):
    box, far = [0, 0, 20, 20], [60, 60, 90, 90]
    table = table_of(tmp_path, [[(box, 0)]] * 4, ("a",), draw=False)
    found = predictions_of(table, [[(box, 0, 0.9)], [(box, 0, 0.8)], [(far, 0, 0.7)], [(box, 0, 0.6)]])
    s = sweep(match_predictions(found, table))
    assert s.at_precision(0.9).recall == 0.5 and 0.7 < s.at_precision(0.9).threshold < 0.8
    assert s.at_precision(0.75).recall == 0.75 and s.at_precision(0.75).threshold < 0.6
    assert sweep(match_predictions(predictions_of(table, [[(far, 0, 0.5)]] * 4), table)).best is None


def test_calibration_of_scores_that_are_probabilities_and_of_others(tmp_path):
    rng = np.random.default_rng(0)
    table = table_of(tmp_path, [[([0, 0, 20, 20], 0)]] * 2000, ("a",), draw=False)
    errors = []
    for power in (1, 4):
        boxes = [(chance, [0, 0, 20, 20] if rng.random() < chance else [60, 60, 90, 90]) for chance in rng.random(2000)]
        found = predictions_of(table, [[(box, 0, chance**power)] for chance, box in boxes])
        errors.append(calibration(match_predictions(found, table)).error)
    assert errors[0] < 0.03 and errors[1] > 0.2


def test_kinds_of_mistakes_and_their_cost_by_hand(tmp_path):
    """Two boxes of a class, of which one is found. Each other prediction is one kind of mistake."""
    box, other, dog = [0, 0, 40, 40], [60, 60, 100, 100], [100, 0, 140, 40]
    table = table_of(tmp_path, [[(box, 0), (other, 0), (dog, 1)]], draw=False)
    mistakes = {"duplicate": (box, 0, 0.8), "localisation": ([60, 60, 100, 75], 0, 0.7),
                "background": ([0, 80, 20, 110], 0, 0.6), "class": (dog, 0, 0.5),
                "both": ([100, 0, 140, 12], 0, 0.4)}  # fmt: skip
    e = tide_errors(match_predictions(predictions_of(table, [[(box, 0, 0.9), *mistakes.values()]]), table))
    assert [e.of(kind).tolist() for kind in mistakes] == [[1], [2], [3], [4], [5]]
    assert not e.missed.any()  # the two others would be found by mended predictions
    # class cat: right, then wrong; recall 1/2 of 2 boxes with precision 1: 51 of 101 points. class dog: nothing
    half = 51 / 101
    assert e.ap50 == pytest.approx(half / 2)
    # mended place: right, wrong, right: 51 points at 1, 50 at 2/3
    assert e.cost["localisation"] == pytest.approx((half + 50 / 101 * 2 / 3) / 2 - half / 2)
    assert e.cost["class"] == pytest.approx(1 / 2), "then the one dog is found"
    assert e.cost["duplicate"] == e.cost["background"] == e.cost["both"] == pytest.approx(0)
    assert e.cost["false negatives"] == pytest.approx(1 / 2 - half / 2)

    table = table_of(tmp_path / "missed", [[(box, 0), (other, 0)]], ("a",), draw=False)
    e = tide_errors(match_predictions(predictions_of(table, [[(box, 0, 0.9)]]), table))
    assert e.missed.tolist() == [False, True] and e.cost["missed"] == pytest.approx(1 - half)


def test_costs_of_mistakes_are_those_of_tidecv(tmp_path):
    """`tidecv` 1.0.1, of TIDE's authors, on the same files; with crowds, without equal scores, which it orders else."""
    table, predictions = random_case(tmp_path, images=100, classes=3, scores=10**9)
    errors = tide_errors(match_predictions(predictions, table))
    assert 100 * errors.ap50 == pytest.approx(18.91556775, abs=1e-6)
    assert {kind: 100 * cost for kind, cost in errors.cost.items()} == pytest.approx({
        "class": 1.265983011, "localisation": 7.450112085, "both": 0.912947142, "duplicate": 1.476802122,
        "background": 10.765734586, "missed": 6.168392193, "false positives": 45.770900895,
        "false negatives": 9.593259957,
    }, abs=1e-6)  # fmt: skip


def test_what_is_found_by_what_the_object_is_like(tmp_path):
    """Four boxes: the first two overlap, the others hardly touch; the first is found, the third with a low score."""
    boxes = [[0, 0, 40, 40], [20, 20, 60, 70], [100, 60, 120, 80], [119, 60, 139, 80]]
    table = table_of(tmp_path, [[(box, 0) for box in boxes]], ("a",), draw=False)
    found = predictions_of(table, [[(boxes[0], 0, 0.9), (boxes[2], 0, 0.3)]])
    parts = strata(match_predictions(found, table), 0.5)
    groups = {(s.topic, s.name): (s.boxes, s.recall, s.recall_at_any_score) for s in parts}
    assert groups == {
        ("size in pixels", "small (below 32²)"): (2, 0, 1 / 2),
        ("size in pixels", "medium (32² to 96²)"): (2, 1 / 2, 1 / 2),
        ("boxes that overlap it", "none"): (2, 0, 1 / 2),
        ("boxes that overlap it", "1"): (2, 1 / 2, 1 / 2),
        ("boxes in the image", "2 to 5"): (4, 1 / 4, 1 / 2),
        ("edge of the image", "cut off"): (1, 1, 1),
        ("edge of the image", "not cut off"): (3, 0, 1 / 3),
        ("place in the image", "top left"): (1, 1, 1),
        ("place in the image", "middle left"): (1, 0, 0),
        ("place in the image", "middle right"): (2, 0, 1 / 2),
    }


def test_planted_mistakes_of_the_annotation_are_listed(tmp_path):
    """5 % of 1,440 boxes removed, moved or relabelled; a simulated detector with 2 % misses and confusions."""
    rng, table = np.random.default_rng(0), table_of(tmp_path, apart(480), ("a", "b", "c"), draw=False)
    found, images, planted, of_detector = {}, [], [], []
    for i, (image_id, p) in enumerate(ground_truth_as_predictions(table).items()):
        boxes, labels, objects = np.asarray(p["boxes"]), np.asarray(p["labels"]), []
        sides, seen = np.tile(boxes[:, 2:] - boxes[:, :2], 2), rng.random(3) > 0.02
        predicted = np.where(rng.random(3) < 0.98, labels, rng.integers(0, 3, 3))
        found[image_id] = {"boxes": (boxes + rng.normal(0, 0.04, boxes.shape) * sides)[seen],
                           "labels": predicted[seen], "scores": rng.beta(12, 2, 3)[seen]}  # fmt: skip
        of_detector += [(i, box) for box in boxes[~seen | (predicted != labels)]]
        for box, side, label in zip(boxes, sides, labels, strict=True):
            kind = rng.choice(["", "removed", "moved", "relabelled"], p=[0.95, 0.02, 0.015, 0.015])
            planted += [(i, box)] if kind else []
            if kind != "removed":
                objects.append((box + 0.4 * side * (kind == "moved"), (label + (kind == "relabelled")) % 3))
        images.append(objects)
    m = match_predictions(found, table_of(tmp_path / "wrong", images, table.class_names, draw=False))
    listed = suspects(m)

    def near(suspect, mistakes) -> set[int]:
        """Numbers of the mistakes that the suspect's prediction or box overlaps."""
        boxes = [b[at] for b, at in ((m.found.xyxy, suspect.det), (m.truth.xyxy, suspect.gt)) if at >= 0]
        there = [n for n, (image, _) in enumerate(mistakes) if image == suspect.image]
        overlaps = pairwise_iou(torch.tensor(np.array(boxes)), torch.tensor(np.array([box for _, box in mistakes])))
        return {n for n in there if overlaps[:, n].max() > 0.15}

    hits = [near(suspect, planted) for suspect in listed]
    right, with_prediction = [bool(numbers) for numbers in hits], [suspect.det >= 0 for suspect in listed]
    assert with_prediction == sorted(with_prediction, reverse=True)
    assert len(set().union(*hits)) / len(planted) > 0.9 and np.mean(right) > 0.5
    assert np.mean(right[: sum(with_prediction)]) > 0.75
    # All that is listed beside them are the detector's own misses, which come last, and confusions.
    assert all(good or near(suspect, of_detector) for suspect, good in zip(listed, right, strict=True))
    assert 20 < len(of_detector) < 80


def test_a_box_moved_by_its_side_and_what_was_found_in_its_place_are_one_suspect(tmp_path):
    right, seen, moved = [10, 10, 30, 50], [10, 110, 30, 150], [28, 110, 48, 150]
    images = [[(right, 0)]] * 25 + [[(right, 0), (moved, 0)]]

    def predicted(*boxes):
        return {"boxes": np.array(boxes), "labels": np.zeros(len(boxes), int), "scores": np.full(len(boxes), 0.9)}

    found = {10 + i: predicted(right) for i in range(25)} | {35: predicted(right, seen)}
    (suspect,) = suspects(match_predictions(found, table_of(tmp_path, images, draw=False, size=(200, 200))))
    assert (suspect.kind, suspect.image, suspect.det, suspect.gt) == ("place", 25, 26, 26)


def test_a_predictions_file_comes_back(tmp_path):
    table, predictions = random_case(tmp_path, scores=10**6)
    scores = CocoEvaluator(table).evaluate(predictions)
    read = read_predictions(write_predictions(tmp_path / "p" / "found.json", predictions, table, scores=scores), table)
    expected, found = boxes_of(predictions, table.image_ids().tolist()), read.predictions
    assert read.about["scores"] == scores
    for key in ("offsets", "scores", "labels"):
        assert getattr(found, key).tolist() == getattr(expected, key).tolist()
    assert found.xyxy == pytest.approx(expected.xyxy, rel=1e-12)
    assert CocoEvaluator(table).evaluate(found) == pytest.approx(scores, abs=1e-12)
    again = write_predictions(tmp_path / "again.json", found, table)  # as evaluate.py --save of a predictions file
    assert np.allclose(read_predictions(again, table).predictions.xyxy, found.xyxy, rtol=1e-12)


def test_predictions_of_another_program_are_matched_by_file_name(tmp_path):
    table, predictions = random_case(tmp_path)
    file = write_predictions(tmp_path / "found.json", predictions, table)
    expected, entries = read_predictions(file, table).predictions, json.loads(file.read_text())
    about_file(file).unlink()
    names = dict(zip(table.image_ids().tolist(), table.file_names(), strict=True))
    new = {image_id: number for number, image_id in enumerate(reversed(names), start=10)}  # some are ids of others
    renumbered = [entry | {"image_id": new[entry["image_id"]]} for entry in entries]
    named = [one | {"file_name": f"C:\\out\\{names[entry['image_id']]}"}
             for one, entry in zip(renumbered, entries, strict=True)]  # fmt: skip
    images = [{"id": new[image_id], "file_name": name} for image_id, name in names.items()]
    stems = [entry | {"image_id": Path(names[entry["image_id"]]).stem} for entry in entries]
    for content in (named, {"images": images, "annotations": renumbered}, stems):
        file.write_text(json.dumps(content))
        read = read_predictions(file, table).predictions
        assert all((getattr(read, key) == getattr(expected, key)).all() for key in ("offsets", *COLUMNS[:3]))
    file.write_text(json.dumps([stems[0] | {"image_id": "elsewhere"}]))
    with pytest.raises(BadInput, match=r"image ids \['elsewhere'\] .* no names of its files say"):
        read_predictions(file, table)


def test_predictions_of_other_data_are_refused_by_name(tmp_path):
    table, predictions = random_case(tmp_path / "a")
    corrected, _ = random_case(tmp_path / "b", seed=5)  # other boxes in images of the same names and sizes
    other, _ = random_case(tmp_path / "c", seed=5, images=31)
    file = write_predictions(tmp_path / "found.json", predictions, table)
    with pytest.raises(BadInput, match="made on other images"):
        read_predictions(file, other)
    assert not read_predictions(file, table).corrected
    read = read_predictions(file, corrected)
    assert read.corrected and (read.predictions.xyxy == read_predictions(file, table).predictions.xyxy).all()
    file.with_suffix(".graphs.npz").touch()
    with pytest.raises(BadInput, match="has scene graphs, made with other annotations"):
        read_predictions(file, corrected)
    file.with_suffix(".graphs.npz").unlink()
    about_file(file).unlink()
    assert read_predictions(file, other).predictions.num_images == len(other)  # of another program: nothing says so
    detection = {"image_id": 10, "category_id": 1, "bbox": [0, 0, 1, 1], "score": 1}
    for content, words in (
        ({}, "expected a list"),
        ([{"image_id": 10}], "detection 0"),
        ([detection | {"image_id": 99}], "image ids"),
        ([detection | {"category_id": 2}], "category ids"),
        ([detection | {"bbox": [0, 0, 1, "x"]}], "the bbox is"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(BadInput, match=words):
            read_predictions(file, table)
    file.write_text("nothing")
    with pytest.raises(BadInput, match="not a COCO results file"):
        read_predictions(file, table)
    with pytest.raises(BadInput, match=".json"):
        write_predictions(tmp_path / "found.txt", predictions, table)


DETECTION = {"image_id": 10, "category_id": 1, "bbox": [0, 0, 1, 1], "score": 1}
NO_NUMBERS = (None, True, "x", [1], {}, math.nan, math.inf, -math.inf, 1e300, 10**400)


def test_numbers_that_are_none_are_named_with_their_detection(tmp_path):
    table, _ = random_case(tmp_path)
    file = tmp_path / "found.json"
    for value in NO_NUMBERS:
        file.write_text(json.dumps([DETECTION, DETECTION | {"score": value}]))
        with pytest.raises(BadInput, match=r"found.json, detection 1: the score is .*; expected a finite number$"):
            read_predictions(file, table)
        for place in range(4):
            bbox = [0, 0, 1, 1]
            bbox[place] = value
            file.write_text(json.dumps([DETECTION, DETECTION | {"bbox": bbox}]))
            with pytest.raises(BadInput, match="found.json, detection 1: the bbox is .*; expected four finite numbers"):
                read_predictions(file, table)
    file.write_text(json.dumps([DETECTION | {"score": None}] * 30))
    with pytest.raises(BadInput) as refused:
        read_predictions(file, table)
    assert len(refused.value.problems) == 10


@pytest.mark.parametrize("images", [7, "x", True, {"id": 1}])
def test_images_of_a_document_that_are_not_a_list_are_refused(images, tmp_path):
    table, _ = random_case(tmp_path)
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"annotations": [DETECTION], "images": images}))
    with pytest.raises(BadInput, match="found.json: `images` is .*; expected a list"):
        read_predictions(file, table)


def test_metadata_of_another_form_are_one_sentence(tmp_path):
    table, predictions = random_case(tmp_path)
    file = write_predictions(tmp_path / "found.json", predictions, table, data={"source": "val"})
    about = json.loads(about_file(file).read_text())
    values = ([], "x", 7, True, [1])
    contents = [None, *values, about | {"made_on": None}, about | {"data": {}}, about | {"data": {"source": None}}]
    for key in ("made_on", "data", "scores"):
        contents += [about | {key: value} for value in values]
    contents += [about | {"made_on": about["made_on"] | {"fingerprint": value}} for value in (7, None, [])]
    for content in contents:
        about_file(file).write_text(json.dumps(content))
        with pytest.raises(BadInput, match="found.about.json: .* is .*, expected .*; remove that file") as refused:
            read_predictions(file, table)
        assert len(refused.value.problems) == 1


def test_data_that_a_predictions_file_names_have_known_keys(tmp_path):
    table, predictions = random_case(tmp_path)
    data = {"source": "val", "path": str(tmp_path), "cache_dir": "/"}
    file = write_predictions(tmp_path / "found.json", predictions, table, data=data)
    with pytest.raises(BadInput, match="found.about.json: `data` has cache_dir"):
        open_predictions_file(file, SplitOptions(), print)


BOXES = {"cat": [10, 10, 60, 70], "dog": [80, 10, 120, 70], "ace": [10, 80, 60, 110]}


def pets(folder, categories, renamed=MappingProxyType({}), gone=()):
    """Ten images with one box of each class, a new one's too; categories: (id, name) of each."""
    ids, names = zip(*categories, strict=True)
    places = {renamed.get(name, name): box for name, box in BOXES.items() if name not in gone}
    images = [[(places.get(name, [130, 80, 150, 110]), label) for label, name in enumerate(names)]] * 10
    return table_of(folder, images, names, draw=False, category_ids=ids)


PETS = [(1, "cat"), (4, "dog"), (7, "ace")]


@pytest.mark.parametrize(("categories", "options", "told"), [
    ([(7, "ace"), (1, "cat"), (4, "dog")], {}, ()),  # in another order
    ([(0, "dog"), (1, "ace"), (2, "cat")], {}, ()),  # with the ids of others
    ([(1, "cat"), (4, "dog"), (7, "Ace")], {"renamed": {"ace": "Ace"}}, ("the class 'ace' is called 'Ace' now",)),
    ([(7, "Ace"), (4, "dog"), (1, "cat")], {"renamed": {"ace": "Ace"}}, ("the class 'ace' is called 'Ace' now",)),
    ([*PETS, (9, "owl")], {}, ("the class 'owl' is new: its 10 boxes can only count as missed",)),
    ([(0, "owl"), *PETS], {}, ("the class 'owl' is new: its 10 boxes can only count as missed",)),
    (PETS[:2], {"gone": ("ace",)}, ("the predictions of the class 'ace', which is gone, are left out",)),
])  # fmt: skip
def test_classes_of_corrected_annotations_are_matched_by_name(tmp_path, categories, options, told):
    table = pets(tmp_path / "then", PETS)
    file = write_predictions(tmp_path / "found.json", ground_truth_as_predictions(table), table)
    corrected = pets(tmp_path / "now", categories, **options)
    read = read_predictions(file, corrected)
    assert read.corrected and read.changed_classes == told
    known = [name for _, name in categories if name != "owl"]
    assert len(read.predictions) == 10 * len(known)
    scores = CocoEvaluator(corrected).evaluate(read.predictions)
    assert [scores[f"AP/{name}"] for name in known] == pytest.approx([1.0] * len(known))
    assert "AP/owl" not in scores or scores["AP/owl"] == 0


def test_classes_that_do_not_fit_are_refused_in_one_sentence(tmp_path):
    table = pets(tmp_path / "then", PETS)
    file = write_predictions(tmp_path / "found.json", ground_truth_as_predictions(table), table)
    others = pets(tmp_path / "now", [(1, "cat"), (4, "dog"), (8, "owl")])  # renamed, or another one? nothing says it
    with pytest.raises(BadInput) as error:
        read_predictions(file, others)
    (sentence,) = error.value.problems
    assert re.search(r"predictions of \['ace'\], which .* does not know, and .* has boxes of \['owl'\]", sentence)
    about = json.loads(about_file(file).read_text())
    for classes in (7, [7], [{"id": [], "name": "cat"}], [{"id": 1}]):
        about_file(file).write_text(json.dumps(about | {"classes": classes}))
        with pytest.raises(BadInput, match="expected `classes`, a list of objects with id and name"):
            read_predictions(file, others)


def test_graphs_travel_with_their_boxes(tmp_path):
    objects = [([0, 0, 40, 40], 0), ([60, 60, 100, 100], 1), ([0, 60, 40, 100], 1)]
    image = {"objects": objects, "relations": [(0, 1, 1), (2, 0, 0)]}
    table = table_of(tmp_path, [image] * 3, predicates=("on", "under"), draw=False)
    graph = {
        "boxes": np.array([*(box for box, _ in objects), [0, 0, 5, 5]], np.float32),
        "labels": np.array([0, 1, 1, -1]),
        "scores": np.array([0.9, 0.8, 0.7, 0.1], np.float32),
        "pairs": np.array([[0, 1], [2, 0]]),
        "predicate_scores": np.array([[0.1, 0.9], [0.3, 0.6]], np.float32),
    }
    file = write_predictions(tmp_path / "g.json", dict.fromkeys(table.image_ids().tolist(), graph), table)
    read = read_predictions(file, table)
    assert all((read.predictions[10][key] == graph[key]).all() for key in graph)
    judged = judge("graphs", read.predictions, table, draws=10)
    assert judged.graphs.mode == "sgdet" and judged.graphs.row["R@100"] == pytest.approx(0.5)
    assert judged.graphs.confusions.tolist() == [[0, 3, 0], [0, 3, 0]]  # "on" is taken for "under"
    assert judged.graphs.recall.tolist() == [0, 1] and judged.graphs.whole == 0
    json.dumps(as_json(judged))


@pytest.fixture
def graphs(tmp_path):
    """A predictions file of scene graphs with its table, and the arrays of its graphs."""
    image = {"objects": [([0, 0, 9, 9], 0)] * 2, "relations": []}
    table = table_of(tmp_path, [image] * 2, predicates=("on",), draw=False)
    graph = {
        "boxes": np.zeros((2, 4), np.float32),
        "labels": np.zeros(2, np.int64),
        "scores": np.ones(2, np.float32),
        "pairs": np.array([[0, 1]]),
        "predicate_scores": np.ones((1, 1), np.float32),
    }
    file = write_predictions(tmp_path / "g.json", dict.fromkeys(table.image_ids().tolist(), graph), table)
    return file, table, dict(np.load(file.with_suffix(".graphs.npz")))


@pytest.mark.parametrize("share", [0, 7, 30, 0.5, 0.9], ids=str)
def test_a_damaged_file_of_graphs_is_one_sentence(share, graphs):
    file, table, _ = graphs
    archive = file.with_suffix(".graphs.npz")
    whole = archive.read_bytes()
    cut = whole[: share if isinstance(share, int) else int(share * len(whole))]
    for content in (cut, b"garbage" + cut):
        archive.write_bytes(content)
        with pytest.raises(BadInput, match="g.graphs.npz: not a file of scene graphs"):
            read_predictions(file, table)


@pytest.mark.parametrize("name", ["boxes", "labels", "scores", "pairs", "predicate_scores"])
def test_arrays_of_graphs_that_do_not_fit_are_refused(name, graphs):
    file, table, arrays = graphs
    column = arrays[name]
    others = [None, np.array(3), column[:-1], column[None], column.astype(str), column.astype(complex)]
    others += [column * math.nan] if name != "pairs" else [column + 5, column - 5]
    for other in others:
        changed = {key: value for key, value in arrays.items() if key != name}
        changed |= {} if other is None else {name: other}
        np.savez(file.with_suffix(".graphs.npz"), **changed)
        with pytest.raises(BadInput, match="g.graphs.npz: "):
            read_predictions(file, table)
    for rows in (np.array(3), np.array([1.0, 1.0]), np.array([-1, 3]), np.array([1])):
        np.savez(file.with_suffix(".graphs.npz"), **arrays | {f"{name}/rows": rows})
        with pytest.raises(BadInput, match="g.graphs.npz: "):
            read_predictions(file, table)


def test_a_paired_difference_sees_what_intervals_of_each_do_not(tmp_path):
    table = table_of(tmp_path, apart(60), ("a", "b", "c"), draw=False)
    rng = np.random.default_rng(0)
    worse, better = {}, {}
    for image_id, p in ground_truth_as_predictions(table).items():
        seen, scores = rng.random(3) < 0.7, torch.from_numpy(rng.random(3))
        more = seen | (rng.random(3) < 0.25)  # finds some more, in the same images
        for found, keep in ((worse, seen), (better, more)):
            found[image_id] = {key: value[torch.from_numpy(keep)] for key, value in (p | {"scores": scores}).items()}
    runs = (("run_1", worse), ("run_2", worse), ("other", better))
    judged = [judge(name, predictions, table, draws=300) for name, predictions in runs]
    c = compare(judged)
    of = {(d.other, d.metric): d for d in c.differences}
    assert of["run_2", "AP"].in_words() == "the same AP"
    gained, words = of["other", "AP"], of["other", "AP"].in_words()
    assert gained.low > 0 and words.startswith("better by") and words.endswith("not explained by chance")
    assert judged[0].intervals["AP"][1] > judged[2].intervals["AP"][0]  # taken each alone, they overlap
    assert list(c.groups) == ["run_1, run_2"] and c.groups["run_1, run_2"]["AP"][1] == 0
    assert c.images and judged[2].image_f1[c.images[0]] > judged[0].image_f1[c.images[0]]
    other = judge("x", *reversed(random_case(tmp_path / "o")), draws=5)
    with pytest.raises(BadInput, match="same data"):
        compare([judged[0], other])


GOLDEN = TESTS / "golden" / "data" / "gluoncv_voc.json"  # by VOC07MApMetric and VOCMApMetric


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()))
def test_the_numbers_are_those_of_gluoncv(tmp_path, case):
    """Crowds stand for GluonCV's difficult boxes; several predictions of a box, boxes without predictions."""
    images = case["images"]
    truth = [list(zip(i["gt"], i["labels"], i["difficult"], strict=True)) for i in images]
    table = table_of(tmp_path, truth, case["classes"], draw=False)
    found = [list(zip(i["boxes"], i["found"], i["scores"], strict=True)) for i in images]
    result = voc_metrics(match_predictions(predictions_of(table, found), table))
    for year, expected in case["expected"].items():
        assert result[f"{year}_mAP"] == pytest.approx(expected.pop("mAP"), abs=1e-12)
        assert {name: result[f"{year}/{name}"] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_by_hand(tmp_path):
    box, far = [0, 0, 40, 40], [60, 60, 100, 100]
    table = table_of(tmp_path, [[(box, 0), (far, 0)], [(box, 0, True)]], draw=False)
    found = [[(box, 0, 0.9), (box, 0, 0.8), (far, 0, 0.7)], [(box, 0, 0.95)]]  # right, again, right; difficult
    result = voc_metrics(match_predictions(predictions_of(table, found), table))
    assert result["voc12/cat"] == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert result["voc07/cat"] == pytest.approx((6 + 5 * 2 / 3) / 11)
    assert result["voc12/dog"] is None and result["voc12_mAP"] == result["voc12/cat"]
    nothing = voc_metrics(match_predictions(predictions_of(table, [[], []]), table))
    assert nothing["voc07_mAP"] == nothing["voc12_mAP"] == 0
    empty = table_of(tmp_path / "empty", [[]], draw=False)
    assert voc_metrics(match_predictions(predictions_of(empty, [[(box, 0, 0.5)]]), empty))["voc12_mAP"] is None


def test_a_perfect_detector_an_evaluation_in_training_and_small_blocks(tmp_path, monkeypatch):
    """`eval.metric_for_best voc07_mAP` is GluonCV's best by `mean_ap[-1]`."""
    table, predictions = random_case(tmp_path, crowd=0)
    assert voc_metrics(match_predictions(ground_truth_as_predictions(table), table))["voc12_mAP"] == 1
    expected = voc_metrics(match_predictions(predictions, table))
    row = CocoEvaluator(table).evaluate(predictions)
    assert all(row[f"{year}_mAP"] == expected[f"{year}_mAP"] for year in ("voc07", "voc12"))
    monkeypatch.setattr(matches, "PAIRS_PER_CHUNK", 7)
    assert voc_metrics(match_predictions(predictions, table)) == expected
