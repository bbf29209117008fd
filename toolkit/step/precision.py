"""The precision of `run.precision: auto`: by the formats of the GPU, or by the instructions of the CPU."""

from functools import cache

import torch
from torch import nn

from toolkit.base.distributed import run_on_main

# Names of classes in timm and torchvision, see `has_mobile_blocks`.
MOBILE_BLOCKS = {"InvertedResidual", "DepthwiseSeparableConv", "UniversalInvertedResidual", "GhostBottleneck"}


def cpu_computes_in_bf16() -> bool:
    """Whether this CPU has instructions that multiply in bfloat16 (AVX512-BF16 or AMX); without, bfloat16 is slower."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def precision_of_device(device: torch.device, detector: nn.Module) -> tuple[str, bool | None, str]:
    """Return (precision, TF32, why) of `run.precision: auto`; a collective, by what the main process has.

    A rule of the machine and the detector, never a measurement: what else the machine does must not change a number.
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
    """Whether a detector has the blocks of MobileNet, EfficientNet or GhostNet: depthwise convolutions between narrow
    ones, which move more memory than they compute.

    Forward and backward of a batch took 0.9 to 1.9 times as long in bfloat16 as in float32 with these, 0.55 to 0.87
    times with others (Intel and AMD with AVX512-BF16, one thread, 8 images of 128 px, torch 2.14).
    """
    return any(type(module).__name__ in MOBILE_BLOCKS for module in detector.modules())


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
