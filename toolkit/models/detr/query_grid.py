"""Queries of a DETR that begin on a grid, each looking at its own part of the image, instead of anywhere."""

import math

import torch
from torch import Tensor
from transformers import DetrForObjectDetection

TEMPERATURE = 10_000  # of DETR's sines


def start_on_grid_(model: DetrForObjectDetection, scale: float) -> None:
    """Gives the queries the position embeddings of points spread over the image, times `scale`, and the cross-attention
    the same projection for queries as for keys: a query then agrees most with the keys near its point.

    At random, as published, queries first have to agree on who looks where, which takes most of a short training.
    """
    core = model.model
    queries = core.query_position_embeddings.weight
    with torch.no_grad():
        queries.copy_(scale * sine_embedding(grid_points(len(queries)), queries.shape[1]))
        for layer in core.decoder.layers:
            layer.encoder_attn.q_proj.weight.copy_(layer.encoder_attn.k_proj.weight)


def grid_points(count: int) -> Tensor:
    """`(count, 2)` x and y from 0 to 1, in about as many rows as columns, row by row."""
    rows = max(1, math.isqrt(count))
    ends = [count * (row + 1) // rows for row in range(rows)]
    points = []
    for row, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        points += [((i + 0.5) / (end - first), (row + 0.5) / rows) for i in range(end - first)]
    return torch.tensor(points)


def sine_embedding(points_xy: Tensor, width: int) -> Tensor:
    """`(N, width)` DETR's embeddings (facebookresearch/detr `models/position_encoding.py`) of points from 0 to 1."""
    half = width // 2
    periods = TEMPERATURE ** (2 * torch.div(torch.arange(half), 2, rounding_mode="floor") / half)
    parts = []
    for coordinate in points_xy.flip(1).T:  # y before x
        angles = coordinate[:, None] * 2 * math.pi / periods
        parts.append(torch.stack((angles[:, 0::2].sin(), angles[:, 1::2].cos()), 2).flatten(1))
    return torch.cat(parts, 1)
