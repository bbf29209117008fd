"""The settings of a run as a file: `config.yaml`, and beside it what the source of its weights says of the detector."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from toolkit.errors import BadInput
from toolkit.files import write_text_atomic

CONFIG = "config.yaml"
PRETRAINED_CONFIG = "pretrained_config.json"
# Settings of a detector that say where it starts, not what it is.
ABOUT_STARTING = ("pretrained", "freeze_prefixes")


def save_config(settings: Mapping, path: Path) -> None:
    """Writes groups of settings as YAML that `--config` reads again. Raises OSError."""
    plain = json.loads(json.dumps(settings))  # tuples become lists
    write_text_atomic(path, yaml.safe_dump(plain, sort_keys=False))


def detector_options(settings: Mapping) -> dict:
    """Keywords of `build_detector`: the settings of a model that are given, without those that say where it starts."""
    return {key: value for key, value in settings.items() if value is not None and key not in ABOUT_STARTING}


def load_config_dict(path: Path) -> dict:
    """The settings of a run folder as nested dicts, with what the source of its weights said of the model.

    Where the source decided the structure, only the settings of the model that were given stand beside what it said.

    Raises:
        BadInput: the file is missing or no mapping.
    """
    try:
        groups = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(f"{path}: cannot be read as the settings of a run: {error}") from error
    if not isinstance(groups, dict) or not isinstance(groups.get("model"), dict):
        raise BadInput(f"{path}: expected the settings of a run, a mapping of groups with the group model")
    source = path.with_name(PRETRAINED_CONFIG)
    if source.is_file():
        stored = json.loads(source.read_text())
        given = {key: value for key, value in groups["model"].items() if value is not None}
        if "source_config" in stored["options"] and "given" in stored:
            kept = {"architecture", *stored["given"], *ABOUT_STARTING}
            given = {key: value for key, value in given.items() if key in kept}
        groups["model"] = {**stored["options"], **given}
    return groups
