"""The layout of a checkpoint, and its validation: unmodified, complete and finite.

A matching hash shows that a file is what was written. The values in it are read by the part that wrote them.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.base.files import read_json_object

FORMAT_VERSION = 5  # of checkpoints, of what stands in their state, and of the settings beside them and in `final/`
MANIFEST_FILE = "MANIFEST.json"
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
EXTRA_FILE = "extra.pt"
CHECKPOINT_KINDS = ("run", "state")  # of a run, and of anything else
_PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npy", ".npz", ".joblib", ".dill", ".mar"}
# State dicts whose infinities may be meant, such as a buffer that is an attention mask.
_WEIGHTS = ("model", "ema")

NEEDED_PARTS = ("data", "weight_facts", "sampler", "plan", "guard", "log", "best")  # of `state.json` of a run


# ---- how the state of the parts is stored ----------------------------------------------------------------------------


def by_storage(step: int, state: Mapping[str, Mapping]) -> dict[str, Any]:
    """Sort the state of a run's parts after `step` optimizer steps by the kind of file that stores it.

    state: the state of each part by its name, with `optimizer` and `extra` among them.

    Returns:
        arguments of `save_checkpoint`, which are also fields of `Checkpoint`: `tensors` of each part by its name;
        `optimizer`; `extra`, the script's own state; and `state` with `step` and, as `parts`, the other values of each
        part by its name. Parts without tensors have no entry in `tensors`, and parts without other values none in
        `parts`.
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
        "state": {"step": step, "parts": dict(sorted(plain.items()))},
    }


def joined_by_part(
    tensors: Mapping[str, Mapping[str, Tensor]], optimizer: dict | None, state: Mapping, extra: Mapping
) -> dict[str, dict]:
    """Return the state of every part by its name, from the four values that `by_storage` returned."""
    parts: dict[str, dict] = {name: dict(values) for name, values in state["parts"].items()}
    for name, named in tensors.items():
        parts[name] = {**named, **parts.get(name, {})}
    parts["extra"] = dict(extra)
    if optimizer is not None:
        parts["optimizer"] = optimizer
    return parts


def stale(version: object) -> str:
    """Return the end of a sentence saying that something was written in another format, or "" if it was not.

    version: its format; `FORMAT_VERSION` is the current one. None: it does not state one.
    """
    if version == FORMAT_VERSION:
        return ""
    stated = "it states no format" if version is None else f"format {version}"
    return (
        f"was written by another version of this toolkit ({stated}; this one reads {FORMAT_VERSION}): use it "
        "with that version, whose commit is in environment.json of its run, or train again."
    )


def stale_run(folder: Path) -> str:
    """Return a message if all checkpoints of a run folder were written in another format, else ""."""
    manifests = sorted(folder.glob(f"checkpoints/step_*/{MANIFEST_FILE}"))
    faults = [stale(read_json_object(path).get("format", FORMAT_VERSION)) for path in manifests]
    return f"Run {folder} {faults[-1]}" if faults and all(faults) else ""


def well_formed(manifest: object) -> bool:
    """Return whether a manifest has the structure that the other functions rely on."""
    if not isinstance(manifest, dict) or manifest.get("kind") not in CHECKPOINT_KINDS:
        return False
    files = manifest.get("files")
    has_counts = _is_count(manifest.get("step")) and _is_count(manifest.get("sequence"))
    return has_counts and isinstance(files, dict) and all(map(_is_entry, files.values()))


def _is_entry(entry: object) -> bool:
    """Return whether `entry` describes a file in a manifest."""
    return isinstance(entry, dict) and _is_count(entry.get("size")) and isinstance(entry.get("sha256"), str)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # not a bool


def changed_files(path: Path, manifest: dict) -> list[str]:
    """Return a phrase for every difference between the checkpoint folder `path` and its manifest."""
    problems = []
    for name, entry in manifest["files"].items():
        if Path(name).name != name or not (
            name in (STATE_FILE, OPTIMIZER_FILE, EXTRA_FILE) or name.endswith(".safetensors")
        ):
            problems.append(f"the manifest lists {name!r}, which no checkpoint holds")
        elif not (path / name).is_file():
            problems.append(f"{name} is missing")
        else:
            problems += _changes(path / name, entry)
    if STATE_FILE not in manifest["files"]:
        problems.append(f"the manifest does not list {STATE_FILE}")
    for extra in sorted(path.iterdir()):
        if extra.name not in manifest["files"] and extra.suffix.lower() in _PICKLE_SUFFIXES:
            problems.append(f"{extra.name} is not in the manifest and may hold a pickle; remove it")
    return problems


def _changes(file: Path, entry: Mapping) -> list[str]:
    """Compare a file that is there with its entry in the manifest."""
    size = file.stat().st_size
    if size != entry["size"]:
        return [f"{file.name} has {size} bytes, written were {entry['size']} (truncated or changed)"]
    with open(file, "rb") as content:
        is_unchanged = hashlib.file_digest(content, "sha256").hexdigest() == entry["sha256"]
    return [] if is_unchanged else [f"{file.name} is not what was written (sha256 differs)"]


def lacking_in_run(step: int, tensors: Mapping, optimizer: object, state: object) -> list[str]:
    """Return a phrase for everything that a run needs to resume and that this content of a checkpoint lacks.

    The values of each part are not looked at: the part itself reads them, see `Checkpoint.reading`.

    Args:
        step: step in the manifest, which must be that of `state`.
        tensors: file stem -> state dict.
        optimizer, state: content of optimizer.pt and state.json.
    """
    saved = state if isinstance(state, dict) else {}
    parts = saved.get("parts")
    if not isinstance(parts, dict) or not all(isinstance(values, dict) for values in parts.values()):
        return ["state.json does not have the state of the parts of a run"]
    faults = []
    missing = [name for name in NEEDED_PARTS if name not in parts]
    if missing:
        faults.append(f"state.json lacks the state of {', '.join(missing)}")
    if saved.get("step") != step:
        faults.append(f"state.json is of step {saved.get('step')}")
    if not tensors.get("model"):
        faults.append("there are no weights (model.safetensors)")
    if "ema" in parts and "ema" not in tensors:
        faults.append("there are no averaged weights (ema.safetensors)")
    if optimizer is None:
        faults.append(f"the state of the optimizer is missing ({OPTIMIZER_FILE})")
    return faults


def nonfinite_tensors(
    tensors: Mapping[str, Mapping[str, Tensor]], optimizer: dict, infinite: Collection[str]
) -> list[str]:
    """Return a list with one phrase that names the tensors with a NaN or infinity; an empty list if all are finite.

    Args:
        tensors: file stem -> state dict.
        optimizer: state dict of the optimizer.
        infinite: names of tensors of "model" and "ema" that may hold infinities, but no NaN.
    """
    bad = []
    for stem, named in tensors.items():
        meant = infinite if stem in _WEIGHTS else ()
        bad += [f"{stem}/{name}" for name, tensor in named.items() if not _sound(tensor, name in meant)]
    for index, state in optimizer["state"].items():
        numbers = {key: value for key, value in state.items() if isinstance(value, Tensor | int | float)}
        bad += [f"optimizer/{index}/{key}" for key, value in numbers.items() if not _sound(value, False)]
    if not bad:
        return []
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return [f"NaN or infinity in {', '.join(bad[:3])}{more}"]


def _sound(tensor: Tensor | float, may_be_infinite: bool) -> bool:
    if not isinstance(tensor, Tensor):
        return math.isfinite(tensor)
    if not tensor.is_floating_point():
        return True
    return not bool(tensor.isnan().any()) if may_be_infinite else bool(tensor.isfinite().all())
