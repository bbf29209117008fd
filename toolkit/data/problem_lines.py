"""Problems of data as lines of text, where many of one kind are one line."""

import re
from collections.abc import Sequence

MAX_OF_A_KIND = 10  # problems that are told one by one
EXAMPLES = 3  # of more problems
# Of a message that tell its kind. A damaged file can have a megabyte in one word, and the search for names takes the
# square of a word's length.
MAX_CHARACTERS = 300
MEASURE = re.compile(r" by ([\d.e+-]+) px")  # how large a problem is
# In the sentence of a problem: what is in quotes or brackets, numbers, and names of files.
NAMES_AND_NUMBERS = re.compile(r"""'[^']*'|"[^"]*"|\[[^\]]*\]|\([^)]*\)|\S*\d\S*|\S+\.\w{2,5}\b""")


def kind_of(message: str) -> str:
    """Return the message of a problem without names and numbers, which is the same for all problems of one kind."""
    return NAMES_AND_NUMBERS.sub("#", message[:MAX_CHARACTERS])


def grouped(lines: Sequence[str], kinds: Sequence[str], all_are: str) -> list[str]:
    """Return the lines of problems, those of one kind together, in the order of the first ones.

    More than `MAX_OF_A_KIND` of a kind become one line with their number and the largest or first ones.

    kinds: the kind of each problem, as of `kind_of`. all_are: words on where all of them are listed.
    """
    by_kind: dict[str, list[str]] = {}
    for line, kind in zip(lines, kinds, strict=True):
        by_kind.setdefault(kind, []).append(line)
    told = []
    for alike in by_kind.values():
        told += alike if len(alike) <= MAX_OF_A_KIND else [_one_line(alike, all_are)]
    return told


def _one_line(alike: Sequence[str], all_are: str) -> str:
    measures = [MEASURE.search(line) for line in alike]
    order = "such as"
    if all(measures):
        order = "the largest"
        alike = sorted(alike, key=lambda line: -float(MEASURE.search(line)[1]))
    return f"{len(alike)} of one kind ({all_are}), {order}: {'; '.join(alike[:EXAMPLES])}"
