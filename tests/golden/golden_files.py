"""Reading the reference files, and comparing with them; those of scene graphs for test_sgg.py."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import torch


@cache
def arrays(folder: Path, topic: str, program: str = "sgg") -> dict[str, np.ndarray]:
    with np.load(folder / f"{program}_{topic}.npz", allow_pickle=False) as file:
        return dict(file)


def tensors_below(data: dict[str, np.ndarray], prefix: str) -> dict[str, torch.Tensor]:
    """The numeric arrays whose name starts with `prefix`, without it."""
    return tensors({key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)})


@cache
def document(folder: Path, topic: str) -> dict:
    return json.loads((folder / f"sgg_{topic}.json").read_text())


def group(data: dict[str, np.ndarray], prefix: str, after: str = ".") -> dict[str, np.ndarray]:
    """The arrays whose name starts with `prefix` and what stands `after` it, without both."""
    return {key.removeprefix(prefix + after): v for key, v in data.items() if key.startswith(prefix + after)}


def ending(folder: Path, topic: str, suffix: str, program: str = "sgg") -> list[str]:
    """The names of a file's arrays that end with `suffix`, without it."""
    return [key.removesuffix(suffix) for key in arrays(folder, topic, program) if key.endswith(suffix)]


def parametrize(metafunc, cases: dict) -> None:
    """`cases`: argument of a test -> a function that reads its values from the files."""
    for name in cases.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, cases[name]())


def prefixes(folder: Path, topic: str, depth: int = 1) -> list[str]:
    names = (key.split(".")[:depth] for key in arrays(folder, topic) if key.count(".") >= depth)
    return list(dict.fromkeys(".".join(name) for name in names))


def rows_of(values: np.ndarray, ptr: np.ndarray, i: int) -> np.ndarray:
    return values[ptr[i] : ptr[i + 1]]


def tensors(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in values.items() if value.dtype.kind in "iufb"}


def close(actual, expected, tolerance: float = 1e-6, name: str = "") -> None:
    """Within `tolerance`, relative or absolute, whichever is looser."""
    actual = actual.detach().numpy() if isinstance(actual, torch.Tensor) else np.asarray(actual)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=name)


def per_object(values: torch.Tensor, num_objects: list[int]) -> torch.Tensor:
    return values.repeat_interleave(torch.tensor(num_objects), 0)


def within(actual: torch.Tensor, expected: np.ndarray, share: float, name: str) -> None:
    """Absolute difference at most `share` of the largest absolute value."""
    scale = max(float(np.abs(expected).max(initial=0)), 1e-12)
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=0, atol=share * scale, err_msg=name)


def cases_of(data: dict[str, np.ndarray], kind: str) -> list[str]:
    """`<mode>.eval[.<effect>].<img0|batch>` or `<mode>.train`."""
    found = (re.match(rf"(\w+\.{kind}(?:\.\w+)*)\.rel_dists$", key) for key in data)
    return [match[1] for match in found if match]
