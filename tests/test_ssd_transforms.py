"""SSD's augmentation: regions by torchvision's rules; tests/test_pipeline.py has the properties of all recipes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator, painted

from toolkit.base.box_ops import pairwise_iou
from toolkit.data.transforms.zoom_crop_colour import SSD_FILL_RGB, draw_iou_crop, draw_zoom_out, keep_seen, view


def test_zooming_out_leaves_the_image_on_the_canvas_and_keeps_its_shape():
    regions = [draw_zoom_out((60, 80), 4.0, generator(seed)) for seed in range(300)]
    whole = [region for region in regions if region == (0, 0, 60, 80)]
    assert 110 < len(whole) < 190
    for top, left, height, width in regions:
        assert top <= 0 and left <= 0 and top + height >= 60 and left + width >= 80
        assert 60 <= height <= 240 and width == pytest.approx(height * 80 / 60, abs=2)
    assert max(height for _, _, height, _ in regions) > 200
    assert {(top < 0, left < 0) for top, left, *_ in regions} >= {(True, True), (False, False)}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4), zoomed=st.booleans())
def test_a_crop_has_the_centre_of_a_box_that_it_overlaps(seed, count, zoomed):
    g = generator(seed)
    corners = torch.rand(count, 2, generator=g) * torch.tensor([60.0, 40.0])
    boxes = torch.cat([corners, corners + 5 + 15 * torch.rand(count, 2, generator=g)], dim=1)
    whole = (-30, -40, 120, 160) if zoomed else (0, 0, 60, 80)
    region = draw_iou_crop(whole, boxes, g)
    top, left, height, width = region
    assert whole[0] <= top and whole[1] <= left
    assert top + height <= whole[0] + whole[2] and left + width <= whole[1] + whole[3]
    if region != whole:
        assert height >= int(0.3 * whole[2]) and width >= int(0.3 * whole[3]) and 0.5 <= width / height <= 2
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - torch.tensor([left, top])
        inside = ((centres > 0) & (centres < torch.tensor([width, height]))).all(1)
        assert inside.any()


def test_crops_overlap_by_the_drawn_iou_and_a_seventh_is_none():
    boxes = torch.tensor([[20.0, 10, 70, 55]])
    regions = [draw_iou_crop((0, 0, 60, 80), boxes, generator(seed)) for seed in range(400)]
    corners = torch.tensor([[left, top, left + width, top + height] for top, left, height, width in regions])
    ious = pairwise_iou(corners.float(), boxes)[:, 0]
    share = [float((ious >= least).float().mean()) for least in (0.3, 0.5, 0.7)]
    # at least 0.3, 0.5 and 0.7 are asked for in 4, 3 and 2 of 7 draws; 0.9 seldom succeeds
    assert share[0] > 0.65 and share[1] > 0.45 and share[2] > 0.12
    uncut = sum(region == (0, 0, 60, 80) for region in regions)
    assert 30 < uncut < 120
    assert draw_iou_crop((0, 0, 60, 80), torch.zeros(0, 4), generator(0)) == (0, 0, 60, 80)


def test_boxes_go_with_their_centre_but_crowds_stay_as_far_as_they_are_seen():
    image, target = painted([[0, 0, 10, 10], [30, 30, 50, 50], [0, 0, 80, 60]], crowd=[2])
    kept = keep_seen(target, (20, 20, 40, 40))
    assert kept["labels"].tolist() == [1, 2]
    _, target = view(image, kept, (20, 20, 40, 40), (80, 80))
    assert target["boxes"].tolist() == [[20, 20, 60, 60], [0, 0, 80, 80]]
    assert target["area"].tolist() == [1600, 6400]


def test_what_lies_beyond_the_image_is_filled_and_boxes_fit_their_pixels():
    image, target = painted([[20, 30, 40, 50]])
    seen, moved = view(image, target, (-60, -80, 240, 320), (120, 160))
    assert seen.shape == (3, 120, 160) and moved["size"].tolist() == [120, 160]
    assert moved["boxes"].tolist() == [[50, 45, 60, 55]]
    assert seen[:, 46:54, 51:59].min() > 250
    assert [int(plane[0, 0]) for plane in seen] == list(SSD_FILL_RGB)
    assert not seen[:, 32:44, 42:48].any()
    black = (seen == 0).all(0).sum() + 100
    assert abs(int(black) - 30 * 40) < 150
