"""The numbers of the original programs: `pytest tests/golden --golden DIR` takes them from another folder."""

from pathlib import Path

import pytest

DEFAULT_GOLDEN = Path(__file__).parent / "data"


def pytest_addoption(parser):
    parser.addoption("--golden", type=Path, default=DEFAULT_GOLDEN, help="folder with the reference numbers")


@pytest.fixture(scope="session")
def golden(pytestconfig) -> Path:
    return pytestconfig.getoption("golden")
