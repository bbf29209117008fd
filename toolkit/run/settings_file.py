"""Reads and writes the settings files of a run: `config.yaml` of its first start, `config_2.yaml` of the second and so
on, and `pretrained_config.json` with the settings of pretrained weights. It also decides whether a setting that was
changed on resume is used, ignored or refused."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import ROOT, read_json, read_json_object, read_yaml, write_text_atomic
from toolkit.run.layers import layer_of, nested
from toolkit.run.setting_types import format_value
from toolkit.run.settings import (
    DataConfig,
    HubConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    SceneGraphEvalConfig,
    ScheduleConfig,
)
from toolkit.run.settings_check import check, check_values

CONFIG_FILE = "config.yaml"
_CONFIG_NAME = re.compile(r"config(?:_(\d+))?\.yaml")
PRETRAINED_CONFIG = "pretrained_config.json"
# Settings of a detector that say where it starts and what of it learns, not what it is.
ABOUT_STARTING = ("pretrained", "freeze_prefixes", "fresh_prefixes")
# The groups that every script has, beside `model`, whose settings are those of its architecture.
GROUPS = {
    "run": RunConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "loss": LossConfig,
    "eval": SceneGraphEvalConfig,
    "hub": HubConfig,
}
# Without these a trained detector cannot be used as it was trained; what else an older file lacks has its default.
REQUIRED_KEYS = {
    "model": ("architecture",),
    "data": ("train", "val", "format", "name", "image_size", "scales", "max_size", "workers", "on_error"),
    "loss": ("weights",),
    "eval": ("backend", "metric_for_best", "batch_size_per_device", "score_threshold"),
}
# What finds the dataclass of an architecture's settings, `toolkit.models.options_class`; None: they are not looked at.
OptionsOf = Callable[[str], type | None]


def save_config(settings: Mapping, path: Path, remarks: Iterable[str] = ()) -> None:
    """Write groups of settings to a YAML file, which `--config` can read, below `remarks` as one-line comments.

    Raises OSError if the file cannot be written.
    """
    plain = json.loads(json.dumps(settings))  # tuples become lists
    head = "".join(f"# {' '.join(remark.split())}\n" for remark in remarks)
    write_text_atomic(path, head + yaml.safe_dump(plain, sort_keys=False))


def config_files(folder: Path) -> list[Path]:
    """Return the settings files in a run folder, one for each start of the run, oldest first."""
    paths = Path(folder).glob("config*.yaml")
    numbers = {int(match[1] or 1): path for path in paths if (match := _CONFIG_NAME.fullmatch(path.name))}
    return [numbers[number] for number in sorted(numbers)]


def next_config(folder: Path) -> Path:
    """Return the path for the settings file of the next start of the run in a folder."""
    earlier = config_files(folder)
    last = earlier[-1].stem.partition("_")[2] or "1" if earlier else "0"
    return Path(folder) / (CONFIG_FILE if last == "0" else f"config_{int(last) + 1}.yaml")


def newest_config(folder: Path) -> Path:
    """Return the settings file of the newest start of a run, leaving out later starts that only evaluated.

    Without any settings file in the folder, the path of `config.yaml` is returned.
    """
    files = config_files(folder)
    for path in reversed(files[1:]):
        run = read_settings(path).get("run")
        if not (isinstance(run, dict) and run.get("eval_only")):
            return path
    return files[0] if files else Path(folder) / CONFIG_FILE


def read_settings(path: Path) -> dict:
    """Read groups of settings from a file, without checking keys and types.

    Raises:
        BadInput: the file is missing, or is not a mapping with a group `model`.
    """
    groups = read_groups(path)
    if not isinstance(groups.get("model"), dict):
        raise BadInput(f"{path}: expected the settings of a run, a mapping of groups with the group model")
    return groups


def read_groups(path: Path) -> dict:
    """Read groups of settings from a file, which may lack the group `model`; an empty file gives an empty dict.

    Raises:
        BadInput: the file is missing, or is not a mapping.
    """
    groups = read_yaml(path, str(path), "the settings of a run")
    if not isinstance(groups, dict | type(None)):
        raise BadInput(f"{path}: expected the settings of a run, a mapping of groups")
    return groups or {}


def detector_options(settings: Mapping) -> dict:
    """Return the settings of the group `model` that are not null, without `ABOUT_STARTING`: keyword arguments of
    `build_detector`.
    """
    return {key: value for key, value in settings.items() if value is not None and key not in ABOUT_STARTING}


def load_config_dict(path: Path, options_of: OptionsOf, needed: Iterable[str] = ("model",)) -> dict:
    """Return the settings of a run as nested dicts, checked, and completed from `pretrained_config.json` if it exists.

    A setting of the group `model` in the settings file overrides the one in `pretrained_config.json`. If the latter has
    a `source_config`, only those settings that the user gave when the run started do so.

    Args:
        path: a `config.yaml` that a run has written, which may have been edited since.
        options_of: finds the dataclass of an architecture's settings, see `OptionsOf`.
        needed: groups that the file must have, each with its keys in `REQUIRED_KEYS`.

    Raises:
        BadInput: see `checked_settings`; or `pretrained_config.json` is not valid.
    """
    groups = checked_settings(path, GROUPS, options_of, needed, strict=_is_of_script_unchanged(path.parent))
    source = path.with_name(PRETRAINED_CONFIG)
    if source.is_file():
        stored = read_json(source)
        if not isinstance(stored.get("options"), dict) or not isinstance(stored.get("given", []), list):
            raise BadInput(f"{source}: expected an object with the object options and the list given")
        given = {key: value for key, value in groups["model"].items() if value is not None}
        if "source_config" in stored["options"] and "given" in stored:
            kept = {"architecture", *stored["given"], *ABOUT_STARTING}
            given = {key: value for key, value in given.items() if key in kept}
        kinds = _group_dataclasses({}, options_of, groups)
        problems = check_values(layer_of(str(source), {"model": stored["options"]}), kinds)
        if problems:
            raise BadInput(problems)
        groups["model"] = {**stored["options"], **given}
    return groups


def checked_settings(
    path: Path, kinds: Mapping[str, type], options_of: OptionsOf, needed: Iterable[str] = (), strict: bool = True
) -> dict:
    """Read the settings file of a run, check every key and type, and return its groups of settings.

    Args:
        path: the settings file.
        kinds: the dataclasses of the groups except `model`.
        options_of, needed: see `load_config_dict`.
        strict: see `check`.

    Raises:
        BadInput: the file is missing, unreadable or not a mapping; or the run was made by another version of this
            toolkit; or its detector is a class that cannot be imported; or groups or keys are unknown or missing, or
            values have the wrong type, all of which the message lists.
    """
    from toolkit.run.checkpoint_content import stale_run  # torch, for which settings alone need not wait

    groups = read_groups(path)
    where = str(path)
    if not groups and needed:
        raise BadInput(f"{where}: it is empty; expected the settings of a run, a mapping of groups. {_REMEDY}")
    older_format = stale_run(path.parent)  # its settings had other names: not one of them is to blame
    if older_format:
        raise BadInput(older_format)
    problems = []
    for name in needed:
        if name not in groups:
            problems.append(f"{where}: it has no group {name}; expected the one that the run wrote")
        elif isinstance(groups[name], dict):
            left = [f"there is no {name}.{key}" for key in REQUIRED_KEYS[name] if key not in groups[name]]
            problems += [f"{where}: {fault}; expected the value that the run was trained with" for fault in left]
    try:
        kinds = _group_dataclasses(kinds, options_of, groups)
    except BadInput as error:
        faults = [f"{where}: {problem}" for problem in error.problems]
        if _is_own_class(groups):  # nothing is wrong with the file: its class has to be found, or to be trusted
            raise BadInput(faults) from error
        problems += faults
    looked_at = {name: entries for name, entries in groups.items() if name != "model" or "model" in kinds}
    layer = layer_of(where, looked_at)
    problems += check(layer, kinds, strict)
    if problems:
        raise BadInput([*problems, _REMEDY])
    checked = nested(layer.values)
    made = {name: checked.get(name, {}) for name, entries in looked_at.items() if isinstance(entries, dict)}
    return {**groups, **made}


_REMEDY = "Put back what the run wrote; weights and checkpoints are as they were."


def _is_own_class(groups: Mapping) -> bool:
    """Return whether the settings name a user's own detector, `module:Class`."""
    model = groups.get("model")
    return isinstance(model, dict) and ":" in str(model.get("architecture", ""))


def _group_dataclasses(kinds: Mapping[str, type], options_of: OptionsOf, groups: Mapping) -> dict[str, type]:
    """Return the dataclasses of all groups, with that of the architecture that they name, if any."""
    model = groups.get("model", {})
    if not isinstance(model, dict):
        raise BadInput(f"model is {format_value(model)}; expected a group of settings, `key: value`")
    if "architecture" not in model:
        return {**kinds}
    architecture = model["architecture"]
    if not isinstance(architecture, str):
        raise BadInput(f"model.architecture is {format_value(architecture)}; expected the name of a detector")
    options = options_of(architecture)
    return {**kinds} if options is None else {**kinds, "model": options}


def _is_of_script_unchanged(folder: Path) -> bool:
    """Return whether the run's script is one of this project's, unchanged, which has no settings of its own."""
    script = read_json_object(folder / "environment.json").get("script")
    digest = script.get("sha256") if isinstance(script, dict) else None
    scripts = (ROOT / "scripts").glob("train_*.py")
    return digest is not None and any(script_digest(path) == digest for path in scripts)


def script_digest(path: Path) -> str:
    """Return the SHA-256 of a script's content as hex digits, by which a run recognises its script."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------- changed settings on resume

# About this start alone: they change nothing of the run.
_THIS_START = {"run.output_dir", "run.name", "run.resume", "run.resume_schedule", "run.eval_only"}
_LENGTH = {"run.epochs", "run.max_steps", "run.max_minutes"}
# They stand in the state of the optimizer and of the schedule.
_RATES = "lr backbone_lr scale_lr_by_images lr_multipliers layer_decay bias_lr_factor"
_DECAY = "weight_decay bias_weight_decay no_weight_decay_on_norm_and_bias"
_SAVED = {f"optim.{key}" for key in f"{_RATES} {_DECAY} momentum nesterov betas".split()}
_SEED = {"run.seed"}
_BEGINNING = {f"model.{key}" for key in ("pretrained", "pretrained_backbone", "detector", "word_vectors")}
_REFUSED = {"optim.name", "model.architecture"}
_ROWS = {"data.tile", "data.tile_overlap", "data.tile_visible", "data.tile_empty"}  # of the data that training counts


def schedule_settings(settings: Mapping) -> dict[str, dict]:
    """Return the groups of settings with those alone that `run.resume_schedule` is about, as JSON values."""
    found = {}
    for group, entries in json.loads(json.dumps(settings)).items():
        found[group] = {key: value for key, value in entries.items() if _is_of_schedule(f"{group}.{key}")}
    return found


def _is_of_schedule(name: str) -> bool:
    return name in _LENGTH or name in _SAVED or name.startswith("schedule.")


@dataclass(frozen=True)
class Change:
    """A setting that differs between this start and the run so far.

    Attributes:
        key: its name, `group.key`.
        before, after: its value in the run so far, and in this start.
        verdict: whether the new value is "used", "ignored" or "refused".
        why: a clause that gives the reason, or "".
    """

    key: str
    before: object
    after: object
    verdict: str
    why: str = ""

    @property
    def values(self) -> str:
        """The name and both values of the setting as text, such as "optim.lr 0.1 -> 0.01"."""
        return f"{self.key} {format_value(self.before)} -> {format_value(self.after)}"

    def __str__(self) -> str:
        return f"{self.values}: {self.verdict}{self.why and ', '}{self.why}"


def changes(before: Mapping, after: Mapping, keep_schedule: bool, minutes_count: bool = False) -> list[Change]:
    """Return the settings that differ between two starts of a run, in the order of `after`.

    Settings that only one of the starts has are left out.

    Args:
        before, after: groups of settings of the run so far, and of this start.
        keep_schedule: `run.resume_schedule` is "saved".
        minutes_count: the number of steps that `run.max_minutes` allows was not final at the checkpoint, so a new value
            of that setting is used.
    """
    changed = []
    before, after = (json.loads(json.dumps(settings)) for settings in (before, after))  # tuples are lists in a file
    for group, entries in after.items():
        earlier = before.get(group)
        for key, value in entries.items() if isinstance(earlier, dict) else ():
            name = f"{group}.{key}"
            if key in earlier and earlier[key] != value and name not in _THIS_START:
                changed.append(Change(name, earlier[key], value, *_verdict(name, keep_schedule, minutes_count)))
    return changed


def _verdict(name: str, keep_schedule: bool, minutes_count: bool) -> tuple[str, str]:
    new = "--run.resume_schedule new uses it"
    if name in _REFUSED:
        return "refused", "the checkpoint was made with the other one"
    if name in _ROWS:
        return "refused", "the checkpoint counts its place in the data in the earlier windows"
    if name in _SEED:
        return "ignored", "the checkpoint's stays in use"
    if name in _BEGINNING:
        return "ignored", "the weights are the checkpoint's"
    if name == "run.max_minutes" and minutes_count:
        return "used", ""
    if keep_schedule and name in _LENGTH:
        return "ignored", f"the length is the checkpoint's; {new}"
    if keep_schedule and _is_of_schedule(name):
        return "ignored", f"the checkpoint's stays in use; {new}"
    return "used", ""


def in_force(settings: Mapping, changed: Sequence[Change]) -> dict:
    """Return a copy of the settings of this start in which every setting whose change is ignored has its earlier value.

    Raises BadInput if a change is refused.
    """
    refused = [change for change in changed if change.verdict == "refused"]
    if refused:
        remedy = "resume with the earlier setting, or begin a new run with another --run.name"
        raise BadInput([f"{change}; {remedy}" for change in refused])
    kept = {group: dict(entries) for group, entries in settings.items()}
    for change in changed:
        if change.verdict == "ignored":
            group, _, key = change.key.partition(".")
            kept[group][key] = change.before
    return kept
