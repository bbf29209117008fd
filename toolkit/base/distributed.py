"""Collective operations between processes; they also work in a single process (torch.distributed not initialised).

Every function here except `world`, `leave`, `cpu_is_requested`, `default_device` and `usable_device` is a collective:
all ranks call it, in the same order.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.base.batch import send
from toolkit.base.errors import BadInput, Preempted, StoppedByGuard
from toolkit.base.text import shown

Result = TypeVar("Result")
IMAGES_PER_MESSAGE = 1000  # images whose predictions are sent in one message


class UnannouncedName(BadInput):
    """The error for a value under a name that was not announced; every rank raises it, whichever has the value."""


def world() -> tuple[int, int]:
    """Return (rank, number of processes); (0, 1) when torch.distributed is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def leave() -> None:
    """Destroy the process group after the last collective.

    The threads of the group end only when the model, which holds a reference to the group, is deleted too; see
    `toolkit.run.command_line.run_script`.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def all_reduce(values: Tensor, op: str = "sum") -> Tensor:
    """Return `values` reduced over the ranks, element by element, on the device of `values`.

    op: "sum", "mean" or "max". The input is not modified. With NCCL the host does not wait for the device.
    """
    _, world_size = world()
    if world_size > 1:
        # gloo may accept CPU tensors only, and NCCL device tensors only, whatever the device of the values
        reduced = values.to(_collective_device(values.device), copy=True)
        dist.all_reduce(reduced, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        values = reduced.to(values.device)
    return values / world_size if op == "mean" else values


def reduce_dict(
    values: Mapping[str, Tensor | float],
    names: Sequence[str] | None = None,
    unknown: Iterable[str] = (),
    op: str = "mean",
) -> dict[str, float]:
    """Reduce values over all ranks by name, with one collective and one host read for all of them.

        reduced = reduce_dict(losses)    # {"loss_ce": 1.7, ...}, means over the ranks, equal on all of them

    Args:
        values: scalars of this rank (Tensors on any device, or numbers); a name that is missing counts 0.
        names: the announced names, the same set on every rank. Their sorted order is the layout of the message, so a
            rank with other keys, or keys in another order, cannot shift the values of its neighbours. None: the names
            in `values`, which every rank must have; that takes one more message, so give names in a loop.
        unknown: further names that this rank reported without announcement.
        op: "mean", "sum" or "max" over all ranks. A NaN on one rank makes the mean and sum NaN on every rank.

    Returns:
        {name: value} for the sorted `names`, equal on every rank.

    Raises:
        UnannouncedName: on every rank, if any rank had a key that is not in `names`, or an `unknown` one; without
            `names`, if the ranks have different keys.
    """
    layout = _common_names(values) if names is None else sorted(set(names))
    unannounced = set(values) - set(layout)
    strangers = sorted({*unknown, *unannounced})
    # The count of strangers has a slot of its own, so the ranks need no second message to learn of it.
    known = [values.get(name, 0.0) for name in layout]
    vector = stack_scalars([*known, float(len(strangers))])
    *reduced, stranger_count = all_reduce(vector, op).tolist()
    if stranger_count > 0:
        _raise_unannounced(strangers, layout)
    return dict(zip(layout, reduced, strict=True))


def _common_names(values: Mapping[str, Any]) -> list[str]:
    """Return the sorted names in `values`, which must be the same on every rank; a collective."""
    of_ranks = gather_objects(sorted(values))
    first = of_ranks[0]
    problems = [
        f"reduce_dict: rank {rank} has the names {', '.join(of_rank) or 'none'}, rank 0 has "
        f"{', '.join(first) or 'none'}; give names=[...], under which a value that a rank lacks counts 0"
        for rank, of_rank in enumerate(of_ranks)
        if of_rank != first
    ]
    if problems:
        raise UnannouncedName(problems)
    return first


def stack_scalars(values: Sequence[Tensor | float]) -> Tensor:
    """Stack scalars to one detached float64 vector (float32 on Apple's MPS, which has no float64).

    The vector is on the accelerator of the tensors among the scalars, or on the CPU if none is on an accelerator.
    """
    devices = [value.device for value in values if isinstance(value, Tensor)]
    accelerators = [device for device in devices if device.type != "cpu"]
    device = accelerators[0] if accelerators else torch.device("cpu")
    dtype = torch.float32 if device.type == "mps" else torch.float64
    scalars: list = list(values)
    kinds: dict[object, list[int]] = {}  # converted one kind at a time: one by one, each would launch a kernel
    for i, value in enumerate(values):
        kind = (value.dtype, value.device) if isinstance(value, Tensor) else "number"
        kinds.setdefault(kind, []).append(i)
    for kind, indices in kinds.items():
        members = [values[i] for i in indices]
        together = torch.tensor(members, dtype=dtype) if kind == "number" else torch.stack(members)
        converted = send(together.detach(), device).to(dtype)
        for i, scalar in zip(indices, converted.unbind(), strict=True):
            scalars[i] = scalar
    return torch.stack(scalars)


def gather_by_image(items: Iterable[tuple[int | str, dict]]) -> dict[int | str, dict]:
    """Gather the predictions of all ranks by image id on rank 0; return an empty dict on the others.

    items: (image id, prediction) pairs of this rank; a prediction is a dict whose tensors are copied to the CPU first.
    If several ranks (or batches) have predicted for the same image, the first prediction in the order of ranks is kept.
    Predictions are sent some images at a time, so that only the result takes much memory.
    """
    local = [(image_id, _to_cpu(prediction)) for image_id, prediction in items]
    rank, world_size = world()
    if world_size == 1:
        by_rank = [local]
        most = 0  # nothing is sent
    else:
        by_rank = [[] for _ in range(world_size)]
        most = agree_max(len(local))
    for first in range(0, most, IMAGES_PER_MESSAGE):
        parts = [None] * world_size if rank == 0 else None
        dist.gather_object(local[first : first + IMAGES_PER_MESSAGE], parts, dst=0)
        for predictions, part in zip(by_rank, parts or (), strict=False):
            predictions += part
    gathered: dict[int | str, dict] = {}
    for predictions in by_rank:
        for image_id, prediction in predictions:
            gathered.setdefault(image_id, prediction)
    return gathered


def gather_objects(value: Result) -> list[Result]:
    """Return the `value` of every rank, in the order of ranks, on every rank."""
    _, world_size = world()
    if world_size == 1:
        return [value]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Result) -> Result:
    """Return the `value` of rank 0 on every rank."""
    _, world_size = world()
    if world_size == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0, device=_collective_device(torch.device("cpu")))
    return holder[0]


def run_on_main(function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0 and return its result on every rank.

    Raises:
        Every exception of `function`, on every rank: the same built-in or toolkit exception; one of another package
        becomes a RuntimeError on the ranks that may not be able to rebuild it.
    """
    rank, world_size = world()
    if world_size == 1:
        return function()
    if rank == 0:
        try:
            result = function()
        except BaseException as error:
            broadcast_object((None, _portable(error)))  # the others wait for a message, whatever happened
            raise
        broadcast_object((result, None))
        return result
    result, error = broadcast_object(None)
    if error is not None:
        raise error
    return result


def state_from_main(function: Callable[[], Result]) -> Result:
    """Run a function as `run_on_main` does, for a result with large tensors (in dicts, lists, tuples, dataclasses).

    The tensors are sent without pickling, and arrive on the CPU. Raises the same as `run_on_main`.
    """
    rank, world_size = world()
    if world_size == 1:
        return function()
    held: list[Any] = []
    run_on_main(lambda: held.append(function()))
    own = _mapped(held[0], _TensorSpec.of, Tensor) if rank == 0 else None
    skeleton = broadcast_object(own)
    device = _collective_device(torch.device("cpu"))

    def arrived(spec: "_TensorSpec") -> Tensor:
        size = spec.shape.numel() * spec.dtype.itemsize
        shared = torch.empty(size, dtype=torch.uint8, device=device)
        if size:
            dist.broadcast(shared, src=0)
        values = shared.cpu().view(spec.dtype)
        return values.as_strided(spec.shape, spec.stride)

    def sent(tensor: Tensor) -> Tensor:
        if tensor.numel():
            dense = torch.empty_like(tensor, device="cpu").copy_(tensor)
            flat = dense.as_strided((dense.numel(),), (1,))
            dist.broadcast(flat.view(torch.uint8).to(device), src=0)
        return tensor

    if rank == 0:
        return _mapped(held[0], sent, Tensor)
    return _mapped(skeleton, arrived, _TensorSpec)


@dataclass(frozen=True)
class _TensorSpec:
    """The shape, strides and dtype of a tensor, in its place in a message.

    Strides are kept: a fused optimizer requires those of its state to be the same on all processes.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_TensorSpec":
        dense = torch.empty_like(tensor, device="meta")
        return cls(tensor.shape, dense.stride(), tensor.dtype)


def _mapped(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Apply `change` to every instance of `kind` in a nested value, depth first."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change, kind) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_mapped(item, change, kind) for item in value])
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _mapped(getattr(value, f.name), change, kind) for f in fields(value)}
        return replace(value, **changed)
    return value


def first_on_each_machine(function: Callable[[], object]) -> None:
    """Call `function` on rank 0, then on one rank of each other machine, while the others wait.

    This is for functions that prepare a file once on each disk: if machines share a disk, the later ones find the file.

    Raises:
        Every exception of `function`, on every rank: see `run_on_main`.
    """
    run_on_main(lambda: [function()] and None)  # its result is not sent
    rank, world_size = world()
    if world_size == 1:
        return
    error = None
    if rank and int(os.environ.get("LOCAL_RANK", rank)) == 0:
        try:
            function()
        except Exception as caught:  # noqa: BLE001  the others wait for a message, whatever happened
            error = caught
    of_ranks = gather_objects(error and _portable(error))
    failures = [failure for failure in of_ranks if failure is not None]
    if error is not None:
        raise error
    if failures:
        raise failures[0]


def broadcast_buffers(module: torch.nn.Module) -> None:
    """Copy the buffers of rank 0 to every rank (running statistics, which each rank gathers from its own images)."""
    _, world_size = world()
    if world_size == 1:
        return
    for buffer in module.buffers():
        shared = buffer.detach().to(_collective_device(buffer.device), copy=True)
        dist.broadcast(shared, src=0)
        buffer.copy_(shared)


def agree_max(value: int) -> int:
    """Return the largest `value` of all ranks, for example of the numbers of received signals (0 for none)."""
    return int(all_reduce(torch.tensor(value), "max"))


def cpu_is_requested() -> bool:
    """Return whether the environment variable ACCELERATE_USE_CPU disables accelerators."""
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")


def default_device() -> torch.device:
    """Return the default device of a model, as Accelerate chooses it.

    CUDA, Apple's MPS or another accelerator; the CPU if there is none, or if `cpu_is_requested`.
    """
    cpu = torch.device("cpu")
    if cpu_is_requested():
        return cpu
    return torch.accelerator.current_accelerator(check_available=True) or cpu


def usable_device(name: torch.device | str) -> torch.device:
    """Return the device of this name. Raises BadInput if there is no such device in this machine."""
    known = "leave it out, or use cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device {shown(name)}: not a device; {known}, cuda, cuda:1 or mps") from error
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        kind = {"cuda": "NVIDIA GPU", "mps": "GPU of Apple"}.get(device.type, f"{device.type} device")
        raise BadInput(f"--device {shown(name)}: this machine has no {kind} that PyTorch can use; {known}")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise BadInput(f"--device {shown(name)}: this machine has {count} of them, numbered from 0; {known}")
    return device


def _collective_device(device: torch.device) -> torch.device:
    """Return the device on which a collective accepts a tensor that is on `device`."""
    backend = dist.get_backend()
    if backend in ("gloo", "mpi"):
        return torch.device("cpu")
    if "gloo" in backend and device.type == "cpu":  # one for each kind of device, see `toolkit.run.processes`
        return device
    accelerator = torch.accelerator.current_accelerator()
    index = torch.accelerator.current_device_index()
    return torch.device(accelerator.type, index)


def _raise_unannounced(strangers: list[str], layout: list[str]) -> None:
    problems = []
    for rank, names in enumerate(gather_objects(strangers)):
        for name in names:
            problems.append(
                f"rank {rank}: value {name!r} was not announced. In a script: a loss by t.announce({name!r}, "
                f'weight=1.0, divided_by="images") after t = s.training(...), a metric by t.log.note({name!r}, value). '
                f"A detector names its own in `loss_names` and `metric_names`: {', '.join(layout)}"
            )
    raise UnannouncedName(problems)


def _portable(error: BaseException) -> BaseException:
    """Convert an exception to one that unpickles on another process; those of other packages often do not."""
    if isinstance(error, BadInput):
        return BadInput(error.problems)
    if type(error).__module__ == "builtins" or type(error) in (StoppedByGuard, Preempted):
        return error
    return RuntimeError(f"on rank 0: {type(error).__name__}: {error}")


def _to_cpu(prediction: Mapping[Hashable, Any]) -> dict:
    # clone: a view would send its whole base tensor, the predictions of the batch, once per image
    on_cpu = dict(prediction)
    for name, value in prediction.items():
        if isinstance(value, Tensor):
            on_cpu[name] = value.detach().cpu().clone()
    return on_cpu
