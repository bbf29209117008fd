"""Whether a CPU trains a detector faster in bfloat16: a few steps of it say so."""

import copy
import time
from collections.abc import Mapping

import torch
from torch import nn

from toolkit.batch import Batch
from toolkit.step.nan_report import rerun_window

PRECISIONS = ("no", "bf16")
GAIN = 1.05  # bfloat16 has to be so many times as fast to be worth its rounding


def cpu_computes_in_bf16() -> bool:
    """Whether this CPU has instructions that multiply in bfloat16 (AVX512-BF16 or AMX); without, bfloat16 is slower."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def measure_precisions(detector: nn.Module, weights: nn.Module, batch: Batch, rounds: int = 3) -> dict[str, float]:
    """Seconds of forward and backward of one batch in each of PRECISIONS: the fastest of `rounds`, after one that warms
    up, taken in turn, so that other work on the machine slows both. A copy of the detector is run: nothing changes.

    detector: unwrapped, in training mode or not. weights: of its losses.
    """
    detector, weights = copy.deepcopy(detector).train(), copy.deepcopy(weights)
    ones = [dict.fromkeys(detector.denominator_names, 1.0)]
    seconds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for _ in range(1 + rounds):
        for precision, taken in seconds.items():
            began = time.perf_counter()
            rerun_window(detector, weights, [batch], ones, step=0, seed=0, rank=0, precision=precision)
            taken.append(time.perf_counter() - began)
    return {precision: min(taken[1:]) for precision, taken in seconds.items()}


def faster_precision(seconds: Mapping[str, float]) -> str:
    """"bf16" where it is faster by GAIN, else "no"."""
    return "bf16" if seconds["bf16"] * GAIN <= seconds["no"] else "no"
