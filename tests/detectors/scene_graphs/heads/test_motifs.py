"""The LSTMs of Motifs."""

import torch
from relation_data import head_of

from toolkit.detectors.scene_graphs.heads.motifs import MotifsHead
from toolkit.step.execution import describe_float32_layers, has_lstm_kernel


def test_lstms_in_float32_are_told_of_where_they_are():
    """Those of Motifs (two), on a CPU that has no kernel of them for halves; other heads have matrix products."""
    motifs = head_of("motifs", "predcls")
    assert isinstance(motifs, MotifsHead)
    told = describe_float32_layers(motifs, "cpu", "bf16")
    assert ("the 2 of the detector run in float32" in told) == (not has_lstm_kernel("cpu", torch.bfloat16))
    assert not describe_float32_layers(motifs, "cpu", "no")
    assert not describe_float32_layers(motifs, "cuda", "bf16")
    assert not describe_float32_layers(head_of("vctree", "predcls"), "cpu", "bf16")
