"""Ticks of the sizes that check_data.py draws; `test_program.py` draws the pictures."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.tools.doctor.pictures import ticks_of


@given(st.floats(1e-3, 1e4), st.floats(1.2, 1e5))
def test_ticks_do_not_overlap(low, ratio):
    ticks = ticks_of(low, low * ratio)
    places = [math.log(tick / low) / math.log(ratio) for tick in ticks]
    assert len(ticks) >= 3
    assert all(0 <= place <= 1 for place in places)
    assert min(after - before for before, after in pairwise(places)) > 0.08


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (100, 400, [100, 150, 200, 300, 400]),
        (0.2, 5, [0.2, 0.3, 0.5, 0.7, 1, 2, 3, 5]),
        (3, 700, [5, 10, 20, 50, 100, 200, 500]),
        (7.1234, 7.1234, [7.12]),
    ],
)
def test_ticks_are_plain_numbers(low, high, ticks):
    assert ticks_of(low, high) == ticks
