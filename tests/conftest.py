"""Processes that tests start import the toolkit of this checkout, wherever the installed one lies."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)`: the folder that `make(folder)` filled, once for all test processes; nobody writes to it."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"

    def build(name: str, make) -> Path:
        shared.mkdir(exist_ok=True)
        folder, made = shared / name, shared / f"{name}.made"
        with FileLock(shared / f"{name}.lock"):
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed in the middle
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return build
