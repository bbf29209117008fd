"""Why AP is 0: mistakes that are named, and when it is too early to tell."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from report_data import ground_truth_as_predictions, table_of
from torchvision.ops import box_convert

from toolkit.evaluation.coco import CocoEvaluator
from toolkit.tools.report.explain import explain_zero_ap

SIZE = torch.tensor([640, 480, 640, 480])


def random_boxes(rng, count):
    corners = rng.uniform(0, 300, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(4, 180, (count, 2))], axis=1).astype(np.float32)


def random_table(folder, images, boxes):
    rng = np.random.default_rng(3)
    truth = []
    for _ in range(images):
        labels = rng.integers(0, 2, boxes).tolist()
        truth.append(list(zip(random_boxes(rng, boxes), labels, strict=True)))
    return table_of(folder, truth, ("a", "b", "c"), draw=False, size=(480, 640))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return random_table(tmp_path_factory.mktemp("zero"), 10, 5)


def to(form: str, boxes):
    return box_convert(boxes, in_fmt="xyxy", out_fmt=form)


def changed_boxes(words, boxes):
    match words:
        case "normalised (0..1, xyxy)":
            return boxes / SIZE
        case "normalised (0..1, cxcywh":
            return to("cxcywh", boxes) / SIZE
        case "look like xywh":
            return to("xywh", boxes)
        case "look like cxcywh":
            return to("cxcywh", boxes)
        case "look like yxyx" | "scores are equal" | "collapsed to one class":
            return boxes[:, [1, 0, 3, 2]]
        case "another scale":
            return boxes * 0.37
        case "512 x 512":
            return boxes * 512 / SIZE
        case "have no width or height":
            return boxes[:, [2, 3, 0, 1]]
        case "outside their image":
            return boxes + 5000 * (1 + torch.arange(len(boxes)))[:, None]
        case "boxes are tiny":
            return boxes[:, [0, 1, 0, 1]] + torch.tensor([0, 0, 2.0, 2.0])
        case "not finite":
            return boxes * torch.nan
        case "not been trained long enough":
            return torch.from_numpy(random_boxes(np.random.default_rng(5), len(boxes)))
    return boxes


def changed_labels(words, labels):
    match words:
        case "off by one":
            return labels + 1
        case "labels are outside":
            return labels + 3
        case "collapsed to one class":
            return labels * 0
        case "only 0% with their class":
            return 1 - labels
    return labels


def changed_scores(words, scores):
    match words:
        case "no score is above 0":
            return scores * 0
        case "scores are equal":
            return scores * 0 + 0.3
    return scores


CORRUPTIONS = [
    "normalised (0..1, xyxy)",
    "normalised (0..1, cxcywh",
    "look like xywh",
    "look like cxcywh",
    "look like yxyx",
    "another scale",
    "512 x 512",
    "have no width or height",
    "outside their image",
    "boxes are tiny",
    "not finite",
    "not been trained long enough",
    "no score is above 0",
    "scores are equal",
    "off by one",
    "labels are outside",
    "collapsed to one class",
    "only 0% with their class",
]


@pytest.mark.parametrize("words", CORRUPTIONS)
def test_a_corruption_is_named(table, words):
    predictions = ground_truth_as_predictions(table)
    rng = np.random.default_rng(0)
    for found in predictions.values():
        scores = torch.from_numpy(rng.uniform(0.1, 0.9, len(found["scores"])))
        boxes = found["boxes"] + torch.from_numpy(rng.normal(0, 1.0, found["boxes"].shape))
        found["boxes"] = changed_boxes(words, boxes)
        found["labels"] = changed_labels(words, found["labels"])
        found["scores"] = changed_scores(words, scores)
    causes = explain_zero_ap(predictions, table)
    assert any(words in cause for cause in causes), causes
    assert len(causes) <= 3


def in_another_format(table, factor=1.0, scores=1.0) -> dict:
    predictions = ground_truth_as_predictions(table)
    for found in predictions.values():
        found["boxes"] = to("cxcywh", found["boxes"]) * factor
        found["scores"] = torch.linspace(0.1, 0.9, len(found["scores"])) * scores
    return predictions


def test_evidence_takes_steps_objects_and_scores(table, tmp_path):
    found = in_another_format(table)
    for step in (5000, None):
        assert "look like cxcywh" in explain_zero_ap(found, table, step)[0]
    assert explain_zero_ap(found, table, step=30)[0].startswith("too early to tell: 30 optimizer steps")
    assert "too early" in CocoEvaluator(table).describe({"bbox_AP": 0.0}, found, 30).splitlines()[-1]
    unsure = in_another_format(table, scores=0.01)
    assert "too early to tell: the highest score" in explain_zero_ap(unsure, table)[0]
    few = random_table(tmp_path, 3, 6)
    assert "too early to tell: 18 objects" in explain_zero_ap(in_another_format(few), few)[-1]


def test_what_needs_no_evidence_is_said_at_once(table, tmp_path):
    broken = in_another_format(table, factor=torch.nan)
    assert "not finite" in explain_zero_ap(broken, table, step=30)[0]
    empty = {}
    for image_id, found in ground_truth_as_predictions(table).items():
        empty[image_id] = {key: value[:0] for key, value in found.items()}
    assert "no image has a single prediction" in explain_zero_ap(empty, table)[0]
    assert "no ground-truth boxes" in explain_zero_ap({}, random_table(tmp_path, 1, 0))[0]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), queries=st.sampled_from([20, 300]), spread=st.floats(0, 0.1))
def test_a_detector_that_has_learned_nothing_has_no_mistake(table, seed, queries, spread):
    """Hundreds of boxes, nearly the same in every image: some lie on each object in some format."""
    rng = np.random.default_rng(seed)
    boxes = to("cxcywh", torch.from_numpy(random_boxes(rng, queries))).numpy()
    scores = rng.uniform(0.1, 0.3, queries)
    same = {}
    for image_id in table.image_ids().tolist():
        moved = boxes * (1 + rng.uniform(-spread, spread, boxes.shape))
        same[image_id] = {
            "boxes": moved,
            "scores": scores,
            "labels": rng.integers(0, 3, queries),
        }
    for cause in explain_zero_ap(same, table):
        for words in (
            "look like",
            "look normalised",
            "another scale",
            "off by one",
            "another order",
        ):
            assert words not in cause
