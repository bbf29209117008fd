"""Reading the reference files, and comparing with them; those of scene graphs for test_sgg.py."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.testing import assert_allclose
from torch import Tensor

Arrays = dict[str, np.ndarray]
Tensors = dict[str, Tensor]


@cache
def arrays(folder: Path, topic: str, program: str = "sgg") -> Arrays:
    path = folder / f"{program}_{topic}.npz"
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def read_tensors(folder: Path, topic: str, prefix: str = "", program: str = "sgg") -> Tensors:
    """The numeric arrays of a file whose name starts with `prefix`, without it."""
    data = arrays(folder, topic, program)
    return tensors(group(data, prefix, after=""))


@cache
def document(folder: Path, topic: str) -> dict:
    path = folder / f"sgg_{topic}.json"
    return json.loads(path.read_text())


def group(data: dict, prefix: str, after: str = ".") -> dict:
    """The values whose name starts with `prefix` and what stands `after` it, without both."""
    start = prefix + after
    found = {}
    for key, value in data.items():
        if key.startswith(start):
            found[key.removeprefix(start)] = value
    return found


def without_ending(names, suffix: str) -> list[str]:
    """Return the names that end with `suffix`, without it."""
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def ending(folder: Path, topic: str, suffix: str, program: str = "sgg") -> list[str]:
    """Return the names of a file's arrays that end with `suffix`, without it."""
    data = arrays(folder, topic, program)
    return without_ending(data, suffix)


def parametrize(metafunc, cases: dict) -> None:
    """`cases`: argument of a test -> a function that reads its values from the files."""
    for name, read in cases.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, read())


def prefixes(folder: Path, topic: str, depth: int = 1) -> list[str]:
    """The first `depth` parts of the arrays' names that have more, each once."""
    names = []
    for key in arrays(folder, topic):
        parts = key.split(".")
        if len(parts) > depth:
            names.append(".".join(parts[:depth]))
    return list(dict.fromkeys(names))


def rows_of(values: np.ndarray, ptr: np.ndarray, i: int) -> np.ndarray:
    start = ptr[i]
    end = ptr[i + 1]
    return values[start:end]


def tensors(values: Arrays) -> Tensors:
    """The numeric ones."""
    found = {}
    for key, value in values.items():
        if value.dtype.kind in "iufb":
            found[key] = torch.from_numpy(value)
    return found


def close(actual, expected, tolerance: float = 1e-6, name: str = "") -> None:
    """Within `tolerance`, relative or absolute, whichever is looser."""
    if isinstance(actual, Tensor):
        actual = actual.detach().numpy()
    assert_allclose(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        err_msg=name,
    )


def per_object(values: Tensor, num_objects: list[int]) -> Tensor:
    repeats = torch.tensor(num_objects)
    return values.repeat_interleave(repeats, 0)


def within(actual: Tensor, expected: np.ndarray, share: float, name: str) -> None:
    """Absolute difference at most `share` of the largest absolute value."""
    largest = np.abs(expected).max(initial=0)
    scale = max(float(largest), 1e-12)
    assert_allclose(
        actual.detach().numpy(),
        expected,
        rtol=0,
        atol=share * scale,
        err_msg=name,
    )


def cases_of(data: Arrays, kind: str) -> list[str]:
    """`<mode>.eval[.<effect>].<img0|batch>` or `<mode>.train`."""
    pattern = re.compile(rf"(\w+\.{kind}(?:\.\w+)*)\.rel_dists$")
    found = map(pattern.match, data)
    return [match[1] for match in found if match]
