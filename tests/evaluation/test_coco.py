"""COCO's metrics, of boxes and of masks: those of pycocotools, and what is said about them."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_data import coco_document, pixels_of, random_masks, with_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from report_data import found_of, ground_truth_as_predictions, random_case, table_of

from toolkit.base.errors import BadInput
from toolkit.base.masks import Rle, rles_of
from toolkit.base.text import columns
from toolkit.evaluation.coco import (
    CocoEvaluator,
    check_ground_truth,
    coco_row,
    per_class_table,
)
from toolkit.evaluation.coco_numbers import any_class_ap
from toolkit.evaluation.mask_matches import masks_of_truth, match_masks
from toolkit.evaluation.matches import class_keys, match_predictions
from toolkit.evaluation.predictions import write_predictions
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.tools.writers import write_coco

BOX = [10, 10, 60, 60]
OTHER = [100, 20, 140, 60]
NOTHING = found_of([], [], [])


def by_pycocotools(folder, table, predictions, kind) -> dict:
    """The twelve numbers as anybody gets them from files with loadRes; None for its -1."""
    file = write_predictions(folder / "found.json", predictions, table)
    results = json.loads(file.read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        if kind == "segm":
            for entry in results:
                del entry["bbox"]  # else loadRes takes the area of the box for that of the mask
            truth = COCO()
            truth.dataset = coco_document(table)
            truth.createIndex()
        else:
            write_coco(table.labelled(), folder / "truth.json")
            truth = COCO(folder / "truth.json")
        run = COCOeval(truth, truth.loadRes(results), kind)
        run.evaluate()
        run.accumulate()
        run.summarize()
    numbers = [None if value == -1 else float(value) for value in run.stats]
    return {f"{kind}_{name}": value for name, value in zip(COCO_METRICS, numbers, strict=True)}


def assert_as_pycocotools(folder, table, predictions, kind="bbox") -> dict:
    """Also of each class, which its own backend gives."""
    result = CocoEvaluator(table).evaluate(predictions)
    assert result == pytest.approx(CocoEvaluator(table, "pycocotools").evaluate(predictions), abs=1e-12)
    plain = by_pycocotools(folder, table, predictions, kind)
    assert {name: result[name] for name in plain} == pytest.approx(plain, abs=1e-12)
    return result


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_classes=st.integers(1, 4),
    scores=st.sampled_from([6, 1000]),
)
def test_boxes_are_judged_as_by_pycocotools(tmp_path_factory, seed, num_classes, scores):
    """With crowds, ties, images without boxes or predictions, more than 10 predictions of a class."""
    folder = tmp_path_factory.mktemp("random")
    table, predictions = random_case(folder, 12, num_classes, seed, scores=scores, dets=60)
    assert_as_pycocotools(folder, table, predictions)


@pytest.mark.parametrize("seed", range(4))
def test_boxes_whose_class_does_not_matter_are_judged_as_by_pycocotools(tmp_path, seed):
    """With crowds, and more than 100 predictions of an image."""
    table, predictions = random_case(tmp_path, 12, 4, seed, scores=10**9, dets=60 * (1 + seed))
    file = write_predictions(tmp_path / "found.json", predictions, table)
    write_coco(table.labelled(), tmp_path / "truth.json")
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(tmp_path / "truth.json")
        run = COCOeval(truth, truth.loadRes(str(file)), "bbox")
        run.params.useCats = 0
        run.evaluate()
        run.accumulate()
        run.summarize()
    assert any_class_ap(match_predictions(predictions, table)) == pytest.approx(run.stats[0], abs=1e-12)


@pytest.mark.parametrize("seed", range(24))
def test_masks_are_judged_as_by_pycocotools(tmp_path, seed):
    """With crowds, empty masks, ties, images without objects or predictions, and areas that are not the pixels'."""
    table, predictions = random_masks(tmp_path, 12, 1 + seed % 4, seed, scores=5 if seed % 2 else 1000, dets=40)
    assert_as_pycocotools(tmp_path, table, predictions, "segm")


def test_a_hundred_detections_of_a_class_count(tmp_path):
    """500 objects of one class, found in the order of their scores."""
    corners = np.random.default_rng(0).uniform(0, 60, (500, 2))
    boxes = np.concatenate([corners, corners + 40], axis=1)
    table = table_of(tmp_path, [[(box, 0) for box in boxes], [(box, 1) for box in boxes[:3]]], draw=False)
    predictions = ground_truth_as_predictions(table)
    predictions[10]["scores"] = torch.linspace(1, 0.1, 500)
    result = assert_as_pycocotools(tmp_path, table, predictions)
    assert result["AR100/cat"] == pytest.approx(0.2)
    most = match_predictions(predictions, table, (1, 10, 500))
    assert coco_row(most)["bbox_AR500"] == pytest.approx(1)


@pytest.mark.parametrize("backend", ["toolkit", "pycocotools"])
@pytest.mark.parametrize(
    ("truth", "found", "expected"),
    [
        # Without predictions all is 0, but what has no objects.
        (
            [(BOX, 0)],
            NOTHING,
            {"bbox_AP": 0, "bbox_AR100": 0, "AP/cat": 0, "AP/dog": None, "bbox_APl": None},
        ),
        ([], NOTHING, {"bbox_AP": None, "AP/cat": None}),
        ([], found_of([BOX], [0], [0.5]), {"bbox_AP": None, "AP/cat": None}),
        ([(BOX, 0, True)], found_of([BOX], [0], [0.5]), {"bbox_AP": None, "AP/cat": None}),
        # A class without objects, of which something is found, is not in the mean.
        (
            [(BOX, 0)],
            found_of([BOX, OTHER], [0, 1], [0.5, 0.9]),
            {"bbox_AP": 1, "AP/cat": 1, "AP/dog": None},
        ),
    ],
    ids=[
        "no predictions",
        "no boxes",
        "found without boxes",
        "only a crowd",
        "a class without boxes",
    ],
)
def test_what_is_not_there_is_0_or_none(tmp_path, capsys, backend, truth, found, expected):
    table = table_of(tmp_path, [truth], draw=False, ids=["img7"])
    result = CocoEvaluator(table, backend).evaluate({"img7": found})
    assert {name: result[name] for name in expected} == expected
    assert capsys.readouterr() == ("", "")  # no progress of the packages


def test_predictions_must_be_of_the_images(tmp_path):
    table = table_of(tmp_path, [[]] * 8, draw=False)
    predictions = ground_truth_as_predictions(table)
    uneven = {
        "boxes": torch.zeros(2, 4),
        "scores": torch.zeros(1),
        "labels": torch.zeros(0),
    }
    with pytest.raises(BadInput, match="13: 2 boxes, 1 scores, 0 labels"):
        CocoEvaluator(table).evaluate(predictions | {13: uneven})
    predictions["stranger"] = predictions.pop(10)
    with pytest.raises(BadInput, match="(?s)1 of 8 images have no prediction, among them 10.*'stranger'"):
        CocoEvaluator(table).evaluate(predictions)
    with pytest.raises(BadInput, match="pycocotools"):
        CocoEvaluator(table, backend="fast")


def test_unusable_predictions_are_left_out_with_a_warning(tmp_path, caplog):
    evaluator = CocoEvaluator(table_of(tmp_path, [[(BOX, 0)]], draw=False))
    good = evaluator.evaluate({10: found_of([BOX], [0], [0.5])})
    assert evaluator.evaluate({10: found_of([BOX, BOX, [float("nan")] * 4], [0, 3, 0], [0.5, 0.9, 0.9])}) == good
    assert "1 predictions have a box or score that is not finite" in caplog.text
    assert "1 predictions have a label outside 0..1" in caplog.text


def test_ground_truth_is_perfect_and_what_is_not_measured_is_told(tmp_path):
    truth = [(BOX, 0), (BOX, 0), (OTHER, 1, True)]  # exact duplicates are found too
    assert check_ground_truth(table_of(tmp_path / "a", [truth, []], draw=False)) == [
        "the validation data: no boxes of 1 of 2 classes (dog); their AP is undefined (null) and left out of the mean"
    ]
    (crowded,) = check_ground_truth(table_of(tmp_path / "b", [[(BOX, 0)] * 120], ("a",), draw=False))
    assert "up to 120 boxes" in crowded
    (empty,) = check_ground_truth(table_of(tmp_path / "c", [[]] * 2, draw=False))
    assert "no boxes to find in 2 images" in empty


def test_boxes_that_cannot_be_found_are_an_error(tmp_path):
    table = table_of(tmp_path, [[(BOX, 0), ([90, 90, 70, 120], 1)]], draw=False)
    with pytest.raises(BadInput, match=r"(?s)not all found.*image 10: box \[90.0, 90.0, 70.0, 120.0\]"):
        check_ground_truth(table)


def test_a_table_has_a_line_for_each_class(tmp_path):
    table = table_of(tmp_path, [[(BOX, 0), (BOX, 1, True)], [(OTHER, 0)]], draw=False)
    result = CocoEvaluator(table).evaluate(ground_truth_as_predictions(table))
    lines = per_class_table(result, table).splitlines()
    assert lines[0].split() == ["class", "images", "boxes", "AP", "AP50", "AR100"]
    assert lines[2].split() == ["cat", "2", "2", "1.000", "1.000", "1.000"]
    assert lines[3].split() == ["dog", "0", "0", "-", "-", "-"]  # its only box is a crowd
    assert lines[-1].split()[:4] == ["all", "2", "2", "1.000"]


NAMES = [
    "cat",
    "cat",
    "cat (1)",
    "line\nbreak",
    "\x1b[31mred",
    "\u6771\u4eac",
    "x" * 1000,
    "e" + "\u0301" * 50,
    "\ud800",
]


def test_names_of_every_kind_in_tables_and_keys(tmp_path):
    table = table_of(tmp_path, [[(BOX, k)] for k in range(len(NAMES))], NAMES, draw=False)
    keys = class_keys(table)
    assert len(set(keys)) == len(NAMES)
    for key in keys:
        assert columns(key) <= 100
        assert "\n" not in key
        assert "\x1b" not in key
    result = CocoEvaluator(table).evaluate(ground_truth_as_predictions(table))
    assert {f"AP/{key}" for key in keys} <= result.keys()
    lines = per_class_table(result, table).splitlines()
    assert len(lines) == len(NAMES) + 3
    assert len({columns(line) for line in lines}) == 1


@pytest.fixture
def masked(tmp_path):
    """Two objects in one box, which only their masks tell apart, and one without a mask, which is a crowd."""
    table = table_of(tmp_path, [[(BOX, 0), (BOX, 0), (OTHER, 0, True)]], draw=False)
    masks = rles_of(pixels_of([10, 10, 60, 30], [10, 30, 60, 60], [110, 30, 130, 50]))
    found = found_of([BOX, BOX, [110, 30, 130, 50]], [0, 0, 0], [0.9, 0.8, 0.95])
    return with_masks(table, [[masks[0], masks[1], None]]), found, masks


def test_masks_and_boxes_are_judged_apart(masked):
    table, found, masks = masked
    evaluator = CocoEvaluator(table)
    right = {10: found | {"masks": masks}}
    result = evaluator.evaluate(right)
    assert result["segm_AP"] == result["segm_AP/cat"] == 1
    assert result["segm_AP/dog"] is None
    assert evaluator.mask_matches.right.tolist() == [False, True, True]
    text = evaluator.describe(result, right)
    assert "mask AP50" in text
    assert "masks:  AP 1.000" in text
    result = evaluator.evaluate({10: found | {"masks": [masks[0], masks[0], masks[2]]}})
    assert result["bbox_AP50"] == 1
    assert result["segm_AP50"] < 0.6


@pytest.mark.parametrize("backend", ["toolkit", "pycocotools"])
def test_an_object_with_a_box_alone_is_judged_by_its_box_and_not_by_masks(tmp_path, backend):
    table = table_of(tmp_path, [[(BOX, 0), (OTHER, 0)]], draw=False)
    masks = rles_of(pixels_of([10, 10, 60, 30], [110, 30, 130, 50]))
    table = with_masks(table, [[masks[0], None]])
    found = found_of([BOX, [110, 30, 130, 50]], [0, 0], [0.9, 0.95])
    evaluator = CocoEvaluator(table, backend)
    result = evaluator.evaluate({10: found | {"masks": masks}})
    assert result["segm_AP"] == 1  # what is found there is not wrong
    nothing_there = found_of([BOX], [0], [0.9])
    result = evaluator.evaluate({10: nothing_there | {"masks": masks[:1]}})
    assert result["segm_AP"] == 1  # and nothing is missing
    assert result["bbox_AR100"] == 0.5


def test_metrics_of_masks_exist_where_both_have_masks(masked, tmp_path):
    """Without any prediction too, so that `eval.metric_for_best` can be checked before training."""
    table, found, masks = masked
    evaluator = CocoEvaluator(table)
    assert evaluator.evaluate({10: NOTHING | {"masks": []}})["segm_AP"] == 0
    assert "segm_AP" not in evaluator.evaluate({10: found})
    assert evaluator.mask_matches is None
    boxes = CocoEvaluator(table_of(tmp_path / "boxes", [[]], draw=False))
    assert "segm_AP" not in boxes.evaluate({10: found | {"masks": masks}})


def test_masks_must_be_of_their_image_and_boxes(masked):
    table, found, masks = masked
    evaluate = CocoEvaluator(table).evaluate
    with pytest.raises(
        BadInput,
        match=r"image 10: its mask has 7 x 9 pixels \(height x width\); expected 120 x 160",
    ):
        evaluate({10: found | {"masks": [Rle((7, 9), b"o1"), *masks[1:]]}})
    with pytest.raises(BadInput, match="image 10: 3 boxes, 2 masks"):
        evaluate({10: found | {"masks": masks[:2]}})


def test_a_crowd_without_a_mask_is_its_box(masked):
    table, found, masks = masked
    matched = match_predictions({10: found | {"masks": masks}}, table)
    by_mask = match_masks(matched, masks_of_truth(table))
    of_crowd = by_mask.crowd[by_mask.gt]
    assert by_mask.iou[of_crowd].tolist() == [1]  # the share of the prediction that is in it
