"""Boxes that are probably annotated wrongly."""

import numpy as np
import torch
from report_data import matched_of, table_of, three_corners

from toolkit.base.box_ops import pairwise_iou
from toolkit.evaluation.matches import match_predictions
from toolkit.tools.report.suspects import suspects


def simulated(boxes, rng):
    """What a detector finds that misses 2 % and confuses 2 % of all objects, and the boxes of these."""
    labels = np.arange(3)
    sides = np.tile(boxes[:, 2:] - boxes[:, :2], 2)
    seen = rng.random(3) > 0.02
    predicted = np.where(rng.random(3) < 0.98, labels, rng.integers(0, 3, 3))
    moved = boxes + rng.normal(0, 0.04, boxes.shape) * sides
    found = {
        "boxes": moved[seen],
        "labels": predicted[seen],
        "scores": rng.beta(12, 2, 3)[seen],
    }
    return found, boxes[~seen | (predicted != labels)]


def annotated(boxes, rng):
    """The boxes as somebody annotates them who makes 5 % mistakes, and the boxes of these."""
    objects = []
    mistakes = []
    for label, box in enumerate(boxes):
        kind = rng.choice(["", "removed", "moved", "relabelled"], p=[0.95, 0.02, 0.015, 0.015])
        if kind:
            mistakes.append(box)
        shift = 0.4 * np.tile(box[2:] - box[:2], 2) * (kind == "moved")
        if kind != "removed":
            objects.append((box + shift, (label + (kind == "relabelled")) % 3))
    return objects, mistakes


def near(matched, suspect, mistakes) -> set[int]:
    """Numbers of the mistakes that the suspect's prediction or box overlaps."""
    places = torch.tensor(np.array([box for _, box in mistakes]))
    numbers = set()
    for boxes, row in ((matched.found, suspect.det), (matched.truth, suspect.gt)):
        if row >= 0:
            (overlaps,) = pairwise_iou(torch.tensor(boxes.xyxy[row : row + 1]), places)
            numbers |= {n for n, (image, _) in enumerate(mistakes) if image == suspect.image and overlaps[n] > 0.15}
    return numbers


def test_planted_mistakes_of_the_annotation_are_listed(tmp_path):
    rng = np.random.default_rng(0)
    found = {}
    images = []
    planted = []
    of_detector = []
    for number, objects in enumerate(three_corners(480)):
        boxes = np.array([box for box, _ in objects], np.float32)
        found[10 + number], misses = simulated(boxes, rng)
        objects, mistakes = annotated(boxes, rng)
        images.append(objects)
        planted += [(number, box) for box in mistakes]
        of_detector += [(number, box) for box in misses]
    matched = match_predictions(found, table_of(tmp_path, images, ("a", "b", "c"), draw=False))
    listed = suspects(matched)
    hits = [near(matched, suspect, planted) for suspect in listed]
    is_right = [bool(numbers) for numbers in hits]
    has_prediction = [suspect.det >= 0 for suspect in listed]
    assert has_prediction == sorted(has_prediction, reverse=True)
    assert len(set().union(*hits)) / len(planted) > 0.9
    assert np.mean(is_right) > 0.5
    assert np.mean(is_right[: sum(has_prediction)]) > 0.75
    # All that is listed beside them are the detector's own misses, which come last, and confusions.
    assert 20 < len(of_detector) < 80
    for suspect, good in zip(listed, is_right, strict=True):
        assert good or near(matched, suspect, of_detector)


def test_a_moved_box_and_what_was_found_in_its_place_are_one_suspect(tmp_path):
    right = [10, 10, 30, 50]
    seen = [10, 110, 30, 150]
    moved = [28, 110, 48, 150]
    table = table_of(
        tmp_path,
        [[(right, 0)]] * 25 + [[(right, 0), (moved, 0)]],
        draw=False,
        size=(200, 200),
    )
    matched = matched_of(table, [[(right, 0, 0.9)]] * 25 + [[(right, 0, 0.9), (seen, 0, 0.9)]])
    (suspect,) = suspects(matched)
    assert (suspect.kind, suspect.image, suspect.det, suspect.gt) == ("place", 25, 26, 26)
