"""Zoom-out and IoU crop by torchvision's rules; tests/data/test_pipeline.py has the properties of all recipes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator, painted, sample

from toolkit.base.box_ops import pairwise_iou
from toolkit.data.transforms import zoom_crop_colour
from toolkit.data.transforms.zoom_crop_colour import (
    SSD_FILL_RGB,
    PhotometricDistortion,
    SeenRegion,
    draw_iou_crop,
    draw_zoom_out,
    keep_seen,
    render_region,
)

WHOLE = (0, 0, 60, 80)


def test_zooming_out_leaves_the_image_on_the_canvas_and_keeps_its_shape():
    regions = [draw_zoom_out((60, 80), 4.0, generator(seed)) for seed in range(300)]
    assert 110 < regions.count(WHOLE) < 190
    for top, left, height, width in regions:
        assert 60 - height <= top <= 0
        assert 80 - width <= left <= 0
        assert 60 <= height <= 240
        assert width == pytest.approx(height * 80 / 60, abs=2)
    assert max(height for _, _, height, _ in regions) > 200
    assert {(top < 0, left < 0) for top, left, *_ in regions} >= {(True, True), (False, False)}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    whole=st.sampled_from([(-30, -40, 120, 160), WHOLE]),
)
def test_a_crop_has_the_centre_of_a_box(seed, count, whole):
    source = generator(seed)
    corners = torch.rand(count, 2, generator=source) * torch.tensor([60.0, 40.0])
    boxes = torch.cat([corners, corners + 5 + 15 * torch.rand(count, 2, generator=source)], dim=1)
    region = draw_iou_crop(whole, boxes, source)
    top, left, height, width = region
    assert whole[0] <= top <= whole[0] + whole[2] - height
    assert whole[1] <= left <= whole[1] + whole[3] - width
    if region != whole:
        assert height >= int(0.3 * whole[2])
        assert width >= int(0.3 * whole[3])
        assert 0.5 <= width / height <= 2
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - torch.tensor([left, top])
        assert ((centres > 0) & (centres < torch.tensor([width, height]))).all(1).any()


def test_crops_overlap_by_the_drawn_iou_and_a_seventh_is_none():
    boxes = torch.tensor([[20.0, 10, 70, 55]])
    regions = [draw_iou_crop(WHOLE, boxes, generator(seed)) for seed in range(400)]
    corners = torch.tensor([[left, top, left + width, top + height] for top, left, height, width in regions])
    ious = pairwise_iou(corners.float(), boxes)[:, 0]
    # at least 0.3, 0.5 and 0.7 are asked for in 4, 3 and 2 of 7 draws; 0.9 seldom succeeds
    for least, share in (
        (0.3, 0.65),
        (0.5, 0.45),
        (0.7, 0.12),
    ):
        assert (ious >= least).float().mean() > share
    assert 30 < regions.count(WHOLE) < 120
    assert draw_iou_crop(WHOLE, boxes[:0], generator(0)) == WHOLE


def test_boxes_go_with_their_centre_but_crowds_stay_as_far_as_they_are_seen():
    image, target = painted(
        [
            [0, 0, 10, 10],
            [30, 30, 50, 50],
            [0, 0, 80, 60],
        ],
        crowd=[2],
    )
    kept = keep_seen(target, (20, 20, 40, 40))
    assert kept["labels"].tolist() == [1, 2]
    _, target = render_region(
        image,
        kept,
        (20, 20, 40, 40),
        (80, 80),
    )
    assert target["boxes"].tolist() == [[20, 20, 60, 60], [0, 0, 80, 80]]
    assert target["area"].tolist() == [1600, 6400]


def test_what_lies_beyond_the_image_is_filled_and_boxes_fit_their_pixels():
    image, target = painted([[20, 30, 40, 50]])
    seen, moved = render_region(
        image,
        target,
        (-60, -80, 240, 320),
        (120, 160),
    )
    assert seen.shape == (3, 120, 160)
    assert moved["size"].tolist() == [120, 160]
    assert moved["boxes"].tolist() == [[50, 45, 60, 55]]
    assert seen[:, 46:54, 51:59].min() > 250
    assert seen[:, 0, 0].tolist() == list(SSD_FILL_RGB)
    assert not seen[:, 32:44, 42:48].any()
    black = int((seen == 0).all(0).sum())
    assert abs(black + 100 - 30 * 40) < 150


def test_a_canvas_of_too_many_pixels_is_made_smaller(monkeypatch):
    image, target = sample([[10, 10, 40, 30]], (60, 80))
    wide = [
        SeenRegion(4.0, False)(
            image,
            target,
            generator(seed),
        )
        for seed in range(20)
    ]
    assert max(out[0].numel() for out, _ in wide) > 9 * 60 * 80
    monkeypatch.setattr(zoom_crop_colour, "MAX_CANVAS_PIXELS", 60 * 80)
    for seed, (large, found) in enumerate(wide):
        out, moved = SeenRegion(4.0, False)(image, target, generator(seed))
        assert out[0].numel() <= 60 * 80
        assert moved["size"].tolist() == list(out.shape[-2:])
        shrink = torch.tensor([out.shape[2] / large.shape[2], out.shape[1] / large.shape[1]] * 2)
        torch.testing.assert_close(
            moved["boxes"],
            found["boxes"] * shrink,
            atol=2.0,
            rtol=0,
        )


def test_each_colour_is_distorted_on_half_of_the_images():
    image, target = painted(
        [(2, 2, 9, 9)],
        (16, 16),
        ground=60,
    )
    brightness = {
        "brightness": (1.5, 1.5),
        "contrast": (1, 1),
        "saturation": (1, 1),
        "hue": (0, 0),
    }
    brighter, same = PhotometricDistortion(**brightness, probability=1.0)(image, target, generator())
    assert same is target
    assert brighter.unique().tolist() == [90, 255]
    noisy, target = sample([], (8, 8))
    unchanged = sum(PhotometricDistortion()(noisy, target, generator(seed))[0].equal(noisy) for seed in range(320))
    assert 8 < unchanged < 36  # a sixteenth
