"""What SQUAT reads."""

import pytest
import torch
from relation_data import batch_of, head_of

from toolkit.detectors.scene_graphs.heads.squat import SquatHead


@pytest.mark.parametrize("reads", [False, True])
def test_squat_reads_union_boxes_only_where_told(reads):
    head = head_of("squat", "predcls", use_union=reads).eval()
    batch = batch_of([4, 3])
    before = head(batch).relation_logits
    batch.union_features = batch.union_features + 1
    assert isinstance(head, SquatHead)
    assert head.reads_union == reads
    assert torch.equal(before, head(batch).relation_logits) != reads
