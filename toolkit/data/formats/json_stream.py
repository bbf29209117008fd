"""Iteration over the items of lists in a large JSON object, with memory for a window of text instead of the file.

Python's own scanner reads each item, so numbers, NaN and strings are what `json.loads` gives.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.data.formats.look_alikes import about_look_alike
from toolkit.data.layout import Layout

WINDOW_CHARACTERS = 2**20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")
_NEXT = re.compile(r"[ \t\r\n]*,[ \t\r\n]*(?=[{\[\"\d-])")  # up to the first sign of another item
_DECODER = json.JSONDecoder()
JSON_TYPE_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "truth value"}


def stream_lists(path: Path, window: int = WINDOW_CHARACTERS) -> Iterator[tuple[str, object]]:
    """Yield (key, item) for each item of each list in the top-level object of a file.

    An empty list, and a value that is not a list, is yielded whole, as (key, `WholeValue(value)`). A byte order mark is
    skipped.

    window: characters that are read at a time.

    Raises BadInput, with line and column, if the file is not valid JSON; also if it holds no object or is not UTF-8.
    """
    with open(path, "rb") as file:
        text = _Text(path, file, window)
        if text.is_empty():
            raise BadInput(f"{path}: empty file")
        if text.next_sign() != "{":
            look_alike = about_look_alike(Layout(Path(path)))
            if look_alike:
                raise BadInput(f"{path}: {look_alike}")
            kind = JSON_TYPE_NAMES.get(type(text.value()), "null")
            kind += " (a list is the form of a results file)" if kind == "list" else ""
            raise BadInput(f"{path}: expected an object with `images`, `annotations`, `categories`; found a {kind}")
        text.at += 1
        if text.next_sign() == "}":
            return
        while True:
            key = text.value()
            if not isinstance(key, str):
                raise text.error("Expecting property name enclosed in double quotes")
            text.expect(":")
            if text.next_sign() == "[":
                yield from ((key, item) for item in _items(text))
            else:
                yield key, WholeValue(text.value())
            if text.next_sign() == "}":
                return
            text.expect(",")


@dataclass(frozen=True)
class WholeValue:
    """A top-level value without items: an empty list, or a value that is not a list."""

    value: object


def items_of(path: Path, keys: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yield (key, item) for each item of the lists under these keys in the top-level object of a file."""
    for key, item in stream_lists(path):
        if key in keys and not isinstance(item, WholeValue):
            yield key, item


def _items(text: "_Text") -> Iterator[object]:
    text.at += 1
    if text.next_sign() == "]":
        text.at += 1
        yield WholeValue([])
        return
    while True:
        yield from _items_in_window(text)
        yield text.value()
        separator = _NEXT.match(text.text, text.at)
        if separator:
            text.at = separator.end()
            continue
        if text.next_sign() == "]":
            text.at += 1
            return
        text.expect(",")


def _items_in_window(text: "_Text") -> Iterator[object]:
    """Yield the next items that lie in the window with what follows each of them: most items, at little cost."""
    while True:
        try:
            value, end = _DECODER.scan_once(text.text, text.at)
        except (StopIteration, ValueError, RecursionError):  # cut off or faulty: `value` tells
            return
        separator = _NEXT.match(text.text, end)
        if not separator:
            return
        text.at = separator.end()
        yield value


class _Text:
    """A window on a file's text, from `at` on; `lines` and `column` are those of the window's start."""

    def __init__(self, path: Path, file, window: int):
        self.path = path
        self.file = file
        self.window = window
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text = ""
        self.at = 0
        self.lines = 1
        self.column = 1
        self.ended = False
        self.read = 0

    def is_empty(self) -> bool:
        """Consume white space; return True at the end of the file."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or not self.more():
                return self.at == len(self.text)

    def next_sign(self) -> str:
        """Peek at the next non-whitespace character."""
        if self.is_empty():
            raise self.error("the file ends too early")
        return self.text[self.at]

    def expect(self, sign: str) -> None:
        """Consume one character."""
        if self.next_sign() != sign:
            raise self.error(f"Expecting '{sign}' delimiter")
        self.at += 1

    def value(self) -> object:
        """Consume one JSON value, reading on until it ends inside the window."""
        if self.text[self.at : self.at + 1] not in ("{", "["):
            self.next_sign()
        grow = 1
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                # a number at the end of the window may go on
                if self.ended or end < len(self.text) and self.text[end] not in ".eE":
                    self.at = end
                    return value
                fault = None
            except json.JSONDecodeError as error:
                fault = error.pos, error.msg  # not the error, which would keep its text alive with this frame
            except RecursionError as error:
                raise self.error("nested too deep") from error
            except ValueError as error:  # of Python, about a whole number of thousands of digits
                raise self.error(f"not a number that can be read ({error})") from error
            if not self.more(grow):
                if fault is None:
                    continue
                self.at, message = fault
                raise self.error(message)
            grow *= 2

    def more(self, times: int = 1) -> bool:
        """Read more text and drop what was consumed; return False at the end of the file."""
        if self.ended:
            return False
        self.lines, self.column = self._position()
        data = self.file.read(self.window * times)
        try:
            fresh = self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise BadInput(f"{self.path}: not UTF-8 text (byte {self.read + error.start})") from error
        self.read += len(data)
        self.ended = not data
        self.text = self.text[self.at :] + fresh
        self.at = 0
        return bool(data)

    def _position(self) -> tuple[int, int]:
        """Return line and column of what comes next, from 1."""
        consumed = self.text[: self.at]
        breaks = consumed.count("\n")
        if breaks:
            return self.lines + breaks, len(consumed) - consumed.rfind("\n")
        return self.lines, self.column + len(consumed)

    def error(self, message: str) -> BadInput:
        line, column = self._position()
        return BadInput(f"{self.path}: invalid JSON at line {line}, column {column}: {message}")
