"""The types of settings: what a value of a file or a flag becomes, and how a sentence describes a type.

`as_type` is the one check of a value. It knows bool, int, float, str, None, Any, Literal, unions, lists, dicts, and the
types with a range of `toolkit.base.number_types`.
"""

import json
import math
import re
import types
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from toolkit.base.files import parse_yaml

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}
# Trainings compute in float32, and count in int64: what these cannot hold becomes infinite or ends a library's call.
LARGEST_FLOAT = float.fromhex("0x1.fffffep+127")
LARGEST_INT = 2**63 - 1


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {setting.name: hints[setting.name] for setting in fields(kind)}


def as_type(hint: Any, value: Any) -> Any:
    """Return a value as its type has it: the text of a number, of true or false, of a list or of a mapping becomes that
    value.

    A value of a type with a range becomes a plain `int`, `float` or `str`. The given value is not changed.

    Raises ValueError, with the end of a sentence, if the value is not of the type, or has numbers or texts that a
    training cannot use, see `_unusable`.
    """
    try:
        made = _converted(hint, value)
    except (ValueError, TypeError, OverflowError) as error:
        read = from_yaml(value)
        shown = read if isinstance(read, list | dict) else value
        expected = f"expected {describe_type(hint)}{_as_sides(hint, value)}"
        raise ValueError(f"is {format_value(shown)}; {expected}") from error
    fault = _unusable(hint, made)
    if fault:
        raise ValueError(fault)
    return made


def _unusable(hint: Any, value: Any) -> str:
    """Return the end of a sentence on the first number that is not finite in float32 or int64, or the first text that
    is not UTF-8, in a value, its lists and mappings included; "" if there is none."""
    if isinstance(value, dict):
        return next(filter(None, (_unusable(hint, item) for item in [*value, *value.values()])), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (_unusable(hint, item) for item in value)), "")
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {format_value(value)}; expected {describe_type(hint)}"
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        most = f"at most {LARGEST_FLOAT:.1e}, the largest of float32"
        return f"is {format_value(value)}; expected {describe_type(hint)}, {most}"
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"is {format_value(value)}; expected {describe_type(hint)}, at most {LARGEST_INT}"
    if isinstance(value, str):
        written = value.encode("utf-8", errors="replace").decode()
        if written != value:
            return f"is {written!r}, where ? stands for bytes that are not UTF-8; expected text. Rename it"
    return ""


def _as_sides(hint: Any, value: Any) -> str:
    """Return the list that "640x480" stands for, as a sentence, if the type has lists: other programs write width x
    height."""
    sides = re.fullmatch(r"(\d+) ?[x×*,] ?(\d+)", value) if isinstance(value, str) else None
    if sides is None or "list" not in describe_type(hint):
        return ""
    return f". A height and a width are a list: [{sides[2]}, {sides[1]}]"


def from_yaml(value: Any) -> Any:
    """Return a text as YAML reads it; an empty text, a text that is not YAML, and any other value as it is."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse_yaml(value)
    except yaml.YAMLError:
        return value


def _converted(hint: Any, value: Any) -> Any:
    """Return a value as its type has it. Raises ValueError, TypeError or OverflowError if it is not of the type."""
    kind = get_origin(hint) or hint
    inner = get_args(hint)
    if kind is Any:
        return value
    if kind in (Union, types.UnionType):
        return _first_fitting(inner, value)
    if kind is Literal:
        return inner[inner.index(value)]
    if isinstance(kind, type) and issubclass(kind, (int, float)) and kind is not bool:
        return _as_number(kind, value)
    if not (isinstance(kind, type) and issubclass(kind, str)):
        value = from_yaml(value)
    if hasattr(kind, "fits") and isinstance(value, str) and kind.fits(value):  # a text of a certain form
        return value
    if not isinstance(value, kind):
        raise ValueError
    if kind is list and inner:
        return [_converted(inner[0], item) for item in value]
    if kind is dict and inner:
        return {key: _converted(inner[1], item) for key, item in value.items()}
    return value


def _first_fitting(kinds: Sequence[Any], value: Any) -> Any:
    """Return a value as the first of several types has it."""
    read = from_yaml(value)
    containers = [get_origin(kind) or kind for kind in kinds]
    if isinstance(read, list | dict) and type(read) in containers:
        value = read  # `[a, b]` is a list where a list may be, and not a text
    for kind in kinds:
        try:
            return _converted(kind, value)
        except (ValueError, TypeError, OverflowError):
            continue
    raise ValueError


def _as_number(kind: type, value: Any) -> float:
    """Return a number of a type, which may have a range. Raises ValueError if it would be rounded, or is outside."""
    number = int(value) if issubclass(kind, int) else float(value)
    is_rounded = isinstance(value, float) and number != value
    is_inside = kind.fits(number) if hasattr(kind, "fits") else True
    if isinstance(value, bool) or is_rounded or not is_inside:
        raise ValueError
    return number


def format_value(value: object) -> str:
    """Format a value for a sentence, on one line of at most 80 characters."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = "a number of thousands of digits, or a value that has one"
    text = " ".join(text.split()) or '""'
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe_type(hint: Any) -> str:
    """Describe the values of a type: "a whole number above 0 or null"."""
    arguments = get_args(hint)
    kind = get_origin(hint) or hint
    if kind is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if kind in (Union, types.UnionType):
        return " or ".join(map(describe_type, arguments))
    inner = describe_type(arguments[-1]) if arguments and arguments[-1] is not Any else ""
    if kind is list:
        return f"a list ({inner} each)" if inner else "a list"
    if kind is dict:
        return f"a mapping (of names to {inner})" if inner else "a mapping"
    if hasattr(hint, "fits"):
        return hint.words
    return _WORDS.get(hint, str(getattr(hint, "__name__", hint)))
