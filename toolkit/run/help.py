"""The answers to `--help` of a training script: a first screen, every setting, one group, or single settings.

Texts and types come from the dataclasses of the settings. The values shown as defaults are those that apply if no flag
sets another: from the script, its default configuration, and the files given by `--config`.
"""

import ast
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import ROOT, shown_path
from toolkit.base.text import did_you_mean
from toolkit.run.layers import Stack
from toolkit.run.setting_types import describe_type, field_types

# The settings on the first screen, which everybody sets first, by heading and each with one sentence: the dataclass has
# the whole text. Those that the chosen detector does not have are left out.
FIRST_SETTINGS = {
    "Your data": {
        "data.path": "Folder of your data: VOC, YOLO, COCO, CSV, datasets.",
        "data.format": "auto recognises it; shapes is the bundled data set.",
        "data.val": "Validation split, or the share to hold out (0.2).",
        "data.image_size": "Side of the images in pixels, or [height, width].",
        "data.batch_size_per_device": "Images at a time on a device; fewer need less memory.",
    },
    "The detector": {
        "model.architecture": "--model.architecture NAME --help shows its defaults.",
        "model.mode": "predcls, sgcls or sgdet: what is given with an image.",
        "model.head": "Relation head, which predicts the predicates of pairs.",
        "model.detector": "Trained detector to build on: a run, or its final/.",
        "model.backbone": "timm model that computes the feature maps.",
        "model.pretrained": "Trained weights to start from: hub name, folder or run.",
    },
    "Training": {
        "run.epochs": "Passes over the training data.",
        "run.max_minutes": "Ends after this many minutes, unless the epochs end first.",
        "optim.lr": "Learning rate; optim.backbone_lr sets the backbone's.",
        "run.precision": "float32 (no), bf16, fp16, or auto: what suits the device.",
    },
    "The run": {
        "run.name": "Name of the run and of its folder.",
        "run.output_dir": "Folder of all run folders.",
        "run.resume": "latest: the newest checkpoint; starts fresh if there is none.",
        "run.tracker": "wandb, tensorboard, mlflow, ..., in addition to metrics.jsonl.",
    },
}
MAX_COLUMNS = 100  # columns at most; in a narrower terminal its own, but at least
MIN_COLUMNS = 80
MAX_DEFAULT_COLUMNS = 16  # columns of a value on the first screen; a longer one takes a line of its own
EVERY_SETTING = "--help all shows every setting."
OPTIONS = """\
  --config FILE.yaml
      YAML file with any of the settings below, as `group: {key: value}`. Flags win over files; of
      several files the last one wins.
  --print_config
      Print all settings with the values that would be used, as YAML, and exit.
  --help [all | GROUP | SETTING ...]
      Without a word: what everybody sets first. `--help optim.lr` shows all settings that
      begin so.
"""


@dataclass
class Setting:
    """A setting.

    Attributes:
        name: `group.key`.
        kind: its type.
        value: the value that applies if no flag sets another.
        text: its description.
    """

    name: str
    kind: Any
    value: object
    text: str


@dataclass
class Group:
    """A group of settings. text: its description."""

    name: str
    text: str
    settings: list[Setting]


def collect_groups(groups: Mapping[str, Any], stack: Stack) -> list[Group]:
    """Return the groups with their settings and the values that apply.

    Args:
        groups: the dataclass object of each group, with the defaults.
        stack: what overrides the defaults.
    """
    given = stack.values()
    made = []
    for name, group in groups.items():
        kind = type(group)
        texts = field_texts(kind)
        settings = []
        for key, hint in field_types(kind).items():
            full_name = f"{name}.{key}"
            value = given.get(full_name, getattr(group, key))
            settings.append(Setting(full_name, hint, value, texts.get(key, "")))
        about = " ".join((kind.__doc__ or "").split())
        made.append(Group(name, about, settings))
    return made


def field_texts(kind: type) -> dict[str, str]:
    """Return the string literal below each field of a dataclass by the field's name, inherited fields included."""
    texts = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            texts |= _texts_in_source(base)
    return texts


def _texts_in_source(kind: type) -> dict[str, str]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    except (KeyError, OSError, TypeError):  # made at run time, or without its source
        return {}
    texts = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name != kind.__name__:
            continue
        for line, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(line, ast.AnnAssign) and is_text:
                texts[line.target.id] = " ".join(str(below.value.value).split())
    return texts


def help_text(
    topics: Sequence[str],
    cls: type,
    groups: Sequence[Group],
    default_config: Path | None,
    sources: Sequence[str],
    architectures: Sequence[str],
) -> str:
    """Return what `--help` prints, at most `MAX_COLUMNS` columns wide.

    Args:
        topics: the words after `--help`: "all", names of groups, and beginnings of names of settings. Without any, the
            first screen is returned.
        cls: the dataclass of all settings, defined in the script.
        groups: result of `collect_groups`.
        default_config: YAML file that applies if no `--config` is given.
        sources: the files that the shown values come from.
        architectures: the possible values of `--model.architecture`.

    Raises:
        BadInput: a topic is neither a group nor the beginning of a setting; the message lists the groups.
    """
    width = max(MIN_COLUMNS, min(MAX_COLUMNS, shutil.get_terminal_size((MAX_COLUMNS, 0)).columns))
    if not topics:
        return _first_screen(cls, groups, default_config, sources, architectures, width)
    shown = list(groups) if "all" in topics else _choose_groups(groups, topics)
    parts = [_group_text(group, width) for group in shown]
    if "all" in topics:
        usage = f"usage: {_start_command()} [--config FILE.yaml] [--group.key value ...]"
        origin = textwrap.fill(_origin(sources, default_config), width, break_on_hyphens=False)
        parts = [usage, *filter(None, [origin]), OPTIONS.rstrip(), *parts]
    else:
        parts.append(EVERY_SETTING)
    return "\n\n".join(parts)


def _choose_groups(groups: Sequence[Group], topics: Sequence[str]) -> list[Group]:
    """Return the groups of these names, and of others the settings that begin with one of the topics."""
    unknown = list(topics)
    chosen = []
    for group in groups:
        kept = []
        for setting in group.settings:
            meant = [word for word in topics if _is_meant(setting, group, word)]
            unknown = [word for word in unknown if word not in meant]
            kept += [setting] if meant else []
        if kept:
            chosen.append(Group(group.name, group.text, kept))
    if unknown:
        names = [group.name for group in groups]
        keys = [setting.name for group in groups for setting in group.settings]
        short = [key.partition(".")[2] for key in keys]
        hint = did_you_mean(unknown[0], [*names, *keys, *short])
        problem = f"--help {unknown[0]}: no such group or setting{hint}"
        raise BadInput([problem, f"The groups are {', '.join(names)}. {EVERY_SETTING}"])
    return chosen


def _is_meant(setting: Setting, group: Group, topic: str) -> bool:
    """Return whether a topic is the group, the setting without its group, or a beginning of its whole name."""
    key = setting.name.partition(".")[2]
    return topic in (group.name, key) or "." in topic and setting.name.startswith(topic)


def _group_text(group: Group, width: int) -> str:
    lines = textwrap.wrap(f"{group.name}: {group.text}", width)
    for setting in group.settings:
        head = f"--{setting.name}  {describe_type(setting.kind)}; default {_as_typed(setting.value)}"
        lines += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        lines += textwrap.wrap(setting.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _first_screen(
    cls: type,
    groups: Sequence[Group],
    default_config: Path | None,
    sources: Sequence[str],
    architectures: Sequence[str],
    width: int,
) -> str:
    title = (getattr(sys.modules.get(cls.__module__), "__doc__", None) or cls.__doc__ or "").strip().partition("\n")[0]
    settings = {setting.name: setting for group in groups for setting in group.settings}
    sections = {
        heading: {name: text for name, text in texts.items() if name in settings}
        for heading, texts in FIRST_SETTINGS.items()
    }
    names = [name for texts in sections.values() for name in texts]
    values = {name: _as_typed(settings[name].value) for name in names}
    name_width = max(map(len, names), default=0) + 2
    value_width = max((len(value) for value in values.values() if len(value) <= MAX_DEFAULT_COLUMNS), default=0)
    indent = " " * (2 + name_width + 2 + value_width + 2)
    lines = [*textwrap.wrap(title, width), "", *_example_commands(default_config, width), ""]
    lines.append(f"{'What to set first':{2 + name_width}}  {'default':{value_width}}  (null: not set)")
    for heading, texts in sections.items():
        lines += ["", heading] if texts else []
        for name, text in texts.items():
            value = values[name]
            head = f"  {'--' + name:{name_width}}  {value:{value_width}}  "
            if len(value) > value_width:
                lines.append(head.rstrip())
                head = indent
            if name == "model.architecture" and architectures:
                names_of_all = f"{', '.join(architectures)}."
                text = f"{names_of_all} {text}" if len(architectures) > 1 else names_of_all
            lines += textwrap.wrap(text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    group_names = ", ".join(group.name for group in groups)
    notes = [
        _origin(sources, default_config),
        "--config FILE.yaml reads settings from a file; flags win. --print_config prints all that apply.",
        f"--help data shows one group of {group_names}; --help lr shows one setting.",
        EVERY_SETTING,
    ]
    lines.append("")
    for note in filter(None, notes):
        lines += textwrap.wrap(note, width, break_on_hyphens=False)
    return "\n".join(lines)


def _example_commands(default_config: Path | None, width: int) -> list[str]:
    """Return three commands with what each does: on bundled data, on your own data, and continuing after a kill."""
    start = _start_command()
    own_data = None if default_config is None else default_config.with_name("own_data.yaml")
    config = f" --config {shown_path(own_data)}" if own_data is not None and own_data.is_file() else ""
    commands = {
        "": "train on the bundled data, minutes on a CPU" if default_config is not None else "train",
        f" --data.path DIR{config}": "train on the images in DIR",
        " --run.resume latest": "go on after a kill or a preemption",
    }
    lines = []
    for arguments, purpose in commands.items():
        command = f"  {start}{arguments}"
        if len(command) > width:
            command = command.replace(" --config", " \\\n      --config")
        lines += [f"  # {purpose}", *command.split("\n")]
    return lines


def _start_command() -> str:
    """Return how the script is started: as now by Accelerate's launcher or by Python; from a folder that does not hold
    it, one of this project by `detect`."""
    script = Path(os.path.abspath(sys.argv[0]))
    if script.parent == ROOT / "scripts" and Path.cwd() not in script.parents:
        return f"detect train {script.stem.removeprefix('train_')}"
    launcher = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "python"
    return f"{launcher} {shown_path(script)}"


def program_command(name: str) -> str:
    """Return how a program beside training is started here, such as `python scripts/predict.py`; from a folder that
    does not hold it, by `detect`."""
    script = ROOT / "scripts" / f"{name}.py"
    return f"python {shown_path(script)}" if Path.cwd() in script.parents else f"detect {name}"


def _origin(sources: Sequence[str], default_config: Path | None) -> str:
    """Return a sentence on the files that the shown values are of; "" where there are none."""
    if not sources:
        return ""
    unless = ", which applies unless --config is given" if list(sources) == [str(default_config)] else ""
    return f"The defaults are those of {', '.join(map(shown_path, sources))}{unless}."


def _as_typed(value: object) -> str:
    """Return a value as it is written on the command line and in a settings file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or '""'
    if not isinstance(value, list | dict):
        return str(value)
    try:
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    except yaml.YAMLError:  # it holds something that a settings file cannot
        return str(value)
