"""A pretended CUDA device: real programs with real values on a machine without a GPU, and what they would cost on one.

    import pretended_device
    log = pretended_device.install(ROOT)        # before anything asks whether there is a GPU
    torch.zeros(3, device="cuda").sum().item()
    log.events

A tensor "on the device" is a subclass that says `cuda:0` and holds its values in a CPU tensor. What lies above the
kernels sees a CUDA tensor: autograd, autocast's lists, operators that branch on the device, the choice of foreach and
fused optimizers. Below it the CPU's kernels run, so random draws are the CPU's, and losses can be compared with it.
No compiler and no driver are needed.

Each operator on the device is an event:
    mismatch   a CPU tensor beside device tensors where CUDA refuses it: raises, as CUDA does
    wait       the host waits for the device: it reads a value, or a size that depends on values (nonzero, masks as
               indices, NMS), or it copies without `non_blocking`, or from memory that is not pinned to be read at once
    copy       a copy to or from the device that nobody waits for; `pinned` says whether it is asynchronous, too
    launch     everything else, about one kernel; views and empty tensors are none

Not seen: whether CUDA has a kernel for a dtype, cuDNN and fused attention (switched off; attention is the formula),
NCCL, streams and races, memory, the last bits of numbers.
"""

import ctypes
import importlib
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.unique_dim_consecutive,
    aten.equal,
    aten.bincount,
    aten.multinomial,
    aten.histc,
    aten._linalg_check_errors,
}
COPIES = {aten._to_copy, aten.copy_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
TAKES_CPU_SCALARS = ("_foreach_", "where", "clamp", "_amp_", "_fused_adam", "full_like", "fill")
FREE = {  # no kernel
    aten.detach,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.alias,
    aten._unsafe_view,
    aten.lift_fresh,
    aten.record_stream,
    aten._reshape_alias,
    aten.view,
    aten._fused_sdp_choice,
}
IN_FLOAT = {  # halves are computed in float32 inside, as a GPU accumulates, and much faster than by a CPU's kernels
    aten.convolution,
    aten.convolution_backward,
    aten.mm,
    aten.bmm,
    aten.addmm,
    aten.baddbmm,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
}
SOFTMAX, SOFTMAX_BACKWARD = (
    {getattr(aten, name + suffix) for name in ("_softmax", "_log_softmax")} for suffix in ("", "_backward_data")
)
HALVES = (torch.float16, torch.bfloat16)


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device; `host` has its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=DEVICE,
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents=None):
        return f"OnDevice({self.host!r})"

    def tolist(self):
        return self.cpu().tolist()

    def new_tensor(self, data, *, dtype=None):
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    def untyped_storage(self):
        return self.host.untyped_storage()

    def record_stream(self, stream):
        return None

    def __reduce_ex__(self, protocol):
        return self.host.__reduce_ex__(protocol)  # as `torch.load(map_location="cpu")` reads it back


@dataclass
class Event:
    """One operator. place: innermost line of the project; library: innermost line outside torch, where that is another
    one."""

    op: str
    kind: str
    place: str
    library: str
    pinned: bool = False


@dataclass
class Log:
    """What happened while `recording`; clear `events` before each part of a run."""

    project: str
    recording: bool = False
    warns: bool = False  # of waits, as `torch.cuda.set_sync_debug_mode("warn")` has it
    events: list[Event] = field(default_factory=list)
    pinned: dict[int, StorageWeakRef] = field(default_factory=dict)
    kept: object = None

    def note(self, op: str, kind: str, pinned: bool = False) -> None:
        if self.warns and kind == "wait":
            file, _, line = self._places()[0].rpartition(":")
            warnings.warn_explicit("called a synchronizing CUDA operation (pretended)", UserWarning, file, int(line))
        if self.recording:
            self.events.append(Event(op, kind, *self._places(), pinned))

    def _places(self) -> tuple[str, str]:
        frame, inner = sys._getframe(2), ""
        while frame is not None:
            path = frame.f_code.co_filename
            if path != __file__ and "site-packages/torch/" not in path:
                line = f"{path.removeprefix(self.project).split('site-packages/')[-1]}:{frame.f_lineno}"
                inner = inner or line
                if path.startswith(self.project) and "site-packages" not in path:
                    return line, inner if inner != line else ""
            frame = frame.f_back
        return inner, ""


_log = Log("")


def install(project: Path) -> Log:
    """Makes this process believe in one GPU, for good; the log is of lines below `project` and what they call."""
    _log.project = f"{project}/"
    torch.ones(1, requires_grad=True).sum().backward()  # autograd starts its device threads now, which are none
    torch._C._ensureCUDADeviceGuardSet()  # what FakeTensorMode does on machines without a GPU
    _has_context()
    torch.autograd.set_multithreading_enabled(False)  # backward in this thread, where the mode below is
    torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps parameters that are shared
    _load_in_place()
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(module)._foreach_supported_types.append(OnDevice)
    _pretend_modules()
    _pretend_nccl()
    mode = _Mode()
    mode.__enter__()
    return _log


def _load_in_place() -> None:
    """`load_state_dict` copies, as without the switch for `Module.to`: LSTMs refer weakly to their parameters."""
    swaps, load = torch.__future__.set_swap_module_params_on_conversion, torch.nn.Module.load_state_dict

    def copying(*args, **kwargs):
        swaps(False)
        try:
            return load(*args, **kwargs)
        finally:
            swaps(True)

    torch.nn.Module.load_state_dict = copying


def _has_context() -> None:
    """Autograd asks PyTorch's CUDA part whether the device is in use, which asks the driver: here the answer is yes.

    The answer is a virtual function of the object `CUDAHooks`, which gets a table with another one at its place.
    """
    header = Path(torch.__path__[0], "include", "ATen", "detail", "AcceleratorHooksInterface.h").read_text()
    place = re.findall(r"virtual\s[^;{]*?(\w+)\(", header).index("hasPrimaryContext") + 1  # the destructor has two
    hooks = ctypes.CDLL(str(Path(torch.__path__[0], "lib", "libtorch_cpu.so")))["_ZN2at6detail12getCUDAHooksEv"]
    hooks.restype = ctypes.c_void_p
    pointer = ctypes.cast(hooks(), ctypes.POINTER(ctypes.c_void_p))
    before, size = 2, 100  # a table begins after two entries of its own
    old = ctypes.cast(pointer[0] - before * 8, ctypes.POINTER(ctypes.c_void_p))
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda hooks, device: True)
    table = (ctypes.c_void_p * size)(*(old[i] for i in range(size)))
    table[before + place] = ctypes.cast(answer, ctypes.c_void_p).value
    pointer[0] = ctypes.addressof(table) + before * 8
    _log.kept = answer, table  # as long as the process lives


class _Mode(TorchDispatchMode):
    """Sees also what has no device tensor among its arguments: factories, and copies to the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if kwargs.pop("pin_memory", None):
            return pin(func(*args, **kwargs))
        if func.overloadpacket is aten.is_pinned:
            return is_pinned(args[0])
        asked = device is not None and torch.device(device).type == "cuda"
        if not asked and not any(issubclass(kind, OnDevice) for kind in types):
            return func(*args, **kwargs)
        return _run(func, args, kwargs)


def _run(func, args, kwargs):
    """The operator on the values; tells the log, refuses what CUDA refuses, and puts the result on the device."""
    packet, flat = func.overloadpacket, [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
    on_device = any(isinstance(tensor, OnDevice) for tensor in flat)
    target = kwargs.get("device")
    to_device = on_device if target is None else torch.device(target).type == "cuda"
    name = str(func).removeprefix("aten.")
    _refuse_mixed(packet, func, name, flat, on_device)
    _tell(packet, func, name, args, kwargs, to_device)
    if packet is aten.record_stream:
        return None
    if packet is aten._fused_sdp_choice:
        return 0  # the formula
    wrappers = {id(tensor.host): tensor for tensor in flat if isinstance(tensor, OnDevice)}
    args, kwargs = tree_map(_host, (args, kwargs))
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    result = _compute(packet, func, args, kwargs)

    def back(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in wrappers:
            wrapper = wrappers[id(value)]
            if wrapper.shape != value.shape:  # a wrapper cannot be resized, and no script asks for it
                raise NotImplementedError(f"{name} gives a tensor another shape in place")
            return wrapper
        return OnDevice(value) if to_device else value

    if to_device and packet is aten._to_copy and not on_device and result.data_ptr() == _host(flat[0]).data_ptr():
        result = result.clone()
    return tree_map(back, result)


def _host(value):
    return value.host if isinstance(value, OnDevice) else value


def _compute(packet, func, args, kwargs):
    replaced = {
        aten._thnn_fused_lstm_cell: _lstm,
        aten._thnn_fused_lstm_cell_backward_impl: _lstm_backward,
        aten._thnn_fused_gru_cell: _gru,
        aten._thnn_fused_gru_cell_backward: _gru_backward,
    }
    if packet in replaced:
        return replaced[packet](*args, **kwargs)
    if packet in SOFTMAX and args[2]:  # of halves, given in float32
        return func(args[0].float(), args[1], False)
    if packet in SOFTMAX_BACKWARD and args[3] != args[0].dtype:
        return func(*args[:3], args[0].dtype).to(args[3])
    halves = {a.dtype for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)} & set(HALVES)
    if not (halves and packet in IN_FLOAT):
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not halves or not any(text in str(error) for text in ("not implemented for", "mixed dtype", "expected")):
                raise
    return _in_float(packet, func, args, kwargs, halves.pop())


def _in_float(packet, func, args, kwargs, half):
    """Halves widened, the first result narrowed again, the others too, but for norms' statistics and the gradients of
    their float32 weights, and mutated arguments too."""
    wide = {}

    def widen(value):
        if isinstance(value, torch.Tensor) and value.dtype in HALVES:
            return wide.setdefault(id(value), (value, value.float()))[1]
        return value

    result = func(*tree_map(widen, args), **tree_map(widen, kwargs))
    if func._schema.is_mutable:
        for narrow, widened in wide.values():
            narrow.copy_(widened)
        return tree_map(lambda v: next((n for n, w in wide.values() if w is v), v), result)
    if isinstance(result, torch.Tensor):
        return result.to(half)
    keeps = packet in (aten.native_batch_norm, aten.native_layer_norm, aten.native_group_norm)
    keeps |= packet is aten.native_batch_norm_backward and args[2] is not None and args[2].dtype == torch.float32
    return tuple(
        v.to(half) if isinstance(v, torch.Tensor) and v.dtype == torch.float32 and not (keeps and i) else v
        for i, v in enumerate(result)
    )


def _refuse_mixed(packet, func, name, flat, on_device) -> None:
    if not on_device or packet in COPIES or packet in INDEXED or packet is aten.set_:
        return
    scalars = torch.Tag.pointwise in func.tags or name.startswith(TAKES_CPU_SCALARS)
    wrong = [tuple(a.shape) for a in flat if not isinstance(a, OnDevice) and not (scalars and a.dim() == 0)]
    if wrong:
        _log.note(name, "mismatch")
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got CPU tensors of shape "
            f"{wrong} beside cuda:0 (pretended)"
        )


def _tell(packet, func, name, args, kwargs, to_device) -> None:
    if not (_log.recording or _log.warns) or packet in FREE or func.is_view:
        return
    if packet in COPIES:
        _tell_copy(packet, name, args, kwargs, to_device)
    elif packet in INDEXED:
        indices = [i for i in args[1] if i is not None]
        value = args[2] if packet not in (aten.index, aten._unsafe_index) else None
        fills = value is not None and len(indices) == 1 and value.numel() == 1 and not isinstance(value, OnDevice)
        masks = any(i.dtype in (torch.bool, torch.uint8) for i in indices) and not fills  # a mask and a number: a fill
        from_host = any(not isinstance(i, OnDevice) and i.numel() for i in indices)
        _log.note(name, "wait" if masks or from_host else "launch")
    else:
        of_tensor = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        _log.note(name, "wait" if packet in READS or "torchvision.nms" in name or of_tensor else "launch")


def _tell_copy(packet, name, args, kwargs, to_device) -> None:
    from_, into = (args[0], None) if packet is aten._to_copy else (args[1], args[0])
    if into is not None and _host(from_).data_ptr() == _host(into).data_ptr():
        return  # DDP does not see that they are one: views of a tensor here have storages of their own
    up = not isinstance(from_, OnDevice)
    if not up and (to_device if into is None else isinstance(into, OnDevice)):
        _log.note(name, "launch")
        return
    later = kwargs.get("non_blocking", args[2] if packet is aten.copy_ and len(args) > 2 else False)
    pinned = is_pinned(from_) if up else into is not None and is_pinned(into)
    waits = not later or not up and not pinned
    _log.note(name, "wait" if waits else "copy", pinned)


def pin(tensor: torch.Tensor, device=None) -> torch.Tensor:
    copy = tensor.detach().clone()
    storage = copy.untyped_storage()
    _log.pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return copy


def is_pinned(tensor: torch.Tensor, device=None) -> bool:
    reference = _log.pinned.get(tensor.untyped_storage().data_ptr())
    return reference is not None and not reference.expired()


def _lstm(inputs, hidden, cx, input_bias=None, hidden_bias=None):
    gates = inputs + hidden + (0 if input_bias is None else input_bias + hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    tanh = cy.tanh()
    into = grad_hy * o * (1 - tanh**2) + (0 if grad_cy is None else grad_cy)
    gates = [into * g * i * (1 - i), into * cx * f * (1 - f), into * i * (1 - g**2), grad_hy * tanh * o * (1 - o)]
    gates = torch.cat(gates, 1)
    return gates, into * f, gates.sum(0) if has_bias else None


def _gru(inputs, hidden, hx, input_bias=None, hidden_bias=None):
    if input_bias is not None:
        inputs, hidden = inputs + input_bias, hidden + hidden_bias
    (ir, iz, in_), (hr, hz, hn) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_backward(grad, workspace, has_bias):
    r, z, n, hx, hn = workspace.chunk(5, 1)
    to_n = grad * (1 - z) * (1 - n**2)
    to_z, to_r = grad * (hx - n) * z * (1 - z), to_n * hn * r * (1 - r)
    inputs, hidden = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad * z, *biases


class _Stream:
    cuda_stream, device_index, device_type, stream_id, device = 0, 0, 1, 0, DEVICE

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None

    def wait_stream(self, *args):
        return None

    wait_event = wait = record = synchronize = wait_stream

    def record_event(self, event=None):
        return event or _Stream()

    def query(self):
        return True

    def is_capturing(self):
        return False


class _GeneratorKind(type):
    def __instancecheck__(cls, value):
        return isinstance(value, cls.plain)


class _Generator(metaclass=_GeneratorKind):
    """The CPU's, whose kernels are those that run."""

    plain = torch.Generator

    def __new__(cls, device="cpu"):
        return cls.plain()


def _pretend_nccl() -> None:
    """Several processes talk by gloo, each with a device of its own, which all of them call cuda:0."""
    begin, make = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel.__init__

    def by_gloo(backend=None, **options):
        return begin("cuda:gloo,cpu:gloo", **options)

    def without_clocks(ddp, *args, **kwargs):
        make(ddp, *args, **kwargs)
        ddp.register_comm_hook(None, _averaged)  # torch's own would give back what lies on the host
        for _ in range(11):  # steps in which DDP reads CUDA's clock, which says that there is no driver
            with suppress(RuntimeError):
                ddp.reducer.prepare_for_forward()

    torch.distributed.init_process_group = by_gloo
    torch.nn.parallel.DistributedDataParallel.__init__ = without_clocks


def _averaged(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    recording, _log.recording = _log.recording, False  # NCCL averages by itself
    gradients.div_(torch.distributed.get_world_size())
    _log.recording = recording
    torch.distributed.all_reduce(gradients)
    future = torch.futures.Future()
    future.set_result(gradients)
    return future


def _made_of_data(plain):
    """torch.tensor or torch.as_tensor, which makes its values on the CPU, and then copies them to the device."""

    def made(data, dtype=None, device=None, **kwargs):
        if device is None or torch.device(device).type == "cpu" or isinstance(data, torch.Tensor):
            return plain(data, dtype=dtype, device=device, **kwargs)
        return plain(data, dtype=dtype, **kwargs).to(device)

    return made


def _pretend_modules() -> None:
    properties = SimpleNamespace(
        name="Pretended GPU",
        total_memory=80 << 30,
        major=9,
        minor=0,
        warp_size=32,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
    )

    def gives(value):
        return lambda *args, **kwargs: value

    same = {
        "is_available": gives(True),
        "device_count": gives(1),
        "synchronize": gives(None),
        "empty_cache": gives(None),
        "memory_allocated": gives(0),
        "max_memory_allocated": gives(0),
        "reset_peak_memory_stats": gives(None),
        "memory_stats": gives({}),
        "current_stream": _Stream,
        "memory_reserved": gives(0),
        "max_memory_reserved": gives(0),
    }
    own = {
        "current_device": gives(0),
        "set_device": gives(None),
        "_lazy_init": gives(None),
        "init": gives(None),
        "is_initialized": gives(True),
        "manual_seed": gives(None),
        "manual_seed_all": gives(None),
        "Stream": _Stream,
        "stream": gives(_Stream()),
        "Event": _Stream,
        "default_stream": _Stream,
        "set_stream": gives(None),
        "mem_get_info": gives((80 << 30, 80 << 30)),
        "get_device_properties": gives(properties),
        "get_device_capability": gives((9, 0)),
        "get_device_name": gives(properties.name),
        "is_bf16_supported": gives(True),
        "is_current_stream_capturing": gives(False),
        "_is_compiled": gives(True),
        "get_rng_state": gives(torch.zeros(16, dtype=torch.uint8)),
        "set_rng_state": gives(None),
        "get_rng_state_all": gives([torch.zeros(16, dtype=torch.uint8)]),
        "set_rng_state_all": gives(None),
        "set_sync_debug_mode": lambda mode: setattr(_log, "warns", mode == "warn"),
        "get_arch_list": gives(["sm_90"]),
        "_exchange_device": gives(0),
        "_maybe_exchange_device": gives(0),
    }
    for name, value in (same | own).items():
        setattr(torch.cuda, name, value)
    accelerator = {
        "current_accelerator": gives(torch.device("cuda")),
        "current_device_index": gives(0),
        "current_device_idx": gives(0),
        "set_device_index": gives(None),
        "set_device_idx": gives(None),
    }
    for name, value in (same | accelerator).items():
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, value)
    for module in (torch.cuda.random, torch.cuda.memory):
        for name in vars(module).keys() & (same | own).keys():
            setattr(module, name, (same | own)[name])
    torch.Generator = _Generator
    torch.tensor, torch.as_tensor = _made_of_data(torch.tensor), _made_of_data(torch.as_tensor)
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin, is_pinned
    torch.backends.cudnn.enabled = False
    for switch in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, switch)(False)
