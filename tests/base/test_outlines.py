"""Outlines of pixels are drawn as these pixels again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from mask_data import BLOCK, SIZE_HW, SQUARE

from toolkit.base.masks import bitmap, rle
from toolkit.base.outlines import one_ring, outlines, polygons_of

sizes = st.tuples(st.integers(1, 14), st.integers(1, 14))
pictures = sizes.flatmap(lambda size: arrays(np.uint8, size, elements=st.integers(0, 1)))


@settings(deadline=None, max_examples=150)
@given(pictures)
def test_outlines_are_the_pixels_again_also_as_one_ring(pixels):
    size_hw = pixels.shape
    rings = outlines(pixels)
    assert np.array_equal(bitmap(rings or None, size_hw), pixels)
    ring = one_ring(rings, size_hw)
    assert (ring is None) == (not pixels.any())
    if ring is not None:
        assert np.array_equal(bitmap((ring,), size_hw), pixels)


def test_polygons_stay_as_they_are_and_run_lengths_become_outlines():
    square = (np.array(SQUARE, float).reshape(-1, 2),)
    assert polygons_of(square, SIZE_HW) is square
    assert polygons_of(None, SIZE_HW) == ()
    assert np.array_equal(bitmap(polygons_of(rle(square, SIZE_HW), SIZE_HW), SIZE_HW), BLOCK)


def test_polygons_that_overlap_are_one_ring_of_their_pixels():
    square = np.array(SQUARE, float).reshape(-1, 2)
    both = (square, square + 3)
    assert np.array_equal(bitmap((one_ring(both, SIZE_HW),), SIZE_HW), bitmap(both, SIZE_HW))
