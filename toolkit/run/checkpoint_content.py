"""The layout of a checkpoint, and its validation: unmodified, complete, of the right types, and finite.

A matching hash shows that a file is unmodified, not that a run can resume from it. Without this validation, a value of
the wrong type would cause an error in the middle of a later step, or be used unnoticed.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.base.files import read_json_object
from toolkit.base.kinds import (
    ANY_NUMBER,
    COUNT,
    DURATION,
    FACTOR,
    ID,
    MAX_SEED,
    NUMBER,
    POSITIVE,
    STEP_OR_MINUS_ONE,
    TEXT,
    TEXTS,
    TRUTH,
    Each,
    Keys,
    Kind,
    OrNull,
    faults_of,
    one_of,
    whole,
)
from toolkit.step.ema import UPDATES
from toolkit.step.schedules import SCHEDULES

FORMAT_VERSION = 5  # of checkpoints, of what stands in their state, and of the settings beside them and in `final/`
MANIFEST_FILE = "MANIFEST.json"
MAX_NAMED_FAULTS = 30  # of a state that are named one by one
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
EXTRA_FILE = "extra.pt"
CHECKPOINT_KINDS = ("run", "state")  # of a run, and of anything else
_MANIFEST = Keys({
    "files": Each(dict, Keys({"size": COUNT, "sha256": TEXT}, {})), "step": COUNT, "sequence": COUNT,
    "kind": Kind(f"one of {CHECKPOINT_KINDS}", lambda value: value in CHECKPOINT_KINDS),
}, {})  # fmt: skip
_PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npy", ".npz", ".joblib", ".dill", ".mar"}
# State dicts whose infinities may be meant, such as a buffer that is an attention mask.
_WEIGHTS = ("model", "ema")

# ---- the state of each part ------------------------------------------------------------------------------------------

_METER = Keys({"fmt": TEXT}, {
    "window": Each(list, ANY_NUMBER), "window_size": OrNull(whole(0, 10**6)), "total": ANY_NUMBER,
    "momentum": ANY_NUMBER, "value": ANY_NUMBER, "sum": ANY_NUMBER, "count": ANY_NUMBER,
})  # fmt: skip
_SAMPLER = Keys({
    "seed": whole(-MAX_SEED, MAX_SEED), "epoch": COUNT, "offset": COUNT, "world_size": POSITIVE,
    "batch_size": POSITIVE, "num_samples": COUNT,
}, {"layout": Each(list, Each(list, COUNT, 3)), "sizes": TEXT})  # fmt: skip
_SCHEDULE_OPTIONS = Keys({}, {
    **dict.fromkeys(("gamma", "warmup_factor", "warmup_start", "power", "final_factor", "threshold"), NUMBER),
    **dict.fromkeys(("warmup_steps", "step_size", "cooldown"), DURATION),
    **dict.fromkeys(("every", "stairs", "cycles", "patience", "max_decays"), FACTOR),
    "warmup_method": one_of("linear", "constant"),
    "last_cycle": one_of("linear", "cosine"),
    "milestones": Each(list, NUMBER),
    "decayed": Each(list, NUMBER, 2),
})  # fmt: skip
_SCHEDULE = Keys({}, {
    "name": one_of(*SCHEDULES), "total_steps": OrNull(DURATION), "scale": FACTOR, "options": _SCHEDULE_OPTIONS,
    "clock": Each(list, NUMBER, 3), "decays": COUNT, "best": OrNull(NUMBER), "bad": COUNT, "cooling": COUNT,
})  # fmt: skip
_BUDGET = Keys({}, {
    **dict.fromkeys(("total_steps", "planned_steps", "ceiling_steps"), OrNull(COUNT)),
    **dict.fromkeys(("steps", "begun_steps"), OrNull(COUNT)),
    **{"max_minutes": FACTOR, "slowest_s": DURATION, "settled_steps": COUNT},
    **dict.fromkeys(("elapsed_s", "planned_s", "begun_s"), OrNull(DURATION)),
    "measured_s": Each(list, DURATION), "settled": TRUTH,
})  # fmt: skip
_GUARD = Keys({}, dict.fromkeys(("skips", "calibrations", "rollbacks"), COUNT))
_SCALER = Keys({}, dict.fromkeys(("scale", "growth_factor", "backoff_factor", "growth_interval"), NUMBER))

_PLAN = Keys({
    "total_steps": COUNT,
    "limit": TEXT,
    "accumulation": Each(list, COUNT, 2),
    "recut": NUMBER,
    "schedule": _SCHEDULE,
    "budget": OrNull(_BUDGET),
}, {"without_own_rates": OrNull(COUNT)})  # fmt: skip
_LOG = Keys({
    "meters": Each(dict, _METER),
    "averages": Each(dict, Each(list, ANY_NUMBER, 2)),
    "elapsed_s": DURATION,
    "epoch_s": DURATION,
    "epoch_steps": COUNT,
    "logged_epoch": STEP_OR_MINUS_ONE,
    "logged_steps": STEP_OR_MINUS_ONE,
    "has_notes": TRUTH,
    "writer": Keys({"rows": COUNT, "run_ids": Each(dict, OrNull(ID))}, {}),
}, {})  # fmt: skip
_BEST = Keys({
    "metric": TEXT,
    "value": OrNull(NUMBER),
    "step": STEP_OR_MINUS_ONE,
    "without_better": COUNT,
    "evaluated_step": STEP_OR_MINUS_ONE,
}, {})  # fmt: skip
_TABLE = Keys({}, {
    "fingerprint": TEXT,
    "file": TEXT,
    "images": COUNT,
    "boxes": COUNT,
    "classes": Each(dict, OrNull(TEXT)),
})  # fmt: skip
_DATA = Keys(
    {"categories": Each(list, Keys({"id": ID, "name": TEXT}, {}))},
    {
        "predicates": TEXTS,
        "attributes": TEXTS,
        "tables": Each(dict, _TABLE),
    },
)
_WEIGHT_FACTS = Keys({"infinite": TEXTS, "frozen": TEXTS}, {})
_PARTS = Keys(
    {
        "data": _DATA,
        "weight_facts": _WEIGHT_FACTS,
        "sampler": _SAMPLER,
        "plan": _PLAN,
        "guard": _GUARD,
        "log": _LOG,
        "best": _BEST,
    },
    {"scaler": _SCALER, "ema": Keys({UPDATES: COUNT}, {})},
)
# Everything in state.json that a run needs to go on.
RUN_STATE = Keys({"step": COUNT, "parts": _PARTS}, {})


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


def well_formed(manifest) -> bool:
    """Return whether a manifest has the structure that the other functions rely on."""
    return not any(faults_of(manifest, _MANIFEST, MANIFEST_FILE))


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


def faults_of_run(step: int, tensors: Mapping, optimizer: object, state: object) -> list[str]:
    """Return a phrase for everything that prevents a run from resuming from this content of a checkpoint.

    Args:
        step: step in the manifest, which must be that of `state`.
        tensors: file stem -> state dict.
        optimizer, state: content of optimizer.pt and state.json.

    Non-finite tensors are reported too, except infinities in those that `state` lists as infinite by design.
    """
    faults = _faults_of_state(step, state) if isinstance(state, dict) else ["state.json is not a mapping"]
    if not tensors.get("model"):
        faults.append("there are no weights (model.safetensors)")
    if not faults and "ema" in state["parts"] and "ema" not in tensors:
        faults.append("there are no averaged weights (ema.safetensors)")
    if not _is_state_of_optimizer(optimizer):
        faults.append("optimizer.pt is not the state of an optimizer")
    return faults or nonfinite_tensors(tensors, optimizer, state["parts"]["weight_facts"]["infinite"])


def _faults_of_state(step: int, state: dict) -> list[str]:
    faults = list(faults_of(state, RUN_STATE, STATE_FILE))
    if faults:
        more = f"and {len(faults) - MAX_NAMED_FAULTS} more places of state.json"
        return faults[:MAX_NAMED_FAULTS] + [more] * (len(faults) > MAX_NAMED_FAULTS)
    return [] if state["step"] == step else [f"state.json is of step {state['step']}"]


def _is_state_of_optimizer(optimizer: object) -> bool:
    """Return whether it has the structure of `optimizer.state_dict()`, on which everything that reads it relies."""
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        return False
    of_parameters = optimizer["state"]
    groups = optimizer["param_groups"]
    if not isinstance(of_parameters, dict) or not isinstance(groups, list):
        return False
    are_groups = all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    return are_groups and all(isinstance(kept, dict) for kept in of_parameters.values())


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
