"""The settings of a `final/` folder."""

import pytest

from toolkit.models.final import checked_size


@pytest.mark.parametrize(
    "size",
    [
        None,
        {"height": 480, "width": 640},
        {"shortest_edge": 800},
        {"shortest_edge": 800, "longest_edge": 1333},
        {"shortest_edge": 20_000},
    ],
)
def test_sizes_that_images_can_be_resized_to(size):
    assert checked_size(size) == size


@pytest.mark.parametrize(
    "size",
    [
        640,
        {},
        {"height": 480},
        {"longest_edge": 1333},
        {"height": 480, "width": 0},
        {"height": 480, "width": 640.0},
        {"height": 480, "width": True},
        {"height": 480, "width": 640, "depth": 3},
        {"shortest_edge": 20_001},
    ],
)
def test_other_sizes_are_refused(size):
    with pytest.raises(ValueError, match="expected null, height and width, or shortest_edge"):
        checked_size(size)
