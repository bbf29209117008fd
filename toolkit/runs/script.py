"""The script that a run was started with: its file, whether it has changed, and its import."""

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def script_of(config: Any) -> dict | None:
    """The file that a run's settings come from, and its hash: the script; None where they come from no file."""
    file = getattr(sys.modules.get(type(config).__module__), "__file__", None)
    return None if file is None else {"path": str(Path(file).resolve()), "sha256": _digest(Path(file))}


def open_script(about: Mapping | None) -> tuple[ModuleType | None, str]:
    """The module of what `script_of` told, and in words what is not as it was; None: there is none to run."""
    if about is None:
        return None, "the run had no script of its own: its loop is not run again, the detector and its criterion are"
    path = Path(about["path"])
    if not path.is_file():
        return None, f"{path}, the script of this run, is gone: the detector and its criterion alone are run again"
    changed = f"{path} has changed since that run" if _digest(path) != about["sha256"] else ""
    return load_script(path, f"replayed_{path.stem}"), changed


def load_script(path: Path, name: str) -> ModuleType:
    """Runs a Python file as the module of that name, wherever it lies."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
