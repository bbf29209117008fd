"""Masks as polygons and run lengths: stored to the bit, drawn where they lie, and encoded as pycocotools does."""

import tracemalloc

import numpy as np
import pytest
import torch
from mask_data import BLOCK, SIZE_HW, SQUARE
from pycocotools import mask as coco_mask

from toolkit.base.masks import (
    Masks,
    areas,
    bitmap,
    boxes_around,
    column_of,
    encoded,
    from_bytes,
    joined,
    mirrored_mask,
    overlaps_in,
    pixels_in,
    rectangle,
    rles_of,
    shifted,
    to_bytes,
    united,
)

RUNS = rles_of(torch.from_numpy(BLOCK)[None])[0]
POLYGON = (np.array(SQUARE, float).reshape(-1, 2),)


def as_pycocotools(pixels):
    return coco_mask.encode(np.asfortranarray(pixels.astype(np.uint8)))


@pytest.mark.parametrize(
    "size_hw",
    [
        (1, 1),
        (1, 7),
        (7, 1),
        (5, 6),
        (8, 3),
    ],
)
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 1])
def test_run_lengths_are_those_of_pycocotools(size_hw, share):
    pixels = np.random.default_rng(0).random((40, *size_hw)) < share
    found = rles_of(torch.from_numpy(pixels))
    assert [mask.as_coco() for mask in found] == [as_pycocotools(each) for each in pixels]


def test_run_lengths_of_whole_columns_and_of_no_mask():
    column = torch.zeros(1, 4, 5)
    column[0, :, 2:4] = 7.0  # not 0 inside
    assert rles_of(column)[0].as_coco() == as_pycocotools(column[0].numpy() > 0)
    assert rles_of(torch.zeros(0, 4, 5)) == []


def test_stored_masks_keep_every_bit():
    ring = np.random.default_rng(0).uniform(0, 30, (5, 2))
    shapes = [
        (ring, ring + 0.1),
        None,
        RUNS,
        (ring[:3],),
    ]
    again = from_bytes(to_bytes(shapes))
    assert again[1] is None
    assert again[2] == RUNS
    for row in (0, 3):
        for stored, expected in zip(again[row], shapes[row], strict=True):
            assert np.array_equal(stored, expected)
    assert from_bytes(b"") == []
    assert column_of(shapes)[0] is shapes[0]


def test_other_bytes_are_refused():
    """pycocotools, which trusts what it is given, would write beyond its memory."""
    stored = to_bytes([POLYGON, RUNS])
    flipped = bytes([stored[0] ^ 1]) + stored[1:]
    for wrong in (
        stored[:-1],
        stored + b"\0",
        stored[:3],
        b"\0" * 40,
        flipped,
    ):
        with pytest.raises(ValueError, match="checksum"):
            from_bytes(wrong)


def test_areas_are_pixels_of_any_number_of_masks():
    assert areas([RUNS] * 300, SIZE_HW).tolist() == [320] * 300  # pycocotools fails with 256
    assert areas([POLYGON, None], SIZE_HW).tolist() == [320, 0]
    assert areas([], SIZE_HW).shape == (0,)
    assert np.array_equal(bitmap(rectangle([4, 5, 20, 25]), SIZE_HW), BLOCK)


def test_boxes_are_tight_and_zeros_around_nothing():
    pixels = torch.stack([torch.from_numpy(BLOCK), torch.zeros(SIZE_HW, dtype=torch.uint8)])
    assert boxes_around(pixels).tolist() == [[4, 5, 20, 25], [0, 0, 0, 0]]


@pytest.mark.parametrize("shape", [RUNS, POLYGON])
def test_masks_are_moved_mirrored_and_cut(shape):
    masks = Masks.of([shape])
    moved = masks.moved(3, -2).drawn(SIZE_HW)[0].numpy()
    assert np.array_equal(
        moved,
        np.roll(
            BLOCK,
            (-2, 3),
            (0, 1),
        ),
    )
    mirrored = masks.mirrored(SIZE_HW[1]).drawn(SIZE_HW)[0].numpy()
    assert np.array_equal(mirrored, BLOCK[:, ::-1])
    cut = masks.cut(10, 0, 40, 12).drawn(SIZE_HW)[0].numpy()
    assert cut.sum() == 10 * 7
    assert np.array_equal(cut[:12, 10:], BLOCK[:12, 10:])
    back = masks.cut(10, 0, 40, 12).moved(-50, 0).moved(50, 0).drawn(SIZE_HW)[0].numpy()
    assert np.array_equal(back, cut)


def test_masks_are_selected_and_joined():
    masks = joined([Masks.of([RUNS, None]), Masks.of([POLYGON]).moved(1, 0)])
    assert [int(pixels.sum()) for pixels in masks.drawn(SIZE_HW)] == [320, 0, 320]
    chosen = masks[np.array([True, False, True])]
    assert len(chosen) == 2
    assert boxes_around(chosen.drawn(SIZE_HW)).tolist() == [[4, 5, 20, 25], [5, 5, 21, 25]]
    assert masks[torch.tensor([2])].shapes == (POLYGON,)


@pytest.mark.parametrize("scale", [0.5, 0.25, 0.7, 1.5])
def test_run_lengths_are_not_moved_by_a_change_of_size(scale):
    """Whichever pixel counts of two that are as near to the centre of a new one."""
    rng = np.random.default_rng(0)
    side = int(200 * scale)
    errors = []
    ratios = []
    for _ in range(200):
        low = rng.integers(20, 60, 2)
        high = low + rng.integers(20, 90, 2)
        picture = torch.zeros(1, 200, 200)
        picture[0, low[1] : high[1], low[0] : high[0]] = 1
        drawn = Masks.of(rles_of(picture)).resized(scale, scale).drawn((side, side))
        errors.append(boxes_around(drawn)[0].numpy() - np.concatenate([low, high]) * scale)
        ratios.append(float(drawn.sum()) / (scale**2 * np.prod(high - low)))
    assert abs(np.mean(errors, axis=0)).max() < 0.06
    assert np.mean(ratios) == pytest.approx(1, abs=0.01)


# ---- parts of large pictures -----------------------------------------------------------------------------------------


def test_a_part_of_a_mask_is_decoded_alone():
    pixels = (np.random.default_rng(0).random((23, 31)) < 0.5).astype(np.uint8)
    (runs,) = rles_of(torch.from_numpy(pixels)[None])
    for left, top, right, bottom in ((0, 0, 31, 23), (3, 5, 9, 20), (30, 22, 31, 23), (4, 4, 4, 9), (4, 4, 9, 4)):
        part = pixels_in(runs, (left, top, right, bottom))
        assert np.array_equal(part, pixels[top:bottom, left:right])


@pytest.mark.parametrize("shape", [RUNS, POLYGON])
@pytest.mark.parametrize(
    ("x", "y", "size_hw"),
    [
        (0, 0, SIZE_HW),
        (-8, -9, (10, 7)),
        (5, 3, (60, 50)),
        (5, 3, (28, 50)),  # whole columns
        (-30, 0, (9, 9)),
        (3, -40, (9, 9)),
    ],
)
def test_masks_come_into_another_picture(shape, x, y, size_hw):
    everything = np.zeros((200, 200), np.uint8)
    everything[100 + y : 130 + y, 100 + x : 140 + x] = BLOCK
    expected = everything[100 : 100 + size_hw[0], 100 : 100 + size_hw[1]]
    moved = shifted(shape, x, y, size_hw)
    assert np.array_equal(bitmap(moved, size_hw), expected)
    if shape is RUNS:
        assert moved.as_coco() == as_pycocotools(expected)
    assert shifted(None, x, y, size_hw) is None


def test_a_mask_is_mirrored_in_its_picture():
    assert mirrored_mask(RUNS).as_coco() == as_pycocotools(BLOCK[:, ::-1])


def test_masks_are_compared_in_a_region_and_united():
    (other,) = rles_of(torch.from_numpy(np.roll(BLOCK, 8, 1))[None])  # columns 12 to 28
    (nothing,) = rles_of(torch.zeros(1, *SIZE_HW))
    everywhere = overlaps_in((0, 0, 40, 30), [RUNS, nothing], [RUNS, other, nothing])
    np.testing.assert_allclose(everywhere, [[1, 1 / 3, 0], [0, 0, 0]])
    assert overlaps_in((10, 0, 20, 30), [RUNS], [other]).item() == pytest.approx(0.8)
    assert united([RUNS, other, nothing]).as_coco() == as_pycocotools(bitmap(RUNS, SIZE_HW) | bitmap(other, SIZE_HW))


def test_a_part_of_a_large_picture_takes_its_own_memory():
    """All pixels of the picture would take 100 MB."""
    runs = encoded(np.ones((300, 200), np.uint8), (5000, 6000), (10_000, 10_000))
    tracemalloc.start()
    tile = shifted(runs, -5100, -5900, (640, 640))
    pixels = Masks.of([runs]).moved(-5100, -5900).drawn((640, 640))
    back = shifted(tile, 5100, 5900, (10_000, 10_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12e6
    assert np.array_equal(bitmap(tile, (640, 640)), pixels[0])
    assert int(pixels.sum()) == 100 * 300
    assert areas([back], (10_000, 10_000)).tolist() == [100 * 300]
