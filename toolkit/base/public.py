"""Removal of the paths of a machine from texts and settings before they are published."""

import os
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from toolkit.base.files import ROOT

# An absolute path of two parts or more, of Linux and macOS or of Windows.
_PATH = re.compile(r"""(?<![\w.~:/\\-])(/[^\s,;'"\[\](){}=/]+/[^\s,;'"\[\](){}=]*|[A-Za-z]:\\[^\s,;'"\[\](){}=]+)""")
PARTS_KEPT = 2  # last parts of a path elsewhere on the machine: folder and split, or folder and file


def without_machine(value: Any, here: str | Path = ".") -> Any:
    """Return a copy of a value in which absolute paths do not reveal the machine or its user, for publication.

    Paths below the folder `here` and below this project become relative, paths below the home folder begin with `~`,
    and all others keep their last two parts. Paths inside of longer texts, and in the values of mappings, lists and
    tuples at any depth, are replaced too. Tuples become lists, and `Path`s become texts.
    """
    if isinstance(value, Mapping):
        return {key: without_machine(each, here) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_machine(each, here) for each in value]
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return value
    return _PATH.sub(lambda match: _public_path(match[1], Path(here)), value)


def _home() -> Path | None:
    """Return the home folder of the user; None if there is none, as for a user id without a name in a container."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return None if home == Path("/") else home


def _public_path(text: str, here: Path) -> str:
    path = PureWindowsPath(text) if "\\" in text else Path(text)
    folders = (here.absolute(), Path(os.path.realpath(here)), ROOT)
    for folder in folders:
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    home = _home()
    if home is not None and path.is_relative_to(home):
        return f"~/{path.relative_to(home).as_posix()}"
    parts = [part for part in path.parts if part != path.anchor]
    return "/".join(parts[-PARTS_KEPT:])
