"""Matching and sampling of anchors and proposals: torchvision's, but for crowds and objects that nothing touches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from rows import boxes as numbered
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from toolkit.detectors.faster_rcnn.criterion import BACKGROUND, IGNORED, covered_share, match_candidates, sample, shares

corner = st.integers(0, 40)
side = st.integers(1, 30)


@st.composite
def boxes(draw):
    """(N, 4) float32 xyxy, not empty."""
    box = st.tuples(corner, corner, side, side)
    rows = draw(st.lists(box, min_size=1, max_size=12))
    xywh = torch.tensor(rows, dtype=torch.float32)
    corners, sides = xywh.split(2, dim=1)
    return torch.cat([corners, corners + sides], dim=1)


@given(boxes(), boxes(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_matches_are_torchvisions(candidates, objects, best_of_each_box):
    no_crowd = torch.zeros(len(objects))
    ours = match_candidates(candidates, objects, no_crowd, 0.6, 0.3, best_of_each_box=best_of_each_box)
    iou = box_iou(objects, candidates)
    touched = iou.amax(1) > 0
    if best_of_each_box and not touched.all():  # torchvision takes all candidates for an object that none touches
        close = iou.amax(0) >= 0.6
        assert (ours[close] >= 0).all()
        assert touched.any() or (ours == BACKGROUND).all()
    else:
        matcher = Matcher(0.6, 0.3, best_of_each_box)
        assert torch.equal(ours, matcher(iou))


def best_matches(candidates, objects, crowd, high: float, low: float):
    """Also the best candidate of each object."""
    return match_candidates(candidates, objects, crowd, high, low, best_of_each_box=True)


@given(boxes(), boxes())
@settings(max_examples=40, deadline=None)
def test_what_lies_in_a_crowd_is_neither_positive_nor_negative(candidates, objects):
    crowd = torch.arange(len(objects)) == 0
    match = best_matches(candidates, objects, crowd, 0.5, 0.3)
    (shares_in_crowd,) = covered_share(candidates, objects[:1])
    covered = shares_in_crowd >= 0.7
    assert (match[covered] == IGNORED).all()
    without = best_matches(candidates, objects[1:], crowd[1:], 0.5, 0.3)
    expected = torch.where(without >= 0, without + 1, without)
    assert torch.equal(match[~covered], expected[~covered])


@pytest.mark.parametrize(
    ("candidate", "box", "crowd", "expected"),
    [
        pytest.param("0 0 10 10", "0 0 10 10", 1, IGNORED, id="a crowd itself"),
        pytest.param("0 0 100 100", "0 0 10 10", 1, BACKGROUND, id="much larger than the crowd"),
        pytest.param("0 0 10 10", "50 50 60 60", 0, BACKGROUND, id="nothing touches the object"),
    ],
)
def test_crowds_and_objects_that_nothing_touches_are_never_matched(candidate, box, crowd, expected):
    crowds = torch.tensor([crowd])
    match = best_matches(numbered(candidate), numbered(box), crowds, 0.7, 0.3)
    assert match.tolist() == [expected]


@pytest.mark.parametrize(
    ("crowd", "high", "low", "expected"),
    [
        pytest.param(0, 0.5, 0.3, 0, id="as high as asked"),
        pytest.param(0, 0.9, 0.5, IGNORED, id="not below the low one"),
        pytest.param(1, 0.9, 0.8, IGNORED, id="half of it in a crowd"),
    ],
)
def test_thresholds_belong_to_the_upper_side(crowd, high, low, expected):
    match = match_candidates(
        numbered("0 0 10 10"),
        numbered("0 0 10 5"),
        torch.tensor([crowd]),
        high,
        low,
        crowd_overlap=0.5,
    )
    assert match.tolist() == [expected]


def test_candidates_far_from_every_object_are_ignored_unless_there_is_none():
    candidates = numbered("0 0 4 4, 8 8 12 12")
    objects = numbered("0 0 4 3").expand(2, 1, 4)
    padding = torch.tensor([[False], [True]])
    with_object, without_objects = match_candidates(
        candidates,
        objects,
        None,
        0.9,
        0.8,
        lowest=0.1,
        padding=padding,
    )
    assert with_object.tolist() == [BACKGROUND, IGNORED]
    assert without_objects.tolist() == [BACKGROUND, BACKGROUND]


MATCHES = st.sampled_from([IGNORED, BACKGROUND, 0, 1])


@given(
    st.lists(MATCHES, min_size=1, max_size=40),
    st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_samples_are_as_many_as_asked_for_positives_first(rows, size):
    match = torch.tensor(rows)
    order = torch.rand(len(rows))
    index, chosen = sample(match, size, 0.25, order)
    is_positive = match >= 0
    is_negative = match == BACKGROUND
    positives = min(int(size * 0.25), int(is_positive.sum()))
    negatives = min(size - positives, int(is_negative.sum()))
    assert len(index) == min(size, len(rows))
    assert len(set(index.tolist())) == len(index)
    assert (chosen >= 0).sum() == positives
    assert (chosen == BACKGROUND).sum() == negatives
    kept = chosen != IGNORED
    assert torch.equal(chosen[kept], match[index[kept]])
    total = shares(chosen).sum()
    assert float(total) == approx(float(kept.any()))


def test_samples_are_drawn_evenly():
    match = torch.tensor([0] * 6 + [BACKGROUND] * 10)
    drawn = torch.zeros(16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        order = torch.rand(16, generator=generator)
        index, _ = sample(match, 8, 0.25, order)
        drawn[index] += 1
    shares_of_draws = (drawn / 2000).tolist()
    assert shares_of_draws[:6] == approx([2 / 6] * 6, abs=0.05)
    assert shares_of_draws[6:] == approx([6 / 10] * 10, abs=0.05)
