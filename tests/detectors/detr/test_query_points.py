"""Queries of DETR that are anchored at points of a grid."""

import pytest
import torch
from small_detectors import batch_of, predicted, small
from torch.testing import assert_close

from toolkit.detectors.detr.query_points import encode_sinusoidal_position_embedding, grid_points

POINTS = {"d_model": 96, "heads": 4, "num_queries": 16, "query_points": True}
CELLS_XY = torch.cartesian_prod(torch.arange(8), torch.arange(8)).flip(1)  # of an 8 x 8 map


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_queries_look_first_around_their_points(count, pre_norm):
    """Where the first cross-attention of a new model goes, on a map of the encoder with any content."""
    core = small("detr", **{**POINTS, "num_queries": count, "pre_norm": pre_norm}).model.model
    points = grid_points(count)
    assert len(points.unique(dim=0)) == count
    assert points.min() > 0
    assert points.max() < 1
    tokens = (CELLS_XY + 0.5) / 8
    content = core.encoder(torch.randn(1, 64, 96), spatial_position_embeddings=torch.zeros(1, 64, 96)).last_hidden_state
    attention = core.decoder.layers[0].encoder_attn
    queries = attention.q_proj(core.query_position_embeddings.weight).view(count, 4, -1)
    keys = attention.k_proj(content[0] + encode_sinusoidal_position_embedding(tokens, 48)).view(64, 4, -1)
    weights = (torch.einsum("qhd,khd->hqk", queries, keys) / 24**0.5).softmax(-1)
    distances = (points[:, None] - tokens).abs().amax(-1)  # of query and token, in parts of the image
    assert (weights * distances).sum(-1).max() < 0.2, "0.25 and more where all are looked at alike"


def test_boxes_are_told_from_the_points_and_move_with_them():
    detector = small("detr", **POINTS)
    batch = batch_of([2, 0, 1])
    centres = predicted(detector, batch)["boxes"][..., :2]
    detector.query_points.data += 1.0
    moved = predicted(detector, batch)["boxes"][..., :2]
    assert_close(centres, grid_points(16).expand_as(centres))  # before any step
    assert_close(moved.logit(), centres.logit() + 1, atol=1e-5, rtol=1e-5)


def test_points_have_the_embeddings_of_transformers():
    core = small("detr", d_model=96, heads=4).model.model
    mask = torch.ones(1, 8, 8, dtype=torch.bool)
    theirs = core.position_embedding(
        torch.zeros(1, 96, 8, 8).shape,
        "cpu",
        torch.float32,
        mask,
    )
    tokens = (CELLS_XY + 1) / 8  # theirs count from 1
    ours = encode_sinusoidal_position_embedding(tokens, 48)
    assert_close(ours, theirs[0].flatten(1).T, atol=1e-4, rtol=0)
