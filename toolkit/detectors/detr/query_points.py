"""DETR queries anchored at reference points: each query first attends near its point and predicts its box relative to
it.

In the published DETR a query's position determines where the query attends, but its box is not relative to that
position. Training from random weights must first learn where each query looks, and at which coordinates. Conditional
DETR (Meng et al., ICCV 2021) also predicts boxes relative to points. It changes the attention, whereas here the
attention is only initialised differently.
"""

import math

import torch
from torch import Tensor, nn
from transformers import DetrForObjectDetection
from transformers.models.conditional_detr.modeling_conditional_detr import encode_sinusoidal_position_embedding

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.initialise import start_at_zero_

FREQUENCIES = 2  # the highest of each axis, of which an image is a period or a little less
CHANNELS = 4 * FREQUENCIES  # of sine and cosine, of y and x
QUERY_SCALE = 3.0  # of the queries' embeddings, so that a query's state, of about 1, does not hide them
SHARPNESS = 8.0  # how much a logit of attention varies with each cosine of the distance between query and key


@torch.no_grad()
def anchor_queries_(model: DetrForObjectDetection) -> Tensor:
    """Anchor each of the Q queries of `model` at a point of a grid, in place: by its position embedding, and by a
    cross-attention that starts around the point.

    In each attention head, some channels get the highest frequencies of the embeddings of queries and keys, and nothing
    else; in these channels the encoder's output starts without content. The last layer of the box head starts at 0.
    Training can change all of it.

    Returns:
        `(Q, 2)` logits of the points, to be added to the logits of the box centres.

    Raises:
        BadInput: the position embeddings are learned, or the heads have fewer than 8 channels.
    """
    core = model.model
    config = model.config
    queries = core.query_position_embeddings.weight
    heads = config.decoder_attention_heads
    width = queries.shape[1] // heads
    if config.position_embedding_type != "sine" or width < CHANNELS:
        raise BadInput(
            f"model.query_points with model.position_embedding {config.position_embedding_type} and {heads} heads of "
            f"{width} channels (model.d_model / model.heads); expected sine, and heads of {CHANNELS} channels or more."
        )
    points = grid_points(len(queries))
    queries.copy_(QUERY_SCALE * encode_sinusoidal_position_embedding(points, queries.shape[1] // 2))
    half = queries.shape[1] // 2
    highest = range(2 * FREQUENCIES)  # sine and cosine of the highest frequencies of y; those of x are `half` later
    placed = [*highest, *(half + channel for channel in highest)]
    gain = math.sqrt(SHARPNESS * math.sqrt(width) / QUERY_SCALE)
    for layer in core.decoder.layers:
        for projection in (layer.encoder_attn.q_proj, layer.encoder_attn.k_proj):
            of_heads = projection.weight.view(heads, width, -1)
            of_heads[:, :, placed] = 0
            of_heads[:, :CHANNELS] = 0
            of_heads[:, range(CHANNELS), placed] = gain
    norms = [module for module in core.encoder.modules() if isinstance(module, nn.LayerNorm)]
    for last_norm in norms[-1:]:
        last_norm.weight[placed] = 0
    start_at_zero_(model.bbox_predictor)
    return torch.logit(points)


def grid_points(count: int) -> Tensor:
    """Return a grid of `count` points, `(count, 2)` x and y from 0 to 1, row by row. It has about as many rows as
    columns."""
    rows = max(1, math.isqrt(count))
    points = []
    for row in range(rows):
        columns = count * (row + 1) // rows - count * row // rows  # of 7 points in 2 rows: 3, then 4
        y = (row + 0.5) / rows
        points += [((column + 0.5) / columns, y) for column in range(columns)]
    return torch.tensor(points)
