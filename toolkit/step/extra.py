"""State that a script adds to a run: saved in every checkpoint, checked for NaN, equal on all ranks."""

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from toolkit.base.distributed import state_from_main, world
from toolkit.base.errors import BadInput
from toolkit.step.optim import average_gradients


class Extra(UserDict):
    """A dict of modules, optimizers, other objects with `state_dict` and `load_state_dict`, and plain values, by name.

        critic = t.extra["critic"] = Critic()
        t.extra["critic_optimizer"] = torch.optim.Adam(critic.parameters())

    A new entry restores its state from the checkpoint that the run continues from; in a fresh run a module gets the
    state of the first process. Modules go to the device; optimizers are prepared by Accelerate, so use
    `t.extra["critic_optimizer"]`. Gradients of the modules are averaged over the ranks with those of the detector, in
    `window.reduce()`; those computed later, by `t.extra.average_gradients()`.
    """

    def __init__(self, accelerator: Accelerator):
        super().__init__()
        self._accelerator = accelerator
        self._saved: dict[str, Any] = {}  # states of the checkpoint that are not restored yet

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an entry. Raises BadInput: the checkpoint's state does not fit, or the value cannot be saved."""
        if name in self.data and not _has_state(value):
            self.data[name] = _plain(name, value)
            return
        if isinstance(value, nn.Module):
            value.to(self._accelerator.device)
        elif isinstance(value, torch.optim.Optimizer):
            value = self._accelerator.prepare_optimizer(value)
        self.data[name] = value if _has_state(value) else _plain(name, value)
        if name in self._saved:
            self._take(name, self._saved.pop(name))
        elif isinstance(value, nn.Module) and world()[1] > 1:
            value.load_state_dict(state_from_main(lambda: dict(value.state_dict())))

    @property
    def modules(self) -> list[nn.Module]:
        return [value for value in self.values() if isinstance(value, nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [value for value in self.values() if isinstance(value, torch.optim.Optimizer)]

    @property
    def not_taken_up(self) -> list[str]:
        """Names in the checkpoint that the script has not assigned."""
        return sorted(self._saved)

    def tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield (("t.extra", name), floating-point tensor) of all states that must be finite."""
        for name, value in self.items():
            if isinstance(value, nn.Module):
                named = ((f"{name}.{key}", tensor) for key, tensor in value.named_parameters())
            else:
                named = _floats(name, value.state_dict() if _has_state(value) else value)
            yield from ((("t.extra", full_name), tensor) for full_name, tensor in named)

    def average_gradients(self) -> None:
        """Average the gradients of the modules over the ranks; a collective. With one process nothing is done."""
        average_gradients([p for module in self.modules for p in module.parameters() if p.requires_grad])

    def zero_grad(self) -> None:
        """Clear the gradients of all modules and optimizers."""
        for item in (*self.modules, *self.optimizers):
            item.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {name: value.state_dict() if _has_state(value) else value for name, value in self.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the assigned entries now, and the others when the script assigns them. Raises BadInput."""
        self._saved = {name: copy.deepcopy(state) for name, state in saved.items()}
        for name in list(self.data):
            if name in self._saved:
                self._take(name, self._saved.pop(name))

    def _take(self, name: str, state: Any) -> None:
        value = self.data[name]
        if not _has_state(value):
            self.data[name] = state
            return
        try:
            value.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            kind = type(value).__name__
            raise BadInput(
                f't.extra["{name}"] ({kind}) does not fit the state in the checkpoint: {error}; resume with the script '
                "that wrote it, or begin a new run"
            ) from error


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, str | int | float | bool | Tensor | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(name, item) for key, item in value.items()}
    raise BadInput(
        f't.extra["{name}"]: a {type(value).__name__} cannot be saved; expected something with state_dict and '
        "load_state_dict, a tensor, a number, a text, or lists and dicts of them"
    )


def _floats(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim():
            yield name, value
        return
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield from _floats(f"{name}.{key}", item)
