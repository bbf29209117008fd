"""Mosaics, and the mixing and blending of the images of a batch: pixels, boxes and relations are what they say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    corners = [(0, 0, width / 4, height / 4), (width * 3 / 4, height * 3 / 4, width, height)][:count]
    target = target_of(
        corners,
        size_hw,
        [[0, count - 1, place]] if count else (),
    )
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
    samples = [grey(place, (height, width), count) for place, (height, width, count) in enumerate(sizes)]
    image, target = mosaic(samples, (SIDE, SIDE), (row, column))
    boxes = target["boxes"]
    labels = target["labels"]
    assert image.shape == (3, SIDE, SIDE)
    assert target["size"].tolist() == target["orig_size"].tolist() == [SIDE, SIDE]
    assert target["image_id"] == 0
    assert len(boxes) == len(labels) == len(target["area"]) == len(target["iscrowd"])
    assert (boxes >= 0).all()
    assert (boxes <= SIDE).all()
    centres = ((boxes[:, :2] + boxes[:, 2:]) / 2).long().clamp(max=SIDE - 1)
    assert image[0, centres[:, 1], centres[:, 0]].tolist() == (40 * (labels + 1)).tolist()
    assert (boxes[:, 1] >= row - 1e-3).equal(labels >= 2)
    assert (boxes[:, 0] >= column - 1e-3).equal(labels % 2 == 1)
    for subject, object_, predicate in target["relations"].tolist():
        assert labels[subject] == labels[object_] == predicate


def test_the_quadrants_of_a_mosaic_and_what_none_covers():
    """Wide images become 40 x 80 on a canvas of 48 x 80, high ones 48 x 24."""
    sizes = [
        (32, 64),
        (32, 64),
        (64, 32),
        (64, 32),
    ]
    image, _ = mosaic(
        [grey(number, size, 0) for number, size in enumerate(sizes)],
        (48, 80),
        (20, 40),
    )
    assert image[0, [0, 19, 0, 19], [0, 39, 79, 40]].tolist() == [40, 40, 80, 80]
    assert image[0, [20, 47, 20, 47], [39, 16, 40, 63]].tolist() == [120, 120, 160, 160]
    for row, column in ((47, 15), (20, 64)):
        assert image[:, row, column].tolist() == list(GLUONCV_FILL_RGB)


def test_the_four_meet_in_the_middle():
    points = torch.tensor([draw_point((100, 200), generator(seed)) for seed in range(300)])
    assert points.amin(0).tolist() >= [25, 50]
    assert points.amax(0).tolist() <= [75, 150]
    assert points.float().std(0)[0] > 10


@settings(max_examples=30, deadline=None)
@given(samples(), samples(), st.floats(-0.2, 1.2))
def test_mixup_is_the_weighted_sum_of_both_images_in_the_upper_left(one, other, share):
    image, target = mixup(one, other, share)
    share = min(max(share, 0), 1)
    count = len(one[1]["labels"])
    assert target["mixup"][:count].tolist() == pytest.approx([share] * count)
    if share == 1:
        assert image is one[0]
        assert len(target["boxes"]) == count
        return
    expected = torch.zeros(
        3,
        *torch.tensor([one[0].shape, other[0].shape]).amax(0)[1:],
        dtype=torch.float64,
    )
    expected[:, : one[0].shape[1], : one[0].shape[2]] += one[0].double() * share
    expected[:, : other[0].shape[1], : other[0].shape[2]] += other[0].double() * (1 - share)
    assert image.shape == expected.shape
    lost = expected - image
    assert (lost > -1e-4).all()
    assert (lost < 1 + 1e-4).all()  # truncated
    assert target["size"].tolist() == list(image.shape[1:])
    assert target["boxes"].equal(torch.cat([one[1]["boxes"], other[1]["boxes"]]))
    assert target["mixup"][count:].tolist() == pytest.approx([1 - share] * len(other[1]["labels"]))
    assert target["relations"][len(one[1]["relations"]) :].equal(shifted(other[1]["relations"], count))


def test_the_share_of_mixup_is_a_function_of_the_generator():
    drawn = torch.tensor([draw_mixup_lambda(generator(seed)) for seed in range(500)])
    assert draw_mixup_lambda(generator(7)) == pytest.approx(drawn[7].item())
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.05)
    assert drawn.std().item() == pytest.approx(0.25, abs=0.03)


def shifted(relations, count):
    """Of boxes that come behind so many others."""
    return relations + torch.tensor([count, count, 0])


@st.composite
def batches(draw):
    """Samples of one size with boxes inside, some of them crowds or small, and one relation where there are two."""
    batch = []
    for number in range(draw(st.integers(1, 4))):
        boxes = []
        for _ in range(draw(st.integers(0, 3))):
            x = draw(st.integers(0, 38))
            y = draw(st.integers(0, 38))
            boxes.append(
                [
                    x,
                    y,
                    draw(st.integers(x + 1, 40)),
                    draw(st.integers(y + 1, 40)),
                ]
            )
        relations = [[0, len(boxes) - 1, 5]] if len(boxes) > 1 else ()
        image, target = sample(
            boxes,
            (40, 40),
            relations,
            draw(st.sets(st.integers(0, 2))),
        )
        target |= {"image_id": number, "labels": target["labels"] + 10 * number}
        batch.append((image.roll(number, 1), target))
    return batch


def assert_mixed(image, own, other, share):
    expected = own.double() * share + other.double() * (1 - share)
    assert image.dtype == torch.uint8
    assert (image.double() - expected).abs().max() <= 0.501


@settings(max_examples=30, deadline=None)
@given(batches(), shares)
def test_each_image_is_mixed_with_the_one_before_it(batch, share):
    for number, (image, target) in enumerate(mix_neighbours(batch, share)):
        own, mine = batch[number]
        other, more = batch[number - 1]
        assert_mixed(image, own, other, share)
        assert target["image_id"] == mine["image_id"]
        assert target["boxes"].equal(torch.cat([mine["boxes"], more["boxes"]]))
        assert target["labels"].equal(torch.cat([mine["labels"], more["labels"]]))
        count = len(mine["labels"])
        assert target["relations"].equal(torch.cat([mine["relations"], shifted(more["relations"], count)]))


@settings(max_examples=60, deadline=None)
@given(batches(), shares, seeds)
def test_blended_objects_are_where_their_boxes_say(samples, share, seed):
    before = [image.clone() for image, _ in samples]
    pool = {}
    for image, target in samples:
        for row, label in enumerate(target["labels"].tolist()):
            if target["area"][row] >= 100 and not target["iscrowd"][row]:
                pool[label] = (image, target["boxes"][row].int().tolist())
    blended = blend_objects(samples, share, generator(seed))
    for (image, target), (own, mine), kept in zip(blended, samples, before, strict=True):
        assert own.equal(kept)  # the images of the batch are not changed in place
        count = len(mine["labels"])
        added = target["boxes"][count:].int().tolist()
        labels = target["labels"][count:].tolist()
        assert target["boxes"][:count].equal(mine["boxes"])
        assert target["relations"].equal(mine["relations"])
        assert len(set(labels)) == len(added) == min(BLENDED_OBJECTS, len(pool))
        is_touched = torch.zeros(40, 40, dtype=torch.bool)
        for label, (x1, y1, x2, y2) in zip(labels, added, strict=True):
            source, (left, top, right, bottom) = pool[label]
            assert 0 <= x1 < x2 <= 40
            assert 0 <= y1 < y2 <= 40
            assert (x2 - x1, y2 - y1) == (right - left, bottom - top)
            wide = int((x2 - x1) * 0.25)
            high = int((y2 - y1) * 0.25)
            is_touched[max(0, y1 - high) : y2 + high, max(0, x1 - wide) : x2 + wide] = True
            if len(added) == 1:
                patch = source[:, top:bottom, left:right]
                assert_mixed(
                    image[:, y1:y2, x1:x2],
                    own[:, y1:y2, x1:x2],
                    patch,
                    share,
                )
        assert image[:, ~is_touched].equal(own[:, ~is_touched])


@settings(max_examples=30, deadline=None)
@given(batches(), seeds)
def test_a_batch_is_mixed_or_blended_or_neither(samples, seed):
    share = 0.45 + (0.55 - 0.45) * float(torch.rand(3, generator=generator(seed))[0])
    for mixed, expected in zip(
        mix_batch(samples, 1, 1, generator(seed)),
        mix_neighbours(samples, share),
        strict=True,
    ):
        assert_same(mixed, expected)
    source = generator(seed)
    torch.rand(3, generator=source)
    for mixed, expected in zip(
        mix_batch(samples, 0, 1, generator(seed)),
        blend_objects(samples, share, source),
        strict=True,
    ):
        assert_same(mixed, expected)
    for mixed, expected in zip(
        mix_batch(samples, 0, 0, generator(seed)),
        samples,
        strict=True,
    ):
        assert_same(mixed, expected)


def test_a_loader_gives_the_same_mixed_batches_with_workers_and_after_a_resume(tmp_path):
    table = shapes_table(tmp_path, 12, 48)

    def loaded(workers=0, done=0, plain=0, **mixing):
        settings = DataConfig(image_size=48, workers=workers, batch_size_per_device=4, **mixing)
        sampler, loader = loader_of_settings(table, settings, seed=0, stride=1)
        if plain:
            loader.dataset.dataset.plan(plain, 3, 3)
        sampler.advance(4 * done)
        return [batch.images for batch in loader]

    mixing = {"batch_mixup": 0.5, "copy_blend": 1.0}
    mixed = loaded(**mixing)
    untouched = loaded()
    assert not any(map(torch.equal, mixed, untouched))
    assert all(
        map(
            torch.equal,
            loaded(workers=2, done=1, **mixing),
            mixed[1:],
        )
    )
    assert all(map(torch.equal, loaded(plain=1, **mixing), untouched))
