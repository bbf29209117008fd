"""The script that a run was started with: which file, whether it is as it was, and the script itself."""

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
    if file is None:
        return None
    return {"path": str(Path(file).resolve()), "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()}


def open_script(about: Mapping | None) -> tuple[ModuleType | None, str]:
    """The module of what `script_of` told, and in words what is not as it was; None: there is none to run."""
    if about is None:
        return None, "the run had no script of its own: its loop is not run again, the detector and its criterion are"
    path = Path(about["path"])
    if not path.is_file():
        return None, f"{path}, the script of this run, is gone: the detector and its criterion alone are run again"
    spec = importlib.util.spec_from_file_location(f"replayed_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changed = hashlib.sha256(path.read_bytes()).hexdigest() != about["sha256"]
    return module, f"{path} has changed since that run" if changed else ""
