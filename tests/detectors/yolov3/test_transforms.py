"""YOLOv3's augmentation: regions keep their constraints; tests/data/test_pipeline.py has the properties of all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator, painted, sample, samples, target_of
from torchvision.transforms.v2 import functional as F

from toolkit.base.box_ops import pairwise_iou
from toolkit.data.transforms.geometry import GLUONCV_FILL_RGB, centres_in_region
from toolkit.detectors.yolov3.transforms import (
    INTERPOLATIONS,
    ColourDistortion,
    ConstrainedCrop,
    RandomExpand,
    resize_by,
)


@settings(max_examples=60, deadline=None)
@given(samples(max_boxes=4), st.integers(0, 10**6))
def test_a_region_keeps_the_centre_of_a_box_and_its_constraint(sample, seed):
    image, target = sample
    boxes = target["boxes"]
    height, width = image.shape[-2:]
    crop = ConstrainedCrop()
    top, left, h, w = crop.draw(
        boxes,
        (height, width),
        generator(seed),
    )
    assert 0 <= top < top + h <= height
    assert 0 <= left < left + w <= width
    if not len(boxes):
        return
    assert centres_in_region(boxes, (top, left, h, w)).any()
    if (h, w) != (height, width):
        iou = pairwise_iou(boxes, torch.tensor([[left, top, left + w, top + h]], dtype=torch.float32))
        low, high = torch.tensor(crop.constraints).T
        assert ((low <= iou.min() + 1e-6) & (iou.max() <= high + 1e-6)).any()
        # Sides are cut to whole pixels.
        assert (h + 1) * (w + 1) >= crop.min_scale**2 * height * width
        assert 2 * (w + 1) / width >= h / height
        assert 2 * (h + 1) / height >= w / width


def test_regions_of_all_kinds_are_drawn():
    boxes = torch.tensor([[30.0, 30, 70, 70]])
    regions = [
        ConstrainedCrop().draw(
            boxes,
            (100, 100),
            generator(seed),
        )
        for seed in range(200)
    ]
    assert 20 < regions.count((0, 0, 100, 100)) < 120  # one of up to seven candidates, those that exist
    assert len(set(regions)) > 60
    free = [
        ConstrainedCrop().draw(
            boxes[:0],
            (100, 100),
            generator(seed),
        )
        for seed in range(300)
    ]
    sides = torch.tensor([region[2:] for region in free]).prod(1).sqrt() / 100  # even from 0.3 to 1, but for clipping
    assert sides.mean() == pytest.approx(0.63, abs=0.03)
    assert sides.max() > 0.97


def test_boxes_follow_the_region_with_their_centre(monkeypatch):
    monkeypatch.setattr(ConstrainedCrop, "draw", lambda *_: (10, 10, 30, 40))
    image, target = sample(
        [
            (0, 0, 30, 30),
            (0, 0, 12, 12),
            (45, 30, 60, 60),
        ],
        (60, 60),
        [[0, 2, 3]],
    )
    out, cropped = ConstrainedCrop()(image, target, generator())
    assert out.shape == (3, 30, 40)
    assert cropped["boxes"].tolist() == [[0, 0, 20, 20]]
    assert cropped["labels"].tolist() == [0]
    assert cropped["relations"].tolist() == []


def test_expanding_moves_boxes_with_their_pixels_and_fills_the_rest():
    image, target = painted(
        [(5, 4, 20, 12)],
        (20, 30),
        ground=60,
    )
    fill = torch.tensor(GLUONCV_FILL_RGB, dtype=torch.uint8)[:, None, None]
    for seed in range(20):
        out, found = RandomExpand(probability=1.0)(image, target, generator(seed))
        height, width = out.shape[-2:]
        assert 20 <= height <= 80
        assert 30 <= width <= 120
        assert found["size"].tolist() == [height, width]
        x0, y0, x1, y1 = found["boxes"][0].int().tolist()
        assert (out[:, y0:y1, x0:x1] == 255).all()
        assert (out == fill).all(0).sum() == height * width - 600
    unchanged = sum(RandomExpand()(image, target, generator(seed))[0] is image for seed in range(200))
    assert 70 < unchanged < 130


def test_colours_of_one_in_sixteen_are_left_as_they_are():
    image, target = sample([], (16, 16))
    same = []
    for seed in range(40):
        out, found = ColourDistortion()(image, target, generator(seed))
        assert out.dtype == torch.uint8
        assert found is target
        same.append(out.equal(image))
    assert 0 < sum(same) < 20


def test_brightness_is_added_and_saturates():
    image, target = painted(
        [(2, 2, 9, 9)],
        (16, 16),
        ground=60,
    )
    brightness = ColourDistortion(
        brightness=32,
        contrast=(1, 1),
        saturation=(1, 1),
        hue=0,
        probability=1.0,
    )
    brighter, _ = brightness(image, target, generator(0))
    change = brighter.int() - image.int()
    assert change.abs().max() <= 32
    assert ((brighter == 255) | (change == change[0, 0, 0])).all()


@pytest.mark.parametrize("method", INTERPOLATIONS, ids=lambda method: method.name)
def test_every_interpolation_keeps_a_flat_image_and_scales_boxes(method):
    image, target = painted([(0, 0, 30, 40)], (40, 30))
    out, found = resize_by(image, target, (64, 96), method)
    assert out.shape == (3, 64, 96)
    assert (out == 255).all()
    assert found["boxes"].tolist() == [[0, 0, 96, 64]]
    assert found["area"].item() == 64 * 96
    gradient = torch.arange(0, 256, dtype=torch.uint8).repeat(3, 64, 1)
    ours = resize_by(gradient, target_of([], (64, 256)), (32, 128), method)[0]
    reference = F.resize(gradient, [32, 128], antialias=True)
    assert (ours.int() - reference.int()).abs().max() <= 2
