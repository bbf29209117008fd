"""Records that a rule leaves are sorted by their image."""

import numpy as np

from toolkit.data.rules import by_image


def test_kept_records_come_image_by_image_in_their_own_order():
    image = np.array([2, 0, 2, 0, 1])
    kept = np.array([True, True, True, True, False])
    order, offsets = by_image(image, kept, 4)
    assert order.tolist() == [1, 3, 0, 2]
    assert offsets.tolist() == [0, 2, 2, 4, 4]
