"""The command line of a training script: parses `[--config FILE.yaml] [--group.key value ...]` into its `Config`.

This module is imported before any slow one, so that a mistyped flag is reported at once. The settings in the group
`model` are those of the chosen architecture.
"""

import difflib
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from toolkit.base.errors import (
    BadInput,
    FailedElsewhere,
    Preempted,
    StoppedByGuard,
    all_faults,
    as_sentences,
    check_environment,
)
from toolkit.base.files import ROOT, near_names, parse_yaml, read_yaml
from toolkit.base.imports import compiler_when_used, gc_disabled, trust_class
from toolkit.base.text import did_you_mean, lasting_console, plain_warnings
from toolkit.index import DETECTORS
from toolkit.models import DetectorOptions, options_class
from toolkit.run.help import collect_groups, help_text, help_topics, shown_path
from toolkit.run.launcher import find_launch, refuse
from toolkit.run.settings_check import (
    field_types,
    format_value,
    key_faults,
    nearest_or_all,
    nonfinite_settings,
    not_text,
    plain,
    type_faults,
)
from toolkit.run.settings_file import GROUPS
from toolkit.run.synonyms import other_name, stray_word

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
    with lasting_console(), plain_warnings():
        try:
            check_environment(os.environ)
            with as_sentences(then=""):
                config, sources = resolve_config(cls, argv, default_config)
                refuse(find_launch(), os.environ)
                if os.environ.get("RANK", "0") == "0":
                    print(f"settings: {', '.join(sources) or 'the defaults of the script'}", flush=True)
            with as_sentences():
                main(config)
        except (BadInput, StoppedByGuard, Preempted, FailedElsewhere) as error:
            rank = os.environ.get("RANK", "0")
            word = "error" if isinstance(error, BadInput) else "stopped"
            message = error.untold() if isinstance(error, BadInput) else str(error)
            if message:
                print(f"{word}{'' if rank == '0' else f' on rank {rank}'}: {message}", file=sys.stderr, flush=True)
            return error.exit_code
        return 0


def parse_config(
    cls: type[Config],
    argv: list[str] | None = None,
    default_config: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """Return the settings of a script as an object of `cls`, see `resolve_config`."""
    return resolve_config(cls, argv, default_config, defaults)[0]


def resolve_config(
    cls: type[Config],
    argv: list[str] | None = None,
    default_config: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> tuple[Config, list[str]]:
    """Parse `[--config FILE.yaml] [--group.key value ...]`; return the settings as an object of `cls`, and the names of
    the settings files that apply, and of the command line, in their order.

    A flag wins over every file, whatever their order; of several files, and of several equal flags, the last wins.
    `--help` prints the help and ends the program.

    Args:
        cls: dataclass whose fields are dataclasses, one for each group; the field `model` is a `DetectorOptions`,
            whose class depends on `--model.architecture`.
        argv: arguments; None: those of the process. If they name data of the user's own, settings in files that
            describe another data set are ignored, see `_without_other_data_set`.
        default_config: YAML file that applies if no `--config` is given; for data of the user's own the file beside it,
            see `_file_of_script`. Its groups `model` and `loss` are ignored if `--model.architecture` chooses another
            architecture or `--model.pretrained` is given.
        defaults: values by key, such as "run.output_dir", that apply if neither a file nor a flag sets the key.

    Raises:
        BadInput: unknown key, wrong type, missing or malformed file; every unknown key with the nearest known one.
    """
    words = _with_full_names(sys.argv[1:] if argv is None else argv)
    argv = _files_first(words)
    sources = []
    kept = {}  # the script's own file, without the model that it is made for
    given = dict(_flags(argv))
    if default_config is not None and "--config" not in given:
        path, why = _file_of_script(default_config, given)
        bundled = _read_yaml(str(path))
        sources = [f"{shown_path(path)}{why}"]
        of_default = bundled.get("model", {}).get("architecture")
        # trained weights say themselves which model they are of
        if _chosen_architecture(argv, {}) in (None, of_default) and "--model.pretrained" not in given:
            argv = ["--config", str(path), *argv]
        else:
            sources = [f"{sources[0]} without its groups model and loss"]
            kept = _without_other_data_set({str(path): bundled}, given)[str(path)]
            kept = {group: entries for group, entries in kept.items() if group not in ("model", "loss")}
    paths = [value for flag, value in _flags(argv) if flag == "--config" and value is not None]
    files = dict(zip(paths, all_faults(*[partial(_read_yaml, path) for path in paths]), strict=True))
    groups = _groups(cls, _chosen_architecture(argv, files) or (of_default if kept else None))
    topics = help_topics(argv)
    if topics is not None:
        read = [str(path)] if kept else paths
        _print_help(topics, cls, groups, [kept, *files.values()], read, default_config)
    parser = _parser_of(cls, groups)
    parser.set_defaults(dict(defaults or {}))
    parser.set_defaults({f"{name}.{key}": value for name, group in kept.items() for key, value in group.items()})
    kinds = {name: kind for name, kind, _ in groups}
    _check_keys(words, kinds, argv, files)
    if type_faults(_null_settings(argv), kinds, "the command line", null_is_not_given=False):
        raise BadInput(type_faults(_given_settings(argv), kinds, "the command line", null_is_not_given=False))
    _refuse_empty_values(argv)
    made = _parse_groups(parser, kinds, argv, files)
    _settle_model(made, argv, files)
    has_flags = any(flag != "--config" for flag in given)
    return cls(**made), [*(sources or paths), *["the command line"] * has_flags]


def _settle_model(made: dict[str, Any], argv: list[str], files: dict[str, dict]) -> None:
    """Give the group `model` what depends on which settings were given, and `eval` the metric of a model with masks."""
    if "model" in made:
        below = getattr(made["model"], "detector_options", None) or {}  # of a scene graph
        trust_class(below.get("architecture", ""))
        made["model"].only_given(_given_keys("model", argv, files))
    if getattr(made.get("model"), "masks", False) and "eval" in made:
        made["eval"].metric_for_best = _metric_of_masks(made["eval"].metric_for_best, argv, files)


def _file_of_script(default_config: Path, given: Mapping[str, str | None]) -> tuple[Path, str]:
    """Return the settings file of a script that applies without `--config`, and a remark in brackets that says why.

    For data of the user's own it is `own_data.yaml` beside the default, or `own_data_cpu.yaml` where there is no GPU.
    The network does not decide, although the first of them needs it: a run that is resumed must find the same file.

    given: the flags with their values.
    """
    if not _is_own_data(given):
        return default_config, ""
    with gc_disabled(), compiler_when_used():
        from toolkit.base.distributed import default_device  # torch, which takes seconds

    small = default_config.with_name("own_data_cpu.yaml")
    large = default_config.with_name("own_data.yaml")
    on_cpu = default_device().type == "cpu"
    if on_cpu and small.is_file():
        return small, " (your own data, no GPU; --config chooses another file)"
    if not on_cpu and large.is_file():
        return large, f" (your own data, a GPU; --config {shown_path(small)} needs no network)"
    is_of_shapes = _read_yaml(str(default_config)).get("data", {}).get("format") == "shapes"
    made_for = "made for the bundled shapes, not for your data; " if is_of_shapes else ""
    return default_config, f" ({made_for}--config chooses another file)"


def _is_own_data(given: Mapping[str, str | None]) -> bool:
    """Return whether flags name other data than the bundled shapes."""
    is_named = _is_set(given.get("--data.path")) or _is_set(given.get("--data.name"))
    is_format = given.get("--data.format") not in (None, "shapes", "auto")
    return is_named or is_format or _names_files(given)


def _is_set(value: str | None) -> bool:
    """Return whether a flag has a value that is not null."""
    return value is not None and value.strip().lower() != "null"


# What a flag may say of training and validation data that is the name of a split, even beside a folder called so.
SPLITS = ("train", "val", "test", "valid", "validation", "trainval")


def _names_files(given: Mapping[str, str | None]) -> bool:
    """Return whether `data.train` or `data.val` on the command line is a file or folder, and not the name of a split.

    A file that does not exist is recognised by its suffix.
    """
    sources = []
    for flag in ("--data.train", "--data.val"):
        value = _read_value(given.get(flag))
        sources += value if isinstance(value, list) else [value]
    for source in filter(lambda source: isinstance(source, str), sources):
        has_suffix = source.lower().endswith((".json", ".yaml", ".yml", ".csv"))
        if has_suffix or source not in SPLITS and Path(source).expanduser().is_dir():
            return True
    return False


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
        parsed = parser.parse_args(_with_own_data(argv, files))
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


def _with_own_data(argv: list[str], files: dict[str, dict]) -> list[str]:
    """Return the arguments, without the settings of files that describe another data set than the one of the flags."""
    contents = _without_other_data_set(files, dict(_flags(argv)))
    changed = {path: json.dumps(content) for path, content in contents.items() if content is not files[path]}
    pairs = zip(["", *argv], argv, strict=False)
    return [changed.get(word, word) if before == "--config" else word for before, word in pairs]


def _without_other_data_set(files: dict[str, dict], given: Mapping[str, str | None]) -> dict[str, dict]:
    """Return the contents of settings files without what they say of another data set than the one that flags name, and
    print which settings those were.

    With `--data.path` these are all of `DATA_SET_SETTINGS`, except a `data.val` that is a share. Where `--data.train`
    or `--data.val` is a file or folder, it is the format, which then is `auto`.
    """
    made = {}
    for path, content in files.items():
        data = content.get("data", {})
        dropped = []
        if _is_set(given.get("--data.path")):
            dropped = [key for key in DATA_SET_SETTINGS if key in data and not (key == "val" and _is_share(data[key]))]
        elif _names_files(given) and "--data.format" not in given and "--data.name" not in given:
            dropped = [key for key in ("format", "name") if key in data]
        made[path] = content
        if dropped:
            made[path] = {**content, "data": {key: value for key, value in data.items() if key not in dropped}}
        if len(dropped) > 1 and os.environ.get("RANK", "0") == "0":
            names = ", ".join(f"data.{key}" for key in dropped)
            print(f"{path}: {names} are of its own data set, and not used with yours", file=sys.stderr)
    return made


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
    squashed = {_squashed(name): name for name in DETECTORS}
    near = difflib.get_close_matches(_squashed(architecture), squashed, n=1)
    name = squashed[near[0]] if near else ""
    hint = ""
    if name:
        script = DETECTORS[name][1].split(".")[2].replace("scene_graphs", "sgg")
        whose = "" if name in family else f", which train_{script}.py trains"
        hint = f"; train_{script}.py trains it" if name == architecture else f"; did you mean {name}{whose}?"
    raise BadInput(
        f"model.architecture: this script trains {', '.join(family)}, or a `module:Class` of your own, not "
        f"{architecture!r}{hint}"
    )


def _squashed(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


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
        read = _read_value(value)
        settings = groups.setdefault(name, {})
        key, is_entry, entry = key.partition(".")
        if not is_entry:
            settings[key] = read
        elif isinstance(settings.get(key), dict):
            settings[key][entry] = read
        else:
            settings[key] = {entry: read}
    return groups


def _read_value(text: str | None) -> object:
    """Return the value of a flag, read as YAML if it is that."""
    try:
        return None if text is None else parse_yaml(text)
    except yaml.YAMLError:
        return text


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
    of_project = ROOT / path
    if not Path(path).expanduser().parent.exists() and of_project.parent.is_dir():  # typed as from the project's folder
        hint = f"; did you mean {of_project}?" if of_project.is_file() else near_names(of_project)
        raise BadInput(f"--config {path}: no such file in the current folder{hint}")
    content = read_yaml(Path(path), f"--config {path}")
    expected = "expected groups of settings, such as `run:` with `name: mine` below it"
    if not isinstance(content, dict):
        raise BadInput(f"--config {path}: {expected}")
    outside = [name for name, group in content.items() if not isinstance(group, dict)]
    if outside:
        names = [f"{group}.{key}" for group, kind in GROUPS.items() for key in field_types(kind)]
        raise BadInput(
            f"--config {path}: {name} is {format_value(content[name])}; {expected}{other_name(str(name), names)}"
            for name in outside
        )
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


def _check_keys(words: list[str], groups: dict[str, type], argv: list[str], files: dict[str, dict]) -> None:
    """Raise BadInput naming every flag and every key of a file that there is not, with the nearest one, every word that
    is the value of no flag, and every value of a file that its setting cannot have.

    words: the command line as it was typed.
    """
    names = [f"{group}.{key}" for group, kind in groups.items() for key in field_types(kind)]
    flags = ["--config", "--print_config", "--help", *[f"--{name}" for name in names]]
    model = groups.get("model")
    unknown = [flag for flag, _ in _flags(argv) if flag not in flags and not _is_entry_of(flag, groups)]
    problems = _word_faults(words, names)
    for flag in unknown:
        hint = _of_other_architecture(flag, model) or other_name(flag, names, "--") or _nearest(flag, names)
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
        problems += key_faults(content, groups, path, elsewhere=partial(_known_elsewhere, names=names, model=model))
        problems += type_faults(content, groups, path)
    if problems:
        raise BadInput([*problems, "`--help all` lists every setting with its type."])


def _word_faults(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a sentence for every flag without its one value, and for every word that is the value of no flag."""
    problems = []
    waiting = None  # the flag that the next word is the value of
    before = ""  # the last flag and its value
    for word in [*argv, "--"]:
        if word.startswith("--"):
            if waiting is not None:
                problems.append(f"{waiting}: it has no value; expected {waiting} VALUE")
            flag, equals, _ = word.partition("=")
            waiting = None if equals or flag in ("--", "--print_config") else flag
            before = word
        elif waiting is not None:
            before = f"{waiting} {word}"
            waiting = None
        else:
            problems.append(stray_word(word, before, names))
    return problems


def _nearest(flag: str, names: Sequence[str]) -> str:
    """Return the end of the sentence on an unknown flag: the nearest one, by its last part if it has no group."""
    if flag.removeprefix("--") in [name.partition(".")[0] for name in names]:
        return f"; it is a group of settings, see --help {flag.removeprefix('--')}"
    if "." in flag:
        return nearest_or_all(flag, [f"--{name}" for name in names])
    by_key = {name.partition(".")[2]: f"--{name}" for name in names}
    near = did_you_mean(flag.removeprefix("--"), by_key, written=by_key.get)
    return near or did_you_mean(flag, [f"--{name}" for name in names])


def _known_elsewhere(flag: str, names: Sequence[str], model: type[DetectorOptions] | None) -> str:
    """Return the end of the sentence on an unknown setting of a file, `--group.key`, that is known in another place."""
    return _of_other_architecture(flag, model) or other_name(flag.removeprefix("--"), names)


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
