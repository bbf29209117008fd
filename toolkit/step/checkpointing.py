"""Gradient checkpointing: blocks that recompute their activations in the backward pass instead of keeping them."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from toolkit.base.errors import BadInput
from toolkit.step.compiling import repeated_blocks

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)


def checkpoint_in_place(module: nn.Module, checkpointing: bool, compile: bool | str | None = False) -> None:
    """Apply gradient checkpointing to the `repeated_blocks` of `module`, if wanted.

    The method is that of Chen et al., 2016, arXiv 1604.06174. In training a block keeps its inputs only. Losses,
    gradients and buffers are bitwise equal: dropout draws the same numbers again, and running statistics are updated
    once. The names in the state dict stay.

    Raises:
        BadInput: the module has no such blocks, or is to be compiled.
    """
    if not checkpointing:
        return
    if compile:
        raise BadInput("optim.checkpointing: it does not go with optim.compile; leave one of the two out")
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
    norms = [norm for norm in block.modules() if isinstance(norm, BATCH_NORMS) and norm.num_batches_tracked is not None]
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
