"""The flags of every program, found in its parser or its dataclasses, and the faults that their values can have."""

import argparse
import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from calling import Call, main_of

from toolkit.index import DETECTORS
from toolkit.models import DetectorOptions, options_class
from toolkit.run.setting_types import describe_type, field_types

# Values that stand where another one is meant, by what is wrong with them; None: there is no value.
FAULTS = {
    "missing": None,
    "empty": "",
    "a text": "three",
    "a list": "[1, a, {b: null}]",
    "half a list": "[1, 2",
    "negative": "-1",
    "zero": "0",
    "huge": "9" * 25,
    "beyond float32": "1e39",
    "nan": "nan",
    "infinite": "inf",
    "nonexistent": "nowhere/at/all.json",
    "a file": "a_file.txt",
    "a folder": "a_folder",
    "no home": "~nobody_of_this_name/x",
    "odd letters": "näh \u202e☃ 'x",
    "not UTF-8": "a\udcff",
}
NOT_NUMBERS = [fault for fault in FAULTS if fault not in ("negative", "zero", "a list")]
# Training script -> the folder of its family of detectors.
TRAINING = {
    "train_detr": "detr",
    "train_faster_rcnn": "faster_rcnn",
    "train_sgg": "scene_graphs",
    "train_ssd": "ssd",
    "train_yolov3": "yolov3",
}


class Case(NamedTuple):
    """An argument of a program with a fault: the name of the argument, the fault, its value, and the call.

    is_cheap: the parser decides alone whether the value can be used.
    """

    name: str
    fault: str
    value: str | None
    call: Call
    is_cheap: bool = True


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser of a program, which makes it when it is asked for help."""
    made = []
    remember = lambda parser, *_: made.append(parser)  # noqa: E731
    with mock.patch.object(argparse.ArgumentParser, "print_help", remember), contextlib.suppress(SystemExit):
        main_of(program)(["--help"])
    return made[0]


def cases_of(program: str, base: Mapping[str, Sequence[str]]) -> Iterator[Case]:
    """Yield each argument of a program with each fault.

    base: the words of the arguments that every call needs, by name; the call with these alone is a good one.
    """
    for action in parser_of(program)._actions:
        name = (action.option_strings or [action.dest])[0]
        if action.dest == "help":
            continue
        if action.nargs == 0:
            yield Case(name, "a value", "yes", Call(program, (*_argv(base), f"{name}=yes")))
            continue
        shown = name if action.option_strings else action.metavar or name
        is_cheap = action.choices is not None or action.type not in (None, Path)
        count = action.nargs if isinstance(action.nargs, int) else 1
        for fault, value in FAULTS.items():
            if value is None and not action.option_strings:
                continue
            others = {other: words for other, words in base.items() if other != name}
            words = {**base, name: [value] * count} if value is not None else {**others, name: []}
            yield Case(shown, fault, value, Call(program, _argv(words)), is_cheap)


def open_ended_cases(program: str, base: Mapping[str, Sequence[str]], name: str) -> Iterator[Case]:
    """Yield the flag `name`, of a kind that the parser of the program does not list, with each fault."""
    for fault, value in FAULTS.items():
        yield Case(name, fault, value, Call(program, _argv({**base, name: [] if value is None else [value]})))


def _argv(words_by_name: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return positional arguments, and then the flags with their values."""
    files = [word for name, words in words_by_name.items() if not name.startswith("-") for word in words]
    flags = [word for name, words in words_by_name.items() if name.startswith("-") for word in (name, *words)]
    return (*files, *flags)


def shared_settings() -> dict[str, object]:
    """Return the type of each setting that scripts have beside those of the model, by its name `group.key`."""
    config = importlib.import_module("train_sgg").Config()
    groups = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    return {
        f"{group}.{key}": hint
        for group, kind in groups.items()
        if not issubclass(kind, DetectorOptions)
        for key, hint in field_types(kind).items()
    }


def model_settings(architecture: str) -> dict[str, object]:
    """Return the type of each setting of an architecture but its name, by `model.key`."""
    hints = field_types(options_class(architecture))
    return {f"model.{key}": hint for key, hint in hints.items() if key != "architecture"}


def script_of(architecture: str) -> str:
    """Return the training script of an architecture."""
    folder = DETECTORS[architecture][1].split(".")[2]
    return next(script for script, family in TRAINING.items() if family == folder)


def takes_text(hint: object) -> bool:
    return any(word in describe_type(hint) for word in ("text", "one of", "mapping", "true", "steps or epochs"))
