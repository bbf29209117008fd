"""The check that the state after an update is finite: weights, buffers, averages, optimizer state, learning rates.

The guard decides before an update, but an update of finite gradients can overflow too. Each step checks one of `PARTS`
parts of the state, in turn, without a host read; all parts are checked before an evaluation, a checkpoint or a write to
`final/`, and when another check fails.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

PARTS = 8
LARGEST = torch.finfo(torch.float32).max


def named_state(
    model: nn.Module,
    buffers: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    weights: nn.Module,
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield ((kind, name), tensor) of everything that a run trains.

    buffers: by name, those that must be finite. weights: of the losses.
    """
    names = {}
    for kind, module in (("weight", model), ("loss weight", weights)):
        for name, parameter in module.named_parameters():
            names[parameter] = name
            yield (kind, name), parameter
    yield from ((("buffer", name), buffer) for name, buffer in buffers)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                yield (f"{key} of", names.get(parameter, "?")), value


@torch.no_grad()
def looks_finite(state: Iterable[tuple[object, Tensor]], part: int) -> Tensor:
    """Return 1.0 if the norm of one part (of `PARTS`, from 0) of the state is finite, else 0.0; 0-dim, no host read.

    0.0 is a suspicion: the norm of finite entries can overflow. `nonfinite` decides. (The largest magnitude would not
    overflow, but takes fifteen times as long on a CPU.)
    """
    tensors = [tensor for i, (_, tensor) in enumerate(state) if i % PARTS == part and tensor.numel()]
    return torch.nn.utils.get_total_norm(tensors).isfinite().float() if tensors else torch.ones(())


@torch.no_grad()
def nonfinite(state: Iterable[tuple[tuple[str, str], Tensor]]) -> list[str]:
    """Return the names of tensors with a NaN or an infinity: "exp_avg_sq of head.weight"; reads them on the host."""
    named = [(kind_and_name, tensor) for kind_and_name, tensor in state if tensor.is_floating_point()]
    # all norms with one read per device; a finite norm means finite entries
    finite = [torch.linalg.vector_norm(tensor).isfinite() for _, tensor in named]
    by_device: dict[torch.device, list[int]] = {}
    for i, flag in enumerate(finite):
        by_device.setdefault(flag.device, []).append(i)
    suspects = []
    for indices in by_device.values():
        flags = torch.stack([finite[i] for i in indices]).tolist()
        suspects += [i for i, fine in zip(indices, flags, strict=True) if not fine]
    return [" ".join(named[i][0]) for i in sorted(suspects) if not bool(named[i][1].isfinite().all())]


def unusable_rate(groups: Iterable[dict]) -> str:
    """Describe the first learning rate with which an update overflows or fails in float32; empty if there is none.

    torch refuses the multiplication in the middle of the update, when some weights have moved and others have not.
    """
    for group in groups:
        beta = group["betas"][0] if "betas" in group else 0.0  # Adam divides the rate by 1 - beta1 in its first step
        if not group["lr"] / (1.0 - beta) * max(1.0, group.get("weight_decay", 0.0)) <= LARGEST:
            return f"the learning rate of {group.get('name', 'a group')} is {group['lr']:g}, too large for float32"
    return ""
