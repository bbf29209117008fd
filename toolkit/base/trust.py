"""The files whose code may run here: none, before a person has allowed it.

A file can name a class to import (`model.architecture`) or a script (`environment.json`), or be a program itself
(`.pt2`). Its author chooses what that code does, so each is refused until a person names it or gives `--trust`. See
docs/security.md.
"""

import sys

TRUST = "run the code that files name or are: they are yours, or of someone you trust"  # help of the flag --trust
_named: set[str] = set()
_all = False


def trust_files(trusted: bool = True) -> None:
    """Set whether files may run code in this process."""
    global _all
    _all = trusted


def files_are_trusted() -> bool:
    return _all


def trust_class(class_path: str) -> None:
    """Record that a person named this `module:Class`: files may name it too."""
    _named.add(class_path)


def may_import(class_path: str) -> bool:
    """Return whether a `module:Class` may be imported; if its module is imported already, no code of it runs."""
    return _all or class_path in _named or class_path.partition(":")[0] in sys.modules
