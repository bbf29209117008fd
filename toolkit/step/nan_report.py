"""The search for a non-finite value: the window is run again under observation, and stored in `<run>/nan/`.

`scripts/replay.py` runs such a report again.
"""

import dataclasses
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from toolkit.base.batch import Batch
from toolkit.base.distributed import gather_objects, world
from toolkit.base.errors import BadInput
from toolkit.step.guard import NanGuard, boxes_finite
from toolkit.step.optim import drop_gradients

EXTRA = "extra.pt"
STATE = "state.safetensors"
RunWindow = Callable[[], Sequence[Mapping[str, Tensor]]]  # returns the losses of each micro-batch
Facts = Mapping[str, Any]
MAX_FULL_REPORTS = 10  # per run folder; later ones leave the weights out, which may be hundreds of MB each
FIRST_REPORTS = MAX_FULL_REPORTS  # first reports of each process, which are never removed
NEWEST_REPORTS = 5  # of each process; a run that skips batches for days would fill its disk with the others

ADVICE = {
    "batch": "The batch itself holds NaN or infinity: check these images and their annotations.",
    "parameters": "The weights were not finite to begin with: check the pretrained file or checkpoint they came from.",
    "module": "A layer overflowed: lower optim.lr, lengthen schedule.warmup_steps, or use bf16 instead of fp16.",
    "loss": "The model's outputs are finite, the criterion's result is not: look at these images' boxes.",
    "state": "The update itself overflowed, or its inputs were not finite: lower optim.lr, or set optim.max_norm.",
    "rate": "Lower optim.lr, or the factors on it.",
    "norm": "Every gradient is finite, but their norm is beyond the range of float32: lower the loss weights, or "
    "optim.lr if the weights have grown.",
    "gradient": "The losses are finite, their gradient is not: an operation with an infinite slope (sqrt, log, or a "
    "division near 0), or too large a loss scale.",
    "unknown": "The detector and its criterion gave finite numbers when run again. If the script adds to its loop, "
    "replay.py runs that too; else it is a transient fault, or a non-deterministic operation.",
}


def investigate(
    guard: NanGuard,
    model: nn.Module,
    run_window: RunWindow,
    run_folder: Path,
    batches: Sequence[Batch],
    context: Facts,
    stated: Facts | None = None,
    extra: Facts | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> str:
    """Find the cause, let each rank at fault write its report, and leave buffers and gradients clean.

    All ranks call it together, after `guard.decide` refused the window and before any other use of the model.

    Args:
        model: the unwrapped model.
        run_window: forward, criterion and backward of the window on the unwrapped model, without collectives, with the
            window's own seeds (see `Window.run_again`); returns the losses of each micro-batch.
        run_folder: reports go to `<run_folder>/nan/step_000123/rank0/`.
        batches: the window of this rank.
        context: stored in report.json: step, epoch, seed, losses (reduced), grad_norm, lr (by group), scale, precision,
            denominators (per micro-batch), action, config; everything that replaying needs.
        stated: the finding, if the cause is not in the window, which is then not run again: `where` is "state", with
            the names of the tensors that were not finite before the window in `nonfinite_state`, or "rate".
        extra: state that the script adds to the run, for replaying.
        tensors: by name, the tensors of a finding "state". The model's own state does not hold them all: moving
            averages and optimizer state are not part of it, and its buffers are restored.

    Returns:
        The message for the log and status.json, the same on every rank: the fault, its place and the ranks.
    """
    rank, _ = world()
    tensors = {name: _plain(tensor) for name, tensor in (tensors or {}).items()}
    guard.restore(model)
    drop_gradients(model)
    finding = _nothing_found() | (stated or {})
    if stated is None and boxes_finite(batches):  # pooling at an infinite box may end the process
        finding = diagnose(model, run_window, float(context.get("scale") or 1.0))
        guard.restore(model)
    finding["batch"] = _nonfinite_names(batches)
    if finding["batch"] and stated is None:
        finding["where"] = "batch"
    where_by_rank = gather_objects(finding["where"])
    broken_ranks = [r for r, where in enumerate(where_by_rank) if where != "unknown"] or [0]
    path = None
    if rank in broken_ranks:
        report = {**context, "rank": rank, "reason": guard.reason, "policy": guard.policy, **finding}
        report["image_ids"] = [[target["image_id"] for target in batch.targets] for batch in batches]
        path = write_report(run_folder, report, batches, model.state_dict(), extra, tensors)
    removed = _forget_reports(path) if path else ""
    lines = gather_objects(f"  rank {rank}: {describe_finding(finding)} Report: {path}{removed}")
    return f"{guard.reason}\n" + "\n".join(lines[r] for r in broken_ranks)


def _nothing_found() -> dict[str, Any]:
    finding = {"where": "unknown", "window_losses": [], "nonfinite_gradients": [], "nonfinite_state": []}
    nothing = ("first_nonfinite_module", "module_type", "kind", "backward", "error", "largest_gradient")
    return finding | dict.fromkeys(nothing)


def diagnose(model: nn.Module, run_window: RunWindow, scale: float = 1.0) -> dict:
    """Run a window again and find where the first non-finite number appears.

    scale: loss scale that the window's gradients carry.

    Returns:
        where: "parameters", "module", "loss", "gradient", "norm" (of gradients that are all finite) or "unknown"
            (everything is finite this time).
        first_nonfinite_module, module_type, kind: the first module that finished with a non-finite output, or None.
            kind: "output": from finite inputs; "input": its input, from the code of the module around it or from the
            batch, is not finite; "parameters": its own parameters are not finite; "criterion": not part of the model's
            forward, which stayed finite.
        window_losses: {name: float} per micro-batch.  nonfinite_gradients: names of parameters.
        backward: for "gradient", the operation with the non-finite derivative.  error: that the run raised, if any.
        largest_gradient: for "norm", [name of the parameter, largest magnitude].

    Gradients are dropped before and after. Buffers keep the changes of the window.
    """
    finding = _nothing_found()
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


def write_report(
    run_folder: Path,
    report: Facts,
    batches: Sequence[Batch],
    state: Mapping[str, Tensor],
    extra: Facts | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path | None:
    """Write the files of a report.

    They are report.json, report.txt, batch_<i>.safetensors, model.safetensors (the state before the update), extra.pt,
    and state.safetensors (`tensors` of `investigate`).

    Returns:
        The folder `<run_folder>/nan/step_000123/rank0` (rank0_2, ... when that step failed before); None, with a
        warning, when it cannot be written: a full disk must not change the ranks' decision.
    """
    nan_folder = Path(run_folder) / "nan"
    wanted = nan_folder / f"step_{report['step']:06d}" / f"rank{report['rank']}"
    folder = wanted
    attempt = 1
    while folder.exists():
        attempt += 1
        folder = wanted.with_name(f"{wanted.name}_{attempt}")
    try:
        folder.mkdir(parents=True)
        for i, batch in enumerate(batches):
            of_batch, rest = _split_batch(batch)
            save_file(of_batch, folder / f"batch_{i}.safetensors", metadata={"targets": json.dumps(rest)})
        if len(list(nan_folder.glob("step_*/rank*/model.safetensors"))) < MAX_FULL_REPORTS:
            save_file({k: _plain(v) for k, v in state.items()}, folder / "model.safetensors")
            if tensors:
                save_file(dict(tensors), folder / STATE)
        if extra:
            torch.save(extra, folder / EXTRA)
        (folder / "report.json").write_text(json.dumps(_jsonable(report), indent=1), encoding="utf-8")
        (folder / "report.txt").write_text(_text(report, folder), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        warnings.warn(f"{folder}: the report of the NaN guard could not be written: {error}", stacklevel=2)
        return None
    return folder


def _forget_reports(newest: Path) -> str:
    """Remove the reports of this process between the first and the newest ones, and list them; "" if none was removed.

    newest: the report that was written last. Reports with weights are never removed.
    """
    rank = newest.name.split("_")[0]
    earlier = [path for path in newest.parent.parent.glob(f"step_*/{rank}*") if path.name.split("_")[0] == rank]
    earlier = sorted((path for path in earlier if path != newest), key=_time_of_report)
    between = earlier[FIRST_REPORTS : len(earlier) - (NEWEST_REPORTS - 1)]
    removed = []
    for folder in between:
        if (folder / "model.safetensors").exists():
            continue
        try:
            shutil.rmtree(folder)
            removed.append(f"{folder.parent.name}/{folder.name}")
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
        except OSError as error:
            warnings.warn(f"{folder}: an older report of the NaN guard could not be removed: {error}", stacklevel=2)
    if not removed:
        return ""
    return f" (removed: {', '.join(removed)}; the first {FIRST_REPORTS} and the newest {NEWEST_REPORTS} are kept)"


def _time_of_report(folder: Path) -> int:
    """Return the time when a report was written, in nanoseconds.

    Steps do not order the reports, since a rollback repeats them.
    """
    path = folder / "report.json"
    return (path if path.exists() else folder).stat().st_mtime_ns


def load_report(folder: str | Path) -> tuple[dict, list[Batch], dict[str, Tensor], dict[str, Any]]:
    """Return (report, window, model state, extra) of a folder that `write_report` made, as CPU tensors.

    Raises:
        BadInput: it is not such a folder, its weights were left out, or a file cannot be read.
    """
    folder = Path(folder)
    needed = ("report.json", "batch_0.safetensors", "model.safetensors")
    missing = [name for name in needed if not (folder / name).exists()]
    if missing == ["model.safetensors"]:
        why = f"only the first {MAX_FULL_REPORTS} reports of a run have the weights"
        raise BadInput(f"{folder}: no model.safetensors: {why}; give one of those")
    if missing:
        raise BadInput(f"{folder}: no {', '.join(missing)}; expected the folder of one rank, <run>/nan/step_*/rank*")
    files = sorted(folder.glob("batch_*.safetensors"), key=lambda path: (len(path.name), path.name))
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        extra = torch.load(folder / EXTRA, weights_only=True) if (folder / EXTRA).exists() else {}
        return report, [_join_batch(path) for path in files], load_file(folder / "model.safetensors"), extra
    except Exception as error:  # noqa: BLE001 - a foreign file can make these readers raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{folder}: the report cannot be read: {reason[:300]}") from error


def load_named_state(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a report whose finding is "state", by name, such as "exp_avg_sq of head.weight".

    Other reports, and those of older versions, have none.

    Raises:
        BadInput: the file cannot be read.
    """
    path = Path(folder) / STATE
    try:
        return load_file(path) if path.exists() else {}
    except (OSError, SafetensorError, ValueError) as error:
        raise BadInput(f"{path}: the state of the report cannot be read: {str(error)[:300]}") from error


def replay(
    detector: nn.Module,
    report: Facts,
    batches: Sequence[Batch],
    run_window: RunWindow,
    tensors: Mapping[str, Tensor] | None = None,
) -> dict:
    """Run a reported window again on a detector that holds the report's model state.

    run_window: `Window.run_again` of the report, or the loop of the script itself. tensors: from `load_named_state`.

    Returns:
        The finding of `diagnose`, and `reproduced`: whether the same fault appeared in the same place. For a state that
        was not finite before the window: whether the stored state is not; `lacking`: the names of reported tensors that
        the report does not hold.
    """
    if report["where"] == "rate":
        return _nothing_found() | {"where": "rate", "batch": [], "lacking": [], "reproduced": True}
    if report["where"] == "state":
        return _look_at_state(detector, report["nonfinite_state"], tensors or {})
    finding = _nothing_found()
    if boxes_finite(batches):
        finding = diagnose(detector.train(), run_window, float(report.get("scale") or 1.0))
    finding["batch"] = _nonfinite_names(batches)
    if finding["batch"]:
        finding["where"] = "batch"
    same = ("where", "first_nonfinite_module", "kind", "nonfinite_gradients")
    # "unknown": the additions of the script were not run again then
    same_place = report["where"] == "unknown" or all(finding[key] == report[key] for key in same)
    again = finding["where"] != "unknown" and same_place
    return {**finding, "lacking": [], "reproduced": again}


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
    return _nothing_found() | found | {"reproduced": bool(broken)}


@contextmanager
def _watch(model: nn.Module) -> Iterator[dict]:
    """Record the first module of a forward pass that finishes with a non-finite output, in the yielded dict.

    Inner modules finish before those around them, so it is the innermost one.
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
                first.update(first_nonfinite_module=name or "(itself)", module_type=type(module).__name__, kind=kind)
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


def _nonfinite_names(batches: Sequence[Batch]) -> list[str]:
    """Return the names of non-finite tensors of the window: "micro-batch 0: targets of image 42: boxes"."""
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


def _split_batch(batch: Batch) -> tuple[dict[str, Tensor], list[dict]]:
    tensors = {"images": _plain(batch.images), "sizes": _plain(batch.sizes)}
    rest: list[dict] = []
    for i, target in enumerate(batch.targets):
        tensors.update({f"targets.{i}.{k}": _plain(v) for k, v in target.items() if isinstance(v, Tensor)})
        rest.append({k: v for k, v in target.items() if not isinstance(v, Tensor)})
    return tensors, rest


def _join_batch(path: Path) -> Batch:
    with safe_open(path, framework="pt") as file:
        targets = json.loads(file.metadata()["targets"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    for key, tensor in tensors.items():
        if key.startswith("targets."):
            _, i, name = key.split(".", 2)
            targets[int(i)][name] = tensor
    return Batch(tensors["images"], tensors["sizes"], targets)


def _plain(tensor: Tensor) -> Tensor:
    # safetensors rejects tensors that share memory: views of one batch, tied weights
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _jsonable(value: Any) -> Any:
    """Convert to plain JSON: non-finite numbers become "nan", "inf", "-inf", which float() reads back."""
    if isinstance(value, Tensor):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_jsonable(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def describe_finding(finding: Facts) -> str:
    """Describe the place of the fault in one sentence."""
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


def _text(report: Facts, folder: Path) -> str:
    ids = [", ".join(map(str, micro)) for micro in report["image_ids"]]
    gradients = report["nonfinite_gradients"]
    lines = [
        f"Rank {report['rank']}, epoch {report.get('epoch')}. No update was made, because",
        f"  {report['reason']}.",
        f"Where: {describe_finding(report)}",
        f"What to do: {ADVICE[report['where']]}",
        "Image ids: " + "; ".join(f"micro-batch {i}: {text}" for i, text in enumerate(ids)),
        f"Learning rates: {report.get('lr')}; loss scale: {report.get('scale')}; policy: {report['policy']}",
        f"Losses (all ranks): {report.get('losses')}",
        f"Losses (this rank, run again): {report['window_losses']}",
        f"Parameters with non-finite gradients ({len(gradients)}): {', '.join(gradients[:20])}",
        "Run it again:",
        f"  python scripts/replay.py {folder}",
        "  (with --trust if the script or the detector of the run is not from this project: its code is run)",
    ]
    return "\n".join(lines) + "\n"
