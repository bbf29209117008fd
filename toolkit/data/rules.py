"""Rules of entries in columns: each is a mask, with a sentence for the entries that it catches; one loop applies them.

A valid entry costs a few operations on columns. Only entries that a rule catches are looked up in the form that they
have in the file, so that each sentence can quote them.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from toolkit.base.boxes import offsets_of
from toolkit.data.annotations import ENTRY
from toolkit.data.table import Problem


class Rule(NamedTuple):
    """A rule that an annotation or a relation must keep.

    about: the field that the rule is about. Of all rules about one field, only the first that an entry breaks is
        reported. An entry that breaks a rule about `ENTRY` is not looked at further.
    is_broken: function of the N columns that returns (N,) bool.
    sentences: function of the columns and the number of an entry that breaks the rule; none: it is dropped silently.
    severity: "error" (the entry is dropped) or "warning" (it is repaired, or kept, as the sentence says).
    """

    about: str
    is_broken: Callable[[Any], np.ndarray]
    sentences: Callable[[Any, int], Sequence[str]]
    severity: str = "error"


def noted(field: str) -> Rule:
    """Return the rule that nothing was wrong with a field when the columns were made."""

    def is_broken(columns: Any) -> np.ndarray:
        mask = np.zeros(len(columns), bool)
        mask[list(columns.faults[field])] = True
        return mask

    return Rule(field, is_broken, lambda columns, number: columns.faults[field][number])


def apply_rules(rules: Sequence[Rule], columns: Any) -> list[Problem]:
    """Return the problems of N entries, in the order of the entries, and of the rules for each entry.

    `columns.usable` (N,) becomes False where an error was found, so that a rule can look at what is left.
    """
    numbers = array("q")
    found = []
    told = {rule.about: np.zeros(len(columns), bool) for rule in (noted(ENTRY), *rules)}
    for rule in rules:
        broken = rule.is_broken(columns) & ~told[rule.about] & ~told[ENTRY]
        told[rule.about] |= broken
        if rule.severity == "error":
            columns.usable &= ~broken
        for number in np.flatnonzero(broken).tolist():
            for sentence in rule.sentences(columns, number):
                numbers.append(number)
                found.append(columns.problem(number, rule.severity, sentence))
    order = np.argsort(np.array(numbers, np.int64), kind="stable")
    return [found[at] for at in order.tolist()]


def by_image(image: np.ndarray, kept: np.ndarray, num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept rows sorted by their image, in their order within it, and the offsets of the images."""
    of_kept = image[kept]
    order = np.flatnonzero(kept)[np.argsort(of_kept, kind="stable")]
    counts = np.bincount(of_kept, minlength=num_images)
    return order, offsets_of(counts)
