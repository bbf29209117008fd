"""Shared code of the benches: interleaved rounds, the rows that they give, and random data.

A row has `name`, `value` and `unit`. Ratios are medians of the rounds' ratios.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor


def seconds(run: Callable[[], object]) -> float:
    """Measure the seconds of one call, including the work that it leaves to a device."""
    began = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def in_turn(ours: Callable, other: Callable, repeats: int, warm_up: int = 0) -> list[list[float]]:
    """Measure the seconds of ours, of the other and of ours again in each of `repeats` rounds, after warm-up rounds."""
    return [[seconds(run) for run in (ours, other, ours)] for _ in range(warm_up + repeats)][warm_up:]


def row(name: str, value: float, unit: str) -> dict:
    return {"name": name, "value": value, "unit": unit}


def medians(title: str, measured: Mapping[str, tuple[str, Iterable[float]]]) -> list[dict]:
    """Return a row for each name below a title: the median of its values, in its unit."""
    return [row(f"{title}{name}", statistics.median(values), unit) for name, (unit, values) in measured.items()]


def against(
    title: str, other: str, rounds: Sequence[Sequence[float]], ours: str = "ours", alone: str | None = None
) -> list[dict]:
    """Return rows of rounds from `in_turn`: the seconds of both, their ratio, and ours against itself, the noise.

    alone: name of the other in its own row.
    """
    measured = {
        ours: ("s", [t[0] for t in rounds]),
        alone or other: ("s", [t[1] for t in rounds]),
        f"{other} / {ours}": ("x", [t[1] / t[0] for t in rounds]),
        f"{ours} / {ours}": ("x", [t[2] / t[0] for t in rounds]),
    }
    return medians(f"{title}, ", measured)


def losses_against(
    title: str, other: str, losses: Sequence[Callable], outputs: Sequence[Tensor], repeats: int, **names
) -> list[dict]:
    """Measure the seconds of losses, also with their gradients, and the largest relative difference of a loss, as rows.

    losses: ours and the other's, from the raw outputs of a network to losses by name. names: as in `against`.
    """

    def run(function: Callable, gradient: bool) -> dict[str, Tensor]:
        computed = function(*(output.detach().requires_grad_(gradient) for output in outputs))
        if gradient:
            sum(computed.values()).backward()
        return {name: value.detach() for name, value in computed.items()}

    rows = []
    for what, gradient in (("losses", False), ("losses and gradients", True)):
        ours, reference = (partial(run, function, gradient) for function in losses)
        actual = ours()
        expected = reference()
        rows += against(f"{title} {what}", other, in_turn(ours, reference, repeats), **names)
    apart = max(float((actual[name] / value - 1).abs()) for name, value in expected.items())
    return [*rows, row(f"{title} losses, largest difference", apart, "relative")]


def random_target(
    boxes: int, side: int, num_classes: int, generator: torch.Generator, smallest: float
) -> dict[str, Tensor]:
    """Return boxes of `smallest` to 0.6 of the side anywhere in the image, without crowds."""
    sizes = side * (smallest + (0.6 - smallest) * torch.rand(boxes, 2, generator=generator) ** 2)
    corners = torch.rand(boxes, 2, generator=generator) * (side - sizes)
    labels = torch.randint(num_classes, (boxes,), generator=generator)
    crowd = torch.zeros(boxes, dtype=torch.int64)
    return {"boxes": torch.cat((corners, corners + sizes), dim=1), "labels": labels, "iscrowd": crowd}


def random_boxes(rng: np.random.Generator, count: int, corner: float, smallest: float, largest: float) -> np.ndarray:
    """Return (count, 4) float32 xyxy: corners up to `corner`, sides from `smallest` to `largest` pixels."""
    corners = rng.uniform(0, corner, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(smallest, largest, (count, 2))], axis=1).astype(np.float32)


def table_row(
    image_id: int, size_wh: tuple[int, int], boxes: np.ndarray, labels: np.ndarray, crowd: np.ndarray | None = None
) -> dict:
    """Return a row for `toolkit.data.table_cache.write_rows`, without relations; crowd: None for no crowds."""
    objects = {
        "id": [1000 * image_id + number for number in range(1, len(boxes) + 1)],
        "bbox": boxes.tolist(),
        "category": labels.tolist(),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist(),
        "iscrowd": [0] * len(boxes) if crowd is None else crowd.tolist(),
    }
    about = {"image_id": image_id, "file_name": f"{image_id}.jpg", "width": size_wh[0], "height": size_wh[1]}
    return about | {"objects": objects, "relations": {"subject": [], "object": [], "predicate": []}}
