"""Diagnoses a non-finite value: runs the window again, finds where the value appears first, and describes the place."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.base.batch import Batch
from toolkit.base.distributed import world
from toolkit.step.guard import boxes_finite
from toolkit.step.optim import drop_gradients

RunWindow = Callable[[], Sequence[Mapping[str, Tensor]]]  # returns the losses of each micro-batch
Facts = Mapping[str, Any]


def diagnose(model: nn.Module, run_window: RunWindow, scale: float = 1.0) -> dict:
    """Run a window again and find where the first non-finite number appears.

    Gradients of the model are dropped before and afterwards. Its buffers are changed by the window.

    Args:
        run_window: runs forward and backward pass of the window, and returns the losses of each micro-batch.
        scale: loss scale by which the window's gradients are multiplied.

    Returns:
        where: "parameters", "module", "loss", "gradient", "norm" (all gradients are finite, but not their norm) or
            "unknown" (everything is finite this time).
        first_nonfinite_module, module_type: name and class of the first module that finished with a non-finite output,
            or None.
        kind: origin of that output. "output": the module's inputs are finite; "input": its input, from the code around
            the module or from the batch, is not finite; "parameters": its own parameters are not finite; "criterion":
            the module is not part of the model's forward pass, which was finite.
        window_losses: {name: float} for each micro-batch.
        nonfinite_gradients: names of the parameters with non-finite gradients.
        nonfinite_state: an empty list.
        backward: for "gradient", the operation with the non-finite derivative.
        error: the exception that the run raised, as text, or None.
        largest_gradient: for "norm", [name of the parameter, largest magnitude].
    """
    finding = nothing_found()
    drop_gradients(model)
    with _watch(model) as first, torch.compiler.set_stance("force_eager"):
        try:
            finding["window_losses"] = [{k: float(v) for k, v in losses.items()} for losses in run_window()]
        except (RuntimeError, ValueError, ArithmeticError) as error:  # an assignment rejects a NaN cost, for example
            finding["error"] = f"{type(error).__name__}: {error}"
    finding.update(first)
    finding["nonfinite_gradients"] = [
        name for name, p in model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    gradients = {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
    norm = float(torch.nn.utils.get_total_norm(gradients.values())) if gradients else 0.0
    largest = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
    drop_gradients(model)
    if finding["first_nonfinite_module"] is not None:
        finding["where"] = {"parameters": "parameters", "criterion": "loss"}.get(finding["kind"], "module")
    elif finding["error"] or not all(math.isfinite(v) for losses in finding["window_losses"] for v in losses.values()):
        finding["where"] = "loss"
    elif finding["nonfinite_gradients"]:
        finding["where"] = "gradient"
        finding["backward"] = _backward_operation(model, run_window)
    elif not math.isfinite(norm):
        name = max(largest, key=largest.get)
        finding.update(where="norm", largest_gradient=[name, largest[name]])
    return finding


def find_cause(model: nn.Module, run_window: RunWindow, batches: Sequence[Batch], scale: float) -> dict:
    """Return the finding of `diagnose` with a further entry `batch`, the names of non-finite tensors in the batches. If
    there are any, `where` is "batch".

    batches: of the window. A window with non-finite boxes is not run, because pooling at an infinite box may end the
    process. For the other arguments see `diagnose`.
    """
    finding = diagnose(model, run_window, scale) if boxes_finite(batches) else nothing_found()
    finding["batch"] = nonfinite_names(batches)
    if finding["batch"]:
        finding["where"] = "batch"
    return finding


def replay(
    detector: nn.Module,
    report: Facts,
    batches: Sequence[Batch],
    run_window: RunWindow,
    tensors: Mapping[str, Tensor] | None = None,
) -> dict:
    """Run a reported window again, on a detector that holds the model state of the report.

    Args:
        report, batches: from `load_report`.
        run_window: runs the window: `Window.run_again`, or the script's own loop.
        tensors: from `load_named_state`.

    Returns:
        the finding of `diagnose`, with further entries. reproduced: whether the same fault appeared in the same place;
        if the state was not finite before the window, whether the stored state is not finite. batch: names of
        non-finite tensors in the batches. lacking: names of reported tensors that the report does not hold.
    """
    if report["where"] == "rate":
        return nothing_found() | {"where": "rate", "batch": [], "lacking": [], "reproduced": True}
    if report["where"] == "state":
        return _look_at_state(detector, report["nonfinite_state"], tensors or {})
    finding = find_cause(detector.train(), run_window, batches, float(report.get("scale") or 1.0))
    same = ("where", "first_nonfinite_module", "kind", "nonfinite_gradients")
    # "unknown": the additions of the script were not run again then
    same_place = report["where"] == "unknown" or all(finding[key] == report[key] for key in same)
    again = finding["where"] != "unknown" and same_place
    return {**finding, "lacking": [], "reproduced": again}


def describe_finding(finding: Facts) -> str:
    """Return a sentence that says where the fault in a finding of `diagnose` is."""
    module = f"{finding['first_nonfinite_module']} ({finding['module_type']})"
    if finding["where"] == "batch":
        return f"not finite in the batch: {', '.join(finding['batch'])}."
    if finding["where"] == "loss":
        values = {k: v for losses in finding["window_losses"] for k, v in losses.items() if not math.isfinite(v)}
        return f"all outputs are finite, the losses are not: {finding['error'] or values}."
    if finding["where"] == "gradient":
        names = finding["nonfinite_gradients"]
        cause = f" ({finding['backward']})" if finding["backward"] else ""
        return f"the losses are finite, the gradients of {len(names)} parameters are not{cause}, one is {names[-1]}."
    if finding["where"] == "state":
        broken = finding["nonfinite_state"]
        names = f"{', '.join(broken[:3])}{f' and {len(broken) - 3} more' if len(broken) > 3 else ''}"
        return f"not finite after the last update: {names}." if broken else "the weights and buffers are finite."
    if finding["where"] == "rate":
        return "a learning rate is too large for float32, whatever the batch."
    if finding["where"] == "norm":
        name, largest = finding["largest_gradient"]
        return f"every gradient is finite, their norm is not; the largest is {largest:g}, of {name}."
    if finding["where"] == "parameters":
        return f"the parameters of {module} are not finite."
    if finding["where"] == "module":
        origin = "from finite inputs" if finding["kind"] == "output" else "handed to it by the code around it"
        return f"first module with a non-finite output: {module}, {origin}."
    return "finite when run again."


def nothing_found() -> dict[str, Any]:
    """Return the finding of `diagnose` for a window in which everything is finite."""
    finding = {
        "where": "unknown",
        "window_losses": [],
        "nonfinite_gradients": [],
        "nonfinite_state": [],
    }
    nothing = ("first_nonfinite_module", "module_type", "kind", "backward", "error", "largest_gradient")
    return finding | dict.fromkeys(nothing)


def _look_at_state(detector: nn.Module, names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict:
    """Return the finding of `replay` about state that was not finite before the window."""
    held = {f"weight {name}": parameter for name, parameter in detector.named_parameters()}
    for name, buffer in detector.named_buffers():
        if _is_broken(buffer):  # it was not restored
            held[f"buffer {name}"] = buffer
    held |= tensors
    broken = [name for name in names if name in held and _is_broken(held[name])]
    lacking = [name for name in names if name not in held]
    found = {"where": "state", "nonfinite_state": broken, "batch": [], "lacking": lacking}
    return nothing_found() | found | {"reproduced": bool(broken)}


@contextmanager
def _watch(model: nn.Module) -> Iterator[dict]:
    """Yield a dict that receives the first module that finishes with a non-finite output in a `with` block.

    Inner modules finish before the modules around them, so the innermost one is recorded.
    """
    first = {"first_nonfinite_module": None, "module_type": None, "kind": None}
    in_forward = None  # before the first forward: SSD runs its backbone then for the shapes of its maps

    def enter(*_: Any) -> None:
        nonlocal in_forward
        in_forward = True

    def hook_of(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            nonlocal in_forward
            if in_forward is None or first["first_nonfinite_module"] is not None:
                return
            if any(_is_broken(t) for t in _tensors_in(output)):
                kind = _kind(module, (args, kwargs)) if in_forward else "criterion"
                first.update(
                    first_nonfinite_module=name or "(itself)",
                    module_type=type(module).__name__,
                    kind=kind,
                )
            in_forward = in_forward and module is not model

        return hook

    handles = [m.register_forward_hook(hook_of(name), with_kwargs=True) for name, m in model.named_modules()]
    handles.append(model.register_forward_pre_hook(enter))
    try:
        yield first
    finally:
        for handle in handles:
            handle.remove()


def _kind(module: nn.Module, inputs: Any) -> str:
    """Return the origin of a non-finite output, see `diagnose`."""
    if any(_is_broken(parameter) for parameter in module.parameters(recurse=False)):
        return "parameters"
    # -inf among the inputs is an attention mask
    given = [t.masked_fill(t.isneginf(), 0) for t in _tensors_in(inputs) if _is_broken(t)]
    return "input" if any(_is_broken(tensor) for tensor in given) else "output"


def _backward_operation(model: nn.Module, run_window: Callable[[], object]) -> str | None:
    """Return the name of the first operation with a non-finite derivative, by autograd's anomaly mode."""
    if world()[1] > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        return None  # its forward waits for the other ranks, which need not be here
    try:
        # ignored warnings: the mode is slow, and a traceback into this file
        with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly(check_nan=True):
            run_window()
    except RuntimeError as error:
        return str(error)
    finally:
        drop_gradients(model)
    return None


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts (ModelOutput is one), sequences and dataclasses."""
    inside: Iterable = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = (getattr(value, field.name) for field in dataclasses.fields(value))
    for item in inside:
        yield from _tensors_in(item)


def _is_broken(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not bool(tensor.isfinite().all())


def nonfinite_names(batches: Sequence[Batch]) -> list[str]:
    """Return names of the non-finite tensors in a window, such as "micro-batch 0: targets of image 42: boxes"."""
    names = []
    for i, batch in enumerate(batches):
        if _is_broken(batch.images):
            names.append(f"micro-batch {i}: images")
        names += [
            f"micro-batch {i}: targets of image {target['image_id']}: {key}"
            for target in batch.targets
            for key, value in target.items()
            if isinstance(value, Tensor) and _is_broken(value)
        ]
    return names
