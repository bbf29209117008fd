"""The errors that end a run on purpose; each becomes one message, an exit code and an entry in status.json."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from toolkit.base.text import lasting_console

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on that disk (space, or inodes: `df -h` and `df -i`)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it readable and writable, or give another place"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (`ulimit -n`), or lower data.workers"),
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EEXIST: "a file is where a folder would be written; remove it, or give another place",
    errno.EFBIG: "that file system or `ulimit -f` does not allow larger files; give another place",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV), "the disk or its server fails; check it"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), "it was removed or replaced; put it back"),
}
# The message of `Path.expanduser` and `Path.home`, without the path.
_NO_HOME = "Could not determine home directory"
# Out of memory, in the messages of pyarrow, torch, and libraries while they are loaded.
_NO_MEMORY = ("Cannot allocate memory", "failed to map segment")
# Out of device memory: the allocator of torch, the driver, and the libraries that allocate by themselves.
_NO_DEVICE_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


# Variables that launchers set, and that Accelerate and torch read as soon as a run starts.
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_TRUTHS = ("ACCELERATE_USE_CPU", "ACCELERATE_DEBUG_MODE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
_TRUE_OR_FALSE = ("true", "false", "1", "0", "yes", "no", "y", "n", "t", "f", "on", "off")


class BadInput(Exception):
    """An input of the user that cannot be used. Exit code 2.

    Args:
        problems: one sentence or several, each saying what is wrong, where, what was expected and what to do.

    Attributes:
        told: those of the problems that have been printed already.
    """

    exit_code = 2
    told: Sequence[str] = ()

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def untold(self) -> str:
        """Return the problems that have not been printed yet, one a line."""
        return "\n".join(problem for problem in self.problems if problem not in self.told)


def all_faults(*calls: Callable[[], Any]) -> list:
    """Call every function, even if an earlier one raises BadInput, and return their results in order.

    Raises BadInput with the problems of all calls that failed, each problem once.
    """
    made = []
    problems = []
    for call in calls:
        try:
            made.append(call())
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(dict.fromkeys(problems))
    return made


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise BadInput for environment variables with values that no launcher sets and that make libraries fail.

    A value of PYTHONWARNINGS that turns the warnings of all modules into errors is refused too, because libraries warn
    in working programs.
    """
    problems = [
        f"the environment variable {name} is {environment[name]!r}; expected a whole number, or none"
        for name in _NUMBERS
        if name in environment and not environment[name].strip().lstrip("-").isdecimal()
    ]
    problems += [
        f"the environment variable {name} is {environment[name]!r}; expected true or false, or none"
        for name in _TRUTHS
        if name in environment and environment[name].lower() not in _TRUE_OR_FALSE
    ]
    for option in environment.get("PYTHONWARNINGS", "").split(","):
        parts = (option + ":::").split(":")
        action, message, _, module = (part.strip() for part in parts[:4])
        is_error = action and "error".startswith(action)  # Python accepts the first letters too
        if is_error and not (message or module):
            problems.append(
                f"the environment variable PYTHONWARNINGS has {option.strip()!r}, and each warning of a library would "
                "end the program; expected default or ignore, a filter of one module, or none"
            )
    if problems:
        raise BadInput(problems)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that the CPU or a device ran out of memory.

    torch reports this as a plain RuntimeError, which is recognised by its message.
    """
    if isinstance(error, MemoryError):
        return True
    known = ("can't allocate memory", *_NO_MEMORY, *_NO_DEVICE_MEMORY)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in known)


def explain_error(error: Exception) -> BadInput | None:
    """Return a BadInput that explains an error of the file system, a missing home folder or lack of memory.

    Its message says what happened and what to do. Nothing is raised. Returns None for all other errors.
    """
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        reason = str(error).partition("\n")[0]
        return BadInput(
            f"out of memory{reason and f': {reason}'}. What to do: allow this process more (`ulimit -v`, "
            "the limit of the job or container), or let it need less: fewer workers, smaller batches or images."
        )
    if is_out_of_memory(error):
        reason = str(error).partition("\n")[0]
        return BadInput(
            f"out of memory: {reason}\nLower --data.batch_size_per_device and raise --optim.accumulation_steps by the "
            "same factor; in an evaluation, lower --eval.batch_size_per_device. `nvidia-smi` shows whether another "
            "program holds memory of the device."
        )
    if isinstance(error, RuntimeError) and _NO_HOME in str(error):
        return BadInput(
            "a path that begins with `~` has no meaning here: this machine does not know its user, or the user of this "
            "process has no home folder. Give the whole path, or set HOME."
        )
    if not isinstance(error, OSError) or error.errno not in _ADVICE:
        return None
    prefix = f"{error.filename}: " if error.filename else ""
    if len(prefix) >= 200:
        prefix = f"{prefix[:80]}… ({len(prefix)} characters): "
    return BadInput(f"{prefix}{os.strerror(error.errno)}. What to do: {_ADVICE[error.errno]}.")


class StoppedByGuard(Exception):
    """The end of a run by the NaN guard, before a non-finite value reached the weights. Exit code 3."""

    exit_code = 3


class Preempted(Exception):
    """The end of a run by a signal, after its state was saved; `--run.resume latest` continues it. Exit code 85."""

    exit_code = 85


class FailedElsewhere(Exception):
    """The end of a process because another process of the same run failed or hangs. Exit code 1.

    The message gives the reason of the other process.
    """

    exit_code = 1


def exit_on_bad_input(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap the `main` of a command, so that it prints expected errors as a message and returns an exit code.

    BadInput, Preempted, and every error that `explain_error` can explain, is printed to stderr; all other errors are
    raised. A `main` that returns nothing gives exit code 0. The environment is checked by `check_environment` before
    `main` is called.
    """

    @wraps(main)
    def wrapped(*arguments, **named) -> int:
        with lasting_console():
            try:
                check_environment(os.environ)
                return main(*arguments, **named) or 0
            except Preempted as error:
                print(f"stopped: {error}", file=sys.stderr)
                return error.exit_code
            except (BadInput, MemoryError, OSError, ImportError, RuntimeError) as error:
                problem = error if isinstance(error, BadInput) else explain_error(error)
                if problem is None:
                    raise
                print(f"error: {problem}", file=sys.stderr)
                return problem.exit_code

    return wrapped


GO_ON = "Then go on with --run.resume latest; earlier checkpoints are untouched."


@contextmanager
def as_sentences(then: str = GO_ON) -> Iterator[None]:
    """Raise BadInput with a sentence of advice in place of every error in the block that `explain_error` can explain.

    Other errors are raised unchanged.

    Args:
        then: sentence at the end of the message: what a person should do once the cause is gone.

    Raises:
        BadInput: the file system failed, the home folder is missing, or memory ran out.
    """
    try:
        yield
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        problem = explain_error(error)
        if problem is None:
            raise
        raise BadInput(f"{problem} {then}".rstrip()) from error
