"""Descriptions of the JSON values that a file should hold, and a sentence for every value that does not match."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolkit.base.text import shown

MAX_EXACT_INTEGER = 2**53  # every whole number up to it has a float64 of its own
MAX_SEED = 2**64


class Kind(NamedTuple):
    """A kind of JSON value, such as "a text".

    words: its name in messages. fits: function that returns whether a value is of this kind.
    """

    words: str
    fits: Callable[[object], bool]


@dataclass(frozen=True)
class Each:
    """The description of a list or a mapping whose values are all of the same kind.

    kind: `list` or `dict`. of: the description of every value (`Kind`, `Each`, `Keys` or `OrNull`). size: the number of
    values that is expected; None: any number.
    """

    kind: type
    of: Any
    size: int | None = None


@dataclass(frozen=True)
class Keys:
    """The description of a mapping by its keys; the values of all other keys may be anything.

    needed: descriptions of values by key, for keys that must exist. known: the same for keys that may be missing.
    """

    needed: Mapping[str, Any]
    known: Mapping[str, Any]


@dataclass(frozen=True)
class OrNull:
    """The description of a value that is null, or matches the description `of`."""

    of: Any


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return True
    return _is_whole(value) and abs(value) <= MAX_EXACT_INTEGER


def _is_id(value: object) -> bool:
    if isinstance(value, str):
        return True
    return _is_whole(value) and abs(value) < 2**63


def one_of(*values: str) -> Kind:
    """Return a `Kind` that only these texts fit."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def whole(least: int, most: int = MAX_EXACT_INTEGER) -> Kind:
    """Return a `Kind` that the whole numbers from `least` to `most` fit, both included."""
    return Kind(
        f"a whole number from {least}",
        lambda value: _is_whole(value) and least <= value <= most,
    )


TEXT = Kind("a text", lambda value: isinstance(value, str))
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
# of a step -1: there is none yet
COUNT = whole(0)
POSITIVE = whole(1)
STEP_OR_MINUS_ONE = whole(-1)
NUMBER = Kind("a finite number", lambda value: _is_number(value) and math.isfinite(value))
DURATION = Kind("a number from 0", lambda value: _is_number(value) and 0 <= value < math.inf)
FACTOR = Kind("a number above 0", lambda value: _is_number(value) and 0 < value < math.inf)
ANY_NUMBER = Kind("a number", _is_number)  # of what was measured, which may be NaN
ID = Kind("a whole number or a text", _is_id)
TEXTS = Each(list, TEXT)


def faults_of(value: object, expected: Any, file: str, where: str = "") -> Iterator[str]:
    """Yield one sentence for each place in `value` that does not match the description `expected`.

    expected: a `Kind`, `Each`, `Keys` or `OrNull`. file: name of the file that holds the value, for the sentences.
    where: the keys that lead to the value in the file, joined by dots; "" for the whole content.
    """
    if isinstance(expected, OrNull):
        if value is not None:
            yield from faults_of(value, expected.of, file, where)
        return
    if isinstance(expected, Kind):
        if not expected.fits(value):
            yield _other(value, expected.words, file, where)
        return
    kind = expected.kind if isinstance(expected, Each) else dict
    size = getattr(expected, "size", None)
    other_kind = not isinstance(value, kind)
    if other_kind or size is not None and len(value) != size:
        words = "a mapping" if kind is dict else "a list"
        if size is not None:
            words = f"{words} of {size}"
        yield _other(value, words, file, where)
        return
    if isinstance(expected, Keys):
        for key, of_key in (*expected.needed.items(), *expected.known.items()):
            if key in value:
                yield from faults_of(value[key], of_key, file, f"{where}.{key}".removeprefix("."))
            elif key in expected.needed:
                yield f"{file} has no {where}.{key}".replace(" .", " ")
        return
    items = value.items() if kind is dict else enumerate(value)
    for key, item in items:
        yield from faults_of(item, expected.of, file, f"{where}.{shown(key, 40)}")


def _other(value: object, words: str, file: str, where: str) -> str:
    if isinstance(value, int) and abs(value) > MAX_SEED:
        return f"{where} in {file} is a whole number beyond all bounds; expected {words}"
    return f"{where or 'all'} in {file} is {str(value)[:60]!r}; expected {words}"
