"""Tiles of a picture: they cover it, and boxes go to their pixels and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.data.tiling import (
    Tiling,
    clip_to_tiles,
    count_tiles,
    starts,
    tile_hw,
    tiles_of,
    to_picture,
    to_tile,
)
from toolkit.run.settings import DataConfig

sides = st.integers(1, 300)
tile_sides = st.integers(8, 200)


@st.composite
def cut_pictures(draw):
    """(size_hw, tile_hw, tiles) of a picture."""
    size_hw = (draw(sides), draw(sides))
    tile = (draw(tile_sides), draw(tile_sides))
    overlap = draw(st.floats(0, 0.9))
    tiles = tiles_of(size_hw, tile, overlap)
    assert count_tiles(size_hw, tile, overlap) == len(tiles)
    for side in (0, 1):
        between = np.diff(starts(size_hw[side], tile[side], overlap))
        assert between.max(initial=0) <= max(1, tile[side] * (1 - overlap))
    return size_hw, tile, tiles


def boxes_in(size_hw, seed):
    """(5, 1, 4) float64 of boxes with an area inside a picture, some of them at its borders."""
    height, width = size_hw
    ends = np.random.default_rng(seed).uniform(-0.2, 1.2, (5, 2, 2)).clip(0, 1) * [width, height]
    low = np.minimum(ends.min(1), [width - 0.01, height - 0.01])
    return np.concatenate([low, np.maximum(ends.max(1), low + 0.01)], axis=1)[:, None]


@given(cut_pictures())
def test_every_pixel_is_covered_and_none_beyond_the_picture(cut):
    (height, width), (rows, columns), tiles = cut
    seen = np.zeros((height, width), bool)
    for left, top, right, bottom in tiles:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert right - left == min(columns, width)
        assert bottom - top == min(rows, height)
        seen[top:bottom, left:right] = True
    assert seen.all()
    assert len(np.unique(tiles, axis=0)) == len(tiles)


@given(cut_pictures(), st.integers(0, 2**32))
def test_a_whole_box_is_unchanged_and_another_keeps_its_share(cut, seed):
    size_hw, _, tiles = cut
    boxes = boxes_in(size_hw, seed)
    shown, share = clip_to_tiles(boxes, tiles)
    is_whole = ((boxes[..., :2] >= tiles[:, :2]) & (boxes[..., 2:] <= tiles[:, 2:])).all(-1)
    assert (share[is_whole] == 1).all()
    assert (share[~is_whole] < 1).all()
    assert (share >= 0).all()
    np.testing.assert_array_equal(shown[is_whole], to_tile(boxes, tiles)[is_whole])
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    shown_areas = (shown[..., 2:] - shown[..., :2]).prod(-1)
    np.testing.assert_allclose(shown_areas, share * areas, rtol=1e-6, atol=1e-6)
    assert (share.max(axis=1) > 0).all()  # no box is lost between tiles


@given(cut_pictures(), st.integers(0, 2**32))
def test_from_tile_to_picture_undoes_from_picture_to_tile(cut, seed):
    size_hw, _, tiles = cut
    boxes = boxes_in(size_hw, seed)
    back = to_picture(to_tile(boxes, tiles), tiles)
    np.testing.assert_allclose(back, np.broadcast_to(boxes, back.shape), atol=1e-9)


def test_a_tiling_names_all_that_is_wrong_with_it():
    with pytest.raises(BadInput) as raised:
        Tiling((0, 64), 0.95, 1.5)
    names = [problem.split()[0] for problem in raised.value.problems]
    assert names == ["data.tile", "data.tile_overlap", "data.tile_visible"]
    with pytest.raises(BadInput, match="data.tile is"):
        Tiling((1, 2, 3))


def test_settings_have_the_defaults_of_a_tiling():
    assert DataConfig.tile_overlap == Tiling.overlap
    assert DataConfig.tile_visible == Tiling.visible


@pytest.mark.parametrize(
    ("tile", "size", "expected"),
    [
        (640, None, (640, 640)),
        (640, {"shortest_edge": 800, "longest_edge": 1333}, (640, 640)),
        (640, {"height": 384, "width": 640}, (384, 640)),
        (100, {"height": 64, "width": 32}, (100, 50)),
        (
            [30, 40],
            {"height": 1, "width": 9},
            (30, 40),
        ),
    ],
)
def test_tiles_have_the_aspect_of_the_images_of_the_detector(tile, size, expected):
    assert tile_hw(tile, size) == expected


def test_too_many_tiles_are_refused():
    assert count_tiles((12_000, 12_000), (1, 1), 0.0) == 144_000_000
    with pytest.raises(BadInput, match="12000 x 12000 px would have 144,000,000 tiles of 1 x 1 px"):
        tiles_of((12_000, 12_000), (1, 1), 0.0)
