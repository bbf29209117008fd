"""Imports of optional packages (extras of pyproject.toml), faster imports, and trust in files that name code."""

import atexit
import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from toolkit.base.errors import BadInput


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional package, and return the module.

    Args:
        module: its name, such as "onnxruntime".
        extra: the extra of this project that installs the package.
        purpose: what needs the module, in the plural, as the subject of the error message: "ONNX files".

    Raises BadInput with the command that installs the package, if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is installed, but an import of its own fails
            raise
        raise BadInput(
            f'{purpose} need {module}, which is not installed: pip install ".[{extra}]" in the folder of the toolkit'
        ) from error


def import_lightly(module: str) -> None:
    """Import torchvision or timm, but not what they import and most runs do not use: torch's compiler, and wandb.

    The compiler, `torch._dynamo`, takes nearly a second and 150 MB of every process, wandb 0.4 s. Packages that are
    imported already stay; the others are replaced while `module` is imported:

    - `torch.compiler.disable` is `disable_compiler`.
    - torchvision takes a function from `torch._dynamo.utils`: here the function imports the compiler when it is called.
    - wandb seems not to be installed.
    """
    import torch

    disable = torch.compiler.disable
    substitutes: dict[str, ModuleType | None] = {"wandb": None}
    if "torch._dynamo" not in sys.modules:
        substitutes[_COMPILER_UTILS] = _CompilerUtils(_COMPILER_UTILS)
        torch.compiler.disable = disable_compiler
    absent = [name for name in substitutes if name not in sys.modules]
    sys.modules.update({name: substitutes[name] for name in absent})
    try:
        importlib.import_module(module)
    finally:
        torch.compiler.disable = disable
        for name in absent:
            if sys.modules.get(name) is substitutes[name]:
                sys.modules.pop(name, None)


_COMPILER_UTILS = "torch._dynamo.utils"


class _CompilerUtils(ModuleType):
    """The substitute for `torch._dynamo.utils` in `import_lightly`."""

    @staticmethod
    def is_compile_supported(device_type: str) -> bool:
        return importlib.import_module(_COMPILER_UTILS).is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import machinery asks of a module
            raise AttributeError(name)
        if sys.modules.get(_COMPILER_UTILS) is self:  # another name than expected: the compiler is imported after all
            del sys.modules[_COMPILER_UTILS]
        return getattr(importlib.import_module(_COMPILER_UTILS), name)


def disable_compiler(
    function: Callable | None = None, recursive: bool = True, *, reason: str | None = None
) -> Callable:
    """Exclude a function from compilation, but import the compiler only when something is compiled.

    The arguments are those of `torch.compiler.disable`, which imports it at once.
    """
    import torch

    if function is None:
        return functools.partial(disable_compiler, recursive=recursive)
    excluded = torch._disable_dynamo(function, recursive)  # torch's own way inside torch: the first call imports it

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        chosen = excluded if torch.compiler.is_compiling() else function
        return chosen(*values, **named)

    return call


_has_frozen = False  # whether `importing` has frozen the objects of this process's first imports


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector inside the block.

    The collector walks through millions of objects again and again, which takes a quarter to half of the time of
    reading or checking a large data set.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector during seconds of imports, as `gc_disabled` does.

    The objects that exist after the first block of a process are frozen: the collector never looks at them again. Of
    later blocks only one that imports very much does so, such as transformers with torch's compiler, because the
    objects of others may soon be deleted.
    """
    global _has_frozen
    modules_before = len(sys.modules)
    with gc_disabled():
        yield
        imports_much = len(sys.modules) - modules_before > 1000
        if imports_much or not _has_frozen:  # asking `gc` for it would walk through all frozen objects
            if not _has_frozen:
                atexit.register(gc.unfreeze)  # otherwise libraries that count report the uncollected objects as leaked
            _has_frozen = True
            gc.freeze()


# ---- code that files name --------------------------------------------------------------------------------------------
# A file can name a class to import (`model.architecture`) or a script (`environment.json`), or be a program itself
# (`.pt2`). Its author chooses what that code does, so each is refused until a person names it or gives `--trust`. See
# docs/security.md.

_trusted_classes: set[str] = set()
_trusts_all = False


def trust_files(trusted: bool = True) -> None:
    """Set whether every file may name code that this process runs, or be such code itself."""
    global _trusts_all
    _trusts_all = trusted


def files_are_trusted() -> bool:
    """Return whether `trust_files` has allowed every file to name code, or to be code."""
    return _trusts_all


def trust_class(class_path: str) -> None:
    """Allow files to name this `module:Class`, because a person has named it."""
    _trusted_classes.add(class_path)


def may_import(class_path: str) -> bool:
    """Return whether a `module:Class` that a file names may be imported.

    It may after `trust_files` or after `trust_class` of this class, or if its module is imported already, because then
    the import runs no code.
    """
    return _trusts_all or class_path in _trusted_classes or class_path.partition(":")[0] in sys.modules
