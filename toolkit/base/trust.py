"""What files may run here: nothing, before a person has said so.

A file can name a class to import (`model.architecture`) or a script (`environment.json`), or be a program itself
(`.pt2`). Whoever wrote it chooses what that does, so each is refused until a person names it or gives `--trust`. See
docs/security.md.
"""

import sys

TRUST = "run the code that files name or are: they are yours, or of someone you trust"  # help of the flag --trust
_named: set[str] = set()
_all = False


def trust_files(trusted: bool = True) -> None:
    """Allows, or forbids, files to run code in this process."""
    global _all
    _all = trusted


def files_are_trusted() -> bool:
    return _all


def trust_class(class_path: str) -> None:
    """A person named this `module:Class`: files may name it too."""
    _named.add(class_path)


def may_import(class_path: str) -> bool:
    """Whether a `module:Class` may be imported; where its module already is, nothing of it runs."""
    return _all or class_path in _named or class_path.partition(":")[0] in sys.modules
