"""Validates the content of a checkpoint: unmodified, complete, of the right types, and finite."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.base.files import read_json_object

FORMAT = 4  # of checkpoints, of what stands in their state, and of the settings beside them and in `final/`
MANIFEST = "MANIFEST.json"
STATE, OPTIMIZER, EXTRA = "state.json", "optimizer.pt", "extra.pt"
_PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npy", ".npz", ".joblib", ".dill", ".mar"}
_NUMBER = (int, float)
# Key of state.json -> what it may be; of the run itself, and of each of its parts. All are needed to go on.
_STATE = {"step": int, "categories": list, "infinite": list, "frozen": list, "parts": dict}
_PARTS = {
    "sampler": {
        "seed": int,
        "epoch": int,
        "offset": int,
        "world_size": int,
        "batch_size": int,
        "num_samples": int,
    },
    "plan": {
        "total_steps": int,
        "limit": str,
        "accumulation": list,
        "recut": _NUMBER,
        "schedule": dict,
        "budget": (dict, type(None)),
    },
    "guard": {},
    "log": {
        "meters": dict,
        "averages": dict,
        "elapsed_s": _NUMBER,
        "epoch_s": _NUMBER,
        "epoch_steps": int,
        "logged_epoch": int,
        "logged_steps": int,
        "has_notes": bool,
        "writer": dict,
    },
    "best": {
        "metric": str,
        "value": (*_NUMBER, type(None)),
        "step": int,
        "without_better": int,
        "evaluated_step": int,
    },
}
# State dicts whose infinities may be meant, such as a buffer that is an attention mask.
_WEIGHTS = ("model", "ema")


def by_storage(state: Mapping[str, Mapping]) -> dict[str, Any]:
    """Sort the state of a run's parts by how it is stored.

    Returns the arguments of `save_checkpoint` and fields of `Checkpoint`: `tensors` of each part, the `optimizer`, the
    script's `extra`, and in `state` the plain values of all parts. A part without any has no entry.
    """
    tensors = {}
    plain = {}
    for name in state.keys() - {"optimizer", "extra"}:
        own_tensors = {key: value for key, value in state[name].items() if isinstance(value, Tensor)}
        own_values = {key: value for key, value in state[name].items() if not isinstance(value, Tensor)}
        if own_tensors:
            tensors[name] = own_tensors
        if own_values:
            plain[name] = own_values
    return {
        "tensors": dict(sorted(tensors.items())),
        "optimizer": state["optimizer"],
        "extra": state["extra"],
        "state": {"parts": dict(sorted(plain.items()))},
    }


def joined_by_part(
    tensors: Mapping[str, Mapping[str, Tensor]], optimizer: dict | None, state: Mapping, extra: Mapping
) -> dict[str, dict]:
    """Undo `by_storage`: the state of every part, by its name."""
    parts: dict[str, dict] = {name: dict(values) for name, values in state["parts"].items()}
    for name, named in tensors.items():
        parts[name] = {**named, **parts.get(name, {})}
    parts["extra"] = dict(extra)
    if optimizer is not None:
        parts["optimizer"] = optimizer
    return parts


def stale(version: object) -> str:
    """A message if something was written in another format than the current one, else ""."""
    if version == FORMAT:
        return ""
    return (
        f"was written by another version of this toolkit (format {version}; this one reads {FORMAT}): use it with that "
        "version, whose commit is in environment.json of its run, or train again."
    )


def stale_run(folder: Path) -> str:
    """A message if all checkpoints of a run folder were written in another format, else ""."""
    manifests = sorted(folder.glob(f"checkpoints/step_*/{MANIFEST}"))
    faults = [stale(read_json_object(path).get("format", FORMAT)) for path in manifests]
    return f"Run {folder} {faults[-1]}" if faults and all(faults) else ""


def well_formed(manifest) -> bool:
    """Whether a manifest has the structure that the other functions rely on."""
    head = {"files": dict, "step": int, "sequence": int, "kind": str}
    entry = {"size": int, "sha256": str}
    return _has(manifest, head) and all(_has(file, entry) for file in manifest["files"].values())


def _has(value: object, kinds: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in kinds.items())


def changed_files(path: Path, manifest: dict) -> list[str]:
    """Describes every difference between the folder and its manifest."""
    problems = []
    for name, entry in manifest["files"].items():
        if Path(name).name != name or not (name in (STATE, OPTIMIZER, EXTRA) or name.endswith(".safetensors")):
            problems.append(f"the manifest lists {name!r}, which no checkpoint holds")
        elif not (path / name).is_file():
            problems.append(f"{name} is missing")
        elif (size := (path / name).stat().st_size) != entry["size"]:
            problems.append(f"{name} has {size} bytes, written were {entry['size']} (truncated or changed)")
        else:
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    problems.append(f"{name} is not what was written (sha256 differs)")
    if STATE not in manifest["files"]:
        problems.append(f"the manifest does not list {STATE}")
    for extra in sorted(path.iterdir()):
        if extra.name not in manifest["files"] and extra.suffix.lower() in _PICKLE_SUFFIXES:
            problems.append(f"{extra.name} is not in the manifest and may hold a pickle; remove it")
    return problems


def faults_of_run(step: int, tensors: Mapping, optimizer: object, state: object) -> list[str]:
    """Describes everything that prevents a run from resuming from this content.

    Args:
        step: that of the manifest.
        tensors: file stem -> state dict. optimizer, state: as read. `state["infinite"]` names the tensors of the model
            that hold infinities by design.
    """
    faults = _faults_of_state(step, state) if isinstance(state, dict) else ["state.json is no mapping"]
    if not tensors.get("model"):
        faults.append("there are no weights (model.safetensors)")
    if not faults and "ema" in state["parts"] and "ema" not in tensors:
        faults.append("there are no averaged weights (ema.safetensors)")
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        faults.append("optimizer.pt is no state of an optimizer")
    return faults or not_finite(tensors, optimizer, state["infinite"])


def _faults_of_state(step: int, state: dict) -> list[str]:
    faults = _wrong_values(state, _STATE, "")
    if faults:
        return faults
    for name, values in _PARTS.items():
        part = state["parts"].get(name)
        if isinstance(part, dict):
            faults += _wrong_values(part, values, f" of {name}")
        else:
            faults.append(f"state.json has no {name}")
    if not all(_has(category, {"name": str}) for category in state["categories"]):
        faults.append("categories in state.json are not categories")
    if state["step"] != step:
        faults.append(f"state.json is of step {state['step']}")
    return faults


def _wrong_values(state: Mapping, kinds: Mapping[str, object], of_part: str) -> list[str]:
    """A sentence for each key that is missing or has a value of another type. of_part: "" or " of sampler"."""
    faults = []
    for key, kind in kinds.items():
        if key not in state:
            faults.append(f"state.json has no {key}{of_part}")
        elif not _is(state[key], kind):
            faults.append(f"{key}{of_part} in state.json is {str(state[key])[:60]!r}")
    return faults


def _is(value: object, kind) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def not_finite(tensors: Mapping[str, Mapping[str, Tensor]], optimizer: dict, infinite: Collection[str]) -> list[str]:
    """One sentence that names the tensors with a NaN or an infinity; none where all are finite.

    infinite: names of tensors of the model that may be infinite, by design, but not NaN.
    """
    bad = []
    for stem, named in tensors.items():
        meant = infinite if stem in _WEIGHTS else ()
        bad += [f"{stem}/{name}" for name, tensor in named.items() if not _sound(tensor, name in meant)]
    for index, state in (optimizer["state"] or {}).items():
        bad += [f"optimizer/{index}/{key}" for key, value in state.items() if not _sound(torch.as_tensor(value), False)]
    if not bad:
        return []
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return [f"NaN or infinity in {', '.join(bad[:3])}{more}"]


def _sound(tensor: Tensor, may_be_infinite: bool) -> bool:
    if not tensor.is_floating_point():
        return True
    return not bool(tensor.isnan().any()) if may_be_infinite else bool(tensor.isfinite().all())
