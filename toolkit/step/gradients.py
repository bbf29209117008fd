"""The gradient norm, a printable table of the largest gradients, and averaging over ranks."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.base.distributed import all_reduce, world


def gradient_table(
    named_parameters: Iterable[tuple[str, nn.Parameter]], max_norm: float = 0.0, top: int | None = None
) -> str:
    """Format lines of text: total norm and clipping factor, then name, norm and shape of the `top` largest gradients.

    max_norm: 0: nothing is clipped. Call it before clipping. It takes one host read.
    """
    named = [(name, p.grad) for name, p in named_parameters if p.grad is not None]
    if not named:
        return "---Total norm 0.00000: no parameter has a gradient---"
    norms = torch.stack([gradient.detach().float().norm() for _, gradient in named])
    *values, total = torch.cat([norms, norms.norm()[None]]).tolist()
    head = f"---Total norm {total:.5f}"
    if max_norm:
        head += f" clip coef {max_norm / (total + 1e-6):.5f}"
    rows = sorted(zip(values, named, strict=True), key=lambda row: -row[0])[:top]
    lines = [f"{name:<50s}: {norm:.5f}, ({gradient.shape})" for norm, (name, gradient) in rows]
    return "\n".join([f"{head}-----------------", *lines, "-------------------------------"])


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the total L2 norm of the gradients, 0-dim on their device; NaN or infinite when any entry is."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def group_norms(param_groups: Iterable[Mapping]) -> dict[str, Tensor]:
    """Return `gradient_norm` of each group of an optimizer as `grad_norm/<name of the group>`."""
    return {f"grad_norm/{group['name']}": gradient_norm(group["params"]) for group in param_groups}


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of parameters outside DDP over the ranks, after the last backward of a step; a collective.

    A rank without a gradient counts as zeros. With one process, or without parameters, nothing is done.
    """
    if not parameters or world()[1] == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    averaged = all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), "mean")
    for p, gradient in zip(parameters, averaged.split([p.numel() for p in parameters]), strict=True):
        p.grad = gradient.view_as(p).clone()


def drop_gradients(model: nn.Module) -> None:
    """Clear all gradients of the model, those of parameters that no optimizer holds included."""
    for parameter in model.parameters():
        parameter.grad = None
