"""Images of varying size: which sizes are drawn, and batches of them; tests/test_samplers.py has the order."""

import pytest
import torch
from samples import shapes_table

from toolkit.data.batches import make_loader
from toolkit.data.dataset import DetectionDataset
from toolkit.data.sampling import EpochSampler, VariableSizes
from toolkit.data.transforms.geometry import RandomFlip, ThenResize

SIZES = ((128, 96), (160, 160), (192, 256))


def test_the_sizes_depend_on_seed_and_epoch_and_are_all_used():
    sizes = VariableSizes(SIZES)
    drawn = sizes.draw(3, 0, 300)
    assert drawn == sizes.draw(3, 0, 400)[:300]
    assert all(80 < drawn.count(size) < 120 for size in SIZES)
    assert drawn != sizes.draw(3, 1, 300) and drawn != sizes.draw(4, 0, 300)


def test_other_sizes_go_on_with_the_samples_left_and_say_so():
    first = EpochSampler(50, 4, 0, 1, 5, sizes=VariableSizes(SIZES, base_hw=(160, 160)))
    first.advance_batches(3)
    left = {key.index for keys in first for key in keys}
    other = EpochSampler(50, 4, 0, 1, 5, sizes=VariableSizes(((64, 64),)))
    assert any("image sizes" in note for note in other.load_state_dict(first.state_dict()))
    assert {key.index for keys in other for key in keys} == left


def test_the_largest_batch_has_the_most_pixels():
    assert VariableSizes(SIZES).largest(4) == ((192, 256), 4)
    assert VariableSizes(SIZES, base_hw=(160, 160)).largest(4) == ((160, 160), 4)
    assert VariableSizes(((320, 320),), base_hw=(32, 32)).largest(2) == ((320, 320), 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_batches_of_these_sizes_with_boxes_that_fit(tmp_path, workers):
    table = shapes_table(tmp_path, 9)
    sampler = EpochSampler(len(table), 2, seed=1, sizes=VariableSizes(((32, 64), (64, 32)), base_hw=(32, 64)))
    dataset = DetectionDataset(table, ThenResize(RandomFlip()), seed=1)
    wanted = [keys[0].size_hw for keys in sampler]
    assert len(set(wanted)) == 2
    for batch, size in zip(make_loader(dataset, sampler, workers), wanted, strict=True):
        assert tuple(batch.images.shape[-2:]) == size
        for target in batch.targets:
            assert target["size"].tolist() == list(size)
            assert bool((target["boxes"] <= torch.tensor([size[1], size[0]] * 2)).all())
