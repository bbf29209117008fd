"""YOLOv3's augmentation: boxes stay on their objects, regions keep their constraints, everything is the generator's.

    python -m pytest tests/test_yolov3_transforms.py
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as F

from toolkit.box_ops import pairwise_iou
from toolkit.data.transforms.geometry import recheck_boxes
from toolkit.data.transforms.yolov3 import (
    FILL_RGB,
    INTERPOLATIONS,
    ColourDistortion,
    ConstrainedCrop,
    RandomExpand,
    centres_inside,
    resize_by,
    yolov3_transform,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample(size_hw, boxes) -> tuple[torch.Tensor, dict]:
    """A grey image with a white rectangle for each box."""
    image = torch.full((*size_hw, 3), 60, dtype=torch.uint8).permute(2, 0, 1)
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    for x0, y0, x1, y1 in boxes.int().tolist():
        image[:, y0:y1, x0:x1] = 255
    count = len(boxes)
    target = {
        "image_id": 7, "boxes": boxes, "labels": torch.arange(count), "area": torch.ones(count),
        "iscrowd": torch.zeros(count, dtype=torch.int64), "mixup": torch.linspace(0, 1, count),
        "relations": torch.tensor([[0, count - 1, 3]] if count else torch.zeros(0, 3).tolist(),
                                  dtype=torch.int64).reshape(-1, 3),
        "orig_size": torch.tensor(size_hw), "size": torch.tensor(size_hw),
    }  # fmt: skip
    return image, target


@st.composite
def scenes(draw):
    height, width = draw(st.integers(8, 80)), draw(st.integers(8, 80))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        x0, y0 = draw(st.integers(0, width - 4)), draw(st.integers(0, height - 4))
        boxes.append((x0, y0, draw(st.integers(x0 + 3, width)), draw(st.integers(y0 + 3, height))))
    return (height, width), boxes


@settings(max_examples=60, deadline=None)
@given(scenes(), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_the_whole_recipe_gives_the_size_asked_for_and_a_target_in_step(scene, seed, colour, flip):
    image, target = sample(*scene)
    before = {key: value.clone() for key, value in target.items() if isinstance(value, torch.Tensor)}
    transform = yolov3_transform(photometric=colour, zoom_out=4.0, iou_crop=True, flip=flip)
    out, found = transform(image, target, generator(seed), (64, 96))
    assert out.shape == (3, 64, 96) and out.dtype == torch.uint8
    checked = recheck_boxes(out, found)
    assert {len(checked[name]) for name in ("boxes", "labels", "area", "iscrowd", "mixup")} == {len(checked["boxes"])}
    assert len(scene[1]) == 0 or len(found["boxes"]) > 0  # a crop that loses every box is not taken
    assert torch.equal(found["mixup"], target["mixup"][found["labels"]])  # each weight went with its box
    again = transform(*sample(*scene), generator(seed), (64, 96))
    assert torch.equal(out, again[0]) and torch.equal(found["boxes"], again[1]["boxes"])
    assert all(torch.equal(before[key], target[key]) for key in before)


@pytest.mark.parametrize("seed", range(12))
def test_boxes_stay_on_their_objects(seed):
    """White rectangles on grey: what a box encloses after the recipe is white, and white is nowhere else."""
    image, target = sample((90, 120), [(20, 30, 60, 70), (80, 10, 110, 50)])
    out, found = yolov3_transform(zoom_out=4.0, iou_crop=True, flip=True)(image, target, generator(seed), (160, 160))
    white, inside = out[0] > 200, torch.zeros(160, 160, dtype=torch.bool)
    for x0, y0, x1, y1 in found["boxes"].round().int().tolist():
        if min(x1 - x0, y1 - y0) >= 8:
            assert white[y0 + 2 : y1 - 2, x0 + 2 : x1 - 2].float().mean() > 0.9
        inside[max(0, y0 - 2) : y1 + 2, max(0, x0 - 2) : x1 + 2] = True
    if len(found["boxes"]) == 2:
        assert not (white & ~inside).any()


@settings(max_examples=60, deadline=None)
@given(scenes(), st.integers(0, 10**6))
def test_a_region_keeps_the_centre_of_a_box_and_its_constraint(scene, seed):
    (height, width), boxes = scene
    boxes, crop = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), ConstrainedCrop()
    top, left, h, w = crop.draw(boxes, (height, width), generator(seed))
    assert 0 <= top <= top + h <= height and 0 <= left <= left + w <= width and min(h, w) > 0
    if not len(boxes):
        return
    assert centres_inside(boxes, (top, left, h, w)).any()
    if (h, w) != (height, width):
        iou = pairwise_iou(boxes, torch.tensor([[left, top, left + w, top + h]], dtype=torch.float32))
        assert any(low <= iou.min() + 1e-6 and iou.max() <= high + 1e-6 for low, high in crop.constraints)
        # Sides are cut to whole pixels.
        assert (h + 1) * (w + 1) >= crop.min_scale**2 * height * width
        assert 2 * (w + 1) / width >= h / height and 2 * (h + 1) / height >= w / width


def test_regions_of_all_kinds_are_drawn():
    boxes = torch.tensor([[30.0, 30, 70, 70]])
    regions = [ConstrainedCrop().draw(boxes, (100, 100), generator(seed)) for seed in range(200)]
    whole = sum(region == (0, 0, 100, 100) for region in regions)
    assert 20 < whole < 120  # one of up to seven candidates, those that exist
    assert len(set(regions)) > 60


def test_boxes_with_their_centre_outside_go_and_the_others_are_clipped():
    class Fixed(ConstrainedCrop):
        def draw(self, boxes, size_hw, generator):
            return 10, 10, 30, 40

    image, target = sample((60, 60), [(0, 0, 30, 30), (0, 0, 12, 12), (45, 30, 60, 60)])
    out, found = Fixed()(image, target, generator(0))
    assert out.shape == (3, 30, 40)
    assert found["labels"].tolist() == [0]
    assert found["boxes"].tolist() == [[0, 0, 20, 20]]
    assert found["relations"].tolist() == []


def test_expanding_moves_boxes_with_their_pixels_and_fills_the_rest():
    image, target = sample((20, 30), [(5, 4, 20, 12)])
    for seed in range(20):
        out, found = RandomExpand(probability=1.0)(image, target, generator(seed))
        height, width = out.shape[-2:]
        assert 20 <= height <= 80 and 30 <= width <= 120
        x0, y0, x1, y1 = found["boxes"][0].int().tolist()
        assert (out[:, y0:y1, x0:x1] == 255).all()
        filled = (out == torch.tensor(FILL_RGB, dtype=torch.uint8)[:, None, None]).all(0).sum()
        assert filled == height * width - 600
        assert found["size"].tolist() == [height, width]
    untouched, _ = RandomExpand(probability=0.0)(image, target, generator(0))
    assert untouched is image


def test_colours_saturate_and_leave_the_target_alone():
    image, target = sample((16, 16), [(2, 2, 9, 9)])
    noisy = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=generator(1))
    seen = set()
    for seed in range(40):
        out, found = ColourDistortion()(noisy, target, generator(seed))
        assert out.dtype == torch.uint8 and found is target
        seen.add(bool(torch.equal(out, noisy)))
    assert seen == {True, False}  # one of sixteen is left as it is
    brighter, _ = ColourDistortion(brightness=32, contrast=(1, 1), saturation=(1, 1), hue=0, probability=1.0)(
        image, target, generator(0)
    )
    change = brighter.int() - image.int()
    assert change.unique().numel() <= 2 and change.abs().max() <= 32
    assert ((brighter == 255) | (change == change[0, 0, 0])).all()


@pytest.mark.parametrize("method", INTERPOLATIONS, ids=lambda method: method.name)
def test_every_interpolation_keeps_a_flat_image_and_scales_boxes(method):
    image, target = sample((40, 30), [(0, 0, 30, 40)])
    out, found = resize_by(image, target, (64, 96), method)
    assert out.shape == (3, 64, 96) and (out == 255).all()
    assert found["boxes"].tolist() == [[0, 0, 96, 64]]
    assert found["area"].item() == pytest.approx(64 * 96 / 1200)
    gradient = torch.arange(0, 256, dtype=torch.uint8).repeat(3, 64, 1)
    ours = resize_by(gradient, sample((64, 256), [])[1], (32, 128), method)[0]
    reference = F.resize(gradient, [32, 128], antialias=True)
    assert (ours.int() - reference.int()).abs().max() <= 2


def test_nothing_wanted_is_a_plain_resize():
    image, target = sample((40, 30), [(3, 4, 12, 30)])
    out, found = yolov3_transform()(image, target, generator(0), (80, 60))
    assert out.shape == (3, 80, 60)
    assert found["boxes"].tolist() == [[6, 8, 24, 60]]
