"""transformers' encoder layers without their host synchronisation.

In training each of them checks whether its output is finite, and clamps it if not, so that the host waits for the GPU
once per layer, in the middle of a step. Clamping does not change finite values, so here nothing is checked.
"""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIKE = {  # whose forward is this one, in transformers
    "ConditionalDetrEncoderLayer", "DFineEncoderLayer", "DeformableDetrEncoderLayer", "Deimv2EncoderLayer",
    "DetrEncoderLayer", "RTDetrV2EncoderLayer",
}  # fmt: skip


def clamp_unasked_(model: nn.Module) -> None:
    """Replaces the forward of all such layers in `model` by one that gives the same numbers."""
    for module in model.modules():
        if type(module).__name__ in ALIKE:
            module.forward = MethodType(_forward, module)


def _forward(
    self: nn.Module, hidden_states: Tensor, attention_mask: Tensor | None, spatial_position_embeddings=None, **kwargs
) -> Tensor:
    """See `DetrEncoderLayer.forward`; `RTDetrV2EncoderLayer` may normalise before, `DeformableDetrEncoderLayer` looks
    at the maps that it makes."""
    before = getattr(self, "normalize_before", False)
    if kwargs.get("reference_points") is not None:
        kwargs |= {"encoder_hidden_states": hidden_states, "encoder_attention_mask": attention_mask}
    normed = self.self_attn_layer_norm(hidden_states) if before else hidden_states
    attended, _ = self.self_attn(
        hidden_states=normed, attention_mask=attention_mask, position_embeddings=spatial_position_embeddings, **kwargs
    )
    hidden_states = hidden_states + F.dropout(attended, p=self.dropout, training=self.training)
    hidden_states = (self.final_layer_norm if before else self.self_attn_layer_norm)(hidden_states)
    hidden_states = hidden_states + self.mlp(hidden_states)
    if not before:
        hidden_states = self.final_layer_norm(hidden_states)
    if self.training:
        limit = torch.finfo(hidden_states.dtype).max - 1000
        hidden_states = hidden_states.clamp(min=-limit, max=limit)
    return hidden_states
