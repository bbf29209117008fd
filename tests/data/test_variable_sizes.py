"""Images of varying size: which sizes are drawn; their batches are tested in test_sampling.py."""

import pytest

from toolkit.data.sampling import VariableSizes

SIZES = ((128, 96), (160, 160), (192, 256))


def test_sizes_depend_on_seed_and_epoch_and_are_all_used():
    sizes = VariableSizes(SIZES)
    drawn = sizes.draw(3, 0, 300)
    assert drawn == sizes.draw(3, 0, 400)[:300]
    assert all(80 < drawn.count(size) < 120 for size in SIZES)
    assert drawn != sizes.draw(3, 1, 300)
    assert drawn != sizes.draw(4, 0, 300)


@pytest.mark.parametrize(
    ("sizes", "base_hw", "batch_size", "largest"),
    [
        (SIZES, None, 4, ((192, 256), 4)),
        (SIZES, (160, 160), 4, ((160, 160), 4)),
        (((320, 320),), (32, 32), 2, ((320, 320), 1)),
    ],
)
def test_the_largest_batch_has_the_most_pixels(sizes, base_hw, batch_size, largest):
    assert VariableSizes(sizes, base_hw=base_hw).largest(batch_size) == largest
