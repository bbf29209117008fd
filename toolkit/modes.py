"""Evaluation mode, or no garbage collector, for a while or for what is imported."""

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def eval_mode(module: "nn.Module") -> Iterator[None]:
    """Evaluation mode inside; afterwards every submodule has the mode it had (frozen parts stay in evaluation mode)."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which walks through millions of objects again and again: a quarter to half of the
    time of reading or judging a large data set."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """`uncollected` for seconds of imports. What is there after the first ones of a process stays, so the collector
    leaves it out from then on; later ones freeze nothing, which may be in use for a while only."""
    with uncollected():
        yield
        if gc.get_freeze_count() == 0:
            gc.freeze()
