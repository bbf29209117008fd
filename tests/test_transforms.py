"""Geometry of images and targets against DETR's definitions."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from samples import assert_same, assert_well_formed, generator, sample, samples, target_of

from toolkit.base.errors import BadInput
from toolkit.data.transforms.geometry import (
    Compose,
    RandomChoice,
    RandomFlip,
    RandomSizeCrop,
    ResizeCropResize,
    ResizeShorter,
    crop,
    detr_train_transform,
    exact_transform,
    flip,
    mirrored_predicates,
    recheck_boxes,
    resize,
    resize_target,
    shorter_side_size,
)

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def detr_size(image_size, size, max_size=None):
    """get_size_with_aspect_ratio of facebookresearch/detr, `datasets/transforms.py`; (w, h) in, (h, w) out."""
    w, h = image_size
    if max_size is not None:
        min_original_size = float(min((w, h)))
        max_original_size = float(max((w, h)))
        if max_original_size / min_original_size * size > max_size:
            size = int(round(max_size * min_original_size / max_original_size))
    if (w <= h and w == size) or (h <= w and h == size):
        return (h, w)
    if w < h:
        return (int(size * h / w), size)
    return (size, int(size * w / h))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 1000), st.none() | st.integers(50, 2000))
def test_size_is_detrs(height, width, shorter, max_longer):
    expected = detr_size((width, height), shorter, max_longer)
    if min(expected) > 0:  # DETR asks for an empty image when a very long one is limited
        assert shorter_side_size((height, width), shorter, max_longer) == expected
    assert min(shorter_side_size((height, width), shorter, max_longer)) > 0


@given(samples(), st.integers(1, 200), st.integers(1, 200))
def test_flips_and_resizes_there_and_back(sample, height, width):
    once = flip(*sample)
    assert_well_formed(*once, sample[1])
    assert_same(flip(*once), sample)
    image, target = sample
    resized_image, resized = resize(image, target, (height, width))
    assert resized_image.shape == (3, height, width)
    sides = resized["boxes"][:, 2:] - resized["boxes"][:, :2]
    torch.testing.assert_close(resized["area"], sides.prod(1), rtol=1e-3, atol=0.05)
    back = resize_target(resized, (height, width), image.shape[-2:])
    for name in ("boxes", "area", "size"):
        torch.testing.assert_close(back[name], target[name], rtol=1e-4, atol=1e-3)


@given(samples(), st.data())
def test_crop(sample, data):
    image, target = sample
    height, width = image.shape[-2:]
    region = RandomSizeCrop(4, 40).draw((height, width), generator(data.draw(st.integers(0, 2**32))))
    top, left, crop_height, crop_width = region
    assert top >= 0 and left >= 0 and top + crop_height <= height and left + crop_width <= width
    assert min(4, height) <= crop_height <= 40 and min(4, width) <= crop_width <= 40
    cropped_image, cropped = crop(image, target, region)
    assert_well_formed(cropped_image, cropped, target)
    assert cropped_image.equal(image[:, top : top + crop_height, left : left + crop_width])
    sides = cropped["boxes"][:, 2:] - cropped["boxes"][:, :2]
    assert cropped["area"].equal(sides.prod(1))
    # Exactly the boxes that share area with the region are left.
    low = target["boxes"][:, :2].maximum(torch.tensor([left, top]))
    high = target["boxes"][:, 2:].minimum(torch.tensor([left + crop_width, top + crop_height]))
    assert cropped["labels"].tolist() == (high > low).all(1).nonzero()[:, 0].tolist()


@given(samples(), st.integers(0, 2**32))
def test_fused_crop_branch_is_the_three_steps(sample, seed):
    image, target = sample
    steps = ResizeShorter((40, 50)), RandomSizeCrop(30, 45), ResizeShorter((48, 64, 80), 133)
    one_image, one = ResizeCropResize(*steps)(image, target, generator(seed))
    three_image, three = Compose(steps)(image, target, generator(seed))
    assert one_image.shape == three_image.shape and one["size"].equal(three["size"])
    assert_well_formed(one_image, recheck_boxes(one_image, one), target)
    # A region's edge moves by half a source pixel at most, and by one where a whole pixel must be left.
    scratch = generator(seed)
    middle = steps[0].draw(image.shape[-2:], scratch)
    _, _, crop_height, crop_width = steps[1].draw(middle, scratch)
    pixel = torch.tensor([one_image.shape[2] / crop_width * middle[1] / image.shape[2],
                          one_image.shape[1] / crop_height * middle[0] / image.shape[1]]).repeat(2)  # fmt: skip
    tall = max(image.shape[1:]) / min(image.shape[1:])  # a pixel of a thin image is a large part of its region
    three_boxes = dict(zip(three["labels"].tolist(), three["boxes"], strict=True))
    one_boxes = dict(zip(one["labels"].tolist(), one["boxes"], strict=True))
    for label in one_boxes.keys() & three_boxes.keys():
        if tall < 2:
            assert ((one_boxes[label] - three_boxes[label]).abs() <= pixel * 1.5 + 1e-3).all()
    for label in one_boxes.keys() ^ three_boxes.keys():  # only slivers at the region's edge
        box = one_boxes.get(label, three_boxes.get(label))
        assert ((box[2:] - box[:2]) <= pixel[:2] + 1e-3).any()


def test_resize_is_pillows():
    """Antialiased bilinear, up and down; both round in fixed point, so a level of difference is allowed."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
    for size_hw in ((100, 133), (23, 31), (60, 31)):
        expected = np.asarray(Image.fromarray(pixels).resize(size_hw[::-1], Image.Resampling.BILINEAR)).astype(int)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        for layout in (image, image.contiguous(), image.flip(0).flip(0)):
            resized, _ = resize(layout, target_of([], (60, 80)), size_hw)
            assert resized.permute(1, 2, 0).is_contiguous()
            assert np.abs(resized.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1


def test_choice_and_flip_frequencies():
    (image, target), source = sample([[0, 0, 2, 2]], (8, 8)), generator()
    choice = RandomChoice((RandomFlip(0.0), RandomFlip(1.0), exact_transform(4)))
    outs = [choice(image, target, source) for _ in range(600)]
    outcomes = [(out.shape[-1], moved["boxes"][0, 0].item()) for out, moved in outs]
    for outcome in ((8, 0.0), (8, 6.0), (4, 0.0)):
        assert 150 < outcomes.count(outcome) < 250
    for probability in (0.0, 1.0):
        recipe = detr_train_transform((8,), first_scales=(8,), crop_sizes=(8, 8), flip_probability=probability)
        assert recipe(image, target, source)[1]["boxes"][0, 0].item() == 6.0 * probability
    flips = sum(RandomFlip(0.25)(image, target, source)[1]["boxes"][0, 0].item() == 6.0 for _ in range(800))
    assert 150 < flips < 250


def test_recheck_clips_drops_what_has_no_extent_and_names_the_image_of_a_defective_transform():
    image = torch.zeros(3, 10, 20, dtype=torch.uint8)
    boxes = [[-1, 2, 5, 12], [4, 4, 4, 8], [20.5, 1, 30, 3], [1, 1, 2, 2]]
    checked = recheck_boxes(image, target_of(boxes, (10, 20), [[0, 3, 1], [1, 3, 2]]))
    assert checked["boxes"].tolist() == [[0, 2, 5, 10], [1, 1, 2, 2]] and checked["labels"].tolist() == [0, 3]
    assert checked["relations"].tolist() == [[0, 1, 1]]
    for target, words in (
        (target_of([[0, 0, float("nan"), 3]], (10, 20)), "image id 7.*non-finite"),
        (target_of([], (20, 10)), r"image id 7.*\(10, 20\).*\(20, 10\)"),
        (target_of([[0, 0, 1, 1]], (10, 20)) | {"labels": torch.zeros(2)}, "image id 7.*'labels': 2"),
    ):
        with pytest.raises(ValueError, match=words):
            recheck_boxes(image, target)


SIDED = ("left of", "right of", "above", "to the left of", "west of", "east of", "bright")


def test_a_name_that_says_a_side_says_the_other_one_in_a_mirrored_picture():
    assert mirrored_predicates(SIDED).tolist() == [1, 0, 2, -1, 4, 5, 6]
    found = mirrored_predicates(SIDED, {"west of": "east of"})
    assert found.tolist() == [1, 0, 2, -1, 5, 4, 6]
    known = (found >= 0).nonzero()[:, 0]
    assert torch.equal(found[found[known]], known), "mirrored twice is as before"
    with pytest.raises(BadInput, match="north of.*not predicates of the data"):
        mirrored_predicates(SIDED, {"north of": "south of"})


def test_relations_are_mirrored_with_the_image_or_it_stays_as_it_is():
    image, plain = sample([[0, 0, 10, 10], [20, 0, 30, 10]], (20, 40), [[0, 1, 0], [1, 0, 1], [0, 1, 2]])
    target = plain | {"mirrored_predicates": mirrored_predicates(SIDED)}
    mirrored, found = flip(image, target)
    assert torch.equal(mirrored, image.flip(2)) and found["boxes"].tolist() == [[30, 0, 40, 10], [10, 0, 20, 10]]
    assert found["relations"].tolist() == [[0, 1, 1], [1, 0, 0], [0, 1, 2]]
    target["relations"][0, 2] = 3  # "to the left of", and there is no "to the right of"
    same, found = flip(image, target)
    assert same is image and found is target
    assert flip(image, plain)[1]["relations"] is plain["relations"], "of a data set without such names"
