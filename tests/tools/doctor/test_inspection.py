"""Findings of a data set that concern its boxes and its copies; `test_program.py` has them from end to end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolkit.tools.doctor import inspection
from toolkit.tools.doctor.inspection import near_boxes

corner = st.integers(0, 30)
boxes_of_classes = st.lists(st.tuples(corner, corner, st.integers(1, 9), st.integers(0, 1)), max_size=7)


@given(boxes_of_classes)
def test_boxes_given_twice_are_dropped_but_one(items):
    """With whole numbers of at most 9, an IoU above 0.9 is the same box."""
    boxes = np.array([(x, y, x + side, y + side) for x, y, side, _ in items], np.float32).reshape(-1, 4)
    labels = np.array([label for *_, label in items], np.int64)
    pairs = near_boxes(boxes, labels, np.ones(len(boxes), bool))
    gone = [second for _, second in pairs]
    assert len(gone) == len(set(gone))
    assert not set(gone) & {first for first, _ in pairs}
    left = [item for index, item in enumerate(items) if index not in gone]
    assert len(left) == len(set(items))


def test_crowds_are_not_given_twice():
    boxes = np.array([[0, 0, 9, 9]] * 3, np.float32)
    plain = np.array([True, False, True])
    assert near_boxes(boxes, np.zeros(3, np.int64), plain) == [(0, 2)]


def test_copies_are_as_many_pairs_as_copies():
    pairs = list(inspection._copies([0, 1, 2, 3, 4], ["train", "train", "val", "val", "test"]))
    assert pairs == [(0, 1), (2, 3), (0, 2), (0, 4), (2, 4)]
