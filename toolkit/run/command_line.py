"""The command line of a training script: parses `[--config FILE.yaml] [--group.key value ...]` into its `Config`.

This module is imported before any slow one, so that a mistyped flag is reported at once. The settings in the group
`model` are those of the chosen architecture.
"""

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from toolkit.base.errors import BadInput, FailedElsewhere, Preempted, StoppedByGuard, as_sentences, check_environment
from toolkit.base.files import parse_yaml, read_yaml
from toolkit.base.imports import trust_class
from toolkit.base.text import lasting_console
from toolkit.index import DETECTORS
from toolkit.models import DetectorOptions, options_class
from toolkit.run.help import collect_groups, help_text, help_topics
from toolkit.run.launcher import find_launch, refuse
from toolkit.run.settings_check import key_faults, nearest_or_all, nonfinite_settings, not_text, plain, type_faults

Config = TypeVar("Config")


def run_script(main: Callable, cls: type, default_config: Path | None = None, argv: list[str] | None = None) -> int:
    """Parse the settings, run `main(config)` and return the exit code, see docs/design.md.

    A mistake of the user, a stop by the NaN guard and a preemption are reported in one message on stderr. Any other
    exception is a defect of the program and is raised.

    Args:
        cls, default_config, argv: see `parse_config`.
    """
    code = _run_and_report(main, cls, default_config, argv)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # The model sits in cycles, and holds the process group. If Python frees it only as it ends, a thread of gloo
        # may ask for the interpreter that is gone, and the process aborts: for a launcher, the run has failed.
        gc.unfreeze()  # some of those cycles lead through what `importing` has frozen
        gc.collect()
    return code


def _run_and_report(main: Callable, cls: type, default_config: Path | None, argv: list[str] | None) -> int:
    if os.environ.get("RANK", "0") != "0":  # what torch itself warns of, every process would; read when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with lasting_console():
        try:
            check_environment(os.environ)
            with as_sentences(then=""):
                config = parse_config(cls, argv, default_config)
                refuse(find_launch(), os.environ)
            with as_sentences():
                main(config)
        except (BadInput, StoppedByGuard, Preempted, FailedElsewhere) as error:
            rank = os.environ.get("RANK", "0")
            word = "error" if isinstance(error, BadInput) else "stopped"
            print(f"{word}{'' if rank == '0' else f' on rank {rank}'}: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        return 0


def parse_config(
    cls: type[Config],
    argv: list[str] | None = None,
    default_config: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """Parse `[--config FILE.yaml] [--group.key value ...]` and return the settings as an object of `cls`.

    A flag wins over every file, whatever their order; of several files, and of several equal flags, the last wins.
    `--help` prints the help and ends the program.

    Args:
        cls: dataclass whose fields are dataclasses, one for each group; the field `model` is a `DetectorOptions`,
            whose class depends on `--model.architecture`.
        argv: arguments; None: those of the process. If `--data.path` is among them, settings in files that describe
            another data set are ignored: `DATA_SET_SETTINGS`, except a `data.val` that is a share.
        default_config: YAML file that applies if no `--config` is given. Its groups `model` and `loss` are ignored if
            `--model.architecture` chooses another architecture or `--model.pretrained` is given.
        defaults: values by key, such as "run.output_dir", that apply if neither a file nor a flag sets the key.

    Raises:
        BadInput: unknown key, wrong type, missing or malformed file; every unknown key with the nearest known one.
    """
    argv = _files_first(_with_full_names(sys.argv[1:] if argv is None else argv))
    bundled = None
    given = dict(_flags(argv))
    if default_config is not None and "--config" not in given:
        bundled = _read_yaml(str(default_config))
        default = bundled.get("model", {}).get("architecture")
        # trained weights say themselves which model they are of
        if _chosen_architecture(argv, {}) in (None, default) and "--model.pretrained" not in given:
            argv = ["--config", str(default_config), *argv]
            bundled = None
    files = {value: _read_yaml(value) for flag, value in _flags(argv) if flag == "--config" and value is not None}
    of_default = (bundled or {}).get("model", {}).get("architecture")
    groups = _groups(cls, _chosen_architecture(argv, files) or of_default)
    kept = {}
    if bundled is not None:  # made for another model: what it says of data and run serves this one too
        kept = {group: entries for group, entries in bundled.items() if group not in ("model", "loss")}
    topics = help_topics(argv)
    if topics is not None:
        sources = [str(default_config)] * bool(kept) + list(files)
        _print_help(topics, cls, groups, [kept, *files.values()], sources, default_config)
    parser = _parser_of(cls, groups)
    parser.set_defaults(dict(defaults or {}))
    parser.set_defaults({f"{name}.{key}": value for name, group in kept.items() for key, value in group.items()})
    kinds = {name: kind for name, kind, _ in groups}
    _check_keys(parser, kinds, argv, files)
    if type_faults(_null_settings(argv), kinds, "the command line", null_is_not_given=False):
        raise BadInput(type_faults(_given_settings(argv), kinds, "the command line", null_is_not_given=False))
    _refuse_empty_values(argv)
    made = _parse_groups(parser, kinds, argv, files)
    if "model" in made:
        below = getattr(made["model"], "detector_options", None) or {}  # of a scene graph
        trust_class(below.get("architecture", ""))
        made["model"].only_given(_given_keys("model", argv, files))
    if getattr(made.get("model"), "masks", False) and "eval" in made:
        made["eval"].metric_for_best = _metric_of_masks(made["eval"].metric_for_best, argv, files)
    return cls(**made)


def _metric_of_masks(metric: str, argv: list[str], files: dict[str, dict]) -> str:
    """Return `eval.metric_for_best` of a model with masks: segm_AP for the bbox_AP of a default, or of a file that does
    not set `model.masks`, since that was written for boxes."""
    if "--eval.metric_for_best" in dict(_flags(argv)):
        return metric
    naming = [content for content in files.values() if "metric_for_best" in content.get("eval", {})]
    if naming and "masks" in naming[-1].get("model", {}):
        return metric
    return {"bbox_AP": "segm_AP", "ema/bbox_AP": "ema/segm_AP"}.get(metric, metric)


def _print_help(
    topics: list[str],
    cls: type,
    groups: list[tuple[str, type, Callable]],
    layers: list[Mapping[str, Mapping]],
    sources: list[str],
    default_config: Path | None,
) -> NoReturn:
    """Print the help on `topics`, see `help_text`, and end the program with exit code 0."""
    architectures = [name for _, kind, _ in groups if issubclass(kind, DetectorOptions) for name in _family(kind)]
    print(help_text(topics, cls, collect_groups(groups, layers), default_config, sources, architectures))
    raise SystemExit(0)


def _parser_of(cls: type, groups: list[tuple[str, type, Callable]]) -> ArgumentParser:
    """Return the parser of `--config` and of a flag for each setting.

    groups: name, class and default factory of each.
    """
    parser = ArgumentParser(
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,  # `toolkit.run.help` answers it
    )
    parser.add_argument("--config", action="config")
    with_defaults = [(name, kind, field(default_factory=default)) for name, kind, default in groups]
    parser.add_class_arguments(make_dataclass(cls.__name__, with_defaults))
    return parser


def _parse_groups(
    parser: ArgumentParser, kinds: Mapping[str, type], argv: list[str], files: Mapping[str, dict]
) -> dict[str, object]:
    """Parse the arguments and return the dataclass object of each group.

    Raises:
        BadInput: values of the wrong type, non-finite numbers, or text that is not UTF-8; the message lists all.
    """
    try:
        parsed = parser.parse_args(_without_other_data_set(argv, files))
    except (ArgumentError, OverflowError) as error:  # OverflowError: a whole number beyond those of float
        sources = {**files, "the command line": _given_settings(argv)}
        faults = [
            fault
            for where, content in sources.items()
            for fault in type_faults(content, kinds, where, null_is_not_given=False)
        ]
        if faults:
            raise BadInput(faults) from error
        read = ", ".join([*files, "the command line"])
        raise BadInput(
            f"the settings cannot be used: {error}. Read were {read}, in this order; `--help all` lists every "
            "setting with its type."
        ) from error
    instantiated = parser.instantiate(parsed)
    made = {name: instantiated[name] for name in kinds}
    problems = []
    for name, group in made.items():
        for key, value in vars(group).items():
            if not key.startswith("_"):
                setattr(group, key, plain(value))
                problems += nonfinite_settings(f"{name}.{key}", value)
                problems += not_text(f"{name}.{key}", value)
    if problems:
        raise BadInput(problems)
    return made


# Settings that say which data set it is. A share of the training data as `val` goes with any.
DATA_SET_SETTINGS = ("train", "shares", "val", "image_dir", "format", "name")


def _without_other_data_set(argv: list[str], files: dict[str, dict]) -> list[str]:
    """Return the arguments, without the settings of files that describe another data set if `--data.path` is given."""
    if "--data.path" not in dict(_flags(argv)):
        return argv
    replaced = {}
    for path, content in files.items():
        data = content.get("data", {})
        dropped = [key for key in DATA_SET_SETTINGS if key in data and not (key == "val" and _is_share(data[key]))]
        if dropped:
            rest = {key: value for key, value in data.items() if key not in dropped}
            replaced[path] = json.dumps({**content, "data": rest})
            if len(dropped) > 1 and os.environ.get("RANK", "0") == "0":
                names = ", ".join(f"data.{key}" for key in dropped)
                print(f"{path}: {names} are of its own data set, and not used with --data.path", file=sys.stderr)
    pairs = zip(["", *argv], argv, strict=False)
    return [replaced.get(word, word) if before == "--config" else word for before, word in pairs]


def _is_share(val: object) -> bool:
    return re.fullmatch(r"0?\.\d+|[\d.]+ ?%", str(val)) is not None


def _groups(cls: type, architecture: str | None) -> list[tuple[str, type, Callable]]:
    """(name, dataclass, default factory) of every group; the group `model` has the options of the architecture."""
    groups = []
    for group in fields(cls):
        default = group.default_factory()
        if isinstance(default, DetectorOptions):
            kind = _options_of_family(type(default), architecture or default.architecture)
            groups.append((group.name, kind, group.default_factory if kind is type(default) else kind))
        else:
            groups.append((group.name, type(default), group.default_factory))
    return groups


def _options_of_family(default: type[DetectorOptions], architecture: str) -> type[DetectorOptions]:
    """Return the options of an architecture that the script can train: one of its own family, or any `module:Class`."""
    if ":" in architecture:
        trust_class(architecture)  # a person named it, in a flag or in a settings file
        kind = options_class(architecture)
        architecture_field = [("architecture", str, architecture)]
        return make_dataclass(kind.__name__, architecture_field, bases=(kind,), namespace={"__doc__": kind.__doc__})
    family = _family(default)
    if architecture in family:
        return options_class(architecture)
    hint = "" if architecture in DETECTORS else nearest_or_all(architecture, family)
    other = f"; another script trains {architecture}" if architecture in DETECTORS else ""
    raise BadInput(
        f"model.architecture: this script trains {', '.join(family)}, or a `module:Class` of your own, not "
        f"{architecture!r}{other}{hint}"
    )


def _family(options: type[DetectorOptions]) -> list[str]:
    """Return the architectures whose options are defined in the same module, which the index names."""
    return [name for name, (_, reference) in DETECTORS.items() if reference.startswith(f"{options.__module__}:")]


def _with_full_names(argv: Sequence[str]) -> list[str]:
    """`--image-dir`, as the scripts beside training call it, is `--data.image_dir` here."""
    return [re.sub("^--image-dir(?==|$)", "--data.image_dir", word) for word in argv]


def _files_first(argv: Sequence[str]) -> list[str]:
    """Move every `--config FILE` before all flags: a file that follows a flag would undo it."""
    files = []
    rest = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--config" and (path := value if equals else next(words, None)) is not None:
            files += [flag, path]
        else:
            rest.append(word)
    return files + rest


def _flags(argv: list[str]) -> Iterator[tuple[str, str | None]]:
    """(flag, value) of every argument that begins with `--`."""
    for i, word in enumerate(argv):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            following = argv[i + 1] if i + 1 < len(argv) else None
            yield flag, value if equals else following


def _given_settings(argv: list[str]) -> dict[str, dict[str, object]]:
    """Return the settings that flags give, by group, with their values read as YAML.

    `--loss.weights.loss_ce 2` is an entry of the setting `weights`.
    """
    groups: dict[str, dict[str, object]] = {}
    for flag, value in _flags(argv):
        name, dot, key = flag.removeprefix("--").partition(".")
        if not dot or value is None:
            continue
        try:
            read = parse_yaml(value)
        except yaml.YAMLError:
            read = value
        settings = groups.setdefault(name, {})
        key, is_entry, entry = key.partition(".")
        if not is_entry:
            settings[key] = read
        elif isinstance(settings.get(key), dict):
            settings[key][entry] = read
        else:
            settings[key] = {entry: read}
    return groups


def _null_settings(argv: list[str]) -> dict[str, dict[str, object]]:
    """Return the settings, by group, that flags set to null, or to a list or mapping with a null in it.

    A setting that takes text too would take the word null, or the whole list, for text.
    """
    words = []
    for flag, value in _flags(argv):
        text = (value or "").strip()
        if text.lower() == "null" or text.startswith(("[", "{")) and re.search(r"\bnull\b", text, re.IGNORECASE):
            words.append(f"{flag}={value}")
    return _given_settings(words)


def _refuse_empty_values(argv: list[str]) -> None:
    """Raise BadInput that names every flag with an empty value, which YAML would read as null."""
    empty = [flag for flag, value in _flags(argv) if value == "" and flag != "--run.notes"]
    if empty:
        raise BadInput([f"{flag}: the value is empty. Is a variable of the shell not set?" for flag in empty])


def _read_yaml(path: str) -> dict:
    """Read a settings file. Raises BadInput if the file cannot be read, or is not a mapping of groups of settings."""
    content = read_yaml(Path(path), f"--config {path}")
    if not isinstance(content, dict) or not all(isinstance(group, dict) for group in content.values()):
        raise BadInput(f"--config {path}: expected groups of settings, such as `run:` with `name: mine` below it.")
    return content


def _chosen_architecture(argv: list[str], files: dict[str, dict]) -> str | None:
    """Return the `model.architecture` that wins: the last one in the order of the arguments."""
    chosen = None
    for flag, value in _flags(argv):
        if flag == "--config" and value is not None:
            chosen = files[value].get("model", {}).get("architecture", chosen)
        elif flag == "--model.architecture" and value is not None:
            chosen = value
    return None if chosen is None else str(chosen)


def _given_keys(group: str, argv: list[str], files: dict[str, dict]) -> set[str]:
    flags = {flag.removeprefix(f"--{group}.") for flag, _ in _flags(argv) if flag.startswith(f"--{group}.")}
    return flags.union(*(content.get(group, {}) for content in files.values()))


def _check_keys(parser: ArgumentParser, groups: dict[str, type], argv: list[str], files: dict[str, dict]) -> None:
    """Raise BadInput naming every flag and every key of a file that there is not, with the nearest one, and every
    value of a file that its setting cannot have."""
    flags = [*parser._option_string_actions, "--help"]
    model = groups.get("model")
    unknown = [flag for flag, _ in _flags(argv) if flag not in flags and not _is_entry_of(flag, groups)]
    problems = []
    for flag in unknown:
        hint = _of_other_architecture(flag, model) or nearest_or_all(flag, flags)
        problems.append(f"{flag}: no such flag{hint}")
    for path, content in files.items():
        of_another = [] if model is None else _keys_of_another_detector(content, model)
        if of_another:
            problems.append(
                f"{path}: it is for model.architecture {content['model']['architecture']}, and sets "
                f"{', '.join(of_another)}, which {model().architecture} does not have. Take a copy of the file without "
                "these lines"
            )
            kept = {key: value for key, value in content["model"].items() if key not in of_another}
            content = {**content, "model": kept}
        problems += key_faults(content, groups, path, elsewhere=partial(_of_other_architecture, model=model))
        problems += type_faults(content, groups, path)
    if problems:
        raise BadInput([*problems, "`--help all` lists every setting with its type."])


def _keys_of_another_detector(content: Mapping, model: type[DetectorOptions]) -> list[str]:
    """Return the settings in a file for another of this toolkit's architectures that the chosen one does not have.

    A key that neither has is not among them: it may be misspelt.
    """
    entries = content.get("model", {})
    named = str(entries.get("architecture"))
    if named not in DETECTORS or named == model().architecture:
        return []
    of_named = {setting.name for setting in fields(options_class(named))}
    of_chosen = {setting.name for setting in fields(model)}
    return [key for key in entries if key in of_named - of_chosen]


def _is_entry_of(flag: str, groups: dict[str, type]) -> bool:
    """Return whether a flag sets one entry of a setting that is a dict, such as `--loss.weights.loss_ce`."""
    group, _, rest = flag.removeprefix("--").partition(".")
    key = rest.partition(".")[0]
    return "." in rest and group in groups and "dict" in str({f.name: f.type for f in fields(groups[group])}.get(key))


def _of_other_architecture(flag: str, model: type[DetectorOptions] | None) -> str:
    """Say whose setting a flag of the group `model` is, if it is one of another architecture, of the script or else of
    another script."""
    if model is None or not flag.startswith("--model."):
        return ""
    key = flag.removeprefix("--model.").partition(".")[0]
    architecture = model().architecture
    having = [name for name in DETECTORS if key in {setting.name for setting in fields(options_class(name))}]
    here = [name for name in having if name in _family(model)]
    if here:
        return f" of {architecture}; it is one of {', '.join(here)}"
    return f" of {architecture}; it is one of {', '.join(having)}, which other scripts train" if having else ""
