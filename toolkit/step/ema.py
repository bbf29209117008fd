"""Exponential moving average of a model's weights."""

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

UPDATES = "updates made"  # key in the state; the space keeps it apart from the names of weights


class Ema:
    """The exponential moving average of a model over its optimizer steps: ema = d * ema + (1 - d) * model.

    Float parameters and persistent float buffers are averaged; everything else (integers, booleans, buffers that are
    not part of the state dict, buffers that hold infinities, such as attention masks) is copied.

    Args:
        model: the unwrapped model (without DDP); it is copied.
        decay: d; 0: nothing is averaged, `module` is None and `update` does nothing.
        warmup: d = min(decay, (1 + n) / (10 + n)) in update n = 0, 1, ..., so that early averages forget the
            initial weights (as in TensorFlow's ExponentialMovingAverage).

    `module` is the averaged model, in eval mode, without gradients.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = True):
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self.module: nn.Module | None = None
        if not self.is_on:
            return
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        saved = set(model.state_dict(keep_vars=True))
        parameters = {name for name, _ in model.named_parameters()}
        self._model = model
        self._source = _slots(model)
        self._into = _slots(self.module)
        self._averaged: list[str] = []
        self._copied: dict[torch.dtype, list[str]] = {}  # by dtype: one kernel cannot copy several
        for name, tensor in zip(self._source, _slot_tensors(self._source, self._source), strict=True):
            may_be_averaged = name in parameters or name in saved and bool(tensor.isfinite().all())
            if tensor.is_floating_point() and may_be_averaged:
                self._averaged.append(name)
            else:
                self._copied.setdefault(tensor.dtype, []).append(name)

    @property
    def is_on(self) -> bool:
        """Whether the model is averaged."""
        return self.decay > 0

    @torch.no_grad()
    def update(self, model: nn.Module | None = None) -> None:
        """Update the averages after an optimizer step; call it only for updates that the guard accepted.

        model: the model to average; None: the model of the last call, or that of the constructor.
        """
        if not self.is_on:
            return
        model = self._model if model is None else model
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        if model is not self._model:
            self._model = model
            self._source = _slots(model)
        if self._averaged:
            into = _slot_tensors(self._into, self._averaged)
            source = _slot_tensors(self._source, self._averaged)
            torch._foreach_lerp_(into, source, 1.0 - decay)
        for names in self._copied.values():
            into = _slot_tensors(self._into, names)
            source = _slot_tensors(self._source, names)
            torch._foreach_copy_(into, source)
        self.updates += 1

    def tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield ((kind, name), average) of every averaged tensor; tensors that are only copied are left out."""
        averages = _slot_tensors(self._into, self._averaged)
        for name, average in zip(self._averaged, averages, strict=True):
            yield ("moving average of", name), average

    def state_dict(self) -> dict:
        """Return the averaged weights by name, and the number of updates."""
        return {**self.module.state_dict(), UPDATES: self.updates}

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the result of `state_dict`.

        A state without the number of updates, such as the state dict of a model, leaves this number unchanged.
        """
        weights = dict(state)
        self.updates = weights.pop(UPDATES, self.updates)
        self.module.load_state_dict(weights)


def _slots(model: nn.Module) -> dict[str, tuple[dict, str]]:
    """Return the place (dict, key) of each parameter and buffer by name, each once (a tied one under its first name).

    They are found once: walking through the modules at every update takes longer than averaging them.
    """
    kinds = {
        "_parameters": model.named_parameters(),
        "_buffers": model.named_buffers(),
    }
    slots = {}
    for kind, named in kinds.items():
        for name, _ in named:
            path, _, key = name.rpartition(".")
            owner = model.get_submodule(path)
            slots[name] = (getattr(owner, kind), key)
    return slots


def _slot_tensors(slots: Mapping[str, tuple[dict, str]], names: Iterable[str]) -> list[Tensor]:
    places = [slots[name] for name in names]
    return [owner[key] for owner, key in places]
