"""Class names as keys of metric rows and trackers."""

from collections import Counter
from collections.abc import Sequence

from toolkit.base.text import escaped


def class_keys(table) -> list[str]:
    """Return class names as used in metric names; a name that several classes share gets the original id added."""
    return metric_keys([c.name for c in table.categories], [c.id for c in table.categories])


def metric_keys(names: Sequence[str], ids: Sequence | None = None) -> list[str]:
    """Return distinct names for keys of rows and trackers.

    Each is on one line, without control characters, of 80 columns at most. Names that are then the same get their id
    added.

    ids: of the names; None: their positions.
    """
    ids = range(len(names)) if ids is None else ids
    short = [escaped(name) for name in names]
    counts = Counter(short)
    used = set()
    keys = []
    for name, id_ in zip(short, ids, strict=True):
        key = name if counts[name] == 1 else f"{name} ({escaped(id_)})"
        while key in used:  # a class that is called like another one with its id
            key += "'"
        used.add(key)
        keys.append(key)
    return keys
