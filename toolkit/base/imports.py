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
            f'{purpose} need {module}, which is not installed: pip install "detection-toolkit[{extra}]"'
        ) from error


def import_without(module: str, hidden: str) -> None:
    """Import `module` as if the optional module `hidden` were not installed.

    If `hidden` is imported already, `module` can use it. Later imports of `hidden` are unaffected. torch's compiler is
    not imported for `module`, see `compiler_when_used`.
    """
    if hidden in sys.modules:
        importlib.import_module(module)
        return
    sys.modules[hidden] = None
    try:
        with compiler_when_used():
            importlib.import_module(module)
    finally:
        del sys.modules[hidden]


def import_torchvision() -> None:
    """Import torchvision as far as the toolkit always needs it, and without torch's compiler, which it seldom uses."""
    with compiler_when_used():
        importlib.import_module("torchvision.tv_tensors")


@contextlib.contextmanager
def compiler_when_used() -> Iterator[None]:
    """Let modules that are imported inside the block mention torch's compiler, `torch._dynamo`, without importing it.

    The compiler takes nearly a second and 100 MB of every process. torchvision and timm mention it in two ways, for
    which there is a substitute inside the block:

    - They exclude functions from compilation by `torch.compiler.disable`: here that imports the compiler only when
      something is compiled.
    - torchvision's `roi_align` takes a function from `torch._dynamo.utils`, for GPUs and `run.deterministic`: here the
      function imports the compiler when it is called.

    What uses the compiler in another way still imports it. If it is imported already, nothing is substituted.
    """
    import torch

    if _COMPILER_UTILS in sys.modules:
        yield
        return
    stand_in = _CompilerUtils(_COMPILER_UTILS)
    sys.modules[_COMPILER_UTILS] = stand_in
    disable = torch.compiler.disable
    torch.compiler.disable = functools.partial(_disable_when_compiling, disable)
    try:
        yield
    finally:
        torch.compiler.disable = disable
        if sys.modules.get(_COMPILER_UTILS) is stand_in:
            del sys.modules[_COMPILER_UTILS]


_COMPILER_UTILS = "torch._dynamo.utils"


class _CompilerUtils(ModuleType):
    """The stand-in of `compiler_when_used` for a module of the compiler."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import machinery asks of a module
            raise AttributeError(name)
        if name == "is_compile_supported":
            return _is_compile_supported
        return getattr(_compiler_utils(), name)


def _is_compile_supported(device_type: str) -> bool:
    return _compiler_utils().is_compile_supported(device_type)


def _compiler_utils() -> ModuleType:
    """Import the module that `_CompilerUtils` stands for."""
    if isinstance(sys.modules.get(_COMPILER_UTILS), _CompilerUtils):
        del sys.modules[_COMPILER_UTILS]
    return importlib.import_module(_COMPILER_UTILS)


def _disable_when_compiling(
    disable: Callable, function: Callable | None = None, recursive: bool = True, **options: Any
) -> Callable:
    """Do what `disable`, torch.compiler.disable, does to a function, but import the compiler only when it is used."""
    import torch

    if function is None or "torch._dynamo" in sys.modules:
        return disable(function, recursive, **options)
    disabled = torch._disable_dynamo(function, recursive)  # torch's own way for functions inside torch

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return disabled(*values, **named)
        return function(*values, **named)

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
    later blocks only one that imports very much does so, such as transformers with torch's compiler: otherwise the
    objects may be in use for a while only.
    """
    global _has_frozen
    modules_before = len(sys.modules)
    with gc_disabled():
        with compiler_when_used():
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

TRUST_HELP = "run the code that files name or are: they are yours, or of someone you trust"  # help of the flag --trust
_trusted_classes: set[str] = set()
_trusts_all = False


def trust_files(trusted: bool = True) -> None:
    """Set whether every file may name code that this process runs, or be such code itself."""
    global _trusts_all
    _trusts_all = trusted


def files_are_trusted() -> bool:
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
