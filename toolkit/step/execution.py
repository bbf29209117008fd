"""Execution of a detector: its precision, compiled blocks, recomputed activations, deterministic algorithms.

None of these changes the names in the state dict or the definitions of the losses. Evaluation is always in float32.
"""

import contextlib
import functools
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from toolkit.base.distributed import run_on_main
from toolkit.base.errors import BadInput

# Names of classes in timm and torchvision, see `has_mobile_blocks`.
MOBILE_BLOCKS = {"InvertedResidual", "DepthwiseSeparableConv", "UniversalInvertedResidual", "GhostBottleneck"}
# Words in the values of ONEDNN_MAX_CPU_ISA that leave oneDNN the instructions for bfloat16.
ISA_WITH_BF16 = ("DEFAULT", "ALL", "BF16", "FP16", "AMX", "AVX10")
# One graph for each width, with and without gradients, and image size; torch would stop after 8.
MAX_GRAPHS_OF_A_BLOCK = 64
GRAPHS = "graphs"  # of `optim.compile`
# How torch compiles the parts of `GraphedParts`. On a CPU, which has no CUDA graphs, they are only compiled.
GRAPHED = {"backend": "inductor", "options": {"triton.cudagraphs": True}, "dynamic": False}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
_NO_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")


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
    """Choose for `run.precision: auto`: return (precision, whether TF32 is used, the reason); a collective.

    precision: "no" or "bf16". TF32: None: torch's setting stays. The main process decides for all. The rule depends on
    the machine and the detector, never on a measurement, so that other work of the machine cannot change a result.
    """
    if device.type == "cuda":
        precision, tf32 = run_on_main(
            lambda: precision_of_gpu(torch.cuda.get_device_capability(), torch.version.hip)
        )
        return precision, tf32, "this GPU"
    if device.type != "cpu":
        return "no", None, "this kind of device is not known"
    if not run_on_main(cpu_computes_in_bf16):
        return "no", None, "this CPU has no instructions for bfloat16"
    if has_mobile_blocks(detector):
        return "no", None, "on CPUs the blocks of a mobile backbone are slower in bfloat16"
    return "bf16", None, "this CPU has instructions for bfloat16"


def has_mobile_blocks(detector: nn.Module) -> bool:
    """Return whether a detector has the blocks of MobileNet, EfficientNet or GhostNet.

    These blocks are depthwise convolutions between convolutions of few channels, which move much memory for little
    computation.

    Forward and backward of a batch took 0.9 to 1.9 times as long in bfloat16 as in float32 with these blocks, and 0.37
    to 0.88 times with others (Intel and AMD with AVX512-BF16, one thread, 8 images of 128 px, torch 2.14;
    docs/scaling.md).
    """
    return any(type(module).__name__ in MOBILE_BLOCKS for module in detector.modules())


def has_depthwise_convolutions(detector: nn.Module) -> bool:
    """Return whether a detector has convolutions in which each channel is a group of its own.

    Since version 9.10, cuDNN compiles each plan for them when it is first made, 1.5 s each where it was measured
    (NVIDIA/cudnn-frontend#1066), so that a search of the fastest of ten would take minutes.
    """
    convolutions = [module for module in detector.modules() if isinstance(module, nn.Conv2d)]
    return any(convolution.groups == convolution.in_channels > 1 for convolution in convolutions)


@contextlib.contextmanager
def without_search() -> Iterator[None]:
    """Let cuDNN choose its convolutions without a search inside: for shapes that come once."""
    searches = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searches


def precision_of_gpu(capability: tuple[int, int], rocm: str | None) -> tuple[str, bool | None]:
    """Return (precision, whether TensorFloat-32 is used) for a GPU.

    This is ("bf16", True) for NVIDIA's GPUs since Ampere (compute capability 8.0), ("bf16", None) for AMD's, which have
    no TensorFloat-32, and ("no", None), which is float32, for all others.

    rocm: the version of ROCm if torch was built for AMD's GPUs, else None.
    """
    if rocm is not None:
        return "bf16", None
    if tuple(capability) >= (8, 0):
        return "bf16", True
    return "no", None


@functools.cache
def has_lstm_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether an LSTM runs on the device under autocast to `dtype`.

    On a CPU this is found out by running a small LSTM: without AVX-512, oneDNN has no kernel for half precision and
    fails if all sequences are equally long. On other devices the answer is True.
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
    return f"precision bf16: this CPU has no bfloat16 kernel for LSTMs; the {count} of the detector run in float32"


@contextlib.contextmanager
def in_float32(detector: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Switch autocast off inside the block.

    The autocast that `accelerator.prepare` puts into `detector.forward` is removed inside the block too.

    All detectors are evaluated in this way, in training, `evaluate.py`, reports and exports, so that the metrics of a
    run are those that users of its weights get. In bfloat16 an AP differs in the third digit.
    """
    with_autocast = vars(detector).pop("forward", None)
    try:
        with torch.autocast(torch.device(device).type, enabled=False):
            yield
    finally:
        if with_autocast is not None:
            detector.forward = with_autocast


def compile_in_place(module: nn.Module, compile: bool | str, cache_dir: Path | None = None) -> None:
    """Let torch compile the repeated blocks of `module`, or all of it if it has none, when they are next called.

    The names in the state dict do not change. Blocks of the same class and width share their compiled code, so that
    compiling takes as long as for one of each.

    Args:
        compile: False: nothing is compiled; True: torch's own backend; a name: that backend, such as "aot_eager", which
            compiles no kernels and so shows the captured graphs.
        cache_dir: keeps the compiled kernels, unless TORCHINDUCTOR_CACHE_DIR names a folder; None: torch's own, which
            is temporary. No other user may write to it, because torch runs what it finds there.

    Raises:
        BadInput: torch does not have the backend.
    """
    if not compile:
        return
    backend = "inductor" if compile is True else compile
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        known = ", ".join(backends)
        raise BadInput(f"optim.compile: torch has no backend {backend!r}; give true, graphs, or one of {known}")
    _set_up_compiler(cache_dir)
    for block in list(repeated_blocks(module)) or [module]:
        block.compile(backend=backend)


def _set_up_compiler(cache_dir: Path | None) -> None:
    if cache_dir is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir))
    import torch._inductor.config as inductor  # here: it takes a second

    torch._dynamo.config.recompile_limit = MAX_GRAPHS_OF_A_BLOCK
    inductor.fallback_random = True  # dropout draws the same numbers as without compilation


class GraphedParts:
    """Lets a detector run its `graph_parts` as CUDA graphs: one launch for the kernels of a part, forward or backward.

    A graph is of one shape, and takes memory for good. So only whole batches in training use them; evaluation, the last
    batch of an epoch and everything else run as without graphs. The names in the state dict do not change.

    Args:
        detector: a `Detector`.
        batch_size: number of images in a whole batch.
        cache_dir: see `compile_in_place`.

    Raises:
        BadInput: the detector has no such parts.
    """

    def __init__(self, detector: nn.Module, batch_size: int, cache_dir: Path | None = None):
        parts = []
        for name, part in detector.named_modules():
            if any(fnmatchcase(name, pattern) for pattern in detector.graph_parts):
                parts.append(part)
        if not parts:
            raise BadInput(
                "optim.compile graphs: the kernels of this detector depend on more than the size of its images; give "
                "true instead"
            )
        _set_up_compiler(cache_dir)
        self.batch_size = batch_size
        self._is_whole_batch = False
        for part in parts:
            compiled = torch.compile(part._call_impl, **GRAPHED)
            part._compiled_call_impl = functools.partial(self._call, part._call_impl, compiled)
        detector.register_forward_pre_hook(self._begin)
        detector.register_forward_hook(self._end, always_call=True)

    def _begin(self, detector: nn.Module, arguments: tuple) -> None:
        self._is_whole_batch = detector.training and len(arguments[0]) == self.batch_size
        if self._is_whole_batch:
            torch.compiler.cudagraph_mark_step_begin()  # else torch takes each part for a step of its own

    def _end(self, *_) -> None:
        self._is_whole_batch = False

    def _call(self, plain: Callable, compiled: Callable, *inputs, **named):
        call = compiled if self._is_whole_batch and torch.is_grad_enabled() else plain
        return call(*inputs, **named)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are in an nn.ModuleList or nn.Sequential with another module of their class.

    Examples are the layers of a transformer. Modules without children, such as a convolution, are not yielded.
    """
    in_row = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = Counter(map(type, module.children())) if in_row else {}
    for child in module.children():
        if in_row and kinds[type(child)] > 1 and any(True for _ in child.children()):
            yield child
        else:
            yield from repeated_blocks(child)


class GraphCount:
    """A counter of the graphs of torch.compile in this process.

    Growth in mid-training means that shapes keep changing.
    """

    def __init__(self):
        self.seen = 0

    def news(self, step: int) -> str:
        """Return a message about the graphs compiled since the last call; empty if there are none."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported where nothing is compiled
        graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
        made = graphs - self.seen
        again = self.seen > 0
        self.seen = graphs
        if made == 0:
            return ""
        reason = ": shapes or settings that it relied on have changed" if again else ""
        breaks = sum(dynamo.counters["graph_break"].values())
        more = "more " if again else ""
        return f"torch.compile: {made} {more}graphs up to step {step}, {graphs} in all, {breaks} graph breaks{reason}"


def checkpoint_in_place(module: nn.Module, checkpointing: bool, compile: bool | str | None = False) -> None:
    """Apply gradient checkpointing to the `repeated_blocks` of `module`, if wanted.

    The method is that of Chen et al., 2016, arXiv 1604.06174. In training a block keeps its inputs only, and is
    computed again in the backward pass. Losses, gradients and buffers are bitwise equal to those without checkpointing:
    dropout draws the same numbers again, and running statistics are updated once. The names in the state dict do not
    change.

    compile: the setting of `compile_in_place`, which cannot be combined with this.

    Raises:
        BadInput: the module has no such blocks, or is to be compiled.
    """
    if not checkpointing:
        return
    if compile:
        raise BadInput("optim.checkpointing: it cannot be combined with optim.compile; leave one of the two out")
    blocks = list(repeated_blocks(module))
    if not blocks:
        raise BadInput("optim.checkpointing: nothing in the detector repeats, as transformer layers do; leave it out")
    for block in blocks:
        block.__class__ = _checkpointed(type(block))


@functools.cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with checkpointing.

    A function on the instance would let copies of a module run on the weights of the original.
    """

    def forward(self, *args, **kwargs):
        run = super(made, self).forward
        if not (self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        contexts = contextlib.nullcontext(), _again(self, _attention_backends())
        return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)

    made = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return made


def _attention_backends() -> list[SDPBackend]:
    """Return the attention backends that are allowed here, for example by `sdpa_kernel`.

    The backward pass is outside of that context.
    """
    of = torch.backends.cuda
    allowed = {
        SDPBackend.MATH: of.math_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: of.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: of.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: of.cudnn_sdp_enabled(),
    }
    return [backend for backend, is_allowed in allowed.items() if is_allowed]


@contextlib.contextmanager
def _again(block: nn.Module, backends: Sequence[SDPBackend]) -> Iterator[None]:
    """Run the second forward of a block inside: the same kernels, and batch norms whose running statistics stay."""
    norms = []
    for module in block.modules():
        if isinstance(module, BATCH_NORMS) and module.num_batches_tracked is not None:
            norms.append(module)
    kept = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        with sdpa_kernel(backends):
            yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)


def be_deterministic() -> None:
    """Switch deterministic algorithms on, and print each operation that has none, once, when it is first used.

    On a CPU two runs are bitwise equal without this too; on a GPU it replaces atomic additions, such as those of
    scatter. cuBLAS needs workspaces of a fixed size for this and reads the size from the environment variable
    CUBLAS_WORKSPACE_CONFIG at its first product; the variable is set here unless it already has a value.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    met: set[str] = set()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    show = warnings.showwarning

    def name_once(message, category, filename, lineno, file=None, line=None):
        match = _NO_DETERMINISTIC.match(str(message))
        if match is None:
            show(message, category, filename, lineno, file, line)
        elif match[1] not in met:
            met.add(match[1])
            print(f"stays non-deterministic: {match[1]}", flush=True)

    warnings.showwarning = name_once
