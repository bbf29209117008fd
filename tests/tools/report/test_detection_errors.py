"""Kinds of mistakes, what each costs, and which objects are found."""

from pytest import approx
from report_data import matched_of, random_case, table_of

from toolkit.evaluation.matches import match_predictions
from toolkit.tools.report.detection_errors import strata, tide_errors

BOX = [0, 0, 40, 40]
OTHER = [60, 60, 100, 100]
DOG = [100, 0, 140, 40]
MISTAKES = {
    "duplicate": (BOX, 0, 0.8),
    "localisation": ([60, 60, 100, 75], 0, 0.7),
    "background": ([0, 80, 20, 110], 0, 0.6),
    "class": (DOG, 0, 0.5),
    "both": ([100, 0, 140, 12], 0, 0.4),
}
HALF = 51 / 101  # AP of a class of two boxes of which one is found: 51 of 101 points of recall with precision 1


def errors_of(table, found):
    return tide_errors(matched_of(table, [found]))


def test_kinds_of_mistakes_and_their_cost_by_hand(tmp_path):
    """Two boxes of a class, of which one is found. Each other prediction is one kind of mistake."""
    image = [(BOX, 0), (OTHER, 0), (DOG, 1)]
    table = table_of(tmp_path, [image], draw=False)
    errors = errors_of(table, [(BOX, 0, 0.9), *MISTAKES.values()])
    for number, kind in enumerate(MISTAKES, start=1):
        assert errors.of(kind).tolist() == [number]
    assert not errors.missed.any()  # the two others would be found by mended predictions
    ap50 = HALF / 2  # the class dog has 0
    assert errors.ap50 == approx(ap50)
    # With its place mended: right, wrong, right, which are 51 points at 1 and 50 at 2/3.
    mended = HALF + 50 / 101 * 2 / 3
    expected = {
        "localisation": mended / 2 - ap50,
        "class": 1 / 2,  # then the one dog is found
        "duplicate": 0,
        "background": 0,
        "both": 0,
        "false negatives": 1 / 2 - ap50,
    }
    for kind, cost in expected.items():
        assert errors.cost[kind] == approx(cost)


def test_a_box_that_nothing_is_near_is_missed(tmp_path):
    image = [(BOX, 0), (OTHER, 0)]
    table = table_of(tmp_path, [image], ("a",), draw=False)
    errors = errors_of(table, [(BOX, 0, 0.9)])
    assert errors.missed.tolist() == [False, True]
    assert errors.cost["missed"] == approx(1 - HALF)


def test_costs_of_mistakes_are_those_of_tidecv(tmp_path):
    """`tidecv` 1.0.1, of TIDE's authors, on the same files; with crowds, without equal scores, which it orders else."""
    table, predictions = random_case(tmp_path, images=100, classes=3, scores=10**9)
    matched = match_predictions(predictions, table)
    errors = tide_errors(matched)
    expected = {
        "class": 1.265983011,
        "localisation": 7.450112085,
        "both": 0.912947142,
        "duplicate": 1.476802122,
        "background": 10.765734586,
        "missed": 6.168392193,
        "false positives": 45.770900895,
        "false negatives": 9.593259957,
    }
    assert 100 * errors.ap50 == approx(18.91556775, abs=1e-6)
    percent = {kind: 100 * cost for kind, cost in errors.cost.items()}
    assert percent == approx(expected, abs=1e-6)


def test_recall_by_what_the_object_is_like(tmp_path):
    """Four boxes: the first two overlap, the others hardly touch; the first is found, the third with a low score."""
    first = [0, 0, 40, 40]
    second = [20, 20, 60, 70]
    third = [100, 60, 120, 80]
    fourth = [119, 60, 139, 80]
    image = [(box, 0) for box in (first, second, third, fourth)]
    table = table_of(tmp_path, [image], ("a",), draw=False)
    matched = matched_of(table, [[(first, 0, 0.9), (third, 0, 0.3)]])
    groups = {}
    for part in strata(matched, 0.5):
        name = f"{part.topic}: {part.name}"
        assert name not in groups
        groups[name] = (part.boxes, part.recall, part.recall_at_any_score)
    assert groups == {
        "size in pixels: small (below 32²)": (2, 0, 0.5),
        "size in pixels: medium (32² to 96²)": (2, 0.5, 0.5),
        "boxes that overlap it: none": (2, 0, 0.5),
        "boxes that overlap it: 1": (2, 0.5, 0.5),
        "boxes in the image: 2 to 5": (4, 0.25, 0.5),
        "edge of the image: cut off": (1, 1, 1),
        "edge of the image: not cut off": (3, 0, 1 / 3),
        "place in the image: top left": (1, 1, 1),
        "place in the image: middle left": (1, 0, 0),
        "place in the image: middle right": (2, 0, 0.5),
    }
