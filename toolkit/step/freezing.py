"""Freezing that survives `.train()`, frozen batch norms, the momentum of batch norms, evaluation mode as a context."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.base.errors import BadInput
from toolkit.base.text import did_you_mean


def freeze(module: nn.Module) -> nn.Module:
    """Stop the gradients of `module` and keep it in eval mode for good, whatever `.train()` of a parent says.

    Dropout and batch statistics inside it stay off. Copies (`deepcopy`, pickle) are frozen too. Returns `module`.
    """
    module.requires_grad_(False)
    module.eval()
    # nn.Module.train() calls child.train(mode), which finds this attribute first. A partial of a module-level function
    # is what deepcopy and pickle can carry over to the copy; a lambda or a bound method is not.
    module.train = functools.partial(_stay_in_eval, module)
    return module


def freeze_prefixes(model: nn.Module, prefixes: Sequence[str]) -> list[str]:
    """Freeze the modules and parameters whose name is one of `prefixes` or below it ("backbone.layer1").

    Returns:
        The names of the parameters that no longer train.

    Raises:
        BadInput: a prefix that is neither a module nor a parameter; suggests a similar name, or lists the names that
            exist in place of its first wrong part.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    problems = []
    for prefix in prefixes:
        exists = prefix in modules or prefix in parameters
        if not prefix or not exists:
            problems.append(f"cannot freeze {prefix!r}: no such module or parameter{_hint(prefix, modules)}")
    if problems:
        raise BadInput(problems)
    for prefix in prefixes:
        if prefix in modules:
            freeze(modules[prefix])
        else:
            parameters[prefix].requires_grad_(False)
    beginnings = tuple(f"{prefix}." for prefix in prefixes)
    return [name for name in parameters if name in prefixes or name.startswith(beginnings)]


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace `train` of a frozen module: whatever the mode asked for, it and its children stay in eval mode."""
    return type(module).train(module, False)


def _hint(name: str, modules: Iterable[str]) -> str:
    """Return the end of a message about a module that does not exist: one with a similar name, or those in its place.

    The beginning of the name may be left out, and any part of it misspelt: "bakbone.stem" and "model.backbone.stem"
    are both answered with "model.model.backbone.stem".
    """
    parent = name
    while parent and parent not in modules:
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    below = [module for module in modules if module and module.startswith(prefix)]
    module_of: dict[str, str] = {}  # every end of a name, such as "backbone.stem" and "stem"
    for module in sorted(below, key=lambda module: (module.count("."), module)):  # of equal ends the highest counts
        parts = module.split(".")
        for start in range(len(parts)):
            module_of.setdefault(".".join(parts[start:]), module)
    beside = sorted(module for module in below if module.rpartition(".")[0] == parent)
    listed = f"{parent or 'the model'} has: {', '.join(beside) or 'no modules'}"
    unknown = name.removeprefix(prefix)
    return did_you_mean(unknown, module_of, otherwise=listed, written=module_of.__getitem__, cutoff=0.75)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside; afterwards restore the former mode of every submodule."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


class _Kept(NamedTuple):
    """What a `FrozenBatchNorm2d` computed from its buffers, and by what it notices that one of them changed.

    buffers: kept, so that no other tensor can have their ids. scale, shift: (1, C, 1, 1).
    """

    state: list
    buffers: tuple[Tensor, ...]
    scale: Tensor
    shift: Tensor


class FrozenBatchNorm2d(nn.Module):
    """A batch norm with fixed statistics and affine parameters, all of them buffers: x * scale + shift per channel.

    (N, C, H, W) -> (N, C, H, W). The scale is computed in float32 and applied in the dtype of x, so bf16 and fp16
    activations keep their dtype (torchvision's class turns them into float32). State dict: weight, bias, running_mean,
    running_var. The entry num_batches_tracked of an nn.BatchNorm2d is accepted and ignored.

    Args:
        num_features: C.
        eps: added to the variance.
        drop, act: modules applied afterwards, as in timm's BatchNormAct2d.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        drop: nn.Module | None = None,
        act: nn.Module | None = None,
    ):
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.drop = drop or nn.Identity()
        self.act = act or nn.Identity()
        self._kept: _Kept | None = None

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._scale_and_shift(x.dtype)
        x = torch.addcmul(shift, x, scale)
        return self.act(self.drop(x))

    def _scale_and_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factor and the offset of each channel, (1, C, 1, 1) each.

        Both are kept until a buffer changes: they take seven kernels of a GPU, where the norm itself takes one.
        """
        buffers = (self.weight, self.bias, self.running_mean, self.running_var)
        have_versions = not any(buffer.is_inference() for buffer in buffers)
        if torch.compiler.is_compiling() or not have_versions:
            return self._compute_scale_and_shift(dtype)
        state = [dtype, self.eps]
        for buffer in buffers:
            state += [id(buffer), buffer._version]
        if self._kept is None or self._kept.state != state:
            with torch.inference_mode(False):  # whose tensors could not be used in training
                scale, shift = self._compute_scale_and_shift(dtype)
            self._kept = _Kept(state, buffers, scale, shift)
        return self._kept.scale, self._kept.shift

    def _compute_scale_and_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return scale.to(dtype).view(1, -1, 1, 1), shift.to(dtype).view(1, -1, 1, 1)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_kept": None}  # a copy has buffers of its own

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _FrozenElsewhere(FrozenBatchNorm2d):
    """A `FrozenBatchNorm2d` with the float32 values of timm's and transformers', which multiply, round and add."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return super().forward(x)
        scale, shift = self._scale_and_shift(x.dtype)
        return self.act(self.drop(x * scale + shift))


def replace_frozen_batch_norms(module: nn.Module) -> None:
    """Replace the frozen batch norms of timm and transformers in `module`, in place, by `FrozenBatchNorm2d`.

    Theirs compute scale and shift in every forward, seven kernels of a GPU, and turn half precision into float32.
    """
    for name, child in module.named_children():
        replace_frozen_batch_norms(child)
        is_frozen_norm = type(child).__name__.endswith(("FrozenBatchNorm2d", "FrozenBatchNormAct2d"))
        if is_frozen_norm and not isinstance(child, FrozenBatchNorm2d):
            setattr(module, name, _frozen(child, _FrozenElsewhere))


def freeze_batch_norms(module: nn.Module) -> nn.Module:
    """Replace every 2-d batch norm in `module`, in place, by a `FrozenBatchNorm2d` with the same parameters.

    Statistics, weight, bias, epsilon and the training mode are copied. This affects nn.BatchNorm2d, SyncBatchNorm and
    timm's BatchNormAct2d, whose activation is kept. A batch norm without running statistics is left as it is. Returns
    `module`; if `module` itself is a batch norm, returns its replacement.
    """
    if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
        return module if module.running_mean is None else _frozen(module)
    for name, child in module.named_children():
        replacement = freeze_batch_norms(child)
        if replacement is not child:
            setattr(module, name, replacement)
    return module


def hold_batch_norms(module: nn.Module) -> None:
    """Freeze every batch norm with running statistics in `module` in place, so that images do not affect each other.

    Statistics, weight and bias are frozen, those of 1-d batch norms too. The names in the state dict do not change, and
    weights that are loaded later take effect.
    """
    for child in list(module.modules()):
        if isinstance(child, _BatchNorm) and child.running_mean is not None:
            freeze(child)


class BatchCounts:
    """Lets the batch norms of a module add to num_batches_tracked together, at the end of each forward in training.

    On a GPU this is one kernel instead of one for each norm. The counts stay the same, however often a norm is used. It
    is not for compiled modules, whose graphs hold the buffers.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._norms: list[nn.Module] = []
        for child in module.modules():
            if isinstance(child, _BatchNorm) and child.num_batches_tracked is not None and child.momentum is not None:
                self._norms.append(child)
        self._on_host = torch.zeros(len(self._norms), dtype=torch.int64)
        self._totals: list[Tensor] = []  # the buffers of the norms, while a forward is under way
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_) -> None:
        if self._norms and self.module.training:
            self._totals = [norm.num_batches_tracked for norm in self._norms]
            for norm, count in zip(self._norms, self._on_host.zero_(), strict=True):
                norm._buffers["num_batches_tracked"] = count

    def _end(self, *_) -> None:
        if self._totals:
            torch._foreach_add_(self._totals, self._on_host.tolist())
            for norm, total in zip(self._norms, self._totals, strict=True):
                norm._buffers["num_batches_tracked"] = total
            self._totals = []


def set_bn_momentum(module: nn.Module, momentum: float) -> None:
    """Set the momentum (weight of the new batch in running statistics) of every batch norm in training mode."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.training:
            child.momentum = momentum


def bn_momentum(
    step: int,
    total_steps: int,
    start: float,
    final: float,
    warmup_steps: int = 0,
    shape: str = "cosine",
) -> float:
    """Return the batch-norm momentum at a step.

    The momentum is `start` during the warm-up, and then changes to `final`, which it reaches at `total_steps`, so that
    the running statistics settle. The schedule is CVNets' AdjustBatchNormMomentum.

    shape: "cosine" or "linear", the curve from `start` to `final`.
    """
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    done = min(max(done, 0.0), 1.0)
    left_by_shape = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
    }
    return final + (start - final) * left_by_shape[shape]


def _frozen(norm: nn.Module, kind: type[FrozenBatchNorm2d] = FrozenBatchNorm2d) -> FrozenBatchNorm2d:
    drop = getattr(norm, "drop", None)
    act = getattr(norm, "act", None)
    frozen = kind(len(norm.running_mean), getattr(norm, "eps", 1e-5), drop, act)
    frozen = frozen.to(norm.running_mean.device, norm.running_mean.dtype)
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            source = getattr(norm, name)
            if source is not None:  # affine=False has neither weight nor bias: 1 and 0
                getattr(frozen, name).copy_(source)
    return frozen.train(norm.training)
