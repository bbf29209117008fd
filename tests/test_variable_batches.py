"""Images of varying size: the same on every rank, a function of (seed, epoch, batch), resumable.

Run with `pytest tests/test_variable_batches.py -n 0`.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.batches import make_loader
from toolkit.data.dataset import DetectionDataset
from toolkit.data.formats import open_dataset
from toolkit.data.sampling import EpochSampler
from toolkit.data.shapes import make_shapes
from toolkit.data.transforms.geometry import RandomFlip, ThenResize
from toolkit.data.variable_sizes import VariableSizes
from toolkit.errors import BadInput

SIZES = ((128, 96), (160, 160), (192, 256))


def epochs(sampler, number=1):
    batches = []
    for epoch in range(number):
        sampler.set_epoch(epoch)
        batches += list(sampler)
    return batches


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(8, 60), batch=st.integers(1, 4), world=st.integers(1, 2), every=st.integers(1, 3),
    keep_pixels=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_sample_once_and_one_size_a_batch_on_all_ranks(samples, batch, world, every, keep_pixels, seed):
    sizes = VariableSizes(SIZES, every, base_hw=(160, 160) if keep_pixels else None)
    ranks = [epochs(EpochSampler(samples, batch, rank, world, seed, sizes=sizes)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(key.index for batches in ranks for keys in batches for key in keys) == list(range(samples))
    for step in range(len(ranks[0])):
        drawn = {key.size_hw for batches in ranks for key in batches[step]}
        assert len(drawn) == 1 and drawn <= set(SIZES)
        if step < len(ranks[0]) - 1:
            (height, width), = drawn
            images = max(1, batch * 160 * 160 // (height * width)) if keep_pixels else batch
            assert [len(batches[step]) for batches in ranks] == [images] * world
        if step % every:
            assert ranks[0][step][0].size_hw == ranks[0][step - 1][0].size_hw


def test_the_sizes_depend_on_seed_and_epoch_and_are_all_used():
    sizes = VariableSizes(SIZES)
    drawn = sizes.draw(3, 0, 300)
    assert drawn == sizes.draw(3, 0, 400)[:300]
    assert all(80 < drawn.count(size) < 120 for size in SIZES)
    assert drawn != sizes.draw(3, 1, 300) and drawn != sizes.draw(4, 0, 300)


@pytest.mark.parametrize("base_hw", [None, (160, 160)])
def test_resuming_goes_on_with_the_same_batches(base_hw):
    def sampler(**options):
        return EpochSampler(50, 4, seed=5, sizes=VariableSizes(SIZES, base_hw=base_hw), **options)

    whole = epochs(sampler(), 2)
    per_epoch = len(epochs(sampler()))
    first = sampler()
    first.set_epoch(1)
    first.advance_batches(3)
    again = sampler()
    assert again.load_state_dict(first.state_dict()) == []
    assert list(again) == whole[per_epoch + 3 :]


def test_another_number_of_ranks_or_other_sizes_go_on_with_the_samples_left_and_say_so():
    first = EpochSampler(50, 4, 0, 1, 5, sizes=VariableSizes(SIZES, base_hw=(160, 160)))
    first.advance_batches(3)
    left = {key.index for keys in first for key in keys}
    ranks = [EpochSampler(50, 4, rank, 2, 5, sizes=first.sizes) for rank in range(2)]
    notes = [rank.load_state_dict(first.state_dict()) for rank in ranks]
    assert len(notes[0]) == 1 and "2 x 4" in notes[0][0]
    assert {key.index for rank in ranks for keys in rank for key in keys} == left
    other = EpochSampler(50, 4, 0, 1, 5, sizes=VariableSizes(((64, 64),)))
    assert any("image sizes" in note for note in other.load_state_dict(first.state_dict()))
    assert {key.index for keys in other for key in keys} == left


@pytest.mark.parametrize("sizes", [None, VariableSizes(SIZES), VariableSizes(SIZES, base_hw=(160, 160))])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_steps_of_a_run_are_known_before_it(sizes, world_size):
    """Seven epochs, three micro-batches a step from epoch 2 on, one before."""
    sampler = EpochSampler(47, 4, 0, world_size, 5, sizes=sizes)
    steps = 0
    for epoch in range(7):
        sampler.set_epoch(epoch)
        steps += -(-len(sampler) // (3 if epoch >= 2 else 1))
    sampler.set_epoch(3)
    assert sampler.steps_in(7, 3, 2) == steps


def test_the_largest_batch_has_the_most_pixels():
    assert VariableSizes(SIZES).largest(4) == ((192, 256), 4)
    assert VariableSizes(SIZES, base_hw=(160, 160)).largest(4) == ((160, 160), 4)
    assert VariableSizes(((320, 320),), base_hw=(32, 32)).largest(2) == ((320, 320), 1)


def test_sizes_that_make_no_sense_are_bad_input():
    for options in ({"sizes_hw": ()}, {"sizes_hw": ((0, 32),)}, {"sizes_hw": SIZES, "every": 0}):
        with pytest.raises(BadInput, match="size"):
            VariableSizes(**options)
    with pytest.raises(BadInput, match="aspect ratio"):
        EpochSampler(50, 4, groups=[0] * 50, sizes=VariableSizes(SIZES, base_hw=(160, 160)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_batches_of_these_sizes_with_boxes_that_fit(tmp_path, workers):
    make_shapes(tmp_path / "shapes", train_images=9, val_images=1, image_size=64)
    table = open_dataset(tmp_path / "shapes" / "annotations" / "train.json", cache_dir=tmp_path / "cache")
    sampler = EpochSampler(len(table), 2, seed=1, sizes=VariableSizes(((32, 64), (64, 32)), base_hw=(32, 64)))
    dataset = DetectionDataset(table, ThenResize(RandomFlip()), seed=1)
    wanted = [keys[0].size_hw for keys in sampler]
    assert len(set(wanted)) == 2
    for batch, size in zip(make_loader(dataset, sampler, workers), wanted, strict=True):
        assert tuple(batch.images.shape[-2:]) == size
        for target in batch.targets:
            assert target["size"].tolist() == list(size)
            assert bool((target["boxes"] <= torch.tensor([size[1], size[0]] * 2)).all())
