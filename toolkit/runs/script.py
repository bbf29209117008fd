"""The script that a run was started with: its file, whether it has changed, and its import."""

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.detect import ROOT
from toolkit.errors import BadInput
from toolkit.text import escaped
from toolkit.trust import files_are_trusted


def script_of(config: Any) -> dict | None:
    """The file that a run's settings come from, and its hash: the script; None where they come from no file."""
    file = getattr(sys.modules.get(type(config).__module__), "__file__", None)
    return None if file is None else {"path": str(Path(file).resolve()), "sha256": _digest(Path(file))}


def open_script(about: Mapping | None) -> tuple[ModuleType | None, str]:
    """The module of what `script_of` told, and in words what is not as it was; None: there is none to run.

    Raises:
        BadInput: it is none of this project's training scripts, and nobody trusts the file that names it.
    """
    if not isinstance(about, Mapping) or not isinstance(about.get("path"), str):
        return None, "the run had no script of its own: its loop is not run again, the detector and its criterion are"
    path = Path(about["path"])
    if not path.is_file():
        return None, f"{path}, the script of this run, is gone: the detector and its criterion alone are run again"
    if path.resolve() not in (ROOT / "scripts").resolve().glob("train_*.py") and not files_are_trusted():
        raise BadInput(f"environment.json of the run names {escaped(path, 300)} as its script, none of this project's, "
                       "which would be run: look at it, and add --trust if it is yours")  # fmt: skip
    changed = f"{path} has changed since that run" if _digest(path) != about.get("sha256") else ""
    return load_script(path, f"replayed_{path.stem}"), changed


def load_script(path: Path, name: str) -> ModuleType:
    """Runs a Python file as the module of that name, wherever it lies."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
