"""data.batch_mixup and data.copy_blend: pixels and boxes are what they say; a function of seed and batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import assert_same, sample, shapes_table

from toolkit.base.errors import BadInput
from toolkit.data.pipeline import loader_of_settings
from toolkit.data.transforms.mixing import BLENDED_OBJECTS, blend_objects, mix_batch, mix_neighbours
from toolkit.run.settings import DataConfig

SIDE = 40


@st.composite
def batches(draw):
    """Samples of one size with boxes inside, some of them crowds or small, and one relation where there are two."""
    batch = []
    for number in range(draw(st.integers(1, 4))):
        boxes = []
        for _ in range(draw(st.integers(0, 3))):
            x, y = draw(st.integers(0, SIDE - 2)), draw(st.integers(0, SIDE - 2))
            boxes.append([x, y, draw(st.integers(x + 1, SIDE)), draw(st.integers(y + 1, SIDE))])
        relations = [[0, len(boxes) - 1, 5]] if len(boxes) > 1 else ()
        image, target = sample(boxes, (SIDE, SIDE), relations, draw(st.sets(st.integers(0, 2))))
        target |= {"image_id": number, "labels": target["labels"] + 10 * number}
        batch.append((image.roll(number, 1), target))
    return batch


@settings(max_examples=30, deadline=None)
@given(batches(), st.floats(0.45, 0.55))
def test_each_image_is_mixed_with_the_one_before_it(samples, share):
    for i, (image, target) in enumerate(mix_neighbours(samples, share)):
        (own, mine), (other, more) = samples[i], samples[i - 1]
        expected = own.double() * share + other.double() * (1 - share)
        assert image.dtype == torch.uint8 and (image.double() - expected).abs().max() <= 0.501
        assert target["image_id"] == mine["image_id"]
        assert target["labels"].tolist() == mine["labels"].tolist() + more["labels"].tolist()
        assert target["boxes"].equal(torch.cat([mine["boxes"], more["boxes"]]))
        shifted = more["relations"] + torch.tensor([len(mine["labels"]), len(mine["labels"]), 0])
        assert target["relations"].tolist() == mine["relations"].tolist() + shifted.tolist()


@settings(max_examples=60, deadline=None)
@given(batches(), st.floats(0.45, 0.55), st.integers(0, 2**40))
def test_blended_objects_are_where_their_boxes_say(samples, share, seed):
    before = [image.clone() for image, _ in samples]
    found = blend_objects(samples, share, torch.Generator().manual_seed(seed))
    pool = {int(label): (image, target["boxes"][row]) for image, target in samples
            for row, label in enumerate(target["labels"]) if target["area"][row] >= 100 and not target["iscrowd"][row]}
    for (image, target), (own, mine), kept in zip(found, samples, before, strict=True):
        assert own.equal(kept), "the images of the batch are not changed in place"
        count = len(mine["labels"])
        assert target["boxes"][:count].equal(mine["boxes"]) and target["relations"].equal(mine["relations"])
        added, labels = target["boxes"][count:].int().tolist(), target["labels"][count:].tolist()
        assert len(added) == min(BLENDED_OBJECTS, len(pool)) and len(set(labels)) == len(labels)
        touched = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        for label, (x1, y1, x2, y2) in zip(labels, added, strict=True):
            source, box = pool[label]
            sx1, sy1, sx2, sy2 = box.int().tolist()
            assert 0 <= x1 < x2 <= SIDE and 0 <= y1 < y2 <= SIDE and (x2 - x1, y2 - y1) == (sx2 - sx1, sy2 - sy1)
            margin = [int((x2 - x1) * 0.25), int((y2 - y1) * 0.25)]
            touched[max(0, y1 - margin[1]) : y2 + margin[1], max(0, x1 - margin[0]) : x2 + margin[0]] = True
            if len(added) == 1:
                expected = own[:, y1:y2, x1:x2].double() * share + source[:, sy1:sy2, sx1:sx2].double() * (1 - share)
                assert (image[:, y1:y2, x1:x2].double() - expected).abs().max() <= 0.501
        assert image[:, ~touched].equal(own[:, ~touched])


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(0, 2**40))
def test_a_batch_is_mixed_or_blended_or_neither(samples, seed):
    draws = [mix_batch(samples, m, b, torch.Generator().manual_seed(seed)) for m, b in ((1, 1), (0, 1), (0, 0))]
    share = 0.45 + (0.55 - 0.45) * float(torch.rand(3, generator=torch.Generator().manual_seed(seed))[0])
    for mixed, expected in zip(draws[0], mix_neighbours(samples, share), strict=True):
        assert_same(mixed, expected)
    added = [len(t["labels"]) - len(o["labels"]) for (_, t), (_, o) in zip(draws[1], samples, strict=True)]
    assert max(added) <= BLENDED_OBJECTS
    assert all(image.equal(own) for (image, _), (own, _) in zip(draws[2], samples, strict=True))


def test_a_loader_gives_the_same_mixed_batches_with_workers_and_after_a_resume(tmp_path):
    table = shapes_table(tmp_path, 12, 48)

    def loaded(workers=0, done=0, plain=0, **mixing):
        settings = DataConfig(image_size=48, workers=workers, batch_size_per_device=4, **mixing)
        sampler, loader = loader_of_settings(table, settings, seed=0, stride=1)
        if plain:
            assert loader.dataset.dataset.has_plain_epochs
            loader.dataset.dataset.plan(plain, 3, 3)
        sampler.advance(4 * done)
        return [batch.images for batch in loader]

    mixing = {"batch_mixup": 0.5, "copy_blend": 1.0}
    mixed, untouched = loaded(**mixing), loaded()
    assert not any(map(torch.equal, mixed, untouched))
    assert all(map(torch.equal, loaded(workers=2, done=1, **mixing), mixed[1:]))
    assert all(map(torch.equal, loaded(plain=1, **mixing), untouched))
    with pytest.raises(BadInput, match="data.copy_blend makes all images of a batch one size"):
        loader_of_settings(table, DataConfig(scales=[32], copy_blend=0.5), seed=0, stride=1)
    with pytest.raises(BadInput, match="batch_mixup cannot go on"):
        loader_of_settings(table, DataConfig(batch_mixup=0.5, plain_without=["mosaic"]), seed=0, stride=1)
