"""Geometry of images and targets against DETR's definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from samples import assert_same, assert_well_formed, generator, noise, sample, samples, target_of

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

seeds = st.integers(0, 2**32)
SIDED = ("left of", "right of", "above", "to the left of", "west of", "east of", "bright")


def detr_size(image_size, size, max_size=None):
    """get_size_with_aspect_ratio of facebookresearch/detr, `datasets/transforms.py`; (w, h) in, (h, w) out."""
    w, h = image_size
    if max_size is not None:
        low = float(min(w, h))
        high = float(max(w, h))
        if high / low * size > max_size:
            size = int(round(max_size * low / high))
    if (w <= h and w == size) or (h <= w and h == size):
        return (h, w)
    if w < h:
        return (int(size * h / w), size)
    return (size, int(size * w / h))


lengths = st.integers(1, 3000)


@given(
    lengths,
    lengths,
    st.integers(1, 1000),
    st.none() | st.integers(50, 2000),
)
def test_the_size_of_the_shorter_side_is_detrs(height, width, shorter, max_longer):
    found = shorter_side_size((height, width), shorter, max_longer)
    expected = detr_size((width, height), shorter, max_longer)
    assert min(found) > 0
    if min(expected) > 0:  # DETR asks for an empty image when a very long one is limited
        assert found == expected


@given(samples())
def test_a_flip_undoes_a_flip(sample):
    flipped = flip(*sample)
    assert_well_formed(*flipped, sample[1])
    assert_same(flip(*flipped), sample)


@given(
    samples(),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_resized_targets_come_back(sample, height, width):
    image, target = sample
    resized_image, resized = resize(image, target, (height, width))
    assert resized_image.shape == (3, height, width)
    sides = resized["boxes"][:, 2:] - resized["boxes"][:, :2]
    torch.testing.assert_close(
        resized["area"],
        sides.prod(1),
        rtol=1e-3,
        atol=0.05,
    )
    back = resize_target(resized, (height, width), image.shape[-2:])
    for name in ("boxes", "area", "size"):
        torch.testing.assert_close(
            back[name],
            target[name],
            rtol=1e-4,
            atol=1e-3,
        )


@given(samples(), seeds)
def test_a_crop_keeps_the_boxes_that_share_area_with_it(sample, seed):
    image, target = sample
    height, width = image.shape[-2:]
    region = RandomSizeCrop(4, 40).draw((height, width), generator(seed))
    top, left, crop_height, crop_width = region
    assert 0 <= top <= height - crop_height
    assert 0 <= left <= width - crop_width
    assert min(4, height) <= crop_height <= 40
    assert min(4, width) <= crop_width <= 40
    cropped_image, cropped = crop(image, target, region)
    assert_well_formed(cropped_image, cropped, target)
    assert cropped_image.equal(image[:, top : top + crop_height, left : left + crop_width])
    low = target["boxes"][:, :2].maximum(torch.tensor([left, top]))
    high = target["boxes"][:, 2:].minimum(torch.tensor([left + crop_width, top + crop_height]))
    is_kept = (high > low).all(1)
    assert cropped["labels"].tolist() == is_kept.nonzero()[:, 0].tolist()
    assert cropped["area"].equal((high - low).prod(1)[is_kept])


@given(samples(), seeds)
def test_the_fused_crop_is_the_three_steps(sample, seed):
    image, target = sample
    first, size_crop, last = ResizeShorter((40, 50)), RandomSizeCrop(30, 45), ResizeShorter((48, 64, 80), 133)
    one_image, one = ResizeCropResize(first, size_crop, last)(image, target, generator(seed))
    three_image, three = Compose((first, size_crop, last))(
        image,
        target,
        generator(seed),
    )
    assert one_image.shape == three_image.shape
    assert_well_formed(one_image, recheck_boxes(one_image, one), target)
    # A region's edge moves by half a source pixel at most, and by one where a whole pixel must be left.
    scratch = generator(seed)
    middle = first.draw(image.shape[-2:], scratch)
    _, _, *crop_hw = size_crop.draw(middle, scratch)
    scale = torch.tensor(one_image.shape[1:]) / torch.tensor(crop_hw)
    pixel = (scale * torch.tensor(middle) / torch.tensor(image.shape[1:])).flip(0)  # x, y
    is_tall = max(image.shape[1:]) >= 2 * min(image.shape[1:])  # a pixel of it is a large part of its region
    three_boxes = dict(
        zip(
            three["labels"].tolist(),
            three["boxes"],
            strict=True,
        )
    )
    one_boxes = dict(
        zip(
            one["labels"].tolist(),
            one["boxes"],
            strict=True,
        )
    )
    for label in one_boxes.keys() | three_boxes.keys():
        if label in one_boxes and label in three_boxes:
            moved = (one_boxes[label] - three_boxes[label]).abs()
            assert is_tall or (moved <= pixel.repeat(2) * 1.5 + 1e-3).all()
        else:  # only slivers at the region's edge
            box = one_boxes.get(label, three_boxes.get(label))
            assert ((box[2:] - box[:2]) <= pixel + 1e-3).any()


@pytest.mark.parametrize(
    "size_hw",
    [
        (100, 133),
        (23, 31),
        (60, 31),
    ],
)
def test_a_resize_is_pillows(size_hw):
    """Antialiased bilinear, up and down; both round in fixed point, so a level of difference is allowed."""
    pixels = noise(60, 80)
    expected = np.asarray(Image.fromarray(pixels).resize(size_hw[::-1], Image.Resampling.BILINEAR)).astype(int)
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    for layout in (image, image.contiguous()):
        resized, _ = resize(layout, target_of([], (60, 80)), size_hw)
        resized = resized.permute(1, 2, 0)
        assert resized.is_contiguous()
        assert np.abs(resized.numpy() - expected).max() <= 1


def left_sides(transform, count):
    """(width, left side of the box) of so many results of an image of 8 pixels with a box at its left."""
    image, target = sample([[0, 0, 2, 2]], (8, 8))
    source = generator()
    found = []
    for _ in range(count):
        out, moved = transform(image, target, source)
        found.append((out.shape[-1], moved["boxes"][0, 0].item()))
    return found


def test_branches_are_as_likely():
    found = left_sides(
        RandomChoice(
            (
                RandomFlip(0.0),
                RandomFlip(1.0),
                exact_transform(4),
            )
        ),
        600,
    )
    for outcome in ((8, 0.0), (8, 6.0), (4, 0.0)):
        assert 150 < found.count(outcome) < 250


def test_a_flip_has_its_probability():
    assert 150 < left_sides(RandomFlip(0.25), 800).count((8, 6.0)) < 250
    for probability in (0.0, 1.0):
        recipe = detr_train_transform(
            (8,),
            first_scales=(8,),
            crop_sizes=(8, 8),
            flip_probability=probability,
        )
        assert left_sides(recipe, 5) == [(8, 6.0 * probability)] * 5


def test_rechecked_boxes_are_clipped_and_dropped_without_extent():
    image = torch.zeros(3, 10, 20, dtype=torch.uint8)
    boxes = [
        [-1, 2, 5, 12],
        [4, 4, 4, 8],
        [20.5, 1, 30, 3],
        [1, 1, 2, 2],
    ]
    checked = recheck_boxes(
        image,
        target_of(
            boxes,
            (10, 20),
            [[0, 3, 1], [1, 3, 2]],
        ),
    )
    assert checked["boxes"].tolist() == [[0, 2, 5, 10], [1, 1, 2, 2]]
    assert checked["labels"].tolist() == [0, 3]
    assert checked["relations"].tolist() == [[0, 1, 1]]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (target_of([[0, 0, float("nan"), 3]], (10, 20)), "image id 7.*non-finite"),
        (target_of([], (20, 10)), r"image id 7.*\(10, 20\).*\(20, 10\)"),
        (target_of([[0, 0, 1, 1]], (10, 20)) | {"labels": torch.zeros(2)}, "image id 7.*'labels': 2"),
    ],
)
def test_the_image_of_a_defective_transform_is_named(target, words):
    with pytest.raises(ValueError, match=words):
        recheck_boxes(torch.zeros(3, 10, 20, dtype=torch.uint8), target)


def test_a_name_that_says_a_side_says_the_other_one_in_a_mirrored_picture():
    assert mirrored_predicates(SIDED).tolist() == [1, 0, 2, -1, 4, 5, 6]
    assert mirrored_predicates(SIDED, {"west of": "east of"}).tolist() == [1, 0, 2, -1, 5, 4, 6]
    with pytest.raises(BadInput, match="north of.*not predicates of the data"):
        mirrored_predicates(SIDED, {"north of": "south of"})


def test_relations_are_mirrored_with_the_image_or_it_stays_as_it_is():
    image, plain = sample(
        [[0, 0, 10, 10], [20, 0, 30, 10]],
        (20, 40),
        [
            [0, 1, 0],
            [1, 0, 1],
            [0, 1, 2],
        ],
    )
    target = plain | {"mirrored_predicates": mirrored_predicates(SIDED)}
    mirrored, found = flip(image, target)
    assert torch.equal(mirrored, image.flip(2))
    assert found["boxes"].tolist() == [[30, 0, 40, 10], [10, 0, 20, 10]]
    assert found["relations"].tolist() == [[0, 1, 1], [1, 0, 0], [0, 1, 2]]
    assert flip(image, plain)[1]["relations"] is plain["relations"]  # of a data set without such names
    target["relations"][0, 2] = 3  # "to the left of", and there is no "to the right of"
    same, found = flip(image, target)
    assert same is image
    assert found is target
