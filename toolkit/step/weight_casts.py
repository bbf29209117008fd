"""Weights cast to the half precision of autocast together, by one kernel of a GPU instead of one for each."""

from typing import Any

import torch
from torch import Tensor, nn

CASTING = (nn.Conv2d.forward, nn.Linear.forward)  # of layers whose weights autocast casts, and which do nothing else


class WeightCasts:
    """Casts the weights of a module's convolutions and linear layers before each forward in training under autocast.

    Autocast casts them one by one when they are used, and their gradients back. The values are the same. In the first
    forward it is noted which layers are called with autocast only. Behind it, casts take the place of their weights for
    the time of a forward; `parameters()` and the state dict do not see them.

    Gradients of all weights arrive together at the end of the backward pass. So this is not for several processes,
    which send gradients while the backward pass goes on, nor for modules that are compiled or computed again.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        self.module = module
        self.device_type = device.type
        self._layers: list[nn.Module] | None = None  # None: before the first forward
        self._calls: dict[nn.Module, bool] = {}  # layers of the first forward: whether autocast was on in each call
        self._hooks: list[Any] = []  # which note the calls
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_) -> None:
        if not self.module.training or not torch.is_autocast_enabled(self.device_type):
            return
        if self._layers is None:
            for layer in self.module.modules():
                if getattr(type(layer), "forward", None) in CASTING:
                    self._hooks.append(layer.register_forward_pre_hook(self._note))
            return
        weights = {}  # by id: layers may share one
        for layer in self._layers:
            for parameter in layer._parameters.values():
                if parameter is not None and parameter.dtype == torch.float32:
                    weights[id(parameter)] = parameter
        casts = _CastTogether.apply(torch.get_autocast_dtype(self.device_type), *weights.values())
        cast_of = dict(zip(weights, casts, strict=True))
        for layer in self._layers:
            for name, parameter in layer._parameters.items():
                if id(parameter) in cast_of:
                    layer.__dict__[name] = cast_of[id(parameter)]  # which Python finds before it asks for a parameter

    def _note(self, layer: nn.Module, *_) -> None:
        self._calls[layer] = self._calls.get(layer, True) and torch.is_autocast_enabled(self.device_type)

    def _end(self, *_) -> None:
        if not self.module.training:
            return
        for layer in self._layers or ():
            for name in layer._parameters:
                layer.__dict__.pop(name, None)
        if self._hooks:
            self._layers = [layer for layer, always in self._calls.items() if always]
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()


class _CastTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        casts = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(casts, weights)
        trains = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(cast for cast, is_trained in zip(casts, trains, strict=True) if not is_trained))
        return tuple(casts)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in given]
        torch._foreach_copy_(wide, given)
        remaining = iter(wide)
        return None, *(None if gradient is None else next(remaining) for gradient in gradients)
