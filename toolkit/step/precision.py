"""The precision of `run.precision: auto`, by the formats of the GPU or the instructions of the CPU, and of evaluation.

Evaluation is always in float32.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from toolkit.base.distributed import run_on_main

# Names of classes in timm and torchvision, see `has_mobile_blocks`.
MOBILE_BLOCKS = {"InvertedResidual", "DepthwiseSeparableConv", "UniversalInvertedResidual", "GhostBottleneck"}


# Words in the values of ONEDNN_MAX_CPU_ISA that leave oneDNN the instructions for bfloat16.
ISA_WITH_BF16 = ("DEFAULT", "ALL", "BF16", "FP16", "AMX", "AVX10")


def cpu_computes_in_bf16() -> bool:
    """Return whether this CPU has instructions that multiply in bfloat16 (AVX512-BF16 or AMX) and may use them.

    Without them bfloat16 is slower. ATEN_CPU_CAPABILITY disables them for torch, ONEDNN_MAX_CPU_ISA (or
    DNNL_MAX_CPU_ISA) for oneDNN.
    """
    able = torch.cpu.get_capabilities()
    if not (able.get("avx512_bf16") or able.get("amx_bf16")):
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AMX")):
        return False
    largest = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    return any(word in largest.upper() for word in ISA_WITH_BF16)


def precision_of_device(device: torch.device, detector: nn.Module) -> tuple[str, bool | None, str]:
    """Return (precision, TF32, why) of `run.precision: auto`; a collective, decided by the main process.

    The rule depends on the machine and the detector, never on a measurement: other work of the machine must not change
    a number.
    """
    if device.type == "cuda":
        return *run_on_main(lambda: precision_of_gpu(torch.cuda.get_device_capability(), torch.version.hip)), "this GPU"
    if device.type != "cpu":
        return "no", None, "nothing is known of this device"
    if not run_on_main(cpu_computes_in_bf16):
        return "no", None, "this CPU has no instructions for bfloat16"
    if has_mobile_blocks(detector):
        return "no", None, "on CPUs the blocks of a mobile backbone are slower in bfloat16"
    return "bf16", None, "this CPU has instructions for bfloat16"


def has_mobile_blocks(detector: nn.Module) -> bool:
    """Return whether a detector has the blocks of MobileNet, EfficientNet or GhostNet.

    These are depthwise convolutions between narrow ones, which move more memory than they compute.

    Forward and backward of a batch took 0.9 to 1.9 times as long in bfloat16 as in float32 with these, 0.37 to 0.88
    times with others (Intel and AMD with AVX512-BF16, one thread, 8 images of 128 px, torch 2.14; docs/scaling.md).
    """
    return any(type(module).__name__ in MOBILE_BLOCKS for module in detector.modules())


def precision_of_gpu(capability: tuple[int, int], rocm: str | None) -> tuple[str, bool | None]:
    """Return ("bf16", True) for a GPU with bfloat16 and TensorFloat-32: NVIDIA's since Ampere, capability 8.0.

    AMD's have bfloat16 only: ("bf16", None). Others stay in float32: ("no", None).

    rocm: its version if torch was built for AMD's GPUs, else None.
    """
    if rocm is not None:
        return "bf16", None
    return ("bf16", True) if tuple(capability) >= (8, 0) else ("no", None)


@cache
def has_lstm_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether an LSTM runs on the device under autocast to `dtype`.

    On a CPU it is tried: oneDNN has no kernel for half precision without AVX-512, and fails if all sequences are
    equally long; sequences of several lengths take another path.
    """
    if device_type != "cpu":
        return True
    rows = torch.zeros(1, 1, 1)
    bias = torch.zeros(4)
    weight = torch.zeros(4, 1)
    try:
        with torch.autocast(device_type, dtype):
            torch.lstm(rows, (rows, rows), [weight, weight, bias, bias], True, 1, 0.0, True, False, False)
    except RuntimeError:
        return False
    return True


def describe_float32_layers(detector: nn.Module, device_type: str, precision: str) -> str:
    """Describe the LSTMs that a run in bf16 computes in float32, see `has_lstm_kernel`; empty if there are none."""
    count = sum(isinstance(module, nn.LSTM) for module in detector.modules())
    if not count or precision != "bf16" or has_lstm_kernel(device_type, torch.bfloat16):
        return ""
    return f"precision bf16: this CPU has no bfloat16 kernel for LSTMs; the {count} of the detector go in float32"


@contextmanager
def in_float32(detector: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Switch autocast off inside, also that of Accelerate, which is in a `forward` of the prepared module.

    This is one rule for all detectors, in training, `evaluate.py`, reports and exports: the numbers of a run are those
    that users of its weights get. In bfloat16 an AP differs in the third digit.
    """
    with_autocast = vars(detector).pop("forward", None)
    try:
        with torch.autocast(torch.device(device).type, enabled=False):
            yield
    finally:
        if with_autocast is not None:
            detector.forward = with_autocast
