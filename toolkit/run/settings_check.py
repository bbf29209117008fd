"""Checks every key and type in groups of settings against their dataclasses, and reports all faults at once.

It is used for settings files given on the command line, and for those in a run folder that is opened.
"""

import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from toolkit.base.number_types import WORDS
from toolkit.base.text import did_you_mean

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    **WORDS,
}


def type_faults(
    groups: Mapping, kinds: Mapping[str, type], where: str, null_is_not_given: bool = True
) -> list[str]:
    """Return a sentence for every group that is not a mapping, and for every value of the wrong type.

    Unknown groups and keys are ignored, see `key_faults`. An empty list: there are no faults.

    Args:
        groups: settings by group and key, as read from a file.
        kinds: the dataclass of each known group.
        where: name of the file for the message.
        null_is_not_given: null is valid for every setting of the group `model` except `architecture`, and means that
            the setting was not given, as in the config.yaml of a run.
    """
    problems = []
    for name in (name for name in kinds if name in groups):
        if not isinstance(groups[name], Mapping):
            found = format_value(groups[name])
            problems.append(f"{where}: {name} is {found}; expected a group of settings, `key: value`")
            continue
        hints = field_types(kinds[name])
        for key, value in groups[name].items():
            passed_over = null_is_not_given and value is None and name == "model" and key != "architecture"
            if key in hints and not passed_over:
                fault = _fault(hints[key], value)
                problems += [f"{where}: {name}.{key} {fault}"] if fault else []
    return problems


def key_faults(
    groups: Mapping, kinds: Mapping[str, type], where: str, strict: bool = True,
    elsewhere: Callable[[str], str] = lambda flag: "",
) -> list[str]:  # fmt: skip
    """Return a sentence for every unknown group and key, with the nearest known one. An empty list: there are none.

    Args:
        groups, kinds, where: see `type_faults`.
        strict: True: report every unknown name; False: only names that look like a misspelt name that is missing, for
            the file of a script that may have settings of its own.
        elsewhere: takes a flag, `--group.key`, and returns the end of the sentence about it if the setting is known in
            another place, else "".
    """
    problems = []
    missing = [name for name in kinds if name not in groups]
    for name, entries in groups.items():
        if name not in kinds:
            hint = _hint(str(name), list(kinds), missing, strict)
            problems += [f"{where}: no such group {name}{hint}"] if hint is not None else []
        elif isinstance(entries, Mapping):
            keys = [setting.name for setting in fields(kinds[name])]
            left = [key for key in keys if key not in entries]
            for key in (key for key in entries if key not in keys):
                hint = elsewhere(f"--{name}.{key}") or _hint(str(key), keys, left, strict)
                problems += [f"{where}: no such setting {name}.{key}{hint}"] if hint is not None else []
    return problems


def as_settings(groups: Mapping, kinds: Mapping[str, type]) -> dict:
    """Return a copy of the groups in which strings are converted to the types of their settings.

    YAML reads `1e-3` as a string, for example. `type_faults` must have found no fault in the groups.
    """
    made = {name: dict(entries) if isinstance(entries, Mapping) else entries for name, entries in groups.items()}
    for name in (name for name in kinds if isinstance(groups.get(name), Mapping)):
        hints = field_types(kinds[name])
        made[name] |= {
            key: plain(_parsed(hints[key], value))
            for key, value in groups[name].items()
            if key in hints and isinstance(value, str)
        }
    return made


def nearest_or_all(word: str, choices: list[str]) -> str:
    """Return the end of a sentence that suggests the choice nearest to `word`.

    If none is near, the end lists all choices if they are fewer than 20, and is "" otherwise.
    """
    listed = f"there are {', '.join(choices)}" if len(choices) < 20 else ""
    return did_you_mean(word, choices, otherwise=listed)


# Trainings compute in float32, and count in int64: what these cannot hold becomes infinite or ends a library's call.
LARGEST_FLOAT = float.fromhex("0x1.fffffep+127")
LARGEST_INT = 2**63 - 1


def nonfinite_settings(key: str, value: object) -> list[str]:
    """Return a sentence for every number in the value of the setting `key`, lists and dicts included, that is NaN, or
    that is not finite in float32 or int64."""
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{key} is {value}; expected a finite number."]
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        return [f"{key} is {value}; expected a number of at most {LARGEST_FLOAT:.1e}, the largest of float32."]
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return [f"{key} is {format_value(value)}; expected a number of at most {LARGEST_INT}."]
    if isinstance(value, dict):
        return [problem for name, item in value.items() for problem in nonfinite_settings(f"{key}.{name}", item)]
    if isinstance(value, list | tuple):
        return [problem for item in value for problem in nonfinite_settings(key, item)]
    return []


def not_text(key: str, value: object) -> list[str]:
    """Return a sentence for every text in the value of the setting `key` that is not valid UTF-8."""
    if isinstance(value, dict):
        return [problem for name, item in value.items() for problem in not_text(f"{key}.{name}", item)]
    if isinstance(value, list | tuple):
        return [problem for item in value for problem in not_text(key, item)]
    if not isinstance(value, str | PurePath):
        return []
    written = str(value).encode("utf-8", errors="replace").decode()
    if written == str(value):
        return []
    return [f"{key} is {written!r}, where ? stands for bytes that are not UTF-8; expected text. Rename it."]


def plain(value: object) -> object:
    """Return numbers and texts of jsonargparse's checked types as `int`, `float` or `str`, alone or in a list, and any
    other value as it is.

    Checkpoints, which hold settings such as an optimizer's `lr`, may not hold the checked types.
    """
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def format_value(value: object) -> str:
    """Format a value for a sentence, on one line of at most 80 characters."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = "a number of thousands of digits, or a value that has one"
    text = " ".join(text.split()) or '""'
    return text if len(text) <= 80 else f"{text[:77]}..."


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _fault(hint: Any, value: object) -> str:
    """Return the end of the sentence about a value that is not of a type; "" if it is."""
    expected = f"is {format_value(value)}; expected {describe_type(hint)}"
    sides = re.fullmatch(r"(\d+) ?[x×*,] ?(\d+)", value) if isinstance(value, str) else None
    if sides and "list" in describe_type(hint):  # other programs write width x height
        expected += f". A height and a width are a list: [{sides[2]}, {sides[1]}]"
    if value is None:  # which jsonargparse takes for any type
        return "" if hint is Any or type(None) in (hint, *get_args(hint)) else expected
    try:
        beyond = nonfinite_settings("", _parsed(hint, value))
    except (ArgumentError, OverflowError):  # OverflowError: a whole number beyond those of float
        return expected
    if not beyond:
        return ""
    limit = beyond[0].partition(" of ")[2]
    return f"{expected}, {limit}".removesuffix(".") if limit else expected


def _parsed(hint: Any, value: object) -> object:
    """Return the value as the command line takes it. Raises ArgumentError."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser.parse_object({"value": value}).value


def describe_type(hint: Any) -> str:
    """Describe the values of a type: "a whole number above 0 or null"."""
    arguments = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_type, arguments))
    if list in (hint, origin):
        return f"a list ({describe_type(arguments[0])} each)" if arguments and arguments[0] is not Any else "a list"
    if dict in (hint, origin):
        last = arguments[-1] if arguments else Any
        return "a mapping" if last is Any else f"a mapping (of names to {describe_type(last)})"
    return _WORDS.get(hint, str(getattr(hint, "__name__", hint)))


def _hint(word: str, choices: list[str], missing: Iterable[str], strict: bool) -> str | None:
    """Return the name that was probably meant: one that is missing, else any; None if the word is right."""
    typed_wrong = did_you_mean(word, missing, cutoff=0.8)
    if typed_wrong:
        return typed_wrong
    return nearest_or_all(word, choices) if strict else None
