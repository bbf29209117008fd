"""Gradient clipping, and a table of the largest gradients for people."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scales all gradients by max_norm / (norm + 1e-6) when that is below 1; None only measures.

    Returns the total norm before clipping, () on the device, without reading it. A norm that is not finite makes every
    gradient NaN or 0, so the caller's guard must look at it before the update.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    if max_norm is not None and gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
    return norm


def gradient_table(
    named_parameters: Iterable[tuple[str, nn.Parameter]], max_norm: float | None = None, top: int | None = None
) -> str:
    """Lines of text: total norm and clipping factor, then name, norm and shape of the `top` largest gradients.

    max_norm: None or 0: nothing is clipped. Call it before clipping. One host read.
    """
    named = [(name, p.grad) for name, p in named_parameters if p.grad is not None]
    if not named:
        return "---Total norm 0.00000: no parameter has a gradient---"
    norms = torch.stack([gradient.detach().float().norm() for _, gradient in named])
    *each, total = torch.cat([norms, norms.norm()[None]]).tolist()
    head = f"---Total norm {total:.5f}"
    if max_norm:
        head += f" clip coef {max_norm / (total + 1e-6):.5f}"
    rows = sorted(zip(each, named, strict=True), key=lambda row: -row[0])[:top]
    lines = [f"{name:<50s}: {norm:.5f}, ({gradient.shape})" for norm, (name, gradient) in rows]
    return "\n".join([f"{head}-----------------", *lines, "-------------------------------"])





def gradient_norm(parameters: Iterable[nn.Parameter], scale: Tensor | float | None = None) -> Tensor:
    """Total L2 norm of the gradients, 0-dim on their device; NaN or infinite when any entry is.

    scale: loss scale that the gradients still carry; the norm is divided by it on the device.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm if scale is None else norm / scale


def drop_gradients(model: nn.Module) -> None:
    """Forgets all gradients of the model, with those of parameters that no optimizer holds."""
    for parameter in model.parameters():
        parameter.grad = None
