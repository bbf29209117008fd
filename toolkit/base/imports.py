"""Imports of optional packages (extras of pyproject.toml), and measures that make imports faster."""

import atexit
import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

from toolkit.base.errors import BadInput


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """The module. Raises BadInput with the command that installs it.

    Args:
        module: its name, such as "onnxruntime".
        extra: the extra of this project that installs it.
        purpose: what needs it, the beginning of the sentence: "ONNX files".
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is there, and something of its own is not
            raise
        raise BadInput(
            f'{purpose} need {module}, which is not installed: pip install "detection-toolkit[{extra}]"'
        ) from error


def import_without(module: str, hidden: str) -> None:
    """Imports a module as if another one, that it can do without, were not installed.

    One that is imported already is seen by it. Later imports of `hidden` are as always.
    """
    if hidden in sys.modules:
        importlib.import_module(module)
        return
    sys.modules[hidden] = None
    try:
        importlib.import_module(module)
    finally:
        del sys.modules[hidden]


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
            atexit.register(gc.unfreeze)  # or what is never collected is reported as leaked by libraries that count
