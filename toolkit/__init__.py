"""The toolkit: a core, detector families, and tools around training. docs/design.md has the map.

    base/ step/ data/ models/ evaluation/ run/    the core, which imports neither detectors nor tools
    detectors/                                    a folder for each family; they import the core
    tools/                                        programs around training; they import the core
    index.py                                      the names of what lies outside the core

The names in `toolkit.index.FACE` can be imported from this package; a module is loaded when its name is first used.
"""

from typing import Any

from toolkit.index import FACE, load

__all__ = sorted(FACE)


def __getattr__(name: str) -> Any:
    if name not in FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return load(FACE[name])


def __dir__() -> list[str]:
    return [*globals(), *__all__]
