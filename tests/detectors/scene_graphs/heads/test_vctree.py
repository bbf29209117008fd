"""What VCTree draws."""

import torch

from toolkit.detectors.scene_graphs.heads.vctree import drawn_columns


def test_columns_are_drawn_as_multinomial_draws_them():
    weights = torch.rand(
        500,
        9,
        generator=torch.Generator().manual_seed(0),
    )[:, 1:]
    torch.manual_seed(3)
    expected = weights.multinomial(1)[:, 0]
    torch.manual_seed(3)
    assert torch.equal(drawn_columns(weights, torch.empty(500, 8).exponential_()), expected)
