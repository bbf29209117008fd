"""The effects of the causal head."""

from itertools import combinations

import torch
from relation_data import batch_of, head_of

from toolkit.detectors.scene_graphs.heads.causal import CausalHead


@torch.no_grad()
def test_effects_of_causal_differ():
    batch = batch_of([4, 3])
    outputs = []
    for effect in ("none", "TDE", "NIE", "TE"):
        head = head_of("causal", "sgcls", effect=effect)
        head.train()(batch)
        outputs.append(head.eval()(batch).relation_logits)
    for one, other in combinations(outputs, 2):
        assert (one - other).abs().max() > 1e-3


@torch.no_grad()
def test_effects_survive_half_precision():
    """The difference of two bfloat16 sums would have next to no digits left."""
    batch = batch_of([4, 3])
    head = head_of("causal", "predcls", effect="TDE").eval()
    expected = head(batch).relation_logits
    head.frequency.table.weight.add_(500.0)  # cancels exactly
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = head(batch).relation_logits
    assert isinstance(head, CausalHead)
    assert half.dtype == torch.float32
    torch.testing.assert_close(
        half,
        expected,
        rtol=0.05,
        atol=0.05 * float(expected.abs().max()),
    )
