"""Safe display of untrusted text, such as names of classes and files, and messages.

Text is escaped, so that it cannot control a terminal or a page; printing goes on without errors after the console has
been closed.
"""

import contextlib
import difflib
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

JOINERS = "\u200c\u200d"  # invisible, and part of words and emoji
RIGHT_TO_LEFT = ("R", "AL", "AN")
ISOLATE = "\u2068"
END_ISOLATE = "\u2069"
# Text that a spreadsheet would compute instead of showing it.
FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in r"\`*_{}[]<>()#!|$~&:@."})


def escaped(text: object, limit: int = 80) -> str:
    """Return `text` on one line, in at most `limit` columns (the middle of a longer one becomes "...").

    Control characters, ANSI sequences, line ends, halves of surrogate pairs and marks that turn the direction of text
    are written as Python does (`\\n`, `\\x1b`, `\\u202e`); every kind of space is a space. Letters of all scripts and
    emoji stay.
    """
    text = str(text)
    if len(text) > 8 * limit:  # a name of megabytes takes no time
        head = "".join(map(_visible, text[: 4 * limit]))
        tail = "".join(map(_visible, text[-4 * limit :]))
    else:
        head = "".join(map(_visible, text))
        tail = head
        if columns(head) <= limit and len(head) <= 3 * limit:
            return head
    beginning = _first(head, limit - limit // 3 - 3)
    ending = _first(tail[::-1], limit // 3)[::-1]
    return f"{beginning}...{ending}"


def in_utf_8(name: str) -> str:
    """Return a file name as text that can be encoded in UTF-8: bytes of the name that are not UTF-8 become U+FFFD."""
    return name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def as_cell(value: object) -> object:
    """Return a value for a cell of a CSV file; an apostrophe before a text that is a `FORMULA` makes it plain text."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def shown(text: object, limit: int = 80) -> str:
    """Return `escaped(text, limit)`, between Unicode isolates if it has right-to-left letters.

    The isolates keep such text from changing the order of numbers and words around it.
    """
    text = escaped(text, limit)
    turns = any(unicodedata.bidirectional(letter) in RIGHT_TO_LEFT for letter in text)
    return f"{ISOLATE}{text}{END_ISOLATE}" if turns else text


def in_markdown(text: object, limit: int = 80) -> str:
    """Return `shown(text, limit)` for a line or a table cell of Markdown.

    Every character that could begin markup, HTML, mathematics or a link is escaped by a backslash.
    """
    return shown(text, limit).translate(MARKDOWN)


def as_code(text: object, limit: int = 80) -> str:
    """Return `shown(text, limit)` as code in a line of Markdown: all letters stay, and none is read as markup."""
    text = shown(text, limit)
    longest = max(map(len, re.findall("`+", text)), default=0)
    marks = "`" * (longest + 1)
    # Markdown removes one space on each side.
    needs_space = "`" in text or text != text.strip() or not text
    space = " " if needs_space else ""
    return f"{marks}{space}{text}{space}{marks}"


def in_plot(text: object, limit: int = 40) -> str:
    """Return `shown(text, limit)` as a label of matplotlib.

    `$` is escaped, and a space is put before a leading `_`, because matplotlib hides labels that begin with one.
    """
    text = shown(text, limit).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def columns(text: str) -> int:
    """Return the number of columns that `text` takes in a terminal: 2 for wide letters, 0 for combining marks."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


class _Lasting:
    """A stream of the console that accepts everything and drops what it can no longer print."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())  # also for text in its buffer, and for child processes


@contextlib.contextmanager
def lasting_console() -> Iterator[None]:
    """Let no failure of printing end the program inside the block.

    After the reader has gone away (`| head -1`, a closed terminal) or the disk below `> file` is full, nothing is
    printed; letters that the encoding of the console lacks are escaped.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (stream and _Lasting(stream) for stream in before)  # None under pythonw
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of this project inside the block as `warning: ...`, without Python's path and line of source."""
    before = warnings.formatwarning
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def plain(message: Warning, category: type, filename: str, lineno: int, line: str | None = None) -> str:
        is_ours = filename.startswith(package)
        return f"warning: {message}\n" if is_ours else before(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


def _visible(letter: str) -> str:
    if letter.isprintable() or letter in JOINERS:
        return letter
    if unicodedata.category(letter) == "Zs":
        return " "
    return letter.encode("unicode_escape").decode()


def _width(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _first(text: str, limit: int) -> str:
    """Return the longest beginning of `text` that fits into `limit` columns."""
    used = 0
    for position, letter in enumerate(text[: 3 * limit]):
        used += _width(letter)
        if used > limit:
            return text[:position]
    return text[: 3 * limit]


def first_names(values: Sequence, most: int = 3, written: Callable[[object], str] = str) -> str:
    """Return the first values of a list for a message, and "..." for further ones."""
    named = [written(value) for value in values[:most]]
    if len(values) > most:
        named.append("...")
    return ", ".join(named)


def size_text(size_hw: Sequence[int]) -> str:
    """Format a size (height, width) in pixels: "640" if both are 640, else both in this order, such as "384 x 640"."""
    height, width = size_hw
    return str(height) if height == width else f"{height} x {width}"


def metric_text(value: float | None, digits: int = 3) -> str:
    """Format a metric for a line or table of text, such as 0.573; "-" if it is not defined."""
    return "-" if value is None else f"{value:.{digits}f}"


def did_you_mean(
    word: str,
    names: Iterable[str],
    *,
    otherwise: str = "",
    written: Callable[[str], str] = str,
    most: int = 1,
    cutoff: float = 0.6,
) -> str:
    """Return the end of a message about a wrong name, such as "; did you mean detr?".

    Args:
        word: the wrong name.
        names: the names that exist.
        otherwise: text after the semicolon if none of the names is similar; with "" the function then returns "".
        written: function that formats a name for the message.
        most: the largest number of names that are suggested, joined by "or".
        cutoff: similarity from 0 to 1 that a name must have to be suggested, see `difflib.get_close_matches`.
    """
    near = difflib.get_close_matches(word, names, n=most, cutoff=cutoff)
    if near:
        return f"; did you mean {' or '.join(map(written, near))}?"
    return f"; {otherwise}" if otherwise else ""
