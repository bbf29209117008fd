"""Processes that tests start import the toolkit of this checkout, wherever the installed one lies."""

import logging
import os
import random
import shutil
import signal
import subprocess
import zlib
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden" / "data"
ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

pytest_plugins = ["script_fixtures"]

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser):
    parser.addoption("--shard", default="0/1", metavar="I/N", help="run the part I, counted from 0, of N")
    parser.addoption("--golden", type=Path, default=GOLDEN, help="folder with the numbers of the original programs")
    parser.addoption("--shuffle", metavar="SEED", help="run the files, and the tests of each, in a random order")


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("shard").split("/"))
    shares = {True: [], False: []}
    for item in items:
        shares[zlib.crc32(item.nodeid.encode()) % parts == part].append(item)
    items[:] = shares[True]
    if (seed := config.getoption("shuffle")) is not None:
        draw = random.Random(seed)
        places = {path: draw.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: (places[item.path], draw.random()))
    config.hook.pytest_deselected(items=shares[False])


@pytest.fixture(autouse=True)
def warnings_are_logged():
    """Again, after a program that was called in this process, and shows its warnings in its own way."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def golden(pytestconfig) -> Path:
    return pytestconfig.getoption("golden")


@pytest.fixture
def mount():
    """`mount(folder, *options)` until the test ends; skips the test where that takes more rights."""
    mounted = {}

    def mount_at(folder: Path, *options) -> Path:
        if shutil.which("mount") is None:
            pytest.skip("there is no mount")
        folder.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *options, folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a file system is not allowed here: {done.stderr.strip()}")
        mounted[folder] = True
        return folder

    yield mount_at
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


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


@pytest.fixture
def hangups():
    """SIGHUP as in a terminal: under nohup it is ignored, also in the processes that a test starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
