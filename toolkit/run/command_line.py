"""The command line of a training script: reads `[--config FILE.yaml] [--group.key value ...]` into its `Config`.

This module is imported before any slow one, so that a mistyped flag is reported at once. The settings in the group
`model` are those of the chosen architecture. What the places say is a stack of layers (`toolkit.run.layers`).
"""

import gc
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from toolkit.base.errors import (
    BadInput,
    FailedElsewhere,
    Preempted,
    StoppedByGuard,
    all_faults,
    as_sentences,
    check_environment,
)
from toolkit.base.files import shown_path
from toolkit.base.imports import gc_disabled, trust_class
from toolkit.base.text import lasting_console, plain_warnings
from toolkit.models import DetectorOptions, options_class
from toolkit.run.help import collect_groups, help_text
from toolkit.run.launcher import find_launch, refuse
from toolkit.run.layers import (
    COMMAND_LINE,
    DEFAULTS,
    OPTIONS,
    Layer,
    Stack,
    layer_of,
    nested,
    read_command_line,
    read_file,
)
from toolkit.run.setting_types import from_yaml
from toolkit.run.settings_check import check, family_of, nearest_architecture

Config = TypeVar("Config")

SHOW_ALL = "`--help all` lists every setting with its type."
ABOUT_TRACEBACK = "A traceback below this line is of `accelerate launch`; `python` in its place prints none."
# Settings that say which data set it is; those of a file do not go with another `data.path`.
DATA_SET = ("data.train", "data.shares", "data.val", "data.image_dir", "data.format", "data.name")
# What a flag may say of training and validation data that is the name of a split, even beside a folder called so.
SPLITS = ("train", "val", "test", "valid", "validation", "trainval")


def run_script(main: Callable, cls: type, default_config: Path | None = None, argv: list[str] | None = None) -> int:
    """Read the settings, run `main(config)` and return the exit code, see docs/failures.md.

    A mistake of the user, a stop by the NaN guard and a preemption are reported in one message on stderr. Any other
    exception is a defect of the program and is raised.

    Args:
        cls, default_config, argv: see `resolve`.
    """
    code = _run_and_report(main, cls, default_config, argv)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # The model sits in cycles, and holds the process group. If Python frees it only as it ends, a thread of gloo
        # may ask for the interpreter that is gone, and the process aborts: for a launcher, the run has failed.
        gc.unfreeze()  # some of those cycles lead through what `importing` has frozen
        gc.collect()
    return code


def _run_and_report(main: Callable, cls: type, default_config: Path | None, argv: list[str] | None) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":  # what torch itself warns of, every process would; read when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with lasting_console(), plain_warnings():
        try:
            check_environment(os.environ)
            with as_sentences(then=""):
                config, stack = resolve(cls, argv, default_config)
                refuse(find_launch(), os.environ)
                if rank == "0":
                    print(f"settings: {', '.join(sources_of(stack)) or 'the defaults of the script'}", flush=True)
            with as_sentences():
                main(config)
        except (BadInput, StoppedByGuard, Preempted, FailedElsewhere) as error:
            word = "error" if isinstance(error, BadInput) else "stopped"
            message = error.untold() if isinstance(error, BadInput) else str(error)
            if message:
                print(f"{word}{'' if rank == '0' else f' on rank {rank}'}: {message}", file=sys.stderr, flush=True)
            elif rank == "0":  # printed before the data were checked
                print("This run cannot start: see above.", file=sys.stderr, flush=True)
            if "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
                print(ABOUT_TRACEBACK, file=sys.stderr, flush=True)
            return error.exit_code
        return 0


def sources_of(stack: Stack) -> list[str]:
    """Return which settings files apply, and whether flags do: for the first line of a training."""
    files = [f"{shown_path(layer.where)}{layer.note}" for layer in stack.files()]
    flags = [COMMAND_LINE for layer in stack.layers if layer.where == COMMAND_LINE and layer.values]
    return [*files, *flags]


def parse_config(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    default_config: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """Return the settings of a script as an object of `cls`, see `resolve`."""
    return resolve(cls, argv, default_config, defaults)[0]


def resolve(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    default_config: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> tuple[Config, Stack]:
    """Read `[--config FILE.yaml] [--group.key value ...]`; return the settings as an object of `cls`, and their stack.

    A flag wins over every file, whatever their order; of several files, and of several equal flags, the last wins.
    `--help` and `--print_config` print and end the program.

    Args:
        cls: dataclass whose fields are dataclasses, one for each group; the field `model` is a `DetectorOptions`,
            whose class depends on `--model.architecture`.
        argv: arguments; None: those of the process. If they name the user's own data, what files say of another data
            set is left out, see `_leave_out_other_data_set`.
        default_config: YAML file that applies if no `--config` is given; for the user's own data the file next to it,
            see `_file_of_script`. What it says of the model is left out for another one, see `_leave_out_other_model`.
        defaults: values by name, such as "run.output_dir", that apply if neither a file nor a flag sets them.

    Raises:
        BadInput: every unknown name and wrong value of all files and flags; or a file that cannot be read.
    """
    flags = read_command_line(sys.argv[1:] if argv is None else argv)
    asked = {name: flags.values.pop(name, None) for name in OPTIONS}
    files = all_faults(*[partial(read_file, path) for path in asked["config"]])
    if not files and default_config is not None:
        files = [_file_of_script(default_config, flags)]
        _leave_out_other_model(files[0], flags)
    _leave_out_other_data_set(files, flags)
    stack = Stack([Layer(DEFAULTS, dict(defaults or {})), *files, flags])
    groups = _default_groups(cls, stack.values().get("model.architecture"))
    if asked["help"] is not None:
        _print_help(asked["help"], cls, groups, stack, default_config)
    config, stack = _build(cls, groups, stack)
    if asked["print_config"] is not None:
        print(yaml.safe_dump(asdict(config), sort_keys=False), end="")
        raise SystemExit(0)
    return config, stack


# ---- which files apply -----------------------------------------------------------------------------------------------


def _file_of_script(default_config: Path, flags: Layer) -> Layer:
    """Return the settings file of a script that applies without `--config`.

    For the user's own data it is `own_data.yaml` next to the default, or `own_data_cpu.yaml` where there is no GPU. The
    network does not decide, although the first of them needs it: a run that is resumed must find the same file.
    """
    if not _is_own_data(flags):
        return read_file(default_config)
    with gc_disabled():
        from toolkit.base.distributed import default_device  # torch, which takes seconds

    small = default_config.with_name("own_data_cpu.yaml")
    large = default_config.with_name("own_data.yaml")
    on_cpu = default_device().type == "cpu"
    if on_cpu and small.is_file():
        layer = read_file(small)
        layer.note = " (your own data, no GPU; --config chooses another file)"
    elif not on_cpu and large.is_file():
        layer = read_file(large)
        layer.note = f" (your own data, a GPU; --config {shown_path(small)} needs no network)"
    else:
        layer = read_file(default_config)
        is_of_shapes = layer.values.get("data.format") == "shapes"
        made_for = "made for the bundled shapes, not for your data; " if is_of_shapes else ""
        layer.note = f" ({made_for}--config chooses another file)"
    return layer


def _is_own_data(flags: Layer) -> bool:
    """Return whether flags name other data than the bundled shapes."""
    is_named = any(flags.values.get(name) is not None for name in ("data.path", "data.name"))
    is_format = flags.values.get("data.format") not in (None, "shapes", "auto")
    return is_named or is_format or _names_files(flags)


def _names_files(flags: Layer) -> bool:
    """Return whether `data.train` or `data.val` on the command line is a file or folder, and not the name of a split.

    A file that does not exist is recognised by its suffix.
    """
    sources = []
    for name in ("data.train", "data.val"):
        value = from_yaml(flags.values.get(name))
        sources += value if isinstance(value, list) else [value]
    for source in [source for source in sources if isinstance(source, str)]:
        has_suffix = source.lower().endswith((".json", ".yaml", ".yml", ".csv"))
        is_folder = source not in SPLITS and Path(os.path.expanduser(source)).is_dir()
        if has_suffix or is_folder:
            return True
    return False


def _leave_out_other_model(file: Layer, flags: Layer) -> None:
    """Take `model` and `loss` out of the script's own file if flags choose another architecture, or trained weights,
    which say themselves which model they are of."""
    own = file.values.get("model.architecture")
    is_other = flags.values.get("model.architecture", own) != own
    if is_other or "model.pretrained" in flags.values:
        kept = [name for name in file.values if not name.startswith(("model.", "loss."))]
        file.values = {name: file.values[name] for name in kept}
        file.note = f"{file.note} without its groups model and loss"


def _leave_out_other_data_set(files: Sequence[Layer], flags: Layer) -> None:
    """Take what files say of their data set out of them if flags name another one, and print what was taken out.

    With `--data.path` that is all of `DATA_SET`, except a `data.val` that is a share. Where `--data.train` or
    `--data.val` is a file or folder, it is the format, which then is `auto`.
    """
    dropped = ()
    if flags.values.get("data.path") is not None:
        dropped = DATA_SET
    elif _names_files(flags) and not {"data.format", "data.name"} & set(flags.values):
        dropped = ("data.format", "data.name")
    for layer in files:
        names = [name for name in dropped if name in layer.values]
        if re.fullmatch(r"0?\.\d+|[\d.]+ ?%", str(layer.values.get("data.val"))):
            names = [name for name in names if name != "data.val"]
        for name in names:
            del layer.values[name]
        if len(names) > 1 and os.environ.get("RANK", "0") == "0":
            told = f"{layer.where}: {', '.join(names)} belong to its own data set and are not used with yours"
            print(told, file=sys.stderr)


# ---- the groups of settings ------------------------------------------------------------------------------------------


def _default_groups(cls: type, architecture: Any) -> dict[str, Any]:
    """Return the groups as a script makes them, `model` with the defaults of the architecture."""
    groups = {setting.name: setting.default_factory() for setting in fields(cls)}
    for name, group in groups.items():
        if isinstance(group, DetectorOptions):
            kind = _options_of_family(type(group), str(architecture or group.architecture))
            groups[name] = group if kind is type(group) else kind()
    return groups


def _options_of_family(default: type[DetectorOptions], architecture: str) -> type[DetectorOptions]:
    """Return the options of an architecture that the script can train: one of its own family, or any `module:Class`."""
    if ":" in architecture:
        trust_class(architecture)  # a person named it, in a flag or in a settings file
        kind = options_class(architecture)
        own = [("architecture", str, architecture)]
        return make_dataclass(kind.__name__, own, bases=(kind,), namespace={"__doc__": kind.__doc__})
    family = family_of(default)
    if architecture in family:
        return options_class(architecture)
    raise BadInput(
        f"model.architecture: this script trains {', '.join(family)}, or a `module:Class` of your own, not "
        f"{architecture!r}{nearest_architecture(architecture, family)}"
    )


def _build(cls: type[Config], groups: Mapping[str, Any], stack: Stack) -> tuple[Config, Stack]:
    """Return the checked settings as an object of `cls`, and their stack, now with the defaults. Raises BadInput."""
    kinds = {name: type(group) for name, group in groups.items()}
    problems = [problem for layer in stack.layers for problem in check(layer, kinds)]
    if problems:
        raise BadInput([*problems, SHOW_ALL])
    defaults = layer_of(DEFAULTS, {name: asdict(group) for name, group in groups.items()})
    stack = Stack([defaults, *stack.layers])
    made = {name: kinds[name](**values) for name, values in nested(stack.values()).items()}
    if "model" in made:
        below = getattr(made["model"], "detector_options", None) or {}  # of a scene graph
        trust_class(below.get("architecture", ""))
        made["model"].only_given(nested(dict.fromkeys(stack.given())).get("model", {}))
        if getattr(made["model"], "masks", False) and "eval" in made:
            made["eval"].metric_for_best = _metric_of_masks(stack)
    return cls(**made), stack


def _metric_of_masks(stack: Stack) -> str:
    """Return `eval.metric_for_best` of a model with masks: segm_AP for the bbox_AP of a default, or of a file that does
    not set `model.masks`, since that was written for boxes."""
    metric = stack.values()["eval.metric_for_best"]
    giver = stack.giver("eval.metric_for_best")
    if giver and (giver.where == COMMAND_LINE or "model.masks" in giver.values):
        return metric
    return {"bbox_AP": "segm_AP", "ema/bbox_AP": "ema/segm_AP"}.get(metric, metric)


def _print_help(
    topics: list[str], cls: type, groups: Mapping[str, Any], stack: Stack, default_config: Path | None
) -> None:
    """Print the help on `topics`, and end the program with exit code 0."""
    below_flags = Stack([layer for layer in stack.layers if layer.where != COMMAND_LINE])
    sources = [layer.where for layer in stack.files()]
    families = [family_of(type(group)) for group in groups.values() if isinstance(group, DetectorOptions)]
    print(help_text(topics, cls, collect_groups(groups, below_flags), default_config, sources, sum(families, [])))
    raise SystemExit(0)
