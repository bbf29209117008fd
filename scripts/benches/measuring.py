"""Shared code of the benches: interleaved rounds, the rows made from them, and random data.

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
    """Measure the seconds of one call, including the work that the call has queued on a device."""
    began = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def in_turn(ours: Callable, other: Callable, repeats: int, warm_up: int = 0) -> list[list[float]]:
    """Measure the seconds of ours, of the other function and of ours again in each of `repeats` rounds, after `warm_up`
    rounds that are not counted. Return the three numbers of each round."""
    return [[seconds(run) for run in (ours, other, ours)] for _ in range(warm_up + repeats)][warm_up:]


def row(name: str, value: float, unit: str) -> dict:
    return {"name": name, "value": value, "unit": unit}


def medians(title: str, measured: Mapping[str, tuple[str, Iterable[float]]]) -> list[dict]:
    """Return a row for each entry of `measured`, (unit, values) by name: the median of the values, named `title` and
    the name."""
    return [row(f"{title}{name}", statistics.median(values), unit) for name, (unit, values) in measured.items()]


def against(
    title: str, other: str, rounds: Sequence[Sequence[float]], ours: str = "ours", alone: str | None = None
) -> list[dict]:
    """Return the rows of rounds from `in_turn`: the seconds of both functions, their ratio, and ours against itself,
    the noise.

    title: beginning of the rows' names. other, ours: names of the two functions. alone: another name of the other
    function in the row of its seconds.
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
    """Measure the seconds of two implementations of losses, with and without their gradients, and the largest relative
    difference of a loss, as rows.

    losses: our function and the other one, both from the raw outputs of a network to losses by name. outputs: these raw
    outputs. The other arguments are those of `against`.
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
    """Return a target with random boxes anywhere in an image, whose sides are `smallest` to 0.6 of the image's side (in
    pixels), and random labels; no crowd regions."""
    sizes = side * (smallest + (0.6 - smallest) * torch.rand(boxes, 2, generator=generator) ** 2)
    corners = torch.rand(boxes, 2, generator=generator) * (side - sizes)
    labels = torch.randint(num_classes, (boxes,), generator=generator)
    crowd = torch.zeros(boxes, dtype=torch.int64)
    return {"boxes": torch.cat((corners, corners + sizes), dim=1), "labels": labels, "iscrowd": crowd}


def random_boxes(rng: np.random.Generator, count: int, corner: float, smallest: float, largest: float) -> np.ndarray:
    """Return random boxes (count, 4) float32 xyxy: left top corners up to `corner`, sides from `smallest` to `largest`
    pixels."""
    corners = rng.uniform(0, corner, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(smallest, largest, (count, 2))], axis=1).astype(np.float32)


def table_row(
    image_id: int, size_wh: tuple[int, int], boxes: np.ndarray, labels: np.ndarray, crowd: np.ndarray | None = None
) -> dict:
    """Return a row for `toolkit.data.table_cache.write_rows`, without relations. crowd: 1 for boxes that are crowd
    regions, 0 for others; None: there are none."""
    objects = {
        "id": [1000 * image_id + number for number in range(1, len(boxes) + 1)],
        "bbox": boxes.tolist(),
        "category": labels.tolist(),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist(),
        "iscrowd": [0] * len(boxes) if crowd is None else crowd.tolist(),
    }
    about = {"image_id": image_id, "file_name": f"{image_id}.jpg", "width": size_wh[0], "height": size_wh[1]}
    return about | {"objects": objects, "relations": {"subject": [], "object": [], "predicate": []}}
