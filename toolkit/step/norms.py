"""Freezing that survives `.train()`, frozen batch norms, and the momentum of batch norms over training."""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.errors import BadInput
from toolkit.step.freezing import freeze


class FrozenBatchNorm2d(nn.Module):
    """Batch norm with fixed statistics and affine parameters, all of them buffers: x * scale + shift per channel.

    (N, C, H, W) -> (N, C, H, W). The scale is computed in float32 and applied in the dtype of x, so bf16 and fp16
    activations keep theirs (torchvision's class turns them into float32). State dict: weight, bias, running_mean,
    running_var, as nn.BatchNorm2d without num_batches_tracked, which is accepted and ignored.

    Args:
        num_features: C.
        eps: added to the variance.
        drop, act: modules applied afterwards, as in timm's BatchNormAct2d.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, drop: nn.Module | None = None, act: nn.Module | None = None
    ):
        super().__init__()
        self.num_features, self.eps = num_features, eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.drop, self.act = drop or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        x = torch.addcmul(shift.to(x.dtype).view(1, -1, 1, 1), x, scale.to(x.dtype).view(1, -1, 1, 1))
        return self.act(self.drop(x))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def freeze_batch_norms(module: nn.Module) -> nn.Module:
    """Replaces every 2-d batch norm in `module` by a `FrozenBatchNorm2d` of the same numbers.

    nn.BatchNorm2d, SyncBatchNorm and timm's BatchNormAct2d, whose activation is kept. A batch norm without running
    statistics has nothing to freeze and stays. Returns `module`, or its replacement when it is a batch norm itself.
    """
    if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
        return module if module.running_mean is None else _frozen(module)
    for name, child in module.named_children():
        replacement = freeze_batch_norms(child)
        if replacement is not child:
            setattr(module, name, replacement)
    return module


def hold_batch_norms(module: nn.Module) -> None:
    """Freezes every batch norm in `module` where it is, 1-d ones too, so that no image has a part in what becomes of
    another. Names in the state dict stay; weights that are loaded later are those that hold."""
    for child in list(module.modules()):
        if isinstance(child, _BatchNorm) and child.running_mean is not None:
            freeze(child)


def set_bn_momentum(module: nn.Module, momentum: float) -> None:
    """Sets the momentum (weight of the new batch in running statistics) of every batch norm in training mode."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.training:
            child.momentum = momentum


def bn_momentum(
    step: int, total_steps: int, start: float = 0.1, final: float = 1e-6, warmup_steps: int = 0, shape: str = "cosine"
) -> float:
    """Batch-norm momentum at an optimizer step: `start` during the warm-up, then to `final` at `total_steps`.

    shape: "cosine" or "linear". As CVNets' AdjustBatchNormMomentum, which ends statistics that still move.
    """
    if shape not in ("cosine", "linear"):
        raise BadInput(f"batch-norm momentum shape is {shape!r}; expected cosine or linear")
    done = min(max((step - warmup_steps) / max(1, total_steps - warmup_steps), 0.0), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return final + (start - final) * left


def _frozen(norm: nn.Module) -> FrozenBatchNorm2d:
    frozen = FrozenBatchNorm2d(norm.num_features, norm.eps, getattr(norm, "drop", None), getattr(norm, "act", None))
    frozen = frozen.to(norm.running_mean.device, norm.running_mean.dtype)
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            source = getattr(norm, name)
            if source is not None:  # affine=False has neither weight nor bias: 1 and 0
                getattr(frozen, name).copy_(source)
    return frozen.train(norm.training)


