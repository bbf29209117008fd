"""Packages that only some commands need, the extras of pyproject.toml; a missing one is one sentence."""

import importlib
import sys
from types import ModuleType

from toolkit.errors import BadInput


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
