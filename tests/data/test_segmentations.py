"""Masks as annotation files write them: read, written again, cut to the picture, and faults in words."""

import json

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
sizes = st.tuples(st.integers(1, 14), st.integers(1, 14))
pictures = sizes.flatmap(lambda size: arrays(np.uint8, size, elements=st.integers(0, 1)))


@settings(deadline=None, max_examples=150)
@given(pictures)
def test_run_lengths_are_the_pixels_again(pixels):
    for segmentation in (compressed(pixels), uncompressed(pixels)):
        shape, faults = shape_of(segmentation)
        assert not faults
        assert np.array_equal(bitmap(shape, pixels.shape), pixels)
    assert decompressed(compressed(pixels)["counts"]).tolist() == uncompressed(pixels)["counts"]


def test_written_masks_keep_every_bit():
    ring = np.random.default_rng(0).uniform(0, 30, (5, 2))
    for shape in (
        (ring, ring + 0.1),
        None,
        shape_of(compressed(BLOCK))[0],
        (ring[:3],),
    ):
        again, faults = shape_of(json.loads(json.dumps(to_segmentation(shape))))
        assert not faults
        if isinstance(shape, tuple) and not isinstance(shape, Rle):
            assert all(map(np.array_equal, again, shape))
        else:
            assert again == shape
    assert to_segmentation((np.array([[1.0, 2], [3, 4], [5.5, 6]]),)) == [[1, 2, 3, 4, 5.5, 6]]


@pytest.mark.parametrize(
    ("segmentation", "said"),
    [
        ([[1, 2, 3, 4]], "2 points; expected at least three"),
        ([[1, 2, 3, 4, 5, 6, 7]], "7 numbers; expected pairs"),
        ([[1, 2, "3", 4, 5, 6]], "not a number"),
        ([[1, 2, float("nan"), 4, 5, 6]], "not finite"),
        ([[float("nan"), 2, 1, 4, 5, 6]], "not finite"),
        ([[1, 2, 3, 4, 10**400, 6]], "far outside any picture"),
        (["x"], "expected a list"),
        ("x", "expected polygons or run lengths"),
        ({"counts": [1]}, "`size` of the run lengths"),
        ({"size": [30, 40], "counts": None}, "`counts` of the run lengths"),
        ({"size": [30, 40], "counts": [5, 6]}, "cover 11 pixels; their size 30 x 40 has 1200"),
        ({"size": [30, 40], "counts": [-5, 1205]}, "cannot be read"),
        ({"size": [30, 40], "counts": [0.5, 1199.5]}, "cannot be read"),
        ({"size": [30, 40], "counts": [float("nan"), 1200]}, "cannot be read"),
        ({"size": [30, 40], "counts": [True, 1199]}, "cannot be read"),
        ({"size": [30, 40], "counts": "no code!"}, "cannot be read"),
        ({"size": [30, 40], "counts": COUNTS[:-1]}, "cannot be read"),
        ({"size": [10, 10], "counts": COUNTS}, "cover 1200 pixels"),
        ({"size": [2**17, 2**17], "counts": COUNTS}, "more than a picture can have"),
        ("x" * 5000, "expected polygons or run lengths"),
        ({"size": list(range(5000))}, "`size` of the run lengths"),
        ({"size": [30, 40], "counts": {"x": "y" * 5000}}, "`counts` of the run lengths"),
    ],
)
def test_the_fault_of_a_mask_is_told_in_a_line(segmentation, said):
    shape, (fault,) = shape_of(segmentation)
    assert shape is None
    assert said in fault
    assert len(fault) < 200


def test_a_faulty_polygon_leaves_the_others():
    shape, faults = shape_of([SQUARE, [1, 2]])
    assert faults == ["polygon 2 of 2 has 1 point; expected at least three"]
    assert np.array_equal(bitmap(shape, SIZE_HW), BLOCK)
    assert np.array_equal(bitmap(shape_of(SQUARE)[0], SIZE_HW), BLOCK)  # without the outer list


def test_run_lengths_that_are_written_as_floats_are_whole_numbers():
    runs = uncompressed(BLOCK)
    as_floats = {"size": [30.0, 40.0], "counts": [float(run) for run in runs["counts"]]}
    assert shape_of(as_floats) == shape_of(runs) == (rle(shape_of([SQUARE])[0], SIZE_HW), [])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from(["size", "counts", "x"]), inner),
)
SIZES = st.lists(st.integers(1, 2**34), min_size=2, max_size=2) | st.just([5, 6])
CODES = st.text(st.characters(codec="ascii"), max_size=12) | st.lists(st.integers(-3, 2**70), max_size=4)


@settings(deadline=None, max_examples=150)
@given(ANYTHING | st.fixed_dictionaries({"size": SIZES, "counts": CODES}))
def test_whatever_is_in_a_file_is_a_mask_that_can_be_drawn_or_a_fault(segmentation):
    shape, faults = shape_of(segmentation)
    assert shape is not None or faults or segmentation in (None, [])
    if isinstance(shape, Rle):
        assert bitmap(shape, shape.size_hw).shape == shape.size_hw
    elif shape is not None:
        bitmap(clipped(shape, SIZE_HW) or None, SIZE_HW)


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
    angles = (np.arange(corners) + rng.uniform(0, 0.4, corners)) * 2 * np.pi / corners
    ring = 150 + rng.uniform(5, 50, (corners, 1)) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    size_hw = [1000, 1000]
    size_hw[1 - side] = border  # the right or the lower border, and the one opposite of it
    shift = np.zeros(2)
    shift[side] = border
    parts = clipped((ring,), size_hw) + clipped((ring - shift,), (1000, 1000))
    assert all(part.min() >= -1e-9 for part in parts)
    assert polygon_areas(parts).sum() == pytest.approx(polygon_areas([ring])[0], abs=1e-6)
    assert clipped((ring,), (300, 300))[0] is ring
