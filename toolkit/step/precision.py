"""Chooses the precision for `run.precision: auto`: by the GPU's formats, or by timing a few steps on a CPU."""

import copy
import time
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import nn

from toolkit.base.batch import Batch
from toolkit.base.distributed import run_on_main
from toolkit.step.nan_report import rerun_window

PRECISIONS = ("no", "bf16")
GAIN = 1.05  # bfloat16 has to be so many times as fast to be worth its rounding


def cpu_computes_in_bf16() -> bool:
    """Whether this CPU has instructions that multiply in bfloat16 (AVX512-BF16 or AMX); without, bfloat16 is slower."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def precision_of_device(
    device: torch.device, detector: nn.Module, weights: nn.Module, first_batch: Callable[[], Batch]
) -> tuple[str, bool | None, str]:
    """(precision, TF32, why) of `run.precision: auto`; a collective, by what the main process has and measures.

    detector, weights, first_batch(): as for `measure_precisions`.
    """
    if device.type == "cuda":
        return *run_on_main(lambda: precision_of_gpu(torch.cuda.get_device_capability(), torch.version.hip)), "this GPU"
    if device.type != "cpu":
        return "no", None, "nothing is known of this device"
    if not run_on_main(cpu_computes_in_bf16):
        return "no", None, "this CPU has no instructions for bfloat16"
    batch = first_batch()
    seconds = run_on_main(lambda: measure_precisions(detector, weights, batch))
    why = "forward and backward of a batch take {bf16:.3f} s in bfloat16, {no:.3f} s in float32".format_map(seconds)
    return faster_precision(seconds), None, why


def precision_of_gpu(capability: tuple[int, int], rocm: str | None) -> tuple[str, bool | None]:
    """("bf16", True) where the GPU computes in bfloat16 and in TensorFloat-32: NVIDIA's since Ampere, capability 8.0.
    AMD's have bfloat16 only, ("bf16", None); others are left in float32, ("no", None). Not checked on a GPU.

    rocm: its version where torch was built for AMD's GPUs, else None.
    """
    if rocm is not None:
        return "bf16", None
    return ("bf16", True) if tuple(capability) >= (8, 0) else ("no", None)


@cache
def has_lstm_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether an LSTM runs there under autocast to `dtype`. On a CPU it is tried: oneDNN has none for halves without
    AVX-512, and fails where all sequences are equally long; sequences of several lengths go another way."""
    if device_type != "cpu":
        return True
    rows, bias, weight = torch.zeros(1, 1, 1), torch.zeros(4), torch.zeros(4, 1)
    try:
        with torch.autocast(device_type, dtype):
            torch.lstm(rows, (rows, rows), [weight, weight, bias, bias], True, 1, 0.0, True, False, False)
    except RuntimeError:
        return False
    return True


def describe_float32_layers(detector: nn.Module, device_type: str, precision: str) -> str:
    """What to say of LSTMs that are computed in float32 in a run in bf16, see `has_lstm_kernel`; else empty."""
    count = sum(isinstance(module, nn.LSTM) for module in detector.modules())
    if not count or precision != "bf16" or has_lstm_kernel(device_type, torch.bfloat16):
        return ""
    return f"precision bf16: this CPU has no bfloat16 kernel for LSTMs; the {count} of the detector go in float32"


def measure_precisions(detector: nn.Module, weights: nn.Module, batch: Batch, rounds: int = 3) -> dict[str, float]:
    """Seconds of forward and backward of one batch in each of PRECISIONS: the fastest of `rounds`, after one that warms
    up, taken in turn, so that other work on the machine slows both. A copy of the detector is run: nothing changes.

    detector: unwrapped, in training mode or not. weights: of its losses.
    """
    detector, weights = copy.deepcopy(detector).train(), copy.deepcopy(weights)
    ones = [dict.fromkeys(detector.denominator_names, 1.0)]
    seconds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for _ in range(1 + rounds):
        for precision, times in seconds.items():
            began = time.perf_counter()
            rerun_window(detector, weights, [batch], ones, step=0, seed=0, rank=0, precision=precision)
            times.append(time.perf_counter() - began)
    return {precision: min(times[1:]) for precision, times in seconds.items()}


def faster_precision(seconds: Mapping[str, float]) -> str:
    """"bf16" where it is faster by GAIN, else "no"."""
    return "bf16" if seconds["bf16"] * GAIN <= seconds["no"] else "no"
