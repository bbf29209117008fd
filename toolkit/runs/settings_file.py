"""The settings of a run as files: `config.yaml` of its first start, `config_2.yaml` of its second and so on.

The settings of a pretrained source are stored beside them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from toolkit.errors import BadInput
from toolkit.files import read_json, write_text_atomic

CONFIG = "config.yaml"
PRETRAINED_CONFIG = "pretrained_config.json"
# Settings of a detector that say where it starts, not what it is.
ABOUT_STARTING = ("pretrained", "freeze_prefixes", "fresh_prefixes")


def save_config(settings: Mapping, path: Path, remarks: Iterable[str] = ()) -> None:
    """Writes groups of settings as YAML that `--config` reads again, below remarks of a line each. Raises OSError."""
    plain = json.loads(json.dumps(settings))  # tuples become lists
    head = "".join(f"# {' '.join(remark.split())}\n" for remark in remarks)
    write_text_atomic(path, head + yaml.safe_dump(plain, sort_keys=False))


def config_files(folder: Path) -> list[Path]:
    """The settings of every start of a run, the first one first."""
    numbers = {int(match[1] or 1): path for path in Path(folder).glob("config*.yaml")
               if (match := re.fullmatch(r"config(?:_(\d+))?\.yaml", path.name))}  # fmt: skip
    return [numbers[number] for number in sorted(numbers)]


def next_config(folder: Path) -> Path:
    """Where the next start of a run keeps its settings."""
    earlier = config_files(folder)
    last = earlier[-1].stem.partition("_")[2] or "1" if earlier else "0"
    return Path(folder) / (CONFIG if last == "0" else f"config_{int(last) + 1}.yaml")


def newest_config(folder: Path) -> Path:
    """The settings that the run was trained with last: those of its newest start that was no evaluation alone."""
    files = config_files(folder)
    for path in reversed(files[1:]):
        if not read_settings(path).get("run", {}).get("eval_only"):
            return path
    return files[0] if files else Path(folder) / CONFIG


def read_settings(path: Path) -> dict:
    """Groups of settings as the file has them.

    Raises:
        BadInput: the file is missing or no mapping with a group `model`.
    """
    groups = read_groups(path)
    if not isinstance(groups.get("model"), dict):
        raise BadInput(f"{path}: expected the settings of a run, a mapping of groups with the group model")
    return groups


def read_groups(path: Path) -> dict:
    """`read_settings` of a file that may say nothing of a model, or nothing at all."""
    try:
        groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not UTF-8
        raise BadInput(f"{path}: cannot be read as the settings of a run: {error}") from error
    if not isinstance(groups, dict | type(None)):
        raise BadInput(f"{path}: expected the settings of a run, a mapping of groups")
    return groups or {}


def detector_options(settings: Mapping) -> dict:
    """Keywords of `build_detector`: the settings of a model that are given, without those that say where it starts."""
    return {key: value for key, value in settings.items() if value is not None and key not in ABOUT_STARTING}


def load_config_dict(path: Path) -> dict:
    """The settings of a run folder as nested dicts, with what the source of its weights said of the model.

    Where the source decided the structure, only the settings of the model that were given stand beside what it said.

    Raises:
        BadInput: the file is missing or no mapping.
    """
    groups = read_settings(path)
    source = path.with_name(PRETRAINED_CONFIG)
    if source.is_file():
        stored = read_json(source)
        if not isinstance(stored.get("options"), dict):
            raise BadInput(f"{source}: expected an object with the object options")
        given = {key: value for key, value in groups["model"].items() if value is not None}
        if "source_config" in stored["options"] and "given" in stored:
            kept = {"architecture", *stored["given"], *ABOUT_STARTING}
            given = {key: value for key, value in given.items() if key in kept}
        groups["model"] = {**stored["options"], **given}
    return groups
