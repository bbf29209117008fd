"""Order and features of boxes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relation_data import SIZES

from scripts.benches.scene_graph import random_batch
from toolkit.detectors.scene_graphs.box_features import reading_order


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.integers(0, 6),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 10**6),
)
def test_reading_order_has_an_inverse(num_objects, seed):
    boxes = random_batch(num_objects, SIZES, seed).boxes_xyxy
    order, inverse, sizes = reading_order(boxes, num_objects)
    assert torch.equal(order[inverse], torch.arange(len(boxes)))
    assert sizes.sum() == len(boxes)
    assert (sizes.diff() <= 0).all()
