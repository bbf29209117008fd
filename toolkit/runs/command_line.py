"""How a script starts and ends: settings, one message instead of a traceback, exit code, status.json."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from toolkit.errors import BadInput
from toolkit.runs.status import STATES


def run_script(main: Callable, cls: type, default_config: Path | None = None, argv: list[str] | None = None) -> int:
    """Parses the settings, runs `main(config)` and returns the exit code of docs/design.md.

    A mistake of the user, a stop by the guard and a preemption end with one message; anything else is a defect of
    the program and keeps its traceback.
    """
    try:
        main(parse_config(cls, argv, default_config))
    except tuple(STATES) as error:
        rank = os.environ.get("RANK", "0")
        word = "error" if isinstance(error, BadInput) else "stopped"
        print(f"{word}{'' if rank == '0' else f' on rank {rank}'}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0




Config = TypeVar("Config")


PRETRAINED_CONFIG = "pretrained_config.json"  # beside config.yaml: what the source of the weights says of the detector


def parse_config(cls: type[Config], argv: list[str] | None = None, default_config: Path | None = None) -> Config:
    """Reads `[--config FILE.yaml] [--group.key value ...]` into the dataclass `cls`; later arguments win.

    Args:
        cls: dataclass whose fields are dataclasses, one per group.
        argv: arguments; None: those of the process.
        default_config: YAML file that applies where no `--config` is given.

    Raises:
        BadInput: unknown key, wrong type, missing or malformed file.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if default_config is not None and not any(arg.split("=")[0] == "--config" for arg in argv):
        argv = ["--config", str(default_config), *argv]
    parser = ArgumentParser(exit_on_error=False, description=cls.__doc__)
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below; may be repeated.")
    parser.add_class_arguments(cls)
    try:
        parsed = parser.parse_args(argv)
    except ArgumentError as error:
        read = [arg.partition("=")[2] or following for arg, following in zip(argv, [*argv[1:], ""], strict=True)
                if arg.split("=")[0] == "--config"]  # fmt: skip
        raise BadInput(
            f"the settings cannot be used: {error}. Read were {', '.join([*read, 'the command line'])}, in this order; "
            "`--help` lists every key with its type."
        ) from error
    instantiated = parser.instantiate(parsed)
    groups = {group.name: instantiated[group.name] for group in fields(cls)}
    for group in groups.values():
        for key, value in vars(group).items():
            setattr(group, key, _plain(value))
    return cls(**groups)


def _plain(value: object) -> object:
    """Plain numbers instead of jsonargparse's checked types, which no checkpoint (an optimizer's `lr`) may hold."""
    if isinstance(value, float):
        return float(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def save_config(config: object, path: Path) -> None:
    """Writes the resolved settings, all keys, as YAML that `--config` reads again."""
    plain = json.loads(json.dumps(asdict(config)))  # tuples become lists
    path.write_text(yaml.safe_dump(plain, sort_keys=False))


def detector_options(settings: Mapping) -> dict:
    """Keywords of `build_detector`: the settings of a model that are given, but those of `PretrainedConfig` alone."""
    about_starting = ("pretrained", "freeze_prefixes")
    return {key: value for key, value in settings.items() if value is not None and key not in about_starting}


def load_config_dict(path: Path) -> dict:
    """The resolved settings of a run folder as nested dicts, what the source of its weights said of the model included.

    Raises:
        BadInput: the file is missing or no mapping.
    """
    try:
        groups = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(f"{path}: cannot be read as the settings of a run: {error}") from error
    if not isinstance(groups, dict):
        raise BadInput(f"{path}: expected the settings of a run, a mapping of groups")
    source = path.with_name(PRETRAINED_CONFIG)
    if source.is_file():
        given = {key: value for key, value in groups["model"].items() if value is not None}
        groups["model"] = {**json.loads(source.read_text())["options"], **given}
    return groups
