"""Exponential moving average of a model's weights."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Ema:
    """Average of a model over its optimizer steps: ema = d * ema + (1 - d) * model.

    Float parameters and persistent float buffers are averaged; everything else (integers, booleans, buffers that are
    not part of the state dict, buffers that hold infinities, such as attention masks) is copied.

    Args:
        model: the unwrapped model (without DDP); it is copied.
        decay: d.
        warmup: d = min(decay, (1 + n) / (10 + n)) in update n = 0, 1, ..., so that early averages forget the
            initial weights (as in TensorFlow's ExponentialMovingAverage).

    `module` is the averaged model, in eval mode, without gradients. Weights and counter are stored apart:
    `ema.module.state_dict()` and `ema.state_dict()`.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = True):
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        saved = set(model.state_dict(keep_vars=True))
        parameters = {name for name, _ in model.named_parameters()}
        self._averaged = {
            name
            for name, tensor in _tensors(model).items()
            if tensor.is_floating_point()
            and (name in parameters or name in saved and bool(tensor.isfinite().all()))
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the model in after an optimizer step; call it only on updates that the guard let through."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        source, into = _tensors(model), _tensors(self.module)
        averaged = [name for name in into if name in self._averaged]
        copied = [name for name in into if name not in self._averaged]
        if averaged:
            torch._foreach_lerp_([into[n] for n in averaged], [source[n].detach() for n in averaged], 1.0 - decay)
        if copied:
            torch._foreach_copy_([into[n] for n in copied], [source[n].detach() for n in copied])
        self.updates += 1

    def state_dict(self) -> dict:
        """The counter; the weights are `module.state_dict()`."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping) -> None:
        self.updates = state["updates"]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once (a tied one under its first name)."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
