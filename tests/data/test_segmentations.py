"""Masks as annotation files write them: read, written again, cut to the picture, and faults in words."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from mask_data import BLOCK, SIZE_HW, SQUARE, compressed, uncompressed

from toolkit.base.masks import Rle, bitmap, rle
from toolkit.data.segmentations import (
    clipped,
    decompressed,
    polygon_areas,
    shape_of,
    to_segmentation,
)

COUNTS = compressed(BLOCK)["counts"]
SIDES = st.integers(1, 14)
BITS = st.integers(0, 1)
pictures = st.tuples(SIDES, SIDES).flatmap(lambda size: arrays(np.uint8, size, elements=BITS))


@settings(deadline=None, max_examples=150)
@given(pictures)
def test_run_lengths_are_the_pixels_again(pixels):
    as_text = compressed(pixels)
    as_numbers = uncompressed(pixels)
    for segmentation in (as_text, as_numbers):
        shape, faults = shape_of(segmentation)
        assert not faults
        again = bitmap(shape, pixels.shape)
        assert np.array_equal(again, pixels)
    runs = decompressed(as_text["counts"])
    assert runs.tolist() == as_numbers["counts"]


def written_and_read(shape):
    text = json.dumps(to_segmentation(shape))
    again, faults = shape_of(json.loads(text))
    assert not faults
    return again


def test_written_masks_keep_every_bit():
    ring = np.random.default_rng(0).uniform(0, 30, (5, 2))
    polygons = (ring, ring + 0.1)
    for shape in (polygons, polygons[:1]):
        again = written_and_read(shape)
        assert all(map(np.array_equal, again, shape))
    run_lengths, _ = shape_of(compressed(BLOCK))
    for shape in (run_lengths, None):
        assert written_and_read(shape) == shape
    triangle = np.array([[1.0, 2], [3, 4], [5.5, 6]])
    (written,) = to_segmentation((triangle,))
    assert written == [1, 2, 3, 4, 5.5, 6]


FAULTY = [
    ([[1, 2, 3, 4]], "2 points; expected at least three"),
    ([[1, 2, 3, 4, 5, 6, 7]], "7 numbers; expected pairs"),
    ([[1, 2, "3", 4, 5, 6]], "not a number"),
    ([[1, 2, math.nan, 4, 5, 6]], "not finite"),
    ([[math.nan, 2, 1, 4, 5, 6]], "not finite"),
    ([[1, 2, 3, 4, 10**400, 6]], "far outside any picture"),
    (["x"], "expected a list"),
    ("x", "expected polygons or run lengths"),
    ("x" * 5000, "expected polygons or run lengths"),
    ({"counts": [1]}, "`size` of the run lengths"),
    ({"size": list(range(5000))}, "`size` of the run lengths"),
    ({"size": [10, 10], "counts": COUNTS}, "cover 1200 pixels"),
    ({"size": [2**17, 2**17], "counts": COUNTS}, "more than a picture can have"),
]
# of a mask of 30 x 40 pixels
FAULTY_COUNTS = [
    (None, "`counts` of the run lengths"),
    ({"x": "y" * 5000}, "`counts` of the run lengths"),
    ([5, 6], "cover 11 pixels; their size 30 x 40 has 1200"),
    ([-5, 1205], "cannot be read"),
    ([0.5, 1199.5], "cannot be read"),
    ([math.nan, 1200], "cannot be read"),
    ([True, 1199], "cannot be read"),
    ("no code!", "cannot be read"),
    (COUNTS[:-1], "cannot be read"),
]


def check_fault(segmentation, said: str) -> None:
    shape, (fault,) = shape_of(segmentation)
    assert shape is None
    assert said in fault
    assert len(fault) < 200


@pytest.mark.parametrize(("segmentation", "said"), FAULTY)
def test_the_fault_of_a_mask_is_told_in_a_line(segmentation, said):
    check_fault(segmentation, said)


@pytest.mark.parametrize(("counts", "said"), FAULTY_COUNTS)
def test_the_fault_of_run_lengths_is_told_in_a_line(counts, said):
    segmentation = {"size": [30, 40], "counts": counts}
    check_fault(segmentation, said)


def test_a_faulty_polygon_leaves_the_others():
    shape, faults = shape_of([SQUARE, [1, 2]])
    assert faults == ["polygon 2 of 2 has 1 point; expected at least three"]
    assert np.array_equal(bitmap(shape, SIZE_HW), BLOCK)
    without_outer_list, _ = shape_of(SQUARE)
    assert np.array_equal(bitmap(without_outer_list, SIZE_HW), BLOCK)


def test_run_lengths_that_are_written_as_floats_are_whole_numbers():
    runs = uncompressed(BLOCK)
    counts = list(map(float, runs["counts"]))
    as_floats = {"size": [30.0, 40.0], "counts": counts}
    polygon, _ = shape_of([SQUARE])
    expected = rle(polygon, SIZE_HW)
    assert shape_of(runs) == (expected, [])
    assert shape_of(as_floats) == (expected, [])


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)
KEYS = st.sampled_from(["size", "counts", "x"])
ANYTHING = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(KEYS, inner),
)
SIZES = st.lists(st.integers(1, 2**34), min_size=2, max_size=2)
TEXTS = st.text(st.characters(codec="ascii"), max_size=12)
NUMBERS = st.lists(st.integers(-3, 2**70), max_size=4)
RUN_LENGTHS = st.fixed_dictionaries(
    {
        "size": SIZES | st.just([5, 6]),
        "counts": TEXTS | NUMBERS,
    }
)


@settings(deadline=None, max_examples=150)
@given(ANYTHING | RUN_LENGTHS)
def test_whatever_is_in_a_file_is_a_mask_that_can_be_drawn_or_a_fault(segmentation):
    shape, faults = shape_of(segmentation)
    assert shape is not None or faults or segmentation in (None, [])
    if isinstance(shape, Rle):
        pixels = bitmap(shape, shape.size_hw)
        assert pixels.shape == shape.size_hw
    elif shape is not None:
        inside = clipped(shape, SIZE_HW)
        bitmap(inside or None, SIZE_HW)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(3, 30),
    st.floats(105, 195),
    st.sampled_from([0, 1]),
)
def test_the_parts_of_a_polygon_on_both_sides_of_a_border_have_its_area(seed, corners, border, side):
    rng = np.random.default_rng(seed)
    # Less than half a turn apart: else the last edge can cross others, and the area has no one meaning.
    turns = (np.arange(corners) + rng.uniform(0, 0.4, corners)) / corners
    angles = 2 * np.pi * turns
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    radii = rng.uniform(5, 50, (corners, 1))
    ring = 150 + radii * directions
    size_hw = [1000, 1000]
    size_hw[1 - side] = border  # the right or the lower border, and the one opposite of it
    shifted = ring.copy()
    shifted[:, side] -= border
    parts = clipped((ring,), size_hw)
    parts += clipped((shifted,), (1000, 1000))
    for part in parts:
        assert part.min() >= -1e-9
    (area,) = polygon_areas([ring])
    assert polygon_areas(parts).sum() == pytest.approx(area, abs=1e-6)
    (whole,) = clipped((ring,), (300, 300))
    assert whole is ring
