"""Removal of host-device synchronisations from transformers' layers and models. The results stay the same.

In training each encoder layer checks whether its output is finite, and clamps the output if not: one synchronisation
per layer, in the middle of a step. Clamping does not change finite values, so here it is done without the check.

Between the projection of the feature maps and the selection of queries, RT-DETR, D-FINE and DEIMv2 copy the sizes of
the maps to the device one by one, and make denoising queries there, although they know their objects on the host.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from toolkit.base.batch import send_dicts

# The function of transformers that makes denoising queries.
MAKE_DENOISING = "get_contrastive_denoising_training_group"
# Layers of transformers whose forward is `_forward`.
ENCODER_LAYERS = {f"{name}EncoderLayer" for name in "ConditionalDetr DFine DeformableDetr Deimv2 Detr RTDetrV2".split()}


def clamp_without_check_(model: nn.Module) -> None:
    """Replace the forward of all encoder layers in `model` by one that clamps its output without checking it first."""
    for module in model.modules():
        if type(module).__name__ in ENCODER_LAYERS:
            module.forward = MethodType(_forward, module)


def _forward(
    self: nn.Module, hidden_states: Tensor, attention_mask: Tensor | None, spatial_position_embeddings=None, **kwargs
) -> Tensor:
    """See `DetrEncoderLayer.forward`; `RTDetrV2EncoderLayer` may be pre-norm, `DeformableDetrEncoderLayer` attends to
    the maps that it updates."""
    before = getattr(self, "normalize_before", False)
    if kwargs.get("reference_points") is not None:
        kwargs |= {"encoder_hidden_states": hidden_states, "encoder_attention_mask": attention_mask}
    normed = self.self_attn_layer_norm(hidden_states) if before else hidden_states
    attended, _ = self.self_attn(
        hidden_states=normed,
        attention_mask=attention_mask,
        position_embeddings=spatial_position_embeddings,
        **kwargs,
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


class ScalarsFilledIn(TorchFunctionMode):
    """A mode of PyTorch in which scalars assigned to a tensor are filled in instead of copied to the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__setitem__ and isinstance(args[2], int | float):
            args[0][args[1]].fill_(args[2])  # transformers indexes with integers and slices: this is a view
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def without_host_waits(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Return a context in which `model`, on `device`, runs without waiting for sizes or denoising queries.

    The boxes and labels from which denoising queries are made must be on the CPU.

    model: RT-DETR, D-FINE or DEIMv2 of transformers, without the part that computes the loss.
    """
    with ExitStack() as in_between, ExitStack() as hooks:

        def begin(*_) -> None:
            in_between.enter_context(ScalarsFilledIn())

        def end(*_) -> None:
            in_between.close()

        for module, action in ((model.decoder_input_proj[0], begin), (model.enc_output, end)):
            hooks.callback(module.register_forward_pre_hook(action).remove)
        code_of_model = sys.modules[type(model).__module__]
        make = getattr(code_of_model, MAKE_DENOISING)
        setattr(code_of_model, MAKE_DENOISING, partial(_make_on_host, make, device))
        hooks.callback(setattr, code_of_model, MAKE_DENOISING, make)
        yield


def _make_on_host(
    make: Callable, device: torch.device, targets: Sequence, num_classes: int, num_queries: int, class_embed, **noise
) -> tuple:
    """Make denoising queries by transformers' function `make` on the CPU, and send them to `device` in one copy.

    They take 100 to 300 operations, for each image and each group of queries a few, on tensors that are small.
    """
    labels, boxes, mask, meta = make(targets, num_classes, num_queries, nn.Identity(), **noise)
    if meta is None:  # there are no objects
        return None, None, None, None
    positives = meta["dn_positive_idx"]
    made = {"labels": labels, "boxes": boxes, "hidden": mask < 0, "positives": torch.cat(positives)}
    (sent,) = send_dicts([made], device)
    mask = torch.zeros_like(sent["hidden"], dtype=mask.dtype).masked_fill_(sent["hidden"], -torch.inf)
    counts = [len(of_image) for of_image in positives]
    meta = {**meta, "dn_positive_idx": sent["positives"].split(counts)}
    return class_embed(sent["labels"]), sent["boxes"], mask, meta
