"""DETR's pre-norm variant (`normalize_before` of facebookresearch/detr `models/transformer.py`), which transformers
does not have: transformers' layers with the norms moved before attention and feed-forward, and a norm after the
encoder."""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DetrForObjectDetection
from transformers.models.detr.modeling_detr import DetrDecoderLayer, DetrEncoder, DetrEncoderLayer


def normalize_before_(model: DetrForObjectDetection) -> None:
    """Replace the encoder and the decoder layers of a DETR, in place, by those of the pre-norm variant with random
    weights."""
    core = model.model
    config = model.config
    core.encoder = PreNormEncoder(config)
    core.decoder.layers = nn.ModuleList(PreNormDecoderLayer(config) for _ in range(config.decoder_layers))


class PreNormEncoder(DetrEncoder):
    """DETR's encoder with pre-norm layers and a final norm, without which its output would not be normalised."""

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(PreNormEncoderLayer(config) for _ in range(config.encoder_layers))
        self.layernorm = nn.LayerNorm(config.d_model)

    def forward(self, *args, **kwargs):
        """See `DetrEncoder.forward`."""
        outputs = super().forward(*args, **kwargs)
        outputs.last_hidden_state = self.layernorm(outputs.last_hidden_state)
        return outputs


class PreNormEncoderLayer(DetrEncoderLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def forward(self, hidden_states: Tensor, attention_mask, spatial_position_embeddings=None, **kwargs) -> Tensor:
        """See `DetrEncoderLayer.forward`."""
        normed = self.self_attn_layer_norm(hidden_states)
        attended, _ = self.self_attn(
            normed,
            attention_mask,
            position_embeddings=spatial_position_embeddings,
            **kwargs,
        )
        hidden_states = hidden_states + F.dropout(attended, self.dropout, self.training)
        return hidden_states + self.mlp(self.final_layer_norm(hidden_states))


class PreNormDecoderLayer(DetrDecoderLayer):
    """x + attention(norm(x)) among the queries, then the same attending to the encoder's output, then x +
    feed_forward(norm(x))."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask=None,
        spatial_position_embeddings=None,
        object_queries_position_embeddings=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        **kwargs,
    ) -> Tensor:
        """See `DetrDecoderLayer.forward`."""
        positions = {"position_embeddings": object_queries_position_embeddings}
        normed = self.self_attn_layer_norm(hidden_states)
        attended, _ = self.self_attn(normed, attention_mask, **positions, **kwargs)
        hidden_states = hidden_states + F.dropout(attended, self.dropout, self.training)
        normed = self.encoder_attn_layer_norm(hidden_states)
        positions["encoder_position_embeddings"] = spatial_position_embeddings
        attended, _ = self.encoder_attn(
            normed,
            encoder_hidden_states,
            encoder_attention_mask,
            **positions,
            **kwargs,
        )
        hidden_states = hidden_states + F.dropout(attended, self.dropout, self.training)
        return hidden_states + self.mlp(self.final_layer_norm(hidden_states))
