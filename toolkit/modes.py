"""Evaluation mode for a while."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every submodule has the mode it had (frozen parts stay in evaluation mode)."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
