"""Freezes parts of a model so that `.train()` does not undo it; evaluation mode as a context."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from toolkit.errors import BadInput


def freeze(module: nn.Module) -> nn.Module:
    """Stops gradients of `module` and keeps it in eval mode for good: `.train()` of a parent passes it by.

    Dropout and batch statistics inside it stay off. Copies (`deepcopy`, pickle) are frozen too. Returns `module`.
    """
    module.requires_grad_(False)
    module.eval()
    # nn.Module.train() calls child.train(mode), which finds this attribute first. A partial of a module-level function
    # is what deepcopy and pickle can carry over to the copy; a lambda or a bound method is not.
    module.train = functools.partial(_stay_in_eval, module)
    return module


def freeze_prefixes(model: nn.Module, prefixes: Sequence[str]) -> list[str]:
    """Freezes the modules and parameters whose name is one of `prefixes` or lies below it ("backbone.layer1").

    Returns:
        Names of the parameters that no longer train.

    Raises:
        BadInput: a prefix that is neither a module nor a parameter; names those that are, at the point it leaves them.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    unknown = [prefix for prefix in prefixes if not prefix or prefix not in modules and prefix not in parameters]
    if unknown:
        raise BadInput([f"cannot freeze {p!r}: no such module or parameter; {_nearest(p, modules)}" for p in unknown])
    for prefix in prefixes:
        if prefix in modules:
            freeze(modules[prefix])
        else:
            parameters[prefix].requires_grad_(False)
    return [n for n in parameters if any(n == prefix or n.startswith(f"{prefix}.") for prefix in prefixes)]


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stands in for `train` of a frozen module: whatever the mode asked for, it and all below it stay in eval mode."""
    return type(module).train(module, False)


def _nearest(name: str, modules: Iterable[str]) -> str:
    """Names of the modules beside the first part of `name` that does not exist."""
    known, parent = set(modules), name
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    depth = parent.count(".") + 1 if parent else 0
    prefix = f"{parent}." if parent else ""
    beside = [m for m in known if m.startswith(prefix) and m and m.count(".") == depth]
    return f"{parent or 'the model'} has: {', '.join(sorted(beside)) or 'no modules'}"


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every submodule has the mode it had (frozen parts stay in evaluation mode)."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
