"""Mosaics, and the mixing and blending of the images of a batch: pixels, boxes and relations are what they say."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from samples import assert_same, generator, sample, samples, shapes_table, target_of

from toolkit.data.pipeline import loader_of_settings
from toolkit.data.transforms.geometry import GLUONCV_FILL_RGB
from toolkit.data.transforms.mixing import (
    BLENDED_OBJECTS,
    blend_objects,
    draw_mixup_lambda,
    draw_point,
    mix_batch,
    mix_neighbours,
    mixup,
    mosaic,
)
from toolkit.run.settings import DataConfig

SIDE = 64
shares = st.floats(0.45, 0.55)
seeds = st.integers(0, 2**40)


def grey(place, size_hw, count=2):
    """A flat image of a grey level of its own, with boxes in its corners and one relation."""
    height, width = size_hw
    upper_left = (0, 0, width / 4, height / 4)
    lower_right = (width * 3 / 4, height * 3 / 4, width, height)
    boxes = [upper_left, lower_right][:count]
    relations = [[0, count - 1, place]] if count else ()
    target = target_of(boxes, size_hw, relations)
    target["labels"] = torch.full((count,), place)
    image = torch.full(
        (3, *size_hw),
        40 * (place + 1),
        dtype=torch.uint8,
    )
    return image, target | {"image_id": place}


parts = st.tuples(
    st.integers(4, 90),
    st.integers(4, 90),
    st.integers(0, 2),
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(parts, min_size=4, max_size=4),
    st.integers(16, 48),
    st.integers(16, 48),
)
def test_every_box_of_a_mosaic_shows_its_own_image(sizes, row, column):
    samples = []
    for place, (*size_hw, count) in enumerate(sizes):
        samples.append(grey(place, tuple(size_hw), count))
    size_hw = (SIDE, SIDE)
    image, target = mosaic(samples, size_hw, (row, column))
    boxes = target["boxes"]
    labels = target["labels"]
    assert image.shape == (3, SIDE, SIDE)
    for key in ("size", "orig_size"):
        assert target[key].tolist() == [SIDE, SIDE]
    assert target["image_id"] == 0
    for key in ("labels", "area", "iscrowd"):
        assert len(target[key]) == len(boxes)
    assert (boxes >= 0).all()
    assert (boxes <= SIDE).all()
    left, top, right, bottom = boxes.unbind(1)
    x = ((left + right) / 2).long()
    y = ((top + bottom) / 2).long()
    last = SIDE - 1
    rows = y.clamp(max=last)
    columns = x.clamp(max=last)
    at_centres = image[0, rows, columns]
    levels = 40 * (labels + 1)
    assert at_centres.equal(levels.byte())
    is_below = top >= row - 1e-3
    assert is_below.equal(labels >= 2)
    is_right = left >= column - 1e-3
    assert is_right.equal(labels % 2 == 1)
    for subject, object_, predicate in target["relations"].tolist():
        assert labels[subject] == predicate
        assert labels[object_] == predicate


def test_the_quadrants_of_a_mosaic_and_what_none_covers():
    """Wide images become 40 x 80 on a canvas of 48 x 80, high ones 48 x 24."""
    wide = (32, 64)
    high = (64, 32)
    images = [
        grey(0, wide, count=0),
        grey(1, wide, count=0),
        grey(2, high, count=0),
        grey(3, high, count=0),
    ]
    size_hw = (48, 80)
    image, _ = mosaic(images, size_hw, (20, 40))
    corners = {
        40: ((0, 0), (19, 39)),
        80: ((0, 79), (19, 40)),
        120: ((20, 39), (47, 16)),
        160: ((20, 40), (47, 63)),
    }
    for level, places in corners.items():
        for row, column in places:
            assert image[0, row, column] == level
    for row, column in ((47, 15), (20, 64)):
        pixel = image[:, row, column]
        assert pixel.tolist() == list(GLUONCV_FILL_RGB)


def test_the_four_meet_in_the_middle():
    rows = []
    for seed in range(300):
        row, column = draw_point((100, 200), generator(seed))
        rows.append(row)
        assert 25 <= row <= 75
        assert 50 <= column <= 150
    assert np.std(rows) > 10


@settings(max_examples=30, deadline=None)
@given(samples(), samples(), st.floats(-0.2, 1.2))
def test_mixup_is_the_weighted_sum_of_both_images_in_the_upper_left(one, other, share):
    image, target = mixup(one, other, share)
    own, mine = one
    added, more = other
    share = min(max(share, 0), 1)
    count = len(mine["labels"])
    shares_of_boxes = target["mixup"].tolist()
    assert shares_of_boxes[:count] == approx([share] * count)
    if share == 1:
        assert image is own
        assert len(target["boxes"]) == count
        return
    height = max(own.shape[1], added.shape[1])
    width = max(own.shape[2], added.shape[2])
    assert image.shape == (3, height, width)
    expected = in_upper_left(own, height, width) * share
    expected += in_upper_left(added, height, width) * (1 - share)
    lost = expected - image
    assert (lost > -1e-4).all()
    assert (lost < 1 + 1e-4).all()  # truncated
    assert target["size"].tolist() == [height, width]
    assert target["boxes"].equal(joined(mine, more, "boxes"))
    num_others = len(more["labels"])
    assert shares_of_boxes[count:] == approx([1 - share] * num_others)
    first_of_other = len(mine["relations"])
    relations = target["relations"][first_of_other:]
    assert relations.equal(shifted(more["relations"], count))


def in_upper_left(image, height: int, width: int):
    """The image in float64, with zeros to its right and below."""
    right = width - image.shape[2]
    below = height - image.shape[1]
    padding = (0, right, 0, below)
    return torch.nn.functional.pad(image.double(), padding)


def joined(one: dict, other: dict, key: str):
    return torch.cat([one[key], other[key]])


def test_the_share_of_mixup_is_a_function_of_the_generator():
    shares = []
    for seed in range(500):
        share = draw_mixup_lambda(generator(seed))
        shares.append(
            share,
        )
    assert draw_mixup_lambda(generator(7)) == shares[7]
    drawn = torch.tensor(shares)
    assert drawn.mean().item() == approx(0.5, abs=0.05)
    assert drawn.std().item() == approx(0.25, abs=0.03)


def shifted(relations, count):
    """Of boxes that come behind so many others."""
    shift = torch.tensor([count, count, 0])
    return relations + shift


@st.composite
def batches(draw):
    """Samples of one size with boxes inside, some of them crowds or small, and one relation where there are two."""
    batch = []
    for number in range(draw(st.integers(1, 4))):
        boxes = []
        for _ in range(draw(st.integers(0, 3))):
            x = draw(st.integers(0, 38))
            y = draw(st.integers(0, 38))
            right = draw(st.integers(x + 1, 40))
            bottom = draw(st.integers(y + 1, 40))
            boxes.append([x, y, right, bottom])
        count = len(boxes)
        relations = [[0, count - 1, 5]] if count > 1 else ()
        crowds = draw(st.sets(st.integers(0, 2)))
        image, target = sample(boxes, (40, 40), relations, crowds)
        target["image_id"] = number
        target["labels"] = target["labels"] + 10 * number
        batch.append((image.roll(number, 1), target))
    return batch


def assert_mixed(image, own, other, share):
    expected = own.double() * share
    expected += other.double() * (1 - share)
    assert image.dtype == torch.uint8
    difference = image.double() - expected
    assert difference.abs().max() <= 0.501


@settings(max_examples=30, deadline=None)
@given(batches(), shares)
def test_each_image_is_mixed_with_the_one_before_it(batch, share):
    for number, (image, target) in enumerate(mix_neighbours(batch, share)):
        own, mine = batch[number]
        other, more = batch[number - 1]
        assert_mixed(image, own, other, share)
        assert target["image_id"] == mine["image_id"]
        assert target["boxes"].equal(joined(mine, more, "boxes"))
        assert target["labels"].equal(joined(mine, more, "labels"))
        added = shifted(more["relations"], len(mine["labels"]))
        relations = torch.cat([mine["relations"], added])
        assert target["relations"].equal(relations)


@settings(max_examples=60, deadline=None)
@given(batches(), shares, seeds)
def test_blended_objects_are_where_their_boxes_say(samples, share, seed):
    before = [image.clone() for image, _ in samples]
    pool = {}
    for image, target in samples:
        boxes = target["boxes"].int().tolist()
        is_taken = (target["area"] >= 100) & (target["iscrowd"] == 0)
        for row, label in enumerate(target["labels"].tolist()):
            if is_taken[row]:
                pool[label] = (image, boxes[row])
    blended = blend_objects(samples, share, generator(seed))
    assert len(blended) == len(samples)
    for number, (image, target) in enumerate(blended):
        own, mine = samples[number]
        assert own.equal(before[number])  # the images of the batch are not changed in place
        count = len(mine["labels"])
        boxes = target["boxes"]
        added = boxes[count:].int().tolist()
        labels = target["labels"][count:].tolist()
        assert boxes[:count].equal(mine["boxes"])
        assert target["relations"].equal(mine["relations"])
        assert len(added) == min(BLENDED_OBJECTS, len(pool))
        assert len(set(labels)) == len(added)
        is_touched = torch.zeros(40, 40, dtype=torch.bool)
        for label, box in zip(labels, added, strict=True):
            x1, y1, x2, y2 = box
            source, place_in_source = pool[label]
            left, top, right, bottom = place_in_source
            assert 0 <= x1 < x2 <= 40
            assert 0 <= y1 < y2 <= 40
            width = x2 - x1
            height = y2 - y1
            assert width == right - left
            assert height == bottom - top
            wide = int(width * 0.25)
            high = int(height * 0.25)
            rows = slice(max(0, y1 - high), y2 + high)
            columns = slice(max(0, x1 - wide), x2 + wide)
            is_touched[rows, columns] = True
            if len(added) == 1:
                patch = source[:, top:bottom, left:right]
                blended_part = image[:, y1:y2, x1:x2]
                own_part = own[:, y1:y2, x1:x2]
                assert_mixed(blended_part, own_part, patch, share)
        untouched = image[:, ~is_touched]
        assert untouched.equal(own[:, ~is_touched])


@settings(max_examples=30, deadline=None)
@given(batches(), seeds)
def test_a_batch_is_mixed_or_blended_or_neither(samples, seed):
    source = generator(seed)
    drawn, _, _ = torch.rand(3, generator=source).tolist()
    share = 0.45 + (0.55 - 0.45) * drawn
    mixed = mix_batch(samples, 1, 1, generator(seed))
    expected = mix_neighbours(samples, share)
    assert_same_batch(mixed, expected)
    blended = mix_batch(samples, 0, 1, generator(seed))
    expected = blend_objects(samples, share, source)
    assert_same_batch(blended, expected)
    neither = mix_batch(samples, 0, 0, generator(seed))
    assert_same_batch(neither, samples)


def assert_same_batch(batch, expected) -> None:
    for sample_of_batch, expected_sample in zip(batch, expected, strict=True):
        assert_same(sample_of_batch, expected_sample)


def test_a_loader_gives_the_same_mixed_batches_with_workers_and_after_a_resume(tmp_path):
    table = shapes_table(tmp_path, 12, 48)

    def loaded(workers=0, done=0, plain=0, **mixing):
        settings = DataConfig(
            image_size=48,
            workers=workers,
            batch_size_per_device=4,
            **mixing,
        )
        sampler, loader = loader_of_settings(table, settings, seed=0, stride=1)
        if plain:
            loader.dataset.dataset.plan(plain, 3, 3)
        sampler.advance(4 * done)
        return [batch.images for batch in loader]

    mixing = {"batch_mixup": 0.5, "copy_blend": 1.0}
    mixed = loaded(**mixing)
    untouched = loaded()
    assert not any(map(torch.equal, mixed, untouched))
    resumed = loaded(workers=2, done=1, **mixing)
    assert all(map(torch.equal, resumed, mixed[1:]))
    not_yet_mixed = loaded(plain=1, **mixing)
    assert all(map(torch.equal, not_yet_mixed, untouched))
