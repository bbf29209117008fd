"""Windows of large pictures: their geometry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.data.tiles import Tiling, clip_to_windows, tile_hw, to_picture, to_window, windows_of

sides = st.integers(1, 300)
overlaps = st.floats(0, 0.9)


@st.composite
def cut_pictures(draw):
    """(size_hw, tile_hw, windows) of a picture."""
    size_hw = (draw(sides), draw(sides))
    tile = (draw(st.integers(8, 200)), draw(st.integers(8, 200)))
    return size_hw, tile, windows_of(size_hw, tile, draw(overlaps))


@st.composite
def boxes_in(draw, size_hw):
    """(N, 4) float64 of boxes with an area inside a picture."""
    height, width = size_hw
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        x = sorted(draw(st.lists(st.floats(0, width, width=32), min_size=2, max_size=2)))
        y = sorted(draw(st.lists(st.floats(0, height, width=32), min_size=2, max_size=2)))
        if x[1] - x[0] > 1e-3 and y[1] - y[0] > 1e-3:
            rows.append([x[0], y[0], x[1], y[1]])
    return np.array(rows, np.float64).reshape(-1, 4)


@given(cut_pictures())
def test_every_pixel_is_covered_and_no_window_reaches_beyond_the_picture(cut):
    size_hw, (rows, columns), windows = cut
    seen = np.zeros(size_hw, bool)
    for left, top, right, bottom in windows:
        assert 0 <= left < right <= size_hw[1] and 0 <= top < bottom <= size_hw[0]
        assert right - left == min(columns, size_hw[1]) and bottom - top == min(rows, size_hw[0])
        seen[top:bottom, left:right] = True
    assert seen.all() and len(np.unique(windows, axis=0)) == len(windows)


@given(st.data(), cut_pictures())
def test_a_box_that_is_whole_in_a_window_is_unchanged_and_another_keeps_its_share(data, cut):
    size_hw, _, windows = cut
    boxes = data.draw(boxes_in(size_hw))
    shown, share = clip_to_windows(boxes[:, None], windows[None])
    inside = (boxes[:, None, :2] >= windows[None, :, :2]) & (boxes[:, None, 2:] <= windows[None, :, 2:])
    whole = inside.all(-1)
    assert (share[whole] == 1).all() and (share[~whole] < 1).all() and (share >= 0).all()
    moved = to_window(np.broadcast_to(boxes[:, None], shown.shape), windows[None])
    np.testing.assert_array_equal(shown[whole], moved[whole])
    sides = shown[..., 2:] - shown[..., :2]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    np.testing.assert_allclose(sides.prod(-1), share * areas[:, None], rtol=1e-6, atol=1e-6)
    some_window = share.max(axis=1, initial=0)
    assert (some_window > 0).all(), "no box is lost between windows"


@given(st.data(), cut_pictures())
def test_from_window_to_picture_undoes_from_picture_to_window(data, cut):
    size_hw, _, windows = cut
    boxes = data.draw(boxes_in(size_hw))[:, None]
    np.testing.assert_allclose(to_picture(to_window(boxes, windows), windows), boxes + 0 * windows, atol=1e-9)


def test_a_tiling_names_all_that_is_wrong_with_it():
    with pytest.raises(BadInput) as raised:
        Tiling((0, 64), 0.95, 1.5)
    assert [problem.split()[0] for problem in raised.value.problems] == [
        "data.tile", "data.tile_overlap", "data.tile_visible",
    ]  # fmt: skip
    assert tile_hw([30, 40], {"height": 1, "width": 9}) == (30, 40)
    assert len(Tiling((640, 640)).windows((1500, 2000))) == 3 * 4
