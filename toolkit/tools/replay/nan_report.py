"""Writes and reads the report of a non-finite value in `<run>/nan/`, which is written when the NaN guard of a run has
refused a window.

`scripts/replay.py` runs the window of such a report again.
"""

import json
import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from toolkit.base.batch import Batch
from toolkit.base.distributed import gather_objects, world
from toolkit.base.errors import BadInput
from toolkit.step.guard import Action, NanGuard
from toolkit.step.optim import drop_gradients
from toolkit.tools.replay.diagnosis import (
    Facts,
    RunWindow,
    describe_finding,
    find_cause,
    nonfinite_names,
    nothing_found,
)

EXTRA_FILE = "extra.pt"
STATE_TENSORS_FILE = "state.safetensors"
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
    """Find the cause of a refused window, and write a report on each rank with the fault.

    All ranks must call it together, after `guard.decide` has refused the window and before any other use of the model.
    Buffers of the model are restored, and gradients dropped.

    Args:
        model: the model without wrappers.
        run_window: runs forward pass, criterion and backward pass of the window on this model, without collectives and
            with the seeds of the window (see `Window.run_again`); returns the losses of each micro-batch.
        run_folder: the run folder; reports are written to `<run_folder>/nan/step_000123/rank0/`.
        batches: the micro-batches of this rank.
        context: everything that a replay needs, for report.json: step, epoch, seed, losses (reduced), grad_norm, lr (by
            group), scale, precision, denominators (per micro-batch), action, ...
        stated: a finding if the cause is known and not in the window, which is then not run again. Its `where` is
            "state", with the names of the tensors that were not finite before the window in `nonfinite_state`, or
            "rate" for a learning rate that is too large.
        extra: the script's own state in the run.
        tensors: tensors by name, for a finding "state". They are stored separately, because the model's state does not
            have moving averages and optimizer state, and its buffers are restored.

    Returns:
        a message for the log and status.json, the same on every rank: the fault, its place, and the ranks.
    """
    rank, _ = world()
    tensors = {name: _plain(tensor) for name, tensor in (tensors or {}).items()}
    guard.restore(model)
    drop_gradients(model)
    if stated is None:
        finding = find_cause(model, run_window, batches, float(context.get("scale") or 1.0))
        guard.restore(model)
    else:
        finding = nothing_found() | stated | {"batch": nonfinite_names(batches)}
    where_by_rank = gather_objects(finding["where"])
    broken_ranks = [r for r, where in enumerate(where_by_rank) if where != "unknown"] or [0]
    path = None
    if rank in broken_ranks:
        report = {
            **context,
            "rank": rank,
            "reason": guard.reason,
            "policy": guard.policy,
            **finding,
        }
        report["image_ids"] = [[target["image_id"] for target in batch.targets] for batch in batches]
        path = write_nan_report(run_folder, report, batches, model.state_dict(), extra, tensors)
    removed = _forget_reports(path) if path else ""
    lines = gather_objects(f"  rank {rank}: {describe_finding(finding)} Report: {path}{removed}")
    told = [lines[rank] for rank in broken_ranks]
    if context.get("action") == Action.STOP.value:  # a run that goes on would say it with every window
        told.append(f"What to do: {ADVICE[where_by_rank[broken_ranks[0]]]}")
    return "\n".join([guard.reason, *told])


def write_nan_report(
    run_folder: Path,
    report: Facts,
    batches: Sequence[Batch],
    state: Mapping[str, Tensor],
    extra: Facts | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path | None:
    """Write the files of a report.

    They are report.json, report.txt, batch_<i>.safetensors, model.safetensors (the state before the update), extra.pt,
    and state.safetensors (`tensors` of `investigate`). After `MAX_FULL_REPORTS` reports in a run folder, the weights
    are left out.

    Args:
        report: content of report.json.
        batches: the micro-batches of this rank.
        state: state dict of the model.
        extra, tensors: see `investigate`.

    Returns:
        the folder `<run_folder>/nan/step_000123/rank0`, or rank0_2, ... if this step has a report already. If the files
        cannot be written, a warning is given and None returned, because a full disk must not change the decision of
        the ranks.
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
            save_file(
                of_batch,
                folder / f"batch_{i}.safetensors",
                metadata={"targets": json.dumps(rest)},
            )
        if len(list(nan_folder.glob("step_*/rank*/model.safetensors"))) < MAX_FULL_REPORTS:
            save_file({k: _plain(v) for k, v in state.items()}, folder / "model.safetensors")
            if tensors:
                save_file(dict(tensors), folder / STATE_TENSORS_FILE)
        if extra:
            torch.save(extra, folder / EXTRA_FILE)
        (folder / "report.json").write_text(json.dumps(_jsonable(report), indent=1), encoding="utf-8")
        (folder / "report.txt").write_text(_text(report, folder), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"{folder}: the report of the NaN guard could not be written: {error}",
            stacklevel=2,
        )
        return None
    return folder


def load_report(folder: str | Path) -> tuple[dict, list[Batch], dict[str, Tensor], dict[str, Any]]:
    """Return (report, batches of the window, state dict of the model, extra) from a folder that `write_nan_report` has
    written; tensors are on the CPU.

    Raises:
        BadInput: the folder is not such a folder, the weights were left out, or a file cannot be read.
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
        extra = torch.load(folder / EXTRA_FILE, weights_only=True) if (folder / EXTRA_FILE).exists() else {}
        return report, [_join_batch(path) for path in files], load_file(folder / "model.safetensors"), extra
    except Exception as error:  # noqa: BLE001 - a foreign file can make these readers raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{folder}: the report cannot be read: {reason[:300]}") from error


def load_named_state(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a report whose finding is "state", by name, such as "exp_avg_sq of head.weight".

    Other reports do not have such tensors: an empty dict is returned.

    Raises:
        BadInput: the file cannot be read.
    """
    path = Path(folder) / STATE_TENSORS_FILE
    try:
        return load_file(path) if path.exists() else {}
    except (OSError, SafetensorError, ValueError) as error:
        raise BadInput(f"{path}: the state of the report cannot be read: {str(error)[:300]}") from error


def _forget_reports(newest: Path) -> str:
    """Delete the reports of this process between the first and the newest ones; return a remark on them, or "" if none
    was deleted.

    newest: the report that was written last. Reports with weights are never deleted.
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
            warnings.warn(
                f"{folder}: an older report of the NaN guard could not be removed: {error}",
                stacklevel=2,
            )
    if not removed:
        return ""
    return f" (removed: {', '.join(removed)}; the first {FIRST_REPORTS} and the newest {NEWEST_REPORTS} are kept)"


def _time_of_report(folder: Path) -> int:
    """Return the time when a report was written, in nanoseconds.

    Steps do not order the reports, since a rollback repeats them.
    """
    path = folder / "report.json"
    return (path if path.exists() else folder).stat().st_mtime_ns


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
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file cannot be iterated over
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
